//! The entropies of the trajectories under the policy, for filters that rank by them: forward passes
//! alone.

use tch::Kind;

use super::{Observer, Study};
use crate::error::{Error, Result};
use crate::objective;
use crate::policy::{Policy, Problem};
use crate::rollout::Trajectory;

/// For every trajectory of a group, the sum of the entropies of its sampled tokens, in nats, and their
/// number.
pub(crate) type GroupEntropies = Vec<(f64, f64)>;

impl Study {
    /// The entropies of every group of every step of the plan; none if the observer asked to stop. A
    /// trajectory at a time, so that no padding and no policy that mixes rows can change them.
    ///
    /// # Errors
    /// If libtorch fails, an entropy is not finite, or a later checkpoint is unusable.
    pub(crate) fn entropies(
        mut self,
        observer: &mut dyn Observer,
    ) -> Result<Option<Vec<Vec<GroupEntropies>>>> {
        let _no_grad = tch::no_grad_guard();
        observer.start(self.rollouts.trajectories().count());
        let mut policy = self.first.take();
        let mut steps = Vec::with_capacity(self.plan.len());
        for index in 0..self.plan.len() {
            let (batch, checkpoint) = &self.plan[index];
            let mut is_new = index == 0;
            if policy.as_ref().is_none_or(|policy| policy.path() != checkpoint) {
                drop(policy.take());
                policy = Some(self.load(index)?);
                is_new = true;
            }
            let Some(policy) = &policy else { continue };
            if is_new {
                warn(policy, observer);
            }
            let mut groups = Vec::new();
            for group in &self.rollouts.batches[*batch].groups {
                let mut rows = Vec::with_capacity(group.trajectories.len());
                for trajectory in &group.trajectories {
                    let entropy = self.entropy(policy, trajectory)?;
                    if !entropy.is_finite() {
                        return Err(Error::NonFinite {
                            place: format!(
                                "group `{}`, line {} of the rollouts",
                                group.id, trajectory.line
                            ),
                            what: "the entropy of the policy".into(),
                            found: entropy,
                            remedy: "is this the checkpoint of these rollouts?".into(),
                        });
                    }
                    rows.push((entropy, trajectory.sampled() as f64));
                    if observer.trajectory().is_break() {
                        return Ok(None);
                    }
                }
                groups.push(rows);
            }
            steps.push(groups);
        }
        Ok(Some(steps))
    }

    /// The sum over the sampled tokens.
    fn entropy(&self, policy: &Policy, trajectory: &Trajectory) -> Result<f64> {
        let logits = policy.response_logits(trajectory)?;
        let entropy =
            objective::entropy(&objective::log_probs(&logits, self.config.policy.temperature));
        let mask = tch::Tensor::from_slice(&trajectory.mask).to_device(entropy.device());
        let sum = objective::masked(&entropy, &mask).sum(Kind::Double);
        Ok(sum.f_double_value(&[])?)
    }
}

fn warn(policy: &Policy, observer: &mut dyn Observer) {
    for problem in policy.warnings() {
        if let Problem::Warning(message) = problem {
            observer.warning(&format!("{}: {message}", policy.path().display()));
        }
    }
}
