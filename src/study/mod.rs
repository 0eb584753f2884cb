//! The main job: stored rollouts, a policy and a loss in; the split of every group's gradient out.

mod plan;
mod prepare;
mod record;
mod step;

pub(crate) use plan::{Policies, check_steps, plan};
pub use prepare::{PreparedBatch, SelectedRows};
pub use record::SIGNIFICANT;
pub use record::{
    BatchRecord, BucketRecord, GroupRecord, ParameterRecord, PolicyRecord, RatioRecord, StudyReport,
};
pub use step::Decomposer;

use std::ops::ControlFlow;
use std::path::PathBuf;

use tch::Device;

use crate::config::{Config, OldLogprobs};
use crate::error::{Error, Result};
use crate::objective::{AdvantageEstimator, Algorithm, KlEstimator, KlGradient};
use crate::policy::{Policy, PolicyOptions};
use crate::rollout::{self, Batch, Rollouts};

/// Beyond this mean |log-ratio| the stored log-probabilities seem to come from another policy.
pub(crate) const FOREIGN_LOG_RATIO: f64 = 0.1;

/// What a KL term of k1 with its own gradient is worth.
pub(crate) const K1_WARNING: &str = "KL k1 with its own gradient ignores the reference policy: its derivative is 1 everywhere; use k2, k3 or gradient: k2";

/// Looks on while a study runs.
pub trait Observer {
    /// So many trajectories will be studied.
    fn start(&mut self, _trajectories: usize) {}

    /// One more trajectory is done; may ask to stop.
    fn trajectory(&mut self) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// A step is done.
    ///
    /// # Errors
    /// Ends the study with the observer's own error.
    fn step(&mut self, _record: &BatchRecord) -> Result<()> {
        Ok(())
    }

    /// Something is odd.
    fn warning(&mut self, _message: &str) {}
}

/// Looks away.
#[derive(Debug, Default)]
pub struct Silent;

impl Observer for Silent {}

/// A study whose inputs are read and checked.
pub struct Study {
    config: Config,
    algorithm: Algorithm,
    device: Device,
    options: PolicyOptions,
    rollouts: Rollouts,
    /// The batch and the checkpoint of every step.
    plan: Vec<(usize, PathBuf)>,
    reference: Option<Policy>,
    /// The policy of the first step.
    first: Option<Policy>,
    warnings: Vec<String>,
}

impl Study {
    /// Reads the rollouts and the first checkpoint, and checks all that can be checked before the
    /// first gradient.
    ///
    /// # Errors
    /// At the first thing that is wrong with the configuration, the rollouts or the policies.
    pub fn prepare(config: Config) -> Result<Self> {
        let config = config.resolve()?;
        let algorithm = config.algorithm()?;
        let path = config.rollouts_path()?;
        let device = config.device.resolve()?;
        let rollouts = rollout::read(&path, &config.read_options())?;
        let plan = plan(&config, &rollouts)?;
        let options = PolicyOptions {
            observation_shape: rollouts.observation_shape(),
            ..config.policy_options(device)?
        };
        let mut study = Self {
            config,
            algorithm,
            device,
            options,
            plan,
            reference: None,
            first: None,
            warnings: rollouts.report.warnings(),
            rollouts,
        };
        study.check_inputs(&path)?;
        if let Some(reference) = &study.config.policy.reference {
            study.reference = Some(Policy::load_without_gradient(reference, &study.options)?);
        }
        study.first = Some(study.load(0)?);
        Ok(study)
    }

    /// The configuration with every default filled in.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The rollouts.
    pub fn rollouts(&self) -> &Rollouts {
        &self.rollouts
    }

    fn check_inputs(&mut self, path: &std::path::Path) -> Result<()> {
        let first = self.rollouts.trajectories().next();
        let lacks = |field: &str, problem: &str| Error::Rollouts {
            path: path.to_path_buf(),
            problem: format!("field `{field}`: {problem}"),
        };
        let Some(first) = first else { return Ok(()) };
        if self.algorithm.advantage == AdvantageEstimator::Gae && first.values.is_none() {
            return Err(lacks(
                "values",
                "expected a value estimate for every position, since the advantage is gae, found none",
            ));
        }
        if self.algorithm.kl.coef > 0.0
            && first.ref_logprobs.is_none()
            && self.config.policy.reference.is_none()
        {
            return Err(lacks(
                "ref_logprobs",
                "expected log-probabilities of a reference policy, since algorithm.kl.coef is above 0, found none; give them, or a checkpoint as policy.reference, or set algorithm.kl.coef: 0",
            ));
        }
        if self.algorithm.importance.is_some() && first.sampler_logprobs.is_none() {
            return Err(lacks(
                "sampler_logprobs",
                "expected the sampler's own log-probabilities, since algorithm.importance is set, found none",
            ));
        }
        if self.algorithm.kl.estimator == KlEstimator::K1
            && self.algorithm.kl.gradient == KlGradient::Own
            && self.algorithm.kl_loss_coef() > 0.0
        {
            self.warnings.push(K1_WARNING.into());
        }
        Ok(())
    }

