//! The whole way: stored rollouts and a policy in, the state of its reasoning out, step by step.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::PathBuf;

use tch::Device;

use super::cross::{Cost, CrossPlan, ScoreOptions};
use super::history::{Entry, History, JudgeOptions, Judgement, Measured};
use super::prepare::{early_warnings, numbers, past};
use super::record::{ByMarginal, DiagnosisReport, RowRecord, StepRecord};
use super::regime::Regime;
use super::sampling::{Draw, Sampling};
use super::spans::{Span, SpanCounts, offered};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::gradient::mean;
use crate::policy::{Policy, PolicyKind, PolicyOptions};
use crate::rollout::{self, OnProblem, ReadOptions, Rollouts, Trajectory};
use crate::study::{FOREIGN_LOG_RATIO, Policies, PolicyRecord, check_steps, plan};

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

/// A diagnosis whose inputs are read and checked.
pub struct Diagnosis {
    config: Config,
    device: Device,
    options: PolicyOptions,
    rollouts: Rollouts,
    /// Whether any line of the file lists reasoning spans.
    names_reasoning: bool,
    path: PathBuf,
    /// The batch and the checkpoint of every step.
    plan: Vec<(usize, PathBuf)>,
    /// Their numbers.
    steps: Vec<i64>,
    cost: Cost,
    history: History,
    judge: JudgeOptions,
    first: Option<Policy>,
    warnings: Vec<String>,
}

impl Diagnosis {
    /// Reads the rollouts, the state and the first checkpoint, and checks all that can be checked before
    /// anything is scored, the cost too.
    ///
    /// # Errors
    /// At the first thing that is wrong with the configuration, the rollouts, the state or the policy,
    /// and if a step would score more than `diagnostics.max_sequences`.
    pub fn prepare(config: Config) -> Result<Self> {
        let config = config.resolve()?;
        if config.policy.kind != PolicyKind::CausalLm {
            return Err(Error::config(
                "policy.kind",
                "expected causal_lm: a step policy writes no reasoning that could be scored under other contexts",
            ));
        }
        let path = config.rollouts_path()?;
        let device = config.device.resolve()?;
        // Neither baselines nor rewards are needed here.
        let read = ReadOptions {
            single: OnProblem::Keep,
            missing_reward: OnProblem::Keep,
            ..config.read_options()
        };
        let rollouts = rollout::read(&path, &read)?;
        let names_reasoning = rollouts.trajectories().any(|row| row.reasoning.is_some());
        let (history, judge) = past(&config.diagnostics)?;
        let plan = plan(&config, &rollouts)?;
        let steps = numbers(&plan, &rollouts, &history);
        let mut diagnosis = Self {
            names_reasoning,
            warnings: early_warnings(&rollouts, &history, &steps),
            options: config.policy_options(device)?,
            config,
            device,
            rollouts,
            path,
            plan,
            steps,
            cost: Cost::default(),
            history,
            judge,
            first: None,
        };
        diagnosis.cost = diagnosis.total_cost()?;
        diagnosis.first = Some(diagnosis.load(0)?);
        Ok(diagnosis)
    }

    /// The configuration with every default filled in.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What is going to be scored, over all steps.
    pub fn cost(&self) -> &Cost {
        &self.cost
    }

    fn score_options(&self) -> ScoreOptions {
        ScoreOptions {
            temperature: self.config.policy.temperature,
            token_budget: self.config.diagnostics.token_budget,
        }
    }

    /// The spans of a step that are scored, and what there was to draw from.
    fn drawn(&self, index: usize) -> (Vec<Span<'_>>, SpanCounts) {
        let diagnostics = &self.config.diagnostics;
        let batch = &self.rollouts.batches[self.plan[index].0];
        let (offers, counts) = offered(batch, diagnostics.sampling, self.names_reasoning);
        let draw = Draw {
            samples: diagnostics.samples,
            replacement: diagnostics.replacement,
            seed: diagnostics.seed.wrapping_add_signed(self.steps[index]),
        };
        let sizes: Vec<usize> = offers.iter().map(Vec::len).collect();
        let drawn = draw.draw(&sizes);
        (drawn.into_iter().map(|(trajectory, place)| offers[trajectory][place]).collect(), counts)
    }

