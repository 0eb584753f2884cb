//! One update of the weights from the gradients of any number of micro-batches.

use std::collections::HashMap;

use tch::{Kind, Tensor};

use super::adamw::{AdamW, saved};
use super::clip::{FailedUpdates, clip_by_global_norm, clip_factor};
use super::schedule::Schedule;
use crate::error::{Error, Result};

/// Gradient accumulation, clipping, schedule and AdamW.
///
/// The loss of a micro-batch is its share of the loss of the batch, as
/// [`TokenWeights::micro_batch`](crate::objective::TokenWeights::micro_batch) weighs it: gradients are
/// added up, and never divided by the number of micro-batches.
#[derive(Debug)]
pub struct Optimizer {
    adamw: AdamW,
    schedule: Schedule,
    max_norm: Option<f64>,
    failure_limit: u64,
    updates: u64,
    failed: FailedUpdates,
    /// The sum so far.
    gradients: Vec<Option<Tensor>>,
}

/// What became of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// The norm of the gradient before clipping.
    pub norm: f64,
    /// What the gradient was multiplied by.
    pub clip_factor: f64,
    /// The learning rate.
    pub learning_rate: f64,
    /// Whether the weights were changed; not if the norm is not finite.
    pub made: bool,
}

impl Optimizer {
    /// `max_norm` clips the gradient. Of updates whose gradient is not finite, fewer than
    /// `failure_limit` in a row are skipped.
    ///
    /// # Errors
    /// If `max_norm` is not positive.
    pub fn new(
        adamw: AdamW,
        schedule: Schedule,
        max_norm: Option<f64>,
        failure_limit: u64,
    ) -> Result<Self> {
        if let Some(found) = max_norm.filter(|max_norm| max_norm.is_nan() || *max_norm <= 0.0) {
            return Err(Error::Argument {
                argument: "max_norm",
                expected: "a positive number".into(),
                found: found.to_string(),
            });
        }
        let gradients = none(&adamw);
        Ok(Self {
            adamw,
            schedule,
            max_norm,
            failure_limit,
            updates: 0,
            failed: FailedUpdates::default(),
            gradients,
        })
    }

    /// What makes the steps.
    pub fn adamw(&self) -> &AdamW {
        &self.adamw
    }

    /// Updates made.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Updates skipped.
    pub fn failed(&self) -> FailedUpdates {
        self.failed
    }

    /// Adds the gradient of a micro-batch's loss, a scalar with a graph. A loss without one, of a
    /// micro-batch in which nothing was sampled for example, adds nothing.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        if !loss.requires_grad() {
            return Ok(());
        }
        let parameters: Vec<&Tensor> =
            self.adamw.parameters().iter().map(|parameter| &parameter.tensor).collect();
        let gradients = Tensor::f_run_backward(&[loss], &parameters, false, false)?;
        self.add(gradients)
    }

    /// Adds the gradients that `Tensor::backward` has left in the parameters, and sets them to 0
    /// there, as `tch` does: a parameter that has had one keeps one, and is stepped from then on
    /// where [`backward`](Self::backward) would leave it alone.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn take_grads(&mut self) -> Result<()> {
        let take = |tensor: &Tensor| -> Result<Tensor> {
            let mut gradient = tensor.f_grad()?;
            if !gradient.defined() {
                return Ok(gradient);
            }
            let taken = gradient.f_mul_scalar(1.0)?;
            let _ = gradient.f_zero_()?;
            Ok(taken)
        };
        let _no_grad = tch::no_grad_guard();
        let gradients = self
            .adamw
            .parameters()
            .iter()
            .map(|parameter| take(&parameter.tensor))
            .collect::<Result<Vec<_>>>()?;
        self.add(gradients)
    }

    /// Undefined tensors add nothing.
    fn add(&mut self, gradients: Vec<Tensor>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (sum, gradient) in self.gradients.iter_mut().zip(gradients) {
            if !gradient.defined() {
                continue;
            }
            let gradient =
                if gradient.is_sparse() { gradient.f_to_dense(None, false)? } else { gradient };
            // Half precision would lose the small terms of a long sum.
            let gradient = match gradient.kind() {
                Kind::Half | Kind::BFloat16 => gradient.f_to_kind(Kind::Float)?,
                _ => gradient,
            };
            *sum = Some(match sum.take() {
                // Not in place: autograd may have given two parameters one tensor.
                Some(sum) => sum.f_add(&gradient)?,
                None => gradient,
            });
        }
        Ok(())
    }

    /// Clips what was added up, makes one update of it, and begins anew. An update whose gradient is
    /// not finite is skipped: weights, moments and schedule stay as they are.
    ///
    /// # Errors
    /// If too many in a row are not finite, or libtorch fails.
    pub fn step(&mut self) -> Result<Update> {
        let cleared = none(&self.adamw);
        let mut gradients = std::mem::replace(&mut self.gradients, cleared);
        let learning_rate =
            self.adamw.options().learning_rate * self.schedule.factor(self.updates + 1);
        let norm = clip_by_global_norm(&mut gradients, self.max_norm)?;
        let made = self.failed.observe(norm, self.failure_limit)?;
        if made {
            self.adamw.step(&gradients, learning_rate)?;
            self.updates += 1;
        }
        Ok(Update { norm, clip_factor: clip_factor(norm, self.max_norm), learning_rate, made })
    }

    /// Everything that the next updates depend on, but for the settings, the weights, and gradients
    /// that were added and not yet used.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let counts = [
            (UPDATES, self.updates),
            (FAILED_IN_A_ROW, self.failed.in_a_row),
            (FAILED, self.failed.total),
        ];
        let mut state: Vec<(String, Tensor)> = counts
            .into_iter()
            .map(|(name, count)| (name.to_owned(), Tensor::from(count as i64)))
            .collect();
        state.extend(self.adamw.state());
        state
    }

    /// Takes up a state, bit for bit, and forgets gradients that were added.
    ///
    /// # Errors
    /// If it is not that of an optimiser of the same parameters; nothing is changed then.
    pub fn restore(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let named: HashMap<&str, &Tensor> =
            state.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let count = |name: &str| -> Result<u64> {
            Ok(saved(&named, name, &[], Kind::Int64)?.int64_value(&[]).unsigned_abs())
        };
        let updates = count(UPDATES)?;
        let failed = FailedUpdates { in_a_row: count(FAILED_IN_A_ROW)?, total: count(FAILED)? };
        self.adamw.restore(state)?;
        (self.updates, self.failed) = (updates, failed);
        self.gradients = none(&self.adamw);
        Ok(())
    }
}

const UPDATES: &str = "updates";
const FAILED_IN_A_ROW: &str = "failed_in_a_row";
const FAILED: &str = "failed";

fn none(adamw: &AdamW) -> Vec<Option<Tensor>> {
    adamw.parameters().iter().map(|_| None).collect()
}
