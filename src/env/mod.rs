//! Text environments: what a policy is asked, what it may do, and what it earns.
//!
//! An [`Environment`] knows its rules and nothing of language models. An [`Episode`] reads the answer
//! out of a response, lets the environment act, counts what was invalid, and says what the policy
//! reads next. A [`Group`] is the episodes that share a task.
//!
//! Rules, rewards, observations and defaults are those of the RAGEN suite (arXiv 2504.20073), so that
//! returns can be compared. Each environment says what was taken over and where it differs; common to
//! all is:
//!
//! | | RAGEN | here |
//! |---|---|---|
//! | tasks | drawn by numpy and by Python's `random` | drawn from the same laws by ChaCha8: a seed gives another task |
//! | chance inside a group | FrozenLake: the group's seed, so that all slip alike at the same move | independent for every trajectory |
//! | instructions | | in words of our own; the same facts in the same order |
//! | answers of free text | split at the separator too | one action, whole |

mod answer;
mod bandit;
mod countdown;
mod episode;
mod expression;
mod frozen_lake;
mod group;
mod questions;
mod rational;
mod tasks;

pub use answer::{Answer, Tags};
pub use bandit::{Arms, Bandit};
pub use countdown::{Countdown, CountdownTask, Generator, Grade, Solvable, grade};
pub use episode::{End, Episode, MessageStyle, Rules, Turn};
pub use expression::{Expression, ExpressionError};
pub use frozen_lake::{Direction, FrozenLake, Lake, LakeSource, View};
pub use group::Group;
pub use questions::{Comparison, Question, Questions};
pub use rational::Rational;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::error::{Error, Result};

/// A world of text for one trajectory. It holds all of its state itself, so that many of them run side
/// by side on threads, and what it does is decided by its seed and the actions alone. Every call that
/// may reach out to a process or over a network can fail; a slow one blocks its own thread only.
pub trait Environment: Send {
    /// Its name in configurations and messages.
    fn name(&self) -> &str;

    /// What is said once, before the first observation: the rules, and what the signs mean. It does not
    /// depend on the task.
    fn instruction(&self) -> String;

    /// What an answer may hold.
    fn answers(&self) -> Answers;

    /// Actions of a trajectory, unless [`Rules::max_actions`] says otherwise.
    fn max_actions(&self) -> usize;

    /// Begins a trajectory. The first observation depends on `seed.task` alone.
    ///
    /// # Errors
    /// If no task can be had.
    fn reset(&mut self, seed: Seed) -> Result<()>;

    /// What is to be seen now.
    fn observe(&self) -> String;

    /// Takes one action. `None`: the text is no action here, and nothing has changed.
    ///
    /// # Errors
    /// If the trajectory is over, or the environment itself fails.
    fn act(&mut self, action: &str) -> Result<Option<Outcome>>;

    /// Another environment of the same kind with a state of its own. Data such as a file of questions
    /// is shared.
    ///
    /// # Errors
    /// If it cannot be set up.
    fn fork(&self) -> Result<Box<dyn Environment>>;
}

/// What an answer may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answers {
    /// Free text, taken as one action.
    Text,
    /// One of some names, which the observation gives; case does not matter.
    Name,
    /// A sequence of these names; case does not matter.
    Sequence(Vec<String>),
}

/// What an action did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// What it earned.
    pub reward: f64,
    /// Whether the trajectory is over.
    pub done: bool,
    /// Whether the goal is reached.
    pub success: bool,
    /// Whether it changed anything, or earned anything.
    pub effective: bool,
}

/// What decides a trajectory besides the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Seed {
    /// The task: equal for the trajectories of a group.
    pub task: u64,
    /// Which visit to the task it is, a training step for instance.
    pub visit: u64,
    /// The trajectory in its group.
    pub trajectory: u64,
}

impl Seed {
    /// Draws the task: the same stream for the same `task`.
    pub fn task_generator(&self) -> ChaCha8Rng {
        Self { task: self.task, ..Self::default() }.generator(0)
    }

    /// Draws what happens by chance: a stream of its own for every task, visit and trajectory.
    pub fn chance_generator(&self) -> ChaCha8Rng {
        self.generator(1)
    }

    /// Draws the tokens of the policy: a stream of its own for every task, visit and trajectory.
    pub fn sampling_generator(&self) -> ChaCha8Rng {
        self.generator(2)
    }

    /// Draws an order of things.
    pub(crate) fn order_generator(&self) -> ChaCha8Rng {
        self.generator(3)
    }

    /// The numbers are the key itself; no two seeds share a stream.
    fn generator(&self, purpose: u64) -> ChaCha8Rng {
        let mut key = [0; 32];
        for (slot, number) in
            key.chunks_exact_mut(8).zip([self.task, self.visit, self.trajectory, purpose])
        {
            slot.copy_from_slice(&number.to_le_bytes());
        }
        ChaCha8Rng::from_seed(key)
    }
}

/// An error of the environment `name`.
fn error(name: &str, problem: impl Into<String>) -> Error {
    Error::Environment { name: name.to_owned(), problem: problem.into() }
}

/// For an action after the end.
fn require_running(name: &str, over: bool) -> Result<()> {
    if over {
        return Err(error(name, "the trajectory is over; expected reset before another action"));
    }
    Ok(())
}

/// A probability in place.
fn require_probability(name: &str, what: &str, found: f64) -> Result<()> {
    if (0.0..=1.0).contains(&found) {
        return Ok(());
    }
    Err(error(name, format!("{what}: expected a number from 0 to 1, found {found}")))
}
