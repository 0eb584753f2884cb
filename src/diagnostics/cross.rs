//! The cross scores of a batch: `log π(Z_i | X_j)` of every span under every context, for as few tokens
//! as that takes.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::ControlFlow;

use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::metrics::CrossScores;
use super::spans::Span;
use crate::error::{Error, Result};
use crate::objective;
use crate::policy::{Continuation, Policy};

/// Scores of one continuation, in a batch and alone, that differ by more are not those of one row.
const ALONE_TOLERANCE: f64 = 1e-3;
/// The same for policies that round to half precision.
const ALONE_TOLERANCE_HALF: f64 = 5e-2;

/// What is to be scored: distinct spans, distinct contexts, and the rows that share them.
#[derive(Debug)]
pub struct CrossPlan<'a> {
    spans: Vec<(&'a [i64], &'a [bool])>,
    /// The line of the file where each span comes first.
    lines: Vec<usize>,
    contexts: Vec<Vec<i64>>,
    /// The span and the own context of every row.
    rows: Vec<(usize, usize)>,
}

/// What a diagnosis costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// Rows of the score matrix.
    pub rows: usize,
    /// Distinct spans among them.
    pub spans: usize,
    /// Distinct contexts.
    pub contexts: usize,
    /// Sequences to score: spans times contexts.
    pub sequences: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Those with padding: what forward passes read.
    pub padded_tokens: usize,
    /// Forward passes.
    pub forward_passes: usize,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.spans += other.spans;
        self.contexts += other.contexts;
        self.sequences += other.sequences;
        self.tokens += other.tokens;
        self.padded_tokens += other.padded_tokens;
        self.forward_passes += other.forward_passes;
    }
}

/// How sequences are scored.
#[derive(Clone, Copy, Debug)]
pub struct ScoreOptions {
    /// Divides the logits.
    pub temperature: f64,
    /// Padded tokens of a forward pass, unless one sequence alone has more.
    pub token_budget: usize,
}

/// A finished matrix, and whether the policy mixes the rows of a batch, so that every sequence was
/// scored alone.
#[derive(Debug)]
pub struct Scored {
    /// The matrix.
    pub scores: CrossScores,
    /// Whether rows were mixed.
    pub mixes_rows: bool,
}

