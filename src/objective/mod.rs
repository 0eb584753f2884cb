//! Objectives: every advantage, surrogate, KL and entropy term, and how they are aggregated.
//!
//! All functions are pure functions of tensors, on any device and any floating dtype. The loss,
//! which is minimised, is
//!
//! ```text
//! task + λ_KL · KL − λ_H · H
//! ```
//!
//! each term aggregated over the sampled tokens in the same way ([`Aggregation`]). A per-token
//! term is a [`Term`]: its value and its slope with respect to the log-probability, in closed form.

mod advantage;
mod aggregate;
mod importance;
mod kl;
mod logits;
mod preset;
mod reward;
mod surrogate;
mod value;

pub use advantage::{
    AdvantageEstimator, Estimates, GRPO_EPSILON, GroupIndex, discounted_returns, gae,
    on_last_token, whiten,
};
pub use aggregate::{Aggregation, Counts, TokenWeights};
pub use importance::{ImportanceCorrection, ImportanceLevel};
pub use kl::{KlEstimator, KlGradient, KlPenalty};
pub use logits::{entropy, gather, log_probs, logit_gradient};
pub use preset::{Algorithm, Preset, Rewards};
pub use reward::{AdaptiveKl, OverlongPenalty, mean_kl, rewards_with_kl};
pub use surrogate::{Surrogate, SurrogateForm};
pub use value::value_loss;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// A per-token loss term: its value and its slope with respect to `logp`, both `[B, T]`, both
/// constants to autograd.
#[derive(Debug)]
pub struct Term {
    /// The value.
    pub value: Tensor,
    /// d value / d logp.
    pub slope: Tensor,
}

impl Term {
    /// The value as a function of `logp` that autograd differentiates to the slope. `logp` must be
    /// finite, also outside the mask.
    pub fn attach(&self, logp: &Tensor) -> Tensor {
        &self.value + (logp - logp.detach()) * &self.slope
    }
}

/// What the per-token terms are made of; every tensor is `[B, T]`.
#[derive(Debug)]
pub struct Tokens {
    /// Log-probabilities under the policy; carries the graph if gradients are wanted.
    pub logp: Tensor,
    /// Log-probabilities under the policy that sampled.
    pub old_logp: Tensor,
    /// Log-probabilities under the reference policy, if there is one.
    pub ref_logp: Option<Tensor>,
    /// Advantages.
    pub advantages: Tensor,
    /// True on sampled tokens.
    pub mask: Tensor,
}

impl Tokens {
    /// The same with everything outside the mask set to 0, so that a NaN or an infinity there
    /// changes no value and no gradient (0·∞ is NaN: masking by a product would not do).
    ///
    /// # Errors
    /// If the shapes disagree.
    pub fn masked(&self) -> Result<Self> {
        for (name, tensor) in [
            ("old_logp", Some(&self.old_logp)),
            ("ref_logp", self.ref_logp.as_ref()),
            ("advantages", Some(&self.advantages)),
            ("mask", Some(&self.mask)),
        ] {
            if let Some(tensor) = tensor {
                expect_shape(name, tensor, &self.logp)?;
            }
        }
        let mask = self.mask.ne(0);
        Ok(Self {
            logp: masked(&self.logp, &mask),
            old_logp: masked(&self.old_logp, &mask),
            ref_logp: self.ref_logp.as_ref().map(|ref_logp| masked(ref_logp, &mask)),
            advantages: masked(&self.advantages, &mask),
            mask,
        })
    }
}

/// `values` where the mask is non-zero, 0 elsewhere, with no gradient there.
pub fn masked(values: &Tensor, mask: &Tensor) -> Tensor {
    values.where_self(&mask.ne(0), &values.zeros_like())
}

pub(crate) fn expect_shape(argument: &'static str, tensor: &Tensor, like: &Tensor) -> Result<()> {
    if tensor.size() == like.size() {
        return Ok(());
    }
    Err(Error::Argument {
        argument,
        expected: format!("shape {:?}", like.size()),
        found: format!("shape {:?}", tensor.size()),
    })
}

/// The widest float of a device: Apple's GPUs have no float64.
pub(crate) fn precise(device: Device) -> Kind {
    if device == Device::Mps { Kind::Float } else { Kind::Double }
}
