//! The loss of a value function.

use tch::Tensor;

use super::aggregate::TokenWeights;
use super::{expect_shape, masked};
use crate::error::Result;

/// `½ max((V − R)², (clip(V, V_old − clip, V_old + clip) − R)²)` per token, aggregated by `weights`
/// (the trust-region form that PPO's reference code added; no clip: the plain squared error).
/// `values`, `old_values` and `returns` are `[B, T]`; differentiable in `values`.
///
/// # Errors
/// If the shapes disagree.
pub fn value_loss(
    values: &Tensor,
    old_values: &Tensor,
    returns: &Tensor,
    clip: Option<f64>,
    weights: &TokenWeights,
) -> Result<Tensor> {
    for (name, tensor) in [("values", values), ("old_values", old_values), ("returns", returns)] {
        expect_shape(name, tensor, weights.mask())?;
    }
    let mask = weights.mask();
    let (values, old_values, returns) =
        (masked(values, mask), masked(old_values, mask), masked(returns, mask));
    let mut loss = (&values - &returns).square();
    if let Some(clip) = clip {
        let clipped = values.clamp_tensor(Some(&old_values - clip), Some(&old_values + clip));
        loss = loss.maximum(&(clipped - &returns).square());
    }
    weights.sum(&(loss * 0.5))
}
