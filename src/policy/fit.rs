//! Whether a policy takes what rollouts hold.

use std::path::Path;

use super::{ObservationDtype, Policy};
use crate::error::{Error, Result};
use crate::rollout::{Content, Trajectory};

impl Policy {
    /// Checks that ids and actions are below the number of the policy's logits, and that observations
    /// are of the shape and the dtype that it was loaded for.
    ///
    /// # Errors
    /// At the first line of the rollout file `path` that it does not take.
    pub fn check_rollouts<'a>(
        &self,
        path: &Path,
        trajectories: impl IntoIterator<Item = &'a Trajectory>,
    ) -> Result<()> {
        trajectories.into_iter().try_for_each(|trajectory| {
            self.check_trajectory(trajectory).map_err(|(field, problem)| Error::RolloutLine {
                path: path.to_path_buf(),
                line: trajectory.line,
                field,
                problem,
            })
        })
    }

    /// The field that the policy cannot take, and why.
    fn check_trajectory(
        &self,
        trajectory: &Trajectory,
    ) -> std::result::Result<(), (String, String)> {
        match &trajectory.content {
            Content::Tokens { prompt_ids, response_ids } => {
                self.check_choices("prompt_ids", prompt_ids, "the vocabulary")?;
                self.check_choices("response_ids", response_ids, "the vocabulary")
            }
            Content::Steps { observations, shape, actions } => {
                self.check_observations(observations, shape)
                    .map_err(|problem| ("observations".to_owned(), problem))?;
                self.check_choices("actions", actions, "the actions")
            }
        }
    }

    fn check_choices(
        &self,
        field: &str,
        ids: &[i64],
        of: &str,
    ) -> std::result::Result<(), (String, String)> {
        let choices = self.choices;
        let Some(index) = ids.iter().position(|id| *id >= choices) else { return Ok(()) };
        Err((
            format!("{field}[{index}]"),
            format!(
                "expected a number below {choices}, the size of {of} of the policy, found {}",
                ids[index]
            ),
        ))
    }

    fn check_observations(
        &self,
        observations: &[f64],
        shape: &[i64],
    ) -> std::result::Result<(), String> {
        let expected = self.options.observation_shape.as_deref().unwrap_or_default();
        if shape != expected {
            return Err(format!(
                "expected observations of shape {expected:?} as in the first line, found {shape:?}"
            ));
        }
        let is_int = self.options.observation_dtype == ObservationDtype::Int64;
        match observations.iter().find(|number| number.fract() != 0.0) {
            Some(number) if is_int => Err(format!(
                "expected integers, since policy.observation_dtype is int64, found {number}"
            )),
            _ => Ok(()),
        }
    }
}
