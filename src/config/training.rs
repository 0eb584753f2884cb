//! The sections that `gradprism train` adds. A file of another command may hold them; they mean nothing
//! there.

use serde::{Deserialize, Serialize};

use super::resolve::range;
use super::{
    Config, CriticConfig, EnvironmentConfig, OldLogprobs, OptimizerConfig, SamplingConfig,
};
use crate::error::{Error, Result};
use crate::filter::Need;
use crate::objective::{AdvantageEstimator, Aggregation};
use crate::policy::PolicyKind;
use crate::trainer::stop::{EmptyFilters, ValidationFloor, VarianceCollapse};

/// Section `training`: the loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingConfig {
    /// Steps of the run: so many times trajectories are sampled.
    pub steps: u64,
    /// Groups of a step.
    pub groups: usize,
    /// Trajectories of a group.
    pub group_size: usize,
    /// How many different tasks there are; none: a new one for every group.
    pub tasks: Option<u64>,
    /// How often the kept groups of a step are gone through.
    pub epochs: usize,
    /// Padded tokens of one forward pass of an update.
    pub token_budget: usize,
    /// Seeds tasks, sampling and the order of mini-batches.
    pub seed: u64,
    /// The reference policy becomes the present one after every so many steps; none: never.
    pub refresh_reference: Option<u64>,
    /// So many updates in a row whose gradient is not finite end the run.
    pub failed_updates: u64,
    /// After every so many steps the trajectories are written to `rollouts.jsonl`; 0: never.
    pub rollouts_every: u64,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        Self {
            steps: 100,
            groups: 8,
            group_size: 8,
            tasks: None,
            epochs: 1,
            token_budget: 8192,
            seed: 0,
            refresh_reference: None,
            failed_updates: 3,
            rollouts_every: 0,
        }
    }
}

/// Section `validation`: how well the policy does, on other tasks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ValidationConfig {
    /// After every so many steps, and after the last; 0: never.
    pub every: u64,
    /// Tasks.
    pub groups: usize,
    /// Trajectories of a task.
    pub group_size: usize,
    /// Whether the most likely token is taken instead of a draw.
    pub greedy: bool,
    /// Another environment; none: other tasks of the same. Of a file of tasks, whose lines are all
    /// trained on, name another file.
    pub environment: Option<EnvironmentConfig>,
}

impl Default for ValidationConfig {
    fn default() -> Self {
        Self { every: 0, groups: 32, group_size: 1, greedy: false, environment: None }
    }
}

/// Section `checkpoint`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// After every so many steps, and after the last.
    pub every: u64,
    /// The last ones that are kept.
    pub keep: usize,
    /// Whether the best one is kept too: by the mean validation reward, or without validations by the
    /// mean reward of the step.
    pub best: bool,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every: 10, keep: 2, best: true }
    }
}

/// Section `early_stop`; what is left out never stops a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EarlyStopConfig {
    /// The rewards of a group hardly differ any more.
    pub variance_collapse: Option<VarianceCollapse>,
    /// The filter keeps nothing.
    pub empty_filters: Option<EmptyFilters>,
    /// Validations score too low.
    pub validation: Option<ValidationFloor>,
}

/// The sections of a training run, defaults filled in.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct TrainSections {
    pub environment: Option<EnvironmentConfig>,
    pub sampling: SamplingConfig,
    pub training: TrainingConfig,
    pub optimizer: OptimizerConfig,
    pub critic: CriticConfig,
    pub validation: ValidationConfig,
    pub checkpoint: CheckpointConfig,
    pub early_stop: EarlyStopConfig,
}

/// A count that must not be 0.
fn at_least_one(key: &str, count: usize) -> Result<()> {
    if count > 0 {
        return Ok(());
    }
    Err(Error::config(key, "expected at least 1, found 0"))
}

impl Config {
    /// The sections of a training run, with defaults where the file has none.
    pub fn train_sections(&self) -> TrainSections {
        TrainSections {
            environment: self.environment.clone(),
            sampling: self.sampling.clone().unwrap_or_default(),
            training: self.training.clone().unwrap_or_default(),
            optimizer: self.optimizer.unwrap_or_default(),
            critic: self.critic.clone().unwrap_or_default(),
            validation: self.validation.clone().unwrap_or_default(),
            checkpoint: self.checkpoint.unwrap_or_default(),
            early_stop: self.early_stop.unwrap_or_default(),
        }
    }

