//! The mismatch between a sampler and the trainer that scores the same tokens.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::masked;

/// Whether a weight belongs to a token or to a whole row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceLevel {
    /// `exp(old − sampler)` of each token.
    Token,
    /// `exp(Σ_t (old − sampler))` of the row, for each of its tokens.
    Sequence,
}

/// Truncated importance sampling: `min(π_old/π_sampler, cap)` multiplies the task term. A sampler of
/// its own (vLLM, SGLang) gives the tokens that it drew other log-probabilities than the trainer
/// does for the same weights. The weight is a constant to every gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportanceCorrection {
    /// Token or sequence.
    pub level: ImportanceLevel,
    /// The largest weight.
    #[serde(default = "default_cap")]
    pub cap: f64,
}

fn default_cap() -> f64 {
    2.0
}

impl ImportanceCorrection {
    /// `[B, T]`: the weights, 0 outside the mask; all inputs are `[B, T]`.
    pub fn weights(&self, old_logp: &Tensor, sampler_logp: &Tensor, mask: &Tensor) -> Tensor {
        let log_ratio = masked(&(old_logp - sampler_logp).detach(), mask);
        let log_ratio = match self.level {
            ImportanceLevel::Token => log_ratio,
            ImportanceLevel::Sequence => {
                let kind = log_ratio.kind();
                log_ratio.sum_dim_intlist(1, true, kind).expand_as(&log_ratio)
            }
        };
        // Truncated before the exponential, which then cannot overflow.
        masked(&log_ratio.clamp_max(self.cap.ln()).exp(), mask)
    }
}
