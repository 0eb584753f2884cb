//! Scores and judges the batches of one run, one after the other.

use std::collections::HashSet;
use std::ops::ControlFlow;

use super::cross::{Cost, CrossPlan, ScoreOptions};
use super::history::{Entry, History, JudgeOptions, Judgement, Measured};
use super::prepare::past;
use super::record::{ByMarginal, RowRecord, StepRecord};
use super::regime::Regime;
use super::sampling::{Draw, Sampling};
use super::spans::{Span, SpanCounts, offered};
use crate::config::DiagnosticsConfig;
use crate::error::{Error, Result};
use crate::gradient::mean;
use crate::policy::Policy;
use crate::rollout::{Batch, Trajectory};
use crate::study::FOREIGN_LOG_RATIO;

/// Looks on while a diagnosis runs.
pub trait Observer {
    /// What is going to be scored, over all steps.
    fn start(&mut self, _cost: &Cost) {}

    /// So many sequences more are scored; may ask to stop.
    fn scored(&mut self, _sequences: usize) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// A step is done; `history` ends with it.
    ///
    /// # Errors
    /// Ends the diagnosis with the observer's own error.
    fn step(&mut self, _record: &StepRecord, _history: &History) -> Result<()> {
        Ok(())
    }

    /// Something is odd.
    fn warning(&mut self, _message: &str) {}
}

/// Looks away.
#[derive(Debug, Default)]
pub struct Silent;

impl Observer for Silent {}

/// A batch that is examined.
#[derive(Clone, Copy, Debug)]
pub struct Examined<'a> {
    /// Its trajectories.
    pub batch: &'a Batch,
    /// Its number.
    pub step: i64,
    /// Whether any trajectory of the run lists reasoning spans; else whole responses are scored.
    pub names_reasoning: bool,
}

/// Diagnoses batches and remembers what it found.
pub struct Examiner {
    config: DiagnosticsConfig,
    options: ScoreOptions,
    history: History,
    judge: JudgeOptions,
}

impl Examiner {
    /// An examiner whose past is that of `diagnostics.state`, if there is one.
    ///
    /// # Errors
    /// If state or baseline cannot be read.
    pub fn new(config: &DiagnosticsConfig, temperature: f64) -> Result<Self> {
        let (history, judge) = past(config)?;
        let options = ScoreOptions { temperature, token_budget: config.token_budget };
        Ok(Self { config: config.clone(), options, history, judge })
    }

    /// What it has seen.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// What it has seen.
    pub fn into_history(self) -> History {
        self.history
    }

    /// Takes up a past.
    pub fn restore(&mut self, history: History) {
        self.history = history;
    }

    /// What examining a batch costs.
    ///
    /// # Errors
    /// If it is more than `diagnostics.max_sequences`.
    pub fn cost(&self, examined: Examined) -> Result<Cost> {
        let most = self.config.max_sequences;
        let cost = CrossPlan::new(&self.drawn(examined).0).cost(self.options);
        if cost.sequences <= most {
            return Ok(cost);
        }
        Err(Error::config(
            "diagnostics.max_sequences",
            format!(
                "step {} would score {} sequences ({} distinct spans under {} distinct contexts, {} tokens), and {most} are allowed; lower diagnostics.samples, or raise this",
                examined.step, cost.sequences, cost.spans, cost.contexts, cost.tokens
            ),
        ))
    }

