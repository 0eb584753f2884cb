//! A value function that learns beside the policy.

use tch::Tensor;

use super::optimizer::{Optimizer, Update};
use super::score::by_row;
use crate::error::{Error, Result};
use crate::gradient::{length_chunks, pad_rows, padded};
use crate::objective::{TokenWeights, value_loss};
use crate::policy::Policy;
use crate::rollout::Trajectory;
use crate::study::SelectedRows;

/// A TorchScript value model with an optimiser of its own. It maps what the policy reads to one number a
/// position, `[B, T, 1]`: the value before the token (or action) that is chosen there.
pub struct Critic {
    model: Policy,
    /// Its optimiser.
    pub optimizer: Optimizer,
    clip: Option<f64>,
    token_budget: usize,
}

impl Critic {
    /// A critic whose values are clipped to ± `clip` around the old ones in its loss.
    ///
    /// # Errors
    /// If the model gives more than one number a position.
    pub fn new(
        model: Policy,
        optimizer: Optimizer,
        clip: Option<f64>,
        token_budget: usize,
    ) -> Result<Self> {
        if model.choices() != 1 {
            return Err(Error::checkpoint(
                model.path(),
                format!(
                    "expected a value model with one number a position, shape [B, T, 1], found {}",
                    model.choices()
                ),
            ));
        }
        Ok(Self { model, optimizer, clip, token_budget })
    }

    /// The value model.
    pub fn model(&self) -> &Policy {
        &self.model
    }

    /// Puts the present values into trajectories.
    ///
    /// # Errors
    /// If libtorch fails, or a value is not finite.
    pub fn fill<'a>(
        &self,
        trajectories: impl IntoIterator<Item = &'a mut Trajectory>,
    ) -> Result<()> {
        let mut trajectories: Vec<&mut Trajectory> = trajectories.into_iter().collect();
        let rows: Vec<&Trajectory> = trajectories.iter().map(|row| &**row).collect();
        let values =
            by_row(
                &self.model,
                &rows,
                self.token_budget,
                |logits, _| Ok(logits.f_squeeze_dim(1)?),
            )?;
        if let Some(found) = values.iter().flatten().find(|value| !value.is_finite()) {
            return Err(Error::NonFinite {
                place: self.model.path().display().to_string(),
                what: "a value".into(),
                found: *found,
                remedy: "lower critic.optimizer.learning_rate".into(),
            });
        }
        for (trajectory, values) in trajectories.iter_mut().zip(values) {
            trajectory.values = Some(values);
        }
        Ok(())
    }

    /// One update on the rows of an optimiser batch, which hold their old values and returns; the loss
    /// before it, and what became of it.
    ///
    /// # Errors
    /// If rows lack either, libtorch fails, or too many gradients in a row are not finite.
    pub fn update(&mut self, rows: &SelectedRows, weights: &TokenWeights) -> Result<(f64, Update)> {
        let lacks = || Error::Argument {
            argument: "rows",
            expected: "values and returns of every row".into(),
            found: "none".into(),
        };
        let returns = rows.returns.as_ref().ok_or_else(lacks)?;
        let mut total = 0.0;
        for chunk in length_chunks(&rows.rows, self.token_budget) {
            let chosen: Vec<&Trajectory> = chunk.iter().map(|row| rows.rows[*row]).collect();
            let length = chosen.iter().map(|row| row.content.len()).max().unwrap_or(0);
            let index: Vec<i64> = chunk.iter().map(|row| *row as i64).collect();
            let index = Tensor::from_slice(&index);
            let values = pad_rows(&self.flat(&chosen)?, &chosen, length as i64)?;
            let like = |tensor: Tensor| tensor.to_kind(values.kind()).to_device(values.device());
            let old = padded(chosen.iter().copied(), length, |row| row.values.as_deref());
            let old = like(old.ok_or_else(lacks)?);
            let returns = returns.index_select(0, &index).narrow(1, 0, length as i64);
            let weights = weights.select(&index, length as i64).to_device(values.device());
            let loss = value_loss(&values, &old, &like(returns), self.clip, &weights)?;
            total += loss.double_value(&[]);
            self.optimizer.backward(&loss)?;
        }
        Ok((total, self.optimizer.step()?))
    }

    /// `[n]`, the values at the positions of the responses, one response after the other.
    fn flat(&self, rows: &[&Trajectory]) -> Result<Tensor> {
        Ok(self.model.batch_logits(rows)?.logits.f_squeeze_dim(1)?)
    }
}
