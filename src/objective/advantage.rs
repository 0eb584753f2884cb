//! Advantage estimators. Rewards and advantages are constants to every gradient.

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::{expect_shape, masked};
use crate::error::{Error, Result};

/// How rewards become advantages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageEstimator {
    /// `(R − mean)/(std + ε)` within the group, unbiased std (GRPO, arXiv 2402.03300).
    Grpo,
    /// `R − mean` within the group (Dr.GRPO, arXiv 2503.20783).
    DrGrpo,
    /// `R −` the mean of the group's other rewards (RLOO, arXiv 2402.14740).
    Rloo,
    /// Discounted returns, whitened over the batch (REINFORCE++, arXiv 2501.03262).
    ReinforcePlusPlus,
    /// Generalised advantage estimation from stored values, whitened over the batch (arXiv
    /// 1506.02438, Eq. 16).
    Gae,
}

impl AdvantageEstimator {
    /// Whether advantages are rewards minus a mean of the group, up to a constant factor, with
    /// nothing divided by a spread. The factor for G rows: 1 for the mean with the row itself,
    /// G/(G − 1) for the mean without it.
    pub fn mean_baseline_factor(self, group_size: usize) -> Option<f64> {
        let g = group_size as f64;
        match self {
            Self::DrGrpo => Some(1.0),
            Self::Rloo => Some(g / (g - 1.0)),
            _ => None,
        }
    }
}

/// The guard in the denominator of GRPO's advantage.
pub const GRPO_EPSILON: f64 = 1e-6;

/// Which rows belong together, for rows in any order and groups of any sizes.
///
/// A reward that is NaN is missing: its row is left out of the group's mean and spread, and its
/// advantage is 0. [`require_rewards`] refuses such rewards instead.
#[derive(Debug)]
pub struct GroupIndex {
    /// `[B]` int64, the group of each row, in `0..count`.
    ids: Tensor,
    count: i64,
}

impl GroupIndex {
    /// From a label per row; equal labels are one group. The tensors lie on the device of `like`.
    pub fn new<L: std::hash::Hash + Eq>(labels: &[L], like: &Tensor) -> Self {
        let mut known = std::collections::HashMap::new();
        let ids: Vec<i64> = labels
            .iter()
            .map(|label| {
                let next = known.len() as i64;
                *known.entry(label).or_insert(next)
            })
            .collect();
        let count = known.len() as i64;
        Self { ids: Tensor::from_slice(&ids).to_device(like.device()), count }
    }

    /// `[B]`, the sum of each row's group.
    fn sum(&self, values: &Tensor) -> Tensor {
        Tensor::zeros([self.count], (values.kind(), values.device()))
            .index_add(0, &self.ids, values)
            .index_select(0, &self.ids)
    }

    /// `[B]` in the dtype of the rewards: how many rewards of the row's group are there, at least 1.
    fn sizes(&self, rewards: &Tensor) -> Tensor {
        self.sum(&rewards.isnan().logical_not().to_kind(rewards.kind())).clamp_min(1.0)
    }

    /// `[B]`, the smallest or largest value of each row's group, by `amin` from +∞ or `amax` from −∞.
    fn extreme(&self, values: &Tensor, reduce: &str, start: f64) -> Tensor {
        let values = values.masked_fill(&values.isnan(), start);
        Tensor::full([self.count], start, (values.kind(), values.device()))
            .internal_scatter_reduce(0, &self.ids, &values, reduce, true)
            .index_select(0, &self.ids)
    }

    /// `[B]` bool, whether all rewards of the row's group are one number. Compares the extremes: in
    /// float32 eight rewards of 0.1 have a standard deviation of 8e-9.
    pub fn is_constant(&self, rewards: &Tensor) -> Tensor {
        let smallest = self.extreme(rewards, "amin", f64::INFINITY);
        smallest.eq_tensor(&self.extreme(rewards, "amax", f64::NEG_INFINITY))
    }

    /// `[B]`, each row's reward minus the mean of its group; exactly 0 in constant groups.
    pub fn centred(&self, rewards: &Tensor) -> Tensor {
        let (missing, sizes) = (rewards.isnan(), self.sizes(rewards));
        let present = rewards.masked_fill(&missing, 0.0);
        let centred = (&present - self.sum(&present) / &sizes).masked_fill(&missing, 0.0);
        // A second pass takes out the rounding error of the mean.
        let centred = &centred - self.sum(&centred) / sizes;
        centred.masked_fill(&missing.logical_or(&self.is_constant(rewards)), 0.0)
    }

    /// `[B]`, the unbiased variance of the rewards of each row's group; 0 for a group of one.
    pub fn variance(&self, rewards: &Tensor) -> Tensor {
        let freedom = (self.sizes(rewards) - 1.0).clamp_min(1.0);
        self.sum(&self.centred(rewards).square()) / freedom
    }

    /// `[B]`, GRPO: `(R − mean)/(std + epsilon)`.
    pub fn grpo(&self, rewards: &Tensor, epsilon: f64) -> Tensor {
        self.centred(rewards) / (self.variance(rewards).sqrt() + epsilon)
    }

    /// `[B]`, Dr.GRPO: `R − mean`.
    pub fn dr_grpo(&self, rewards: &Tensor) -> Tensor {
        self.centred(rewards)
    }

