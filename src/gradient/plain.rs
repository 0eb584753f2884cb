//! The plain engine: one forward pass a trajectory, one backward pass a component. It holds the
//! gradients of a whole group at once, is easy to believe, and is what faster engines are held to.

use std::collections::HashSet;
use std::ops::ControlFlow;

use tch::Tensor;

use super::engine::{Components, Engine, GroupResult, PackGradients, PackResult, Part};
use super::gram::{GradientVector, Gram, gram, sum_kind};
use super::rows::{GroupInput, RowLosses, Scorer};
use super::split::GroupProducts;
use crate::error::{Error, Result};

/// Loops over trajectories.
#[derive(Debug, Default)]
pub struct PlainEngine {
    /// Products by parameter beside those of the whole vectors.
    pub by_parameter: bool,
    /// Scores of rows of zero advantage too, at a backward pass each; for the bound.
    pub scores: bool,
}

impl Engine for PlainEngine {
    fn groups(
        &mut self,
        scorer: &Scorer,
        inputs: &[GroupInput],
        tick: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<PackResult>> {
        let mut pack: Option<PackResult> = None;
        for input in inputs {
            let Some(group) = self.group(scorer, input, tick)? else { return Ok(None) };
            match &mut pack {
                None => pack = Some(group),
                Some(pack) => pack.extend(group)?,
            }
        }
        Ok(pack)
    }
}

impl PlainEngine {
    fn group(
        &self,
        scorer: &Scorer,
        input: &GroupInput,
        tick: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<PackResult>> {
        let parameters: Vec<&Tensor> =
            scorer.policy.trainable().map(|parameter| &parameter.tensor).collect();
        let rows = input.group.trajectories.len();
        let mut task: Vec<Option<GradientVector>> = Vec::with_capacity(rows);
        let mut parts: Vec<(Part, Option<GradientVector>)> = Vec::new();
        let mut stats = Vec::with_capacity(rows);
        let mut score_norms_sq = Vec::new();
        for row in 0..rows {
            let losses = scorer.losses(input, row)?;
            stats.push(losses.stats);
            let has_task =
                input.advantages.select(0, row as i64).ne(0.0).any().int64_value(&[]) != 0;
            let wants_score = self.scores && !has_task;
            let part_losses = part_losses(scorer, &losses);
            let RowLosses { task: task_loss, score, .. } = losses;
            let last = part_losses.len().saturating_sub(1);
            for (at, (part, loss)) in part_losses.into_iter().enumerate() {
                if parts.len() == at {
                    parts.push((part, None));
                }
                let keep_graph = at < last || has_task || wants_score;
                add(&mut parts[at].1, backward(&loss, &parameters, keep_graph)?);
            }
            // A row of advantage 0 has task gradient 0: no pass is spent on it.
            let gradient =
                has_task.then(|| backward(&task_loss, &parameters, false)).transpose()?;
            if self.scores {
                let score =
                    wants_score.then(|| backward(&score, &parameters, false)).transpose()?;
                let norm_sq = score
                    .map(|score| gram(&[Some(&score)], false))
                    .transpose()?
                    .map(|gram| gram[0].get(0, 0));
                score_norms_sq.push(norm_sq);
            }
            task.push(gradient);
            if tick().is_break() {
                return Ok(None);
            }
        }
        let mut vectors: Vec<Option<&GradientVector>> = task.iter().map(Option::as_ref).collect();
        vectors.extend(parts.iter().map(|(_, vector)| vector.as_ref()));
        let matrices = gram(&vectors, self.by_parameter)?;
        let names: Vec<Part> = parts.iter().map(|(part, _)| *part).collect();
        let products = |gram: Gram| GroupProducts::exact(rows, names.clone(), gram);
        let whole = products(Gram::total(vectors.len(), &matrices));
        if !whole.gram.is_finite() {
            return Err(not_finite(&input.group.id));
        }
        let group = GroupResult {
            products: whole,
            by_parameter: if self.by_parameter {
                matrices.into_iter().map(products).collect()
            } else {
                Vec::new()
            },
            score_norms_sq,
            stats,
        };
        let one = |vector: GradientVector| -> Vec<Tensor> {
            vector.into_iter().map(|tensor| tensor.unsqueeze(0)).collect()
        };
        let gradients = PackGradients {
            task: sum(task).map(one),
            parts: parts
                .into_iter()
                .filter_map(|(part, vector)| Some((part, one(vector?))))
                .collect(),
        };
        Ok(Some(PackResult { groups: vec![group], gradients }))
    }
}

/// The losses of the parts of the regularizer.
fn part_losses(scorer: &Scorer, losses: &RowLosses) -> Vec<(Part, Tensor)> {
    let mut parts = Vec::new();
    match scorer.components {
        Components::Separate => {
            if let Some(kl) = &losses.kl {
                parts.push((Part::Kl, kl.shallow_clone()));
            }
            parts.push((Part::Entropy, losses.entropy.shallow_clone()));
        }
        Components::Combined => {
            let kl_coef = scorer.algorithm.kl_loss_coef();
            let kl = losses.kl.as_ref().filter(|_| kl_coef != 0.0).map(|kl| kl * kl_coef);
            let entropy_coef = scorer.algorithm.entropy_coef;
            let entropy = (entropy_coef != 0.0).then(|| &losses.entropy * entropy_coef);
            let sum = kl.into_iter().chain(entropy).reduce(|sum, term| sum + term);
            parts.extend(sum.map(|sum| (Part::Combined, sum)));
        }
    }
    parts
}

impl PackResult {
    /// Appends another pack, of the same parts.
    pub(super) fn extend(&mut self, other: Self) -> Result<()> {
        let join = |one: &mut Vec<Tensor>, two: Vec<Tensor>| -> Result<()> {
            for (one, two) in one.iter_mut().zip(two) {
                *one = Tensor::f_cat(&[&*one, &two], 0)?;
            }
            Ok(())
        };
        let zeros = |vectors: &[Tensor], groups: usize| -> Vec<Tensor> {
            let zeros = |vector: &Tensor| {
                let mut size = vector.size();
                size[0] = groups as i64;
                Tensor::zeros(size, (vector.kind(), vector.device()))
            };
            vectors.iter().map(zeros).collect()
        };
        match (&mut self.gradients.task, other.gradients.task) {
            (None, None) => {}
            (Some(one), None) => {
                let none = zeros(one, other.groups.len());
                join(one, none)?;
            }
            (one, Some(two)) => {
                let one = one.get_or_insert_with(|| zeros(&two, self.groups.len()));
                join(one, two)?;
            }
        }
        for ((_, one), (_, two)) in self.gradients.parts.iter_mut().zip(other.gradients.parts) {
            join(one, two)?;
        }
        self.groups.extend(other.groups);
        Ok(())
    }
}

/// What is said of a group whose gradients hold NaN or infinity.
pub(super) fn not_finite(group: &str) -> Error {
    Error::NonFinite {
        place: format!("group `{group}`"),
        what: "a gradient".into(),
        found: f64::NAN,
        remedy: "the losses are finite, so a backward pass overflowed; try policy.dtype: float32 or float64".into(),
    }
}

/// The gradient of a scalar; a parameter that it does not depend on has gradient 0.
pub(super) fn backward(
    loss: &Tensor,
    parameters: &[&Tensor],
    keep_graph: bool,
) -> Result<GradientVector> {
    let zero = |parameter: &&Tensor| parameter.detach().zeros_like();
    // A branch of the model that this input did not take may leave a loss without a graph.
    if !loss.requires_grad() {
        return Ok(parameters.iter().map(zero).collect());
    }
    let gradients = Tensor::f_run_backward(&[loss], parameters, keep_graph, false)?;
    // Of parameters that are added to each other autograd gives one tensor as the gradient of both;
    // sums in place would then count each term twice.
    let mut seen = HashSet::new();
    gradients
        .into_iter()
        .zip(parameters)
        .map(|(gradient, parameter)| {
            if !gradient.defined() {
                return Ok(zero(parameter));
            }
            let gradient =
                if gradient.is_sparse() { gradient.f_to_dense(None, false)? } else { gradient };
            let gradient = gradient.to_kind(sum_kind(gradient.kind()));
            let is_first = gradient.numel() == 0 || seen.insert(gradient.data_ptr());
            Ok(if is_first { gradient } else { gradient.copy() })
        })
        .collect()
}

fn add(total: &mut Option<GradientVector>, term: GradientVector) {
    let _no_grad = tch::no_grad_guard();
    match total {
        None => *total = Some(term),
        Some(total) => {
            for (total, term) in total.iter_mut().zip(term) {
                *total += term;
            }
        }
    }
}

/// Adds up the rows in place, and frees each as it is added.
fn sum(rows: Vec<Option<GradientVector>>) -> Option<GradientVector> {
    let mut total = None;
    rows.into_iter().flatten().for_each(|row| add(&mut total, row));
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    /// d/da = d/db = Σ over two rows of (1, 2), however the two are shared.
    #[test]
    fn parameters_that_are_added_have_gradients_of_their_own() {
        let parameter = || Tensor::from_slice(&[0.5, -0.5]).set_requires_grad(true);
        let (a, b) = (parameter(), parameter());
        let slopes = Tensor::from_slice(&[1.0, 2.0]);
        let mut total = None;
        for _ in 0..2 {
            let loss = ((&a + &b) * &slopes).sum(tch::Kind::Double);
            add(&mut total, backward(&loss, &[&a, &b], false).unwrap());
        }
        for gradient in total.unwrap() {
            assert_eq!(Vec::<f64>::try_from(&gradient).unwrap(), [2.0, 4.0]);
        }
    }
}
