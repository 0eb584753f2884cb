//! The estimators against a tabular softmax policy whose expected gradient is known exactly: the
//! mean of signal² and noise² over 2,000 seeded draws lies within four standard errors of the
//! truth.

mod common;

use std::ops::ControlFlow;

use gradprism::gradient::{
    Coefficients, Components, Debias, Engine, Gram, GroupInput, GroupProducts, Part, PlainEngine,
    Scorer, split,
};
use gradprism::objective::{
    self, AdvantageEstimator, Aggregation, Algorithm, GroupIndex, Preset, TokenWeights,
};
use gradprism::policy::{Policy, PolicyKind, PolicyOptions};
use gradprism::rollout::{Content, Group, Trajectory};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Kind, Tensor};

/// States of the table, of which a trajectory visits the first two, one after the other.
const STATES: usize = 3;
const STEPS: usize = 2;
const ACTIONS: usize = 4;
const DRAWS: usize = 2000;
/// The constant length of the aggregation.
const NORM_LENGTH: f64 = 2.0;

/// What the table of `tabular.pt` makes of all trajectories there can be.
struct Truth {
    /// π(a|s).
    probabilities: Vec<[f64; ACTIONS]>,
    /// Every trajectory with its probability.
    trajectories: Vec<([usize; STEPS], f64)>,
}

/// Mostly the first action's doing, so that the signal stands out from the noise, and with it the
/// bias of a quarter at G = 3.
fn reward(actions: &[usize; STEPS]) -> f64 {
    f64::from(actions[0] == 2) + 0.1 * f64::from(actions[1] % 2 == 1)
}

impl Truth {
    fn new(policy: &Policy) -> Self {
        let observations = Tensor::eye(STATES as i64, (Kind::Double, tch::Device::Cpu));
        let logits = policy.step_logits(&observations).unwrap();
        let table = objective::log_probs(&logits, 1.0).exp();
        let probabilities: Vec<[f64; ACTIONS]> = (0..STATES as i64)
            .map(|s| std::array::from_fn(|a| table.double_value(&[s, a as i64])))
            .collect();
        let trajectories = (0..ACTIONS.pow(STEPS as u32))
            .map(|index| {
                let actions = [index % ACTIONS, index / ACTIONS];
                let probability = (0..STEPS).map(|s| probabilities[s][actions[s]]).product();
                (actions, probability)
            })
            .collect();
        Self { probabilities, trajectories }
    }

    /// ∇ log π of a trajectory over the constant length: d/dθ_sb log π(a|s) = 1[a = b] − π(b|s).
    fn score(&self, actions: &[usize; STEPS]) -> Vec<f64> {
        (0..STEPS)
            .flat_map(|s| {
                (0..ACTIONS).map(move |b| {
                    (f64::from(actions[s] == b) - self.probabilities[s][b]) / NORM_LENGTH
                })
            })
            .collect()
    }

    fn expect(&self, of: impl Fn(&[usize; STEPS]) -> f64) -> f64 {
        self.trajectories.iter().map(|(actions, p)| p * of(actions)).sum()
    }

    /// ‖E[(R − baseline) s]‖² = ‖∇J‖², whatever the baseline.
    fn policy_gradient_sq(&self) -> f64 {
        (0..STEPS * ACTIONS)
            .map(|k| self.expect(|actions| reward(actions) * self.score(actions)[k]).powi(2))
            .sum()
    }

    fn score_sq(&self, actions: &[usize; STEPS]) -> f64 {
        self.score(actions).iter().map(|x| x * x).sum()
    }

    /// Signal² and noise² of a group of `g` with a fixed baseline.
    fn with_fixed_baseline(&self, g: f64, baseline: f64) -> (f64, f64) {
        let signal = self.policy_gradient_sq();
        let second =
            self.expect(|actions| (reward(actions) - baseline).powi(2) * self.score_sq(actions));
        (signal, (second - signal) / g)
    }

