//! A filter that goes with a run from batch to batch, and says what it did and why.

use serde::Serialize;
use tch::Tensor;

use super::{
    Adaptive, AdaptiveState, Direction, Filter, LossScale, OnEmpty, Score, Scores, Strategy,
    optimizer_steps, spread,
};
use crate::error::Result;
use crate::gradient::mean;

/// A filter with what it needs beside the scores of one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct StepFilter {
    /// The filter; with an adaptive keep rate, its `value` is the lowest.
    pub filter: Filter,
    /// What groups are ranked by.
    pub score: Score,
    /// The rule of the keep rate, if it is adaptive.
    pub adaptive: Option<Adaptive>,
    /// How the loss is scaled.
    pub loss_scale: LossScale,
    /// Groups of an optimiser step; none: the whole batch.
    pub mini_batch_size: Option<usize>,
    /// The history of the keep rate.
    pub state: AdaptiveState,
}

/// Why a group is kept or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The strategy chose it.
    Chosen,
    /// The strategy chose none, and `on_empty` is `keep_all`.
    KeepAll,
    /// Its score counts as 0, and such groups are left out.
    Zero,
    /// Its score is NaN, or was not measured.
    Undefined,
    /// Other groups come first.
    BeyondCut,
}

/// What became of a group.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Its score; none if it is NaN.
    pub score: Option<f64>,
    /// Its place in the order of the scores, counted from 1; none if it cannot be kept.
    pub rank: Option<usize>,
    /// For top-p, the share of all mass that it and the groups before it hold.
    pub held_share: Option<f64>,
    /// Whether it is kept.
    pub kept: bool,
    /// Why.
    pub reason: Reason,
}

/// What a filter keeps of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct KeptRecord {
    /// Groups kept.
    pub groups: usize,
    /// Their share of all groups.
    pub share: f64,
    /// The last score that is kept: the lowest, or the highest if the lowest come first.
    pub cut: Option<f64>,
    /// The mean reward variance of the kept groups.
    pub reward_variance_mean: Option<f64>,
    /// Their mean reward.
    pub reward_mean: Option<f64>,
    /// Their mean signal-to-noise ratio.
    pub snr_mean: Option<f64>,
    /// The share of the batch's estimated signal² (where positive) that they hold.
    pub signal_share: Option<f64>,
    /// Std(RV)/Mean(RV) over all groups of the batch.
    pub reward_variance_spread: Option<f64>,
    /// The keep rate of this batch, if it is adaptive.
    pub keep_rate: Option<f64>,
    /// The averaged spread that it follows.
    pub adaptive_spread: Option<f64>,
    /// What the whole loss of the kept groups is multiplied by.
    pub loss_factor: f64,
    /// Optimiser steps that the kept groups make.
    pub optimizer_steps: usize,
    /// Optimiser steps that all groups would make.
    pub optimizer_steps_unfiltered: usize,
}

impl StepFilter {
    /// A verdict on every group of the next batch, and what they add up to. Takes the batch into the
    /// history of the keep rate.
    ///
    /// # Errors
    /// If libtorch fails, or none is kept and that is an error.
    pub fn judge(&mut self, scores: &[Scores]) -> Result<(Vec<Verdict>, KeptRecord)> {
        let variances: Vec<f64> = scores.iter().map(|group| group.reward_variance).collect();
        let spread = spread(&variances);
        let mut filter = self.filter.clone();
        if let Some(adaptive) = &self.adaptive {
            adaptive.observe(&mut self.state, spread);
            filter.value = adaptive.rate(filter.value, &self.state);
        }
        let numbers: Vec<f64> = scores.iter().map(|group| self.score.of(group)).collect();
        let selection = filter.select(&Tensor::from_slice(&numbers))?;
        let verdicts = verdicts(&filter, &numbers, &selection.to_host()?, selection.fell_back)?;
        let record = KeptRecord {
            reward_variance_spread: spread,
            keep_rate: self.adaptive.is_some().then_some(filter.value),
            adaptive_spread: self.adaptive.and(self.state.spread),
            loss_factor: self.loss_scale.factor(&selection),
            optimizer_steps: optimizer_steps(selection.count, self.mini_batch_size),
            optimizer_steps_unfiltered: optimizer_steps(selection.groups, self.mini_batch_size),
            ..KeptRecord::of(scores, &verdicts, filter.direction)
        };
        Ok((verdicts, record))
    }

    /// The same filter, for marking alone: an empty choice is no error, since what was measured is
    /// not thrown away for it.
    pub fn marking(mut self) -> Self {
        if self.filter.on_empty == OnEmpty::Error {
            self.filter.on_empty = OnEmpty::Skip;
        }
        self
    }
}

fn verdicts(
    filter: &Filter,
    numbers: &[f64],
    kept: &[bool],
    fell_back: bool,
) -> Result<Vec<Verdict>> {
    let scores = Tensor::from_slice(numbers);
    let places = filter.places(&scores)?;
    let shares: Vec<f64> = match filter.strategy {
        Strategy::TopP if !numbers.is_empty() => Vec::try_from(filter.held_shares(&scores)?)?,
        _ => vec![f64::NAN; numbers.len()],
    };
    let known = |number: f64| (!number.is_nan()).then_some(number);
    let verdict = |index: usize| Verdict {
        score: known(numbers[index]),
        rank: places[index],
        held_share: known(shares[index]),
        kept: kept[index],
        reason: match (kept[index], places[index]) {
            (true, _) if fell_back => Reason::KeepAll,
            (true, _) => Reason::Chosen,
            _ if numbers[index].is_nan() => Reason::Undefined,
            (false, None) => Reason::Zero,
            (false, Some(_)) => Reason::BeyondCut,
        },
    };
    Ok((0..numbers.len()).map(verdict).collect())
}

impl KeptRecord {
    /// What the scores of the kept groups say.
    fn of(scores: &[Scores], verdicts: &[Verdict], direction: Direction) -> Self {
        let kept: Vec<&Scores> = scores
            .iter()
            .zip(verdicts)
            .filter(|(_, verdict)| verdict.kept)
            .map(|kept| kept.0)
            .collect();
        let of = |number: fn(&Scores) -> Option<f64>| {
            let numbers: Option<Vec<f64>> = kept.iter().map(|scores| number(scores)).collect();
            numbers.and_then(|numbers| mean(&numbers))
        };
        let signal = |scores: &[&Scores]| -> Option<f64> {
            scores.iter().map(|scores| Some(scores.signal_sq?.max(0.0))).sum()
        };
        let all: Vec<&Scores> = scores.iter().collect();
        let last = match direction {
            Direction::Highest => f64::min,
            Direction::Lowest => f64::max,
        };
        Self {
            groups: kept.len(),
            share: kept.len() as f64 / scores.len().max(1) as f64,
            cut: verdicts
                .iter()
                .filter(|verdict| verdict.kept)
                .filter_map(|verdict| verdict.score)
                .reduce(last),
            reward_variance_mean: of(|scores| Some(scores.reward_variance)),
            reward_mean: of(|scores| Some(scores.reward_mean)),
            snr_mean: of(|scores| scores.snr),
            signal_share: signal(&all)
                .filter(|all| *all > 0.0)
                .and_then(|all| Some(signal(&kept)? / all)),
            ..Self::default()
        }
    }
}
