//! Log-probabilities and entropies of categorical policies from their logits.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// Log-probabilities `[.., V]` of logits `[.., V]` divided by the sampling temperature, in at least
/// float32 whatever the dtype of the logits. A logit of −∞ has log-probability −∞.
pub fn log_probs(logits: &Tensor, temperature: f64) -> Tensor {
    let kind = match logits.kind() {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    };
    let logits = logits.to_kind(kind);
    let logits = if temperature == 1.0 { logits } else { logits / temperature };
    logits.log_softmax(-1, kind)
}

/// The log-probabilities `[..]` of the actions (or token ids) `[..]` among `log_probs` `[.., V]`.
///
/// # Errors
/// If the shapes disagree or an action lies outside `0..V`.
pub fn gather(log_probs: &Tensor, actions: &Tensor) -> Result<Tensor> {
    let shape = log_probs.size();
    if shape.split_last().map(|(_, lead)| lead) != Some(actions.size().as_slice()) {
        return Err(Error::Argument {
            argument: "actions",
            expected: format!("the leading dimensions of log_probs {shape:?}"),
            found: format!("{:?}", actions.size()),
        });
    }
    Ok(log_probs.f_gather(-1, &actions.unsqueeze(-1), false)?.squeeze_dim(-1))
}

/// The entropy `[..]` of the distributions `log_probs` `[.., V]`, in nats. Actions of probability 0
/// (log-probability −∞) add nothing, to the value and to the gradient.
pub fn entropy(log_probs: &Tensor) -> Tensor {
    let finite = log_probs.masked_fill(&log_probs.eq(f64::NEG_INFINITY), 0.0);
    -(log_probs.exp() * finite).sum_dim_intlist(-1, false, log_probs.kind())
}

/// The gradient `[.., V]` with respect to the logits of
/// `Σ slope·log π(action) + Σ entropy_slope·H`, in closed form:
///
/// ```text
/// d/dz_k log π(a) = (1[k = a] − π_k)/τ
/// d/dz_k H        = −π_k (log π_k + H)/τ
/// ```
///
/// `log_probs` is `[.., V]` at temperature τ; `actions`, `slope` and `entropy_slope` are `[..]`. The
/// slope of a [`Term`](super::Term), surrogate or KL, times its weight is what `slope` takes. No
/// softmax is taped, and nothing larger than `log_probs` is made.
///
/// # Errors
/// If shapes disagree or an action lies outside `0..V`.
pub fn logit_gradient(
    log_probs: &Tensor,
    actions: &Tensor,
    slope: &Tensor,
    entropy_slope: Option<&Tensor>,
    temperature: f64,
) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let (slope, probs) = (slope.unsqueeze(-1), log_probs.exp());
    let mut gradient = &probs * -&slope;
    gradient = gradient.f_scatter_add(-1, &actions.unsqueeze(-1), &slope.to_kind(probs.kind()))?;
    if let Some(entropy_slope) = entropy_slope {
        let finite = log_probs.masked_fill(&log_probs.eq(f64::NEG_INFINITY), 0.0);
        let entropy = -(&probs * &finite).sum_dim_intlist(-1, true, probs.kind());
        gradient -= probs * (finite + entropy) * entropy_slope.unsqueeze(-1);
    }
    Ok(if temperature == 1.0 { gradient } else { gradient / temperature })
}
