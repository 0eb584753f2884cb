//! The sections that `gradprism train` adds. A file of another command may hold them; they mean nothing
//! there.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::resolve::range;
use super::{Config, EnvironmentConfig, MaybeNumber, NoneWord, OldLogprobs, number_or};
use crate::error::{Error, Result};
use crate::filter::Need;
use crate::objective::{AdvantageEstimator, Aggregation, OverlongPenalty, Preset};
use crate::policy::PolicyKind;
use crate::trainer::stop::{EmptyFilters, ValidationFloor, VarianceCollapse};
use crate::trainer::{AdamWOptions, Decay, Schedule};

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

/// Section `sampling`. The temperature is `policy.temperature`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingConfig {
    /// The `tokenizer.json` of the policy.
    pub tokenizer: Option<PathBuf>,
    /// The first message of a trajectory takes the place of `{}`.
    pub prompt_format: String,
    /// Each later message takes the place of `{}`.
    pub turn_format: String,
    /// Only the most likely tokens, this many, are drawn from.
    pub top_k: Option<usize>,
    /// Only the most likely tokens that together hold this share are drawn from.
    pub top_p: f64,
    /// Tokens of a response at most.
    pub max_tokens: usize,
    /// Texts that end a response; one that is a single token is looked for among the tokens.
    pub stop: Vec<String>,
    /// Tokens that the policy can read; a trajectory ends before it would pass them. None: no bound.
    pub context_length: Option<usize>,
    /// Padded tokens of one forward pass.
    pub token_budget: usize,
    /// Whether the policy's `forward_cached` is used, if it has one.
    pub cache: bool,
    /// Samples groups again whose rewards are all equal, or `none`.
    pub dynamic: Option<MaybeDynamic>,
    /// A penalty for trajectories of many sampled tokens, or `none`.
    pub overlong: Option<MaybeOverlong>,
}

impl Default for SamplingConfig {
    fn default() -> Self {
        Self {
            tokenizer: None,
            prompt_format: "{}".into(),
            turn_format: "{}".into(),
            top_k: None,
            top_p: 1.0,
            max_tokens: 64,
            stop: Vec::new(),
            context_length: None,
            token_budget: 8192,
            cache: true,
            dynamic: None,
            overlong: None,
        }
    }
}

/// Dynamic sampling, or the word `none`, which overrides a preset's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected none, or rounds and on_limit")]
pub enum MaybeDynamic {
    /// With these bounds.
    Some(DynamicSampling),
    /// None.
    None(NoneWord),
}

/// DAPO's dynamic sampling (arXiv 2503.14476, Section 3.2): groups whose rewards are all equal are left
/// out, and others are sampled in their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DynamicSampling {
    /// How often a step samples at most.
    pub rounds: u64,
    /// What to do with a step that is short of groups then.
    pub on_limit: OnLimit,
}

impl Default for DynamicSampling {
    fn default() -> Self {
        Self { rounds: 10, on_limit: OnLimit::default() }
    }
}

/// What to do with a step that is short of groups after the last round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnLimit {
    /// Train on the groups that there are.
    #[default]
    Train,
    /// Make no update.
    Skip,
    /// End the run.
    Stop,
}

/// An overlong penalty, or the word `none`, which overrides a preset's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected none, or limit, buffer and factor")]
pub enum MaybeOverlong {
    /// With these numbers.
    Some(OverlongConfig),
    /// None.
    None(NoneWord),
}

/// The numbers of [`OverlongPenalty`], over the sampled tokens of a trajectory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverlongConfig {
    /// The generation limit in tokens.
    pub limit: f64,
    /// The width of the slope in tokens.
    pub buffer: f64,
    /// The depth.
    #[serde(default = "one")]
    pub factor: f64,
}

fn one() -> f64 {
    1.0
}

/// A learning rate that falls by half a cosine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CosineConfig {
    /// The updates of the run, the warm-up among them.
    pub updates: u64,
    /// The last share of the learning rate.
    #[serde(default)]
    pub floor: f64,
}

/// Section `optimizer`, and that of the critic.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// The full learning rate.
    pub learning_rate: f64,
    /// The decays of the mean gradient and of the mean squared gradient.
    pub betas: (f64, f64),
    /// Added to the root of the mean square.
    pub epsilon: f64,
    /// The decoupled weight decay.
    pub weight_decay: f64,
    /// Updates until the full learning rate is reached.
    pub warmup: u64,
    /// Half a cosine follows; none: the rate stays as it is.
    pub cosine: Option<CosineConfig>,
    /// The gradient is clipped to this norm, or `none`.
    pub max_norm: MaybeNumber,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-6,
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            weight_decay: 0.01,
            warmup: 0,
            cosine: None,
            max_norm: MaybeNumber::Number(1.0),
        }
    }
}

impl OptimizerConfig {
    /// Learning rate and decays.
    pub fn adamw(&self) -> AdamWOptions {
        AdamWOptions {
            learning_rate: self.learning_rate,
            beta1: self.betas.0,
            beta2: self.betas.1,
            epsilon: self.epsilon,
            weight_decay: self.weight_decay,
        }
    }

    /// The learning rate over the updates.
    pub fn schedule(&self) -> Schedule {
        let decay = match self.cosine {
            None => Decay::Constant,
            Some(CosineConfig { updates, floor }) => Decay::Cosine { updates, floor },
        };
        Schedule { warmup: self.warmup, decay }
    }