    fn total_cost(&self) -> Result<Cost> {
        let most = self.config.diagnostics.max_sequences;
        let mut total = Cost::default();
        for (index, step) in self.steps.iter().enumerate() {
            let cost = CrossPlan::new(&self.drawn(index).0).cost(self.score_options());
            if cost.sequences > most {
                return Err(Error::config(
                    "diagnostics.max_sequences",
                    format!(
                        "step {} would score {} sequences ({} distinct spans under {} distinct contexts, {} tokens), and {most} are allowed; lower diagnostics.samples, or raise this",
                        step, cost.sequences, cost.spans, cost.contexts, cost.tokens
                    ),
                ));
            }
            total += cost;
        }
        Ok(total)
    }

    /// Loads the checkpoint of a step, and checks the rollouts of its steps against it.
    fn load(&self, index: usize) -> Result<Policy> {
        let policy = Policy::load_without_gradient(&self.plan[index].1, &self.options)?;
        check_steps(&policy, &self.plan, &self.rollouts, &self.path)?;
        Ok(policy)
    }

    /// Diagnoses step by step. Ends early, with what is finished, if the observer asks. Returns the
    /// history too, which ends with the steps of this report.
    ///
    /// # Errors
    /// If libtorch fails, a score is not finite, or a later checkpoint is unusable.
    pub fn run(mut self, observer: &mut dyn Observer) -> Result<(DiagnosisReport, History)> {
        observer.start(&self.cost);
        for warning in &self.warnings {
            observer.warning(warning);
        }
        let mut report = DiagnosisReport {
            partial: false,
            policy: PolicyRecord::default(),
            read: self.rollouts.report.clone(),
            warnings: std::mem::take(&mut self.warnings),
            marginal: self.config.diagnostics.marginal,
            sampling: self.config.diagnostics.sampling,
            steps: Vec::new(),
        };
        let mut policies = Policies::new(self.first.take());
        for index in 0..self.plan.len() {
            let (policy, odd) = policies.of(&self.plan[index].1, || self.load(index))?;
            if index == 0 {
                report.policy = PolicyRecord::new(policy, self.device);
            }
            for message in odd {
                observer.warning(&message);
                report.warnings.push(message);
            }
            let Some(record) = self.step(policy, index, observer)? else {
                report.partial = true;
                break;
            };
            for warning in &record.warnings {
                observer.warning(&format!("step {}: {warning}", record.step));
            }
            observer.step(&record, &self.history)?;
            report.steps.push(record);
        }
        Ok((report, self.history))
    }

    /// Scores and judges a step; none if it was interrupted.
    fn step(
        &mut self,
        policy: &Policy,
        index: usize,
        observer: &mut dyn Observer,
    ) -> Result<Option<StepRecord>> {
        let number = self.steps[index];
        let (spans, counts) = self.drawn(index);
        let plan = CrossPlan::new(&spans);
        let mut record = StepRecord {
            step: number,
            checkpoint: policy.path().display().to_string(),
            spans: counts,
            valid_share: counts.valid_share(),
            cost: plan.cost(self.score_options()),
            metrics: None,
            by_marginal: None,
            old_logprobs_gap: None,
            judgement: Judgement::default(),
            warnings: Vec::new(),
            rows: Vec::new(),
        };
        if !spans.is_empty() {
            let options = self.score_options();
            let scored =
                plan.score(policy, options, &mut |sequences| observer.scored(sequences))?;
            let Some(scored) = scored else { return Ok(None) };
            let scores = &scored.scores;
            if scores.contexts() > 1 {
                record.metrics = Some(scores.metrics(self.config.diagnostics.marginal));
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
        if self.config.diagnostics.sampling == Sampling::FirstTurn {
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
