//! Filters of every kind.

use gradprism::filter::{Compat, Direction, Filter, Mass, Strategy};
use tch::Tensor;

const STRATEGIES: [(Strategy, f64); 6] = [
    (Strategy::TopP, 0.6),
    (Strategy::TopK, 0.4),
    (Strategy::TopKAbs, 3.0),
    (Strategy::MinP, 0.5),
    (Strategy::Threshold, 0.2),
    (Strategy::None, 0.0),
];

/// Every strategy, direction, mass, treatment of zeros, and RAGEN's way where it has one.
pub fn every_filter() -> Vec<Filter> {
    let mut filters = Vec::new();
    for (strategy, value) in STRATEGIES {
        for direction in [Direction::Highest, Direction::Lowest] {
            for mass in [Mass::Linear, Mass::Softmax] {
                for include_zero in [false, true] {
                    for compat in [None, Some(Compat::Ragen)] {
                        if compat.is_some() && strategy == Strategy::Threshold {
                            continue;
                        }
                        filters.push(Filter {
                            strategy,
                            direction,
                            mass,
                            value,
                            include_zero,
                            compat,
                            ..Filter::default()
                        });
                    }
                }
            }
        }
    }
    filters
}

/// The groups that are kept.
pub fn kept(filter: &Filter, scores: &[f64]) -> Vec<usize> {
    super::one_thread();
    let mask = filter.select(&Tensor::from_slice(scores)).unwrap().to_host().unwrap();
    (0..scores.len()).filter(|index| mask[*index]).collect()
}