    /// The norm that the gradient is clipped to.
    pub fn max_norm(&self) -> Option<f64> {
        number_or(Some(self.max_norm), None)
    }

    fn check(&self, section: &str) -> Result<()> {
        let key = |name: &str| format!("{section}.{name}");
        range(&key("learning_rate"), self.learning_rate, 0.0, 1e6)?;
        for beta in [self.betas.0, self.betas.1] {
            range(&key("betas"), beta, 0.0, 1.0 - f64::EPSILON)?;
        }
        range(&key("epsilon"), self.epsilon, 0.0, 1e6)?;
        range(&key("weight_decay"), self.weight_decay, 0.0, 1e6)?;
        range(&key("max_norm"), self.max_norm().unwrap_or(1.0), f64::MIN_POSITIVE, f64::MAX)?;
        if let Some(CosineConfig { updates, floor }) = self.cosine {
            range(&key("cosine.floor"), floor, 0.0, 1.0)?;
            if updates <= self.warmup {
                return Err(Error::config(
                    key("cosine.updates"),
                    format!("expected more than the warm-up's {}, found {updates}", self.warmup),
                ));
            }
        }
        Ok(())
    }
}

/// Section `critic`: the value function of PPO.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CriticConfig {
    /// A TorchScript file that maps what the policy reads to one number a position: `[B, T, 1]`.
    pub checkpoint: Option<PathBuf>,
    /// A new value may move from the old one by this much before its gain counts no more, or `none`.
    pub clip: MaybeNumber,
    /// Steps in which the critic alone learns.
    pub warmup_steps: u64,
    /// Its optimiser.
    pub optimizer: OptimizerConfig,
}

impl Default for CriticConfig {
    fn default() -> Self {
        Self {
            checkpoint: None,
            clip: MaybeNumber::Number(0.5),
            warmup_steps: 0,
            optimizer: OptimizerConfig { learning_rate: 1e-5, ..OptimizerConfig::default() },
        }
    }
}

impl CriticConfig {
    /// The value clip.
    pub fn clip(&self) -> Option<f64> {
        number_or(Some(self.clip), None)
    }
}

/// Section `validation`: how well the policy does, on tasks of their own.
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
    /// Another environment; none: other tasks of the same.
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

impl SamplingConfig {
    /// The bounds of dynamic sampling, if it is on.
    pub fn dynamic_sampling(&self) -> Option<DynamicSampling> {
        match self.dynamic {
            Some(MaybeDynamic::Some(dynamic)) => Some(dynamic),
            _ => None,
        }
    }

    /// The penalty for long responses, if there is one.
    pub fn overlong_penalty(&self) -> Option<OverlongPenalty> {
        match self.overlong {
            Some(MaybeOverlong::Some(OverlongConfig { limit, buffer, factor })) => {
                Some(OverlongPenalty { limit, buffer, factor })
            }
            _ => None,
        }
    }

    /// What the preset decides: DAPO samples dynamically, and penalises long responses where a trajectory
    /// is one response.
    fn fill(&mut self, preset: Preset, turns: usize) {
        let is_dapo = preset == Preset::Dapo;
        self.dynamic.get_or_insert(if is_dapo {
            MaybeDynamic::Some(DynamicSampling::default())
        } else {
            MaybeDynamic::None(NoneWord::None)
        });
        // The paper's buffer is a fifth of its limit: 4,096 of 20,480 tokens.
        let (limit, buffer) = (self.max_tokens as f64, (self.max_tokens / 5) as f64);
        self.overlong.get_or_insert(if is_dapo && turns == 1 && buffer > 0.0 {
            MaybeOverlong::Some(OverlongConfig { limit, buffer, factor: 1.0 })
        } else {
            MaybeOverlong::None(NoneWord::None)
        });
    }

    fn check(&self) -> Result<()> {
        for (key, format) in
            [("prompt_format", &self.prompt_format), ("turn_format", &self.turn_format)]
        {
            if format.matches("{}").count() != 1 {
                return Err(Error::config(
                    format!("sampling.{key}"),
                    format!("expected a text with one {{}} in it, found `{format}`"),
                ));
            }
        }
        range("sampling.top_p", self.top_p, f64::MIN_POSITIVE, 1.0)?;
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::config("sampling.stop", "expected texts, found an empty one"));
        }
        if let Some(OverlongPenalty { limit, buffer, factor }) = self.overlong_penalty() {
            range("sampling.overlong.limit", limit, 1.0, 1e9)?;
            range("sampling.overlong.buffer", buffer, f64::MIN_POSITIVE, limit)?;
            range("sampling.overlong.factor", factor, 0.0, 1e6)?;
        }
        Ok(())
    }
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
            ("training.groups", self.training.groups),
            ("training.group_size", self.training.group_size),
            ("training.epochs", self.training.epochs),
            ("training.token_budget", self.training.token_budget),
            ("training.tasks", self.training.tasks.unwrap_or(1) as usize),
            ("training.failed_updates", self.training.failed_updates as usize),
            ("training.refresh_reference", self.training.refresh_reference.unwrap_or(1) as usize),
            ("sampling.max_tokens", self.sampling.max_tokens),
            ("sampling.token_budget", self.sampling.token_budget),
            ("sampling.top_k", self.sampling.top_k.unwrap_or(1)),
            ("validation.groups", self.validation.groups),
            ("validation.group_size", self.validation.group_size),
            ("checkpoint.every", self.checkpoint.every as usize),
            ("checkpoint.keep", self.checkpoint.keep),
        ] {
            at_least_one(key, count)?;
        }
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
