//! The batched engine: one forward pass a group, one backward pass a component, and the products of
//! the trajectories' task gradients read from the autograd graph of the batch.
//!
//! The sums over a group come from autograd itself, whatever the model is made of. Only the Gram
//! matrix of the rows is taken apart: at each use of a parameter the input and the arriving gradient
//! give every row's gradient (a linear layer's is `δᵀx`), from which the products follow parameter by
//! parameter. Its sum must be the squared norm of the group's gradient, which is checked for every
//! group; and one row a run is recomputed by the plain engine, which tells a model that mixes the
//! rows of a batch.

use std::ops::ControlFlow;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Kind, Tensor};

use super::engine::{Engine, GroupGradients, GroupResult};
use super::factors::{self, Arrived};
use super::gram::{GradientVector, Gram, gram};
use super::plain::{PlainEngine, backward};
use super::rows::{self, GroupInput, RowStats, Scorer};
use super::split::GroupProducts;
use crate::error::{Error, Result};
use crate::native::Sites;
use crate::objective::{self, Tokens};
use crate::policy::{Parameter, Policy};

/// Reads per-trajectory gradients from batched passes.
#[derive(Debug)]
pub struct BatchedEngine {
    /// Products by parameter beside those of the whole vectors.
    pub by_parameter: bool,
    /// Padded tokens of a group beyond which the plain engine takes it.
    pub token_budget: usize,
    /// Whether a model that cannot be batched is an error; otherwise the plain engine takes over.
    pub strict: bool,
    /// Chooses the row that is recomputed.
    pub seed: u64,
    /// For groups that are not batched, and the row that is recomputed.
    pub plain: PlainEngine,
    logits_checked: bool,
    checked: bool,
    /// Parameters that the row that was recomputed showed to need it.
    by_rows: Vec<usize>,
    given_up: bool,
    notes: Vec<String>,
}

/// The parts of a group's losses: upstream gradients with respect to its logits `[n, V]`.
struct Upstream {
    task: Option<Tensor>,
    kl: Option<Tensor>,
    entropy: Tensor,
    /// Where each row's positions start among the `n`, and their end.
    starts: Vec<i64>,
}

/// What was taken of the task pass.
struct Task {
    sum: Option<GradientVector>,
    /// `[rows, rows]` a parameter, on the CPU.
    products: Vec<Option<Vec<f64>>>,
}

impl BatchedEngine {
    /// An engine that falls back to `plain`.
    pub fn new(plain: PlainEngine, token_budget: usize, strict: bool, seed: u64) -> Self {
        Self {
            by_parameter: plain.by_parameter,
            token_budget,
            strict,
            seed,
            plain,
            logits_checked: false,
            checked: false,
            by_rows: Vec::new(),
            given_up: false,
            notes: Vec::new(),
        }
    }

    fn batch(&mut self, scorer: &Scorer, input: &GroupInput) -> Result<GroupResult> {
        let policy = scorer.policy;
        let parameters: Vec<&Tensor> =
            policy.trainable().map(|parameter| &parameter.tensor).collect();
        let rows = input.group.trajectories.len();
        let batch = policy.batch_logits(&input.group.trajectories)?;
        self.check_logits(policy, input, &batch.logits)?;
        let (upstream, stats) = upstream(scorer, input, &batch.logits, &batch.actions)?;

        let through = |upstream: &Tensor| (&batch.logits * upstream).sum(batch.logits.kind());
        let kl =
            upstream.kl.as_ref().map(|kl| backward(&through(kl), &parameters, true)).transpose()?;
        let has_task = upstream.task.is_some();
        let entropy = backward(&through(&upstream.entropy), &parameters, has_task)?;
        let task = self.task(policy, &parameters, &batch.logits, &upstream, rows)?;
        self.assemble(input, &parameters, task, kl, entropy, stats)
    }

