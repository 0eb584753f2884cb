//! The results of a diagnosis, as they are written: an entry of `diagnosis.json` a step, a line of
//! `scores.jsonl` a row of the score matrix.

use serde::Serialize;

use super::cross::Cost;
use super::history::Judgement;
use super::metrics::{CrossScores, Marginal, Metrics, TokenMetrics};
use super::sampling::Sampling;
use super::spans::{Span, SpanCounts};
use crate::rollout::ReadReport;
use crate::study::PolicyRecord;

/// A diagnosis' results.
#[derive(Clone, Debug, Serialize)]
pub struct DiagnosisReport {
    /// Whether it was interrupted: what is here is finished, and more was to come.
    pub partial: bool,
    /// The policy.
    pub policy: PolicyRecord,
    /// What the reader left out or found odd.
    pub read: ReadReport,
    /// What else is odd.
    pub warnings: Vec<String>,
    /// The marginal of `metrics`.
    pub marginal: Marginal,
    /// Which spans were drawn.
    pub sampling: Sampling,
    /// One record a step.
    pub steps: Vec<StepRecord>,
}

/// A step.
#[derive(Clone, Debug, Serialize)]
pub struct StepRecord {
    /// The step of the file, or one after the last of the state.
    pub step: i64,
    /// The file of the policy.
    pub checkpoint: String,
    /// What there was to score, and what was missing.
    pub spans: SpanCounts,
    /// The share of trajectories with a span to score.
    pub valid_share: f64,
    /// What was scored.
    pub cost: Cost,
    /// Every metric, per token under the configured marginal; none for fewer than two contexts.
    pub metrics: Option<Metrics>,
    /// What the marginal decides, under both.
    pub by_marginal: Option<ByMarginal>,
    /// The mean difference per token between the file's `old_logprobs` and this policy's own scores of
    /// the spans; none without them.
    pub old_logprobs_gap: Option<f64>,
    /// What the past says of it.
    #[serde(flatten)]
    pub judgement: Judgement,
    /// What is odd about this step.
    pub warnings: Vec<String>,
    /// The score matrix by rows; they are written to `scores.jsonl`.
    #[serde(skip)]
    pub rows: Vec<RowRecord>,
}

/// What the marginal decides, under both.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ByMarginal {
    /// Eq. 1 of the paper.
    pub paper: TokenMetrics,
    /// The code of RAGEN.
    pub code: TokenMetrics,
}

impl ByMarginal {
    pub(super) fn new(scores: &CrossScores) -> Self {
        Self {
            paper: scores.token_metrics(Marginal::Paper),
            code: scores.token_metrics(Marginal::Code),
        }
    }
}

/// A row of the score matrix: a line of `scores.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub struct RowRecord {
    /// The step.
    pub step: i64,
    /// The group.
    pub group_id: String,
    /// The trajectory's name, if the file gives one.
    pub trajectory_id: Option<String>,
    /// Its line in the file.
    pub line: usize,
    /// The span in the response.
    pub span: (usize, usize),
    /// Its sampled tokens.
    pub length: usize,
    /// The column of its own context.
    pub column: usize,
    /// log π(Z | X_j) for every context, in order of first appearance; null where it is impossible.
    pub log_likelihood: Vec<f64>,
}

impl RowRecord {
    pub(super) fn new(step: i64, span: &Span, scores: &CrossScores, row: usize) -> Self {
        Self {
            step,
            group_id: span.group_id.into(),
            trajectory_id: span.trajectory.id.clone(),
            line: span.trajectory.line,
            span: (span.start, span.end),
            length: scores.length(row),
            column: scores.column(row),
            log_likelihood: scores.row(row).to_vec(),
        }
    }
}
