//! The training loop from within: its steps by a scripted source, the text source, resuming, learning.

mod common;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::{assert_close, fixture};
use gradprism::config::Config;
use gradprism::objective;
use gradprism::policy::Policy;
use gradprism::rollout::{Batch, Content, Group, Trajectory};
use gradprism::trainer::checkpoint::latest;
use gradprism::trainer::{
    Observer, Outcome, SampledGroup, Silent, Source, SourceRequest, StepRecord, TextSource,
    Trainer, Visit,
};
use tch::{Kind, Tensor};

/// Gives groups of scripted rewards, one after the other; the last again and again.
struct Scripted {
    rewards: Vec<[f64; 2]>,
    old_logprob: f64,
    given: usize,
    /// Groups of every request.
    requests: Arc<Mutex<Vec<usize>>>,
}

impl Source for Scripted {
    fn sample(
        &mut self,
        policy: &Policy,
        request: &SourceRequest,
    ) -> gradprism::Result<Vec<SampledGroup>> {
        assert_eq!(policy.choices(), 16);
        self.requests.lock().unwrap().push(request.visits.len());
        let mut group = |visit: &Visit| {
            let rewards = self.rewards[self.given.min(self.rewards.len() - 1)];
            self.given += 1;
            let trajectory = |(index, reward): (usize, &f64)| Trajectory {
                line: index + 1,
                id: None,
                content: Content::Tokens {
                    prompt_ids: vec![1, 2],
                    response_ids: vec![3 + index as i64, 4],
                },
                mask: vec![true, true],
                reward: *reward,
                token_rewards: None,
                old_logprobs: Some(vec![self.old_logprob; 2]),
                ref_logprobs: None,
                sampler_logprobs: None,
                values: None,
                reasoning: None,
            };
            let trajectories: Vec<Trajectory> =
                rewards.iter().enumerate().map(trajectory).collect();
            let outcomes = vec![Outcome::default(); trajectories.len()];
            let group = Group { id: visit.visit.to_string(), trajectories };
            SampledGroup { group, outcomes }
        };
        Ok(request.visits.iter().map(&mut group).collect())
    }
}

/// Remembers the steps, and asks to stop after some, if so many are named.
#[derive(Default)]
struct Records(Vec<StepRecord>, Option<usize>);

impl Observer for Records {
    fn step(&mut self, record: &StepRecord) -> gradprism::Result<ControlFlow<()>> {
        self.0.push(record.clone());
        Ok(match self.1 {
            Some(count) if count == self.0.len() => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        })
    }
}

/// A configuration on a fixture of vocabulary 16, in float64.
fn scripted_config(yaml: &str) -> Config {
    let text = format!(
        "policy: {{checkpoint: {}}}\ndecomposition: {{every: 0}}\ndiagnostics: {{every: 0}}\n{yaml}",
        fixture("double.pt").display()
    );
    Config::parse(&text, "test", Path::new("/"), &[]).unwrap()
}

fn scripted(yaml: &str, rewards: &[[f64; 2]]) -> (Trainer, Arc<Mutex<Vec<usize>>>) {
    common::one_thread();
    let requests = Arc::new(Mutex::new(Vec::new()));
    let source = Scripted {
        rewards: rewards.to_vec(),
        old_logprob: -2.8,
        given: 0,
        requests: Arc::clone(&requests),
    };
    (Trainer::with_source(scripted_config(yaml), Box::new(source), None).unwrap(), requests)
}

fn weights(policy: &Policy) -> Vec<Vec<f64>> {
    let of = |tensor: &Tensor| {
        Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
    };
    policy.parameters().iter().map(|parameter| of(&parameter.tensor)).collect()
}

const EQUAL: [f64; 2] = [1.0, 1.0];
const MIXED: [f64; 2] = [0.0, 1.0];

