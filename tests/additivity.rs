//! Σ_x ω_x [g_task(x) + λ_KL g_KL(x) + λ_H g_entropy(x)] is the plain gradient of the batch loss,
//! taken here in one padded forward and one backward pass, to 1e-6 relative in float64.

mod common;

use std::ops::ControlFlow;
use std::path::Path;

use gradprism::gradient::{
    BatchedEngine, Coefficients, ComponentSums, Components, Engine, GroupInput, PlainEngine, Scorer,
};
use gradprism::objective::{self, Aggregation, Algorithm, Preset, TokenWeights, Tokens};
use gradprism::policy::{Dtype, Policy, PolicyKind, PolicyOptions};
use gradprism::rollout::{Batch, Content, OnProblem, ReadOptions, Trajectory, read};
use gradprism::study::PreparedBatch;
use tch::{Kind, Tensor};

const TOLERANCE: f64 = 1e-6;

fn presets() -> Vec<(String, Algorithm)> {
    let named = [
        Preset::Grpo,
        Preset::DrGrpo,
        Preset::Dapo,
        Preset::Ppo,
        Preset::Rloo,
        Preset::ReinforcePlusPlus,
    ];
    let aggregations = [
        Aggregation::TokenMean,
        Aggregation::SeqMeanTokenMean,
        Aggregation::SeqMeanTokenSum,
        Aggregation::SeqMeanTokenSumNorm,
    ];
    named
        .into_iter()
        .flat_map(|preset| {
            aggregations.into_iter().map(move |aggregation| {
                let mut algorithm = preset.algorithm();
                algorithm.aggregation = aggregation;
                algorithm.norm_length = Some(16.0);
                // Regularizers as large as the task, so that an error in them would show.
                algorithm.kl.coef = 0.7;
                algorithm.entropy_coef = 0.3;
                (format!("{preset:?} with {aggregation:?}"), algorithm)
            })
        })
        .collect()
}

fn load(path: &Path) -> Policy {
    common::one_thread();
    let options = PolicyOptions { dtype: Dtype::Float64, ..PolicyOptions::default() };
    Policy::load(path, &options).unwrap()
}

/// `[B, T]` of one number a token, rows padded at the end.
fn padded(rows: &[&Trajectory], length: usize, of: impl Fn(&Trajectory) -> Vec<f64>) -> Tensor {
    let numbers: Vec<f64> = rows
        .iter()
        .flat_map(|row| {
            let mut numbers = of(row);
            numbers.resize(length, f64::NAN);
            numbers
        })
        .collect();
    Tensor::from_slice(&numbers).reshape([rows.len() as i64, length as i64])
}

/// The gradient of the batch loss the way a trainer takes it.
fn plain_gradient(policy: &Policy, algorithm: &Algorithm, batch: &Batch) -> Vec<Tensor> {
    let rows: Vec<&Trajectory> = batch.trajectories().collect();
    let parts: Vec<(&Vec<i64>, &Vec<i64>)> = rows
        .iter()
        .map(|row| match &row.content {
            Content::Tokens { prompt_ids, response_ids } => (prompt_ids, response_ids),
            Content::Steps { .. } => panic!("token rollouts only"),
        })
        .collect();
    let whole = parts.iter().map(|(prompt, response)| prompt.len() + response.len()).max().unwrap();
    let length = parts.iter().map(|(_, response)| response.len()).max().unwrap();
    let ids: Vec<i64> = parts
        .iter()
        .flat_map(|(prompt, response)| {
            let mut ids = [prompt.as_slice(), response.as_slice()].concat();
            ids.resize(whole, 0);
            ids
        })
        .collect();
    let count = rows.len() as i64;
    let ids = Tensor::from_slice(&ids).reshape([count, whole as i64]);
    let lengths: Vec<i64> =
        parts.iter().map(|(prompt, response)| (prompt.len() + response.len()) as i64).collect();
    let positions = Tensor::arange(whole as i64, (Kind::Int64, tch::Device::Cpu)).unsqueeze(0);
    let attention = positions.lt_tensor(&Tensor::from_slice(&lengths).unsqueeze(1));
    let logits = policy.token_logits(&ids, &attention.to_kind(Kind::Int64)).unwrap();
    let log_probs = objective::log_probs(&logits, 1.0);

    // Row i, token t of the response is predicted at position prompt − 1 + t.
    let index: Vec<i64> = parts
        .iter()
        .flat_map(|(prompt, _)| {
            let first = prompt.len() as i64 - 1;
            (0..length as i64).map(move |t| (first + t).min(whole as i64 - 1))
        })
        .collect();
    let index = Tensor::from_slice(&index).reshape([count, length as i64, 1]);
    let log_probs =
        log_probs.gather(1, &index.expand([count, length as i64, policy.choices()], false), false);
    let actions: Vec<i64> = parts
        .iter()
        .flat_map(|(_, response)| {
            let mut actions = (*response).clone();
            actions.resize(length, 0);
            actions
        })
        .collect();
    let actions = Tensor::from_slice(&actions).reshape([count, length as i64]);

    let mask = padded(&rows, length, |row| row.mask.iter().map(|m| f64::from(*m)).collect());
    let mask = mask.nan_to_num(0.0, 0.0, 0.0).ne(0.0);
    let advantages = PreparedBatch::new(algorithm, batch).unwrap().advantages;
    let tokens = Tokens {
        logp: objective::gather(&log_probs, &actions).unwrap(),
        old_logp: padded(&rows, length, |row| row.old_logprobs.clone().unwrap()),
        ref_logp: Some(padded(&rows, length, |row| row.ref_logprobs.clone().unwrap())),
        sampler_logp: None,
        advantages,
        mask: mask.shallow_clone(),
    }
    .masked()
    .unwrap();
    let weights = TokenWeights::new(algorithm.aggregation, algorithm.norm_length, &mask).unwrap();
    let task = algorithm.task(&tokens).attach(&tokens.logp);
    let kl = algorithm.kl(&tokens).unwrap().attach(&tokens.logp);
    let entropy = objective::entropy(&log_probs);
    let loss = weights.sum(&task).unwrap() + weights.sum(&kl).unwrap() * algorithm.kl.coef
        - weights.sum(&entropy).unwrap() * algorithm.entropy_coef;
    let parameters: Vec<&Tensor> = policy.trainable().map(|p| &p.tensor).collect();
    Tensor::run_backward(&[loss], &parameters, false, false)
}

