//! The section of the diagnosis.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::resolve::range;
use crate::diagnostics::{Marginal, Sampling};
use crate::error::{Error, Result};

/// Section `diagnostics`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiagnosticsConfig {
    /// The marginal per token.
    pub marginal: Marginal,
    /// Which spans a trajectory offers.
    pub sampling: Sampling,
    /// How many spans are drawn a step; none: all.
    pub samples: Option<usize>,
    /// Whether a span may be drawn twice.
    pub replacement: bool,
    /// Seeds the draw, with the step.
    pub seed: u64,
    /// Padded tokens of a forward pass.
    pub token_budget: usize,
    /// Sequences that a step may score.
    pub max_sequences: usize,
    /// Below this share of trajectories with a span it is format collapse.
    pub min_valid: f64,
    /// Below this share of the baseline entropy or mutual information is low.
    pub low: f64,
    /// A `state.json` whose steps are the baseline; none: the first steps of this run.
    pub baseline: Option<PathBuf>,
    /// How many first steps.
    pub baseline_steps: usize,
    /// The file that carries the past over a restart; none: every run begins anew.
    pub state: Option<PathBuf>,
    /// In training: after every so many steps; 0: never.
    pub every: u64,
}

impl Default for DiagnosticsConfig {
    fn default() -> Self {
        Self {
            marginal: Marginal::default(),
            sampling: Sampling::default(),
            samples: Some(64),
            replacement: false,
            seed: 0,
            token_budget: 4096,
            max_sequences: 16384,
            min_valid: 0.8,
            low: 0.5,
            baseline: None,
            baseline_steps: 5,
            state: None,
            every: 5,
        }
    }
}

impl DiagnosticsConfig {
    /// Checks every number.
    pub(super) fn check(&self) -> Result<()> {
        range("diagnostics.min_valid", self.min_valid, 0.0, 1.0)?;
        range("diagnostics.low", self.low, 0.0, 1.0)?;
        for (key, count, least) in [
            ("diagnostics.samples", self.samples.unwrap_or(2), 2),
            ("diagnostics.token_budget", self.token_budget, 1),
            ("diagnostics.max_sequences", self.max_sequences, 1),
            // One step has no spread to measure a fall by.
            ("diagnostics.baseline_steps", self.baseline_steps, 2),
        ] {
            if count < least {
                return Err(Error::config(
                    key,
                    format!("expected a whole number of at least {least}, found {count}"),
                ));
            }
        }
        Ok(())
    }
}
