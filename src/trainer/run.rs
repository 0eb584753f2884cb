//! The loop.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use super::checkpoint::CheckpointStore;
use super::prepare::Parts;
use super::record::{ReasoningRecord, SplitRecord, StepRecord, Times, TrainReport, UpdateRecord};
use super::score;
use super::source::Outcome;
use super::state::State;
use super::update::{Learners, UpdatePlan};
use crate::config::{Config, TrainSections};
use crate::diagnostics::{self, Examined, History};
use crate::env::Tags;
use crate::error::Result;
use crate::filter::{KeptRecord, Need, Scores};
use crate::objective::Algorithm;
use crate::policy::Policy;
use crate::rollout::{Batch, Group};
use crate::study::{self, BatchRecord, Decomposer, PolicyRecord, PreparedBatch};

/// Looks on while a policy is trained.
pub trait Observer {
    /// The run begins at this step, and is to make so many in all.
    fn start(&mut self, _step: u64, _steps: u64) {}

    /// A step has sampled; the trajectories are as the update will see them, and there is an outcome for
    /// each, in the order of the batch.
    ///
    /// # Errors
    /// Ends the run with the observer's own error.
    fn sampled(&mut self, _batch: &Batch, _outcomes: &[Outcome]) -> Result<()> {
        Ok(())
    }

    /// The gradients of a step's batch were split.
    ///
    /// # Errors
    /// As above.
    fn decomposed(&mut self, _record: &BatchRecord) -> Result<()> {
        Ok(())
    }

    /// A step's batch was diagnosed; `history` ends with it.
    ///
    /// # Errors
    /// As above.
    fn diagnosed(&mut self, _record: &diagnostics::StepRecord, _history: &History) -> Result<()> {
        Ok(())
    }

    /// A step is done; may ask to stop.
    ///
    /// # Errors
    /// As above.
    fn step(&mut self, _record: &StepRecord) -> Result<ControlFlow<()>> {
        Ok(ControlFlow::Continue(()))
    }

    /// A checkpoint is in its place.
    fn saved(&mut self, _path: &Path) {}

    /// Something is odd.
    fn warning(&mut self, _message: &str) {}
}

/// Looks away.
#[derive(Debug, Default)]
pub struct Silent;

impl Observer for Silent {}

/// A training run: everything that goes from step to step.
pub struct Trainer {
    pub(super) config: Config,
    pub(super) sections: TrainSections,
    pub(super) algorithm: Algorithm,
    pub(super) parts: Parts,
    pub(super) state: State,
    pub(super) store: Option<CheckpointStore>,
    pub(super) report: TrainReport,
}

impl Trainer {
    /// The configuration with every default filled in.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The policy in training.
    pub fn policy(&self) -> &Policy {
        &self.parts.policy
    }

    /// Steps made.
    pub fn steps(&self) -> u64 {
        self.state.step
    }

    /// Why there is no step to make, if there is none.
    pub fn end(&self) -> Option<String> {
        if let Some(reason) = &self.state.stopped {
            return Some(format!("the run has ended early: {reason}"));
        }
        let steps = self.sections.training.steps;
        (self.state.step >= steps)
            .then(|| format!("the run has made {} of {steps} steps", self.state.step))
    }

    /// Trains until the last step, a rule of `early_stop`, or the observer ends it.
    ///
    /// # Errors
    /// If the policy or the environment fails, a loss is not finite, too many updates in a row are not,
    /// or a checkpoint cannot be written. Earlier checkpoints are then untouched.
    pub fn run(mut self, observer: &mut dyn Observer) -> Result<TrainReport> {
        observer.start(self.state.step, self.sections.training.steps);
        self.report.policy = PolicyRecord::new(&self.parts.policy, self.parts.policy.device());
        self.report.first_step = self.state.step;
        for warning in std::mem::take(&mut self.report.warnings) {
            self.warn(observer, warning);
        }
        while self.end().is_none() {
            let started = Instant::now();
            let mut record = self.step(observer)?;
            self.state.step += 1;
            self.refresh_reference()?;
            self.judge(&record);
            record.validation = self.validate(&mut record.time)?;
            self.judge_validation(&record);
            record.time.total = started.elapsed().as_secs_f64();
            self.report.time.add(&record.time);
            // Before the checkpoint: a step that a run does not make again must not be missing in the log.
            let flow = observer.step(&record)?;
            if flow.is_break() || self.is_checkpoint_due() || self.is_best(&record)? {
                self.save(self.score(&record), observer)?;
            }
            self.report.last = Some(record);
            if flow.is_break() {
                self.report.partial = self.state.step < self.sections.training.steps;
                break;
            }
        }
        Ok(self.finish())
    }

