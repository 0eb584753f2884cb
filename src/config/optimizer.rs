//! The sections of the optimiser and of the critic.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::resolve::range;
use super::{MaybeNumber, number_or};
use crate::error::{Error, Result};
use crate::trainer::{AdamWOptions, Decay, Schedule};

/// A learning rate that falls by half a cosine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CosineConfig {
    /// The updates of the run, the warm-up among them.
    pub updates: u64,
    /// The last share of the learning rate.
    #[serde(default)]
    pub floor: f64,
}

/// Section `optimizer`, and that of the critic.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// The full learning rate.
    pub learning_rate: f64,
    /// The decays of the mean gradient and of the mean squared gradient.
    pub betas: (f64, f64),
    /// Added to the root of the mean square.
    pub epsilon: f64,
    /// The decoupled weight decay.
    pub weight_decay: f64,
    /// Updates until the full learning rate is reached.
    pub warmup: u64,
    /// Half a cosine follows; none: the rate stays as it is.
    pub cosine: Option<CosineConfig>,
    /// The gradient is clipped to this norm, or `none`.
    pub max_norm: MaybeNumber,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-6,
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            weight_decay: 0.01,
            warmup: 0,
            cosine: None,
            max_norm: MaybeNumber::Number(1.0),
        }
    }
}

impl OptimizerConfig {
    /// Learning rate and decays.
    pub fn adamw(&self) -> AdamWOptions {
        AdamWOptions {
            learning_rate: self.learning_rate,
            beta1: self.betas.0,
            beta2: self.betas.1,
            epsilon: self.epsilon,
            weight_decay: self.weight_decay,
        }
    }

    /// The learning rate over the updates.
    pub fn schedule(&self) -> Schedule {
        let decay = match self.cosine {
            None => Decay::Constant,
            Some(CosineConfig { updates, floor }) => Decay::Cosine { updates, floor },
        };
        Schedule { warmup: self.warmup, decay }
    }

    /// The norm that the gradient is clipped to.
    pub fn max_norm(&self) -> Option<f64> {
        number_or(Some(self.max_norm), None)
    }

    pub(super) fn check(&self, section: &str) -> Result<()> {
        let key = |name: &str| format!("{section}.{name}");
        range(&key("learning_rate"), self.learning_rate, 0.0, 1e6)?;
        for beta in [self.betas.0, self.betas.1] {
            range(&key("betas"), beta, 0.0, 1.0 - f64::EPSILON)?;
        }
        range(&key("epsilon"), self.epsilon, f64::MIN_POSITIVE, 1e6)?;
        range(&key("weight_decay"), self.weight_decay, 0.0, 1e6)?;
        range(&key("max_norm"), self.max_norm().unwrap_or(1.0), f64::MIN_POSITIVE, f64::MAX)?;
        if let Some(CosineConfig { updates, floor }) = self.cosine {
            range(&key("cosine.floor"), floor, 0.0, 1.0)?;
            if updates <= self.warmup {
                return Err(Error::config(
                    key("cosine.updates"),
                    format!("expected more than the warm-up's {}, found {updates}", self.warmup),
                ));
            }
        }
        Ok(())
    }
}

/// Section `critic`: the value function of PPO.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CriticConfig {
    /// A TorchScript file that maps what the policy reads to one number a position: `[B, T, 1]`.
    pub checkpoint: Option<PathBuf>,
    /// A new value may move from the old one by this much before its gain counts no more, or `none`.
    pub clip: MaybeNumber,
    /// Steps in which the critic alone learns.
    pub warmup_steps: u64,
    /// Its optimiser.
    pub optimizer: OptimizerConfig,
}

impl Default for CriticConfig {
    fn default() -> Self {
        Self {
            checkpoint: None,
            clip: MaybeNumber::Number(0.5),
            warmup_steps: 0,
            optimizer: OptimizerConfig { learning_rate: 1e-5, ..OptimizerConfig::default() },
        }
    }
}

impl CriticConfig {
    /// The value clip.
    pub fn clip(&self) -> Option<f64> {
        number_or(Some(self.clip), None)
    }
}
