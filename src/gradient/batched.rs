//! The batched engine: one forward pass for a few groups, one backward pass a component, and the
//! gradient of every trajectory read from the autograd graph of the batch.
//!
//! The backward passes stop at the activations. What arrives at each use of a parameter, and what the
//! use multiplied it with, give the gradient of the parameter row by row (`factors`): sums over a
//! group from one product of matrices, the inner products of the rows' task gradients a slice at a
//! time (`row_products`), or random projections of both (`sketch`).
//!
//! It checks itself. Once a run the logits of one row and its gradient, parameter by parameter, are
//! recomputed by the plain way, which tells a model that mixes the rows of a batch; and in every batch
//! the gradient of one parameter is taken by autograd too.

use std::ops::ControlFlow;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Kind, Tensor};

use super::assemble::{Assembled, Batches};
use super::engine::{Engine, PackResult};
use super::gram::GradientVector;
use super::pack::{Micro, Upstream};
use super::passes::Passes;
use super::plain::{PlainEngine, backward};
use super::rows::{GroupInput, RowStats, Scorer};
use super::sketch::Projections;
use crate::error::{Error, Result};
use crate::policy::{Parameter, Policy};

/// Tokens times parameters up to which groups are taken together: a pass over so many is long enough
/// that the overhead of its operations does not show.
const PACK_WORK: usize = 1 << 29;
/// Tokens times parameters of one forward pass, unless one row has more: beyond it a larger batch is no
/// faster, and takes memory.
const PASS_WORK: usize = 1 << 37;

/// Reads per-trajectory gradients from batched passes.
#[derive(Debug)]
pub struct BatchedEngine {
    /// Products by parameter beside those of the whole vectors.
    pub by_parameter: bool,
    /// Padded tokens of one forward pass.
    pub token_budget: usize,
    /// Whether a model that cannot be batched is an error; otherwise the plain engine takes over.
    pub strict: bool,
    /// Chooses the row that is recomputed, and the signs of a sketch.
    pub seed: u64,
    /// For models that are not batched, and the row that is recomputed.
    pub plain: PlainEngine,
    sketch: Option<Projections>,
    batches: u64,
    logits_checked: bool,
    row_checked: bool,
    /// Parameters whose gradients the graph does not show by rows.
    by_rows: Vec<usize>,
    given_up: bool,
    notes: Vec<String>,
}

/// Groups that were taken, and which of their rows shared a batch with others: only these can show
/// that a batch mixes its rows, or lays them out otherwise.
struct Taken {
    pack: PackResult,
    shared: Vec<bool>,
}

/// A trial of a batch.
enum Trial {
    Done(Box<Taken>),
    /// These parameters have to be taken row by row.
    Uncovered(Vec<usize>),
}

impl BatchedEngine {
    /// An engine that falls back to `plain`. With `sketch`, so many random projections in place of
    /// exact products.
    pub fn new(
        plain: PlainEngine,
        token_budget: usize,
        strict: bool,
        seed: u64,
        sketch: Option<usize>,
    ) -> Self {
        Self {
            by_parameter: plain.by_parameter,
            token_budget,
            strict,
            seed,
            plain,
            sketch: sketch.map(|dimensions| Projections::new(dimensions as i64, seed)),
            batches: 0,
            logits_checked: false,
            row_checked: false,
            by_rows: Vec::new(),
            given_up: false,
            notes: Vec::new(),
        }
    }

    /// The result, after as many trials as it takes to learn which parameters go row by row.
    fn batch(&mut self, scorer: &Scorer, inputs: &[GroupInput]) -> Result<Taken> {
        loop {
            if inputs.len() > 1 && !self.by_rows.is_empty() {
                return self.one_by_one(scorer, inputs);
            }
            match self.trial(scorer, inputs)? {
                Trial::Done(result) => return Ok(*result),
                Trial::Uncovered(parameters) => {
                    self.by_rows.extend(parameters);
                    self.note_by_rows(scorer.policy);
                }
            }
        }
    }