    /// The spans of a batch that are scored, and what there was to draw from.
    fn drawn<'a>(&self, examined: Examined<'a>) -> (Vec<Span<'a>>, SpanCounts) {
        let Self { config, .. } = self;
        let (offers, counts) = offered(examined.batch, config.sampling, examined.names_reasoning);
        let draw = Draw {
            samples: config.samples,
            replacement: config.replacement,
            seed: config.seed.wrapping_add_signed(examined.step),
        };
        let sizes: Vec<usize> = offers.iter().map(Vec::len).collect();
        let drawn = draw.draw(&sizes);
        (drawn.into_iter().map(|(trajectory, place)| offers[trajectory][place]).collect(), counts)
    }

    /// Scores and judges a batch under a policy; none if the observer asked to stop.
    ///
    /// # Errors
    /// If libtorch fails, or a score is not finite.
    pub fn step(
        &mut self,
        policy: &Policy,
        examined: Examined,
        observer: &mut dyn Observer,
    ) -> Result<Option<StepRecord>> {
        let number = examined.step;
        let (spans, counts) = self.drawn(examined);
        let plan = CrossPlan::new(&spans);
        let mut record = StepRecord {
            step: number,
            checkpoint: policy.path().display().to_string(),
            spans: counts,
            valid_share: counts.valid_share(),
            cost: plan.cost(self.options),
            metrics: None,
            by_marginal: None,
            old_logprobs_gap: None,
            judgement: Judgement::default(),
            warnings: Vec::new(),
            rows: Vec::new(),
        };
        if !spans.is_empty() {
            let scored =
                plan.score(policy, self.options, &mut |sequences| observer.scored(sequences))?;
            let Some(scored) = scored else { return Ok(None) };
            let scores = &scored.scores;
            if scores.contexts() > 1 {
                record.metrics = Some(scores.metrics(self.config.marginal));
                record.by_marginal = Some(ByMarginal::new(scores));
            }
            if scored.mixes_rows {
                record.warnings.push(
                    "the policy mixes the rows of a batch: every sequence was scored alone".into(),
                );
            }
            record.old_logprobs_gap =
                old_logprobs_gap(&spans, |row| scores.row(row)[scores.column(row)]);
            record.rows = spans
                .iter()
                .enumerate()
                .map(|(row, span)| RowRecord::new(number, span, scores, row))
                .collect();
        }
        let is_healthy = record.valid_share >= self.judge.min_valid;
        self.history.push(Entry {
            step: record.step,
            valid_share: record.valid_share,
            // Survivors of a format collapse are no sample of the policy.
            measured: record.metrics.as_ref().filter(|_| is_healthy).map(Measured::from),
        });
        record.judgement = self.history.judge(&self.judge);
        record.warnings.extend(warnings(&record));
        if self.config.sampling == Sampling::FirstTurn {
            record.warnings.extend(unequal_contexts(&record));
        }
        Ok(Some(record))
    }
}

/// The mean difference per token of the stored and the own log-probabilities of the rows.
fn old_logprobs_gap(spans: &[Span], own: impl Fn(usize) -> f64) -> Option<f64> {
    let stored = |span: &Span| -> Option<f64> {
        let Trajectory { old_logprobs, mask, .. } = span.trajectory;
        let stored = old_logprobs.as_ref()?[span.start..span.end].iter();
        let sampled = &mask[span.start..span.end];
        Some(stored.zip(sampled).filter(|(_, sampled)| **sampled).map(|(old, _)| old).sum())
    };
    let gaps: Option<Vec<f64>> = spans
        .iter()
        .enumerate()
        .map(|(row, span)| Some((stored(span)? - own(row)).abs() / span.sampled() as f64))
        .collect();
    mean(&gaps?)
}

/// Text before a span that varies makes contexts of one prompt that can hardly be told apart.
fn unequal_contexts(record: &StepRecord) -> Option<String> {
    let groups: HashSet<&str> = record.rows.iter().map(|row| row.group_id.as_str()).collect();
    let contexts = record.cost.contexts;
    (contexts > groups.len()).then(|| {
        format!(
            "{} groups have {contexts} distinct contexts before their first span: contexts of one prompt count as different ones, which lowers retrieval and mutual information",
            groups.len()
        )
    })
}

/// Warnings that only the numbers can give.
fn warnings(record: &StepRecord) -> Vec<String> {
    let mut warnings = Vec::new();
    let spans = &record.spans;
    if record.judgement.regime == Some(Regime::FormatCollapse) {
        warnings.push(format!(
            "only {} of {} trajectories have a reasoning span to score ({} have none, {} spans are empty): format collapse; the metrics are of the survivors, and no sample of the policy",
            spans.valid_trajectories, spans.trajectories, spans.without_span, spans.empty_spans
        ));
    } else if record.metrics.is_none() {
        warnings.push(format!(
            "expected at least two distinct contexts to tell spans apart by, found {}",
            record.cost.contexts
        ));
    }
    if let Some(gap) = record.old_logprobs_gap.filter(|gap| *gap > FOREIGN_LOG_RATIO) {
        warnings.push(format!(
            "old_logprobs differ from this policy's by {gap:.3} a token: the spans come from another policy, temperature or tokenizer, and its mutual information is not that of this one"
        ));
    }
    // A step that could not be measured tells nothing new of the fall.
    if record.judgement.alarm && record.judgement.standardised_mi.is_some() {
        warnings.push(format!(
            "early warning: the mutual information has been falling (CUSUM {:.1})",
            record.judgement.cusum.unwrap_or_default()
        ));
    }
    warnings
}
