//! Which groups of a batch to keep, by a score per group. All on the device of the scores: a sort, a
//! cumulative sum, comparisons and a mask.

mod score;

pub use score::{Score, Scores};

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::objective::precise;

/// A score within this of 0 counts as 0.
const ZERO: f64 = 1e-10;
/// What a share of a sum may lose to rounding without a group more or less being kept for it.
const ROUNDING: f64 = 1e-9;

/// How groups are chosen from their scores. Equal scores go by the order of the groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// The smallest set of highest scores that holds the share `value` of the mass of all.
    TopP,
    /// The highest `value` (a fraction) of all groups, rounded down, at least one.
    TopK,
    /// The highest `value` groups.
    TopKAbs,
    /// Scores of at least `value` times the highest.
    MinP,
    /// Scores of at least `value`.
    Threshold,
    /// Every group.
    None,
}

/// What counts as the mass of a score, for [`Strategy::TopP`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mass {
    /// The score itself; negative scores have none.
    Linear,
    /// Its share of the softmax over all scores.
    Softmax,
}

/// What to do if no group is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnEmpty {
    /// Keep none: the step is skipped.
    Skip,
    /// Keep every group.
    KeepAll,
    /// An error.
    Error,
}

/// A filter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Filter {
    /// How groups are chosen.
    pub strategy: Strategy,
    /// What counts as mass, for top-p.
    pub mass: Mass,
    /// The parameter of the strategy.
    pub value: f64,
    /// Whether groups of score 0 may be kept.
    pub include_zero: bool,
    /// What to do if no group is kept.
    pub on_empty: OnEmpty,
}

/// The outcome of a filter.
#[derive(Debug)]
pub struct Selection {
    /// `[P]` bool, on the device of the scores.
    pub mask: Tensor,
    /// How many are kept.
    pub count: usize,
}

impl Filter {
    /// Chooses among scores `[P]`. A NaN is never kept. One synchronisation with the device, for
    /// the count.
    ///
    /// # Errors
    /// If the scores are not one-dimensional, or none is kept and that is an error.
    pub fn select(&self, scores: &Tensor) -> Result<Selection> {
        if scores.dim() != 1 {
            return Err(Error::Argument {
                argument: "scores",
                expected: "one score a group, shape [P]".into(),
                found: format!("shape {:?}", scores.size()),
            });
        }
        let _no_grad = tch::no_grad_guard();
        let scores = scores.to_kind(precise(scores.device()));
        let mut eligible = scores.isnan().logical_not();
        if !self.include_zero && self.strategy != Strategy::None {
            eligible = eligible.logical_and(&scores.abs().gt(ZERO));
        }
        let mask = self.mask(&scores, &eligible)?.logical_and(&eligible);
        let count = mask.sum(Kind::Int64).int64_value(&[]) as usize;
        if count > 0 {
            return Ok(Selection { mask, count });
        }
        match self.on_empty {
            OnEmpty::Skip => Ok(Selection { mask, count }),
            OnEmpty::KeepAll => {
                Ok(Selection { mask: mask.ones_like(), count: scores.size()[0] as usize })
            }
            OnEmpty::Error => Err(Error::config(
                "filter.on_empty",
                "the filter keeps no group of this batch; choose skip or keep_all, or a wider filter",
            )),
        }
    }

    fn mask(&self, scores: &Tensor, eligible: &Tensor) -> Result<Tensor> {
        // Ineligible groups come last in every order.
        let ranked = scores.where_scalarother(eligible, f64::NEG_INFINITY);
        Ok(match self.strategy {
            Strategy::None => eligible.shallow_clone(),
            Strategy::Threshold => scores.ge(self.value),
            // Of a highest score below 0 no share says anything: only the highest itself is kept.
            Strategy::MinP => {
                let highest = ranked.max();
                ranked.ge_tensor(&(&highest * self.value).minimum(&highest))
            }
            Strategy::TopK => {
                let count =
                    (self.value * scores.size()[0] as f64 + ROUNDING).floor().max(1.0) as i64;
                first_in_order(&ranked, count)?
            }
            Strategy::TopKAbs => first_in_order(&ranked, self.value as i64)?,
            Strategy::TopP => {
                let mass = match self.mass {
                    Mass::Linear => ranked.clamp_min(0.0),
                    Mass::Softmax => ranked.softmax(-1, ranked.kind()).nan_to_num(0.0, 0.0, 0.0),
                };
                let (_, order) = ranked.f_sort_stable(true, 0, true)?;
                let sorted = mass.index_select(0, &order);
                // A group is kept as long as the mass before it falls short of the target; groups
                // without mass add nothing to it.
                let before = sorted.cumsum(0, sorted.kind()) - &sorted;
                let target = mass.sum(mass.kind()) * (self.value * (1.0 - ROUNDING));
                let kept = before.lt_tensor(&target).logical_and(&sorted.gt(0.0));
                kept.zeros_like().index_copy(0, &order, &kept)
            }
        })
    }
}

