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
