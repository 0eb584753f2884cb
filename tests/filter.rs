//! The filter: choices worked out by hand, and every edge case.

mod common;

use common::assert_close;
use common::filters::{every_filter, kept};
use gradprism::filter::{
    Adaptive, AdaptiveState, Compat, Direction, Filter, LossScale, Mass, OnEmpty, Reason, Score,
    Scores, StepFilter, Strategy, optimizer_steps, spread,
};
use tch::{Kind, Tensor};

fn filter(strategy: Strategy, value: f64) -> Filter {
    Filter { strategy, value, ..Filter::default() }
}

#[test]
fn every_strategy_by_hand() {
    let scores = [0.1, 0.4, 0.0, 0.3, f64::NAN, 0.2];
    // Mass in order .4 .7 .9 1: half of it needs two groups, exactly .7 two, all of it four.
    assert_eq!(kept(&filter(Strategy::TopP, 0.5), &scores), [1, 3]);
    assert_eq!(kept(&filter(Strategy::TopP, 0.7), &scores), [1, 3]);
    assert_eq!(kept(&filter(Strategy::TopP, 1.0), &scores), [0, 1, 3, 5]);
    // A third of six groups.
    assert_eq!(kept(&filter(Strategy::TopK, 0.34), &scores), [1, 3]);
    assert_eq!(kept(&filter(Strategy::TopKAbs, 3.0), &scores), [1, 3, 5]);
    // At least half of .4.
    assert_eq!(kept(&filter(Strategy::MinP, 0.5), &scores), [1, 3, 5]);
    assert_eq!(kept(&filter(Strategy::Threshold, 0.3), &scores), [1, 3]);
    assert_eq!(kept(&filter(Strategy::None, 0.0), &scores), [0, 1, 2, 3, 5]);
}

#[test]
fn every_strategy_from_the_lowest_by_hand() {
    let scores = [0.1, 0.4, 0.0, 0.3, f64::NAN, 0.2];
    let lowest =
        |strategy, value| Filter { direction: Direction::Lowest, ..filter(strategy, value) };
    // Mass in order .1 .3 .6 1.
    assert_eq!(kept(&lowest(Strategy::TopP, 0.3), &scores), [0, 5]);
    assert_eq!(kept(&lowest(Strategy::TopP, 0.31), &scores), [0, 3, 5]);
    assert_eq!(kept(&lowest(Strategy::TopK, 0.34), &scores), [0, 5]);
    assert_eq!(kept(&lowest(Strategy::TopKAbs, 3.0), &scores), [0, 3, 5]);
    // At most .1/.5.
    assert_eq!(kept(&lowest(Strategy::MinP, 0.5), &scores), [0, 5]);
    assert_eq!(kept(&lowest(Strategy::Threshold, 0.3), &scores), [0, 3, 5]);
    // With zeros, the lowest is 0, and it comes before any mass is gathered.
    let with_zero = |filter| Filter { include_zero: true, ..filter };
    assert_eq!(kept(&with_zero(lowest(Strategy::TopP, 0.3)), &scores), [0, 2, 5]);
    assert_eq!(kept(&with_zero(lowest(Strategy::MinP, 0.5)), &scores), [2]);
}

#[test]
fn epsilon_is_taken_off_the_target() {
    // .9 of 1 needs three groups; .9 − .2 = .7 two; a target of at most 0 none.
    let scores = [0.1, 0.4, 0.3, 0.2];
    let less = |epsilon| Filter { epsilon, ..Filter::default() };
    assert_eq!(kept(&less(0.0), &scores), [1, 2, 3]);
    assert_eq!(kept(&less(0.2), &scores), [1, 2]);
    assert!(kept(&less(0.9), &scores).is_empty());
}

#[test]
fn softmax_mass_by_hand() {
    // softmax(ln 6, ln 3, ln 1) = .6 .3 .1
    let scores = [3_f64.ln(), 6_f64.ln(), 1.0_f64.ln()];
    let softmax =
        |value| Filter { mass: Mass::Softmax, include_zero: true, ..filter(Strategy::TopP, value) };
    assert_eq!(kept(&softmax(0.5), &scores), [1]);
    assert_eq!(kept(&softmax(0.8), &scores), [0, 1]);
    assert_eq!(kept(&softmax(0.95), &scores), [0, 1, 2]);
    // softmax(−ln 3, −ln 6, −ln 1) = 2/9 1/9 6/9
    let lowest = |value| Filter { direction: Direction::Lowest, ..softmax(value) };
    assert_eq!(kept(&lowest(0.6), &scores), [2]);
    assert_eq!(kept(&lowest(0.7), &scores), [0, 2]);
}