    /// A step: sample, score, decompose, filter, diagnose, update.
    fn step(&mut self, observer: &mut dyn Observer) -> Result<StepRecord> {
        let mut time = Times::default();
        let (sampled, mut groups) = self.sample(&mut time)?;
        for warning in self.parts.source.warnings() {
            self.warn(observer, warning);
        }
        if self.is_held_back(&sampled) {
            // The next step, whose policy is the same, sees them, and this one does not.
            self.state.carried = std::mem::take(&mut groups);
            self.state.carried_under = Some(self.sampled_under());
        }
        let (groups, outcomes): (Vec<Group>, Vec<Vec<Outcome>>) =
            groups.into_iter().map(|group| (group.group, group.outcomes)).unzip();
        let mut batch = Batch { step: Some(self.state.step as i64), groups };
        time.sampled_tokens = sampled.tokens;

        let mut record = StepRecord { step: self.state.step, ..StepRecord::default() };
        if !batch.groups.is_empty() {
            let scoring = Instant::now();
            self.fill(&mut batch)?;
            observer.sampled(&batch, &outcomes.concat())?;
            let prepared = self.decomposer().prepare(&self.parts.policy, &batch)?;
            time.scoring += scoring.elapsed().as_secs_f64();
            let mut decomposed = self.decompose(&batch, &prepared, &mut time)?;
            let scoring = Instant::now();
            let chosen = self.filter(&batch, decomposed.as_mut(), &mut record.kept)?;
            time.scoring += scoring.elapsed().as_secs_f64();
            if let Some(decomposed) = &decomposed {
                for warning in decomposed.warnings.clone() {
                    self.warn(observer, warning);
                }
                observer.decomposed(decomposed)?;
                record.split = Some(SplitRecord::new(decomposed));
            }
            record.reasoning = self.diagnose(&batch, &mut time, observer)?;
            if !chosen.is_empty() {
                let factor = record.kept.loss_factor;
                record.update = Some(self.update(&batch, &prepared, &chosen, factor, &mut time)?);
            }
        }
        self.stop_if_short(&sampled);
        record.sampled = sampled;
        record.time = time;
        Ok(record)
    }

    /// Puts reference log-probabilities and values into the trajectories.
    fn fill(&self, batch: &mut Batch) -> Result<()> {
        let budget = self.sections.training.token_budget;
        if let Some(reference) = &self.parts.reference {
            let temperature = self.config.policy.temperature;
            score::fill_reference(reference, batch.trajectories_mut(), temperature, budget)?;
        }
        if let Some(critic) = &self.parts.critic {
            critic.fill(batch.trajectories_mut())?;
        }
        Ok(())
    }

