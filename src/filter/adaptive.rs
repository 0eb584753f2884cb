//! A keep rate that follows how much the reward variances of a batch differ.

use serde::{Deserialize, Serialize};

use super::variance;

/// The rule of an adaptive top-p.
///
/// A filter by reward variance can only tell groups apart whose reward variances differ. RAGEN-2 (arXiv
/// 2604.06268) measures that by Std(RV)/Mean(RV) over the groups of a batch: where it was 1.29 and 1.16
/// filtering helped, where it was 0.33 it hurt. So with s the [`spread`], averaged over past batches,
///
/// ```text
/// s̄ ← momentum·s̄ + (1 − momentum)·s        (the first batch: s̄ = s)
/// rate = 1 − (1 − value)·clamp((s̄ − low)/(high − low), 0, 1)
/// ```
///
/// The rate is what top-p takes in place of its `value`: `value` itself from s̄ = `high` on, 1 up to
/// s̄ = `low`, and never outside these two. At rate 1 groups without mass are still left out, as the
/// filter's `include_zero` says. Before any batch whose spread is defined, the rate is 1: nothing then
/// says that filtering helps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Adaptive {
    /// The spread up to which all of the mass is kept; at least 0.
    pub low: f64,
    /// The spread from which on `value` of it is kept; above `low`.
    pub high: f64,
    /// The weight of the past, from 0 (the last batch alone) to below 1.
    pub momentum: f64,
}

impl Default for Adaptive {
    /// The paper's spreads: 0.33, where filtering hurts, and 1.16, where it helps; momentum 0.9.
    fn default() -> Self {
        Self { low: 0.33, high: 1.16, momentum: 0.9 }
    }
}

/// The history of an adaptive top-p. A checkpoint of the run holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdaptiveState {
    /// The averaged spread; none before the first batch whose spread is defined.
    pub spread: Option<f64>,
}

impl Adaptive {
    /// Takes the spread of one more batch into the history; a batch without one leaves it as it is.
    pub fn observe(&self, state: &mut AdaptiveState, spread: Option<f64>) {
        let Some(new) = spread.filter(|spread| spread.is_finite()) else { return };
        state.spread = Some(match state.spread {
            Some(past) => self.momentum * past + (1.0 - self.momentum) * new,
            None => new,
        });
    }

    /// The keep rate, from `value` to 1.
    pub fn rate(&self, value: f64, state: &AdaptiveState) -> f64 {
        let spread = state.spread.unwrap_or(self.low);
        let trust = ((spread - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        1.0 - (1.0 - value) * trust
    }
}

/// Std(RV)/Mean(RV) of the reward variances of a batch, the standard deviation unbiased; none of fewer
/// than two groups, or if all are 0. NaNs are left aside.
pub fn spread(reward_variances: &[f64]) -> Option<f64> {
    let known: Vec<f64> = reward_variances.iter().copied().filter(|rv| !rv.is_nan()).collect();
    let mean = known.iter().sum::<f64>() / known.len() as f64;
    (known.len() > 1 && mean > 0.0).then(|| variance(known).sqrt() / mean)
}
