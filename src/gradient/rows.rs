//! One trajectory under the policy: its log-probabilities, its loss terms, and what practitioners
//! look at beside them.

use tch::{Device, Kind, Tensor};

use super::engine::Components;
use crate::error::{Error, Result};
use crate::objective::{self, Algorithm, Term, TokenWeights, Tokens};
use crate::policy::Policy;
use crate::rollout::{Group, Trajectory};

/// What all trajectories are scored with.
pub struct Scorer<'a> {
    /// The policy whose gradient is split.
    pub policy: &'a Policy,
    /// The reference policy; if there is one it wins over the file's log-probabilities.
    pub reference: Option<&'a Policy>,
    /// The loss.
    pub algorithm: &'a Algorithm,
    /// The sampling temperature.
    pub temperature: f64,
    /// Whether the file's `old_logprobs` are left aside: the policy itself is then taken for the
    /// one that sampled, at ratio 1.
    pub recompute_old: bool,
    /// How the regularizer is taken apart.
    pub components: Components,
}

/// A group with what its losses need beside the trajectories.
pub struct GroupInput<'a> {
    /// The trajectories.
    pub group: &'a Group,
    /// `[G, T]` float64 on the CPU, `T` the longest response.
    pub advantages: Tensor,
    /// The weights of the group's tokens, as if the batch were the group alone.
    pub weights: TokenWeights,
}

/// One trajectory's share of the three losses of its group, scalars that carry the graph.
pub(super) struct RowLosses {
    pub task: Tensor,
    pub kl: Option<Tensor>,
    /// Minus the entropy.
    pub entropy: Tensor,
    /// The plain log-probability at advantage −1 and ratio 1: its gradient is the row's score.
    pub score: Tensor,
    pub stats: RowStats,
}

/// Sums over the sampled tokens of rows; they add up over a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowStats {
    /// Sampled tokens.
    pub tokens: f64,
    /// Σ r.
    pub ratio: f64,
    /// Σ r².
    pub ratio_sq: f64,
    /// max r.
    pub ratio_max: f64,
    /// Σ (r − 1 − d), an estimate of KL(old‖new) that is never negative.
    pub approx_kl: f64,
    /// Σ |d|.
    pub log_ratio_abs: f64,
    /// max |d|.
    pub log_ratio_max: f64,
    /// Tokens whose slope the clipping cuts.
    pub clipped: f64,
    /// Σ of the KL estimate to the reference policy.
    pub kl: f64,
    /// Σ of the entropy.
    pub entropy: f64,
    /// The smallest log-probability of a sampled token.
    pub logp_min: f64,
    /// The smallest under the reference policy.
    pub ref_logp_min: f64,
}

impl RowStats {
    /// Adds the sums and takes the larger maxima.
    pub fn merge(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.ratio += other.ratio;
        self.ratio_sq += other.ratio_sq;
        self.ratio_max = self.ratio_max.max(other.ratio_max);
        self.approx_kl += other.approx_kl;
        self.log_ratio_abs += other.log_ratio_abs;
        self.log_ratio_max = self.log_ratio_max.max(other.log_ratio_max);
        self.clipped += other.clipped;
        self.kl += other.kl;
        self.entropy += other.entropy;
        self.logp_min = self.logp_min.min(other.logp_min);
        self.ref_logp_min = self.ref_logp_min.min(other.ref_logp_min);
    }
}