    /// `[B]`, RLOO: `R −` the mean of the others, which is `G/(G − 1)·(R − mean)`. A group of one
    /// has no others: 0.
    pub fn rloo(&self, rewards: &Tensor) -> Tensor {
        let sizes = self.sizes(rewards);
        self.centred(rewards) * &sizes / (sizes - 1.0).clamp_min(1.0)
    }
}

/// Refuses rewards that are missing (NaN) or infinite; one synchronisation with the device.
///
/// # Errors
/// At the first such reward.
pub fn require_rewards(rewards: &Tensor) -> Result<()> {
    let wrong = rewards.isfinite().logical_not().nonzero();
    if wrong.size()[0] == 0 {
        return Ok(());
    }
    let row = wrong.int64_value(&[0, 0]);
    Err(Error::Argument {
        argument: "rewards",
        expected: "finite numbers".into(),
        found: format!("{} in row {row}", rewards.double_value(&[row])),
    })
}

/// Advantages and returns, both `[B, T]`, 0 outside the mask.
#[derive(Debug)]
pub struct Estimates {
    /// What the surrogate takes.
    pub advantages: Tensor,
    /// What a value function is fitted to.
    pub returns: Tensor,
}

/// Generalised advantage estimation over the sampled tokens of each row: an observation token
/// neither ends a return nor discounts it. `token_rewards`, `values` and `mask` are `[B, T]`;
/// whitening is left to the caller.
///
/// # Errors
/// If the shapes disagree.
pub fn gae(
    token_rewards: &Tensor,
    values: &Tensor,
    mask: &Tensor,
    gamma: f64,
    lam: f64,
) -> Result<Estimates> {
    expect_shape("values", values, token_rewards)?;
    expect_shape("mask", mask, token_rewards)?;
    let (rewards, values) = (masked(token_rewards, mask), masked(values, mask));
    let mask = mask.ne(0);
    let mut next_value = Tensor::zeros([rewards.size()[0]], (rewards.kind(), rewards.device()));
    let mut running = next_value.zeros_like();
    let mut advantages = Vec::new();
    for t in (0..rewards.size()[1]).rev() {
        let (reward, value, sampled) =
            (rewards.select(1, t), values.select(1, t), mask.select(1, t));
        let delta = reward + gamma * &next_value - &value;
        running = (delta + gamma * lam * &running).where_self(&sampled, &running);
        next_value = value.where_self(&sampled, &next_value);
        advantages.push(running.shallow_clone());
    }
    advantages.reverse();
    let advantages = masked(&Tensor::stack(&advantages, 1), &mask);
    let returns = &advantages + &values;
    Ok(Estimates { advantages, returns })
}

/// Discounted returns over the sampled tokens of each row, `[B, T]`, 0 outside the mask.
///
/// # Errors
/// If the shapes disagree.
pub fn discounted_returns(token_rewards: &Tensor, mask: &Tensor, gamma: f64) -> Result<Tensor> {
    expect_shape("mask", mask, token_rewards)?;
    let rewards = masked(token_rewards, mask);
    let mask = mask.ne(0);
    let mut running = Tensor::zeros([rewards.size()[0]], (rewards.kind(), rewards.device()));
    let mut returns = Vec::new();
    for t in (0..rewards.size()[1]).rev() {
        let next = rewards.select(1, t) + gamma * &running;
        running = next.where_self(&mask.select(1, t), &running);
        returns.push(running.shallow_clone());
    }
    returns.reverse();
    Ok(masked(&Tensor::stack(&returns, 1), &mask))
}

/// Shifts and scales `values` `[B, T]` to mean 0 and unbiased variance 1 over the mask; 0 outside
/// it. A constant input becomes 0; so does a single token.
///
/// # Errors
/// If the shapes disagree.
pub fn whiten(values: &Tensor, mask: &Tensor) -> Result<Tensor> {
    expect_shape("mask", mask, values)?;
    const GUARD: f64 = 1e-8;
    let values = masked(values, mask);
    let weights = mask.ne(0).to_kind(values.kind());
    let count = weights.sum(values.kind());
    let mean = values.sum(values.kind()) / count.clamp_min(1.0);
    let centred = masked(&(values - mean), mask);
    let variance = centred.square().sum(centred.kind()) / (count - 1.0).clamp_min(1.0);
    Ok(centred * (variance + GUARD).rsqrt())
}

/// `[B, T]`: a reward per row, placed on its last sampled token.
///
/// # Errors
/// If `rewards` is not `[B]` for a mask `[B, T]`.
pub fn on_last_token(rewards: &Tensor, mask: &Tensor) -> Result<Tensor> {
    if rewards.size().as_slice() != &mask.size()[..1] {
        return Err(Error::Argument {
            argument: "rewards",
            expected: format!("one for each of the {} rows", mask.size()[0]),
            found: format!("shape {:?}", rewards.size()),
        });
    }
    let mask = mask.ne(0).to_kind(Kind::Int64);
    // Counted from the end, the last sampled token is the first whose running count is 1.
    let from_end = mask.flip([1]).cumsum(1, Kind::Int64).flip([1]);
    let is_last = from_end.eq(1).logical_and(&mask.eq(1));
    Ok(rewards.unsqueeze(1) * is_last.to_kind(rewards.kind()))
}
