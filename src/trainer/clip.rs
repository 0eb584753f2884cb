//! Clipping by the global norm, and what becomes of an update whose norm is not finite.

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::objective::precise;

/// Elements that are widened to float64 at a time.
const CHUNK: i64 = 1 << 22;
/// What torch adds to the norm.
const EPSILON: f64 = 1e-6;

/// The 2-norm of all gradients together, squared and summed in float64 whatever their dtype; `None`
/// counts as 0. NaN or infinite if a gradient is. One transfer from the device.
///
/// # Errors
/// If libtorch fails.
pub fn global_norm(gradients: &[Option<Tensor>]) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let mut total: Option<Tensor> = None;
    for gradient in gradients.iter().flatten() {
        let squares = sum_of_squares(gradient)?;
        total = Some(match total {
            // Parameters may lie on several devices.
            Some(total) => total.f_add(&squares.to_device(total.device()))?,
            None => squares,
        });
    }
    Ok(total.map_or(0.0, |total| total.to_device(Device::Cpu).double_value(&[]).sqrt()))
}

fn sum_of_squares(gradient: &Tensor) -> Result<Tensor> {
    let flat = gradient.f_reshape([-1])?;
    let wide = precise(flat.device());
    let mut sum = Tensor::f_zeros([] as [i64; 0], (wide, flat.device()))?;
    let mut start = 0;
    while start < flat.size()[0] {
        let count = CHUNK.min(flat.size()[0] - start);
        let chunk = flat.f_narrow(0, start, count)?.f_to_kind(wide)?;
        sum = sum.f_add(&chunk.f_dot(&chunk)?)?;
        start += count;
    }
    Ok(sum)
}

/// `min(1, max_norm/(norm + 10⁻⁶))`, torch's `clip_grad_norm_`. 1 without a `max_norm`.
pub fn clip_factor(norm: f64, max_norm: Option<f64>) -> f64 {
    max_norm.map_or(1.0, |max_norm| (max_norm / (norm + EPSILON)).min(1.0))
}

/// Multiplies the gradients by [`clip_factor`], in place of each a new tensor: autograd may have
/// given two parameters one tensor for their gradients, which would be clipped twice. Hands back the
/// norm before. If that is not finite, the gradients are left as they are and must not be used
/// ([`FailedUpdates`]).
///
/// # Errors
/// If libtorch fails.
pub fn clip_by_global_norm(gradients: &mut [Option<Tensor>], max_norm: Option<f64>) -> Result<f64> {
    let norm = global_norm(gradients)?;
    let factor = clip_factor(norm, max_norm);
    if norm.is_finite() && factor < 1.0 {
        let _no_grad = tch::no_grad_guard();
        for gradient in gradients.iter_mut().flatten() {
            *gradient = gradient.f_mul_scalar(factor)?;
        }
    }
    Ok(norm)
}

/// Counts updates that were skipped since their gradient was not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailedUpdates {
    /// Since the last update that was made.
    pub in_a_row: u64,
    /// In all.
    pub total: u64,
}

impl FailedUpdates {
    /// Takes the gradient norm of an update, and says whether the update may be made.
    ///
    /// # Errors
    /// If it is the `limit`-th in a row whose norm is not finite.
    pub fn observe(&mut self, norm: f64, limit: u64) -> Result<bool> {
        if norm.is_finite() {
            self.in_a_row = 0;
            return Ok(true);
        }
        self.in_a_row += 1;
        self.total += 1;
        if self.in_a_row < limit {
            return Ok(false);
        }
        Err(Error::NonFinite {
            place: "update".into(),
            what: "the norm of the gradient".into(),
            found: norm,
            remedy: format!(
                "so it was {} times in a row, and the weights are as they were before; lower the learning rate or resume from an earlier checkpoint",
                self.in_a_row
            ),
        })
    }
}
