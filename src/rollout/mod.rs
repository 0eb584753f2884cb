//! Stored rollouts: trajectories, the groups they form, and the batches (steps) of a file.

mod copy;
mod line;
mod reader;
mod text;
mod write;

pub use copy::copy_lines;
pub(crate) use reader::open;
pub use reader::{OnProblem, ReadOptions, read};
pub(crate) use text::TextTokenizer;
pub use write::RolloutLine;

use serde::{Deserialize, Serialize};

use crate::objective::Counts;

/// What a trajectory shows the policy and what the policy did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Content {
    /// A language model's: the response follows the prompt in one sequence.
    Tokens {
        /// Token ids of the prompt, at least one.
        prompt_ids: Vec<i64>,
        /// Token ids of the response, `T` of them, observations of the environment included.
        response_ids: Vec<i64>,
    },
    /// A step policy's: an observation and an action per step.
    Steps {
        /// The observations, flattened.
        observations: Vec<f64>,
        /// The shape of one observation.
        shape: Vec<i64>,
        /// The actions, `T` of them.
        actions: Vec<i64>,
    },
}

impl Content {
    /// The length `T` of the response.
    pub fn len(&self) -> usize {
        self.actions().len()
    }

    /// Never true of what a reader returns: an empty response is an error there.
    pub fn is_empty(&self) -> bool {
        self.actions().is_empty()
    }

    /// What was chosen at each position of the response: token ids or actions, `T` of them.
    pub fn actions(&self) -> &[i64] {
        match self {
            Self::Tokens { response_ids, .. } => response_ids,
            Self::Steps { actions, .. } => actions,
        }
    }
}

/// One sampled answer to one prompt. Arrays over the response have length `T`, and hold 0 where
/// the mask is false.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trajectory {
    /// The line of the file, counted from 1.
    pub line: usize,
    /// Its name, if the file gives one.
    pub id: Option<String>,
    /// Prompt and response.
    pub content: Content,
    /// True where the policy sampled, false on observations of the environment.
    pub mask: Vec<bool>,
    /// The reward of the whole trajectory; NaN if it is missing and [`OnProblem::Keep`] lets it be.
    pub reward: f64,
    /// Rewards by position, if the file gives them; they sum to `reward`.
    pub token_rewards: Option<Vec<f64>>,
    /// Log-probabilities under the policy at sampling time.
    pub old_logprobs: Option<Vec<f64>>,
    /// Log-probabilities under the reference policy.
    pub ref_logprobs: Option<Vec<f64>>,
    /// Log-probabilities as the sampler itself reported them.
    pub sampler_logprobs: Option<Vec<f64>>,
    /// A value function's estimates.
    pub values: Option<Vec<f64>>,
    /// `[start, end)` spans of the response that hold the reasoning.
    pub reasoning: Option<Vec<(usize, usize)>>,
}

impl Trajectory {
    /// The number of sampled tokens.
    pub fn sampled(&self) -> usize {
        self.mask.iter().filter(|sampled| **sampled).count()
    }

    /// Tokens that a forward pass reads.
    pub fn forward_tokens(&self) -> usize {
        match &self.content {
            Content::Tokens { prompt_ids, response_ids } => prompt_ids.len() + response_ids.len(),
            Content::Steps { actions, .. } => actions.len(),
        }
    }
}

/// A prompt and its trajectories, each with a sampled token, in file order; at least two, unless
/// [`OnProblem::Keep`] lets one stand.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// The `group_id` of the file.
    pub id: String,
    /// The trajectories.
    pub trajectories: Vec<Trajectory>,
}

impl Group {
    /// Rows and sampled tokens.
    pub fn counts(&self) -> Counts {
        Counts {
            rows: self.trajectories.len(),
            tokens: self.trajectories.iter().map(Trajectory::sampled).sum(),
        }
    }

    /// The number of tokens, or steps, of the longest trajectory in a forward pass.
    pub fn longest(&self) -> usize {
        self.trajectories.iter().map(Trajectory::forward_tokens).max().unwrap_or(0)
    }

    /// The rewards in file order.
    pub fn rewards(&self) -> Vec<f64> {
        self.trajectories.iter().map(|trajectory| trajectory.reward).collect()
    }
}

/// The groups of one step of the file: one optimiser batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// The step, if the file names steps.
    pub step: Option<i64>,
    /// The groups, in order of first appearance.
    pub groups: Vec<Group>,
}

impl Batch {
    /// Rows and sampled tokens.
    pub fn counts(&self) -> Counts {
        self.groups.iter().map(Group::counts).fold(Counts::default(), |sum, counts| Counts {
            rows: sum.rows + counts.rows,
            tokens: sum.tokens + counts.tokens,
        })
    }

    /// All trajectories, group by group.
    pub fn trajectories(&self) -> impl Iterator<Item = &Trajectory> {
        self.groups.iter().flat_map(|group| &group.trajectories)
    }

    /// The same, to be filled in.
    pub fn trajectories_mut(&mut self) -> impl Iterator<Item = &mut Trajectory> {
        self.groups.iter_mut().flat_map(|group| &mut group.trajectories)
    }
}

/// A rollout file, read and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Rollouts {
    /// One batch a step, by ascending step.
    pub batches: Vec<Batch>,
    /// What was left out and what looks odd.
    pub report: ReadReport,
}

impl Rollouts {
    /// All trajectories of all batches.
    pub fn trajectories(&self) -> impl Iterator<Item = &Trajectory> {
        self.batches.iter().flat_map(Batch::trajectories)
    }

    /// The shape of the first observation; none of a language model's rollouts.
    pub fn observation_shape(&self) -> Option<Vec<i64>> {
        match &self.trajectories().next()?.content {
            Content::Tokens { .. } => None,
            Content::Steps { shape, .. } => Some(shape.clone()),
        }
    }
}

/// What a reader left out, and what it found odd.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ReadReport {
    /// Lines that hold a trajectory.
    pub trajectories: usize,
    /// Trajectories without a sampled token; they belong to no mean.
    pub without_sampled_token: usize,
    /// Trajectories dropped since their reward is missing.
    pub dropped_missing_reward: usize,
    /// Trajectories dropped since their group has no other.
    pub dropped_single: usize,
    /// Lines equal to an earlier one, without a `trajectory_id` that would tell them apart.
    pub repeated_lines: usize,
    /// Groups whose trajectories do not share their prompt.
    pub groups_of_unequal_prompts: usize,
}

impl ReadReport {
    /// What was left out or found odd, a sentence each.
    pub fn warnings(&self) -> Vec<String> {
        [
            (self.without_sampled_token, "trajectories without a sampled token were left out"),
            (self.dropped_missing_reward, "trajectories without a reward were dropped"),
            (self.dropped_single, "groups of one trajectory were dropped"),
            (
                self.repeated_lines,
                "lines repeat an earlier one, without a trajectory_id to tell them apart",
            ),
            (self.groups_of_unequal_prompts, "groups hold different prompts under one group_id"),
        ]
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect()
    }
}