    /// Compares the logits of the shortest row, which has most padding, with those that it gets
    /// alone; once a run. Regularizer gradients are known as sums only, so that nothing later would
    /// tell a model that mixes the rows of a batch in a group without a task gradient.
    fn check_logits(&mut self, policy: &Policy, input: &GroupInput, logits: &Tensor) -> Result<()> {
        let rows = &input.group.trajectories;
        let shortest = (0..rows.len()).min_by_key(|row| rows[*row].forward_tokens());
        let Some(shortest) = shortest.filter(|_| !self.logits_checked) else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        let start: usize = rows[..shortest].iter().map(|row| row.content.len()).sum();
        let batched = logits.narrow(0, start as i64, rows[shortest].content.len() as i64);
        let alone = policy.response_logits(&rows[shortest])?;
        let difference = (&batched - &alone).abs().masked_fill(&batched.eq_tensor(&alone), 0.0);
        let difference = difference.max().double_value(&[]);
        let finite = alone.masked_fill(&alone.isinf(), 0.0);
        let scale = finite.abs().max().double_value(&[]).max(1.0);
        if difference > tolerance(policy.dtype()) * scale {
            return Err(cannot_batch(format!(
                "in group `{}` the logits of trajectory {shortest} differ by {difference:e} between a batch and the trajectory alone: the model mixes the rows of a batch, does not heed the attention mask, or is not deterministic",
                input.group.id
            )));
        }
        self.logits_checked = true;
        Ok(())
    }

    fn task(
        &mut self,
        policy: &Policy,
        parameters: &[&Tensor],
        logits: &Tensor,
        upstream: &Upstream,
        rows: usize,
    ) -> Result<Task> {
        let mut products: Vec<Option<Vec<f64>>> = vec![None; parameters.len()];
        let Some(task) = &upstream.task else { return Ok(Task { sum: None, products }) };
        let native = |message: String| Error::torch("walking the autograd graph", &message);
        let mut sites = Sites::find(logits, parameters).map_err(native)?;
        let weighted = logits * task;
        let sum = backward(&weighted.sum(logits.kind()), parameters, true)?;

        let _no_grad = tch::no_grad_guard();
        let mut uncovered = sites.uncovered.clone();
        uncovered.extend(self.by_rows.iter().filter(|index| !sites.uncovered.contains(index)));
        let mut by_parameter: Vec<Vec<usize>> = vec![Vec::new(); parameters.len()];
        for (at, site) in sites.list.iter().enumerate() {
            by_parameter[site.parameter].push(at);
        }
        let mut taken: Vec<(usize, Tensor)> = Vec::new();
        for (parameter, places) in by_parameter.into_iter().enumerate() {
            let mut uses = Vec::with_capacity(places.len());
            for at in places {
                let site_use = sites.list[at].site_use;
                if let (input, Some(delta)) = sites.take(at) {
                    uses.push(Arrived { site_use, input, delta });
                }
            }
            if uses.is_empty() || uncovered.contains(&parameter) {
                continue;
            }
            match factors::products(parameters[parameter], &uses, rows as i64) {
                Ok(matrix) => taken.push((parameter, matrix)),
                Err(factors::NotByRow) => uncovered.push(parameter),
            }
        }
        drop(sites);
        for (parameter, matrix) in taken {
            products[parameter] = Some(Vec::try_from(matrix.to_kind(Kind::Double).reshape([-1]))?);
        }
        if !uncovered.is_empty() {
            drop(_no_grad);
            self.note_uncovered(policy, &uncovered);
            row_by_row(parameters, &uncovered, &weighted, &upstream.starts, &mut products)?;
        }
        Ok(Task { sum: Some(sum), products })
    }