    fn one_by_one(&mut self, scorer: &Scorer, inputs: &[GroupInput]) -> Result<Taken> {
        let mut taken = self.batch(scorer, &inputs[..1])?;
        for at in 1..inputs.len() {
            let next = self.batch(scorer, &inputs[at..=at])?;
            taken.pack.extend(next.pack)?;
            taken.shared.extend(next.shared);
        }
        Ok(taken)
    }

    fn trial(&mut self, scorer: &Scorer, inputs: &[GroupInput]) -> Result<Trial> {
        let policy = scorer.policy;
        let parameters: Vec<&Tensor> =
            policy.trainable().map(|parameter| &parameter.tensor).collect();
        let whole = Micro::new(inputs)?;
        let chunks = if inputs.len() == 1 {
            whole.chunks(self.token_budget.min(PASS_WORK / weights(policy)))
        } else {
            vec![(0..whole.rows.len()).collect()]
        };
        let mut passes = Passes {
            scorer,
            inputs,
            parameters: &parameters,
            by_rows: &self.by_rows,
            watched: self.watched(&parameters),
            watched_task: whole.has_task(),
            watched_gradient: None,
            batches: Batches::new(parameters.len(), inputs.len() as i64),
        };
        let mut stats = vec![RowStats::default(); whole.rows.len()];
        let mut shared = vec![false; whole.rows.len()];
        for chosen in &chunks {
            let micro = whole.select(chosen);
            let batch = policy.batch_logits(&micro.rows)?;
            if !self.logits_checked && chosen.len() > 1 {
                check_logits(policy, &micro, &batch.logits, &inputs[0].group.id)?;
                self.logits_checked = true;
            }
            let (upstream, found) = Upstream::new(scorer, &micro, &batch.logits, &batch.actions)?;
            let longest = micro.rows.iter().map(|row| row.forward_tokens()).max();
            for (row, found) in chosen.iter().zip(found) {
                stats[*row] = found;
                shared[*row] = chosen.len() > 1 && longest > Some(1);
            }
            let uncovered =
                passes.micro_batch(&batch.logits, &upstream, chosen, self.sketch.as_mut())?;
            if !uncovered.is_empty() {
                return Ok(Trial::Uncovered(uncovered));
            }
        }
        let order: Vec<usize> = chunks.concat();
        let (watched, expected) = (passes.watched, passes.watched_gradient.take());
        let on_task = passes.watched_task;
        let assembled = passes.batches.assemble(&parameters, &order, self.sketch.as_mut())?;
        if let Some(expected) = expected {
            self.compare_watched(policy, watched, &expected, on_task, &assembled)?;
        }
        self.batches += 1;
        let by_parameter = self.by_parameter || !self.row_checked;
        let pack = assembled.into_pack(inputs, stats, by_parameter)?;
        Ok(Trial::Done(Box::new(Taken { pack, shared })))
    }

    /// The parameter whose gradient is taken by autograd too, another one in each batch.
    fn watched(&self, parameters: &[&Tensor]) -> Option<usize> {
        let covered: Vec<usize> =
            (0..parameters.len()).filter(|index| !self.by_rows.contains(index)).collect();
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(self.batches);
        (!covered.is_empty()).then(|| covered[random.random_range(0..covered.len())])
    }

    fn compare_watched(
        &mut self,
        policy: &Policy,
        watched: Option<usize>,
        expected: &Tensor,
        on_task: bool,
        assembled: &Assembled,
    ) -> Result<()> {
        let Some(parameter) = watched else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        let expected = expected.reshape([1, -1]);
        let (found, scale) = assembled.sum_over_groups(parameter, on_task);
        let expected = match &self.sketch {
            Some(projections) => projections.of(parameter, &expected),
            None => expected,
        };
        let difference = (found.reshape([-1]) - expected.reshape([-1])).norm().double_value(&[]);
        let scale = scale.max(expected.norm().double_value(&[]));
        if difference <= 10.0 * tolerance(policy.dtype()) * scale {
            return Ok(());
        }
        let name = policy.trainable().nth(parameter).map_or("", Parameter::name);
        Err(cannot_batch(format!(
            "the gradient of `{name}` over a batch differs by {difference:e} from that of autograd, of norm {scale:e}"
        )))
    }