#[test]
fn equal_scores_go_by_order() {
    assert_eq!(kept(&filter(Strategy::TopKAbs, 2.0), &[0.5, 0.5, 0.5]), [0, 1]);
    assert_eq!(kept(&filter(Strategy::TopP, 0.5), &[0.5, 0.5, 0.5, 0.5]), [0, 1]);
    assert_eq!(kept(&filter(Strategy::TopKAbs, 2.0), &[0.1, 0.5, 0.1, 0.1]), [0, 1]);
}

#[test]
fn infinite_scores_are_ranked_as_what_they_are() {
    let scores = [1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::INFINITY];
    assert_eq!(kept(&filter(Strategy::TopP, 0.9), &scores), [1, 4]);
    assert_eq!(kept(&filter(Strategy::TopKAbs, 3.0), &scores), [0, 1, 4]);
    assert_eq!(kept(&filter(Strategy::TopKAbs, 4.0), &scores), [0, 1, 2, 4]);
}

#[test]
fn held_shares_by_hand() {
    let scores = Tensor::from_slice(&[0.1, 0.4, 0.0, 0.3, f64::NAN, 0.2]);
    let shares: Vec<f64> = Vec::try_from(Filter::default().held_shares(&scores).unwrap()).unwrap();
    for (found, expected) in shares.iter().zip([1.0, 0.4, f64::NAN, 0.7, f64::NAN, 0.9]) {
        assert!(
            (found - expected).abs() < 1e-12 || (found.is_nan() && expected.is_nan()),
            "{shares:?}"
        );
    }
}

#[test]
fn what_ragen_does_otherwise() {
    let ragen = |filter| Filter { compat: Some(Compat::Ragen), ..filter };
    // 0.29·100 is 28.999999999999996 in float64.
    let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
    assert_eq!(kept(&filter(Strategy::TopK, 0.29), &hundred).len(), 29);
    assert_eq!(kept(&ragen(filter(Strategy::TopK, 0.29)), &hundred).len(), 28);
    // A value of 1 keeps what has no mass too.
    let all = Filter { include_zero: true, ..filter(Strategy::TopP, 1.0) };
    assert_eq!(kept(&all, &[0.0, 0.5, 0.0]), [1]);
    assert_eq!(kept(&ragen(all.clone()), &[0.0, 0.5, 0.0]), [0, 1, 2]);
    // Going up, a first score of 0 ends it.
    let lowest = Filter { direction: Direction::Lowest, value: 0.5, ..all };
    assert_eq!(kept(&lowest, &[0.0, 0.5, 0.2]), [0, 1, 2]);
    assert!(kept(&ragen(lowest), &[0.0, 0.5, 0.2]).is_empty());
    // Equal in float32, so that the first of them is kept.
    let first = filter(Strategy::TopKAbs, 1.0);
    assert_eq!(kept(&first, &[1.0, 1.0 + 1e-9]), [1]);
    assert_eq!(kept(&ragen(first), &[1.0, 1.0 + 1e-9]), [0]);
    let threshold = ragen(filter(Strategy::Threshold, 0.5));
    assert!(threshold.select(&Tensor::from_slice(&[1.0])).is_err());
}

#[test]
fn integers_and_half_precision_are_scores_too() {
    let top = filter(Strategy::TopKAbs, 2.0);
    for kind in [Kind::Int64, Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double] {
        let scores = Tensor::from_slice(&[3.0, 1.0, 0.0, 2.0]).to_kind(kind);
        let mask = top.select(&scores).unwrap().to_host().unwrap();
        assert_eq!(mask, [true, false, false, true], "{kind:?}");
    }
    assert!(top.select(&Tensor::from_slice(&[1.0, 2.0]).unsqueeze(0)).is_err());
}

/// What is kept of one set of scores by every filter: `(filter, kept groups)`.
fn kept_by_all(scores: &[f64]) -> Vec<(Filter, Vec<usize>)> {
    every_filter()
        .into_iter()
        .map(|filter| {
            let groups = kept(&filter, scores);
            (filter, groups)
        })
        .collect()
}

#[test]
fn all_equal() {
    for (filter, groups) in kept_by_all(&[0.25; 8]) {
        let expected = match filter.strategy {
            // 0.6·8 = 4.8 groups' worth of mass.
            Strategy::TopP => 5,
            // The share of 0.4 of 8 rounds down to 3.
            Strategy::TopK | Strategy::TopKAbs => 3,
            Strategy::Threshold if filter.direction == Direction::Lowest => 0,
            Strategy::MinP | Strategy::Threshold | Strategy::None => 8,
        };
        assert_eq!(groups, (0..expected).collect::<Vec<usize>>(), "{filter:?}");
    }
}

