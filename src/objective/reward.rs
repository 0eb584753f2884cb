//! What is added to rewards before advantages are made of them.

use tch::{Kind, Tensor};

use super::{KlPenalty, masked};

/// DAPO's soft penalty for long responses (arXiv 2503.14476, Eq. 13): nothing up to
/// `limit − buffer` tokens, then falling linearly to `−factor` at `limit`, and never below.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverlongPenalty {
    /// The generation limit in tokens.
    pub limit: f64,
    /// The width of the slope in tokens, above 0.
    pub buffer: f64,
    /// The depth.
    pub factor: f64,
}

impl OverlongPenalty {
    /// The penalty, from 0 down to `−factor`, of responses of these lengths, any shape.
    pub fn penalty(&self, lengths: &Tensor) -> Tensor {
        let excess = lengths - (self.limit - self.buffer);
        -(excess / self.buffer).clamp(0.0, 1.0) * self.factor
    }
}

/// `[B, T]`: token rewards less `coef` times the KL estimate of each sampled token; all `[B, T]`.
/// The estimate is of the policy that sampled, and its value alone counts (InstructGPT, arXiv
/// 2203.02155, Eq. 2).
pub fn rewards_with_kl(
    token_rewards: &Tensor,
    old_logp: &Tensor,
    ref_logp: &Tensor,
    mask: &Tensor,
    kl: &KlPenalty,
    coef: f64,
) -> Tensor {
    let (old_logp, ref_logp) = (masked(old_logp, mask), masked(ref_logp, mask));
    masked(&(token_rewards - kl.term(&old_logp, &ref_logp).value * coef), mask)
}

/// A KL coefficient that follows the measured KL (arXiv 1909.08593, Section 2.2): after `n`
/// trajectories it is multiplied by `1 + clip(KL/target − 1, ±0.2)·n/horizon`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveKl {
    /// The coefficient now.
    pub coef: f64,
    /// The KL that is wanted.
    pub target: f64,
    /// Over how many trajectories an error of the whole target would double it.
    pub horizon: f64,
}

impl AdaptiveKl {
    /// How far one error may count.
    const CLIP: f64 = 0.2;

    /// Adapts the coefficient to the mean KL of the last `trajectories`.
    pub fn update(&mut self, mean_kl: f64, trajectories: usize) {
        let error = (mean_kl / self.target - 1.0).clamp(-Self::CLIP, Self::CLIP);
        self.coef *= 1.0 + error * trajectories as f64 / self.horizon;
    }
}

/// The mean KL estimate of the sampled tokens, a scalar; 0 without a sampled token.
pub fn mean_kl(old_logp: &Tensor, ref_logp: &Tensor, mask: &Tensor, kl: &KlPenalty) -> Tensor {
    let (old_logp, ref_logp) = (masked(old_logp, mask), masked(ref_logp, mask));
    let value = masked(&kl.term(&old_logp, &ref_logp).value, mask);
    let count = mask.ne(0).sum(Kind::Int64).clamp_min(1);
    value.sum(value.kind()) / count
}