#[test]
fn dynamic_sampling_keeps_what_it_has_and_ends_at_its_bound() {
    let rewards = [EQUAL, MIXED, EQUAL, MIXED, MIXED, EQUAL, EQUAL];
    for on_limit in ["train", "skip", "stop"] {
        let yaml = format!(
            "algorithm: {{preset: dapo}}\nfilter: {{strategy: none}}\n\
             sampling: {{dynamic: {{rounds: 3, on_limit: {on_limit}}}}}\n\
             training: {{steps: 1, groups: 4, group_size: 2}}"
        );
        let (trainer, requests) = scripted(&yaml, &rewards);
        let mut records = Records::default();
        let report = trainer.run(&mut records).unwrap();
        // Of four groups two are accepted, of two more one, of one more none.
        assert_eq!(*requests.lock().unwrap(), [4, 2, 1], "{on_limit}");
        let record = &records.0[0];
        assert_eq!((record.sampled.groups, record.sampled.left_out), (7, 4));
        assert_eq!(record.sampled.rounds, 3);
        // Over all that was sampled: three mixed groups of mean 1/2, four of 1.
        assert_close(record.sampled.reward_mean, 11.0 / 14.0, 1e-15, 1.0, "the mean reward");
        assert_eq!(record.kept.groups, if on_limit == "train" { 3 } else { 0 });
        assert_eq!(record.update.is_some(), on_limit == "train");
        let reason = report.stopped.unwrap_or_default();
        assert_eq!(reason.contains("3 of 4 groups"), on_limit == "stop", "{reason}");
    }
}

#[test]
fn a_skipped_step_leaves_its_groups_to_the_next_also_over_a_restart() {
    common::one_thread();
    let yaml = "algorithm: {preset: dapo}\nfilter: {strategy: none}\n\
                sampling: {dynamic: {rounds: 1, on_limit: skip}}\n\
                training: {steps: 3, groups: 3, group_size: 2}\n\
                optimizer: {learning_rate: 0.1}\ncheckpoint: {every: 1}";
    // Two of three groups are accepted; the second step asks for one more and gets none; the third does.
    let rewards = [[0.7, 0.1], EQUAL, [0.0, 0.3], EQUAL, MIXED];
    let run = |folder: &Path, given: usize, stop_after: Option<usize>, changed: &str| {
        let from = latest(folder).unwrap().map(|found| found.checkpoint);
        let requests = Arc::new(Mutex::new(Vec::new()));
        let source = Scripted {
            rewards: rewards.to_vec(),
            old_logprob: -2.8,
            given,
            requests: Arc::clone(&requests),
        };
        let mut trainer = Trainer::with_source(
            scripted_config(&yaml.replace("rounds: 1", changed)),
            Box::new(source),
            from.as_ref(),
        )
        .unwrap();
        trainer.save_to(folder).unwrap();
        let mut records = Records(Vec::new(), stop_after);
        trainer.run(&mut records).unwrap();
        let requests = requests.lock().unwrap().clone();
        (requests, records.0)
    };
    let saved = |folder: &Path| {
        let checkpoint = latest(folder).unwrap().unwrap().checkpoint;
        let policy = checkpoint.file("policy.pt").unwrap();
        weights(&Policy::load(&policy, &Default::default()).unwrap())
    };
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (requests, records) = run(whole.path(), 0, None, "rounds: 1");
    assert_eq!(requests, [3, 1, 1]);
    let groups = |record: &StepRecord| {
        let sampled = &record.sampled;
        (sampled.carried, sampled.groups, sampled.left_out, record.kept.groups)
    };
    assert_eq!(
        records.iter().map(groups).collect::<Vec<_>>(),
        [(0, 3, 1, 0), (2, 1, 1, 0), (2, 1, 0, 3)]
    );
    // What is carried was counted by the step that sampled it.
    assert_eq!((records[1].sampled.reward_mean, records[2].sampled.tokens), (1.0, 4));
    let updates = records.iter().map(|record| record.update.as_ref().map(|update| update.updates));
    assert_eq!(updates.collect::<Vec<_>>(), [None, None, Some(1)]);

    run(parts.path(), 0, Some(2), "rounds: 1");
    let (requests, records) = run(parts.path(), 4, None, "rounds: 1");
    assert_eq!((requests, groups(&records[0])), (vec![1], (2, 1, 0, 3)));
    assert_eq!(saved(parts.path()), saved(whole.path()));
    assert_ne!(saved(whole.path()), weights(scripted(yaml, &rewards).0.policy()));
    // What was sampled under other settings is not mixed in.
    let other = tempfile::tempdir().unwrap();
    run(other.path(), 0, Some(2), "rounds: 1");
    let (requests, records) = run(other.path(), 4, None, "rounds: 2");
    assert_eq!((requests, groups(&records[0])), (vec![3], (0, 3, 0, 3)));
}

