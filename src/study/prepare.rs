//! A batch made ready: advantages on the whole batch, reward variances, shares and padded masks.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::filter::variance;
use crate::gradient::{GroupInput, Scorer, padded};
use crate::objective::{
    Algorithm, GroupIndex, Rewards, TokenWeights, on_last_token, rewards_with_kl,
};
use crate::rollout::{Batch, Group, Trajectory};

/// What the groups of a batch need before any gradient is taken. Advantages are computed once, on
/// the whole batch, and are constants from then on.
#[derive(Debug)]
pub struct PreparedBatch {
    /// `[B, T]` float64, rows group by group.
    pub advantages: Tensor,
    /// `[B, T]` float64, what a value function is fitted to; none unless the advantage is GAE.
    pub returns: Option<Tensor>,
    /// Each group's share ω of the batch loss.
    pub shares: Vec<f64>,
    /// The unbiased variance of each group's rewards; exactly 0 if they are equal.
    pub reward_variances: Vec<f64>,
    /// The first row of each group.
    starts: Vec<i64>,
    /// The rows of each group.
    sizes: Vec<i64>,
}

impl PreparedBatch {
    /// Computes advantages and shares.
    ///
    /// # Errors
    /// If the algorithm needs something that the rollouts lack.
    pub fn new(algorithm: &Algorithm, batch: &Batch) -> Result<Self> {
        Self::build(algorithm, batch, None)
    }

    /// The same with the KL penalty taken off the rewards; `scorer` gives the log-probabilities that
    /// the file lacks. The reward variances stay those of the file's own rewards.
    ///
    /// # Errors
    /// If libtorch fails or there is no reference policy.
    pub fn with_kl_in_reward(scorer: &Scorer, batch: &Batch) -> Result<Self> {
        let rows: Vec<&Trajectory> = batch.trajectories().collect();
        let length = longest(&rows);
        let mut scored = Vec::with_capacity(rows.len());
        for row in &rows {
            let (old, reference) = scorer.old_and_reference(row)?.ok_or_else(|| {
                Error::config(
                    "algorithm.kl",
                    "expected a reference policy or ref_logprobs, found none",
                )
            })?;
            let rest = (length - row.content.len()) as i64;
            scored.push((old.constant_pad_nd([0, rest]), reference.constant_pad_nd([0, rest])));
        }
        let (old, reference): (Vec<Tensor>, Vec<Tensor>) = scored.into_iter().unzip();
        Self::build(
            scorer.algorithm,
            batch,
            Some((Tensor::stack(&old, 0), Tensor::stack(&reference, 0))),
        )
    }

    fn build(
        algorithm: &Algorithm,
        batch: &Batch,
        old_and_reference: Option<(Tensor, Tensor)>,
    ) -> Result<Self> {
        let rows: Vec<&Trajectory> = batch.trajectories().collect();
        let length = longest(&rows);
        let rewards: Vec<f64> = rows.iter().map(|row| row.reward).collect();
        let rewards = Tensor::from_slice(&rewards);
        let labels: Vec<usize> = batch
            .groups
            .iter()
            .enumerate()
            .flat_map(|(index, group)| std::iter::repeat_n(index, group.trajectories.len()))
            .collect();
        let groups = GroupIndex::new(&labels, &rewards);
        let mask = padded_mask(&rows, length);
        let token_rewards =
            padded(rows.iter().copied(), length, |row| row.token_rewards.as_deref());
        let values = padded(rows.iter().copied(), length, |row| row.values.as_deref());
        let (paid, token_rewards) = match old_and_reference {
            None => (rewards.shallow_clone(), token_rewards),
            Some((old, reference)) => {
                let plain = match token_rewards {
                    Some(token_rewards) => token_rewards,
                    None => on_last_token(&rewards, &mask)?,
                };
                let kl = &algorithm.kl;
                let paid = rewards_with_kl(&plain, &old, &reference, &mask, kl, kl.coef);
                (paid.sum_dim_intlist(1, false, paid.kind()), Some(paid))
            }
        };
        let rewards = Rewards {
            rewards: &paid,
            token_rewards: token_rewards.as_ref(),
            values: values.as_ref(),
            mask: &mask,
            groups: &groups,
        };
        let advantages = algorithm.advantages(&rewards)?;

        let mut starts = Vec::with_capacity(batch.groups.len());
        let mut next = 0;
        for group in &batch.groups {
            starts.push(next);
            next += group.trajectories.len() as i64;
        }
        if advantages.isfinite().all().int64_value(&[]) == 0 {
            return Err(Error::NonFinite {
                place: "advantages".into(),
                what: "an advantage".into(),
                found: f64::NAN,
                remedy: "rewards or values are too large for it".into(),
            });
        }
        let whole = batch.counts();
        Ok(Self {
            returns: algorithm.returns(&rewards)?,
            advantages,
            shares: batch
                .groups
                .iter()
                .map(|group| algorithm.aggregation.group_share(group.counts(), whole))
                .collect(),
            reward_variances: batch.groups.iter().map(|group| variance(group.rewards())).collect(),
            starts,
            sizes: batch.groups.iter().map(|group| group.trajectories.len() as i64).collect(),
        })
    }

