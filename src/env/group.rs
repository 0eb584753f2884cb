//! The trajectories that share a task.

use super::{Environment, Episode, Rules, Seed, error};
use crate::error::Result;

/// Episodes of one task: the same prompt, and chance of its own for each.
pub struct Group {
    /// The seed of the task.
    pub task: u64,
    /// The trajectories.
    pub episodes: Vec<Episode>,
}

impl Group {
    /// Begins `size` trajectories in forks of `environment`. What is drawn for trajectory `i` depends
    /// on `task`, `visit` and `i` alone; `visit` tells visits to the same task apart, as the training
    /// step does.
    ///
    /// # Errors
    /// If the environment cannot be forked, has no task, or shows two trajectories of the task different
    /// prompts.
    pub fn start(
        environment: &dyn Environment,
        rules: &Rules,
        size: usize,
        task: u64,
        visit: u64,
    ) -> Result<Self> {
        let episodes: Vec<Episode> = (0..size as u64)
            .map(|trajectory| {
                let seed = Seed { task, visit, trajectory };
                Episode::start(environment.fork()?, rules.clone(), seed)
            })
            .collect::<Result<_>>()?;
        let mut prompts = episodes.iter().map(Episode::message);
        if let Some(first) = prompts.next()
            && prompts.any(|prompt| prompt != first)
        {
            return Err(error(
                environment.name(),
                format!("expected one prompt for all trajectories of task {task}, found several"),
            ));
        }
        Ok(Self { task, episodes })
    }

    /// The prompt that they share; empty for a group of none.
    ///
    /// Before the first response only.
    pub fn prompt(&self) -> String {
        self.episodes.first().map_or(String::new(), Episode::message)
    }

    /// The returns, in order.
    pub fn rewards(&self) -> Vec<f64> {
        self.episodes.iter().map(Episode::total_reward).collect()
    }
}
