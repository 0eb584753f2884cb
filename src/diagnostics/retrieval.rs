//! Whether a span's own context is the one that scores best.

use serde::Serialize;

use super::metrics::CrossScores;
use crate::gradient::mean;

/// The cuts of the ranking: RAGEN's.
const CUTS: [usize; 4] = [1, 2, 4, 8];

/// The share of rows whose own context, or one equal to it, is among the `k` that score best; the same
/// of a guess; and the difference.
///
/// Scores that tie are taken in every order alike: a row whose maximum is tied between `t` contexts
/// counts 1/t. A policy that does not look at its context is thereby at chance exactly, instead of at
/// the mercy of a sort.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Retrieval {
    /// k = 1.
    pub retrieval_accuracy: f64,
    /// The mean share of columns equal to the row's own.
    pub retrieval_chance_level: f64,
    /// The difference.
    pub retrieval_above_chance: f64,
    /// k = 2.
    #[serde(rename = "retrieval_accuracy@2")]
    pub accuracy_2: f64,
    /// `min(1, min(k, P)·chance)`, as in RAGEN; also below.
    #[serde(rename = "retrieval_chance_level@2")]
    pub chance_level_2: f64,
    /// The difference.
    #[serde(rename = "retrieval_above_chance@2")]
    pub above_chance_2: f64,
    /// k = 4.
    #[serde(rename = "retrieval_accuracy@4")]
    pub accuracy_4: f64,
    /// Of a guess.
    #[serde(rename = "retrieval_chance_level@4")]
    pub chance_level_4: f64,
    /// The difference.
    #[serde(rename = "retrieval_above_chance@4")]
    pub above_chance_4: f64,
    /// k = 8.
    #[serde(rename = "retrieval_accuracy@8")]
    pub accuracy_8: f64,
    /// Of a guess.
    #[serde(rename = "retrieval_chance_level@8")]
    pub chance_level_8: f64,
    /// The difference.
    #[serde(rename = "retrieval_above_chance@8")]
    pub above_chance_8: f64,
}

impl Retrieval {
    pub(super) fn new(scores: &CrossScores) -> Self {
        let ranks: Vec<Rank> = (0..scores.rows()).map(|row| Rank::new(scores, row)).collect();
        let over_rows = |value: &dyn Fn(&Rank) -> f64| {
            mean(&ranks.iter().map(value).collect::<Vec<f64>>()).unwrap_or(0.0)
        };
        let contexts = scores.contexts();
        let chance = over_rows(&|rank| rank.equal as f64 / contexts as f64);
        let [one, two, four, eight] = CUTS.map(|cut| {
            let cut = cut.min(contexts);
            (over_rows(&|rank| rank.hit(cut)), (cut as f64 * chance).min(1.0))
        });
        Self {
            retrieval_accuracy: one.0,
            retrieval_chance_level: one.1,
            retrieval_above_chance: one.0 - one.1,
            accuracy_2: two.0,
            chance_level_2: two.1,
            above_chance_2: two.0 - two.1,
            accuracy_4: four.0,
            chance_level_4: four.1,
            above_chance_4: four.0 - four.1,
            accuracy_8: eight.0,
            chance_level_8: eight.1,
            above_chance_8: eight.0 - eight.1,
        }
    }
}

/// Where the best of the columns equal to a row's own stands.
struct Rank {
    /// Columns equal to the row's own.
    equal: usize,
    /// Columns that score higher.
    above: usize,
    /// Columns that score as high, itself among them.
    tied: usize,
    /// Those of them that are equal to the row's own.
    tied_equal: usize,
}

impl Rank {
    fn new(scores: &CrossScores, row: usize) -> Self {
        let own = scores.signatures()[scores.column(row)];
        let columns = || scores.row(row).iter().copied().zip(scores.signatures());
        let equal = || columns().filter(|(_, signature)| **signature == own);
        let best = equal().map(|(score, _)| score).fold(f64::NEG_INFINITY, f64::max);
        Self {
            equal: equal().count(),
            above: columns().filter(|(score, _)| *score > best).count(),
            tied: columns().filter(|(score, _)| *score == best).count(),
            tied_equal: equal().filter(|(score, _)| *score == best).count(),
        }
    }

    /// The probability that an equal column is among the first `cut`, ties in random order:
    /// 1 − C(t − e, s)/C(t, s) for the `s` places that the higher ones leave.
    fn hit(&self, cut: usize) -> f64 {
        let places = cut.saturating_sub(self.above).min(self.tied);
        let miss: f64 = (0..places)
            .map(|taken| {
                let others = (self.tied - self.tied_equal).saturating_sub(taken);
                others as f64 / (self.tied - taken) as f64
            })
            .product();
        1.0 - miss
    }
}
