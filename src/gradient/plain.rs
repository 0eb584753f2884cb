//! The plain engine: one forward pass a trajectory, one backward pass a component. It holds the
//! gradients of a whole group at once, is easy to believe, and is what faster engines are held to.

use std::ops::ControlFlow;

use tch::{Kind, Tensor};

use super::engine::{Engine, GroupGradients, GroupResult};
use super::gram::{GradientVector, Gram, gram};
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
    fn group(
        &mut self,
        scorer: &Scorer,
        input: &GroupInput,
        tick: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<GroupResult>> {
        let parameters: Vec<&Tensor> =
            scorer.policy.trainable().map(|parameter| &parameter.tensor).collect();
        let rows = input.group.trajectories.len();
        let mut task: Vec<Option<GradientVector>> = Vec::with_capacity(rows);
        let mut kl: Option<GradientVector> = None;
        let mut entropy: Option<GradientVector> = None;
        let mut stats = Vec::with_capacity(rows);
        let mut score_norms_sq = Vec::new();
        for row in 0..rows {
            let losses = scorer.losses(input, row)?;
            stats.push(losses.stats);
            let has_task =
                input.advantages.select(0, row as i64).ne(0.0).any().int64_value(&[]) != 0;
            let wants_score = self.scores && !has_task;
            let RowLosses { task: task_loss, kl: kl_loss, entropy: entropy_loss, score, .. } =
                losses;
            if let Some(loss) = kl_loss {
                add(&mut kl, backward(&loss, &parameters, true)?);
            }
            add(&mut entropy, backward(&entropy_loss, &parameters, has_task || wants_score)?);
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
        let Some(entropy) = entropy else { return Ok(None) };
        let has_kl = kl.is_some();
        let mut vectors: Vec<Option<&GradientVector>> = task.iter().map(Option::as_ref).collect();
        if let Some(kl) = &kl {
            vectors.push(Some(kl));
        }
        vectors.push(Some(&entropy));
        let matrices = gram(&vectors, self.by_parameter)?;
        let products = |gram: Gram| GroupProducts { rows, has_kl, gram };
        let whole = products(Gram::total(vectors.len(), &matrices));
        if !whole.gram.is_finite() {
            return Err(not_finite(input));
        }
        Ok(Some(GroupResult {
            products: whole,
            by_parameter: if self.by_parameter {
                matrices.into_iter().map(products).collect()
            } else {
                Vec::new()
            },
            gradients: GroupGradients { task: sum(task), kl, entropy },
            score_norms_sq,
            stats,
        }))
    }
}

/// What is said of a group whose gradients hold NaN or infinity.
pub(super) fn not_finite(input: &GroupInput) -> Error {
    Error::NonFinite {
        place: format!("group `{}`", input.group.id),
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
    gradients
        .into_iter()
        .zip(parameters)
        .map(|(gradient, parameter)| {
            if !gradient.defined() {
                return Ok(zero(parameter));
            }
            let gradient =
                if gradient.is_sparse() { gradient.f_to_dense(None, false)? } else { gradient };
            // Half precision would lose the small terms of a long sum.
            Ok(match gradient.kind() {
                Kind::Half | Kind::BFloat16 => gradient.to_kind(Kind::Float),
                _ => gradient,
            })
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