#[test]
fn dynamic_sampling_stops_at_enough_groups() {
    let yaml = "algorithm: {preset: dapo}\ntraining: {steps: 2, groups: 2, group_size: 2}";
    let (trainer, requests) = scripted(yaml, &[EQUAL, MIXED, EQUAL, MIXED, MIXED]);
    trainer.run(&mut Silent).unwrap();
    assert_eq!(*requests.lock().unwrap(), [2, 1, 1, 2]);
}

#[test]
fn a_filter_that_keeps_nothing_leaves_the_weights_alone_and_ends_the_run() {
    let yaml = "training: {steps: 9, groups: 2, group_size: 2}\n\
                optimizer: {learning_rate: 0.1}\nearly_stop: {empty_filters: {filters: 3}}";
    let folder = tempfile::tempdir().unwrap();
    let (mut trainer, _) = scripted(yaml, &[EQUAL]);
    trainer.save_to(folder.path()).unwrap();
    let before = weights(trainer.policy());
    let report = trainer.run(&mut Silent).unwrap();
    assert_eq!((report.steps, report.updates), (3, 0));
    assert_eq!(report.stopped.as_deref(), Some("3 filters in a row kept no group"));
    let checkpoint = latest(folder.path()).unwrap().unwrap().checkpoint;
    let saved = Policy::load(&checkpoint.file("policy.pt").unwrap(), &Default::default()).unwrap();
    assert_eq!(weights(&saved), before);
}

#[test]
fn a_refreshed_reference_is_the_policy_itself() {
    let kl = |refresh: &str| -> Vec<f64> {
        let yaml = format!(
            "algorithm: {{kl: {{coef: 0.1}}}}\noptimizer: {{learning_rate: 0.01}}\n\
             training: {{steps: 5, groups: 2, group_size: 2{refresh}}}"
        );
        let mut records = Records::default();
        scripted(&yaml, &[MIXED]).0.run(&mut records).unwrap();
        records.0.iter().map(|record| record.update.as_ref().unwrap().kl).collect()
    };
    let (never, every_second) = (kl(""), kl(", refresh_reference: 2"));
    assert_close(never[0], 0.0, 1e-12, 1.0, "at the initial weights");
    assert!(never[1..].iter().all(|kl| *kl > 1e-3), "{never:?}");
    for step in [0, 2, 4] {
        assert_close(every_second[step], 0.0, 1e-12, 1.0, "after a refreshment");
    }
    assert_eq!(every_second[1], never[1]);
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_and_spares_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let yaml = "training: {steps: 2, groups: 2, group_size: 2}\ncheckpoint: {every: 1}";
    let (mut trainer, _) = scripted(yaml, &[MIXED]);
    trainer.save_to(folder.path()).unwrap();
    trainer.run(&mut Silent).unwrap();
    let before = latest(folder.path()).unwrap().unwrap().checkpoint;

    let config = scripted_config("training: {steps: 3, groups: 2, group_size: 2}");
    let source = Scripted {
        rewards: vec![MIXED],
        old_logprob: f64::NEG_INFINITY,
        given: 0,
        requests: Arc::default(),
    };
    let mut trainer = Trainer::with_source(config, Box::new(source), Some(&before)).unwrap();
    trainer.save_to(folder.path()).unwrap();
    let error = trainer.run(&mut Silent).unwrap_err().to_string();
    assert!(error.contains("a log-ratio to old_logprobs is not finite"), "{error}");
    assert_eq!(latest(folder.path()).unwrap().unwrap().checkpoint, before);
}