    /// The rows of some groups, one group after the other.
    pub fn select<'a>(&self, batch: &'a Batch, groups: &[usize]) -> SelectedRows<'a> {
        let chosen = || groups.iter().map(|group| &batch.groups[*group]);
        let rows: Vec<&Trajectory> = chosen().flat_map(|group| &group.trajectories).collect();
        let index: Vec<i64> = groups
            .iter()
            .flat_map(|group| self.starts[*group]..self.starts[*group] + self.sizes[*group])
            .collect();
        let index = Tensor::from_slice(&index);
        let length = self.advantages.size()[1] as usize;
        SelectedRows {
            groups: chosen()
                .flat_map(|group| group.trajectories.iter().map(|_| group.id.as_str()))
                .collect(),
            advantages: self.advantages.index_select(0, &index),
            returns: self.returns.as_ref().map(|returns| returns.index_select(0, &index)),
            mask: padded_mask(&rows, length),
            rows,
        }
    }

    /// Whether any advantage of each group is other than 0.
    pub fn has_task(&self) -> Vec<bool> {
        let ranges = self.starts.iter().zip(&self.sizes);
        ranges
            .map(|(start, size)| {
                self.advantages.narrow(0, *start, *size).ne(0.0).any().int64_value(&[]) != 0
            })
            .collect()
    }

    /// The advantage of each row of a group, where every sampled token of a row has the same.
    pub fn row_advantages(&self, index: usize) -> Vec<f64> {
        let rows = self.advantages.narrow(0, self.starts[index], self.sizes[index]);
        // Outside the mask it is 0: the entry farthest from 0 is the row's.
        let (largest, smallest) = (rows.amax(1, false), rows.amin(1, false));
        let per_row = largest.where_self(&largest.gt(0.0), &smallest);
        (0..self.sizes[index]).map(|row| per_row.double_value(&[row])).collect()
    }

    /// A group with its advantages and its weights, as if the batch were the group alone.
    ///
    /// # Errors
    /// If the aggregation lacks its `norm_length`.
    pub fn group_input<'a>(
        &self,
        algorithm: &Algorithm,
        batch: &'a Batch,
        index: usize,
    ) -> Result<GroupInput<'a>> {
        let group: &Group = &batch.groups[index];
        let rows: Vec<&Trajectory> = group.trajectories.iter().collect();
        let length = longest(&rows);
        let mask = padded_mask(&rows, length);
        Ok(GroupInput {
            group,
            advantages: self.advantages.narrow(0, self.starts[index], rows.len() as i64).narrow(
                1,
                0,
                length as i64,
            ),
            weights: TokenWeights::new(algorithm.aggregation, algorithm.norm_length, &mask)?,
        })
    }
}

/// Rows of a prepared batch with what was computed of them.
#[derive(Debug)]
pub struct SelectedRows<'a> {
    /// The rows.
    pub rows: Vec<&'a Trajectory>,
    /// The name of each row's group.
    pub groups: Vec<&'a str>,
    /// `[b, T]` float64.
    pub advantages: Tensor,
    /// `[b, T]` float64, if the advantage is GAE.
    pub returns: Option<Tensor>,
    /// `[b, T]` bool, true on sampled tokens.
    pub mask: Tensor,
}

fn longest(rows: &[&Trajectory]) -> usize {
    rows.iter().map(|row| row.content.len()).max().unwrap_or(0)
}

/// `[B, T]` bool, true on sampled tokens.
fn padded_mask(rows: &[&Trajectory], length: usize) -> Tensor {
    let mut mask = vec![false; rows.len() * length];
    for (row, padded) in rows.iter().zip(mask.chunks_mut(length)) {
        padded[..row.mask.len()].copy_from_slice(&row.mask);
    }
    Tensor::from_slice(&mask).reshape([rows.len() as i64, length as i64]).to_kind(Kind::Bool)
}
