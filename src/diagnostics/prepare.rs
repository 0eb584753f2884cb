//! What a diagnosis begins with: its past, and its steps.

use std::path::{Path, PathBuf};

use super::history::{History, JudgeOptions, Measured};
use super::regime::Baseline;
use crate::config::{Config, DiagnosticsConfig};
use crate::error::{Error, Result};
use crate::rollout::Rollouts;

/// A step that is going to be diagnosed.
pub(super) struct PlannedStep {
    /// The step of the file, or one after the last of the state.
    pub step: i64,
    /// The place of its batch.
    pub batch: usize,
    /// The file of its policy.
    pub checkpoint: PathBuf,
}

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

/// The batch and the checkpoint of every step, ascending.
pub(super) fn plan(
    config: &Config,
    rollouts: &Rollouts,
    history: &History,
) -> Result<Vec<PlannedStep>> {
    let steps: Vec<Option<i64>> = rollouts.batches.iter().map(|batch| batch.step).collect();
    let checkpoints = config.checkpoints(&steps)?;
    // Rollouts without steps are one batch, whatever the number of checkpoints.
    let last = rollouts.batches.len() - 1;
    let after_state = history.last_step().map_or(0, |step| step.saturating_add(1));
    Ok(checkpoints
        .into_iter()
        .enumerate()
        .map(|(index, checkpoint)| {
            let batch = index.min(last);
            let step = steps[batch].unwrap_or(after_state.saturating_add(index as i64));
            PlannedStep { step, batch, checkpoint }
        })
        .collect())
}

/// What is odd before anything is scored.
pub(super) fn early_warnings(
    rollouts: &Rollouts,
    history: &History,
    first_step: i64,
) -> Vec<String> {
    let mut warnings = Vec::new();
    let unsampled = rollouts.report.without_sampled_token;
    if unsampled > 0 {
        warnings.push(format!("{unsampled} trajectories without a sampled token were left out"));
    }
    let held = history.held_from(first_step);
    if held > 0 {
        warnings.push(format!(
            "diagnostics.state already holds {held} steps from step {first_step} on; they are replaced"
        ));
    }
    warnings
}
