//! The section of the filter.

use serde::{Deserialize, Serialize};

use super::resolve::{range, word};
use crate::error::{Error, Result};
use crate::filter::{
    Adaptive, AdaptiveState, Compat, Direction, Filter, LossScale, Mass, OnEmpty, Score,
    StepFilter, Strategy,
};

/// Section `filter`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FilterConfig {
    /// What groups are ranked by.
    pub score: Score,
    /// How groups are chosen.
    pub strategy: Strategy,
    /// Which scores come first.
    pub direction: Direction,
    /// What counts as mass, for top_p.
    pub mass: Mass,
    /// The parameter of the strategy.
    pub value: f64,
    /// How far the mass may fall short, for top_p by linear mass.
    pub epsilon: f64,
    /// Whether groups of score 0 may be kept.
    pub include_zero: bool,
    /// What to do if no group is kept.
    pub on_empty: OnEmpty,
    /// Whose choices are reproduced.
    pub compat: Option<Compat>,
    /// Lets the keep rate of top_p follow the spread of the reward variances.
    pub adaptive: Option<Adaptive>,
    /// How the loss is scaled by the share that is kept.
    pub loss_scale: LossScale,
    /// Groups of an optimiser step; none: the whole batch.
    pub mini_batch_size: Option<usize>,
}

impl Default for FilterConfig {
    fn default() -> Self {
        let Filter { strategy, direction, mass, value, epsilon, include_zero, on_empty, compat } =
            Filter::default();
        Self {
            score: Score::RewardVariance,
            strategy,
            direction,
            mass,
            value,
            epsilon,
            include_zero,
            on_empty,
            compat,
            adaptive: None,
            loss_scale: LossScale::None,
            mini_batch_size: None,
        }
    }
}

impl FilterConfig {
    /// The filter with what goes with it from batch to batch, at the start of its history.
    pub fn step_filter(&self) -> StepFilter {
        let Self {
            strategy, direction, mass, value, epsilon, include_zero, on_empty, compat, ..
        } = *self;
        StepFilter {
            filter: Filter {
                strategy,
                direction,
                mass,
                value,
                epsilon,
                include_zero,
                on_empty,
                compat,
            },
            score: self.score,
            adaptive: self.adaptive,
            loss_scale: self.loss_scale,
            mini_batch_size: self.mini_batch_size,
            state: AdaptiveState::default(),
        }
    }

    /// Checks every number.
    pub(super) fn check(&self) -> Result<()> {
        let value = self.value;
        match self.strategy {
            Strategy::TopP | Strategy::TopK | Strategy::MinP => {
                range("filter.value", value, 0.0, 1.0)?
            }
            Strategy::TopKAbs => {
                range("filter.value", value, 1.0, 1e9)?;
                if value.fract() != 0.0 {
                    return Err(Error::config(
                        "filter.value",
                        format!("expected a whole number of groups for top_k_abs, found {value}"),
                    ));
                }
            }
            Strategy::Threshold => range("filter.value", value, f64::MIN, f64::MAX)?,
            Strategy::None => {}
        }
        range("filter.epsilon", self.epsilon, 0.0, f64::MAX)?;
        if self.mini_batch_size == Some(0) {
            return Err(Error::config(
                "filter.mini_batch_size",
                "expected a number of groups of at least 1, or null, found 0",
            ));
        }
        if self.compat == Some(Compat::Ragen) && self.strategy == Strategy::Threshold {
            return Err(Error::config(
                "filter.compat",
                "RAGEN has no strategy threshold whose choices could be reproduced; expected null",
            ));
        }
        let Some(adaptive) = &self.adaptive else { return Ok(()) };
        if self.strategy != Strategy::TopP {
            return Err(Error::config(
                "filter.adaptive",
                format!("adapts the keep rate of top_p; the strategy is {}", word(&self.strategy)),
            ));
        }
        if self.compat.is_some() {
            return Err(Error::config(
                "filter.adaptive",
                "RAGEN's keep rate is fixed; leave either filter.adaptive or filter.compat out",
            ));
        }
        range("filter.adaptive.low", adaptive.low, 0.0, 1e6)?;
        range("filter.adaptive.high", adaptive.high, f64::MIN_POSITIVE, 1e6)?;
        range("filter.adaptive.momentum", adaptive.momentum, 0.0, 1.0)?;
        if adaptive.high <= adaptive.low || adaptive.momentum == 1.0 {
            return Err(Error::config(
                "filter.adaptive",
                format!(
                    "expected low < high and momentum < 1, found low {}, high {} and momentum {}",
                    adaptive.low, adaptive.high, adaptive.momentum
                ),
            ));
        }
        Ok(())
    }
}
