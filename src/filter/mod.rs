//! Which groups of a batch to keep, by a score per group. All on the device of the scores: a sort, a
//! cumulative sum, comparisons and a mask, and one synchronisation for the count.
//!
//! A [`Filter`] chooses among the scores of one batch. A [`StepFilter`] goes with a run from batch to
//! batch: it adapts the keep rate ([`Adaptive`]), and says by how much the loss of what is kept is
//! scaled ([`LossScale`]) and how many optimiser steps remain ([`optimizer_steps`]).

mod adaptive;
mod host;
mod loss;
mod ragen;
mod rank;
mod score;
mod step;

pub use adaptive::{Adaptive, AdaptiveState, spread};
pub use host::host_reads;
pub use loss::{LossScale, optimizer_steps};
pub(crate) use score::variance;
pub use score::{Need, Score, Scores};
pub use step::{KeptRecord, Reason, StepFilter, Verdict};

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::objective::precise;
use rank::Ranking;

/// A score within this of 0 counts as 0.
const ZERO: f64 = 1e-10;
/// What a share of a sum may lose to rounding without a group more or less being kept for it.
const ROUNDING: f64 = 1e-9;
/// An infinite score has this mass.
const LARGEST: f64 = 1e30;

/// How groups are chosen from their scores. First are the highest or the lowest, as the [`Direction`]
/// says; equal scores go by the order of the groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// The smallest set of first groups whose mass reaches `value` times that of all, less `epsilon`.
    TopP,
    /// The first `value` (a fraction) of all groups, rounded down, at least one. All means all: groups
    /// that cannot be kept count too.
    TopK,
    /// The first `value` groups.
    TopKAbs,
    /// Scores of at least `value` times the highest; of at most the lowest divided by `value`.
    MinP,
    /// Scores of at least `value`; of at most `value`.
    Threshold,
    /// Every group.
    None,
}

/// Which scores come first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// The highest.
    #[default]
    #[serde(alias = "largest")]
    Highest,
    /// The lowest.
    #[serde(alias = "smallest")]
    Lowest,
}

/// Whose choices are reproduced, odd ones too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compat {
    /// Those of RAGEN's rollout filter (arXiv 2604.06268; its code at commit 20daedc), whose own
    /// default of `epsilon` is 0.01.
    Ragen,
}

/// What counts as the mass of a score, for [`Strategy::TopP`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mass {
    /// The score itself; negative scores have none.
    Linear,
    /// Its share of the softmax over all scores; over their negatives if the lowest come first.
    Softmax,
}

/// What to do if no group is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnEmpty {
    /// Keep none: the step is skipped.
    Skip,
    /// Keep every group whose score is not NaN.
    KeepAll,
    /// An error.
    Error,
}

/// A filter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Filter {
    /// How groups are chosen.
    pub strategy: Strategy,
    /// Which scores come first.
    pub direction: Direction,
    /// What counts as mass, for top-p.
    pub mass: Mass,
    /// The parameter of the strategy.
    pub value: f64,
    /// How far the mass may fall short, in units of the score; for top-p by linear mass.
    pub epsilon: f64,
    /// Whether groups of score 0 may be kept. [`Strategy::None`] keeps them anyway.
    pub include_zero: bool,
    /// What to do if no group is kept.
    pub on_empty: OnEmpty,
    /// Whose choices are reproduced.
    pub compat: Option<Compat>,
}

impl Default for Filter {
    /// RAGEN-2's recommendation: the groups that hold 0.9 of the scores' sum.
    fn default() -> Self {
        Self {
            strategy: Strategy::TopP,
            direction: Direction::Highest,
            mass: Mass::Linear,
            value: 0.9,
            epsilon: 0.0,
            include_zero: false,
            on_empty: OnEmpty::Skip,
            compat: None,
        }
    }
}

/// The outcome of a filter.
#[derive(Debug)]
pub struct Selection {
    /// `[P]` bool, on the device of the scores.
    pub mask: Tensor,
    /// How many are kept.
    pub count: usize,
    /// How many there are, `P`.
    pub groups: usize,
    /// Whether the filter itself kept none, and [`OnEmpty::KeepAll`] stepped in.
    pub fell_back: bool,
}

