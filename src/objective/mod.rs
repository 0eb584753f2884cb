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
//!
//! # The losses of other trainers
//!
//! Settings under `algorithm` of a configuration, with the names that the peers give them. What
//! stands here is held by the golden files to 1e-7 relative, values and gradients (verl 0.9.1, TRL
//! 1.16.0, OpenRLHF 0.11.2); a dash: not held by a golden file.
//!
//! | here | verl | TRL | OpenRLHF |
//! |---|---|---|---|
//! | `surrogate: ppo_clip`, `clip_low`, `clip_high` | `policy_loss.loss_mode: vanilla`, `clip_ratio_low`, `clip_ratio_high` | `epsilon`, `epsilon_high` | `PolicyLoss(clip_eps_low, clip_eps_high)`; `--actor.eps_clip_low_high` |
//! | `log_ratio_clamp: 20` (the default) | always | `log_ratio_clamp: none` here: TRL clamps nothing | always |
//! | `dual_clip: 3` | `clip_ratio_c`, 3 unless set | `dual_clip: none` here | `dual_clip`, none unless set |
//! | `aggregation: token_mean` | `loss_agg_mode: token-mean` | `loss_type: bnpo`, `dapo` | `token_level_loss=True` |
//! | `aggregation: seq_mean_token_mean` | `seq-mean-token-mean` | `loss_type: grpo` | `token_level_loss=False` |
//! | `aggregation: seq_mean_token_sum` | `seq-mean-token-sum` | – | – |
//! | `aggregation: seq_mean_token_sum_norm`, `norm_length` | `seq-mean-token-sum-norm`, `loss_scale_factor` (the padded length unless set) | `loss_type: dr_grpo`, `max_completion_length` | – |
//! | `surrogate: cispo` | `loss_mode: cispo` | – | – |
//! | `surrogate: gspo`, `log_ratio_clamp: 10`, `aggregation: seq_mean_token_mean` | `loss_mode: gspo` | – | – |
//! | `kl: {estimator: k1}`, `abs`, `k2` | `kl_loss_type: k1` (`kl`), `abs`, `k2` (`mse`) | – | – |
//! | `kl: {estimator: k3, log_ratio_clamp: 20, value_clamp: 10}` | `kl_loss_type: low_var_kl` (`k3`) | – | – |
//! | the same with `gradient: k2` | `kl_loss_type: k1+`, `k3+` | – | – |
//! | `kl.coef`, `entropy_coef` | `kl_loss_coef` with `use_kl_loss`, `entropy_coeff` | – | – |
//! | `advantage: grpo` | `adv_estimator: grpo` | – | – |
//! | `advantage: dr_grpo` | `adv_estimator: grpo`, `norm_adv_by_std_in_grpo: False` | – | – |
//! | `advantage: rloo`, `gae`, `reinforce_plus_plus` | `adv_estimator: rloo`, `gae`, `reinforce_plus_plus` | – | – |
//! | [`value_loss`] with a clip | `compute_value_loss`, `cliprange_value` | – | – |
//!
//! What the peers do besides, and what makes the tolerance 1e-7: verl and OpenRLHF divide row sums
//! by the length plus 1e-8, and verl adds 1e-8 to the count and the variance when it whitens. A
//! padded row without a sampled token belongs to no mean here and in verl. Where a peer normalises
//! by the micro-batch, its loss depends on how the batch was split; a [`TokenWeights`] cannot.

mod advantage;
mod aggregate;
mod explain;
mod importance;
mod kl;
mod logits;
mod preset;
mod reward;
mod surrogate;
mod value;

pub use advantage::{
    AdvantageEstimator, Estimates, GRPO_EPSILON, GroupIndex, discounted_returns, gae,
    on_last_token, require_rewards, whiten,
};
pub use aggregate::{Aggregation, Counts, TokenWeights};
pub use importance::{ImportanceCorrection, ImportanceLevel};
pub(crate) use kl::k3;
pub use kl::{KlEstimator, KlGradient, KlPenalty};
pub use logits::{entropy, gather, log_probs, logit_gradient};
pub use preset::{Algorithm, KlPlacement, Preset, Rewards};
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
    /// Log-probabilities as the sampler itself reported them, if they are to be corrected for.
    pub sampler_logp: Option<Tensor>,
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
            ("sampler_logp", self.sampler_logp.as_ref()),
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
            ref_logp: self.ref_logp.as_ref().map(|logp| masked(logp, &mask)),
            sampler_logp: self.sampler_logp.as_ref().map(|logp| masked(logp, &mask)),
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