#[test]
fn weights_that_have_diverged_are_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let config = |rate: &str| {
        scripted_config(&format!(
            "training: {{steps: 2, groups: 2, group_size: 2, epochs: 1}}\n\
             checkpoint: {{every: 1}}\noptimizer: {{learning_rate: {rate}, max_norm: none}}"
        ))
    };
    let source =
        || Scripted { rewards: vec![MIXED], old_logprob: -2.8, given: 0, requests: Arc::default() };
    let mut trainer = Trainer::with_source(config("0.01"), Box::new(source()), None).unwrap();
    trainer.save_to(folder.path()).unwrap();
    trainer.run(&mut Records(Vec::new(), Some(1))).unwrap();
    let before = latest(folder.path()).unwrap().unwrap().checkpoint;

    let mut trainer =
        Trainer::with_source(config("0.01"), Box::new(source()), Some(&before)).unwrap();
    trainer.save_to(folder.path()).unwrap();
    // Nothing in the step reads the weights again after the update.
    struct Spoiler(Tensor);
    impl Observer for Spoiler {
        fn step(&mut self, _: &StepRecord) -> gradprism::Result<ControlFlow<()>> {
            let _ = tch::no_grad(|| self.0.view([-1]).get(0).fill_(f64::NAN));
            Ok(ControlFlow::Continue(()))
        }
    }
    let weight = trainer.policy().parameters()[0].tensor.shallow_clone();
    let error = trainer.run(&mut Spoiler(weight)).unwrap_err().to_string();
    assert!(error.contains("after the update is not finite"), "{error}");
    assert!(error.contains("optimizer.learning_rate"), "{error}");
    assert_eq!(latest(folder.path()).unwrap().unwrap().checkpoint, before);
}

#[test]
fn a_run_keeps_to_its_reference_policy() {
    let folder = tempfile::tempdir().unwrap();
    let reference = folder.path().join("reference.pt");
    std::fs::copy(fixture("double.pt"), &reference).unwrap();
    let yaml = "algorithm: {kl: {coef: 0.1}}\ntraining: {steps: 1, groups: 2, group_size: 2}";
    let config = || {
        let mut config = scripted_config(yaml);
        config.policy.reference = Some(reference.clone());
        config
    };
    let source =
        || Scripted { rewards: vec![MIXED], old_logprob: -2.8, given: 0, requests: Arc::default() };
    let checkpoints = folder.path().join("checkpoints");
    let mut trainer = Trainer::with_source(config(), Box::new(source()), None).unwrap();
    trainer.save_to(&checkpoints).unwrap();
    trainer.run(&mut Silent).unwrap();
    let checkpoint = latest(&checkpoints).unwrap().unwrap().checkpoint;
    assert!(Trainer::with_source(config(), Box::new(source()), Some(&checkpoint)).is_ok());
    // The policy after training instead of before.
    std::fs::copy(checkpoint.file("policy.pt").unwrap(), &reference).unwrap();
    let error = Trainer::with_source(config(), Box::new(source()), Some(&checkpoint)).err();
    let error = error.unwrap().to_string();
    assert!(error.contains("reference.pt") && error.contains("another file"), "{error}");
}

#[test]
fn the_last_step_is_validated_and_the_best_validation_is_saved() {
    let folder = tempfile::tempdir().unwrap();
    // Validations take one group each, in turn with the two of a step.
    let rewards = [MIXED, MIXED, [0.5, 0.7], MIXED, MIXED, [0.1, 0.1], EQUAL, EQUAL, [0.2, 0.2]];
    let yaml = "training: {steps: 9, groups: 2, group_size: 2}\n\
                validation: {every: 1, groups: 1, group_size: 2}\n\
                checkpoint: {every: 100, keep: 1, best: true}\n\
                early_stop: {empty_filters: {filters: 1}}";
    let (mut trainer, _) = scripted(yaml, &rewards);
    trainer.save_to(folder.path()).unwrap();
    let report = trainer.run(&mut Silent).unwrap();
    assert_eq!((report.steps, report.validation.unwrap().reward_mean), (3, 0.2));
    let mut steps: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    steps.sort();
    assert_eq!(steps, ["000001-step-1", "000002-step-3"]);
    // Without a rule's end the interval decides.
    let (trainer, _) = scripted(&yaml.replace("every: 1, groups", "every: 4, groups"), &[EQUAL]);
    let report = trainer.run(&mut Silent).unwrap();
    assert_eq!((report.steps, report.validation.is_some()), (1, true));
}