    fn note_by_rows(&mut self, policy: &Policy) {
        let names: Vec<&str> = policy
            .trainable()
            .enumerate()
            .filter(|(index, _)| self.by_rows.contains(index))
            .map(|(_, parameter)| parameter.name())
            .collect();
        let count = policy.trainable().count();
        self.notes.retain(|note| !note.contains(" parameters row by row, "));
        self.notes.push(format!(
            "the batched engine takes {} of {count} parameters row by row, at a forward and a backward pass a trajectory: {}",
            names.len(),
            names.join(", ")
        ));
    }

    /// A batch one of whose rows has been compared with its plain gradient, if none was before.
    /// Parameters that deviate are taken row by row from then on, unless that does not help.
    fn checked_batch(&mut self, scorer: &Scorer, inputs: &[GroupInput]) -> Result<PackResult> {
        let mut taken = self.batch(scorer, inputs)?;
        let mut last = false;
        while !self.row_checked {
            let Some((row, deviations)) = self.deviations(scorer, inputs, &taken)? else { break };
            let Some(worst) = deviations.first() else {
                self.row_checked = true;
                break;
            };
            let name = scorer.policy.trainable().nth(worst.parameter).map_or("", Parameter::name);
            if last || deviations.iter().any(|found| self.by_rows.contains(&found.parameter)) {
                return Err(cannot_batch(format!(
                    "the gradient of `{name}` for trajectory {row} has squared norm {:e} alone and {:e} in a batch: the model mixes the rows of a batch, or is not deterministic",
                    worst.alone, worst.batched
                )));
            }
            self.by_rows.extend(deviations.iter().map(|found| found.parameter));
            self.note_by_rows(scorer.policy);
            taken = self.batch(scorer, inputs)?;
            last = true;
        }
        Ok(taken.pack)
    }

    /// Recomputes one row by the plain way, and returns the parameters for which its gradient has
    /// another norm than in the batch; `None` if no row that shared a batch has a gradient.
    fn deviations(
        &self,
        scorer: &Scorer,
        inputs: &[GroupInput],
        taken: &Taken,
    ) -> Result<Option<(usize, Vec<Deviation>)>> {
        let groups = &taken.pack.groups;
        let candidates: Vec<(usize, usize)> = groups
            .iter()
            .enumerate()
            .flat_map(|(group, result)| (0..result.products.rows).map(move |row| (group, row)))
            .zip(&taken.shared)
            .filter(|((group, row), shared)| {
                **shared && groups[*group].products.gram.get(*row, *row) > 0.0
            })
            .map(|(place, _)| place)
            .collect();
        if candidates.is_empty() {
            return Ok(None);
        }
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        let (group, row) = candidates[random.random_range(0..candidates.len())];
        let parameters: Vec<&Tensor> =
            scorer.policy.trainable().map(|parameter| &parameter.tensor).collect();
        let losses = scorer.losses(&inputs[group], row)?;
        let gradient = backward(&losses.task, &parameters, false)?;
        let _no_grad = tch::no_grad_guard();
        let gradient: GradientVector = match &self.sketch {
            None => gradient,
            Some(projections) => gradient
                .iter()
                .enumerate()
                .map(|(parameter, gradient)| projections.of(parameter, &gradient.reshape([1, -1])))
                .collect(),
        };
        let plain = super::gram::gram(&[Some(&gradient)], true)?;
        let scale: f64 = plain.iter().map(|gram| gram.get(0, 0)).sum();
        let tolerance = tolerance(scorer.policy.dtype());
        let mut deviations: Vec<Deviation> = plain
            .iter()
            .zip(&groups[group].by_parameter)
            .enumerate()
            .map(|(parameter, (plain, batched))| Deviation {
                parameter,
                alone: plain.get(0, 0),
                batched: batched.gram.get(row, row),
            })
            .filter(|found| found.size() > tolerance * scale)
            .collect();
        deviations.sort_by(|a, b| b.size().total_cmp(&a.size()));
        Ok(Some((row, deviations)))
    }
}