impl Selection {
    /// The mask on the host; one synchronisation.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn to_host(&self) -> Result<Vec<bool>> {
        Ok(host::read(&self.mask)?.into_iter().map(|kept| kept != 0).collect())
    }
}

impl Filter {
    /// Chooses among scores `[P]` of any numeric dtype. A NaN is never kept. One synchronisation
    /// with the device, for the count.
    ///
    /// # Errors
    /// If the scores are not one-dimensional, libtorch fails, or none is kept and that is an error.
    pub fn select(&self, scores: &Tensor) -> Result<Selection> {
        let mask = self.mask(scores)?;
        let scored = scored(scores);
        let counts = Tensor::f_stack(&[mask.sum(Kind::Int64), scored.sum(Kind::Int64)], 0)?;
        let counts = host::read(&counts)?;
        let groups = scores.size()[0] as usize;
        let count = counts[0] as usize;
        match self.on_empty {
            OnEmpty::KeepAll if count == 0 => {
                Ok(Selection { mask: scored, count: counts[1] as usize, groups, fell_back: true })
            }
            OnEmpty::Error if count == 0 => Err(Error::Argument {
                argument: "scores",
                expected: "a group that the filter keeps, since filter.on_empty is error".into(),
                found: format!("none among {groups}"),
            }),
            _ => Ok(Selection { mask, count, groups, fell_back: false }),
        }
    }

    /// `[P]` bool: which groups the strategy keeps, before anything is done about an empty choice. No
    /// synchronisation with the device: a test runs it on libtorch's meta device, where there are no
    /// data to wait for.
    ///
    /// # Errors
    /// If the scores are not one-dimensional, or libtorch fails.
    pub fn mask(&self, scores: &Tensor) -> Result<Tensor> {
        if scores.dim() != 1 {
            return Err(Error::Argument {
                argument: "scores",
                expected: "one score a group, shape [P]".into(),
                found: format!("shape {:?}", scores.size()),
            });
        }
        let _no_grad = tch::no_grad_guard();
        if scores.size()[0] == 0 {
            return Ok(scored(scores));
        }
        if self.compat == Some(Compat::Ragen) {
            return ragen::mask(self, scores);
        }
        let scores = floating(scores);
        let eligible = self.eligible(&scores);
        let keys = self.keys(&scores, &eligible);
        let kept = match self.strategy {
            Strategy::None => eligible.shallow_clone(),
            Strategy::Threshold => match self.direction {
                Direction::Highest => scores.ge(self.value),
                Direction::Lowest => scores.le(self.value),
            },
            Strategy::MinP => self.min_p(&scores, &keys),
            Strategy::TopK => {
                let share = self.value * scores.size()[0] as f64;
                let count = (share + ROUNDING).floor().max(1.0);
                Ranking::new(&keys, &eligible)?.first_number(count as i64)?
            }
            Strategy::TopKAbs => Ranking::new(&keys, &eligible)?.first_number(self.value as i64)?,
            Strategy::TopP => self.top_p(&Ranking::new(&keys, &eligible)?)?,
        };
        Ok(kept.bitwise_and_tensor(&eligible))
    }

