//! What trajectories are scored with before an update, without gradients.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::filter::Scores;
use crate::gradient::length_chunks;
use crate::objective;
use crate::policy::Policy;
use crate::rollout::{Batch, Group, Trajectory};
use crate::study::PreparedBatch;

/// Puts the log-probabilities under the reference policy into trajectories.
pub(super) fn fill_reference<'a>(
    reference: &Policy,
    trajectories: impl IntoIterator<Item = &'a mut Trajectory>,
    temperature: f64,
    token_budget: usize,
) -> Result<()> {
    let mut trajectories: Vec<&mut Trajectory> = trajectories.into_iter().collect();
    let rows: Vec<&Trajectory> = trajectories.iter().map(|row| &**row).collect();
    let scores = by_row(reference, &rows, token_budget, |logits, actions| {
        objective::gather(&objective::log_probs(logits, temperature), actions)
    })?;
    for (trajectory, mut logprobs) in trajectories.iter_mut().zip(scores) {
        let sampled = || trajectory.mask.iter();
        for (logprob, _) in logprobs.iter_mut().zip(sampled()).filter(|(_, sampled)| !**sampled) {
            *logprob = 0.0;
        }
        if let Some(found) = logprobs.iter().find(|logprob| !logprob.is_finite()) {
            return Err(Error::NonFinite {
                place: reference.path().display().to_string(),
                what: "the log-probability of a sampled token under the reference policy".into(),
                found: *found,
                remedy: "the reference policy rules out what the policy sampled: is it one of the same tokenizer?".into(),
            });
        }
        trajectory.ref_logprobs = Some(logprobs);
    }
    Ok(())
}

/// What the filter ranks by, entropies included.
pub(super) fn with_entropies(
    policy: &Policy,
    batch: &Batch,
    temperature: f64,
    token_budget: usize,
) -> Result<Vec<Scores>> {
    let rows: Vec<&Trajectory> = batch.trajectories().collect();
    let entropies = by_row(policy, &rows, token_budget, |logits, _| {
        Ok(objective::entropy(&objective::log_probs(logits, temperature)))
    })?;
    let sums: Vec<(f64, f64)> = rows
        .iter()
        .zip(entropies)
        .map(|(row, entropies)| {
            let sampled = row.mask.iter().zip(entropies).filter(|(sampled, _)| **sampled);
            (sampled.map(|(_, entropy)| entropy).sum(), row.sampled() as f64)
        })
        .collect();
    let mut rest = sums.as_slice();
    let scores = batch.groups.iter().map(|group| {
        let (own, others) = rest.split_at(group.trajectories.len());
        rest = others;
        of_rewards(group).with_entropies(own)
    });
    Ok(scores.collect())
}

/// What the filter ranks by, as far as rewards and lengths tell.
pub(super) fn of_rewards(group: &Group) -> Scores {
    Scores::of_rewards(&group.rewards(), group.counts().tokens)
}

/// A number for each position of every response, without gradients.
pub(super) fn by_row(
    policy: &Policy,
    rows: &[&Trajectory],
    token_budget: usize,
    of: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Vec<Vec<f64>>> {
    let _no_grad = tch::no_grad_guard();
    let mut numbers: Vec<Vec<f64>> = vec![Vec::new(); rows.len()];
    for chunk in length_chunks(rows, token_budget) {
        let chosen: Vec<&Trajectory> = chunk.iter().map(|row| rows[*row]).collect();
        let batch = policy.batch_logits(&chosen)?;
        let flat: Vec<f64> =
            Vec::try_from(of(&batch.logits, &batch.actions)?.to_kind(Kind::Double))?;
        let mut rest = flat.as_slice();
        for row in chunk {
            let (own, others) = rest.split_at(rows[row].content.len());
            numbers[row] = own.to_vec();
            rest = others;
        }
    }
    Ok(numbers)
}

/// `1 − Var(R − V)/Var(R)` over the sampled tokens; none without values, or if all returns are equal.
pub(super) fn explained_variance(batch: &Batch, prepared: &PreparedBatch) -> Option<f64> {
    let groups: Vec<usize> = (0..batch.groups.len()).collect();
    let rows = prepared.select(batch, &groups);
    let returns = rows.returns?;
    let length = returns.size()[1] as usize;
    let values =
        crate::gradient::padded(rows.rows.iter().copied(), length, |row| row.values.as_deref())?;
    let returns = returns.masked_select(&rows.mask);
    let variance = returns.var(false).double_value(&[]);
    let left = (&returns - values.masked_select(&rows.mask)).var(false).double_value(&[]);
    (variance > 0.0).then(|| 1.0 - left / variance)
}
