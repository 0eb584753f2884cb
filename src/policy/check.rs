//! What can be wrong with a policy: found by small trial calls of its forward, before any rollout.

use tch::{Kind, Tensor};

use super::{ObservationDtype, PolicyKind, PolicyOptions, Signature};
use crate::native::Module;

/// A finding about a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// It cannot be used.
    Error(String),
    /// It can be scored with, but no gradient can be taken.
    NotTrainable(String),
    /// It can be used, and the results may not be what one thinks.
    Warning(String),
}

/// What a trial found.
#[derive(Debug, Default)]
pub(super) struct Trial {
    /// Vocabulary size or number of actions; none if forward could not be called.
    pub choices: Option<i64>,
    pub problems: Vec<Problem>,
}

/// Calls forward with a few tokens (or zero observations): that it works on the device at all, that
/// it returns logits, that the same input gives the same output, that no token sees a later one.
pub(super) fn run(
    module: &Module,
    signature: &Signature,
    options: &PolicyOptions,
    kind: Kind,
) -> Trial {
    let result = match options.kind {
        PolicyKind::CausalLm => try_tokens(module, signature, options),
        PolicyKind::Step => try_observations(module, signature, options, kind),
    };
    result.unwrap_or_else(|message| Trial {
        choices: None,
        problems: vec![Problem::Error(format!(
            "a trial call of forward on {} failed: {}",
            crate::native::device_name(options.device),
            crate::error::without_backtrace(&message)
        ))],
    })
}

fn try_tokens(
    module: &Module,
    signature: &Signature,
    options: &PolicyOptions,
) -> Result<Trial, String> {
    let ids = Tensor::zeros([1, 4], (Kind::Int64, options.device));
    let mask = ids.ones_like();
    let call = |ids: &Tensor| super::token_logits(module, signature, options, ids, &mask);
    let (first, mut trial) = first_call(|| call(&ids))?;
    let _no_grad = tch::no_grad_guard();
    let repeatable = judge_logits(&first, &call(&ids)?, &mut trial);
    // Token id 1 exists wherever there is a choice to make.
    if repeatable && trial.choices > Some(1) {
        let _ = ids.narrow(1, 3, 1).fill_(1);
        let earlier = first.narrow(1, 0, 3);
        let change = largest_difference(&earlier, &call(&ids)?.narrow(1, 0, 3));
        let scale = largest_finite(&earlier);
        if change > 1e-3 * scale.max(1e-6) {
            trial.problems.push(Problem::Error(
                "expected a causal model, and the logits of earlier positions change with a later token: log-probabilities of a response would see the future".into(),
            ));
        }
    }
    Ok(trial)
}

fn try_observations(
    module: &Module,
    signature: &Signature,
    options: &PolicyOptions,
    kind: Kind,
) -> Result<Trial, String> {
    let Some(shape) = &options.observation_shape else {
        return Err("the shape of an observation is not known".into());
    };
    // As many numbers as a trial may have; a dimension below 0 has none.
    const MOST: i64 = 1 << 28;
    let numbers = shape.iter().try_fold(1_i64, |product, side| {
        product.checked_mul(*side).filter(|product| *side >= 0 && *product <= MOST)
    });
    if numbers.is_none() {
        return Err(format!("{shape:?} is no shape of an observation"));
    }
    let mut size = vec![2];
    size.extend(shape);
    let kind = options.observation_dtype.kind(kind);
    let observations = Tensor::zeros(size, (kind, options.device));
    let call = || {
        super::step_logits(module, signature, options, &observations).map_err(|message| {
            match options.observation_dtype {
                ObservationDtype::Float => format!(
                    "{message}\n(observations of shape {shape:?} as {kind:?}; for a policy that looks integers up set policy.observation_dtype: int64)"
                ),
                ObservationDtype::Int64 => message,
            }
        })
    };
    let (first, mut trial) = first_call(call)?;
    let _no_grad = tch::no_grad_guard();
    judge_logits(&first, &call()?, &mut trial);
    Ok(trial)
}

/// The first call is made with gradients on, to see whether one would reach the parameters.
fn first_call(call: impl Fn() -> Result<Tensor, String>) -> Result<(Tensor, Trial), String> {
    let logits = call()?;
    let mut trial = Trial { choices: logits.size().last().copied(), problems: Vec::new() };
    if !logits.requires_grad() {
        trial.problems.push(Problem::NotTrainable(
            "its logits depend on no trainable parameter in a way that autograd sees (a forward under torch.no_grad, or weights traced as constants)".into(),
        ));
    }
    Ok((logits.detach(), trial))
}

/// Whether two calls with one input gave the same finite logits.
fn judge_logits(first: &Tensor, second: &Tensor, trial: &mut Trial) -> bool {
    if first.isnan().any().int64_value(&[]) != 0 {
        trial.problems.push(Problem::Error("the logits of a trial input hold NaN".into()));
        return false;
    }
    // Kernels with and without gradients may round differently.
    let rounding = if first.kind() == Kind::Double { 1e-9 } else { 1e-4 };
    let repeatable = largest_difference(first, second) <= rounding * largest_finite(first).max(1.0);
    if !repeatable {
        trial.problems.push(Problem::Warning(
            "the same input gave two different outputs: dropout or other noise is active (a module traced in train mode keeps its dropout in eval mode); export it after model.eval()".into(),
        ));
    }
    repeatable
}

pub(super) fn largest_finite(logits: &Tensor) -> f64 {
    logits.masked_fill(&logits.isinf(), 0.0).abs().to_kind(Kind::Double).max().double_value(&[])
}

/// −∞ against −∞ is no difference.
pub(super) fn largest_difference(left: &Tensor, right: &Tensor) -> f64 {
    let difference = (left - right).abs().masked_fill(&left.eq_tensor(right), 0.0);
    difference.to_kind(Kind::Double).max().double_value(&[])
}
