//! Estimators of KL(π‖π_ref) from the log-probabilities of sampled tokens.

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::Term;

/// The estimator, with `x = logp − ref_logp` (<http://joschu.net/blog/kl-approx.html>).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `x`: unbiased, and of high variance.
    K1,
    /// `x²/2`.
    K2,
    /// `e^(−x) + x − 1`: unbiased and never negative.
    K3,
    /// `|x|`.
    Abs,
}

/// Which gradient the estimate carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlGradient {
    /// The derivative of the value. For k1 it is 1 whatever the reference policy says.
    Own,
    /// That of k2, `x`, unclamped, whatever the value (straight-through): on-policy its expectation
    /// is the gradient of KL(π‖π_ref) at the visited states.
    K2,
}

/// A KL penalty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KlPenalty {
    /// The factor λ_KL in the loss.
    pub coef: f64,
    /// The estimator of the value.
    pub estimator: KlEstimator,
    /// The gradient it carries.
    pub gradient: KlGradient,
    /// `x` is clamped to ± this before it is used, with zero own slope outside.
    pub log_ratio_clamp: Option<f64>,
    /// The value is clamped to ± this, with zero own slope outside.
    pub value_clamp: Option<f64>,
}

impl KlPenalty {
    /// The per-token estimate at coefficient 1 and its slope with respect to `logp`. The inputs are
    /// taken as constants.
    pub fn term(&self, logp: &Tensor, ref_logp: &Tensor) -> Term {
        let raw = logp.detach() - ref_logp.detach();
        let mut inside = raw.ones_like().to_kind(Kind::Bool);
        let mut x = raw.shallow_clone();
        if let Some(limit) = self.log_ratio_clamp {
            inside = raw.abs().le(limit);
            x = raw.clamp(-limit, limit);
        }
        let (mut value, slope) = match self.estimator {
            KlEstimator::K1 => (x.shallow_clone(), x.ones_like()),
            KlEstimator::K2 => (&x * &x * 0.5, x.shallow_clone()),
            // d/dx [e^(−x) + x − 1] = 1 − e^(−x) = −expm1(−x)
            KlEstimator::K3 => (k3(&x), -(-&x).expm1()),
            KlEstimator::Abs => (x.abs(), x.sign()),
        };
        if let Some(limit) = self.value_clamp {
            inside = inside.logical_and(&value.abs().le(limit));
            value = value.clamp(-limit, limit);
        }
        let slope = match self.gradient {
            KlGradient::Own => slope.where_self(&inside, &slope.zeros_like()),
            KlGradient::K2 => raw,
        };
        Term { value, slope }
    }
}

/// `e^(−x) + x − 1` without cancellation: for |x| < 1/2 by its series `x²/2 − x³/6 + …`, whose
/// first omitted term is below 2⁻⁵³ of the sum, beyond that by `expm1(−x) + x`.
pub(crate) fn k3(x: &Tensor) -> Tensor {
    const SMALL: f64 = 0.5;
    const TERMS: i64 = 15;
    let near = x.clamp(-SMALL, SMALL);
    // Horner's scheme: x²/2·(1 − x/3·(1 − x/4·(1 − …)))
    let mut sum = near.ones_like();
    for n in (3..=TERMS).rev() {
        sum = 1.0 - &near * sum / n as f64;
    }
    let near_value = &near * &near * 0.5 * sum;
    let far_value = (-x).expm1() + x;
    near_value.where_self(&x.abs().lt(SMALL), &far_value)
}
