//! Which spans of a batch are scored.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// Which spans a trajectory offers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// The first.
    #[default]
    FirstTurn,
    /// All: a trajectory is drawn, then one of its spans, so that long ones count no more than short.
    Trajectory,
}

/// A number of draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// How many; none for as many as there are spans.
    pub samples: Option<usize>,
    /// Whether a span may come twice.
    pub replacement: bool,
    /// Seeds the generator.
    pub seed: u64,
}

impl Draw {
    /// Draws among `offered[m]` spans of trajectory `m`: a trajectory uniformly, among those that have
    /// spans left, then one of its spans uniformly. Returns (trajectory, place in its offer), in
    /// ascending order.
    pub fn draw(&self, offered: &[usize]) -> Vec<(usize, usize)> {
        let mut left: Vec<(usize, Vec<usize>)> = offered
            .iter()
            .enumerate()
            .filter(|(_, spans)| **spans > 0)
            .map(|(trajectory, spans)| (trajectory, (0..*spans).collect()))
            .collect();
        let total: usize = offered.iter().sum();
        let samples = match self.samples {
            Some(samples) if self.replacement => samples,
            samples => samples.unwrap_or(total).min(total),
        };
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        let mut drawn = Vec::with_capacity(samples);
        while drawn.len() < samples && !left.is_empty() {
            let chosen = random.random_range(0..left.len());
            let (trajectory, spans) = &mut left[chosen];
            let place = random.random_range(0..spans.len());
            drawn.push((*trajectory, spans[place]));
            if !self.replacement {
                spans.swap_remove(place);
                if spans.is_empty() {
                    left.swap_remove(chosen);
                }
            }
        }
        drawn.sort_unstable();
        drawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(samples: Option<usize>, replacement: bool, seed: u64) -> Draw {
        Draw { samples, replacement, seed }
    }

    #[test]
    fn without_replacement_no_span_comes_twice_and_all_come_in_the_end() {
        let offered = [2, 0, 1, 3];
        let all = [(0, 0), (0, 1), (2, 0), (3, 0), (3, 1), (3, 2)];
        assert_eq!(draw(None, false, 1).draw(&offered), all);
        assert_eq!(draw(Some(99), false, 1).draw(&offered), all);
        for seed in 0..50 {
            let mut some = draw(Some(4), false, seed).draw(&offered);
            assert_eq!(some, draw(Some(4), false, seed).draw(&offered), "seeded");
            some.dedup();
            assert_eq!(some.len(), 4);
            assert!(some.iter().all(|pair| all.contains(pair)));
        }
        assert_eq!(draw(Some(4), true, 0).draw(&[0, 0]), []);
    }

    #[test]
    fn trajectories_count_alike_however_many_spans_they_offer() {
        // With replacement: Pr(m, t) = 1/M · 1/T_m, here 1/2 · 1/1 and 1/2 · 1/4.
        const DRAWS: usize = 40_000;
        let drawn = draw(Some(DRAWS), true, 3).draw(&[1, 4]);
        assert_eq!(drawn.len(), DRAWS);
        let share = |pair: (usize, usize)| {
            drawn.iter().filter(|drawn| **drawn == pair).count() as f64 / DRAWS as f64
        };
        // Four standard errors: 4·√(¼/40,000).
        assert!((share((0, 0)) - 0.5).abs() < 0.01, "{}", share((0, 0)));
        for place in 0..4 {
            assert!((share((1, place)) - 0.125).abs() < 0.007, "{}", share((1, place)));
        }
        // Without replacement the first draw has the same law.
        let first = (0..4_000).filter(|seed| draw(Some(1), false, *seed).draw(&[1, 4])[0].0 == 0);
        let share = first.count() as f64 / 4_000.0;
        assert!((share - 0.5).abs() < 0.032, "{share}");
    }
}
