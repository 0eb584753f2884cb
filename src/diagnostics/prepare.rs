//! What a diagnosis begins with: its past, and the numbers of its steps.

use std::path::{Path, PathBuf};

use super::history::{History, JudgeOptions, Measured};
use super::regime::Baseline;
use crate::config::DiagnosticsConfig;
use crate::error::{Error, Result};
use crate::rollout::Rollouts;

/// The past of this run, and how it is read.
pub(super) fn past(diagnostics: &DiagnosticsConfig) -> Result<(History, JudgeOptions)> {
    let (marginal, sampling) = (diagnostics.marginal, diagnostics.sampling);
    let history = match &diagnostics.state {
        Some(path) if path.exists() => {
            History::load(path, "diagnostics.state", marginal, sampling)?
        }
        Some(path) if !path.parent().is_some_and(Path::is_dir) => {
            return Err(Error::config(
                "diagnostics.state",
                format!("expected a file in a folder that exists, found {}", path.display()),
            ));
        }
        _ => History::new(marginal, sampling),
    };
    let key = "diagnostics.baseline";
    let baseline = match &diagnostics.baseline {
        None => None,
        Some(path) => {
            let steps: Vec<Measured> =
                History::load(path, key, marginal, sampling)?.measured().copied().collect();
            let none = || {
                Error::config(
                    key,
                    format!("{}: expected at least one measured step, found none", path.display()),
                )
            };
            Some(Baseline::of(&steps).ok_or_else(none)?)
        }
    };
    let judge = JudgeOptions {
        baseline,
        baseline_steps: diagnostics.baseline_steps,
        low: diagnostics.low,
        min_valid: diagnostics.min_valid,
    };
    Ok((history, judge))
}

/// The number of every step: that of the file, or what follows the last of the history.
pub(super) fn numbers(
    plan: &[(usize, PathBuf)],
    rollouts: &Rollouts,
    history: &History,
) -> Vec<i64> {
    let next = history.last_step().map_or(0, |step| step.saturating_add(1));
    let follows = |index: usize| next.saturating_add(index as i64);
    plan.iter()
        .enumerate()
        .map(|(index, (batch, _))| rollouts.batches[*batch].step.unwrap_or(follows(index)))
        .collect()
}

/// What is odd before anything is scored.
pub(super) fn early_warnings(rollouts: &Rollouts, history: &History, steps: &[i64]) -> Vec<String> {
    let mut warnings = rollouts.report.warnings();
    let first_step = steps.first().copied().unwrap_or(0);
    let held = history.held_from(first_step);
    if held > 0 {
        warnings.push(format!(
            "diagnostics.state already holds {held} steps from step {first_step} on; they are replaced"
        ));
    }
    warnings
}