    /// What the reference policy gives is in the trajectories.
    fn decomposer(&self) -> Decomposer<'_> {
        Decomposer { config: &self.config, algorithm: &self.algorithm, reference: None }
    }

    fn decompose(
        &mut self,
        batch: &Batch,
        prepared: &PreparedBatch,
        time: &mut Times,
    ) -> Result<Option<BatchRecord>> {
        if !is_due(self.state.step, self.config.decomposition.every) {
            return Ok(None);
        }
        let started = Instant::now();
        let decomposer =
            Decomposer { config: &self.config, algorithm: &self.algorithm, reference: None };
        let engine = self.parts.engine.get_or_insert_with(|| decomposer.engine());
        let record = decomposer.step(
            &self.parts.policy,
            batch,
            prepared,
            Some(self.state.step as i64),
            engine.as_mut(),
            &mut study::Silent,
        )?;
        time.decomposition = started.elapsed().as_secs_f64();
        Ok(Some(record))
    }

    /// The groups that are learned from.
    fn filter(
        &mut self,
        batch: &Batch,
        decomposed: Option<&mut BatchRecord>,
        kept: &mut KeptRecord,
    ) -> Result<Vec<usize>> {
        let scores: Vec<Scores> = match &decomposed {
            Some(record) => record.groups.iter().map(|group| group.scores).collect(),
            None if self.parts.filter.score.need() == Need::Forward => score::with_entropies(
                &self.parts.policy,
                batch,
                self.config.policy.temperature,
                self.sections.training.token_budget,
            )?,
            None => batch.groups.iter().map(score::of_rewards).collect(),
        };
        self.parts.filter.state = self.state.filter;
        let (verdicts, record) = self.parts.filter.judge(&scores)?;
        self.state.filter = self.parts.filter.state;
        if let Some(decomposed) = decomposed {
            decomposed.mark(&verdicts, record);
        }
        *kept = record;
        Ok((0..verdicts.len()).filter(|group| verdicts[*group].kept).collect())
    }

    fn diagnose(
        &mut self,
        batch: &Batch,
        time: &mut Times,
        observer: &mut dyn Observer,
    ) -> Result<Option<ReasoningRecord>> {
        if !is_due(self.state.step, self.config.diagnostics.every) {
            return Ok(None);
        }
        let Some(examiner) = &mut self.parts.examiner else { return Ok(None) };
        let started = Instant::now();
        // Where answers are asked to hold reasoning, a step in which none does has lost its form.
        let asks = (self.sections.environment.as_ref())
            .is_some_and(|environment| environment.rules().tags == Tags::ThinkAnswer);
        let names_reasoning =
            asks || batch.trajectories().any(|trajectory| trajectory.reasoning.is_some());
        let step = self.state.step as i64;
        let examined = Examined { batch, step, names_reasoning };
        examiner.cost(examined)?;
        let record = examiner.step(&self.parts.policy, examined, &mut diagnostics::Silent)?;
        let short = record.as_ref().map(ReasoningRecord::new);
        if let Some(record) = record {
            self.state.history = Some(examiner.history().clone());
            observer.diagnosed(&record, examiner.history())?;
            for warning in record.warnings {
                self.warn(observer, format!("step {step}: {warning}"));
            }
        }
        time.diagnosis = started.elapsed().as_secs_f64();
        Ok(short)
    }

    fn update(
        &mut self,
        batch: &Batch,
        prepared: &PreparedBatch,
        chosen: &[usize],
        factor: f64,
        time: &mut Times,
    ) -> Result<UpdateRecord> {
        let started = Instant::now();
        let plan = UpdatePlan {
            epochs: self.sections.training.epochs,
            mini_batch_size: self.config.filter.mini_batch_size,
            token_budget: self.sections.training.token_budget,
            factor,
            seed: self.sections.training.seed,
            step: self.state.step,
            critic_alone: self.parts.critic.is_some()
                && self.state.step < self.sections.critic.warmup_steps,
        };
        let Parts { policy, optimizer, critic, .. } = &mut self.parts;
        let decomposer =
            Decomposer { config: &self.config, algorithm: &self.algorithm, reference: None };
        let scorer = decomposer.scorer(policy);
        let learners = Learners { optimizer, critic: critic.as_mut() };
        let mut record = plan.run(&scorer, batch, prepared, chosen, learners)?;
        record.explained_variance = score::explained_variance(batch, prepared);
        time.update = started.elapsed().as_secs_f64();
        time.updated_tokens = record.tokens;
        Ok(record)
    }

    fn refresh_reference(&mut self) -> Result<()> {
        let due = (self.sections.training.refresh_reference)
            .is_some_and(|every| self.state.step.is_multiple_of(every));
        let Some(reference) = self.parts.reference.as_mut().filter(|_| due) else { return Ok(()) };
        reference.copy_weights(&self.parts.policy)?;
        self.state.refreshed = true;
        Ok(())
    }

    /// The rules of an early stop.
    fn judge(&mut self, record: &StepRecord) {
        let rules = self.sections.early_stop;
        let is_held_back = self.is_held_back(&record.sampled);
        let state = &mut self.state;
        if let Some(rule) = rules.variance_collapse
            && rule.observe(&mut state.variance_collapse, record.sampled.reward_variance_mean)
        {
            state.stopped.get_or_insert(format!(
                "the mean reward variance was below a tenth of that of the first steps for {} steps",
                rule.steps
            ));
        }
        // A step that leaves its groups to the next has filtered nothing.
        if let Some(rule) = rules.empty_filters
            && !is_held_back
            && rule.observe(&mut state.empty_filters, record.kept.groups)
        {
            state.stopped.get_or_insert(format!("{} filters in a row kept no group", rule.filters));
        }
    }

    fn judge_validation(&mut self, record: &StepRecord) {
        let state = &mut self.state;
        if let (Some(rule), Some(validation)) =
            (self.sections.early_stop.validation, &record.validation)
            && rule.observe(&mut state.validation_floor, validation.reward_mean)
        {
            state.stopped.get_or_insert(format!(
                "{} validations in a row had a mean reward below {}",
                rule.validations, rule.floor
            ));
        }
    }

    pub(super) fn warn(&mut self, observer: &mut dyn Observer, warning: String) {
        // Said once: a run has many steps.
        if !self.report.warnings.contains(&warning) {
            observer.warning(&warning);
            self.report.warnings.push(warning);
        }
    }

    fn finish(mut self) -> TrainReport {
        self.report.stopped = self.state.stopped;
        self.report.steps = self.state.step;
        self.report.updates = self.parts.optimizer.updates();
        self.report.failed_updates = self.parts.optimizer.failed().total;
        self.report.validation = self.state.validation;
        self.report
    }
}

/// Every so many steps, the first among them; never if that is 0.
fn is_due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
