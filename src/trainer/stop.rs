//! When to end a run early. A rule is a setting; its state is what a checkpoint holds. Each
//! `observe` says whether to stop now.

use serde::{Deserialize, Serialize};

/// Steps whose mean reward variance is the baseline of [`VarianceCollapse`].
const BASELINE_STEPS: u64 = 10;
/// The share of the baseline below which rewards have collapsed.
const COLLAPSED: f64 = 0.1;

/// Stops once the mean reward variance has been below a tenth of its mean over the first ten steps,
/// for some steps in a row (RAGEN-2, arXiv 2604.06268).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VarianceCollapse {
    /// How many steps in a row.
    pub steps: u64,
}

/// What [`VarianceCollapse`] has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VarianceCollapseState {
    /// Steps of the baseline so far.
    pub baseline_steps: u64,
    /// The sum over them.
    pub baseline_sum: f64,
    /// Steps in a row below the threshold.
    pub in_a_row: u64,
}

impl VarianceCollapse {
    /// Takes the mean reward variance of a step. A step without one (NaN) is passed over. The steps
    /// of the baseline are not judged.
    pub fn observe(&self, state: &mut VarianceCollapseState, reward_variance: f64) -> bool {
        if !reward_variance.is_finite() {
            return false;
        }
        if state.baseline_steps < BASELINE_STEPS {
            state.baseline_steps += 1;
            state.baseline_sum += reward_variance;
            return false;
        }
        let threshold = COLLAPSED * state.baseline_sum / state.baseline_steps as f64;
        in_a_row(&mut state.in_a_row, reward_variance < threshold, self.steps)
    }
}

/// Stops after some filters in a row that kept no group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmptyFilters {
    /// How many in a row.
    pub filters: u64,
}

/// What [`EmptyFilters`] has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmptyFiltersState {
    /// Empty filters in a row.
    pub in_a_row: u64,
}

impl EmptyFilters {
    /// Takes the number of groups that a filter kept.
    pub fn observe(&self, state: &mut EmptyFiltersState, kept: usize) -> bool {
        in_a_row(&mut state.in_a_row, kept == 0, self.filters)
    }
}

/// Stops after some validations in a row that scored below a floor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValidationFloor {
    /// The floor.
    pub floor: f64,
    /// How many in a row.
    pub validations: u64,
}

/// What [`ValidationFloor`] has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValidationFloorState {
    /// Validations in a row below the floor.
    pub in_a_row: u64,
}

impl ValidationFloor {
    /// Takes the score of a validation; NaN is below every floor.
    pub fn observe(&self, state: &mut ValidationFloorState, score: f64) -> bool {
        let below = score.is_nan() || score < self.floor;
        in_a_row(&mut state.in_a_row, below, self.validations)
    }
}

/// Counts what happens in a row; true once that is `limit` times, of which there is at least one.
fn in_a_row(count: &mut u64, happened: bool, limit: u64) -> bool {
    *count = if happened { *count + 1 } else { 0 };
    happened && *count >= limit
}
