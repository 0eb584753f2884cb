//! The sections of a configuration file, their fields and their defaults.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    CheckpointConfig, CriticConfig, DeviceName, DiagnosticsConfig, EarlyStopConfig,
    EnvironmentConfig, FilterConfig, OptimizerConfig, SamplingConfig, Threads, TrainingConfig,
    ValidationConfig,
};
use crate::gradient::Components;
use crate::objective::{
    AdvantageEstimator, Aggregation, ImportanceCorrection, KlEstimator, KlGradient, KlPlacement,
    Preset, SurrogateForm,
};
use crate::policy::{Dtype, ObservationDtype, PolicyKind, Role};
use crate::rollout::OnProblem;

/// A configuration. Written out again with every default filled in, it means the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The policy.
    pub policy: PolicyConfig,
    /// The rollouts.
    pub rollouts: RolloutsConfig,
    /// The loss.
    pub algorithm: AlgorithmConfig,
    /// How its gradient is split.
    pub decomposition: DecompositionConfig,
    /// Which groups are kept.
    pub filter: FilterConfig,
    /// How template collapse is looked for.
    pub diagnostics: DiagnosticsConfig,
    /// What a policy is trained in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<EnvironmentConfig>,
    /// How trajectories are sampled in training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling: Option<SamplingConfig>,
    /// The loop of training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training: Option<TrainingConfig>,
    /// How weights are updated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerConfig>,
    /// The value function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub critic: Option<CriticConfig>,
    /// How a policy in training is validated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationConfig>,
    /// When a training run is saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointConfig>,
    /// When it ends early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub early_stop: Option<EarlyStopConfig>,
    /// `auto`, `cpu`, `cuda` or `cuda:N`.
    pub device: DeviceName,
    /// Threads of libtorch.
    pub threads: Threads,
}

/// Section `policy`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// The TorchScript file; a list of them, one a step; or a name with `{step}` in it.
    pub checkpoint: Option<Checkpoints>,
    /// What the policy maps to what.
    pub kind: PolicyKind,
    /// `auto`, or the roles of forward's arguments in their order.
    pub inputs: InputsName,
    /// `auto`, or the key or index of the logits in forward's output.
    pub output: OutputName,
    /// A TorchScript file of the reference policy; wins over `ref_logprobs` of the rollouts.
    pub reference: Option<PathBuf>,
    /// The sampling temperature: divides the logits for log-probabilities and entropy alike.
    pub temperature: f64,
    /// A regular expression that the names of the trainable parameters match.
    pub trainable: String,
    /// The dtype to run in.
    pub dtype: Dtype,
    /// The dtype of a step policy's observations.
    pub observation_dtype: ObservationDtype,
    /// Whether TorchScript's executor may profile and fuse.
    pub optimize_graph: bool,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            checkpoint: None,
            kind: PolicyKind::default(),
            inputs: InputsName::default(),
            output: OutputName::default(),
            reference: None,
            temperature: 1.0,
            trainable: ".*".into(),
            dtype: Dtype::default(),
            observation_dtype: ObservationDtype::default(),
            optimize_graph: false,
        }
    }
}

/// One checkpoint or several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a path or a list of paths")]
pub enum Checkpoints {
    /// A file, or a pattern with `{step}`.
    One(PathBuf),
    /// A file a step.
    List(Vec<PathBuf>),
}

/// `auto`, a key or an index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected auto, a key or an index")]
pub enum OutputName {
    /// Of a tuple.
    Index(usize),
    /// Of a dictionary, or `auto`.
    Name(String),
}

impl Default for OutputName {
    fn default() -> Self {
        Self::Name("auto".into())
    }
}

/// `auto` or a list of roles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected auto or a list of input_ids, attention_mask, position_ids, observation"
)]
pub enum InputsName {
    /// By name.
    Auto(Auto),
    /// By order.
    Order(Vec<Role>),
}

impl Default for InputsName {
    fn default() -> Self {
        Self::Auto(Auto::Auto)
    }
}

/// The word `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Auto {
    /// Whatever suits.
    #[default]
    Auto,
}

/// Section `rollouts`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutsConfig {
    /// The rollout file.
    pub path: Option<PathBuf>,
    /// Its format.
    pub format: Format,
    /// A `tokenizer.json`, for lines of text without ids.
    pub tokenizer: Option<PathBuf>,
    /// What to do about a group of one.
    pub single: OnProblem,
    /// What to do about a missing reward.
    pub missing_reward: OnProblem,
    /// Whether the file's `old_logprobs` are used.
    pub old_logprobs: OldLogprobs,
}

/// The format of a rollout file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// JSONL, a trajectory a line.
    #[default]
    Native,
}

/// Where the log-probabilities of the sampling policy come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogprobs {
    /// The file, if it has them.
    #[default]
    File,
    /// The checkpoint itself: the ratio is 1.
    Recompute,
}