#[test]
fn what_a_source_must_not_give_is_refused() {
    let run = |rewards: [f64; 2]| {
        let yaml = "training: {steps: 1, groups: 1, group_size: 2}";
        scripted(yaml, &[rewards]).0.run(&mut Silent).unwrap_err().to_string()
    };
    let error = run([0.0, f64::NAN]);
    assert!(error.contains("expected finite rewards, found NaN in group `0`"), "{error}");
}

/// A configuration of `configs`, smaller, with other settings.
fn shipped(name: &str, overrides: &[&str]) -> Config {
    let overrides: Vec<String> =
        overrides.iter().map(|text| (*text).to_owned()).chain(["threads=1".into()]).collect();
    common::one_thread();
    Config::load(&common::config(name), &overrides).unwrap()
}

fn lake_source(overrides: &[&str]) -> (TextSource, Policy) {
    let config = shipped("frozen_lake.yaml", overrides).resolve_training().unwrap();
    let sections = config.train_sections();
    let source = TextSource::new(&sections.environment.unwrap(), &sections.sampling, 1.0).unwrap();
    let checkpoint = common::config("train/frozen_lake.pt");
    let options = config.policy_options(tch::Device::Cpu).unwrap();
    (source, Policy::load(&checkpoint, &options).unwrap())
}

fn visits(visits: &[u64]) -> SourceRequest {
    let visits = visits.iter().map(|visit| Visit { task: 7, visit: *visit }).collect();
    SourceRequest { visits, group_size: 3, greedy: false }
}

#[test]
fn a_step_without_any_reasoning_is_a_collapse_of_the_form() {
    let valid = |tags: &str| {
        let tags = format!("environment.rules.tags={tags}");
        let settings = [
            tags.as_str(),
            "diagnostics.every=1",
            "decomposition.every=0",
            "validation.every=0",
            "training.steps=1",
            "training.groups=2",
            "training.group_size=2",
        ];
        let mut records = Records::default();
        let trainer = Trainer::prepare(shipped("frozen_lake.yaml", &settings), None).unwrap();
        trainer.run(&mut records).unwrap();
        records.0[0].reasoning.unwrap().valid_share
    };
    // The shipped policy writes no tags. Where none are asked for, the whole response is the span.
    assert_eq!(valid("think_answer"), 0.0);
    assert_eq!(valid("none"), 1.0);
}

#[test]
fn a_tokenizer_that_loses_the_prompt_is_told_once() {
    let tokenizer = common::config("train/bandit.tokenizer.json");
    let foreign = format!("sampling.tokenizer={}", tokenizer.display());
    for (settings, expected) in [(vec![foreign.as_str()], 1), (Vec::new(), 0)] {
        let (mut source, policy) = lake_source(&settings);
        source.sample(&policy, &visits(&[0, 1])).unwrap();
        let warnings = source.warnings();
        assert_eq!(warnings.len(), expected, "{warnings:?}");
        assert!(warnings.iter().all(|it| it.contains("is it the policy's?")), "{warnings:?}");
    }
}

#[test]
fn turns_are_sampled_and_observations_are_read() {
    let (mut source, policy) = lake_source(&["sampling.cache=true"]);
    let groups = source.sample(&policy, &visits(&[0, 1, 2])).unwrap();
    let rows =
        || groups.iter().flat_map(|group| group.group.trajectories.iter().zip(&group.outcomes));
    assert!(rows().any(|(_, outcome)| outcome.turns > 3), "several turns");
    for (row, outcome) in rows() {
        let Content::Tokens { prompt_ids, response_ids } = &row.content else { panic!() };
        // A map of 4 lines and a colon; then a move, and the same after a line break.
        assert_eq!(prompt_ids.len(), 20);
        assert_eq!(response_ids.len(), outcome.turns + 21 * (outcome.turns - 1));
        let sampled: Vec<usize> = (0..row.mask.len()).filter(|at| row.mask[*at]).collect();
        let expected: Vec<usize> = (0..outcome.turns).map(|turn| 22 * turn).collect();
        assert_eq!(sampled, expected);
        let old = row.old_logprobs.as_ref().unwrap();
        let rewards = row.token_rewards.as_ref().unwrap();
        assert_eq!(rewards.iter().sum::<f64>(), row.reward);
        for at in (0..row.mask.len()).filter(|at| !row.mask[*at]) {
            assert_eq!((old[at], rewards[at]), (0.0, 0.0));
        }
        // What was kept of the sampler is what the policy says of the whole.
        let logits = policy.batch_logits(&[row]).unwrap();
        let logp = objective::gather(&objective::log_probs(&logits.logits, 1.0), &logits.actions);
        let logp: Vec<f64> = Vec::try_from(logp.unwrap().to_kind(Kind::Double)).unwrap();
        for at in sampled {
            assert_close(old[at], logp[at], 1e-5, 1.0, "a log-probability");
        }
        let (prompt, response) = outcome.text.as_ref().unwrap();
        assert!(prompt.contains('P') && prompt.ends_with(':'), "{prompt}");
        assert_eq!(response.matches(':').count(), outcome.turns - 1);
    }
}