#[test]
fn all_zero() {
    for (filter, groups) in kept_by_all(&[0.0; 8]) {
        let without_mass = filter.strategy == Strategy::TopP && filter.mass == Mass::Linear;
        let below =
            filter.strategy == Strategy::Threshold && filter.direction == Direction::Highest;
        if filter.strategy == Strategy::None {
            assert_eq!(groups.len(), 8, "{filter:?}");
        } else if !filter.include_zero || without_mass || below {
            assert!(groups.is_empty(), "{filter:?} keeps {groups:?}");
        } else {
            assert!(!groups.is_empty(), "{filter:?}");
        }
    }
}

#[test]
fn one_group() {
    for (filter, groups) in kept_by_all(&[0.7]) {
        let above = filter.strategy == Strategy::Threshold && filter.direction == Direction::Lowest;
        assert_eq!(groups.len(), usize::from(!above), "{filter:?}");
    }
}

#[test]
fn one_nan() {
    let scores = [0.3, f64::NAN, 0.1, 0.5];
    for (filter, groups) in kept_by_all(&scores) {
        assert!(!groups.contains(&1), "{filter:?} keeps {groups:?}");
        // The others are judged as if it were not there, but that a fraction is of all groups.
        if filter.strategy != Strategy::TopK {
            let others = kept(&filter, &[0.3, 0.1, 0.5]);
            let others: Vec<usize> = others.into_iter().map(|group| [0, 2, 3][group]).collect();
            assert_eq!(groups, others, "{filter:?}");
        }
        assert!(kept(&filter, &[f64::NAN]).is_empty(), "{filter:?}");
    }
}

#[test]
fn no_group_at_all() {
    for (filter, groups) in kept_by_all(&[]) {
        assert!(groups.is_empty());
        let error = Filter { on_empty: OnEmpty::Error, ..filter };
        assert!(error.select(&Tensor::from_slice::<f64>(&[])).is_err());
    }
}

#[test]
fn an_empty_selection_under_each_on_empty() {
    let scores = Tensor::from_slice(&[0.0, f64::NAN, 0.0]);
    for compat in [None, Some(Compat::Ragen)] {
        let with = |on_empty| Filter { on_empty, compat, ..Filter::default() };
        let skip = with(OnEmpty::Skip).select(&scores).unwrap();
        assert_eq!((skip.count, skip.groups, skip.fell_back), (0, 3, false));
        assert_eq!(skip.to_host().unwrap(), [false; 3]);
        // Even all are none that is NaN.
        let all = with(OnEmpty::KeepAll).select(&scores).unwrap();
        assert_eq!((all.count, all.groups, all.fell_back), (2, 3, true));
        assert_eq!(all.to_host().unwrap(), [true, false, true]);
        let error = with(OnEmpty::Error).select(&scores).unwrap_err().to_string();
        assert!(error.contains("on_empty"), "{error}");
    }
}

#[test]
fn a_group_of_one_trajectory_has_no_variance() {
    let scores = Scores::of_rewards(&[0.7], 12);
    assert_eq!((scores.reward_variance, scores.reward_mean, scores.length), (0.0, 0.7, 12.0));
    // [.2, .8]: mean .5, unbiased variance .18.
    let two = Scores::of_rewards(&[0.2, 0.8], 12);
    assert_close(two.reward_variance, 0.18, 1e-15, 1.0, "variance");
    let mut filter = step_filter(Filter::default());
    let (verdicts, record) = filter.judge(&[scores, two]).unwrap();
    assert_eq!(verdicts[0].reason, Reason::Zero);
    assert_eq!(verdicts[0].rank, None);
    assert_eq!((verdicts[1].reason, verdicts[1].rank), (Reason::Chosen, Some(1)));
    assert_eq!((record.groups, record.cut), (1, verdicts[1].score));
}

fn step_filter(filter: Filter) -> StepFilter {
    StepFilter {
        filter,
        score: Score::RewardVariance,
        adaptive: None,
        loss_scale: LossScale::None,
        mini_batch_size: None,
        state: AdaptiveState::default(),
    }
}

#[test]
fn entropies_by_hand() {
    // Sums 6 over 4 tokens and 2 over 4: mean 1, mean entropies 1.5 and 0.5, variance 0.5.
    let scores = Scores::default().with_entropies(&[(6.0, 4.0), (2.0, 4.0)]);
    assert_eq!((scores.entropy, scores.entropy_variance), (Some(1.0), Some(0.5)));
    assert_eq!(Score::Entropy.of(&scores), 1.0);
    // What was not measured cannot be kept.
    assert!(Score::Snr.of(&scores).is_nan());
    let mut filter = StepFilter { score: Score::Snr, ..step_filter(Filter::default()) };
    let (verdicts, record) = filter.judge(&[scores]).unwrap();
    assert_eq!((verdicts[0].reason, record.groups), (Reason::Undefined, 0));
}