impl Scorer<'_> {
    /// The losses of row `row` of a group; one forward pass, and one of the reference policy.
    pub(super) fn losses(&self, input: &GroupInput, row: usize) -> Result<RowLosses> {
        let trajectory = &input.group.trajectories[row];
        let (log_probs, logp) = self.score(self.policy, trajectory)?;
        let entropy = objective::entropy(&log_probs).unsqueeze(0);
        let length = trajectory.content.len() as i64;
        let weights = input.weights.micro_batch(row as i64, 1, length);
        let tokens = Tokens {
            old_logp: self.old_logp(trajectory, &logp),
            ref_logp: self.reference_logp(trajectory, &logp)?,
            sampler_logp: trajectory
                .sampler_logprobs
                .as_ref()
                .map(|numbers| row_like(numbers, &logp)),
            advantages: input
                .advantages
                .select(0, row as i64)
                .narrow(0, 0, length)
                .unsqueeze(0)
                .to_kind(logp.kind())
                .to_device(logp.device()),
            mask: weights.mask().shallow_clone(),
            logp,
        }
        .masked()?;
        let task = self.algorithm.task(&tokens);
        let kl = self.algorithm.kl(&tokens);
        let stats = self.stats(&tokens, &task, kl.as_ref(), &entropy)?[0];
        let sum = |term: &Term| weights.sum(&term.attach(&tokens.logp));
        Ok(RowLosses {
            task: sum(&task)?,
            kl: kl.as_ref().map(sum).transpose()?,
            entropy: -weights.sum(&entropy)?,
            score: weights.sum(&tokens.logp)?,
            stats: finite(stats, &input.group.id, trajectory.line)?,
        })
    }

    /// The log-probabilities `[T, V]` of a response's positions, and those `[1, T]` of what was chosen.
    fn score(&self, policy: &Policy, trajectory: &Trajectory) -> Result<(Tensor, Tensor)> {
        let log_probs =
            objective::log_probs(&policy.response_logits(trajectory)?, self.temperature);
        let actions =
            Tensor::from_slice(trajectory.content.actions()).to_device(log_probs.device());
        let logp = objective::gather(&log_probs, &actions)?.unsqueeze(0);
        Ok((log_probs, logp))
    }

    fn old_logp(&self, trajectory: &Trajectory, logp: &Tensor) -> Tensor {
        match &trajectory.old_logprobs {
            Some(old) if !self.recompute_old => row_like(old, logp),
            _ => logp.detach(),
        }
    }

    fn reference_logp(&self, trajectory: &Trajectory, like: &Tensor) -> Result<Option<Tensor>> {
        let Some(reference) = self.reference else {
            return Ok(trajectory.ref_logprobs.as_ref().map(|logp| row_like(logp, like)));
        };
        let _no_grad = tch::no_grad_guard();
        let (_, logp) = self.score(reference, trajectory)?;
        Ok(Some(logp.to_kind(like.kind())))
    }

    /// Log-probabilities `[G, T]` under the policy that sampled.
    pub(super) fn old_rows(&self, trajectories: &[&Trajectory], logp: &Tensor) -> Tensor {
        let old = if self.recompute_old {
            None
        } else {
            padded_like(trajectories, logp, |row| row.old_logprobs.as_deref())
        };
        old.unwrap_or_else(|| logp.detach())
    }

    /// Log-probabilities `[G, T]` under the reference policy, if there is one.
    pub(super) fn reference_rows(
        &self,
        trajectories: &[&Trajectory],
        like: &Tensor,
    ) -> Result<Option<Tensor>> {
        let Some(reference) = self.reference else {
            return Ok(padded_like(trajectories, like, |row| row.ref_logprobs.as_deref()));
        };
        let batch = reference.batch_logits(trajectories)?;
        let log_probs = objective::log_probs(&batch.logits, self.temperature);
        let flat = objective::gather(&log_probs, &batch.actions)?.to_kind(like.kind());
        pad_rows(&flat, trajectories, like.size()[1]).map(Some)
    }

    /// The log-probabilities `[T]` of a response under the policy that sampled and under the
    /// reference policy, without gradients; none without a reference.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn old_and_reference(&self, trajectory: &Trajectory) -> Result<Option<(Tensor, Tensor)>> {
        let _no_grad = tch::no_grad_guard();
        let (_, logp) = self.score(self.policy, trajectory)?;
        let old = self.old_logp(trajectory, &logp);
        let reference = self.reference_logp(trajectory, &logp)?;
        let cpu = |row: Tensor| row.squeeze_dim(0).to_kind(Kind::Double).to_device(Device::Cpu);
        Ok(reference.map(|reference| (cpu(old), cpu(reference))))
    }

    /// The sums of every row of `[B, T]` tokens; one transfer from the device.
    pub(super) fn stats(
        &self,
        tokens: &Tokens,
        task: &Term,
        kl: Option<&Term>,
        entropy: &Tensor,
    ) -> Result<Vec<RowStats>> {
        let _no_grad = tch::no_grad_guard();
        let kind = tokens.logp.kind();
        let log_ratio = &tokens.logp - &tokens.old_logp;
        let surrogate = &self.algorithm.surrogate;
        let (clamped, _) = surrogate.clamped(&log_ratio);
        let ratio = clamped.exp();
        let clipped = surrogate.is_clipped(task, &log_ratio, &tokens.advantages);
        let inside = |values: &Tensor| objective::masked(values, &tokens.mask);
        let sum = |values: &Tensor| inside(values).sum_dim_intlist(1, false, kind);
        let zero = Tensor::zeros([tokens.logp.size()[0]], (kind, tokens.logp.device()));
        let columns = Tensor::f_stack(
            &[
                tokens.mask.sum_dim_intlist(1, false, kind),
                sum(&ratio),
                sum(&ratio.square()),
                inside(&ratio).amax(1, false),
                sum(&objective::k3(&-clamped)),
                sum(&log_ratio.abs()),
                log_ratio.abs().amax(1, false),
                sum(&clipped.to_kind(kind)),
                kl.map_or(zero, |kl| sum(&kl.value)),
                sum(entropy),
                tokens.logp.amin(1, false),
                tokens
                    .ref_logp
                    .as_ref()
                    .map_or_else(|| tokens.logp.amin(1, false), |ref_logp| ref_logp.amin(1, false)),
            ],
            1,
        )?;
        let numbers: Vec<f64> = Vec::try_from(columns.to_kind(Kind::Double).reshape([-1]))?;
        Ok(numbers
            .chunks(12)
            .map(|row| RowStats {
                tokens: row[0],
                ratio: row[1],
                ratio_sq: row[2],
                ratio_max: row[3],
                approx_kl: row[4],
                log_ratio_abs: row[5],
                log_ratio_max: row[6],
                clipped: row[7],
                kl: row[8],
                entropy: row[9],
                logp_min: row[10],
                ref_logp_min: row[11],
            })
            .collect())
    }
}

