//! The learning rate over the updates of a run.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// A linear warm-up, then a constant or a cosine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Schedule {
    /// Updates until the full learning rate is reached.
    pub warmup: u64,
    /// What follows.
    pub decay: Decay,
}

/// The learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Decay {
    /// Stays as it is.
    #[default]
    Constant,
    /// Half a cosine, from 1 at the end of the warm-up to `floor` at update `updates`, and there from
    /// then on (arXiv 1608.03983, Eq. 5, without restarts).
    Cosine {
        /// The updates of the run, the warm-up among them.
        updates: u64,
        /// The last share of the learning rate.
        floor: f64,
    },
}

impl Schedule {
    /// The share of the full learning rate that update `update` takes, counted from 1:
    /// `update/warmup` up to the warm-up's end, so that the first one is not lost at rate 0; then,
    /// with progress `p = (update − warmup)/(updates − warmup)`, `floor + (1 − floor)(1 + cos πp)/2`.
    pub fn factor(&self, update: u64) -> f64 {
        if update < self.warmup {
            return update as f64 / self.warmup as f64;
        }
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Cosine { updates, floor } if update >= updates => floor,
            Decay::Cosine { updates, floor } => {
                let progress = (update - self.warmup) as f64 / (updates - self.warmup) as f64;
                floor + (1.0 - floor) * 0.5 * (1.0 + (PI * progress).cos())
            }
        }
    }
}
