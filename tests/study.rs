//! A study from end to end.

mod common;

use std::path::Path;

use common::{StudyFolder, assert_close, fixture, gradprism, lines, stderr, synthetic_batch};
use gradprism::rollout::{Batch, Content};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

const KEYS: [&str; 28] = [
    "step",
    "group_id",
    "group_size",
    "tokens",
    "reward_mean",
    "reward_variance",
    "task_norm",
    "signal_sq",
    "signal_sq_se",
    "signal_p",
    "noise_sq",
    "noise_sq_se",
    "snr",
    "snr_se",
    "sketch_se",
    "policy_gradient_sq",
    "kl_unit_norm",
    "entropy_unit_norm",
    "reg_norm",
    "total_norm",
    "dominance",
    "cos_task_reg",
    "cos_kl_entropy",
    "cos_task_total",
    "trajectory_task_norms",
    "bound",
    "bound_slack",
    "kept",
];

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("expected a number, found {value}"))
}

#[track_caller]
fn run(folder: &StudyFolder, arguments: &[&str]) {
    let output = folder.run(arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

fn gpt2(groups: usize, yaml: &str) -> StudyFolder {
    StudyFolder::new(&fixture("gpt2.pt"), &lines(&synthetic_batch(groups, 1)), yaml)
}

#[test]
fn the_records_are_consistent() {
    let folder = gpt2(6, "algorithm: {entropy_coef: 0.01, kl: {coef: 0.1}}\n");
    run(&folder, &[]);
    let prompts = folder.prompts();
    assert_eq!(prompts.len(), 6);
    for group in &prompts {
        let object = group.as_object().unwrap();
        for key in KEYS {
            assert!(object.contains_key(key), "{key} is missing");
        }
        assert_eq!(object.len(), KEYS.len(), "{:?}", object.keys());
        let (task, signal, noise) =
            (number(&group["task_norm"]), number(&group["signal_sq"]), number(&group["noise_sq"]));
        assert_close(signal + noise, task * task, 1e-9, task * task + 1e-30, "signal² + noise²");
        let norms: Vec<f64> =
            group["trajectory_task_norms"].as_array().unwrap().iter().map(number).collect();
        assert_eq!(norms.len(), 4);
        assert!(task <= norms.iter().sum::<f64>() * (1.0 + 1e-9));
        let reg = number(&group["reg_norm"]);
        if signal > 0.0 {
            let snr = signal.sqrt() / (noise.max(0.0).sqrt() + reg);
            assert_close(number(&group["snr"]), snr, 1e-12, snr, "snr");
        } else {
            assert_eq!(group["snr"], 0.0);
            assert!(group["snr_se"].is_null());
        }
        let cosine = group["cos_task_reg"].as_f64();
        if let Some(cosine) = cosine {
            let total = (task * task + reg * reg + 2.0 * cosine * task * reg).sqrt();
            assert_close(number(&group["total_norm"]), total, 1e-9, total, "total_norm");
        }
    }
    // The second group has equal rewards: its task gradient is 0, not small.
    let equal = &prompts[1];
    assert_eq!(equal["reward_variance"], 0.0);
    for key in ["task_norm", "signal_sq", "noise_sq", "snr"] {
        assert_eq!(equal[key], 0.0, "{key}");
    }
    assert_eq!(equal["dominance"], 1.0);
    for key in ["signal_p", "cos_task_reg", "cos_task_total", "snr_se"] {
        assert!(equal[key].is_null(), "{key}");
    }
    assert_eq!(equal["kept"], false);

    let summary = folder.summary();
    assert_eq!(summary["partial"], false);
    assert_eq!(summary["policy"]["parameters"], 1856);
    let step = &summary["steps"][0];
    assert_eq!(step["group_count"], 6);
    assert_close(number(&step["all_equal_share"]), 1.0 / 6.0, 1e-12, 1.0, "all_equal_share");
    let kept = prompts.iter().filter(|group| group["kept"] == true).count();
    assert_eq!(step["kept"]["groups"], kept);
    let (batch, norms) = (&step["signal"], &step["grad_norm"]);
    // noise²_B = Σ ω² noise²(x), ω = 1/6 for groups of equal size.
    let noise: f64 = prompts.iter().map(|group| number(&group["noise_sq"]) / 36.0).sum();
    assert_close(number(&batch["noise_sq"]), noise, 1e-9, noise, "batch noise²");
    let task = number(&norms["task"]);
    let sum = number(&batch["signal_sq"]) + number(&batch["noise_sq"]);
    assert_close(sum, task * task, 1e-9, task * task, "batch");
    // (‖Σ h‖² − Σ ‖h_x‖²)/(P(P − 1)), h_x = g_x here.
    let squares: f64 = prompts.iter().map(|group| number(&group["task_norm"]).powi(2)).sum();
    let sample = (36.0 * task * task - squares) / 30.0;
    assert_close(number(&batch["sample_signal_sq"]), sample, 1e-9, task * task, "sample");
}

#[test]
fn coherence_and_buckets_follow_from_the_groups() {
    // Two groups: the mean pairwise cosine is their cosine, and the batch norm gives it too.
    let folder = gpt2(2, "algorithm: {entropy_coef: 0.01, kl: {coef: 0.1}}\n");
    run(&folder, &["--set", "decomposition.buckets=[0.001]"]);
    let (prompts, summary) = (folder.prompts(), folder.summary());
    let step = &summary["steps"][0];
    let (first, second) = (number(&prompts[0]["reg_norm"]), number(&prompts[1]["reg_norm"]));
    let mean = number(&step["grad_norm"]["reg"]);
    let cosine = (4.0 * mean * mean - first * first - second * second) / (2.0 * first * second);
    assert_close(number(&step["reg_coherence"]), cosine, 1e-4, 1.0, "reg_coherence");
    // The task gradient of the second is 0: no pair is left.
    assert!(step["task_coherence"].is_null());

    let buckets = step["buckets"].as_array().unwrap();
    assert_eq!(buckets.len(), 2);
    // One group a bucket: the norm of the mean is its own norm.
    for (bucket, group) in buckets.iter().zip([&prompts[1], &prompts[0]]) {
        assert_eq!(bucket["groups"], 1);
        for (key, norm) in [("task", "task_norm"), ("reg", "reg_norm"), ("kl", "kl_unit_norm")] {
            let expected = number(&group[norm]);
            let found = number(&bucket["norm_of_mean"][key]);
            assert_close(found, expected, 1e-5, expected.max(1e-9), key);
            assert_close(number(&bucket["mean_of_norms"][key]), expected, 1e-12, expected, key);
        }
    }
    // Buckets only look: the batch is the same without them.
    let with = step["grad_norm"].clone();
    run(&folder, &["--force", "--set", "decomposition.buckets=1"]);
    let without = folder.summary()["steps"][0].clone();
    assert_eq!(without["buckets"], json!([]));
    for key in ["task", "kl", "entropy", "reg", "total"] {
        let expected = number(&with[key]);
        assert_close(number(&without["grad_norm"][key]), expected, 1e-5, expected, key);
    }
}

#[test]
fn every_preset_runs() {
    let folder = gpt2(3, "");
    for (preset, more) in [
        ("grpo", None),
        ("dr_grpo", Some("algorithm.norm_length=16")),
        ("dapo", None),
        ("ppo", None),
        ("rloo", None),
        ("reinforce_plus_plus", None),
    ] {
        let preset_setting = format!("algorithm.preset={preset}");
        let mut arguments = vec!["--force", "--set", &preset_setting];
        if let Some(more) = more {
            arguments.extend(["--set", more]);
        }
        run(&folder, &arguments);
        let text = std::fs::read_to_string(folder.path("out/config.resolved.yaml")).unwrap();
        assert!(text.contains(&format!("preset: {preset}")), "{text}");
        for group in folder.prompts() {
            assert!(number(&group["entropy_unit_norm"]) > 0.0, "{preset}");
            assert!(number(&group["kl_unit_norm"]) > 0.0, "{preset}");
        }
    }
}

/// Everything but wall times: numbers of the summary, lines, the configuration, the page.
fn deterministic_part(folder: &StudyFolder) -> (Value, [String; 3]) {
    let mut summary = folder.summary();
    summary.as_object_mut().unwrap().remove("wall_time").unwrap();
    let text = |name: &str| std::fs::read_to_string(folder.path(name)).unwrap();
    (
        summary,
        ["prompts.jsonl", "config.resolved.yaml", "report.html"]
            .map(|name| text(&format!("out/{name}"))),
    )
}

#[test]
fn two_runs_and_the_resolved_configuration_give_identical_files() {
    let folder = gpt2(4, "decomposition: {by_parameter: true}\n");
    run(&folder, &[]);
    let first = deterministic_part(&folder);
    run(&folder, &["--force"]);
    assert_eq!(deterministic_part(&folder), first);
    std::fs::copy(folder.path("out/config.resolved.yaml"), folder.path("study.yaml")).unwrap();
    run(&folder, &["--force"]);
    assert_eq!(deterministic_part(&folder), first);
}

#[test]
fn row_order_changes_nothing_but_rounding() {
    let batch = synthetic_batch(3, 1);
    let folder = |lines: &[Value]| StudyFolder::new(&fixture("double.pt"), lines, "");
    let first = folder(&lines(&batch));
    run(&first, &[]);
    let mut reversed = lines(&batch);
    reversed.reverse();
    let second = folder(&reversed);
    run(&second, &[]);
    let mut mirrored = second.prompts();
    mirrored.reverse();
    for (left, right) in first.prompts().iter().zip(&mirrored) {
        assert_eq!(left["group_id"], right["group_id"]);
        let scale = number(&left["task_norm"]).powi(2) + 1e-30;
        for key in ["signal_sq", "noise_sq"] {
            assert_close(number(&left[key]), number(&right[key]), 1e-9, scale, key);
        }
        let norm = number(&left["reg_norm"]);
        assert_close(number(&right["reg_norm"]), norm, 1e-9, norm, "reg_norm");
    }
}

/// Equal rewards in another order of rows have the same variance to the last bit: scores are ranked.
#[test]
fn reward_variances_do_not_depend_on_the_order_of_rows() {
    let rewards = [0.1, 0.7, 0.3, 0.35, 0.9, 0.2];
    let mut rows = Vec::new();
    for group in 0..6 {
        for row in 0..6 {
            let mut line = lines(&synthetic_batch(1, 1))[0].clone();
            line["group_id"] = json!(format!("g{group}"));
            line["trajectory_id"] = json!(format!("{group}/{row}"));
            line["reward"] = json!(rewards[(row * 5 + group) % 6]);
            rows.push(line);
        }
    }
    let folder = StudyFolder::new(&fixture("gpt2.pt"), &rows, "");
    run(&folder, &["--set", "filter.strategy=top_k_abs", "--set", "filter.value=2"]);
    let prompts = folder.prompts();
    assert!(prompts.iter().all(|group| group["reward_variance"] == prompts[0]["reward_variance"]));
    let kept: Vec<bool> = prompts.iter().map(|group| group["kept"] == true).collect();
    assert_eq!(kept, [true, true, false, false, false, false]);
    assert!(folder.summary()["steps"][0]["spearman_rv_snr"].is_null());
}

/// A branch that a trajectory did not take leaves its loss without a graph to the selected
/// parameters: its gradient is 0.
#[test]
fn parameters_of_a_branch_not_taken_have_gradient_zero() {
    for name in ["branching.pt", "sparse.pt"] {
        for engine in ["loop", "auto"] {
            let batch = lines(&synthetic_batch(4, 2));
            let folder =
                StudyFolder::new(&fixture(name), &batch, "decomposition: {by_parameter: true}\n");
            let trainable = if name == "branching.pt" { "^first" } else { "embedding" };
            let (trainable, engine) =
                (format!("policy.trainable={trainable}"), format!("decomposition.engine={engine}"));
            run(&folder, &["--set", &trainable, "--set", &engine]);
            let norms = |group: &Value| -> Vec<f64> {
                group["trajectory_task_norms"].as_array().unwrap().iter().map(number).collect()
            };
            let prompts = folder.prompts();
            assert!(prompts.iter().flat_map(norms).any(|norm| norm > 0.0), "{name}");
        }
    }
}

#[test]
fn by_parameter_the_squares_add_up() {
    let folder = gpt2(2, "decomposition: {by_parameter: true}\n");
    run(&folder, &[]);
    for group in folder.prompts() {
        let parts = group["by_parameter"].as_array().unwrap();
        assert_eq!(parts.len(), 28);
        for key in ["signal_sq", "noise_sq"] {
            let sum: f64 = parts.iter().map(|part| number(&part[key])).sum();
            let scale = number(&group["task_norm"]).powi(2) + 1e-30;
            assert_close(sum, number(&group[key]), 1e-9, scale, key);
        }
        let sum: f64 = parts.iter().map(|part| number(&part["reg_norm"]).powi(2)).sum();
        let whole = number(&group["reg_norm"]);
        assert_close(sum.sqrt(), whole, 1e-9, whole, "reg_norm");
    }
}

#[test]
fn a_reference_checkpoint_wins_over_the_file() {
    let folder = gpt2(2, "");
    // The policy as its own reference: KL and its gradient vanish, up to rounding.
    let reference = format!("policy.reference={}", fixture("gpt2.pt").display());
    run(&folder, &["--set", &reference]);
    for group in folder.prompts() {
        assert!(number(&group["kl_unit_norm"]) < 1e-6);
    }
    assert!(number(&folder.summary()["steps"][0]["kl_mean"]).abs() < 1e-9);
    run(&folder, &["--force"]);
    for group in folder.prompts() {
        assert!(number(&group["kl_unit_norm"]) > 1e-3);
    }
}

#[test]
fn a_policy_of_the_rollouts_own_has_ratio_one() {
    let folder = gpt2(2, "");
    run(&folder, &["--set", "rollouts.old_logprobs=recompute"]);
    let ratio = folder.summary()["steps"][0]["ratio"].clone();
    assert_eq!(ratio["mean"], 1.0);
    assert_eq!(ratio["max"], 1.0);
    assert_eq!(ratio["clip_fraction"], 0.0);
    assert_eq!(ratio["approx_kl"], 0.0);
    assert_eq!(ratio["effective_sample_size"], 1.0);
    // The file's numbers come from no policy, and the study says so.
    let output = folder.run(&["--force"]);
    assert!(stderr(&output).contains("old_logprobs differ"), "{}", stderr(&output));
    assert!(folder.summary()["steps"][0]["warnings"][0].as_str().unwrap().contains("recompute"));
}

/// With the bound: ‖g_task‖ is at most √RV·√((G − 1)/G)·√mean‖s‖², and it is close where all scores
/// are parallel, never below.
#[test]
fn the_bound_holds_where_it_is_defined() {
    let folder = gpt2(6, "decomposition: {bound: true}\n");
    let on_policy = ["--force", "--set", "rollouts.old_logprobs=recompute", "--set"];
    for (preset, more) in
        [("dr_grpo", vec!["--set", "algorithm.norm_length=16"]), ("rloo", Vec::new())]
    {
        let preset = format!("algorithm.preset={preset}");
        let mut arguments = on_policy.to_vec();
        arguments.push(&preset);
        arguments.extend(more);
        run(&folder, &arguments);
        for (index, group) in folder.prompts().iter().enumerate() {
            if index == 1 {
                assert!(group["bound"].is_null() && group["bound_slack"].is_null());
                continue;
            }
            let (bound, task) = (number(&group["bound"]), number(&group["task_norm"]));
            assert!(bound >= task && task > 0.0, "{bound} {task}");
            assert_close(number(&group["bound_slack"]), bound - task, 1e-12, bound, "slack");
        }
    }
    run(&folder, &["--force"]);
    assert!(folder.prompts().iter().all(|group| group["bound"].is_null()));
}

#[test]
fn debias_divides_the_signal_and_gives_the_policy_gradient() {
    let folder = gpt2(3, "");
    let arguments = [
        "--force",
        "--set",
        "algorithm.preset=dr_grpo",
        "--set",
        "algorithm.norm_length=16",
        "--set",
        "rollouts.old_logprobs=recompute",
    ];
    run(&folder, &arguments);
    let raw = folder.prompts();
    let mut debias = arguments.to_vec();
    debias.extend(["--set", "decomposition.debias=true"]);
    run(&folder, &debias);
    // G = 4: the factor is 1 + 1/9, and the leave-in mean shrinks ‖∇J‖ by 3/4.
    for (raw, debiased) in raw.iter().zip(&folder.prompts()) {
        let scale = number(&raw["task_norm"]).powi(2) + 1e-30;
        let signal = number(&raw["signal_sq"]) / (10.0 / 9.0);
        assert_close(number(&debiased["signal_sq"]), signal, 1e-9, scale, "signal²");
        let sum = number(&debiased["signal_sq"]) + number(&debiased["noise_sq"]);
        assert_close(sum, scale, 1e-9, scale + 1e-12, "sum");
        // The loss divides by the constant length too, ∇J does not.
        let gradient = number(&debiased["policy_gradient_sq"]);
        let expected = signal * 16.0 / 9.0 * 256.0;
        assert_close(gradient, expected, 1e-9, scale * 256.0, "policy_gradient_sq");
        assert!(raw["policy_gradient_sq"].is_null());
    }
}

/// Rollouts for `mlp_step.pt`: observations of four numbers, three actions.
fn step_batch() -> Batch {
    let mut batch = synthetic_batch(3, 1);
    let mut random = ChaCha8Rng::seed_from_u64(5);
    for row in batch.groups.iter_mut().flat_map(|group| &mut group.trajectories) {
        let length = row.mask.len();
        row.content = Content::Steps {
            observations: (0..4 * length).map(|_| random.random_range(-1.0..1.0)).collect(),
            shape: vec![4],
            actions: (0..length).map(|_| random.random_range(0..3)).collect(),
        };
    }
    batch
}

#[test]
fn a_step_policy_is_studied_like_any_other() {
    let folder = StudyFolder::new(
        &fixture("mlp_step.pt"),
        &lines(&step_batch()),
        "algorithm: {preset: ppo, entropy_coef: 0.01}\n",
    );
    run(&folder, &["--set", "policy.kind=step", "--set", "rollouts.old_logprobs=recompute"]);
    let prompts = folder.prompts();
    assert_eq!(prompts.len(), 3);
    assert!(prompts.iter().all(|group| number(&group["task_norm"]) > 0.0));
    assert_eq!(folder.summary()["policy"]["choices"], 3);

    let mut lines = lines(&step_batch());
    lines[2]["actions"][0] = json!(3);
    let folder = StudyFolder::new(&fixture("mlp_step.pt"), &lines, "");
    let output = folder.run(&["--set", "policy.kind=step"]);
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    assert!(message.contains(":3: field `actions[0]`: expected a number below 3"), "{message}");
}

#[test]
fn several_steps_and_checkpoints_give_a_point_each() {
    let mut lines_of_steps = Vec::new();
    for step in [20, 10] {
        let mut batch = synthetic_batch(2, step as u64);
        batch.step = Some(step);
        let mut lines = lines(&batch);
        for line in &mut lines {
            let id = format!("{step}/{}", line["trajectory_id"].as_str().unwrap());
            line["trajectory_id"] = json!(id);
        }
        lines_of_steps.extend(lines);
    }
    let folder = StudyFolder::new(Path::new("policy-{step}.pt"), &lines_of_steps, "");
    std::fs::copy(fixture("gpt2.pt"), folder.path("policy-10.pt")).unwrap();
    std::fs::copy(fixture("tied_traced.pt"), folder.path("policy-20.pt")).unwrap();
    run(&folder, &[]);
    let steps: Vec<i64> =
        folder.prompts().iter().map(|group| group["step"].as_i64().unwrap()).collect();
    assert_eq!(steps, [10, 10, 20, 20]);
    assert_eq!(folder.summary()["steps"].as_array().unwrap().len(), 2);

    // A list serves steps in their order, and one batch under several checkpoints.
    let list = format!(
        "policy.checkpoint=[{}, {}]",
        fixture("gpt2.pt").display(),
        fixture("tied_traced.pt").display()
    );
    let by_pattern = folder.prompts();
    run(&folder, &["--force", "--set", &list]);
    assert_eq!(folder.prompts(), by_pattern);
    let single = gpt2(2, "");
    run(&single, &["--set", &list]);
    let summary = single.summary();
    let steps: Vec<i64> = summary["steps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| step["step"].as_i64().unwrap())
        .collect();
    assert_eq!(steps, [0, 1]);
    let steps: Vec<i64> =
        single.prompts().iter().map(|group| group["step"].as_i64().unwrap()).collect();
    assert_eq!(steps, [0, 0, 1, 1]);
    let three = format!("{}, x.pt]", list.trim_end_matches(']'));
    let output = folder.run(&["--force", "--set", &three]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("as many checkpoints as the rollouts have steps (2), found 3")
    );
}

#[test]
fn the_outputs_are_printed_as_asked() {
    let folder = gpt2(2, "");
    let output = folder.run(&[]);
    let text = String::from_utf8(output.stdout).unwrap();
    for expected in ["group", "g0", "g1", "noise²", "2 groups, 8 trajectories", "written to"] {
        assert!(text.contains(expected), "`{text}` does not say `{expected}`");
    }
    assert!(stderr(&folder.run(&["--force"])).contains("8/8 trajectories"));
    let output = folder.run(&["--force", "--json"]);
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["steps"][0]["group_count"], 2);
    let output = folder.run(&["--force", "--quiet"]);
    assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{}", stderr(&output));
}

/// The page holds every group, and no name from the file becomes markup.
#[test]
fn the_report_is_a_whole_page() {
    let mut lines = lines(&synthetic_batch(3, 1));
    for line in lines.iter_mut().filter(|line| line["group_id"] == "g2") {
        line["group_id"] = json!("<script>alert(\"&\")</script>");
    }
    let folder = StudyFolder::new(&fixture("gpt2.pt"), &lines, "");
    run(&folder, &[]);
    let page = std::fs::read_to_string(folder.path("out/report.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</body></html>\n"));
    assert!(!page.contains("<script"));
    assert!(page.contains("&lt;script&gt;alert(&quot;&amp;&quot;)&lt;/script&gt;"));
    assert_eq!(page.matches("<circle ").count(), 3);
    for group in folder.prompts() {
        let norm = gradprism::log::number(number(&group["task_norm"]));
        assert!(page.contains(&format!("<td>{norm}</td>")), "{norm}");
    }
    assert!(page.contains("preset: grpo"));
}

#[test]
fn the_loss_is_explained_with_its_numbers() {
    let folder = gpt2(2, "algorithm: {preset: dapo, entropy_coef: 0.01}\n");
    let explain = |arguments: &[&str]| {
        let mut command = gradprism(&["study", "--explain"]);
        let output = command.arg(folder.path("study.yaml")).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(
        explain(&[]),
        "advantage    A = (R − mean)/(std + 1e-6) within the group, unbiased std; 0 where rewards are equal\n\
         ratio        r = exp(logp − old_logp, clamped to ±20)\n\
         task         max(−A·r, −A·clip(r, 0.8, 1.28))\n\
         KL           not in the loss (coefficient 0)\n\
         entropy      −0.01 · H, over the whole vocabulary\n\
         aggregation  Σ L·m / Σ m over the whole batch\n"
    );
    let text = explain(&[
        "--set",
        "algorithm.preset=ppo",
        "--set",
        "algorithm.kl={coef: 0.1, placement: reward}",
    ]);
    assert!(text.contains("where A < 0 at most −A·3"), "{text}");
    assert!(text.contains("−0.1 · (k3 = e^(−x) + x − 1) on the reward of each token"), "{text}");
    assert!(!folder.has_output());
}

/// The KL penalty in the rewards: no KL in the loss, and advantages of rewards less the penalty.
#[test]
fn a_kl_penalty_can_act_on_the_rewards() {
    let folder =
        gpt2(3, "algorithm: {preset: dr_grpo, norm_length: 16, kl: {coef: 0.5, estimator: k1}}\n");
    run(&folder, &["--set", "algorithm.kl.placement=reward"]);
    let found = folder.prompts();
    // The same by hand: k1 sums to Σ (old − ref) over the sampled tokens.
    let mut lines = lines(&synthetic_batch(3, 1));
    for line in &mut lines {
        let sum = |key: &str| line[key].as_array().unwrap().iter().map(number).sum::<f64>();
        let reward = number(&line["reward"]) - 0.5 * (sum("old_logprobs") - sum("ref_logprobs"));
        line["reward"] = json!(reward);
    }
    let by_hand = StudyFolder::new(
        &fixture("gpt2.pt"),
        &lines,
        "algorithm: {preset: dr_grpo, norm_length: 16}\n",
    );
    run(&by_hand, &[]);
    for (found, expected) in found.iter().zip(&by_hand.prompts()) {
        let norm = number(&expected["task_norm"]);
        assert!(norm > 0.0);
        assert_close(number(&found["task_norm"]), norm, 1e-6, norm, "task_norm");
        assert_eq!(found["reg_norm"], 0.0);
    }
    // The rewards of the file stay what is reported.
    assert_eq!(found[1]["reward_variance"], 0.0);
}

/// Importance weights of a sampler of its own: half the probability doubles the task gradient.
#[test]
fn a_sampler_of_its_own_is_corrected_for() {
    let mut lines = lines(&synthetic_batch(2, 1));
    for line in &mut lines {
        let old: Vec<f64> = line["old_logprobs"].as_array().unwrap().iter().map(number).collect();
        line["sampler_logprobs"] =
            json!(old.iter().map(|logp| logp - 2_f64.ln()).collect::<Vec<_>>());
    }
    let folder = StudyFolder::new(&fixture("gpt2.pt"), &lines, "");
    run(&folder, &[]);
    let plain = folder.prompts();
    let setting = "algorithm.importance={level: token, cap: 3}";
    run(&folder, &["--force", "--set", setting]);
    for (plain, corrected) in plain.iter().zip(&folder.prompts()) {
        let expected = 2.0 * number(&plain["task_norm"]);
        assert_close(number(&corrected["task_norm"]), expected, 1e-5, expected, "task_norm");
        assert_eq!(corrected["reg_norm"], plain["reg_norm"]);
    }
    let output = gpt2(2, "").run(&["--set", setting]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("sampler_logprobs"), "{}", stderr(&output));
}

/// Ctrl-C: what was finished is written and marked, and the exit code is 130.
#[cfg(unix)]
#[test]
fn an_interrupted_study_keeps_what_is_finished() {
    let folder = StudyFolder::new(&fixture("gpt2.pt"), &lines(&synthetic_batch(4000, 1)), "");
    let (config, out) = (folder.path("study.yaml"), folder.path("out"));
    let mut command = gradprism(&["study"]);
    command.arg(config).arg("--out").arg(&out).arg("--quiet");
    let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    // The staging directory appears when the work begins.
    let began = || {
        std::fs::read_dir(folder.folder.path())
            .unwrap()
            .any(|entry| entry.unwrap().path().join(".partial").exists())
    };
    while !began() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it began");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    std::thread::sleep(std::time::Duration::from_millis(500));
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let summary = folder.summary();
    assert_eq!(summary["partial"], true);
    let prompts = folder.prompts();
    assert!(!prompts.is_empty() && prompts.len() < 4000, "{}", prompts.len());
    assert_eq!(summary["steps"][0]["group_count"], prompts.len());
    assert!(!began(), "the staging directory is gone");
    // What was taken is a part of the batch: no number claims to be the whole's.
    assert!(summary["steps"][0]["grad_norm"].is_null() && summary["steps"][0]["signal"].is_null());
    let warnings = summary["steps"][0]["warnings"].to_string();
    assert!(warnings.contains("interrupted"), "{warnings}");
}

/// The event file as the real TensorBoard reads it.
#[test]
fn tensorboard_reads_the_events() {
    let Some(python) = common::python("tensorboard_reads_the_events") else { return };
    let folder = gpt2(6, "");
    run(&folder, &[]);
    const SCRIPT: &str = r#"
import json, struct, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as Plugin
run = EventAccumulator(sys.argv[1], size_guidance={"images": 0, "histograms": 0, "scalars": 0})
run.Reload()
image = run.Images("snr/by_reward_variance")[0]
histogram = run.Histograms("snr/histogram")[0].histogram_value
text = [t for t in run.Tags()["tensors"]]
tensor = run.Tensors("config")[0].tensor_proto.string_val[0].decode()
plugin = Plugin(sys.argv[1]); plugin.Reload()
print(json.dumps({
    "scalars": {tag: run.Scalars(tag)[0].value for tag in run.Tags()["scalars"]},
    "size": [image.width, image.height],
    "png": list(struct.unpack(">II", image.encoded_image_string[16:24])),
    "histogram": [histogram.num, histogram.sum, sum(histogram.bucket)],
    "text": text, "config": tensor,
    "plugin": plugin.SummaryMetadata("config").plugin_data.plugin_name,
}))
"#;
    let output = std::process::Command::new(python)
        .arg("-c")
        .arg(SCRIPT)
        .arg(folder.path("out"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let read: Value = serde_json::from_slice(&output.stdout).unwrap();
    let step = &folder.summary()["steps"][0];
    for (tag, value) in [
        ("snr/mean", &step["snr_mean"]),
        ("grad_norm/task", &step["grad_norm"]["task"]),
        ("grad_norm/kl", &step["grad_norm"]["kl"]),
        ("grad_norm_bucket/1/task", &step["buckets"][0]["norm_of_mean"]["task"]),
        ("cos/task_reg", &step["grad_norm"]["cos_task_reg"]),
        ("filter/kept_groups", &step["kept"]["groups"]),
        ("reward/variance_mean", &step["reward_variance_mean"]),
        ("loss/approx_kl", &step["ratio"]["approx_kl"]),
        ("perf/tokens", &step["tokens"]),
    ] {
        let (found, expected) = (number(&read["scalars"][tag]), number(value));
        assert_close(found, expected, 1e-6, expected.abs(), tag);
    }
    assert_eq!(read["size"], json!([640, 480]));
    assert_eq!(read["png"], json!([640, 480]));
    assert_eq!(read["histogram"][0], 6.0);
    assert_eq!(read["histogram"][2], 6.0);
    let snrs: f64 = folder.prompts().iter().map(|group| number(&group["snr"])).sum();
    assert_close(number(&read["histogram"][1]), snrs, 1e-9, snrs, "sum of the histogram");
    assert_eq!(read["plugin"], "text");
    assert!(read["config"].as_str().unwrap().contains("preset: grpo"));
}
