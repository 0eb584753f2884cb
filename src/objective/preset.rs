//! The algorithms as data: which terms make up a loss, and the presets.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::advantage::{
    Estimates, GRPO_EPSILON, GroupIndex, discounted_returns, gae, on_last_token, whiten,
};
use super::{
    AdvantageEstimator, Aggregation, ImportanceCorrection, KlEstimator, KlGradient, KlPenalty,
    Surrogate, SurrogateForm, Term, Tokens, masked,
};
use crate::error::{Error, Result};

/// The log-ratio is clamped to ± this in every preset.
const LOG_RATIO_CLAMP: f64 = 20.0;

/// A named set of defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// GRPO (arXiv 2402.03300).
    Grpo,
    /// Dr.GRPO (arXiv 2503.20783).
    DrGrpo,
    /// DAPO (arXiv 2503.14476).
    Dapo,
    /// PPO (arXiv 1707.06347).
    Ppo,
    /// RLOO (arXiv 2402.14740).
    Rloo,
    /// REINFORCE++ (arXiv 2501.03262).
    ReinforcePlusPlus,
}

/// A complete loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Algorithm {
    /// How rewards become advantages.
    pub advantage: AdvantageEstimator,
    /// The task term.
    pub surrogate: Surrogate,
    /// How per-token terms become one number.
    pub aggregation: Aggregation,
    /// The constant length of [`Aggregation::SeqMeanTokenSumNorm`].
    pub norm_length: Option<f64>,
    /// Discount of GAE and of discounted returns.
    pub gamma: f64,
    /// λ of GAE.
    pub lam: f64,
    /// The KL term.
    pub kl: KlPenalty,
    /// Whether the KL penalty is a term of the loss or is taken off the rewards.
    pub kl_placement: KlPlacement,
    /// The factor λ_H of the entropy, which the loss rewards.
    pub entropy_coef: f64,
    /// Corrects for a sampler of its own, if given.
    pub importance: Option<ImportanceCorrection>,
}

/// Where the KL penalty acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlPlacement {
    /// A term of the loss, with its own gradient.
    Loss,
    /// Taken off the token rewards: part of the task, and a constant to the gradient.
    Reward,
}

impl Preset {
    /// Every preset.
    pub const ALL: [Self; 6] =
        [Self::Grpo, Self::DrGrpo, Self::Dapo, Self::Ppo, Self::Rloo, Self::ReinforcePlusPlus];

    /// The preset's loss. Dr.GRPO's `norm_length` has no default: it is the generation limit.
    pub fn algorithm(self) -> Algorithm {
        let grpo = Algorithm {
            advantage: AdvantageEstimator::Grpo,
            surrogate: Surrogate {
                form: SurrogateForm::PpoClip,
                clip_low: 0.2,
                clip_high: 0.2,
                dual_clip: None,
                log_ratio_clamp: Some(LOG_RATIO_CLAMP),
            },
            aggregation: Aggregation::SeqMeanTokenMean,
            norm_length: None,
            gamma: 1.0,
            lam: 1.0,
            kl: KlPenalty {
                coef: 0.001,
                estimator: KlEstimator::K3,
                gradient: KlGradient::Own,
                log_ratio_clamp: Some(LOG_RATIO_CLAMP),
                value_clamp: None,
            },
            kl_placement: KlPlacement::Loss,
            entropy_coef: 0.0,
            importance: None,
        };
        let without_kl = KlPenalty { coef: 0.0, ..grpo.kl };
        match self {
            Self::Grpo => grpo,
            Self::DrGrpo => Algorithm {
                advantage: AdvantageEstimator::DrGrpo,
                aggregation: Aggregation::SeqMeanTokenSumNorm,
                kl: without_kl,
                ..grpo
            },
            Self::Dapo => Algorithm {
                surrogate: Surrogate { clip_high: 0.28, ..grpo.surrogate },
                aggregation: Aggregation::TokenMean,
                kl: without_kl,
                ..grpo
            },
            Self::Ppo => Algorithm {
                advantage: AdvantageEstimator::Gae,
                surrogate: Surrogate { dual_clip: Some(3.0), ..grpo.surrogate },
                aggregation: Aggregation::TokenMean,
                kl: without_kl,
                ..grpo
            },
            Self::Rloo => Algorithm {
                advantage: AdvantageEstimator::Rloo,
                aggregation: Aggregation::SeqMeanTokenSum,
                kl: without_kl,
                ..grpo
            },
            Self::ReinforcePlusPlus => Algorithm {
                advantage: AdvantageEstimator::ReinforcePlusPlus,
                aggregation: Aggregation::TokenMean,
                kl: without_kl,
                ..grpo
            },
        }
    }
}

