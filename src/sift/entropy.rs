//! The entropies of the trajectories under the policy, for filters that rank by them: forward passes
//! alone.

use std::path::PathBuf;

use tch::{Kind, Tensor};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::objective;
use crate::policy::{Policy, PolicyOptions};
use crate::rollout::{self, Rollouts, Trajectory};
use crate::study::{Observer, Policies, check_steps, plan};

/// For every trajectory of a group, the sum of the entropies of its sampled tokens, in nats, and their
/// number.
pub(super) type GroupEntropies = Vec<(f64, f64)>;

/// Rollouts and policies that are read and checked. Neither a reference policy nor trainable parameters
/// are needed, and arrays that only a loss reads may be missing.
pub(super) struct EntropyRun {
    path: PathBuf,
    rollouts: Rollouts,
    plan: Vec<(usize, PathBuf)>,
    options: PolicyOptions,
    temperature: f64,
    first: Option<Policy>,
}

impl EntropyRun {
    /// Reads the rollouts and the first checkpoint of a resolved configuration.
    ///
    /// # Errors
    /// At the first thing that is wrong with the rollouts or the policies.
    pub fn prepare(config: &Config) -> Result<Self> {
        let path = config.rollouts_path()?;
        let device = config.device.resolve()?;
        let rollouts = rollout::read(&path, &config.read_options())?;
        let mut run = Self {
            plan: plan(config, &rollouts)?,
            options: PolicyOptions {
                observation_shape: rollouts.observation_shape(),
                ..config.policy_options(device)?
            },
            path,
            rollouts,
            temperature: config.policy.temperature,
            first: None,
        };
        run.first = Some(run.load(0)?);
        Ok(run)
    }

    /// The rollouts.
    pub fn rollouts(&self) -> &Rollouts {
        &self.rollouts
    }

    fn load(&self, index: usize) -> Result<Policy> {
        let policy = Policy::load_without_gradient(&self.plan[index].1, &self.options)?;
        check_steps(&policy, &self.plan, &self.rollouts, &self.path)?;
        Ok(policy)
    }

    /// The entropies of every group of every step; none if the observer asked to stop. A trajectory at
    /// a time, so that no padding and no policy that mixes rows can change them.
    ///
    /// # Errors
    /// If libtorch fails, an entropy is not finite, or a later checkpoint is unusable.
    pub fn run(mut self, observer: &mut dyn Observer) -> Result<Option<Vec<GroupEntropies>>> {
        let _no_grad = tch::no_grad_guard();
        observer.start(self.rollouts.trajectories().count());
        let mut policies = Policies::new(self.first.take());
        let mut groups = Vec::new();
        for (index, (batch, checkpoint)) in self.plan.iter().enumerate() {
            let (policy, warnings) = policies.of(checkpoint, || self.load(index))?;
            warnings.iter().for_each(|warning| observer.warning(warning));
            for group in &self.rollouts.batches[*batch].groups {
                let mut rows = Vec::with_capacity(group.trajectories.len());
                for trajectory in &group.trajectories {
                    let entropy = self.entropy(policy, trajectory)?;
                    rows.push((entropy, trajectory.sampled() as f64));
                    if observer.trajectory().is_break() {
                        return Ok(None);
                    }
                }
                groups.push(rows);
            }
        }
        Ok(Some(groups))
    }

    /// The sum over the sampled tokens.
    fn entropy(&self, policy: &Policy, trajectory: &Trajectory) -> Result<f64> {
        let logits = policy.response_logits(trajectory)?;
        let entropy = objective::entropy(&objective::log_probs(&logits, self.temperature));
        let mask = Tensor::from_slice(&trajectory.mask).to_device(entropy.device());
        let sum = objective::masked(&entropy, &mask).sum(Kind::Double).f_double_value(&[])?;
        if sum.is_finite() {
            return Ok(sum);
        }
        Err(Error::NonFinite {
            place: format!("line {} of the rollouts", trajectory.line),
            what: "the entropy of the policy".into(),
            found: sum,
            remedy: "is this the checkpoint of these rollouts?".into(),
        })
    }
}