    /// ‖E g‖² and E‖g‖² − ‖E g‖² for the group's own mean as baseline. With R_i − R̄ =
    /// (1 − 1/G) R_i − S/G, S the sum of the other rewards, which is independent of row i:
    fn with_mean_baseline(&self, g: f64) -> (f64, f64) {
        let gradient_sq = self.policy_gradient_sq();
        let mean = self.expect(reward);
        let variance = self.expect(|actions| (reward(actions) - mean).powi(2));
        let own = 1.0 - 1.0 / g;
        let others_sq = (g - 1.0) * variance + ((g - 1.0) * mean).powi(2);
        let diagonal =
            own * own * self.expect(|actions| reward(actions).powi(2) * self.score_sq(actions))
                - 2.0 * own / g
                    * (g - 1.0)
                    * mean
                    * self.expect(|actions| reward(actions) * self.score_sq(actions))
                + others_sq / (g * g) * self.expect(|actions| self.score_sq(actions));
        let signal = own * own * gradient_sq;
        let off_diagonal = signal * (1.0 + 1.0 / (g - 1.0).powi(2));
        let mean_sq = (diagonal + (g - 1.0) * off_diagonal) / g;
        (signal, mean_sq - signal)
    }

    fn draw(&self, random: &mut ChaCha8Rng) -> Trajectory {
        let actions: [usize; STEPS] = std::array::from_fn(|s| {
            let mut left: f64 = random.random();
            self.probabilities[s]
                .iter()
                .position(|p| {
                    left -= p;
                    left < 0.0
                })
                .unwrap_or(ACTIONS - 1)
        });
        let observations =
            (0..STEPS).flat_map(|s| (0..STATES).map(move |t| f64::from(s == t))).collect();
        Trajectory {
            line: 0,
            id: None,
            content: Content::Steps {
                observations,
                shape: vec![STATES as i64],
                actions: actions.map(|action| action as i64).to_vec(),
            },
            mask: vec![true; STEPS],
            reward: reward(&actions),
            token_rewards: None,
            old_logprobs: None,
            ref_logprobs: None,
            sampler_logprobs: None,
            values: None,
            reasoning: None,
        }
    }
}

fn load() -> Policy {
    common::one_thread();
    let options = PolicyOptions {
        kind: PolicyKind::Step,
        observation_shape: Some(vec![STATES as i64]),
        ..PolicyOptions::default()
    };
    Policy::load(&common::fixture("tabular.pt"), &options).unwrap()
}

/// How many standard errors the means of signal² and noise² lie off the truth.
fn deviations(
    group_size: usize,
    seed: u64,
    truth_of: impl Fn(&Truth) -> (f64, f64),
    advantages_of: impl Fn(&[f64]) -> Tensor,
    debias: Option<Debias>,
) -> (f64, f64) {
    let policy = load();
    let truth = Truth::new(&policy);
    let algorithm = Algorithm {
        advantage: AdvantageEstimator::DrGrpo,
        aggregation: Aggregation::SeqMeanTokenSumNorm,
        norm_length: Some(NORM_LENGTH),
        ..Preset::DrGrpo.algorithm()
    };
    let scorer = Scorer {
        policy: &policy,
        reference: None,
        algorithm: &algorithm,
        temperature: 1.0,
        recompute_old: false,
        components: Components::Separate,
    };
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mask = Tensor::ones([group_size as i64, STEPS as i64], (Kind::Bool, tch::Device::Cpu));
    let (mut signals, mut noises) = (Vec::new(), Vec::new());
    for _ in 0..DRAWS {
        let trajectories = (0..group_size).map(|_| truth.draw(&mut random)).collect();
        let group = Group { id: "x".into(), trajectories };
        let advantages = advantages_of(&group.rewards());
        let input = GroupInput {
            group: &group,
            advantages: advantages.unsqueeze(1).expand_as(&mask),
            weights: TokenWeights::new(algorithm.aggregation, algorithm.norm_length, &mask)
                .unwrap(),
        };
        let result = PlainEngine::default()
            .groups(&scorer, &[input], &mut || ControlFlow::Continue(()))
            .unwrap()
            .unwrap();
        let split =
            split(&result.groups[0].products, Coefficients { kl: 0.0, entropy: 0.0 }, debias, 0);
        signals.push(split.signal_sq);
        noises.push(split.noise_sq);
    }
    let (signal, noise) = truth_of(&truth);
    let off = |found: &[f64], truth: f64| {
        let n = found.len() as f64;
        let mean = found.iter().sum::<f64>() / n;
        let variance = found.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
        (mean - truth) / (variance / n).sqrt()
    };
    (off(&signals, signal), off(&noises, noise))
}