    /// Checks what a training run needs, and fills in what presets decide: [`resolve`](Self::resolve)
    /// for `gradprism train`.
    ///
    /// # Errors
    /// At the first field that is missing or out of range.
    pub fn resolve_training(mut self) -> Result<Self> {
        let mut sections = self.train_sections();
        let turns = sections.environment.as_ref().map_or(1, |it| it.rules().max_turns);
        let limit = sections.sampling.max_tokens.saturating_mul(turns);
        sections.sampling.fill(self.algorithm.preset, turns);
        if self.algorithm.norm_length.is_none() {
            let aggregation =
                self.algorithm.aggregation.unwrap_or(self.algorithm.preset.algorithm().aggregation);
            if aggregation == Aggregation::SeqMeanTokenSumNorm {
                self.algorithm.norm_length = Some(limit as f64);
            }
        }
        let mut config = self.resolve()?;
        sections.check(&config)?;
        let TrainSections {
            environment,
            sampling,
            training,
            optimizer,
            critic,
            validation,
            checkpoint,
            early_stop,
        } = sections;
        config.environment = environment;
        config.sampling = Some(sampling);
        config.training = Some(training);
        config.optimizer = Some(optimizer);
        config.critic = Some(critic);
        config.validation = Some(validation);
        config.checkpoint = Some(checkpoint);
        config.early_stop = Some(early_stop);
        Ok(config)
    }
}

impl TrainSections {
    fn check(&self, config: &Config) -> Result<()> {
        for (key, count) in [
            ("training.epochs", self.training.epochs),
            ("training.token_budget", self.training.token_budget),
            ("training.tasks", self.training.tasks.unwrap_or(1) as usize),
            ("training.failed_updates", self.training.failed_updates as usize),
            ("training.refresh_reference", self.training.refresh_reference.unwrap_or(1) as usize),
            ("sampling.max_tokens", self.sampling.max_tokens),
            ("sampling.token_budget", self.sampling.token_budget),
            ("sampling.top_k", self.sampling.top_k.unwrap_or(1)),
            ("checkpoint.every", self.checkpoint.every as usize),
            ("checkpoint.keep", self.checkpoint.keep),
        ] {
            at_least_one(key, count)?;
        }
        for (key, count) in [
            ("training.groups", self.training.groups),
            ("training.group_size", self.training.group_size),
            ("validation.groups", self.validation.groups),
            ("validation.group_size", self.validation.group_size),
        ] {
            range(key, count as f64, 1.0, 1e6)?;
        }
        let EarlyStopConfig { variance_collapse, empty_filters, validation } = self.early_stop;
        for (key, count) in [
            ("variance_collapse.steps", variance_collapse.map(|rule| rule.steps)),
            ("empty_filters.filters", empty_filters.map(|rule| rule.filters)),
            ("validation.validations", validation.map(|rule| rule.validations)),
        ] {
            at_least_one(&format!("early_stop.{key}"), count.unwrap_or(1) as usize)?;
        }
        let floor = validation.map_or(0.0, |rule| rule.floor);
        range("early_stop.validation.floor", floor, f64::MIN, f64::MAX)?;
        self.sampling.check()?;
        self.optimizer.check("optimizer")?;
        self.critic.optimizer.check("critic.optimizer")?;
        range("critic.clip", self.critic.clip().unwrap_or(1.0), f64::MIN_POSITIVE, 1e6)?;
        let algorithm = config.algorithm()?;
        let has_baseline = matches!(
            algorithm.advantage,
            AdvantageEstimator::Gae | AdvantageEstimator::ReinforcePlusPlus
        );
        if self.training.group_size < 2 && !has_baseline {
            return Err(Error::config(
                "training.group_size",
                "expected at least 2, since the baseline is the mean of a group, found 1",
            ));
        }
        if self.training.group_size < 2 && config.decomposition.every > 0 {
            return Err(Error::config(
                "training.group_size",
                "expected at least 2, since signal and noise are told apart within a group, found 1; or set decomposition.every: 0",
            ));
        }
        if self.training.seed > u64::from(u32::MAX) {
            return Err(Error::config(
                "training.seed",
                format!("expected a number below 2^32, found {}", self.training.seed),
            ));
        }
        if config.filter.score.need() == Need::Gradient && config.decomposition.every != 1 {
            return Err(Error::config(
                "decomposition.every",
                format!(
                    "expected 1, since the filter ranks by {}, which only a decomposition measures, found {}",
                    config.filter.score.name(),
                    config.decomposition.every
                ),
            ));
        }
        if config.rollouts.old_logprobs == OldLogprobs::Recompute {
            return Err(Error::config(
                "rollouts.old_logprobs",
                "expected file: after the first update of a step the policy is no longer the one that sampled",
            ));
        }
        if self.early_stop.validation.is_some() && self.validation.every == 0 {
            return Err(Error::config(
                "early_stop.validation",
                "expected validations to judge by; set validation.every",
            ));
        }
        Ok(())
    }

    /// What the program needs to sample text by itself.
    pub(crate) fn check_text(&self, config: &Config) -> Result<()> {
        if config.policy.kind != PolicyKind::CausalLm {
            return Err(Error::config(
                "policy.kind",
                "expected causal_lm, which plays the text environments; a step policy is trained through the library, with a source of its own (examples/step_policy.rs)",
            ));
        }
        if self.environment.is_none() {
            return Err(Error::config(
                "environment",
                "expected an environment, such as {name: bandit}, found none",
            ));
        }
        if self.sampling.tokenizer.is_none() {
            return Err(Error::config(
                "sampling.tokenizer",
                "expected the tokenizer.json of the policy, found none",
            ));
        }
        Ok(())
    }
}
