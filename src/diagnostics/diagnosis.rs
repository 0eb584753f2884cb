//! The whole way: stored rollouts and a policy in, the state of its reasoning out, step by step.

use std::path::PathBuf;

use tch::Device;

use super::cross::Cost;
use super::examiner::{Examined, Examiner, Observer};
use super::history::History;
use super::prepare::{early_warnings, numbers};
use super::record::DiagnosisReport;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::policy::{Policy, PolicyKind, PolicyOptions};
use crate::rollout::{self, OnProblem, ReadOptions, Rollouts};
use crate::study::{Policies, PolicyRecord, check_steps, plan};

/// A diagnosis whose inputs are read and checked.
pub struct Diagnosis {
    config: Config,
    device: Device,
    options: PolicyOptions,
    rollouts: Rollouts,
    /// Whether any line of the file lists reasoning spans.
    names_reasoning: bool,
    path: PathBuf,
    /// The batch and the checkpoint of every step.
    plan: Vec<(usize, PathBuf)>,
    /// Their numbers.
    steps: Vec<i64>,
    cost: Cost,
    examiner: Examiner,
    first: Option<Policy>,
    warnings: Vec<String>,
}

impl Diagnosis {
    /// Reads the rollouts, the state and the first checkpoint, and checks all that can be checked before
    /// anything is scored, the cost too.
    ///
    /// # Errors
    /// At the first thing that is wrong with the configuration, the rollouts, the state or the policy,
    /// and if a step would score more than `diagnostics.max_sequences`.
    pub fn prepare(config: Config) -> Result<Self> {
        let config = config.resolve()?;
        if config.policy.kind != PolicyKind::CausalLm {
            return Err(Error::config(
                "policy.kind",
                "expected causal_lm: a step policy writes no reasoning that could be scored under other contexts",
            ));
        }
        let path = config.rollouts_path()?;
        let device = config.device.resolve()?;
        // Neither baselines nor rewards are needed here.
        let read = ReadOptions {
            single: OnProblem::Keep,
            missing_reward: OnProblem::Keep,
            ..config.read_options()
        };
        let rollouts = rollout::read(&path, &read)?;
        let names_reasoning = rollouts.trajectories().any(|row| row.reasoning.is_some());
        let examiner = Examiner::new(&config.diagnostics, config.policy.temperature)?;
        let plan = plan(&config, &rollouts)?;
        let steps = numbers(&plan, &rollouts, examiner.history());
        let mut diagnosis = Self {
            names_reasoning,
            warnings: early_warnings(&rollouts, examiner.history(), &steps),
            options: config.policy_options(device)?,
            config,
            device,
            rollouts,
            path,
            plan,
            steps,
            cost: Cost::default(),
            examiner,
            first: None,
        };
        diagnosis.cost = diagnosis.total_cost()?;
        diagnosis.first = Some(diagnosis.load(0)?);
        Ok(diagnosis)
    }

    /// The configuration with every default filled in.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What is going to be scored, over all steps.
    pub fn cost(&self) -> &Cost {
        &self.cost
    }

    fn batch(&self, index: usize) -> Examined<'_> {
        Examined {
            batch: &self.rollouts.batches[self.plan[index].0],
            step: self.steps[index],
            names_reasoning: self.names_reasoning,
        }
    }

    fn total_cost(&self) -> Result<Cost> {
        let mut total = Cost::default();
        for index in 0..self.steps.len() {
            total += self.examiner.cost(self.batch(index))?;
        }
        Ok(total)
    }

    /// Loads the checkpoint of a step, and checks the rollouts of its steps against it.
    fn load(&self, index: usize) -> Result<Policy> {
        let policy = Policy::load_without_gradient(&self.plan[index].1, &self.options)?;
        check_steps(&policy, &self.plan, &self.rollouts, &self.path)?;
        Ok(policy)
    }

    /// Diagnoses step by step. Ends early, with what is finished, if the observer asks. Returns the
    /// history too, which ends with the steps of this report.
    ///
    /// # Errors
    /// If libtorch fails, a score is not finite, or a later checkpoint is unusable.
    pub fn run(mut self, observer: &mut dyn Observer) -> Result<(DiagnosisReport, History)> {
        observer.start(&self.cost);
        for warning in &self.warnings {
            observer.warning(warning);
        }
        let mut report = DiagnosisReport {
            partial: false,
            policy: PolicyRecord::default(),
            read: self.rollouts.report.clone(),
            warnings: std::mem::take(&mut self.warnings),
            marginal: self.config.diagnostics.marginal,
            sampling: self.config.diagnostics.sampling,
            steps: Vec::new(),
        };
        let mut policies = Policies::new(self.first.take());
        for index in 0..self.plan.len() {
            let (policy, odd) = policies.of(&self.plan[index].1, || self.load(index))?;
            if index == 0 {
                report.policy = PolicyRecord::new(policy, self.device);
            }
            for message in odd {
                observer.warning(&message);
                report.warnings.push(message);
            }
            // By fields, since the examiner remembers what it is shown.
            let batch = Examined {
                batch: &self.rollouts.batches[self.plan[index].0],
                step: self.steps[index],
                names_reasoning: self.names_reasoning,
            };
            let Some(record) = self.examiner.step(policy, batch, observer)? else {
                report.partial = true;
                break;
            };
            for warning in &record.warnings {
                observer.warning(&format!("step {}: {warning}", record.step));
            }
            observer.step(&record, self.examiner.history())?;
            report.steps.push(record);
        }
        Ok((report, self.examiner.into_history()))
    }
}