fn mean_baseline(rewards: &[f64]) -> Tensor {
    let rewards = Tensor::from_slice(rewards);
    GroupIndex::new(&vec![0; rewards.numel()], &rewards).dr_grpo(&rewards)
}

#[test]
fn a_fixed_baseline_leaves_the_estimates_unbiased() {
    const BASELINE: f64 = 0.4;
    for (group_size, seed) in [(3, 1), (8, 2)] {
        let (signal, noise) = deviations(
            group_size,
            seed,
            |truth| truth.with_fixed_baseline(group_size as f64, BASELINE),
            |rewards| Tensor::from_slice(rewards) - BASELINE,
            None,
        );
        assert!(signal.abs() < 4.0, "G = {group_size}: signal² is {signal:.1} errors off");
        assert!(noise.abs() < 4.0, "G = {group_size}: noise² is {noise:.1} errors off");
    }
}

#[test]
fn debias_takes_out_the_bias_of_a_mean_baseline() {
    for (group_size, seed) in [(3, 3), (8, 4)] {
        let (signal, noise) = deviations(
            group_size,
            seed,
            |truth| truth.with_mean_baseline(group_size as f64),
            mean_baseline,
            Some(Debias { leave_one_out: false, norm_length: NORM_LENGTH }),
        );
        assert!(signal.abs() < 4.0, "G = {group_size}: signal² is {signal:.1} errors off");
        assert!(noise.abs() < 4.0, "G = {group_size}: noise² is {noise:.1} errors off");
    }
}

/// The bias is real: without `debias` the same test fails at G = 3.
#[test]
fn without_debias_a_mean_baseline_is_biased() {
    let (signal, _) = deviations(3, 3, |truth| truth.with_mean_baseline(3.0), mean_baseline, None);
    assert!(signal > 4.0, "signal² is only {signal:.1} errors off");
}

/// Products of rows of Gaussian numbers around a mean.
fn gaussian_products(random: &mut ChaCha8Rng, rows: usize, mean: f64) -> GroupProducts {
    const DIMENSIONS: usize = 6;
    let mut normal = || {
        let (u, v): (f64, f64) = (random.random(), random.random());
        (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    };
    // The last row is the entropy gradient: 0.
    let vectors: Vec<Vec<f64>> = (0..=rows)
        .map(|row| {
            (0..DIMENSIONS)
                .map(|_| if row < rows { (mean + normal()) / rows as f64 } else { 0.0 })
                .collect()
        })
        .collect();
    let products = vectors
        .iter()
        .flat_map(|a| vectors.iter().map(move |b| a.iter().zip(b).map(|(x, y)| x * y).sum()))
        .collect();
    GroupProducts::exact(rows, vec![Part::Entropy], Gram::from_products(products))
}

fn sign_flip_ps(rows: usize, mean: f64, draws: usize) -> Vec<f64> {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let none = Coefficients { kl: 0.0, entropy: 0.0 };
    (0..draws as u64)
        .map(|seed| {
            split(&gaussian_products(&mut random, rows, mean), none, None, seed).signal_p.unwrap()
        })
        .collect()
}

/// Without signal P(p <= u) = u, on the grid of the flips (G = 8: 128 of them) and on that of the
/// sampled flips (G = 16). The Kolmogorov distance of n draws exceeds 1.63/√n once in a hundred.
#[test]
fn the_sign_flip_test_is_uniform_without_signal() {
    for (rows, draws) in [(8, DRAWS), (16, 200)] {
        let mut ps = sign_flip_ps(rows, 0.0, draws);
        ps.sort_by(f64::total_cmp);
        let distance = ps
            .iter()
            .enumerate()
            .map(|(index, p)| ((index + 1) as f64 / draws as f64 - p).abs())
            .fold(0.0, f64::max);
        let largest = 1.63 / (draws as f64).sqrt();
        assert!(distance < largest, "G = {rows}: distance {distance}");
    }
}

#[test]
fn the_sign_flip_test_sees_a_signal() {
    let ps = sign_flip_ps(8, 1.0, 200);
    let found = ps.iter().filter(|p| **p <= 0.05).count();
    assert!(found > 190, "{found} of 200");
}