#[test]
fn a_trajectory_does_not_depend_on_its_company() {
    let (mut source, policy) = lake_source(&[]);
    let together = source.sample(&policy, &visits(&[4, 5, 6])).unwrap();
    for (index, visit) in [4, 5, 6].into_iter().enumerate() {
        let alone = source.sample(&policy, &visits(&[visit])).unwrap();
        for (left, right) in
            alone[0].group.trajectories.iter().zip(&together[index].group.trajectories)
        {
            assert_eq!((&left.content, &left.mask), (&right.content, &right.mask));
        }
    }
    let actions = |group: &SampledGroup| -> Vec<Content> {
        group.group.trajectories.iter().map(|row| row.content.clone()).collect()
    };
    assert_ne!(actions(&together[0]), actions(&together[1]), "another visit is other luck");
    // Without chance there is one way for all visits.
    let greedy = SourceRequest { greedy: true, ..visits(&[4, 5]) };
    let greedy = source.sample(&policy, &greedy).unwrap();
    assert_eq!(actions(&greedy[0]), actions(&greedy[1]));
    assert_eq!(actions(&greedy[0])[0], actions(&greedy[0])[2]);
}

#[test]
fn a_trajectory_ends_where_there_is_no_room_for_a_turn() {
    // A prompt of 20, a move, 21 of a map, a move: 43; another map and move would need 65.
    let (mut source, policy) = lake_source(&["sampling.context_length=64"]);
    let groups = source.sample(&policy, &visits(&[0, 1])).unwrap();
    let outcomes: Vec<&Outcome> = groups.iter().flat_map(|group| &group.outcomes).collect();
    assert!(outcomes.iter().all(|outcome| outcome.turns <= 2));
    assert!(outcomes.iter().any(|outcome| outcome.truncated && outcome.turns == 2));
    let (mut source, policy) = lake_source(&["sampling.context_length=20"]);
    let error = source.sample(&policy, &visits(&[0])).unwrap_err().to_string();
    let expected = "expected room for a prompt of 20 tokens and a response of up to 1 in sampling.context_length, found 20";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn an_overlong_penalty_is_taken_off_the_last_token() {
    let overlong = "sampling.overlong={limit: 4, buffer: 2, factor: 0.5}";
    let ((mut with, policy), (mut without, _)) = (lake_source(&[overlong]), lake_source(&[]));
    let (with, without) = (
        with.sample(&policy, &visits(&[0, 1])).unwrap(),
        without.sample(&policy, &visits(&[0, 1])).unwrap(),
    );
    let rows = |groups: &[SampledGroup]| -> Vec<Trajectory> {
        groups.iter().flat_map(|group| group.group.trajectories.clone()).collect()
    };
    for (with, without) in rows(&with).iter().zip(&rows(&without)) {
        // 0 up to 2 tokens, half of the factor at 3, all of it from 4 on.
        let penalty = 0.5 * ((without.sampled() as f64 - 2.0) / 2.0).clamp(0.0, 1.0);
        assert_close(with.reward, without.reward - penalty, 1e-15, 1.0, "the reward");
        let last = |row: &Trajectory| *row.token_rewards.as_ref().unwrap().last().unwrap();
        assert_close(last(with), last(without) - penalty, 1e-15, 1.0, "the last token");
    }
}

const WORDS: [&str; 16] = [
    "<unk>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "Left",
    "Down",
    "Right",
    "Up",
    "P",
    "_",
    "O",
    "G",
    "a",
    "b",
    "Stop",
];

/// A lake for a policy of 16 tokens that says anything, in the form of think and answer.
fn babbling_source(folder: &Path, settings: &str) -> (TextSource, Policy) {
    common::one_thread();
    let vocabulary: serde_json::Map<String, serde_json::Value> =
        WORDS.iter().enumerate().map(|(id, word)| ((*word).to_owned(), id.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "post_processor": null, "decoder": null,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "</?\\w+>|Left|Down|Right|Up|Stop|[PO_Gab]"},
            "behavior": "Removed", "invert": true
        },
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let yaml = format!(
        "policy: {{checkpoint: {}}}\n\
         environment: {{name: frozen_lake, rules: {{message: bare, max_turns: 1, {settings}}}}}\n\
         sampling: {{tokenizer: tokenizer.json, max_tokens: 12, stop: [</answer>, Stop Stop]}}",
        fixture("double.pt").display()
    );
    let config = Config::parse(&yaml, "test", folder, &[]).unwrap().resolve_training().unwrap();
    let sections = config.train_sections();
    let source = TextSource::new(&sections.environment.unwrap(), &sections.sampling, 1.0).unwrap();
    (source, Policy::load(&fixture("double.pt"), &Default::default()).unwrap())
}

#[test]
fn reasoning_lies_between_its_tags_and_a_stop_may_close_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let (mut source, policy) = babbling_source(folder.path(), "tags: think_answer");
    let request = SourceRequest { group_size: 1500, ..visits(&[0, 1, 2, 3]) };
    let groups = source.sample(&policy, &request).unwrap();
    let (mut well_formed, mut stopped) = (0, 0);
    for (row, outcome) in
        groups.iter().flat_map(|it| it.group.trajectories.iter().zip(&it.outcomes))
    {
        let ids = row.content.actions();
        let word = |id: &i64| WORDS[*id as usize];
        // Nothing is sampled after a stop.
        let stop = ids.iter().position(|id| word(id) == "</answer>").into_iter();
        let twice = ids.windows(2).position(|pair| pair.iter().all(|id| word(id) == "Stop"));
        let end = stop.chain(twice.map(|at| at + 1)).min();
        assert_eq!(ids.len(), end.map_or(12, |at| at + 1));
        stopped += usize::from(twice.is_some());
        // The first <think> that </think> <answer> follow, and later </answer>.
        let find = |name: &str, from: usize| (from..ids.len()).find(|at| word(&ids[*at]) == name);
        let expected = find("<think>", 0).and_then(|first| {
            let closed = (first + 1..ids.len().saturating_sub(1))
                .find(|at| word(&ids[*at]) == "</think>" && word(&ids[*at + 1]) == "<answer>")?;
            find("</answer>", closed + 2)?;
            Some((first + 1, closed))
        });
        assert_eq!(outcome.malformed, usize::from(expected.is_none()), "{ids:?}");
        let spans: Option<Vec<(usize, usize)>> =
            expected.filter(|(first, last)| last > first).map(|span| vec![span]);
        assert_eq!(row.reasoning, spans, "{ids:?}");
        well_formed += usize::from(expected.is_some());
    }
    assert!(well_formed > 2 && stopped > 2, "{well_formed} of the form, {stopped} by a text");
}

