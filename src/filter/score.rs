//! What a group can be ranked by.

use serde::{Deserialize, Serialize};

/// The score of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// The unbiased variance of its rewards (RAGEN-2, arXiv 2604.06268).
    RewardVariance,
    /// The square root of that.
    RewardStd,
    /// The mean of its rewards.
    Reward,
    /// Their sum.
    RewardSum,
    /// The mean entropy of its sampled tokens.
    Entropy,
    /// The unbiased variance, over its trajectories, of their mean entropies.
    EntropyVariance,
    /// The mean number of sampled tokens.
    Length,
    /// The measured signal-to-noise ratio.
    Snr,
    /// The measured signal, √max(signal², 0).
    Signal,
}

/// Everything a group can be ranked by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// Unbiased variance of the rewards.
    pub reward_variance: f64,
    /// Mean reward.
    pub reward_mean: f64,
    /// Sum of the rewards.
    pub reward_sum: f64,
    /// Mean entropy over sampled tokens.
    pub entropy: f64,
    /// Unbiased variance of the trajectories' mean entropies.
    pub entropy_variance: f64,
    /// Mean number of sampled tokens.
    pub length: f64,
    /// Signal-to-noise ratio.
    pub snr: f64,
    /// Signal² as estimated.
    pub signal_sq: f64,
}

impl Score {
    /// The one number of this score.
    pub fn of(self, scores: &Scores) -> f64 {
        match self {
            Self::RewardVariance => scores.reward_variance,
            Self::RewardStd => scores.reward_variance.sqrt(),
            Self::Reward => scores.reward_mean,
            Self::RewardSum => scores.reward_sum,
            Self::Entropy => scores.entropy,
            Self::EntropyVariance => scores.entropy_variance,
            Self::Length => scores.length,
            Self::Snr => scores.snr,
            Self::Signal => scores.signal_sq.max(0.0).sqrt(),
        }
    }
}