    fn note_uncovered(&mut self, policy: &Policy, uncovered: &[usize]) {
        let names: Vec<&str> = policy
            .trainable()
            .enumerate()
            .filter(|(index, _)| uncovered.contains(index))
            .map(|(_, parameter)| parameter.name())
            .collect();
        let note = format!(
            "the batched engine takes {} of {} parameters row by row, at a backward pass a trajectory: {}",
            names.len(),
            policy.trainable().count(),
            names.join(", ")
        );
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn assemble(
        &self,
        input: &GroupInput,
        parameters: &[&Tensor],
        task: Task,
        kl: Option<GradientVector>,
        entropy: GradientVector,
        stats: Vec<RowStats>,
    ) -> Result<GroupResult> {
        let rows = input.group.trajectories.len();
        let has_kl = kl.is_some();
        let mut vectors = vec![task.sum.as_ref()];
        if let Some(kl) = &kl {
            vectors.push(Some(kl));
        }
        vectors.push(Some(&entropy));
        let sums = gram(&vectors, true)?;
        let join = |sums: &Gram, row_products: Option<&Vec<f64>>| GroupProducts {
            rows,
            has_kl,
            gram: join(rows, sums, row_products),
        };
        let by_parameter: Vec<GroupProducts> = sums
            .iter()
            .zip(&task.products)
            .map(|(sums, row_products)| join(sums, row_products.as_ref()))
            .collect();
        let whole = GroupProducts {
            rows,
            has_kl,
            gram: Gram::total(
                rows + vectors.len() - 1,
                by_parameter.iter().map(|products| &products.gram),
            ),
        };
        if !whole.gram.is_finite() {
            return Err(super::plain::not_finite(input));
        }
        debug_assert_eq!(parameters.len(), by_parameter.len());
        self.check_sum(input, &whole, &Gram::total(vectors.len(), &sums))?;
        Ok(GroupResult {
            products: whole,
            by_parameter,
            gradients: GroupGradients { task: task.sum, kl, entropy },
            score_norms_sq: Vec::new(),
            stats,
        })
    }

    /// Σ_ij K_ij is the squared norm of the sum that autograd gives.
    fn check_sum(&self, input: &GroupInput, whole: &GroupProducts, sums: &Gram) -> Result<()> {
        let ones: Vec<f64> =
            (0..whole.gram.len()).map(|index| f64::from(index < whole.rows)).collect();
        let (found, expected) = (whole.gram.norm_sq(&ones), sums.get(0, 0));
        let scale: f64 = (0..whole.rows).map(|row| whole.gram.get(row, row)).sum();
        if (found - expected).abs() <= SUM_TOLERANCE * scale.max(expected) {
            return Ok(());
        }
        Err(cannot_batch(format!(
            "in group `{}` the rows' gradients add up to a squared norm of {found:e}, and the gradient of the group has {expected:e}",
            input.group.id
        )))
    }

    /// Recomputes one row by the plain way, and returns the parameters for which its gradient has
    /// another norm than in the batch, with both squares; `None` if no row has a gradient.
    fn deviations(
        &self,
        scorer: &Scorer,
        input: &GroupInput,
        result: &GroupResult,
    ) -> Result<Option<Vec<Deviation>>> {
        let gram = &result.products.gram;
        let candidates: Vec<usize> =
            (0..result.products.rows).filter(|row| gram.get(*row, *row) > 0.0).collect();
        if candidates.is_empty() {
            return Ok(None);
        }
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        let row = candidates[random.random_range(0..candidates.len())];
        let parameters: Vec<&Tensor> =
            scorer.policy.trainable().map(|parameter| &parameter.tensor).collect();
        let losses = scorer.losses(input, row)?;
        let gradient = backward(&losses.task, &parameters, false)?;
        let plain = super::gram::gram(&[Some(&gradient)], true)?;
        let scale: f64 = plain.iter().map(|gram| gram.get(0, 0)).sum();
        let tolerance = tolerance(scorer.policy.dtype());
        Ok(Some(
            plain
                .iter()
                .zip(&result.by_parameter)
                .enumerate()
                .map(|(parameter, (plain, batched))| Deviation {
                    parameter,
                    row,
                    alone: plain.get(0, 0),
                    batched: batched.gram.get(row, row),
                })
                .filter(|found| (found.alone - found.batched).abs() > tolerance * scale)
                .collect(),
        ))
    }

    /// A batch whose rows have been compared with one that was recomputed. Parameters that deviate
    /// are taken row by row from then on: their layer may lay the batch out otherwise. What deviates
    /// even so is the model's doing.
    fn checked_batch(&mut self, scorer: &Scorer, input: &GroupInput) -> Result<GroupResult> {
        let result = self.batch(scorer, input)?;
        if self.checked {
            return Ok(result);
        }
        let Some(deviations) = self.deviations(scorer, input, &result)? else { return Ok(result) };
        self.checked = true;
        if deviations.is_empty() {
            return Ok(result);
        }
        self.by_rows.extend(deviations.iter().map(|found| found.parameter));
        let result = self.batch(scorer, input)?;
        match self.deviations(scorer, input, &result)?.unwrap_or_default().first() {
            None => Ok(result),
            Some(found) => Err(cannot_batch(format!(
                "in group `{}` the squared gradient norm of trajectory {} for parameter `{}` is {:e} in a batch and {:e} alone: the model mixes the rows of a batch, or is not deterministic",
                input.group.id,
                found.row,
                scorer.policy.trainable().nth(found.parameter).map_or("", Parameter::name),
                found.batched,
                found.alone
            ))),
        }
    }
}

/// A parameter whose gradient of one row differs between a batch and the row alone.
struct Deviation {
    parameter: usize,
    row: usize,
    alone: f64,
    batched: f64,
}

/// How far the sum of the rows may lie from the gradient of the group, relative to their squares.
const SUM_TOLERANCE: f64 = 1e-3;

/// What rounding may do to a number that a batch and a row alone compute in different orders.
fn tolerance(kind: Kind) -> f64 {
    match kind {
        Kind::Double => 1e-9,
        Kind::Float => 1e-4,
        _ => 5e-2,
    }
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
    fn group(
        &mut self,
        scorer: &Scorer,
        input: &GroupInput,
        tick: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<GroupResult>> {
        let rows = &input.group.trajectories;
        let longest = rows.iter().map(|row| row.forward_tokens()).max().unwrap_or(0);
        let too_large = rows.len() * longest > self.token_budget;
        // Scores of rows of advantage 0 take passes of their own.
        if self.given_up || self.plain.scores || too_large {
            if too_large && !self.given_up {
                let note = format!(
                    "groups of more than {} padded tokens are taken row by row (decomposition.token_budget)",
                    self.token_budget
                );
                if !self.notes.contains(&note) {
                    self.notes.push(note);
                }
            }
            return self.plain.group(scorer, input, tick);
        }
        let mut result = match self.checked_batch(scorer, input) {
            Ok(result) => result,
            Err(Error::Config { problem, .. }) if !self.strict => {
                self.notes.push(format!("{problem}; this run does"));
                self.given_up = true;
                return self.plain.group(scorer, input, tick);
            }
            Err(error) => return Err(error),
        };
        for _ in rows {
            if tick().is_break() {
                return Ok(None);
            }
        }
        if !self.by_parameter {
            result.by_parameter.clear();
        }
        Ok(Some(result))
    }

    fn notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }
}

/// The losses of a group on its logits, differentiated in closed form as far as the logits, so that
/// no softmax is taped.
fn upstream(
    scorer: &Scorer,
    input: &GroupInput,
    logits: &Tensor,
    actions: &Tensor,
) -> Result<(Upstream, Vec<RowStats>)> {
    let _no_grad = tch::no_grad_guard();
    let trajectories = &input.group.trajectories;
    let log_probs = objective::log_probs(&logits.detach(), scorer.temperature);
    let (device, kind) = (log_probs.device(), log_probs.kind());
    let length = input.advantages.size()[1];
    // Where each of the n positions lies in [G, T].
    let mut starts = vec![0];
    let mut places: Vec<i64> = Vec::new();
    for (row, trajectory) in trajectories.iter().enumerate() {
        let start = row as i64 * length;
        places.extend(start..start + trajectory.content.len() as i64);
        starts.push(places.len() as i64);
    }
    let places = Tensor::from_slice(&places).to_device(device);
    let shape = [trajectories.len() as i64, length];
    let spread = |flat: &Tensor| {
        Tensor::zeros([shape[0] * shape[1]], (flat.kind(), device))
            .index_copy(0, &places, flat)
            .reshape(shape)
    };
    let gather = |padded: &Tensor| padded.reshape([-1]).index_select(0, &places);

    let logp = spread(&objective::gather(&log_probs, actions)?);
    let entropy = spread(&objective::entropy(&log_probs));
    let tokens = Tokens {
        old_logp: scorer.old_rows(trajectories, &logp),
        ref_logp: scorer.reference_rows(trajectories, &logp)?,
        sampler_logp: rows::padded_like(trajectories, &logp, |row| row.sampler_logprobs.as_deref()),
        advantages: input.advantages.to_kind(kind).to_device(device),
        mask: input.weights.mask().to_device(device),
        logp,
    }
    .masked()?;
    let task = scorer.algorithm.task(&tokens);
    let kl = scorer.algorithm.kl(&tokens);
    let stats = scorer.stats(&tokens, &task, kl.as_ref(), &entropy)?;
    let stats = stats
        .into_iter()
        .enumerate()
        .map(|(row, stats)| rows::finite(stats, input, row))
        .collect::<Result<Vec<RowStats>>>()?;

    let weights = input.weights.per_token(kind).to_device(device);
    let temperature = scorer.temperature;
    let of_slope = |slope: &Tensor| {
        objective::logit_gradient(
            &log_probs,
            actions,
            &gather(&(slope * &weights)),
            None,
            temperature,
        )
        .map(|gradient| gradient.to_kind(logits.kind()))
    };
    let has_task = tokens.advantages.ne(0.0).any().int64_value(&[]) != 0;
    let minus_weights = gather(&-&weights);
    let entropy = objective::logit_gradient(
        &log_probs,
        actions,
        &minus_weights.zeros_like(),
        Some(&minus_weights),
        temperature,
    )?;
    let upstream = Upstream {
        task: has_task.then(|| of_slope(&task.slope)).transpose()?,
        kl: kl.as_ref().map(|kl| of_slope(&kl.slope)).transpose()?,
        entropy: entropy.to_kind(logits.kind()),
        starts,
    };
    Ok((upstream, stats))
}

/// Products of parameters that the graph does not show by rows: a backward pass a row, as far as
/// these parameters.
fn row_by_row(
    parameters: &[&Tensor],
    uncovered: &[usize],
    weighted: &Tensor,
    starts: &[i64],
    products: &mut [Option<Vec<f64>>],
) -> Result<()> {
    let some: Vec<&Tensor> = uncovered.iter().map(|index| parameters[*index]).collect();
    let gradients = starts
        .windows(2)
        .map(|pair| {
            let loss = weighted.narrow(0, pair[0], pair[1] - pair[0]).sum(weighted.kind());
            backward(&loss, &some, true)
        })
        .collect::<Result<Vec<GradientVector>>>()?;
    let vectors: Vec<Option<&GradientVector>> = gradients.iter().map(Some).collect();
    for (index, gram) in uncovered.iter().zip(gram(&vectors, true)?) {
        let n = gram.len();
        products[*index] = Some((0..n * n).map(|at| gram.get(at / n, at % n)).collect());
    }
    Ok(())
}

/// The matrix of rows and regularizers from the products of the rows and those of the sums. Of the
/// products of a row with a regularizer only their sum is ever used; each gets an equal part.
fn join(rows: usize, sums: &Gram, row_products: Option<&Vec<f64>>) -> Gram {
    let others = sums.len() - 1;
    let mut joined = Gram::zeros(rows + others);
    if let Some(row_products) = row_products {
        for i in 0..rows {
            for j in 0..rows {
                joined.set(i, j, row_products[i * rows + j]);
            }
        }
    }
    for a in 0..others {
        for b in 0..others {
            joined.set(rows + a, rows + b, sums.get(a + 1, b + 1));
        }
        for row in 0..rows {
            let part = sums.get(0, a + 1) / rows as f64;
            joined.set(row, rows + a, part);
            joined.set(rows + a, row, part);
        }
    }
    joined
}