#[test]
fn a_stop_is_no_part_of_an_answer_without_tags() {
    let folder = tempfile::tempdir().unwrap();
    let settings = "tags: none, separator: G, max_actions_per_turn: 9";
    let (mut source, policy) = babbling_source(folder.path(), settings);
    let request = SourceRequest { group_size: 400, ..visits(&[0, 1]) };
    let groups = source.sample(&policy, &request).unwrap();
    let mut valid = 0;
    for (row, outcome) in
        groups.iter().flat_map(|it| it.group.trajectories.iter().zip(&it.outcomes))
    {
        let words: Vec<&str> = row.content.actions().iter().map(|id| WORDS[*id as usize]).collect();
        if words.len() == 2 && words[1] == "</answer>" {
            let is_move = ["Left", "Down", "Right", "Up"].contains(&words[0]);
            let is_empty = words[0] == "G";
            assert_eq!(outcome.invalid_actions, usize::from(!is_move && !is_empty), "{words:?}");
            valid += usize::from(is_move);
        }
    }
    assert!(valid > 0, "some are a move and a stop");
}

/// Everything that goes from step to step, in a run small enough for a test.
const SMALL: [&str; 14] = [
    "algorithm.preset=ppo",
    "algorithm.kl.coef=0.01",
    "critic.warmup_steps=1",
    "training.groups=4",
    "training.group_size=4",
    "training.steps=7",
    "training.refresh_reference=2",
    "filter.mini_batch_size=2",
    "filter.adaptive={low: 0.1, high: 1.0, momentum: 0.5}",
    "decomposition.every=3",
    "diagnostics.every=2",
    "validation.every=2",
    "validation.groups=3",
    "checkpoint.every=1",
];