#[test]
fn the_loss_factor_by_hand() {
    let filter = filter(Strategy::TopKAbs, 2.0);
    let scores = Tensor::from_slice(&[0.1, 0.2, 0.3, 0.4, 0.0, 0.0, 0.0, 0.0]);
    let selection = filter.select(&scores).unwrap();
    for (scale, factor) in
        [(LossScale::None, 1.0), (LossScale::Linear, 0.25), (LossScale::Sqrt, 0.5)]
    {
        assert_eq!(scale.factor(&selection), factor, "{scale:?}");
    }
    let none = filter.select(&Tensor::from_slice(&[0.0, 0.0])).unwrap();
    for (scale, factor) in
        [(LossScale::None, 1.0), (LossScale::Linear, 0.0), (LossScale::Sqrt, 0.0)]
    {
        assert_eq!(scale.factor(&none), factor, "{scale:?}");
    }
}

#[test]
fn remaining_optimizer_steps_by_hand() {
    for (groups, size, steps) in [
        (24, Some(8), 3),
        (13, Some(8), 2),
        (8, Some(8), 1),
        (0, Some(8), 0),
        (13, None, 1),
        (0, None, 0),
    ] {
        assert_eq!(optimizer_steps(groups, size), steps, "{groups} groups at {size:?}");
    }
}

#[test]
fn the_spread_by_hand() {
    // Mean 2, unbiased variance 2: √2/2.
    assert_close(spread(&[1.0, 3.0]).unwrap(), 0.5_f64.sqrt(), 1e-15, 1.0, "spread");
    assert_eq!(spread(&[1.0, 3.0, f64::NAN]), spread(&[1.0, 3.0]));
    assert_eq!(spread(&[0.2, 0.2, 0.2]), Some(0.0));
    for undefined in [&[][..], &[1.0], &[0.0, 0.0]] {
        assert_eq!(spread(undefined), None, "{undefined:?}");
    }
}

#[test]
fn the_adaptive_rate_by_hand() {
    let rule = Adaptive::default();
    let mut state = AdaptiveState::default();
    // No history: nothing says that filtering helps.
    assert_eq!(rule.rate(0.9, &state), 1.0);
    rule.observe(&mut state, None);
    assert_eq!(state.spread, None);
    // The paper's three spreads: full effect, full effect, none.
    for (spread, rate) in [(1.29, 0.9), (1.16, 0.9), (0.33, 1.0), (0.0, 1.0)] {
        let state = AdaptiveState { spread: Some(spread) };
        assert_close(rule.rate(0.9, &state), rate, 1e-15, 1.0, "rate");
    }
    // Half way, half the effect.
    let half = AdaptiveState { spread: Some(0.745) };
    assert_close(rule.rate(0.8, &half), 0.9, 1e-12, 1.0, "half way");
    // The first spread counts in full, the next by a tenth: 0.9·1 + 0.1·0.5.
    rule.observe(&mut state, Some(1.0));
    assert_eq!(state.spread, Some(1.0));
    rule.observe(&mut state, Some(0.5));
    assert_close(state.spread.unwrap(), 0.95, 1e-15, 1.0, "history");
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<AdaptiveState>(&text).unwrap(), state);
}

/// Batches of little spread are kept whole, one of much spread is filtered, and the history is seen.
#[test]
fn an_adaptive_filter_goes_with_the_run() {
    let adaptive = Adaptive { momentum: 0.5, ..Adaptive::default() };
    let mut filter = StepFilter { adaptive: Some(adaptive), ..step_filter(Filter::default()) };
    filter.filter.value = 0.5;
    let batch = |variances: [f64; 4]| {
        variances.map(|reward_variance| Scores { reward_variance, ..Scores::default() })
    };
    let (_, flat) = filter.judge(&batch([0.9, 1.0, 1.0, 1.1])).unwrap();
    assert_eq!((flat.groups, flat.keep_rate), (4, Some(1.0)));
    // Spread 2 exactly: mean 1, variance (9 + 3)/3 = 4. The average with 0.0816 is 1.04.
    let (_, steep) = filter.judge(&batch([4.0, 0.0, 0.0, 0.0])).unwrap();
    assert_close(steep.reward_variance_spread.unwrap(), 2.0, 1e-12, 1.0, "spread");
    let flat_spread = (0.02_f64 / 3.0).sqrt();
    let averaged = 0.5 * flat_spread + 0.5 * 2.0;
    assert_close(steep.adaptive_spread.unwrap(), averaged, 1e-12, 1.0, "history");
    let rate = 1.0 - 0.5 * (averaged - 0.33) / (1.16 - 0.33);
    assert_close(steep.keep_rate.unwrap(), rate, 1e-12, 1.0, "rate");
}
