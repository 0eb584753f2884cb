//! The results of a filter job, as they are written: a line of `groups.jsonl` a group, an entry of
//! `summary.json` a step.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::filter::{KeptRecord, Reason, Score, Scores, Verdict};
use crate::rollout::{self, Group, ReadReport, Trajectory};
use crate::study::StudyReport;

/// A filter job's results.
#[derive(Clone, Debug, Serialize)]
pub struct SiftReport {
    /// What groups are ranked by.
    pub score: Score,
    /// What the reader left out or found odd.
    pub read: ReadReport,
    /// What else is odd.
    pub warnings: Vec<String>,
    /// One record a step.
    pub steps: Vec<SiftStep>,
    /// The study that measured the scores, if one had to.
    #[serde(skip)]
    pub study: Option<StudyReport>,
}

impl SiftReport {
    /// The lines of the kept groups' trajectories in the rollout file, ascending. What the reader left
    /// out of a kept group was not judged, and is not among them.
    pub fn kept_lines(&self) -> Vec<usize> {
        let groups = self.steps.iter().flat_map(|step| &step.groups);
        let mut lines: Vec<usize> = groups
            .filter(|group| group.verdict.kept)
            .flat_map(|group| &group.lines)
            .copied()
            .collect();
        lines.sort_unstable();
        lines
    }

    /// Writes those lines of the rollout file `from` to a new file `to`, byte for byte and in file
    /// order: native JSONL, uncompressed.
    ///
    /// # Errors
    /// If either file fails.
    pub fn write_kept(&self, from: &Path, to: &Path) -> Result<()> {
        let file = File::create_new(to).map_err(Error::io("write", to))?;
        rollout::copy_lines(from, &self.kept_lines(), &mut BufWriter::new(file), to)
    }
}

/// A step of a filter job.
#[derive(Clone, Debug, Serialize)]
pub struct SiftStep {
    /// The step of the file, or 0.
    pub step: i64,
    /// Groups.
    pub group_count: usize,
    /// Their trajectories.
    pub trajectories: usize,
    /// Those of the kept groups.
    pub kept_trajectories: usize,
    /// What the filter keeps.
    pub kept: KeptRecord,
    /// Groups by what became of them.
    pub reasons: ReasonCounts,
    /// The groups, in file order; they are written to `groups.jsonl`.
    #[serde(skip)]
    pub groups: Vec<SiftGroup>,
}

/// Numbers of groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReasonCounts {
    /// Chosen by the strategy.
    pub chosen: usize,
    /// Kept since nothing was chosen.
    pub keep_all: usize,
    /// Left out for a score of 0.
    pub zero: usize,
    /// Left out for a score that is not defined.
    pub undefined: usize,
    /// Left out since others come first.
    pub beyond_cut: usize,
}

impl SiftStep {
    pub(super) fn new(step: i64, groups: Vec<SiftGroup>, kept: KeptRecord) -> Self {
        let mut reasons = ReasonCounts::default();
        for group in &groups {
            *match group.verdict.reason {
                Reason::Chosen => &mut reasons.chosen,
                Reason::KeepAll => &mut reasons.keep_all,
                Reason::Zero => &mut reasons.zero,
                Reason::Undefined => &mut reasons.undefined,
                Reason::BeyondCut => &mut reasons.beyond_cut,
            } += 1;
        }
        let rows = |groups: &mut dyn Iterator<Item = &SiftGroup>| -> usize {
            groups.map(|group| group.group_size).sum()
        };
        Self {
            step,
            group_count: groups.len(),
            trajectories: rows(&mut groups.iter()),
            kept_trajectories: rows(&mut groups.iter().filter(|group| group.verdict.kept)),
            kept,
            reasons,
            groups,
        }
    }
}

/// A group: a line of `groups.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub struct SiftGroup {
    /// The step of the file.
    pub step: Option<i64>,
    /// The group's name.
    pub group_id: String,
    /// Its trajectories with a sampled token.
    pub group_size: usize,
    /// Its sampled tokens.
    pub tokens: usize,
    /// What it can be ranked by, as far as it was measured.
    #[serde(flatten)]
    pub scores: Scores,
    /// What became of it.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// The lines of its trajectories in the rollout file.
    pub lines: Vec<usize>,
}

impl SiftGroup {
    /// Before any verdict.
    pub(super) fn new(step: Option<i64>, group: &Group) -> Self {
        let counts = group.counts();
        let line = |trajectory: &Trajectory| trajectory.line;
        Self {
            step,
            group_id: group.id.clone(),
            group_size: counts.rows,
            tokens: counts.tokens,
            scores: Scores::of_rewards(&group.rewards(), counts.tokens),
            verdict: Verdict {
                score: None,
                rank: None,
                held_share: None,
                kept: false,
                reason: Reason::Undefined,
            },
            lines: group.trajectories.iter().map(line).collect(),
        }
    }
}
