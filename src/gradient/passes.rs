//! The backward passes of one batch, as far as the uses of the parameters.

use tch::Tensor;

use super::assemble::Batches;
use super::factors::{self, ByRow};
use super::gram::{GradientVector, sum_kind};
use super::pack::Upstream;
use super::plain::backward;
use super::rows::{GroupInput, Scorer};
use super::sketch::Projections;
use crate::error::{Error, Result};
use crate::native::Sites;

/// Passes over some groups, micro-batch after micro-batch.
pub(super) struct Passes<'a> {
    pub scorer: &'a Scorer<'a>,
    pub inputs: &'a [GroupInput<'a>],
    pub parameters: &'a [&'a Tensor],
    /// Parameters that are taken row by row; `inputs` is then one group.
    pub by_rows: &'a [usize],
    /// A parameter whose gradient autograd gives too.
    pub watched: Option<usize>,
    /// Whether that is the gradient of the task, or of the last part of the regularizer.
    pub watched_task: bool,
    pub watched_gradient: Option<Tensor>,
    /// What the passes have shown so far.
    pub batches: Batches,
}

/// What a pass is for.
struct Pass<'a> {
    logits: &'a Tensor,
    /// The gradient with respect to the logits.
    upstream: Tensor,
    /// Whether no other pass follows.
    last: bool,
    watch: bool,
    /// Parameters whose whole gradients are wanted.
    whole: &'a [usize],
}

impl Passes<'_> {
    /// The passes of one micro-batch, the rows `chosen` of the group. Returns parameters that have to
    /// be taken row by row and were not: then nothing of it counts.
    pub fn micro_batch(
        &mut self,
        logits: &Tensor,
        upstream: &Upstream,
        chosen: &[usize],
        mut sketch: Option<&mut Projections>,
    ) -> Result<Vec<usize>> {
        let native = |message: String| Error::torch("walking the autograd graph", &message);
        let mut sites = Sites::find(logits, self.parameters).map_err(native)?;
        let mut uncovered = sites.uncovered.clone();
        uncovered.retain(|index| !self.by_rows.contains(index));
        if !uncovered.is_empty() {
            return Ok(uncovered);
        }
        let parts = upstream.parts(self.scorer.components);
        let task = upstream.task()?;
        let rows = chosen.len() as i64;
        for (at, part) in parts.iter().enumerate() {
            let last = at + 1 == parts.len();
            let whole = self.pass(
                &mut sites,
                Pass {
                    logits,
                    upstream: upstream.part(*part)?,
                    last: last && task.is_none(),
                    watch: last && !self.watched_task,
                    whole: self.by_rows,
                },
            )?;
            let uses = match self.uses(&mut sites, rows, last && task.is_none()) {
                Ok(uses) => uses,
                Err(parameter) => return Ok(vec![parameter]),
            };
            self.batches.add_part(*part, uses, whole, self.parameters, sketch.as_deref_mut());
        }
        let Some(task) = task else { return Ok(Vec::new()) };
        let watch = self.watched_task;
        self.pass(&mut sites, Pass { logits, upstream: task, last: true, watch, whole: &[] })?;
        let mut uses = match self.uses(&mut sites, rows, true) {
            Ok(uses) => uses,
            Err(parameter) => return Ok(vec![parameter]),
        };
        drop(sites);
        self.take_row_by_row(chosen, &mut uses)?;
        self.batches.add_task(uses, rows, self.parameters, sketch);
        Ok(Vec::new())
    }

    /// A backward pass; returns the whole gradients that were wanted, none where none arrived.
    fn pass(&mut self, sites: &mut Sites, pass: Pass) -> Result<Vec<(usize, Option<Tensor>)>> {
        let watched = self.watched.filter(|_| pass.watch);
        let wanted: Vec<usize> = pass.whole.iter().copied().chain(watched).collect();
        let tensors: Vec<&Tensor> = wanted.iter().map(|index| self.parameters[*index]).collect();
        let found = sites
            .backward(pass.logits, &pass.upstream, !pass.last, &tensors)
            .map_err(|message| Error::torch("a backward pass", &message))?;
        let _no_grad = tch::no_grad_guard();
        let found = found.into_iter().map(|gradient| gradient.map(summable).transpose());
        let mut found: Vec<Option<Tensor>> = found.collect::<Result<_>>()?;
        if watched.is_some()
            && let Some(Some(gradient)) = found.pop()
        {
            self.watched_gradient = Some(match self.watched_gradient.take() {
                Some(sum) => sum + gradient,
                None => gradient,
            });
        }
        Ok(wanted.into_iter().zip(found).collect())
    }

    /// What the last pass left at the uses, by parameter; a parameter that it does not show by rows
    /// as an error. With `last` the graph's inputs are let go of.
    fn uses(
        &self,
        sites: &mut Sites,
        rows: i64,
        last: bool,
    ) -> std::result::Result<Vec<Vec<ByRow>>, usize> {
        let _no_grad = tch::no_grad_guard();
        let mut uses: Vec<Vec<ByRow>> = self.parameters.iter().map(|_| Vec::new()).collect();
        for at in 0..sites.list.len() {
            let parameter = sites.list[at].parameter;
            let (input, Some(delta)) = sites.take(at, last) else { continue };
            if self.by_rows.contains(&parameter) {
                continue;
            }
            let size = self.parameters[parameter].size();
            let found = factors::by_row(sites, at, input, delta, rows, &size);
            uses[parameter].push(found.map_err(|factors::NotByRow| parameter)?);
        }
        Ok(uses)
    }

    /// Task gradients of parameters that the graph does not show by rows: each row alone.
    fn take_row_by_row(&self, chosen: &[usize], uses: &mut [Vec<ByRow>]) -> Result<()> {
        if self.by_rows.is_empty() {
            return Ok(());
        }
        let some: Vec<&Tensor> = self.by_rows.iter().map(|index| self.parameters[*index]).collect();
        let gradients = chosen
            .iter()
            .map(|row| backward(&self.scorer.losses(&self.inputs[0], *row)?.task, &some, false))
            .collect::<Result<Vec<GradientVector>>>()?;
        let _no_grad = tch::no_grad_guard();
        for (at, parameter) in self.by_rows.iter().enumerate() {
            let rows: Vec<Tensor> =
                gradients.iter().map(|gradient| gradient[at].reshape([-1])).collect();
            uses[*parameter] = vec![ByRow::Formed(Tensor::f_stack(&rows, 0)?)];
        }
        Ok(())
    }
}

/// A gradient that is dense, in the dtype that sums are taken in.
fn summable(gradient: Tensor) -> Result<Tensor> {
    let gradient = if gradient.is_sparse() { gradient.f_to_dense(None, false)? } else { gradient };
    Ok(gradient.to_kind(sum_kind(gradient.kind())))
}
