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

/// Everything a group can be ranked by. What was not measured is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Scores {
    /// Mean reward.
    pub reward_mean: f64,
    /// Sum of the rewards.
    pub reward_sum: f64,
    /// Unbiased variance of the rewards.
    pub reward_variance: f64,
    /// Mean number of sampled tokens of a trajectory.
    pub length: f64,
    /// Mean entropy over sampled tokens, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy: Option<f64>,
    /// Unbiased variance of the trajectories' mean entropies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_variance: Option<f64>,
    /// Signal-to-noise ratio.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snr: Option<f64>,
    /// Signal² as estimated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal_sq: Option<f64>,
}

impl Scores {
    /// What rewards and numbers of sampled tokens give, one each a trajectory.
    pub fn of_rewards(rewards: &[f64], tokens: usize) -> Self {
        let rows = rewards.len() as f64;
        let reward_sum: f64 = rewards.iter().sum();
        Self {
            reward_mean: reward_sum / rows,
            reward_sum,
            reward_variance: variance(rewards.to_vec()),
            length: tokens as f64 / rows,
            ..Self::default()
        }
    }

    /// Adds what entropies give: for each trajectory their sum and the number of sampled tokens, at
    /// least 1.
    pub fn with_entropies(mut self, rows: &[(f64, f64)]) -> Self {
        let sums = rows.iter().fold((0.0, 0.0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
        self.entropy = Some(sums.0 / sums.1);
        self.entropy_variance =
            Some(variance(rows.iter().map(|(entropy, tokens)| entropy / tokens).collect()));
        self
    }
}

impl Score {
    /// The one number of this score; NaN if it was not measured.
    pub fn of(self, scores: &Scores) -> f64 {
        let number = match self {
            Self::RewardVariance => Some(scores.reward_variance),
            Self::RewardStd => Some(scores.reward_variance.sqrt()),
            Self::Reward => Some(scores.reward_mean),
            Self::RewardSum => Some(scores.reward_sum),
            Self::Entropy => scores.entropy,
            Self::EntropyVariance => scores.entropy_variance,
            Self::Length => Some(scores.length),
            Self::Snr => scores.snr,
            Self::Signal => scores.signal_sq.map(|signal_sq| signal_sq.max(0.0).sqrt()),
        };
        number.unwrap_or(f64::NAN)
    }

    /// What has to be run for it.
    pub fn need(self) -> Need {
        match self {
            Self::Entropy | Self::EntropyVariance => Need::Forward,
            Self::Snr | Self::Signal => Need::Gradient,
            _ => Need::Rollouts,
        }
    }

    /// Its name in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::RewardVariance => "reward_variance",
            Self::RewardStd => "reward_std",
            Self::Reward => "reward",
            Self::RewardSum => "reward_sum",
            Self::Entropy => "entropy",
            Self::EntropyVariance => "entropy_variance",
            Self::Length => "length",
            Self::Snr => "snr",
            Self::Signal => "signal",
        }
    }
}

/// What has to be run before a score is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing: the rollouts say it.
    Rollouts,
    /// A forward pass of the policy over every trajectory.
    Forward,
    /// The split of the gradient.
    Gradient,
}

/// The unbiased variance; 0 of equal numbers and of a single one. Summed in the order of size, so that
/// equal rewards in another order of rows give the same number to the last bit: scores are ranked, and
/// ties go by the order of groups.
pub(crate) fn variance(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    if numbers.first() == numbers.last() {
        return 0.0;
    }
    let count = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    numbers.iter().map(|number| (number - mean).powi(2)).sum::<f64>() / (count - 1.0)
}
