//! The steps of a run: batches of the rollouts, each under a checkpoint.

use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::policy::Policy;
use crate::rollout::Rollouts;

/// The place of the batch and the checkpoint of every step.
///
/// # Errors
/// If no checkpoint is named, one does not exist, or their number does not fit the steps.
pub(crate) fn plan(config: &Config, rollouts: &Rollouts) -> Result<Vec<(usize, PathBuf)>> {
    let steps: Vec<Option<i64>> = rollouts.batches.iter().map(|batch| batch.step).collect();
    let checkpoints = config.checkpoints(&steps)?;
    if let Some(missing) = checkpoints.iter().find(|checkpoint| !checkpoint.exists()) {
        return Err(Error::checkpoint(missing, "no such file"));
    }
    // Rollouts without steps are one batch, whatever the number of checkpoints.
    let last = rollouts.batches.len() - 1;
    Ok(checkpoints.into_iter().enumerate().map(|(index, path)| (index.min(last), path)).collect())
}

/// Checks that a policy takes the rollouts, read from `path`, of every step of its checkpoint.
///
/// # Errors
/// At the first line that it does not take.
pub(crate) fn check_steps(
    policy: &Policy,
    plan: &[(usize, PathBuf)],
    rollouts: &Rollouts,
    path: &Path,
) -> Result<()> {
    let steps = plan.iter().filter(|(_, checkpoint)| checkpoint == policy.path());
    policy.check_rollouts(path, steps.flat_map(|(at, _)| rollouts.batches[*at].trajectories()))
}

/// The policy of one step after the other, one in memory at a time.
pub(crate) struct Policies {
    policy: Option<Policy>,
    is_new: bool,
}

impl Policies {
    /// Begins with the policy of the first step, if that is loaded.
    pub fn new(first: Option<Policy>) -> Self {
        Self { policy: first, is_new: true }
    }

    /// The policy of a checkpoint, loaded unless it is at hand, and what is odd about it, said once.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub fn of(
        &mut self,
        checkpoint: &Path,
        load: impl FnOnce() -> Result<Policy>,
    ) -> Result<(&Policy, Vec<String>)> {
        let policy = match self.policy.take() {
            Some(policy) if policy.path() == checkpoint => policy,
            other => {
                drop(other);
                self.is_new = true;
                load()?
            }
        };
        let is_new = std::mem::replace(&mut self.is_new, false);
        let warnings = if is_new { policy.warnings().to_vec() } else { Vec::new() };
        Ok((self.policy.insert(policy), warnings))
    }
}
