//! The optimiser: numbers by hand, torch's own, laws; and the rules that end a run early.

mod common;

use common::update::Whole;
use common::{assert_close, fixture};
use gradprism::gradient::{LossBatch, Scorer};
use gradprism::objective::{Algorithm, Preset, TokenWeights};
use gradprism::policy::{Policy, PolicyOptions};
use gradprism::study::PreparedBatch;
use gradprism::trainer::clip::{FailedUpdates, clip_by_global_norm, clip_factor, global_norm};
use gradprism::trainer::stop::{
    EmptyFilters, EmptyFiltersState, ValidationFloor, ValidationFloorState, VarianceCollapse,
    VarianceCollapseState,
};
use gradprism::trainer::{AdamW, AdamWOptions, Decay, Learners, Optimizer, Schedule, UpdatePlan};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

fn parameter(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

fn adamw(options: AdamWOptions, weights: &[&Tensor]) -> AdamW {
    let named = weights.iter().enumerate().map(|(i, w)| (format!("w{i}"), w.shallow_clone()));
    AdamW::new(options, named).unwrap()
}

fn optimizer(adamw: AdamW, max_norm: Option<f64>) -> Optimizer {
    Optimizer::new(adamw, Schedule::default(), max_norm, 3).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
}

/// A scalar whose gradient is `gradient`.
fn loss(weight: &Tensor, gradient: &[f64]) -> Tensor {
    (weight * Tensor::from_slice(gradient).to_kind(weight.kind())).sum(weight.kind())
}

#[test]
fn two_steps_by_hand() {
    let weight = parameter(&[1.0]);
    let options = AdamWOptions {
        learning_rate: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 0.25,
        weight_decay: 0.1,
    };
    let mut adamw = adamw(options, &[&weight]);
    // Decay: 1 − 0.1·0.1 = 0.99. m = 0.05, v = 0.0025; both corrected: 0.5 and 0.25.
    // 0.99 − 0.1·0.5/(0.5 + 0.25) = 0.99 − 1/15.
    adamw.step(&[Some(Tensor::from_slice(&[0.5]))], 0.1).unwrap();
    let first = 0.99 - 1.0 / 15.0;
    assert_close(values(&weight)[0], first, 1e-14, 1.0, "first step");
    // m = 0.045 + 0.1·(−1) = −0.055 over 0.19; v = 0.002475 + 0.01 = 0.012475 over 0.0199.
    adamw.step(&[Some(Tensor::from_slice(&[-1.0]))], 0.1).unwrap();
    let (mean, root) = (-0.055 / 0.19, (0.012475f64 / 0.0199).sqrt());
    let second = first * 0.99 - 0.1 * mean / (root + 0.25);
    assert_close(values(&weight)[0], second, 1e-14, 1.0, "second step");
    // No gradient: no step, no decay.
    adamw.step(&[None], 0.1).unwrap();
    assert_close(values(&weight)[0], second, 1e-14, 1.0, "no step");
}

#[test]
fn clipping_by_hand() {
    // ‖(3, 0, 4)‖ = 5; the gradients become those times 1/(5 + 10⁻⁶).
    let mut gradients =
        [Some(Tensor::from_slice(&[3.0, 0.0])), None, Some(Tensor::from_slice(&[4.0]))];
    assert_eq!(clip_by_global_norm(&mut gradients, Some(5.1)).unwrap(), 5.0);
    assert_eq!(values(gradients[0].as_ref().unwrap()), [3.0, 0.0]);
    assert_eq!(clip_by_global_norm(&mut gradients, Some(1.0)).unwrap(), 5.0);
    assert_close(values(gradients[2].as_ref().unwrap())[0], 4.0 / 5.000001, 1e-15, 1.0, "clipped");
    assert_eq!(clip_factor(5.0, None), 1.0);

    // Squares that float32 cannot hold, small terms beside large ones, and more than one chunk.
    let large = Tensor::from_slice(&[3e30f32, 4e30]);
    assert_close(global_norm(&[Some(large)]).unwrap(), 5e30, 1e-6, 5e30, "large");
    let small = Tensor::from_slice(&[3e-30f32, 4e-30]);
    assert_close(global_norm(&[Some(small)]).unwrap(), 5e-30, 1e-6, 5e-30, "small");
    let ones = Tensor::ones([5_000_000], (Kind::BFloat16, Device::Cpu));
    assert_eq!(global_norm(&[Some(ones)]).unwrap(), 5e6f64.sqrt());
}

#[test]
fn two_parameters_of_one_gradient_tensor_are_added_and_clipped_once_each() {
    // d/da Σ(a + b) = d/db Σ(a + b) = 1, and autograd hands out one tensor for both.
    let (a, b) = (parameter(&[0.0]), parameter(&[0.0]));
    let options = AdamWOptions { weight_decay: 0.0, beta1: 0.0, beta2: 0.0, ..Default::default() };
    let mut optimizer = optimizer(adamw(options, &[&a, &b]), Some(0.1));
    for _ in 0..3 {
        optimizer.backward(&(&a + &b).sum(Kind::Double)).unwrap();
    }
    let update = optimizer.step().unwrap();
    assert_close(update.norm, 18f64.sqrt(), 1e-15, 5.0, "the norm of (3, 3)");
    let moment = |name: &str| {
        let state = optimizer.state();
        values(&state.iter().find(|(found, _)| found == name).unwrap().1)[0]
    };
    let clipped = 3.0 * 0.1 / (18f64.sqrt() + 1e-6);
    assert_close(moment("exp_avg/w0"), clipped, 1e-14, 1.0, "the gradient of a");
    assert_close(moment("exp_avg/w1"), clipped, 1e-14, 1.0, "the gradient of b");
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing_and_ends_the_run_in_the_end() {
    for bad in [f64::NAN, f64::INFINITY] {
        let weight = parameter(&[1.0, 2.0]);
        let mut optimizer = optimizer(adamw(AdamWOptions::default(), &[&weight]), Some(1.0));
        optimizer.backward(&loss(&weight, &[0.5, 0.5])).unwrap();
        assert!(optimizer.step().unwrap().made);
        let (before, state) = (values(&weight), optimizer.state().pop().unwrap().1);

        // A later micro-batch does not mend an earlier one.
        for _ in 0..2 {
            optimizer.backward(&loss(&weight, &[bad, 0.5])).unwrap();
            optimizer.backward(&loss(&weight, &[0.5, 0.5])).unwrap();
            assert!(!optimizer.step().unwrap().made);
        }
        assert_eq!(optimizer.failed(), FailedUpdates { in_a_row: 2, total: 2 });
        assert_eq!((values(&weight), optimizer.updates()), (before, 1));
        assert_eq!(optimizer.state().pop().unwrap().1, state);
        // A good one begins a new row.
        optimizer.backward(&loss(&weight, &[0.5, 0.5])).unwrap();
        assert!(optimizer.step().unwrap().made);
        assert_eq!(optimizer.failed(), FailedUpdates { in_a_row: 0, total: 2 });
        let before = values(&weight);
        for attempt in 1..=3 {
            optimizer.backward(&loss(&weight, &[bad, 0.5])).unwrap();
            let step = optimizer.step();
            assert_eq!(step.is_err(), attempt == 3);
            if let Err(error) = step {
                assert!(error.to_string().contains("3 times in a row"), "{error}");
            }
        }
        assert_eq!(values(&weight), before);
    }
}

#[test]
fn a_tied_weight_is_stepped_once() {
    let weight = parameter(&[1.0]);
    let named = ["embedding", "head"].map(|name| (name.to_owned(), weight.shallow_clone()));
    let options = AdamWOptions { learning_rate: 0.1, weight_decay: 0.5, ..Default::default() };
    let adamw = AdamW::new(options, named).unwrap();
    assert_eq!(adamw.parameters().len(), 1);
    assert_eq!(adamw.parameters()[0].names, ["embedding", "head"]);
    let mut optimizer = optimizer(adamw, None);
    // Both uses: the gradient is 2 + 3.
    let update_of = loss(&weight, &[2.0]) + loss(&weight, &[3.0]);
    optimizer.backward(&update_of).unwrap();
    assert_eq!(optimizer.step().unwrap().norm, 5.0);
    // One decay, one step of 0.1 (up to ε/5).
    assert_close(values(&weight)[0], 0.95 - 0.1, 1e-9, 1.0, "decayed and stepped once");
}

#[test]
fn gradients_of_a_plain_backward_are_taken_once() {
    let weights = [parameter(&[1.0, 2.0]), parameter(&[1.0, 2.0])];
    let mut optimizers =
        weights.each_ref().map(|weight| optimizer(adamw(AdamWOptions::default(), &[weight]), None));
    for gradient in [[0.5, -1.0], [2.0, 0.25]] {
        for _ in 0..2 {
            loss(&weights[0], &gradient).backward();
        }
        optimizers[0].take_grads().unwrap();
        let double = gradient.map(|entry| 2.0 * entry);
        optimizers[1].backward(&loss(&weights[1], &double)).unwrap();
        let updates = optimizers.each_mut().map(|optimizer| optimizer.step().unwrap());
        assert_eq!(updates[0], updates[1]);
        assert_eq!(values(&weights[0]), values(&weights[1]));
    }
}

#[test]
fn wrong_arguments_are_refused_and_change_nothing() {
    let weight = parameter(&[1.0, 2.0]);
    let mut adamw = adamw(AdamWOptions::default(), &[&weight]);
    let short = Tensor::from_slice(&[1.0]);
    let error = adamw.step(&[Some(short)], 0.1).unwrap_err().to_string();
    assert!(error.contains("expected shape [2], found shape [1]"), "{error}");
    assert!(adamw.step(&[], 0.1).is_err());
    assert_eq!(values(&weight), [1.0, 2.0]);

    let mut state = adamw.state();
    state[1].1 = Tensor::from_slice(&[1.0f32, 2.0]);
    let error = adamw.restore(&state).unwrap_err().to_string();
    assert!(error.contains("`exp_avg_sq/w0`, Double [2]"), "{error}");
    assert!(error.contains("found Float [2]"), "{error}");
    drop(state.remove(2));
    state.swap(0, 1);
    assert!(adamw.restore(&state).is_err());

    let refused = |options: AdamWOptions, named: Vec<(String, Tensor)>| {
        AdamW::new(options, named).unwrap_err().to_string()
    };
    let named = |tensor: &Tensor| vec![("w".to_owned(), tensor.shallow_clone())];
    let bad = AdamWOptions { beta2: 1.0, ..Default::default() };
    assert!(refused(bad, named(&weight)).contains("beta2: expected"));
    let bad = AdamWOptions { learning_rate: f64::NAN, ..Default::default() };
    assert!(refused(bad, named(&weight)).contains("learning_rate: expected"));
    let twice = named(&weight).into_iter().chain(named(&parameter(&[1.0]))).collect();
    assert!(refused(AdamWOptions::default(), twice).contains("`w`, twice"));
    let frozen = Tensor::from_slice(&[1.0]);
    assert!(refused(AdamWOptions::default(), named(&frozen)).contains("requires none"));
    let views = vec![
        ("whole".to_owned(), weight.shallow_clone()),
        ("part".to_owned(), weight.narrow(0, 1, 1)),
    ];
    assert!(refused(AdamWOptions::default(), views).contains("share memory"));
}

#[test]
fn the_schedule_by_hand() {
    let constant = Schedule { warmup: 4, decay: Decay::Constant };
    let factors: Vec<f64> = (1..=6).map(|update| constant.factor(update)).collect();
    assert_eq!(factors, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
    assert_eq!(Schedule::default().factor(1), 1.0);

    // From update 2 to update 8: a third of the way is cos 60° = 1/2, so 0.1 + 0.9·0.75.
    let cosine = Schedule { warmup: 2, decay: Decay::Cosine { updates: 8, floor: 0.1 } };
    for (update, expected) in
        [(1, 0.5), (2, 1.0), (4, 0.775), (5, 0.55), (6, 0.325), (8, 0.1), (9, 0.1), (1000, 0.1)]
    {
        assert_close(cosine.factor(update), expected, 1e-15, 1.0, &format!("update {update}"));
    }
    // A warm-up as long as the run.
    let short = Schedule { warmup: 3, decay: Decay::Cosine { updates: 3, floor: 0.0 } };
    assert_eq!([1, 2, 3, 4].map(|update| short.factor(update)), [1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
}

/// Gradients of some steps, of a size that some are clipped and some are not.
fn random_task(max_norm: Option<f64>, schedule: Schedule, options: AdamWOptions) -> Value {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let shapes: [&[i64]; 4] = [&[3, 4], &[5], &[], &[2, 1, 3]];
    let mut draw = |count: i64, size: f64| -> Vec<f64> {
        (0..count).map(|_| random.random_range(-size..size)).collect()
    };
    let numels = shapes.map(|shape| shape.iter().product::<i64>());
    let weights = numels.map(|numel| draw(numel, 1.0));
    let gradients: Vec<Vec<Option<Vec<f64>>>> = (0..15)
        .map(|step| {
            let size = [1e-6, 0.05, 1.0, 300.0][step % 4];
            // The third parameter is not used in every step.
            let used = |index: usize| index != 2 || step % 3 != 0;
            let one = |(index, numel): (usize, &i64)| used(index).then(|| draw(*numel, size));
            numels.iter().enumerate().map(one).collect()
        })
        .collect();
    let cosine = match schedule.decay {
        Decay::Constant => Value::Null,
        Decay::Cosine { updates, floor } => json!({"updates": updates, "floor": floor}),
    };
    json!({"weights": weights, "shapes": shapes, "gradients": gradients, "options": options,
           "max_norm": max_norm, "warmup": schedule.warmup, "cosine": cosine})
}

#[test]
fn steps_are_those_of_torch() {
    let cosine = Schedule { warmup: 4, decay: Decay::Cosine { updates: 12, floor: 0.05 } };
    let own = AdamWOptions {
        learning_rate: 0.03,
        beta1: 0.8,
        beta2: 0.95,
        epsilon: 1e-6,
        weight_decay: 0.3,
    };
    let undecayed = AdamWOptions { weight_decay: 0.0, ..AdamWOptions::default() };
    for (max_norm, schedule, options) in [
        (None, Schedule::default(), AdamWOptions::default()),
        (Some(0.5), cosine, own),
        (Some(1e6), Schedule { warmup: 3, decay: Decay::Constant }, undecayed),
    ] {
        let task = random_task(max_norm, schedule, options);
        let Some(answer) = common::trainer_reference("steps_are_those_of_torch", "adamw", &task)
        else {
            return;
        };
        let weights: Vec<Tensor> = task["weights"]
            .as_array()
            .unwrap()
            .iter()
            .zip(task["shapes"].as_array().unwrap())
            .map(|(values, shape)| {
                let values: Vec<f64> = serde_json::from_value(values.clone()).unwrap();
                let shape: Vec<i64> = serde_json::from_value(shape.clone()).unwrap();
                Tensor::from_slice(&values).reshape(shape).set_requires_grad(true)
            })
            .collect();
        let references: Vec<&Tensor> = weights.iter().collect();
        let mut optimizer =
            Optimizer::new(adamw(options, &references), schedule, max_norm, 1).unwrap();
        let gradients: Vec<Vec<Option<Vec<f64>>>> =
            serde_json::from_value(task["gradients"].clone()).unwrap();
        let (mut clipped, steps) = (0, answer["steps"].as_array().unwrap());
        assert_eq!(steps.len(), gradients.len());
        for (step, (gradients, expected)) in gradients.iter().zip(steps).enumerate() {
            for (weight, gradient) in weights.iter().zip(gradients) {
                if let Some(gradient) = gradient {
                    optimizer.backward(&loss(&weight.reshape([-1]), gradient)).unwrap();
                }
            }
            let update = optimizer.step().unwrap();
            clipped += usize::from(update.clip_factor < 1.0);
            let norm = expected["norm"].as_f64().unwrap();
            assert_close(update.norm, norm, 1e-12, norm, "norm");
            let expected: Vec<Vec<f64>> =
                serde_json::from_value(expected["weights"].clone()).unwrap();
            for (weight, expected) in weights.iter().zip(expected) {
                for (found, expected) in values(weight).iter().zip(expected) {
                    let what = format!("step {step}, max_norm {max_norm:?}");
                    assert_close(*found, expected, 1e-12, expected.abs(), &what);
                }
            }
        }
        let some = max_norm == Some(0.5);
        assert_eq!(clipped > 0, some, "clipping is active in one of the three");
        assert!(clipped < steps.len());
    }
}

/// GRPO with both regularizers.
fn regularized() -> Algorithm {
    let mut algorithm = Preset::Grpo.algorithm();
    (algorithm.kl.coef, algorithm.entropy_coef) = (0.2, 0.05);
    algorithm
}

fn tied_policy() -> Policy {
    common::one_thread();
    Policy::load(&fixture("double.pt"), &PolicyOptions::default()).unwrap()
}

fn scorer<'a>(policy: &'a Policy, algorithm: &'a Algorithm) -> Scorer<'a> {
    Scorer {
        policy,
        reference: None,
        algorithm,
        temperature: 1.0,
        recompute_old: false,
        components: Default::default(),
    }
}

/// The tied transformer of the fixtures after `updates` updates by the trainer, and their norms.
fn trained(token_budget: usize, updates: usize, max_norm: f64) -> (Policy, Vec<f64>) {
    let (policy, algorithm) = (tied_policy(), regularized());
    let batch = common::synthetic_batch(5, 3);
    let prepared = PreparedBatch::new(&algorithm, &batch).unwrap();
    let options = AdamWOptions { learning_rate: 0.01, ..AdamWOptions::default() };
    let mut optimizer = optimizer(AdamW::of_policy(options, &policy).unwrap(), Some(max_norm));
    let plan = UpdatePlan {
        epochs: 1,
        mini_batch_size: None,
        token_budget,
        factor: 1.0,
        seed: 0,
        step: 0,
        critic_alone: false,
    };
    let norms = (0..updates)
        .map(|_| {
            let learners = Learners { optimizer: &mut optimizer, critic: None };
            let groups = [0, 1, 2, 3, 4];
            plan.run(&scorer(&policy, &algorithm), &batch, &prepared, &groups, learners)
                .unwrap()
                .grad_norm
        })
        .collect();
    (policy, norms)
}

/// The sizes of the micro-batches of a budget.
fn sizes(token_budget: usize) -> Vec<usize> {
    let batch = common::synthetic_batch(5, 3);
    let rows = batch.trajectories().collect::<Vec<_>>();
    let mask = Tensor::ones([20, 8], (Kind::Bool, Device::Cpu));
    let weights = TokenWeights::new(regularized().aggregation, None, &mask).unwrap();
    let advantages = Tensor::zeros([20, 8], (Kind::Double, Device::Cpu));
    let whole = LossBatch::new(rows, vec!["g"; 20], &advantages, &weights);
    whole.micro_batches(token_budget).iter().map(|batch| batch.rows().len()).collect()
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    let (whole, norms) = trained(10_000, 3, 0.5);
    assert!(norms[0] > 0.5, "clipping is active: {norms:?}");
    assert_eq!((sizes(10_000), sizes(1)), (vec![20], vec![1; 20]));
    assert!(sizes(40).iter().any(|size| *size != sizes(40)[0]), "of different sizes");
    for token_budget in [1, 25, 40] {
        let (parts, found) = trained(token_budget, 3, 0.5);
        assert_close(found[2], norms[2], 1e-9, norms[2], "norm");
        for (left, right) in whole.trainable().zip(parts.trainable()) {
            let distance = (&left.tensor - &right.tensor).abs().max().double_value(&[]);
            assert!(distance <= 1e-10, "{token_budget}: {} {distance:e}", left.name());
        }
    }
}

#[test]
fn the_loss_of_a_micro_batch_is_the_one_written_out() {
    let batch = common::synthetic_batch(5, 3);
    for (preset, fixture_name) in
        [(Preset::Grpo, "double.pt"), (Preset::Dapo, "double.pt"), (Preset::Ppo, "double.pt")]
    {
        let policy = Policy::load(&fixture(fixture_name), &PolicyOptions::default()).unwrap();
        let mut algorithm = preset.algorithm();
        (algorithm.kl.coef, algorithm.entropy_coef) = (0.2, 0.05);
        let whole = Whole::new(algorithm.clone(), &batch);
        let expected = whole.loss(&policy, 0, 20);
        let parameters: Vec<&Tensor> = policy.trainable().map(|it| &it.tensor).collect();
        let slopes = Tensor::run_backward(&[&expected], &parameters, false, false);

        let names = batch.groups.iter().flat_map(|group| vec![group.id.as_str(); 4]).collect();
        let rows = LossBatch::new(whole.rows.clone(), names, &whole.advantages, &whole.weights);
        let terms = rows.loss(&scorer(&policy, &algorithm)).unwrap();
        let value = terms.task + 0.2 * terms.kl - 0.05 * terms.entropy;
        let value_expected = expected.double_value(&[]);
        assert_close(value, value_expected, 1e-12, 1.0, "the loss");
        let found = Tensor::run_backward(&[&terms.surrogate], &parameters, false, false);
        for (found, expected) in found.iter().zip(&slopes) {
            let distance = (found - expected).abs().max().double_value(&[]);
            assert!(distance <= 1e-12, "{preset:?}: {distance:e}");
        }
    }
}

#[test]
fn updates_of_a_tied_policy_are_those_of_torch() {
    let batch = common::synthetic_batch(5, 3);
    for (max_norm, updates) in [(0.5, 1), (0.5, 4), (1e3, 4)] {
        let task = json!({
            "policy": fixture("double.pt"), "lines": common::lines(&batch), "updates": updates,
            "options": AdamWOptions { learning_rate: 0.01, ..AdamWOptions::default() },
            "warmup": 0, "cosine": null, "max_norm": max_norm, "kl_coef": 0.2, "entropy_coef": 0.05,
        });
        let name = "updates_of_a_tied_policy_are_those_of_torch";
        let Some(answer) = common::trainer_reference(name, "update", &task) else { return };
        let (policy, norms) = trained(40, updates, max_norm);
        assert_eq!(norms[0] > max_norm, max_norm < 1.0, "{norms:?}");
        let start = Policy::load(&fixture("double.pt"), &PolicyOptions::default()).unwrap();
        for (found, expected) in norms.iter().zip(answer["norms"].as_array().unwrap()) {
            let expected = expected.as_f64().unwrap();
            assert_close(*found, expected, 1e-9, expected, "norm");
        }
        let weights = answer["weights"].as_object().unwrap();
        assert_eq!(weights.len(), policy.parameters().len());
        for (parameter, before) in policy.parameters().iter().zip(start.parameters()) {
            let name = parameter.names.iter().find(|name| weights.contains_key(*name)).unwrap();
            let expected: Vec<f64> = serde_json::from_value(weights[name].clone()).unwrap();
            let before = values(&before.tensor);
            assert_ne!(values(&parameter.tensor), before, "{name} was trained");
            for (found, expected) in values(&parameter.tensor).iter().zip(expected) {
                assert_close(*found, expected, 1e-9, 1.0, name);
            }
        }
    }
}

#[test]
fn a_collapse_of_the_reward_variance_ends_the_run() {
    let rule = VarianceCollapse { steps: 3 };
    let mut state = VarianceCollapseState::default();
    // The baseline: mean 1. Low steps inside it do not count.
    for step in 0..10 {
        assert!(!rule.observe(&mut state, if step < 5 { 2.0 } else { 0.0 }));
    }
    let stops = |state: &mut VarianceCollapseState, steps: &[f64]| -> Vec<bool> {
        steps.iter().map(|step| rule.observe(state, *step)).collect()
    };
    // 0.1 is not under 0.1; an undefined step is passed over.
    assert_eq!(stops(&mut state, &[0.09, 0.09, 0.1, 0.05]), [false; 4]);
    let text = serde_json::to_string(&state).unwrap();
    let mut resumed: VarianceCollapseState = serde_json::from_str(&text).unwrap();
    assert_eq!(stops(&mut resumed, &[f64::NAN, 0.0, 0.099]), [false, false, true]);
    // Rewards that never varied have nothing to fall from.
    let mut flat = VarianceCollapseState::default();
    assert_eq!(stops(&mut flat, &[0.0; 30]), [false; 30]);
}

#[test]
fn empty_filters_and_low_validations_end_the_run() {
    let rule = EmptyFilters { filters: 2 };
    let mut state = EmptyFiltersState::default();
    let stops = [0, 3, 0, 0].map(|kept| rule.observe(&mut state, kept));
    assert_eq!(stops, [false, false, false, true]);
    assert!(EmptyFilters { filters: 1 }.observe(&mut EmptyFiltersState::default(), 0));

    let rule = ValidationFloor { floor: 0.2, validations: 2 };
    let mut state = ValidationFloorState::default();
    let stops = [0.1, 0.2, 0.19, f64::NAN].map(|score| rule.observe(&mut state, score));
    assert_eq!(stops, [false, false, false, true]);
}
