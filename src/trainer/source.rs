//! Where trajectories come from.

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::policy::Policy;
use crate::rollout::Group;

/// Samples trajectories with the policy in training.
///
/// What a source gives must depend on the request and the policy alone, so that a run that is resumed
/// goes the way it would have gone.
pub trait Source {
    /// Samples a group for each of the request's tasks, in their order. Every trajectory needs
    /// `old_logprobs`, under `softmax(logits/temperature)` of the policy, and a sampled token.
    ///
    /// # Errors
    /// If no task can be had, or the policy or the environment fails.
    fn sample(&mut self, policy: &Policy, request: &SourceRequest) -> Result<Vec<SampledGroup>>;

    /// The shape of one observation, of a step policy.
    fn observation_shape(&self) -> Option<Vec<i64>> {
        None
    }

    /// What is odd, each said once.
    fn warnings(&mut self) -> Vec<String> {
        Vec::new()
    }
}

/// What is to be sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceRequest {
    /// A group for each.
    pub visits: Vec<Visit>,
    /// Trajectories of a group.
    pub group_size: usize,
    /// Whether the most likely choice is taken instead of a draw.
    pub greedy: bool,
}

/// A task, and which visit to it in the run: seeds for a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Equal numbers are equal tasks. The run's seed is in the upper half.
    pub task: u64,
    /// Another one for every group of the run.
    pub visit: u64,
}

/// A group, and what is known of its trajectories beside their rewards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledGroup {
    /// The trajectories.
    pub group: Group,
    /// One a trajectory.
    pub outcomes: Vec<Outcome>,
}

/// How a trajectory went.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Whether the goal was reached, where there is one.
    pub success: Option<bool>,
    /// Responses.
    pub turns: usize,
    /// Actions that were refused.
    pub invalid_actions: usize,
    /// Responses that had not the form.
    pub malformed: usize,
    /// Whether there was no room for another turn.
    pub truncated: bool,
    /// What was taken off the reward for length.
    pub overlong_penalty: f64,
    /// Prompt and response as text, where there is text.
    pub text: Option<(String, String)>,
}