/// Section `algorithm`; what is left out is the preset's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AlgorithmConfig {
    /// The preset.
    pub preset: Preset,
    /// How rewards become advantages.
    pub advantage: Option<AdvantageEstimator>,
    /// The form of the surrogate.
    pub surrogate: Option<SurrogateForm>,
    /// The ratio is clipped below at 1 − this.
    pub clip_low: Option<f64>,
    /// The ratio is clipped above at 1 + this.
    pub clip_high: Option<f64>,
    /// The dual clip, or `none`.
    pub dual_clip: Option<MaybeNumber>,
    /// The log-ratio of the surrogate is clamped to ± this, or `none`.
    pub log_ratio_clamp: Option<MaybeNumber>,
    /// How per-token losses become one.
    pub aggregation: Option<Aggregation>,
    /// The constant length of `seq_mean_token_sum_norm`.
    pub norm_length: Option<f64>,
    /// Discount.
    pub gamma: Option<f64>,
    /// λ of GAE.
    pub lam: Option<f64>,
    /// The KL penalty.
    pub kl: KlConfig,
    /// The factor of the entropy.
    pub entropy_coef: Option<f64>,
    /// Truncated importance weights for a sampler of its own: `{level: token, cap: 2}`.
    pub importance: Option<ImportanceCorrection>,
}

impl Default for AlgorithmConfig {
    fn default() -> Self {
        Self {
            preset: Preset::Grpo,
            advantage: None,
            surrogate: None,
            clip_low: None,
            clip_high: None,
            dual_clip: None,
            log_ratio_clamp: None,
            aggregation: None,
            norm_length: None,
            gamma: None,
            lam: None,
            kl: KlConfig::default(),
            entropy_coef: None,
            importance: None,
        }
    }
}

/// A number, or the word `none`, which overrides a preset's number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number or none")]
pub enum MaybeNumber {
    /// The number.
    Number(f64),
    /// None.
    None(NoneWord),
}

/// The word `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoneWord {
    /// Nothing.
    None,
}

impl From<Option<f64>> for MaybeNumber {
    fn from(number: Option<f64>) -> Self {
        number.map_or(Self::None(NoneWord::None), Self::Number)
    }
}

/// What the file says, or the preset where it says nothing.
pub(super) fn number_or(written: Option<MaybeNumber>, preset: Option<f64>) -> Option<f64> {
    match written {
        Some(MaybeNumber::Number(number)) => Some(number),
        Some(MaybeNumber::None(_)) => None,
        None => preset,
    }
}

/// Section `algorithm.kl`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KlConfig {
    /// Its factor in the loss.
    pub coef: Option<f64>,
    /// The estimator.
    pub estimator: Option<KlEstimator>,
    /// The gradient it carries.
    pub gradient: Option<KlGradient>,
    /// A term of the loss, or taken off the rewards.
    pub placement: Option<KlPlacement>,
    /// The log-ratio is clamped to ± this, or `none`.
    pub log_ratio_clamp: Option<MaybeNumber>,
    /// The value is clamped to ± this, or `none`.
    pub value_clamp: Option<MaybeNumber>,
}

/// Section `decomposition`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DecompositionConfig {
    /// The engine.
    pub engine: EngineName,
    /// Whether the gradients of KL and entropy are taken apart.
    pub components: Components,
    /// The number of random projections of a sketch.
    pub sketch_dimensions: usize,
    /// Takes out the bias of a mean baseline.
    pub debias: bool,
    /// The bound of the task gradient by the reward variance.
    pub bound: bool,
    /// The split of every parameter too.
    pub by_parameter: bool,
    /// The number of reward-variance buckets, or their edges; 0 for none.
    pub buckets: BucketsConfig,
    /// Padded tokens of one forward pass of the batched engine.
    pub token_budget: usize,
    /// Seeds the sign-flip test of groups of more than twelve rows, the choice of the row that the
    /// batched engine recomputes, and the projections of a sketch.
    pub seed: u64,
    /// In training: after every so many steps; 0: never.
    pub every: u64,
}

impl Default for DecompositionConfig {
    fn default() -> Self {
        Self {
            engine: EngineName::default(),
            components: Components::default(),
            sketch_dimensions: 64,
            debias: false,
            bound: false,
            by_parameter: false,
            buckets: BucketsConfig::Count(6),
            token_budget: 8192,
            seed: 0,
            every: 10,
        }
    }
}

/// Which engine takes the gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineName {
    /// Batched, and a trajectory at a time where the policy cannot be taken apart by rows.
    #[default]
    Auto,
    /// A trajectory at a time: the reference that faster engines are held to.
    Loop,
    /// Some groups at a time; an error where the policy cannot be taken apart by rows.
    Batched,
    /// As batched, with random projections of the gradients in place of exact products.
    Sketch,
}

/// A number of buckets, or edges.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number of buckets or a list of edges")]
pub enum BucketsConfig {
    /// Buckets of about equal size.
    Count(usize),
    /// Ascending edges.
    Edges(Vec<f64>),
}