/// `[B, length]` float64 on the CPU, 0 where a row ends; none unless every row has the array.
pub(crate) fn padded<'a>(
    rows: impl IntoIterator<Item = &'a Trajectory>,
    length: usize,
    array: impl Fn(&'a Trajectory) -> Option<&'a [f64]>,
) -> Option<Tensor> {
    let mut numbers = Vec::new();
    for (row, trajectory) in rows.into_iter().enumerate() {
        numbers.extend(array(trajectory)?);
        numbers.resize((row + 1) * length, 0.0);
    }
    Some(Tensor::from_slice(&numbers).reshape([-1, length as i64]))
}

/// A number for each position of the responses, one response after the other, as `[B, length]`; 0 where
/// a row ends. Differentiable.
///
/// # Errors
/// If libtorch fails.
pub(crate) fn pad_rows(flat: &Tensor, trajectories: &[&Trajectory], length: i64) -> Result<Tensor> {
    let lengths: Vec<i64> = trajectories.iter().map(|row| row.content.len() as i64).collect();
    let rows = flat
        .f_split_with_sizes(&lengths, 0)?
        .into_iter()
        .map(|row| row.f_constant_pad_nd([0, length - row.size()[0]]))
        .collect::<std::result::Result<Vec<Tensor>, _>>()?;
    Ok(Tensor::f_stack(&rows, 0)?)
}

/// The same, of the shape, dtype and device of `like`.
pub(super) fn padded_like<'a>(
    trajectories: &[&'a Trajectory],
    like: &Tensor,
    array: impl Fn(&'a Trajectory) -> Option<&'a [f64]>,
) -> Option<Tensor> {
    let rows = padded(trajectories.iter().copied(), like.size()[1] as usize, array)?;
    Some(rows.to_kind(like.kind()).to_device(like.device()))
}

/// Numbers of the file as a row `[1, T]` of the dtype and device of `like`.
fn row_like(numbers: &[f64], like: &Tensor) -> Tensor {
    Tensor::from_slice(numbers).unsqueeze(0).to_kind(like.kind()).to_device(like.device())
}

/// The sums of a row if all of them are finite.
pub(super) fn finite(stats: RowStats, group: &str, line: usize) -> Result<RowStats> {
    let remedy = "a sampled token has probability 0, or logits are not finite: is this the checkpoint, temperature and tokenizer of these rollouts?";
    for (what, found) in [
        ("the log-probability of a sampled token under the policy", stats.logp_min),
        ("the log-probability of a sampled token under the reference policy", stats.ref_logp_min),
        ("a log-ratio to old_logprobs", stats.log_ratio_abs),
        ("the KL estimate to the reference policy", stats.kl),
        ("the entropy of the policy", stats.entropy),
    ] {
        if !found.is_finite() {
            return Err(Error::NonFinite {
                place: format!("group `{group}`, line {line} of the rollouts"),
                what: what.into(),
                found,
                remedy: remedy.into(),
            });
        }
    }
    Ok(stats)
}
