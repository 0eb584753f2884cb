//! The policy-gradient surrogates, per token, with their slopes in closed form.

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::Term;

/// The form of the surrogate. With `d = logp − old_logp`, `r = exp(d)` and advantage `A`:
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SurrogateForm {
    /// `max(−A·r, −A·clip(r, 1 − low, 1 + high))` (PPO, arXiv 1707.06347, Eq. 7).
    PpoClip,
    /// `−A·sg[clip(r, 1 − low, 1 + high)]·logp`, `sg` the stopped gradient: clipped tokens keep a
    /// gradient (CISPO, arXiv 2506.13585, Eq. 4).
    Cispo,
    /// PPO's form on the ratio of whole sequences, `r = exp(mean_t d)`, with straight-through
    /// gradients per token (GSPO-token, arXiv 2507.18071, Eq. 13 to 14).
    Gspo,
}

/// A surrogate with its clipping.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Surrogate {
    /// The form.
    pub form: SurrogateForm,
    /// The ratio is clipped below at `1 − clip_low`.
    pub clip_low: f64,
    /// The ratio is clipped above at `1 + clip_high`.
    pub clip_high: f64,
    /// Where `A < 0` the loss is at most `−A·dual_clip` (arXiv 1912.09729, Eq. 5).
    pub dual_clip: Option<f64>,
    /// `d` is clamped to ± this before the exponential, with zero slope outside; GSPO clamps the
    /// mean above only.
    pub log_ratio_clamp: Option<f64>,
}

impl Surrogate {
    /// The per-token loss and its slope with respect to `logp`, all `[B, T]`. The inputs are
    /// taken as constants; values outside `mask` must be finite (see [`super::masked`]).
    pub fn term(
        &self,
        logp: &Tensor,
        old_logp: &Tensor,
        advantages: &Tensor,
        mask: &Tensor,
    ) -> Term {
        let (logp, old_logp) = (logp.detach(), old_logp.detach());
        match self.form {
            SurrogateForm::PpoClip => {
                let (log_ratio, inside) = self.clamped(&(logp - old_logp));
                self.clipped(&log_ratio.exp(), &inside, advantages)
            }
            SurrogateForm::Gspo => {
                let mask = mask.to_kind(logp.kind());
                let lengths = mask.sum_dim_intlist(1, true, logp.kind()).clamp_min(1.0);
                let log_ratio =
                    ((&logp - old_logp) * &mask).sum_dim_intlist(1, true, logp.kind()) / lengths;
                let (log_ratio, inside) = match self.log_ratio_clamp {
                    Some(limit) => (log_ratio.clamp_max(limit), log_ratio.le(limit)),
                    None => (log_ratio.shallow_clone(), log_ratio.ones_like().to_kind(Kind::Bool)),
                };
                let ratio = log_ratio.exp().expand_as(&logp);
                self.clipped(&ratio, &inside.expand_as(&logp), advantages)
            }
            SurrogateForm::Cispo => {
                let ratio = self.clamped(&(&logp - old_logp)).0.exp();
                let slope = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
                Term { value: &slope * logp, slope }
            }
        }
    }

    /// Log-ratios `d` as they are clamped before the exponential, and where the clamp does not act.
    pub(crate) fn clamped(&self, log_ratio: &Tensor) -> (Tensor, Tensor) {
        match self.log_ratio_clamp {
            Some(limit) => (log_ratio.clamp(-limit, limit), log_ratio.abs().le(limit)),
            None => (log_ratio.shallow_clone(), log_ratio.ones_like().to_kind(Kind::Bool)),
        }
    }

    /// The pessimistic maximum of the plain and the clipped loss. Its slope is −A·r where the plain
    /// loss is the larger one, else 0.
    fn clipped(&self, ratio: &Tensor, inside: &Tensor, advantages: &Tensor) -> Term {
        let plain = -(advantages * ratio);
        let clipped = -(advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high));
        let mut value = plain.maximum(&clipped);
        let mut sloped = plain.ge_tensor(&clipped).logical_and(inside);
        if let Some(factor) = self.dual_clip {
            let cap = -(advantages * factor);
            let capped = advantages.lt(0.0).logical_and(&value.gt_tensor(&cap));
            value = cap.where_self(&capped, &value);
            sloped = sloped.logical_and(&capped.logical_not());
        }
        let slope = plain.where_self(&sloped, &plain.zeros_like());
        Term { value, slope }
    }

    /// `[B, T]`, true where clipping or the dual clip cuts the slope of a token that has one, for
    /// log-ratios `d`: the tokens that the clip fraction counts. What the clamp of `d` cuts is not
    /// clipping.
    pub fn is_clipped(&self, term: &Term, log_ratio: &Tensor, advantages: &Tensor) -> Tensor {
        let (_, inside) = self.clamped(log_ratio);
        term.slope.eq(0.0).logical_and(&advantages.ne(0.0)).logical_and(&inside)
    }
}
