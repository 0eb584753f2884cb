//! The main job: stored rollouts, a policy and a loss in; the split of every group's gradient out.

mod entropy;
mod prepare;
mod record;
mod step;

pub use prepare::PreparedBatch;
pub use record::SIGNIFICANT;
pub use record::{
    BatchRecord, BucketRecord, GroupRecord, ParameterRecord, PolicyRecord, RatioRecord, StudyReport,
};

use step::Step;

use std::ops::ControlFlow;
use std::path::PathBuf;

use tch::Device;

use crate::config::{Config, EngineName, OldLogprobs};
use crate::error::{Error, Result};
use crate::gradient::{BatchedEngine, Engine, PlainEngine};
use crate::objective::{AdvantageEstimator, Algorithm, KlEstimator, KlGradient};
use crate::policy::{ObservationDtype, Policy, PolicyOptions, Problem};
use crate::rollout::{self, Batch, Content, Rollouts, Trajectory};

/// Beyond this mean |log-ratio| the stored log-probabilities seem to come from another policy.
const FOREIGN_LOG_RATIO: f64 = 0.1;

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
    /// Whether gradients are taken; else forward passes of the policy are all that is asked for.
    takes_gradients: bool,
}

impl Study {
    /// Reads the rollouts and the first checkpoint, and checks all that can be checked before the
    /// first gradient.
    ///
    /// # Errors
    /// At the first thing that is wrong with the configuration, the rollouts or the policies.
    pub fn prepare(config: Config) -> Result<Self> {
        Self::prepare_for(config, true)
    }

    /// The same for forward passes alone: neither a reference policy nor trainable parameters are
    /// needed, and arrays that only a loss reads may be missing.
    pub(crate) fn prepare_for_scores(config: Config) -> Result<Self> {
        Self::prepare_for(config, false)
    }

