//! Trajectories as lines of native JSONL, which [`read`](super::read) reads.

use serde::Serialize;

use super::{Content, Trajectory};

/// A line of a rollout file. Serialise it with `serde_json`, one a line.
#[derive(Debug, Serialize)]
pub struct RolloutLine<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<i64>,
    group_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    trajectory_id: Option<&'a str>,
    #[serde(flatten)]
    content: ContentFields<'a>,
    response_mask: Vec<u8>,
    reward: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_rewards: Option<&'a [f64]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    old_logprobs: Option<&'a [f64]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ref_logprobs: Option<&'a [f64]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sampler_logprobs: Option<&'a [f64]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<&'a [f64]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a [(usize, usize)]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<&'a str>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum ContentFields<'a> {
    Tokens { prompt_ids: &'a [i64], response_ids: &'a [i64] },
    Steps { observations: serde_json::Value, actions: &'a [i64] },
}

impl<'a> RolloutLine<'a> {
    /// The line of a trajectory of a group of a step.
    pub fn new(step: Option<i64>, group_id: &'a str, trajectory: &'a Trajectory) -> Self {
        Self {
            step,
            group_id,
            trajectory_id: trajectory.id.as_deref(),
            content: match &trajectory.content {
                Content::Tokens { prompt_ids, response_ids } => {
                    ContentFields::Tokens { prompt_ids, response_ids }
                }
                Content::Steps { observations, shape, actions } => ContentFields::Steps {
                    observations: nested(
                        observations,
                        &[&[actions.len() as i64], shape.as_slice()].concat(),
                    ),
                    actions,
                },
            },
            response_mask: trajectory.mask.iter().map(|sampled| u8::from(*sampled)).collect(),
            reward: trajectory.reward,
            token_rewards: trajectory.token_rewards.as_deref(),
            old_logprobs: trajectory.old_logprobs.as_deref(),
            ref_logprobs: trajectory.ref_logprobs.as_deref(),
            sampler_logprobs: trajectory.sampler_logprobs.as_deref(),
            values: trajectory.values.as_deref(),
            reasoning: trajectory.reasoning.as_deref(),
            prompt: None,
            response: None,
        }
    }

    /// Adds the texts, for people to read.
    pub fn with_text(mut self, prompt: &'a str, response: &'a str) -> Self {
        (self.prompt, self.response) = (Some(prompt), Some(response));
        self
    }
}

/// Numbers of a shape as lists of lists.
fn nested(numbers: &[f64], shape: &[i64]) -> serde_json::Value {
    let Some((count, inner)) = shape.split_first() else {
        return numbers.first().copied().into();
    };
    let width = inner.iter().product::<i64>().max(0) as usize;
    (0..*count as usize)
        .map(|index| nested(&numbers[index * width..(index + 1) * width], inner))
        .collect()
}
