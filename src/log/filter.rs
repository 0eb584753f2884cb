//! What a filter kept, in TensorBoard: one point a step, and a picture of the scores by rank.

use super::directory::RunDirectory;
use super::events::EventWriter;
use super::picture::{Mark, Picture, Scatter};
use super::report::number;
use crate::error::Result;
use crate::filter::{KeptRecord, Reason, Score};
use crate::sift::SiftStep;

/// Writes the steps of a filtered file.
pub struct FilterLog {
    events: EventWriter,
}

impl FilterLog {
    /// Starts the event file with the resolved configuration as text.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn create(directory: &RunDirectory, config: &str) -> Result<Self> {
        Ok(Self { events: EventWriter::of_run(directory, config)? })
    }

    /// Writes one step with its picture.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn step(&mut self, step: &SiftStep, picture: &Picture) -> Result<()> {
        for (tag, value) in scalars(&step.kept) {
            self.events.scalar(tag, step.step, value)?;
        }
        let scores: Vec<f64> = step.groups.iter().filter_map(|group| group.verdict.score).collect();
        self.events.histogram("filter/score_histogram", step.step, &scores)?;
        self.events.image("filter/score_by_rank", step.step, picture)?;
        self.events.flush()
    }
}

/// What a filter kept, as scalars under their tags.
pub(super) fn scalars(kept: &KeptRecord) -> [(&'static str, Option<f64>); 13] {
    [
        ("filter/kept_groups", Some(kept.groups as f64)),
        ("filter/kept_share", Some(kept.share)),
        ("filter/cut", kept.cut),
        ("filter/reward_variance_mean", kept.reward_variance_mean),
        ("filter/reward_mean", kept.reward_mean),
        ("filter/snr_mean", kept.snr_mean),
        ("filter/signal_share", kept.signal_share),
        ("filter/reward_variance_spread", kept.reward_variance_spread),
        ("filter/keep_rate", kept.keep_rate),
        ("filter/adaptive_spread", kept.adaptive_spread),
        ("filter/loss_factor", Some(kept.loss_factor)),
        ("filter/optimizer_steps", Some(kept.optimizer_steps as f64)),
        ("filter/optimizer_steps_unfiltered", Some(kept.optimizer_steps_unfiltered as f64)),
    ]
}

/// The scores of a step by rank: what is kept is filled, and what no rank could be given, for its score
/// is 0 or NaN, stands in the strong color behind the last rank.
pub fn score_by_rank(step: &SiftStep, score: Score) -> Picture {
    let score = score.name();
    let ranked = step.groups.iter().filter(|group| group.verdict.rank.is_some()).count();
    let mut unranked = ranked;
    let marks: Vec<Mark> = step
        .groups
        .iter()
        .map(|group| {
            let verdict = &group.verdict;
            let place = verdict.rank.unwrap_or_else(|| {
                unranked += 1;
                unranked
            });
            Mark {
                x: place as f64,
                y: verdict.score.unwrap_or(0.0),
                strong: matches!(verdict.reason, Reason::Zero | Reason::Undefined),
                filled: verdict.kept,
            }
        })
        .collect();
    let cut = step.kept.cut.map_or("none".into(), number);
    Scatter {
        title: &format!(
            "{} of {} groups kept; the last has {score} {cut}",
            step.kept.groups,
            step.groups.len()
        ),
        legend: "filled: kept   red: left out for a score of 0 or none",
        x_label: "rank of the group",
        y_label: score,
        marks: &marks,
    }
    .draw()
}
