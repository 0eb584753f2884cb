//! One token a row from logits, on their device.

use tch::{Kind, Tensor};

use super::SamplingOptions;
use crate::error::Result;
use crate::objective::{gather, log_probs, precise};

/// `[3, n]` from logits `[n, V]`: a token of each row, its log-probability over the whole
/// vocabulary, and that under the distribution drawn from. `uniforms` `[n, 1]` in `[0, 1)`; without
/// them the most likely token is taken.
pub(super) fn draw(
    logits: &Tensor,
    uniforms: Option<&Tensor>,
    options: &SamplingOptions,
) -> Result<Tensor> {
    let kind = precise(logits.device());
    let whole = log_probs(logits, options.temperature);
    let (tokens, drawn_from) = match uniforms {
        // Of equal maxima libtorch gives the first.
        None => (logits.f_argmax(-1, false)?, None),
        Some(uniforms) => {
            let truncated = truncate(whole.to_kind(kind), options)?;
            (invert(&truncated.exp(), uniforms)?, Some(truncated))
        }
    };
    let whole = gather(&whole, &tokens)?.to_kind(kind);
    let drawn_from = match drawn_from {
        None => whole.zeros_like(),
        Some(truncated) => gather(&truncated, &tokens)?,
    };
    Ok(Tensor::f_stack(&[tokens.to_kind(kind), whole, drawn_from], 0)?)
}

/// Log-probabilities `[n, V]` with −∞ on what is not drawn from, renormalised.
fn truncate(mut log_probs: Tensor, options: &SamplingOptions) -> Result<Tensor> {
    let choices = log_probs.size()[1];
    if let Some(k) = options.top_k.and_then(|k| i64::try_from(k).ok()).filter(|k| *k < choices) {
        let (most_likely, _) = log_probs.f_topk(k, -1, true, false)?;
        let left_out = log_probs.lt_tensor(&most_likely.f_amin([-1_i64].as_slice(), true)?);
        log_probs = without(&log_probs, &left_out);
    }
    if options.top_p < 1.0 {
        let (descending, order) = log_probs.exp().f_sort_stable(true, -1, true)?;
        // A token is left out if those before it reach the mass; none comes before the first.
        let reached = descending.cumsum(-1, descending.kind()).ge(options.top_p);
        let first = Tensor::zeros([reached.size()[0], 1], (Kind::Bool, reached.device()));
        let sorted = Tensor::f_cat(&[first, reached.narrow(-1, 0, choices - 1)], -1)?;
        log_probs = without(&log_probs, &sorted.zeros_like().f_scatter(-1, &order, &sorted)?);
    }
    Ok(log_probs)
}

fn without(log_probs: &Tensor, left_out: &Tensor) -> Tensor {
    log_probs.masked_fill(left_out, f64::NEG_INFINITY).log_softmax(-1, log_probs.kind())
}

/// The token `[n]` at which the cumulated probabilities of `[n, V]` first exceed `uniform·total`.
fn invert(probs: &Tensor, uniforms: &Tensor) -> Result<Tensor> {
    let impossible = probs.eq(0.0);
    // Sums in parallel may step at a probability of 0, or back: such tokens are taken out, and the
    // total is the largest sum, which `uniform·total` is always below.
    let cumulated = probs.f_cumsum(-1, probs.kind())?.masked_fill(&impossible, 0.0);
    let total = cumulated.f_amax([-1_i64].as_slice(), true)?;
    // Of equal maxima libtorch gives the first.
    Ok(cumulated.gt_tensor(&(uniforms * total)).to_kind(Kind::Uint8).f_argmax(-1, false)?)
}
