//! The loss of a micro-batch for an optimiser, by the same closed form that the split starts from.

use tch::Tensor;

use super::pack::{Micro, Upstream};
use super::rows::{RowStats, Scorer};
use crate::error::Result;
use crate::objective::TokenWeights;
use crate::rollout::Trajectory;

/// Trajectories with what their loss needs: advantages and weights that were taken once, on the whole
/// optimiser batch.
pub struct LossBatch<'a>(Micro<'a>);

/// What [`LossBatch::loss`] gives.
#[derive(Debug)]
pub struct LossTerms {
    /// A scalar whose gradient is that of the loss. Its own value means nothing.
    pub surrogate: Tensor,
    /// These rows' share of the task loss.
    pub task: f64,
    /// Their share of the KL penalty, at coefficient 1; 0 without a reference policy.
    pub kl: f64,
    /// Their share of the entropy.
    pub entropy: f64,
    /// Sums over the sampled tokens of each row.
    pub stats: Vec<RowStats>,
}

impl<'a> LossBatch<'a> {
    /// Rows, each with the name of its group for messages, advantages `[B, T]` float64 on the CPU, and
    /// their weights.
    pub fn new(
        rows: Vec<&'a Trajectory>,
        groups: Vec<&'a str>,
        advantages: &Tensor,
        weights: &TokenWeights,
    ) -> Self {
        Self(Micro::of_rows(rows, groups, advantages, weights))
    }

    /// Its rows in batches of at most `token_budget` padded tokens, alike in length. The sum of their
    /// losses is the loss of the whole.
    pub fn micro_batches(&self, token_budget: usize) -> Vec<LossBatch<'a>> {
        let chunks = self.0.chunks(token_budget);
        chunks.iter().map(|chunk| LossBatch(self.0.select(chunk))).collect()
    }

    /// The rows.
    pub fn rows(&self) -> &[&'a Trajectory] {
        &self.0.rows
    }

    /// The loss under a policy; one forward pass, with a graph.
    ///
    /// # Errors
    /// If libtorch fails or a loss is not finite.
    pub fn loss(&self, scorer: &Scorer) -> Result<LossTerms> {
        let batch = scorer.policy.batch_logits(&self.0.rows)?;
        let (upstream, stats) = Upstream::new(scorer, &self.0, &batch.logits, &batch.actions)?;
        let [task, kl, entropy] = upstream.sums()?;
        let gradient = upstream.loss()?;
        // d/dz ⟨z, g⟩ = g. A logit of −∞ has gradient 0, and 0·∞ is NaN.
        let finite = batch.logits.masked_fill(&batch.logits.isinf(), 0.0);
        let surrogate = (finite * gradient).sum(batch.logits.kind());
        Ok(LossTerms { surrogate, task, kl, entropy, stats })
    }
}