#[test]
fn a_resumed_run_goes_the_way_of_the_undisturbed_one() {
    let critic = format!("critic.checkpoint={}", common::config("train/bandit_value.pt").display());
    let run = |folder: &Path, stop_after: Option<usize>, from: Option<&Path>| {
        let mut settings = SMALL.to_vec();
        settings.push(critic.as_str());
        let from = from.map(|folder| latest(folder).unwrap().unwrap().checkpoint);
        let mut trainer =
            Trainer::prepare(shipped("bandit.yaml", &settings), from.as_ref()).unwrap();
        trainer.save_to(folder).unwrap();
        let mut records = Records(Vec::new(), stop_after);
        let report = trainer.run(&mut records).unwrap();
        assert_eq!(report.partial, stop_after.is_some());
        let without_time = |mut record: StepRecord| {
            record.time = Default::default();
            serde_json::to_string(&record).unwrap()
        };
        records.0.into_iter().map(without_time).collect::<Vec<String>>()
    };
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let expected = run(whole.path(), None, None);
    let mut found = run(parts.path(), Some(3), None);
    found.extend(run(parts.path(), None, Some(parts.path())));
    assert_eq!(found.len(), 7);
    for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found, expected, "step {step}");
    }
    let files = |folder: &Path| {
        let checkpoint = latest(folder).unwrap().unwrap().checkpoint;
        assert_eq!(checkpoint.step(), 7);
        let names = [
            "policy.pt",
            "reference.pt",
            "critic.pt",
            "optimizer.safetensors",
            "critic_optimizer.safetensors",
            "random.safetensors",
            "state.json",
        ];
        names.map(|name| std::fs::read(checkpoint.file(name).unwrap()).unwrap())
    };
    assert!(files(whole.path()) == files(parts.path()), "bit for bit");
}

#[test]
fn the_shipped_bandit_learns() {
    let settings = ["training.steps=16", "validation.every=16", "decomposition.every=8"];
    let report = Trainer::prepare(shipped("bandit.yaml", &settings), None)
        .unwrap()
        .run(&mut Silent)
        .unwrap();
    // 0.1 + 0.15·p is nine tenths of 0.25 where the high arm is pulled in five of six cases.
    let success = report.validation.unwrap().success.unwrap();
    assert!(success >= 5.0 / 6.0, "the high arm is pulled in {success} of all cases");
}

#[test]
fn sampled_trajectories_are_rollouts_that_are_read_again() {
    let (mut source, policy) = lake_source(&[]);
    let groups = source.sample(&policy, &visits(&[0, 1])).unwrap();
    let batch =
        Batch { step: Some(3), groups: groups.into_iter().map(|group| group.group).collect() };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rollouts.jsonl");
    let lines: Vec<serde_json::Value> = batch
        .groups
        .iter()
        .flat_map(|group| {
            group.trajectories.iter().map(|row| {
                let line = gradprism::rollout::RolloutLine::new(batch.step, &group.id, row);
                serde_json::to_value(line).unwrap()
            })
        })
        .collect();
    common::write_lines(&path, &lines);
    let mut read = gradprism::rollout::read(&path, &Config::default().read_options()).unwrap();
    let found = read.batches.remove(0);
    assert_eq!(found.step, Some(3));
    for (found, group) in found.groups.iter().zip(&batch.groups) {
        assert_eq!(found.id, group.id);
        for (found, row) in found.trajectories.iter().zip(&group.trajectories) {
            assert_eq!(*found, Trajectory { line: found.line, ..row.clone() });
        }
    }
}