/// A parameter whose gradient is another in a batch than alone.
struct Deviation {
    parameter: usize,
    alone: f64,
    batched: f64,
}

impl Deviation {
    fn size(&self) -> f64 {
        (self.alone - self.batched).abs()
    }
}

/// Compares the logits of the shortest row, which has most padding, with those that it gets alone.
/// Regularizer gradients are known as sums only, so that nothing later would tell a model that mixes
/// the rows of a batch in a group without a task gradient.
fn check_logits(policy: &Policy, micro: &Micro, logits: &Tensor, group: &str) -> Result<()> {
    let rows = &micro.rows;
    let shortest = (0..rows.len()).min_by_key(|row| rows[*row].forward_tokens());
    let Some(shortest) = shortest else { return Ok(()) };
    let _no_grad = tch::no_grad_guard();
    let start: usize = rows[..shortest].iter().map(|row| row.content.len()).sum();
    let batched = logits.narrow(0, start as i64, rows[shortest].content.len() as i64);
    let alone = policy.response_logits(rows[shortest])?;
    let difference = (&batched - &alone).abs().masked_fill(&batched.eq_tensor(&alone), 0.0);
    let difference = difference.max().double_value(&[]);
    let finite = alone.masked_fill(&alone.isinf(), 0.0);
    let scale = finite.abs().max().double_value(&[]).max(1.0);
    if difference > tolerance(policy.dtype()) * scale {
        return Err(cannot_batch(format!(
            "from group `{group}` on, the logits of line {} differ by {difference:e} between a batch and the trajectory alone: the model mixes the rows of a batch, does not heed the attention mask, or is not deterministic",
            rows[shortest].line
        )));
    }
    Ok(())
}

/// What rounding may do to a number that a batch and a row alone compute in different orders.
fn tolerance(kind: Kind) -> f64 {
    match kind {
        Kind::Double => 1e-9,
        Kind::Float => 1e-4,
        _ => 5e-2,
    }
}

/// The number of parameters, trainable or not; at least 1.
fn weights(policy: &Policy) -> usize {
    policy.parameters().iter().map(|parameter| parameter.tensor.numel()).sum::<usize>().max(1)
}

fn cannot_batch(problem: String) -> Error {
    Error::Config {
        place: "decomposition.engine".into(),
        problem: format!(
            "the batched engine cannot take this policy apart: {problem}; use engine: loop"
        ),
    }
}

impl Engine for BatchedEngine {
    fn pack(&self, policy: &Policy, groups: &[(usize, usize)]) -> usize {
        if self.given_up || self.plain.scores || !self.by_rows.is_empty() {
            return 1;
        }
        let weights = weights(policy);
        let (mut rows, mut longest, mut alone) = (0, 0, 0);
        let fit = groups.iter().take_while(|(size, tokens)| {
            longest = longest.max(*tokens);
            rows += size;
            alone += size * tokens;
            let padded = rows * longest;
            *size == groups[0].0
                && padded <= self.token_budget
                && padded * weights <= PACK_WORK
                && padded * 4 <= alone * 5
        });
        fit.count().max(1)
    }

    fn groups(
        &mut self,
        scorer: &Scorer,
        inputs: &[GroupInput],
        tick: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<PackResult>> {
        // Scores of rows of advantage 0 take passes of their own.
        if self.given_up || self.plain.scores {
            return self.plain.groups(scorer, inputs, tick);
        }
        let mut result = match self.checked_batch(scorer, inputs) {
            Ok(result) => result,
            Err(Error::Config { problem, .. }) if !self.strict => {
                self.notes.push(format!("{problem}; this run does"));
                self.given_up = true;
                return self.plain.groups(scorer, inputs, tick);
            }
            Err(error) => return Err(error),
        };
        for group in &mut result.groups {
            if !self.by_parameter {
                group.by_parameter.clear();
            }
            for _ in 0..group.products.rows {
                if tick().is_break() {
                    return Ok(None);
                }
            }
        }
        Ok(Some(result))
    }

    fn notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }
}