/// The first `count` of the stable descending order.
fn first_in_order(ranked: &Tensor, count: i64) -> Result<Tensor> {
    let (_, order) = ranked.f_sort_stable(true, 0, true)?;
    let count = count.clamp(0, ranked.size()[0]);
    let kept = Tensor::zeros_like(ranked).to_kind(Kind::Bool);
    Ok(kept.index_fill(0, &order.narrow(0, 0, count), 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(filter: Filter, scores: &[f64]) -> Vec<usize> {
        let mask = filter.select(&Tensor::from_slice(scores)).unwrap().mask;
        let mask: Vec<bool> = Vec::try_from(mask).unwrap();
        (0..scores.len()).filter(|index| mask[*index]).collect()
    }

    fn filter(strategy: Strategy, value: f64) -> Filter {
        let (mass, on_empty) = (Mass::Linear, OnEmpty::Skip);
        Filter { strategy, mass, value, include_zero: false, on_empty }
    }

    #[test]
    fn every_strategy_by_hand() {
        let scores = [0.1, 0.4, 0.0, 0.3, f64::NAN, 0.2];
        // Mass in order .4 .7 .9 1: half of it needs two groups, exactly .7 two, all of it four.
        assert_eq!(kept(filter(Strategy::TopP, 0.5), &scores), [1, 3]);
        assert_eq!(kept(filter(Strategy::TopP, 0.7), &scores), [1, 3]);
        assert_eq!(kept(filter(Strategy::TopP, 1.0), &scores), [0, 1, 3, 5]);
        // A third of six groups.
        assert_eq!(kept(filter(Strategy::TopK, 0.34), &scores), [1, 3]);
        assert_eq!(kept(filter(Strategy::TopKAbs, 3.0), &scores), [1, 3, 5]);
        // At least half of .4.
        assert_eq!(kept(filter(Strategy::MinP, 0.5), &scores), [1, 3, 5]);
        assert_eq!(kept(filter(Strategy::Threshold, 0.3), &scores), [1, 3]);
        assert_eq!(kept(filter(Strategy::None, 0.0), &scores), [0, 1, 2, 3, 5]);
    }

    #[test]
    fn softmax_mass_by_hand() {
        // softmax(ln 6, ln 3, ln 1) = .6 .3 .1
        let scores = [3_f64.ln(), 6_f64.ln(), 1.0_f64.ln()];
        let softmax = |value| Filter {
            mass: Mass::Softmax,
            include_zero: true,
            ..filter(Strategy::TopP, value)
        };
        assert_eq!(kept(softmax(0.5), &scores), [1]);
        assert_eq!(kept(softmax(0.8), &scores), [0, 1]);
        assert_eq!(kept(softmax(0.95), &scores), [0, 1, 2]);
    }

    #[test]
    fn equal_scores_go_by_order() {
        assert_eq!(kept(filter(Strategy::TopKAbs, 2.0), &[0.5, 0.5, 0.5]), [0, 1]);
        assert_eq!(kept(filter(Strategy::TopP, 0.5), &[0.5, 0.5, 0.5, 0.5]), [0, 1]);
    }

    #[test]
    fn an_empty_selection_is_what_the_filter_says() {
        let scores = Tensor::from_slice(&[0.0, 0.0]);
        let with = |on_empty| Filter { on_empty, ..filter(Strategy::TopP, 0.9) };
        assert_eq!(with(OnEmpty::Skip).select(&scores).unwrap().count, 0);
        assert_eq!(with(OnEmpty::KeepAll).select(&scores).unwrap().count, 2);
        assert!(with(OnEmpty::Error).select(&scores).is_err());
    }
}