/// The same from the split: by the plain engine group by group, or by the batched one all groups at
/// once.
fn split_gradient(
    policy: &Policy,
    algorithm: &Algorithm,
    batch: &Batch,
    engine: &mut dyn Engine,
    at_once: usize,
) -> Vec<Tensor> {
    let prepared = PreparedBatch::new(algorithm, batch).unwrap();
    let scorer = Scorer {
        policy,
        reference: None,
        algorithm,
        temperature: 1.0,
        recompute_old: false,
        components: Components::Separate,
    };
    let groups: Vec<usize> = (0..batch.groups.len()).collect();
    let mut sums = ComponentSums::default();
    for pack in groups.chunks(at_once) {
        let inputs: Vec<GroupInput> = pack
            .iter()
            .map(|group| prepared.group_input(algorithm, batch, *group).unwrap())
            .collect();
        let result =
            engine.groups(&scorer, &inputs, &mut || ControlFlow::Continue(())).unwrap().unwrap();
        let shares: Vec<f64> = pack.iter().map(|group| prepared.shares[*group]).collect();
        sums.add(&shares, &result.gradients);
    }
    let coefficients = Coefficients { kl: algorithm.kl.coef, entropy: algorithm.entropy_coef };
    sums.loss_gradient(coefficients).unwrap()
}

fn assert_additive(policy: &Policy, batch: &Batch) {
    let norm = |vector: &[Tensor]| {
        let squares: f64 =
            vector.iter().map(|t| t.square().sum(Kind::Double).double_value(&[])).sum();
        squares.sqrt()
    };
    for (name, algorithm) in presets() {
        let whole = plain_gradient(policy, &algorithm, batch);
        let batched = || BatchedEngine::new(PlainEngine::default(), 4096, true, 0, None);
        let splits = [
            split_gradient(policy, &algorithm, batch, &mut PlainEngine::default(), 1),
            split_gradient(policy, &algorithm, batch, &mut batched(), 1),
            split_gradient(policy, &algorithm, batch, &mut batched(), 3),
        ];
        for (way, split) in splits.iter().enumerate() {
            let difference: Vec<Tensor> = whole.iter().zip(split).map(|(a, b)| a - b).collect();
            let (error, scale) = (norm(&difference), norm(&whole));
            assert!(scale > 0.0, "{name}: there is a gradient");
            assert!(error <= TOLERANCE * scale, "{name}, way {way}: {error:e} of {scale:e}");
        }
    }
}

#[test]
fn the_split_adds_up_on_a_tied_transformer() {
    assert_additive(&load(&common::fixture("double.pt")), &common::synthetic_batch(5, 1));
}

#[test]
fn the_split_adds_up_on_the_quickstart_policy() {
    let options = ReadOptions {
        kind: PolicyKind::CausalLm,
        tokenizer: None,
        single: OnProblem::Error,
        missing_reward: OnProblem::Error,
    };
    let rollouts = read(&common::config("quickstart/rollouts.jsonl"), &options).unwrap();
    let mut batch = rollouts.batches.into_iter().next().unwrap();
    batch.groups.truncate(6);
    // The rollouts hold no values, which PPO needs: any will do here.
    for (row, trajectory) in
        batch.groups.iter_mut().flat_map(|group| &mut group.trajectories).enumerate()
    {
        let value = |t: usize| ((row * 7 + t * 3) % 11) as f64 / 11.0;
        trajectory.values = Some((0..trajectory.mask.len()).map(value).collect());
    }
    assert!(batch.groups.iter().any(|group| {
        let rewards = group.rewards();
        rewards.iter().any(|reward| *reward != rewards[0])
    }));
    assert_additive(&load(&common::config("quickstart/policy.pt")), &batch);
}
