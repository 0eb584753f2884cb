//! Two arms whose names hint at what they pay.
//!
//! Rules of RAGEN's bandit: the low arm pays 0.1 for certain, the high one 1 with probability 0.25 and
//! else 0; one pull; success is to have pulled the high arm, whatever it paid; the arms stand in an
//! order drawn by the task; afterwards `NAME: POINTS points` is to be seen. Its later versions draw the
//! pair of names by the task from a list: give such a list as [`Bandit::arms`]. The prompt says the
//! same in words of our own.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::{Answers, Environment, Outcome, Seed, error, require_probability, require_running};
use crate::error::Result;

const NAME: &str = "bandit";

/// The names of two arms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arms {
    /// The arm that pays a little for certain.
    pub low: String,
    /// The arm that pays much by chance.
    pub high: String,
}

/// The bandit.
#[derive(Clone, Debug)]
pub struct Bandit {
    arms: Vec<Arms>,
    low_reward: f64,
    high_reward: f64,
    high_probability: f64,
    pair: Arms,
    low_first: bool,
    chance: ChaCha8Rng,
    pulled: Option<String>,
}

impl Bandit {
    /// A bandit whose task draws one of the pairs of names; the high arm pays `high_reward` with
    /// `high_probability`, else 0.
    ///
    /// # Errors
    /// If there is no pair, a name is empty or twice in a pair, or a number is out of range.
    pub fn new(
        arms: Vec<Arms>,
        low_reward: f64,
        high_reward: f64,
        high_probability: f64,
    ) -> Result<Self> {
        let Some(pair) = arms.first().cloned() else {
            return Err(error(NAME, "arms: expected at least one pair of names, found none"));
        };
        for Arms { low, high } in &arms {
            let is_unclear = |name: &str| name.is_empty() || name.trim() != name;
            if is_unclear(low) || is_unclear(high) || low.to_lowercase() == high.to_lowercase() {
                return Err(error(
                    NAME,
                    format!(
                        "arms: expected two different names without white space around them, found `{low}` and `{high}`"
                    ),
                ));
            }
        }
        require_probability(NAME, "high_probability", high_probability)?;
        for (what, reward) in [("low_reward", low_reward), ("high_reward", high_reward)] {
            if !reward.is_finite() {
                return Err(error(
                    NAME,
                    format!("{what}: expected a finite number, found {reward}"),
                ));
            }
        }
        Ok(Self {
            arms,
            low_reward,
            high_reward,
            high_probability,
            pair,
            low_first: true,
            chance: Seed::default().chance_generator(),
            pulled: None,
        })
    }

    fn pull(&mut self, is_high: bool) -> f64 {
        if !is_high {
            self.low_reward
        } else if self.chance.random_bool(self.high_probability) {
            self.high_reward
        } else {
            0.0
        }
    }
}

impl Environment for Bandit {
    fn name(&self) -> &str {
        NAME
    }

    fn instruction(&self) -> String {
        "You play a bandit. You have one pull, and your reward is to be as large as possible."
            .into()
    }

    fn answers(&self) -> Answers {
        Answers::Name
    }

    fn max_actions(&self) -> usize {
        1
    }

    fn reset(&mut self, seed: Seed) -> Result<()> {
        let mut task = seed.task_generator();
        self.pair = self.arms[task.random_range(0..self.arms.len())].clone();
        self.low_first = task.random_bool(0.5);
        self.chance = seed.chance_generator();
        self.pulled = None;
        Ok(())
    }

    fn observe(&self) -> String {
        if let Some(pulled) = &self.pulled {
            return pulled.clone();
        }
        let Arms { low, high } = &self.pair;
        let (first, second) = if self.low_first { (low, high) } else { (high, low) };
        format!(
            "There are 2 arms, {first} and {second}. Each has its own distribution of rewards, and its name hints at it. Which one gives more on average? Choose {first} or {second}."
        )
    }

    fn act(&mut self, action: &str) -> Result<Option<Outcome>> {
        require_running(NAME, self.pulled.is_some())?;
        let is = |name: &str| name.to_lowercase() == action.trim().to_lowercase();
        let is_high = is(&self.pair.high);
        if !is_high && !is(&self.pair.low) {
            return Ok(None);
        }
        let reward = self.pull(is_high);
        let name = if is_high { &self.pair.high } else { &self.pair.low };
        self.pulled = Some(format!("{name}: {reward:?} points"));
        Ok(Some(Outcome { reward, done: true, success: is_high, effective: true }))
    }

    fn fork(&self) -> Result<Box<dyn Environment>> {
        Ok(Box::new(self.clone()))
    }
}