impl<'a> CrossPlan<'a> {
    /// Merges equal spans and equal contexts.
    pub fn new(spans: &[Span<'a>]) -> Self {
        let (mut distinct, mut contexts) = (Distinct::default(), Distinct::default());
        let mut lines = Vec::new();
        let mut rows = Vec::with_capacity(spans.len());
        for span in spans {
            let index = distinct.index_of(span.tokens());
            if index == lines.len() {
                lines.push(span.trajectory.line);
            }
            rows.push((index, contexts.index_of(span.context())));
        }
        Self { spans: distinct.values, lines, contexts: contexts.values, rows }
    }

    /// The number of distinct contexts.
    pub fn contexts(&self) -> usize {
        self.contexts.len()
    }

    /// What scoring costs.
    pub fn cost(&self, options: ScoreOptions) -> Cost {
        let order = self.order();
        let batches = self.batches(&order, options.token_budget);
        let longest = |batch: &[(usize, usize)]| self.row(batch[0]).forward_tokens();
        Cost {
            rows: self.rows.len(),
            spans: self.spans.len(),
            contexts: self.contexts.len(),
            sequences: order.len(),
            tokens: order.iter().map(|pair| self.row(*pair).forward_tokens()).sum(),
            padded_tokens: batches.iter().map(|batch| batch.len() * longest(batch)).sum(),
            forward_passes: batches.len(),
        }
    }

    /// Scores everything; `done` hears of every forward pass how many sequences it scored, and may ask
    /// to stop: then there is no matrix. One synchronisation a forward pass, so that it hears the
    /// truth.
    ///
    /// # Errors
    /// If libtorch fails, or a score is NaN or that of something impossible.
    pub fn score(
        &self,
        policy: &Policy,
        options: ScoreOptions,
        done: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Option<Scored>> {
        let _no_grad = tch::no_grad_guard();
        let order = self.order();
        let mixes_rows = self.is_mixed(policy, &order, options.temperature)?;
        // A budget of nothing leaves every sequence alone.
        let token_budget = if mixes_rows { 0 } else { options.token_budget };
        let mut matrix = vec![f64::NAN; order.len()];
        for batch in self.batches(&order, token_budget) {
            let sums = self.sums(policy, batch, options.temperature)?;
            for ((span, context), sum) in batch.iter().zip(sums) {
                matrix[span * self.contexts.len() + context] = sum;
            }
            if done(batch.len()).is_break() {
                return Ok(None);
            }
        }
        Ok(Some(Scored { scores: self.matrix(&matrix)?, mixes_rows }))
    }

    /// From distinct spans to rows.
    fn matrix(&self, scores: &[f64]) -> Result<CrossScores> {
        let contexts = self.contexts.len();
        let (spans, columns): (Vec<i64>, Vec<usize>) =
            self.rows.iter().map(|(span, context)| (*span as i64, *context)).unzip();
        let lengths: Vec<usize> =
            self.rows.iter().map(|(span, context)| self.row((*span, *context)).asked()).collect();
        let distinct =
            Tensor::from_slice(scores).reshape([self.spans.len() as i64, contexts as i64]);
        let matrix = distinct.f_index_select(0, &Tensor::from_slice(&spans))?;
        CrossScores::new(&matrix, &lengths, &columns, &(0..contexts).collect::<Vec<usize>>())
    }

    fn row(&self, (span, context): (usize, usize)) -> Continuation<'_> {
        let (tokens, asked) = self.spans[span];
        Continuation { context: &self.contexts[context], tokens, asked }
    }

    /// All (span, context), the longest first: what fits then fits throughout.
    fn order(&self) -> Vec<(usize, usize)> {
        let mut order: Vec<(usize, usize)> = (0..self.spans.len())
            .flat_map(|span| (0..self.contexts.len()).map(move |context| (span, context)))
            .collect();
        order.sort_by_key(|pair| std::cmp::Reverse(self.row(*pair).forward_tokens()));
        order
    }

    /// Stretches of descending length, within the budget with their padding.
    fn batches<'b>(
        &self,
        order: &'b [(usize, usize)],
        token_budget: usize,
    ) -> Vec<&'b [(usize, usize)]> {
        let mut batches = Vec::new();
        let mut rest = order;
        while let Some(longest) = rest.first() {
            let rows = token_budget / self.row(*longest).forward_tokens();
            let (batch, left) = rest.split_at(rows.clamp(1, rest.len()));
            batches.push(batch);
            rest = left;
        }
        batches
    }

    /// `[batch]` sums of the log-probabilities of what the policy sampled.
    fn sums(
        &self,
        policy: &Policy,
        batch: &[(usize, usize)],
        temperature: f64,
    ) -> Result<Vec<f64>> {
        let rows: Vec<Continuation> = batch.iter().map(|pair| self.row(*pair)).collect();
        let longest = rows.iter().map(Continuation::forward_tokens).max().unwrap_or(0);
        let chosen =
            policy.continuation_logits(&rows).map_err(|error| of_length(error, longest))?;
        let log_probs = objective::log_probs(&chosen.logits, temperature);
        let log_probs = objective::gather(&log_probs, &chosen.actions)?;
        let device = log_probs.device();
        let kind = objective::precise(device);
        let owners: Vec<i64> = rows
            .iter()
            .enumerate()
            .flat_map(|(index, row)| std::iter::repeat_n(index as i64, row.asked()))
            .collect();
        let owners = Tensor::from_slice(&owners).to_device(device);
        let sums = Tensor::zeros([rows.len() as i64], (kind, device)).f_index_add(
            0,
            &owners,
            &log_probs.to_kind(kind),
        )?;
        let sums = Vec::try_from(sums.to_device(Device::Cpu).to_kind(Kind::Double))?;
        self.check(batch, &sums)?;
        Ok(sums)
    }

    fn check(&self, batch: &[(usize, usize)], sums: &[f64]) -> Result<()> {
        for (pair, sum) in batch.iter().zip(sums).filter(|(_, sum)| !sum.is_finite()) {
            // Under another context a span may be impossible.
            if *sum != f64::NEG_INFINITY || self.rows.contains(pair) {
                return Err(Error::NonFinite {
                    place: format!("line {} of the rollouts", self.lines[pair.0]),
                    what: "the log-probability of a reasoning span under a context".into(),
                    found: *sum,
                    remedy: "a sampled token has probability 0, or logits are not finite: is this the checkpoint, temperature and tokenizer of these rollouts?".into(),
                });
            }
        }
        Ok(())
    }

    /// Whether the shortest sequence, padded beside the longest, scores otherwise than alone.
    fn is_mixed(
        &self,
        policy: &Policy,
        order: &[(usize, usize)],
        temperature: f64,
    ) -> Result<bool> {
        let [longest, .., shortest] = order else { return Ok(false) };
        let together = self.sums(policy, &[*longest, *shortest], temperature)?[1];
        let alone = self.sums(policy, &[*shortest], temperature)?[0];
        let tolerance = match policy.dtype() {
            Kind::Half | Kind::BFloat16 => ALONE_TOLERANCE_HALF,
            _ => ALONE_TOLERANCE,
        };
        // Two infinities are equal, and their difference is no number.
        Ok(together != alone && (together - alone).abs() > tolerance * alone.abs().max(1.0))
    }
}

/// A long span under a long context may be more than a policy takes, where each fits its own.
fn of_length(error: Error, longest: usize) -> Error {
    match error {
        Error::Torch { doing, message } => Error::Torch {
            doing: format!(
                "{doing} on sequences of up to {longest} tokens, since every span is scored under every context"
            ),
            message,
        },
        other => other,
    }
}

/// Values in order of first appearance.
struct Distinct<T> {
    values: Vec<T>,
    index: HashMap<T, usize>,
}

impl<T> Default for Distinct<T> {
    fn default() -> Self {
        Self { values: Vec::new(), index: HashMap::new() }
    }
}

impl<T: Clone + Eq + Hash> Distinct<T> {
    fn index_of(&mut self, value: T) -> usize {
        *self.index.entry(value).or_insert_with_key(|value| {
            self.values.push(value.clone());
            self.values.len() - 1
        })
    }
}