/// What advantages are made from: a whole optimiser batch, in any order of rows.
#[derive(Debug)]
pub struct Rewards<'a> {
    /// `[B]`, the reward of each row.
    pub rewards: &'a Tensor,
    /// `[B, T]`, if rewards are known by token; otherwise each row's reward sits on its last
    /// sampled token.
    pub token_rewards: Option<&'a Tensor>,
    /// `[B, T]`, for GAE.
    pub values: Option<&'a Tensor>,
    /// `[B, T]`, non-zero on sampled tokens.
    pub mask: &'a Tensor,
    /// Which rows are answers to one prompt.
    pub groups: &'a GroupIndex,
}

impl Rewards<'_> {
    /// `[B, T]`
    fn by_token(&self) -> Result<Tensor> {
        match self.token_rewards {
            Some(rewards) => Ok(rewards.shallow_clone()),
            None => on_last_token(self.rewards, self.mask),
        }
    }
}

impl Algorithm {
    /// The advantages `[B, T]` of a whole batch, 0 outside the mask.
    ///
    /// # Errors
    /// If shapes disagree, or GAE is given no values.
    pub fn advantages(&self, batch: &Rewards) -> Result<Tensor> {
        let per_row = match self.advantage {
            AdvantageEstimator::Grpo => batch.groups.grpo(batch.rewards, GRPO_EPSILON),
            AdvantageEstimator::DrGrpo => batch.groups.dr_grpo(batch.rewards),
            AdvantageEstimator::Rloo => batch.groups.rloo(batch.rewards),
            AdvantageEstimator::Gae | AdvantageEstimator::ReinforcePlusPlus => {
                return self.token_advantages(batch);
            }
        };
        let per_token = per_row.unsqueeze(1).expand_as(batch.mask);
        Ok(masked(&per_token, batch.mask))
    }

    fn token_advantages(&self, batch: &Rewards) -> Result<Tensor> {
        let raw = if self.advantage == AdvantageEstimator::Gae {
            self.gae(batch)?.advantages
        } else {
            discounted_returns(&batch.by_token()?, batch.mask, self.gamma)?
        };
        whiten(&raw, batch.mask)
    }

    fn gae(&self, batch: &Rewards) -> Result<Estimates> {
        let values = batch.values.ok_or_else(|| Error::Argument {
            argument: "values",
            expected: "a value estimate for every token, since the advantage is GAE".into(),
            found: "none".into(),
        })?;
        gae(&batch.by_token()?, values, batch.mask, self.gamma, self.lam)
    }

    /// The returns `[B, T]` that a value function is fitted to, 0 outside the mask; none unless the
    /// advantage is GAE.
    ///
    /// # Errors
    /// As [`advantages`](Self::advantages).
    pub fn returns(&self, batch: &Rewards) -> Result<Option<Tensor>> {
        let is_gae = self.advantage == AdvantageEstimator::Gae;
        is_gae.then(|| Ok(self.gae(batch)?.returns)).transpose()
    }

    /// The task term of masked tokens, weighted by the importance correction where there is one.
    pub fn task(&self, tokens: &Tokens) -> Term {
        let term =
            self.surrogate.term(&tokens.logp, &tokens.old_logp, &tokens.advantages, &tokens.mask);
        let (Some(correction), Some(sampler_logp)) = (&self.importance, &tokens.sampler_logp)
        else {
            return term;
        };
        let weights = correction.weights(&tokens.old_logp, sampler_logp, &tokens.mask);
        Term { value: term.value * &weights, slope: term.slope * weights }
    }

    /// The factor of the KL term in the loss: 0 where the penalty acts on the rewards.
    pub fn kl_loss_coef(&self) -> f64 {
        match self.kl_placement {
            KlPlacement::Loss => self.kl.coef,
            KlPlacement::Reward => 0.0,
        }
    }

    /// The KL term of masked tokens at coefficient 1; none without a reference policy.
    pub fn kl(&self, tokens: &Tokens) -> Option<Term> {
        tokens.ref_logp.as_ref().map(|ref_logp| self.kl.term(&tokens.logp, ref_logp))
    }
}