    /// Loads the checkpoint of a step, and checks the rollouts of its steps against it.
    fn load(&self, index: usize) -> Result<Policy> {
        let policy = Policy::load(&self.plan[index].1, &self.options)?;
        check_steps(&policy, &self.plan, &self.rollouts, &self.config.rollouts_path()?)?;
        if let Some(reference) = &self.reference
            && reference.choices() != policy.choices()
        {
            return Err(Error::checkpoint(
                reference.path(),
                format!(
                    "expected {} logits as the policy has, found {}",
                    policy.choices(),
                    reference.choices()
                ),
            ));
        }
        Ok(policy)
    }

    /// Splits the gradients, step by step. Ends early, with what is finished, if the observer asks.
    ///
    /// # Errors
    /// If libtorch fails, a loss or a gradient is not finite, or a later checkpoint is unusable.
    pub fn run(mut self, observer: &mut dyn Observer) -> Result<StudyReport> {
        let trajectories =
            self.plan.iter().map(|(batch, _)| self.rollouts.batches[*batch].counts().rows).sum();
        observer.start(trajectories);
        for warning in &self.warnings {
            observer.warning(warning);
        }
        let mut policies = Policies::new(self.first.take());
        let mut filter = self.config.filter.step_filter().marking();
        let mut report = StudyReport {
            read: self.rollouts.report.clone(),
            warnings: self.warnings.clone(),
            ..StudyReport::default()
        };
        for index in 0..self.plan.len() {
            let checkpoint = &self.plan[index].1;
            let (policy, mut odd) = policies.of(checkpoint, || self.load(index))?;
            if index == 0 {
                report.policy = PolicyRecord::new(policy, self.device);
                odd.extend(self.reference.iter().flat_map(Policy::warnings).cloned());
            }
            for message in odd {
                observer.warning(&message);
                report.warnings.push(message);
            }
            let mut record = self.step(policy, index, observer)?;
            record.mark_kept(&mut filter)?;
            let finished = !record.partial;
            for warning in &record.warnings {
                observer.warning(warning);
            }
            if !record.groups.is_empty() {
                observer.step(&record)?;
                report.steps.push(record);
            }
            if !finished {
                report.partial = true;
                break;
            }
        }
        Ok(report)
    }

    fn decomposer(&self) -> Decomposer<'_> {
        Decomposer {
            config: &self.config,
            algorithm: &self.algorithm,
            reference: self.reference.as_ref(),
        }
    }

    fn step(
        &self,
        policy: &Policy,
        index: usize,
        observer: &mut dyn Observer,
    ) -> Result<BatchRecord> {
        let batch = &self.rollouts.batches[self.plan[index].0];
        let decomposer = self.decomposer();
        let prepared = decomposer.prepare(policy, batch)?;
        // Several checkpoints on rollouts without steps are told apart by their place in the list.
        let step = batch.step.or((self.plan.len() > 1).then_some(index as i64));
        let mut engine = decomposer.engine();
        let mut record =
            decomposer.step(policy, batch, &prepared, step, engine.as_mut(), observer)?;
        self.judge(&mut record, batch);
        Ok(record)
    }

    /// Warnings that only the numbers can give.
    fn judge(&self, record: &mut BatchRecord, batch: &Batch) {
        let from_file = batch.trajectories().next().is_some_and(|row| row.old_logprobs.is_some())
            && self.config.rollouts.old_logprobs == OldLogprobs::File;
        let mean = record.ratio.mean_abs_log_ratio;
        if from_file && mean > FOREIGN_LOG_RATIO {
            record.warnings.push(format!(
                "step {}: old_logprobs differ from this policy's by {mean:.3} on average: they come from another policy, temperature or tokenizer; rollouts.old_logprobs: recompute takes the checkpoint for the sampler",
                record.step
            ));
        }
    }
}