    /// For top-p, how far down each group stands: `[P]`, the share of all mass that it and the groups
    /// before it hold, in the precision of the sums. NaN for groups without a place.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn held_shares(&self, scores: &Tensor) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let scores = floating(scores);
        let eligible = self.eligible(&scores);
        let keys = self.keys(&scores, &eligible);
        let (sorted, order) = keys.f_sort_stable(true, 0, true)?;
        let held = self.mass(&sorted.to_kind(precise(sorted.device()))).cumsum(0, None);
        let shares = &held / held.narrow(0, -1, 1);
        let shares = shares.zeros_like().f_index_copy(0, &order, &shares)?;
        Ok(shares.masked_fill(&eligible.bitwise_not(), f64::NAN))
    }

    /// The place of every group in the order of the scores, counted from 1; none of groups that cannot
    /// be kept. One synchronisation.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn places(&self, scores: &Tensor) -> Result<Vec<Option<usize>>> {
        let _no_grad = tch::no_grad_guard();
        let scores = floating(scores);
        let eligible = self.eligible(&scores);
        let (_, order) = self.keys(&scores, &eligible).f_sort_stable(true, 0, true)?;
        let read = host::read(&Tensor::f_stack(&[order, eligible.to_kind(Kind::Int64)], 0)?)?;
        let (order, eligible) = read.split_at(read.len() / 2);
        let mut places = vec![None; order.len()];
        let eligible =
            order.iter().map(|index| *index as usize).filter(|index| eligible[*index] != 0);
        for (place, index) in eligible.enumerate() {
            places[index] = Some(place + 1);
        }
        Ok(places)
    }

    /// `[P]` bool: neither NaN nor, unless those may be kept, 0.
    fn eligible(&self, scores: &Tensor) -> Tensor {
        let scored = scored(scores);
        if self.include_zero || self.strategy == Strategy::None {
            return scored;
        }
        let zero = scores.le(ZERO).bitwise_and_tensor(&scores.ge(-ZERO));
        scored.bitwise_and_tensor(&zero.bitwise_not())
    }

    /// `[P]`: the higher, the earlier; −∞ for groups that cannot be kept.
    fn keys(&self, scores: &Tensor, eligible: &Tensor) -> Tensor {
        let keys = match self.direction {
            Direction::Highest => scores.shallow_clone(),
            Direction::Lowest => -scores,
        };
        keys.masked_fill(&eligible.bitwise_not(), f64::NEG_INFINITY)
    }

    /// The smallest number of first groups whose mass reaches the target. Going up from the lowest,
    /// groups without mass are among them; going down from the highest they come after it is reached.
    fn top_p(&self, ranking: &Ranking) -> Result<Tensor> {
        let held = self.mass(&ranking.sorted_precise()).cumsum(0, None);
        let epsilon = if self.mass == Mass::Linear { self.epsilon } else { 0.0 };
        let target = held.narrow(0, -1, 1) * (self.value * (1.0 - ROUNDING)) - epsilon;
        // Those before the mass is reached, and the one that reaches it.
        let count = held.lt_tensor(&target).sum(Kind::Int64) + target.gt(0.0).to_kind(Kind::Int64);
        ranking.first(&count)
    }

    /// The mass `[P]` of keys `[P]` in descending order.
    fn mass(&self, sorted: &Tensor) -> Tensor {
        match (self.mass, self.direction) {
            (Mass::Linear, Direction::Highest) => sorted.clamp(0.0, LARGEST),
            // A key of −∞ is no group's.
            (Mass::Linear, Direction::Lowest) => {
                (-sorted).masked_fill(&sorted.eq(f64::NEG_INFINITY), 0.0).clamp(0.0, LARGEST)
            }
            (Mass::Softmax, _) => {
                let shares = sorted.clamp_max(LARGEST).softmax(-1, sorted.kind());
                // Without a group that can be kept they are NaN.
                shares.masked_fill(&scored(&shares).bitwise_not(), 0.0)
            }
        }
    }

    /// Of a highest score below 0 no share says anything: only the highest itself is kept. So with a
    /// lowest score of at most 0.
    fn min_p(&self, scores: &Tensor, keys: &Tensor) -> Tensor {
        let first = keys.amax(0, true);
        match self.direction {
            Direction::Highest => scores.ge_tensor(&(&first * self.value).minimum(&first)),
            Direction::Lowest => {
                let lowest = -first;
                // 0/0 would be NaN.
                let value = self.value.max(f64::from(f32::MIN_POSITIVE));
                scores.le_tensor(&(&lowest / value).maximum(&lowest))
            }
        }
    }
}

/// `[P]` bool: not NaN, which alone differs from itself.
fn scored(scores: &Tensor) -> Tensor {
    scores.eq_tensor(scores)
}

/// Scores in a dtype that can be ranked and holds infinities.
fn floating(scores: &Tensor) -> Tensor {
    match scores.kind() {
        Kind::Float | Kind::Double => scores.detach(),
        _ => scores.to_kind(precise(scores.device())),
    }
}