    fn prepare_for(config: Config, takes_gradients: bool) -> Result<Self> {
        let config = config.resolve()?;
        let algorithm = config.algorithm()?;
        let path = config.rollouts_path()?;
        let device = config.device.resolve()?;
        let rollouts = rollout::read(&path, &config.read_options())?;
        let steps: Vec<Option<i64>> = rollouts.batches.iter().map(|batch| batch.step).collect();
        let checkpoints = config.checkpoints(&steps)?;
        // Rollouts without steps are one batch, whatever the number of checkpoints.
        let last = rollouts.batches.len() - 1;
        let plan: Vec<(usize, PathBuf)> = checkpoints
            .into_iter()
            .enumerate()
            .map(|(index, checkpoint)| (index.min(last), checkpoint))
            .collect();
        let mut options = config.policy_options(device)?;
        if let Some(Content::Steps { shape, .. }) =
            rollouts.trajectories().next().map(|trajectory| &trajectory.content)
        {
            options.observation_shape = Some(shape.clone());
        }
        let mut study = Self {
            config,
            algorithm,
            device,
            options,
            rollouts,
            plan,
            reference: None,
            first: None,
            warnings: Vec::new(),
            takes_gradients,
        };
        study.warnings.extend(study.rollouts.report.warnings());
        if takes_gradients {
            study.check_inputs(&path)?;
        }
        for (_, checkpoint) in &study.plan {
            if !checkpoint.exists() {
                return Err(Error::checkpoint(checkpoint, "no such file"));
            }
        }
        if let (Some(reference), true) = (&study.config.policy.reference, takes_gradients) {
            let options = PolicyOptions {
                // Any weights will do: no gradient is taken.
                trainable: PolicyOptions::default().trainable,
                ..study.options.clone()
            };
            study.reference = Some(Policy::load_without_gradient(reference, &options)?);
        }
        let first = study.load(0)?;
        // Steps that share the first checkpoint can be checked before anything is computed.
        for (batch, _) in study.plan.iter().skip(1).filter(|(_, path)| path == first.path()) {
            study.check_choices(&first, &study.rollouts.batches[*batch])?;
        }
        study.first = Some(first);
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
            self.warnings.push(
                "KL k1 with its own gradient ignores the reference policy: its derivative is 1 everywhere; use k2, k3 or gradient: k2".into(),
            );
        }
        Ok(())
    }

    /// Loads the checkpoint of a step, and checks the rollouts against it.
    fn load(&self, index: usize) -> Result<Policy> {
        let (batch, checkpoint) = &self.plan[index];
        let policy = if self.takes_gradients {
            Policy::load(checkpoint, &self.options)?
        } else {
            Policy::load_without_gradient(checkpoint, &self.options)?
        };
        self.check_choices(&policy, &self.rollouts.batches[*batch])?;
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

    /// Ids, actions and observations that the policy takes.
    fn check_choices(&self, policy: &Policy, batch: &Batch) -> Result<()> {
        batch.trajectories().try_for_each(|trajectory| {
            self.check_trajectory(policy.choices(), trajectory).map_err(|(field, problem)| {
                Error::RolloutLine {
                    path: self.config.rollouts.path.clone().unwrap_or_default(),
                    line: trajectory.line,
                    field,
                    problem,
                }
            })
        })
    }

    /// The field that the policy cannot take, and why.
    fn check_trajectory(
        &self,
        choices: i64,
        trajectory: &Trajectory,
    ) -> std::result::Result<(), (String, String)> {
        let below = |field: &str, ids: &[i64], of: &str| {
            let Some(index) = ids.iter().position(|id| *id >= choices) else { return Ok(()) };
            Err((
                format!("{field}[{index}]"),
                format!(
                    "expected a number below {choices}, the size of {of} of the policy, found {}",
                    ids[index]
                ),
            ))
        };
        match &trajectory.content {
            Content::Tokens { prompt_ids, response_ids } => {
                below("prompt_ids", prompt_ids, "the vocabulary")?;
                below("response_ids", response_ids, "the vocabulary")
            }
            Content::Steps { observations, shape, actions } => {
                let refuse = |problem: String| Err(("observations".to_owned(), problem));
                let expected = self.options.observation_shape.as_deref().unwrap_or_default();
                if shape != expected {
                    return refuse(format!(
                        "expected observations of shape {expected:?} as in the first line, found {shape:?}"
                    ));
                }
                if self.options.observation_dtype == ObservationDtype::Int64
                    && let Some(number) = observations.iter().find(|number| number.fract() != 0.0)
                {
                    return refuse(format!(
                        "expected integers, since policy.observation_dtype is int64, found {number}"
                    ));
                }
                below("actions", actions, "the actions")
            }
        }
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
        let mut policy = self.first.take();
        let mut filter = self.config.step_filter().marking();
        let mut report = StudyReport {
            read: self.rollouts.report.clone(),
            warnings: self.warnings.clone(),
            ..StudyReport::default()
        };
        for index in 0..self.plan.len() {
            let checkpoint = &self.plan[index].1;
            let mut is_new = index == 0;
            if policy.as_ref().is_none_or(|policy| policy.path() != checkpoint) {
                drop(policy.take());
                policy = Some(self.load(index)?);
                is_new = true;
            }
            let Some(policy) = &policy else { continue };
            if index == 0 {
                report.describe(policy, self.device);
            }
            let reference = self.reference.iter().filter(|_| index == 0);
            for policy in reference.chain(is_new.then_some(policy)) {
                for problem in policy.warnings() {
                    if let Problem::Warning(message) = problem {
                        let message = format!("{}: {message}", policy.path().display());
                        observer.warning(&message);
                        report.warnings.push(message);
                    }
                }
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

    fn engine(&self) -> Box<dyn Engine> {
        let decomposition = &self.config.decomposition;
        let plain =
            PlainEngine { by_parameter: decomposition.by_parameter, scores: decomposition.bound };
        let sketch = decomposition.sketch_dimensions;
        match decomposition.engine {
            EngineName::Loop => Box::new(plain),
            name => Box::new(BatchedEngine::new(
                plain,
                decomposition.token_budget,
                name != EngineName::Auto,
                decomposition.seed,
                (name == EngineName::Sketch).then_some(sketch),
            )),
        }
    }

    fn step(
        &self,
        policy: &Policy,
        index: usize,
        observer: &mut dyn Observer,
    ) -> Result<BatchRecord> {
        let step = Step::new(self, policy, index)?;
        let mut record = step.run(self.engine().as_mut(), observer)?;
        self.judge(&mut record, &self.rollouts.batches[self.plan[index].0]);
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
