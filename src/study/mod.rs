//! The main job: stored rollouts, a policy and a loss in; the split of every group's gradient out.

mod entropy;
mod prepare;
mod record;

pub use prepare::PreparedBatch;
pub use record::SIGNIFICANT;
pub use record::{
    BatchRecord, BucketRecord, GroupRecord, ParameterRecord, RatioRecord, StudyReport,
};

use std::ops::ControlFlow;
use std::path::PathBuf;

use tch::Device;

use crate::config::{Config, EngineName, OldLogprobs};
use crate::error::{Error, Result};
use crate::gradient::{
    BatchedEngine, Coefficients, Coherence, ComponentSums, Debias, Engine, PlainEngine, RowStats,
    Scorer, split,
};
use crate::objective::{
    AdvantageEstimator, Aggregation, Algorithm, KlEstimator, KlGradient, KlPlacement,
};
use crate::policy::{ObservationDtype, Policy, PolicyOptions, Problem};
use crate::rollout::{self, Batch, Content, Rollouts, Trajectory};

/// Beyond this mean |log-ratio| the stored log-probabilities seem to come from another policy.
const FOREIGN_LOG_RATIO: f64 = 0.1;
/// `debias` holds at ratio 1; log-probabilities of another program differ by rounding.
const ON_POLICY_LOG_RATIO: f64 = 0.02;

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

    fn coefficients(&self) -> Coefficients {
        Coefficients { kl: self.algorithm.kl_loss_coef(), entropy: self.algorithm.entropy_coef }
    }

    fn engine(&self) -> Box<dyn Engine> {
        let decomposition = &self.config.decomposition;
        let plain =
            PlainEngine { by_parameter: decomposition.by_parameter, scores: decomposition.bound };
        match decomposition.engine {
            EngineName::Loop => Box::new(plain),
            name => Box::new(BatchedEngine::new(
                plain,
                decomposition.token_budget,
                name == EngineName::Batched,
                decomposition.seed,
            )),
        }
    }

    fn debias(&self) -> Option<Debias> {
        self.config.decomposition.debias.then_some(Debias {
            leave_one_out: self.algorithm.advantage == AdvantageEstimator::Rloo,
            norm_length: match self.algorithm.aggregation {
                Aggregation::SeqMeanTokenSumNorm => self.algorithm.norm_length.unwrap_or(1.0),
                _ => 1.0,
            },
        })
    }

    fn step(
        &self,
        policy: &Policy,
        index: usize,
        observer: &mut dyn Observer,
    ) -> Result<BatchRecord> {
        let batch = &self.rollouts.batches[self.plan[index].0];
        let decomposition = &self.config.decomposition;
        let mut engine = self.engine();
        let scorer = Scorer {
            policy,
            reference: self.reference.as_ref(),
            algorithm: &self.algorithm,
            temperature: self.config.policy.temperature,
            recompute_old: self.config.rollouts.old_logprobs == OldLogprobs::Recompute,
        };
        let prepared = match self.algorithm.kl_placement {
            KlPlacement::Reward if self.algorithm.kl.coef > 0.0 => {
                PreparedBatch::with_kl_in_reward(&scorer, batch)?
            }
            _ => PreparedBatch::new(&self.algorithm, batch)?,
        };
        let coefficients = self.coefficients();
        // Several checkpoints on rollouts without steps are told apart by their place in the list.
        let named_step = batch.step.or((self.plan.len() > 1).then_some(index as i64));
        let step = named_step.unwrap_or(0);
        let debias = self.debias();
        let buckets = self.config.buckets();
        let assigned = buckets.as_ref().map_or_else(
            || vec![0; batch.groups.len()],
            |buckets| buckets.assign(&prepared.reward_variances),
        );
        // Bucket after bucket, so that one bucket's sums are held at a time.
        let mut order: Vec<usize> = (0..batch.groups.len()).collect();
        order.sort_by_key(|group| assigned[*group]);

        let mut sums = ComponentSums::default();
        let mut task_coherence = Coherence::default();
        let mut reg_coherence = Coherence::default();
        let mut stats = RowStats::default();
        let mut records: Vec<(usize, GroupRecord)> = Vec::new();
        let mut bucket_records = Vec::new();
        let mut partial = false;
        for bucket in order.chunk_by(|a, b| assigned[*a] == assigned[*b]) {
            let mut bucket_sums = ComponentSums::default();
            // Without buckets the batch is the one bucket, and no second sum is held.
            let target = if buckets.is_some() { &mut bucket_sums } else { &mut sums };
            let first = records.len();
            for group in bucket.iter().copied() {
                let input = prepared.group_input(&self.algorithm, batch, group)?;
                let result = engine
                    .group(&scorer, &input, &mut || observer.trajectory())
                    .map_err(|error| error.in_group(&input.group.id))?;
                let Some(result) = result else {
                    partial = true;
                    break;
                };
                let seed = decomposition.seed.wrapping_add(group as u64);
                let split_of = |products: &_| split(products, coefficients, debias, seed);
                let whole = split_of(&result.products);
                let share = prepared.shares[group];
                target.add(share, &result.gradients);
                if let Some(task) = &result.gradients.task {
                    task_coherence.add(task, whole.task_norm);
                }
                reg_coherence.add_regularizer(&result.gradients, coefficients, whole.reg_norm);
                let mut group_stats = RowStats::default();
                result.stats.iter().for_each(|row| group_stats.merge(row));
                stats.merge(&group_stats);
                if debias.is_some() {
                    check_on_policy(&group_stats, &input.group.id)?;
                }
                let mut record = GroupRecord::new(
                    named_step,
                    &prepared,
                    group,
                    input.group,
                    &whole,
                    &result.stats,
                );
                if decomposition.bound {
                    record.set_bound(&self.algorithm, &prepared, group, &result);
                }
                if decomposition.by_parameter {
                    record.by_parameter = Some(
                        policy
                            .trainable()
                            .zip(&result.by_parameter)
                            .map(|(parameter, products)| ParameterRecord {
                                name: parameter.name().into(),
                                split: split_of(products),
                            })
                            .collect(),
                    );
                }
                records.push((group, record));
            }
            let done: Vec<&GroupRecord> =
                records[first..].iter().map(|(_, record)| record).collect();
            if let (Some(_), false) = (&buckets, done.is_empty()) {
                let share: f64 =
                    records[first..].iter().map(|(group, _)| prepared.shares[*group]).sum();
                let norms = bucket_sums.norms(coefficients, share)?;
                bucket_records.push(BucketRecord::new(assigned[bucket[0]], norms, &done));
                sums.merge(bucket_sums);
            }
            if partial {
                break;
            }
        }
        records.sort_by_key(|(group, _)| *group);
        let shares: Vec<f64> = records.iter().map(|(group, _)| prepared.shares[*group]).collect();
        let mut record = BatchRecord::new(
            step,
            records.into_iter().map(|(_, record)| record).collect(),
            &shares,
            if shares.is_empty() || partial { None } else { Some(sums.norms(coefficients, 1.0)?) },
            &stats,
        );
        record.buckets = bucket_records;
        record.task_coherence = task_coherence.mean_cosine()?;
        record.reg_coherence = reg_coherence.mean_cosine()?;
        record.partial = partial;
        if partial {
            record.buckets.clear();
            record.warnings.push(format!(
                "step {step} was interrupted: numbers of the batch as a whole are left out, and the groups are those of the smallest reward variances first"
            ));
        }
        record.warnings.extend(engine.notes());
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

/// The bias that `debias` takes out is known at ratio 1.
fn check_on_policy(stats: &RowStats, group: &str) -> Result<()> {
    if stats.log_ratio_max <= ON_POLICY_LOG_RATIO {
        return Ok(());
    }
    Err(Error::config(
        "decomposition.debias",
        format!(
            "expected rollouts of this very policy (ratio 1), found a log-ratio of {:.3} in group `{group}`; with rollouts.old_logprobs: recompute the checkpoint is taken for the sampler",
            stats.log_ratio_max
        ),
    ))
}
