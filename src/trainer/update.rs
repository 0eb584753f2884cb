//! The updates of a step: epochs of mini-batches, each a sum over micro-batches.

use rand::seq::SliceRandom;

use super::critic::Critic;
use super::optimizer::Optimizer;
use super::record::{UpdateRecord, UpdateSums};
use crate::env::Seed;
use crate::error::Result;
use crate::gradient::{LossBatch, Scorer};
use crate::objective::TokenWeights;
use crate::rollout::Batch;
use crate::study::PreparedBatch;

/// How a batch is gone through.
#[derive(Clone, Copy, Debug)]
pub struct UpdatePlan {
    /// How often.
    pub epochs: usize,
    /// Groups of an update; none: all of them.
    pub mini_batch_size: Option<usize>,
    /// Padded tokens of one forward pass.
    pub token_budget: usize,
    /// What the loss is multiplied by.
    pub factor: f64,
    /// Seeds the order of mini-batches, with the step.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// Whether the policy is left as it is, for a critic that is to learn first.
    pub critic_alone: bool,
}

/// What an update changes.
pub struct Learners<'a> {
    /// The policy's optimiser.
    pub optimizer: &'a mut Optimizer,
    /// The critic, if there is one.
    pub critic: Option<&'a mut Critic>,
}

impl UpdatePlan {
    /// Updates on the chosen groups of a batch. A mini-batch is one optimiser batch: its loss, with its
    /// own denominators, is the same however it is cut into micro-batches.
    ///
    /// # Errors
    /// If libtorch fails, a loss is not finite, or too many gradients in a row are not.
    pub fn run(
        &self,
        scorer: &Scorer,
        batch: &Batch,
        prepared: &PreparedBatch,
        groups: &[usize],
        mut learners: Learners,
    ) -> Result<UpdateRecord> {
        let mut sums = UpdateSums::default();
        let size = self.mini_batch_size.unwrap_or(groups.len()).max(1);
        for epoch in 0..self.epochs {
            for mini_batch in self.order(groups, size, epoch).chunks(size) {
                self.update(scorer, batch, prepared, mini_batch, &mut learners, &mut sums)?;
            }
        }
        Ok(sums.finish())
    }

    /// The groups of an epoch, shuffled if there are several mini-batches.
    fn order(&self, groups: &[usize], size: usize, epoch: usize) -> Vec<usize> {
        let mut order = groups.to_vec();
        if groups.len() > size {
            let seed = Seed { task: self.seed, visit: self.step, trajectory: epoch as u64 };
            order.shuffle(&mut seed.order_generator());
        }
        order
    }

    fn update(
        &self,
        scorer: &Scorer,
        batch: &Batch,
        prepared: &PreparedBatch,
        groups: &[usize],
        learners: &mut Learners,
        sums: &mut UpdateSums,
    ) -> Result<()> {
        let algorithm = scorer.algorithm;
        let rows = prepared.select(batch, groups);
        let weights = TokenWeights::new(algorithm.aggregation, algorithm.norm_length, &rows.mask)?;
        if let Some(critic) = &mut learners.critic {
            let (loss, update) = critic.update(&rows, &weights)?;
            sums.add_value_update(loss, &update);
        }
        if self.critic_alone {
            return Ok(());
        }
        let whole =
            LossBatch::new(rows.rows.clone(), rows.groups.clone(), &rows.advantages, &weights);
        for micro_batch in whole.micro_batches(self.token_budget) {
            let terms = micro_batch.loss(scorer)?;
            learners.optimizer.backward(&(&terms.surrogate * self.factor))?;
            let read = micro_batch.rows().iter().map(|row| row.forward_tokens()).sum();
            sums.add_loss(&terms, read);
        }
        sums.add_update(&learners.optimizer.step()?);
        Ok(())
    }
}
