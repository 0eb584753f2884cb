//! The loss of a micro-batch of token rollouts, written out, for a plain training loop.

use gradprism::objective::{self, Algorithm, TokenWeights, Tokens};
use gradprism::policy::Policy;
use gradprism::rollout::{Batch, Trajectory};
use gradprism::study::PreparedBatch;
use tch::Tensor;

/// A batch whose advantages and weights were taken once, on the whole of it.
pub struct Whole<'a> {
    pub algorithm: Algorithm,
    pub rows: Vec<&'a Trajectory>,
    pub advantages: Tensor,
    pub weights: TokenWeights,
}

/// `[b, t]`, rows padded with 0.
fn padded(rows: &[&Trajectory], length: usize, of: impl Fn(&Trajectory) -> Vec<f64>) -> Tensor {
    let numbers: Vec<f64> = rows
        .iter()
        .flat_map(|row| {
            let mut numbers = of(row);
            numbers.resize(length, 0.0);
            numbers
        })
        .collect();
    Tensor::from_slice(&numbers).reshape([rows.len() as i64, length as i64])
}

fn longest(rows: &[&Trajectory]) -> usize {
    rows.iter().map(|row| row.content.len()).max().unwrap()
}

impl<'a> Whole<'a> {
    pub fn new(algorithm: Algorithm, batch: &'a Batch) -> Self {
        let rows: Vec<&Trajectory> = batch.trajectories().collect();
        let mask = padded(&rows, longest(&rows), |row| {
            row.mask.iter().map(|sampled| f64::from(*sampled)).collect()
        });
        let weights =
            TokenWeights::new(algorithm.aggregation, algorithm.norm_length, &mask).unwrap();
        let advantages = PreparedBatch::new(&algorithm, batch).unwrap().advantages;
        Self { algorithm, rows, advantages, weights }
    }

    /// The share of rows `start..start + count` in the loss of the batch.
    pub fn loss(&self, policy: &Policy, start: usize, count: usize) -> Tensor {
        let rows = &self.rows[start..start + count];
        let length = longest(rows);
        let logits = policy.batch_logits(rows).unwrap();
        let log_probs = objective::log_probs(&logits.logits, 1.0);
        let lengths: Vec<i64> = rows.iter().map(|row| row.content.len() as i64).collect();
        // Numbers of the tokens one after the other to `[b, t]`.
        let by_row = |flat: &Tensor| {
            let rows: Vec<Tensor> = flat
                .split_with_sizes(&lengths, 0)
                .iter()
                .map(|row| row.constant_pad_nd([0, length as i64 - row.size()[0]]))
                .collect();
            Tensor::stack(&rows, 0)
        };
        let (first, rest) = (start as i64, count as i64);
        let weights = self.weights.micro_batch(first, rest, length as i64);
        let tokens = Tokens {
            logp: by_row(&objective::gather(&log_probs, &logits.actions).unwrap()),
            old_logp: padded(rows, length, |row| row.old_logprobs.clone().unwrap()),
            ref_logp: Some(padded(rows, length, |row| row.ref_logprobs.clone().unwrap())),
            sampler_logp: None,
            advantages: self.advantages.narrow(0, first, rest).narrow(1, 0, length as i64),
            mask: weights.mask().shallow_clone(),
        }
        .masked()
        .unwrap();
        let task = self.algorithm.task(&tokens).attach(&tokens.logp);
        let kl = self.algorithm.kl(&tokens).unwrap().attach(&tokens.logp);
        let entropy = by_row(&objective::entropy(&log_probs));
        weights.sum(&task).unwrap() + weights.sum(&kl).unwrap() * self.algorithm.kl.coef
            - weights.sum(&entropy).unwrap() * self.algorithm.entropy_coef
    }
}
