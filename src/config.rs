//! The configuration file: its sections, their defaults, and its checks. The only file that knows
//! YAML.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::Device;

use crate::error::{Error, Result, nearest};
use crate::filter::{Filter, Mass, OnEmpty, Score, Strategy};
use crate::gradient::Buckets;
use crate::objective::{
    AdvantageEstimator, Aggregation, Algorithm, ImportanceCorrection, KlEstimator, KlGradient,
    KlPenalty, KlPlacement, Preset, Surrogate, SurrogateForm,
};
use crate::policy::{Dtype, Inputs, ObservationDtype, Output, PolicyKind, PolicyOptions, Role};
use crate::rollout::{OnProblem, ReadOptions};

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
fn number_or(written: Option<MaybeNumber>, preset: Option<f64>) -> Option<f64> {
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
    /// Takes out the bias of a mean baseline.
    pub debias: bool,
    /// The bound of the task gradient by the reward variance.
    pub bound: bool,
    /// The split of every parameter too.
    pub by_parameter: bool,
    /// The number of reward-variance buckets, or their edges; 0 for none.
    pub buckets: BucketsConfig,
    /// Padded tokens of a group beyond which the batched engine takes it row by row.
    pub token_budget: usize,
    /// Seeds the sign-flip test of groups of more than twelve rows, and the choice of the row that
    /// the batched engine recomputes.
    pub seed: u64,
}

impl Default for DecompositionConfig {
    fn default() -> Self {
        Self {
            engine: EngineName::default(),
            debias: false,
            bound: false,
            by_parameter: false,
            buckets: BucketsConfig::Count(6),
            token_budget: 8192,
            seed: 0,
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
    /// A group at a time; an error where the policy cannot be taken apart by rows.
    Batched,
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

/// Section `filter`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FilterConfig {
    /// What groups are ranked by.
    pub score: Score,
    /// How groups are chosen.
    pub strategy: Strategy,
    /// What counts as mass, for top_p.
    pub mass: Mass,
    /// The parameter of the strategy.
    pub value: f64,
    /// Whether groups of score 0 may be kept.
    pub include_zero: bool,
    /// What to do if no group is kept.
    pub on_empty: OnEmpty,
}

impl Default for FilterConfig {
    fn default() -> Self {
        Self {
            score: Score::RewardVariance,
            strategy: Strategy::TopP,
            mass: Mass::Linear,
            value: 0.9,
            include_zero: false,
            on_empty: OnEmpty::Skip,
        }
    }
}

/// A device by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceName(pub String);

impl Default for DeviceName {
    fn default() -> Self {
        Self("auto".into())
    }
}

impl DeviceName {
    /// The device; `auto` is the first CUDA device, or the CPU.
    ///
    /// # Errors
    /// If the name is none, or this build or machine has no such device.
    pub fn resolve(&self) -> Result<Device> {
        let unusable = |problem: String| Error::Device { device: self.0.clone(), problem };
        let index = match self.0.as_str() {
            "auto" => return Ok(Device::cuda_if_available()),
            "cpu" => return Ok(Device::Cpu),
            "cuda" => 0,
            other => match other.strip_prefix("cuda:").and_then(|index| index.parse().ok()) {
                Some(index) => index,
                None => {
                    return Err(Error::config(
                        "device",
                        format!("expected auto, cpu, cuda or cuda:N, found `{other}`"),
                    ));
                }
            },
        };
        if !tch::utils::has_cuda() {
            return Err(unusable(
                "this libtorch is a CPU build; ./libtorch-setup.sh --cuda fetches one with CUDA, then build again".into(),
            ));
        }
        let count = tch::Cuda::device_count();
        if index as i64 >= count {
            return Err(unusable(format!(
                "libtorch sees {count} CUDA devices; is the driver installed and CUDA_VISIBLE_DEVICES right?"
            )));
        }
        Ok(Device::Cuda(index))
    }
}

/// A number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected auto or a number of threads")]
pub enum Threads {
    /// libtorch's choice: one a physical core.
    Auto(Auto),
    /// This many.
    Count(u16),
}

impl Default for Threads {
    fn default() -> Self {
        Self::Auto(Auto::Auto)
    }
}

impl Config {
    /// Reads a file, applies overrides `key.path=value`, and resolves relative paths: those of the
    /// file against its own folder, those of overrides against the current one.
    ///
    /// # Errors
    /// If the file cannot be read or parsed, or a key is unknown.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::config(path.display().to_string(), format!("cannot be read: {error}"))
        })?;
        let file = std::path::absolute(path).map_err(Error::io("find", path))?;
        let folder = file.parent().unwrap_or(Path::new("/"));
        Self::parse(&text, &path.display().to_string(), folder, overrides)
    }

    /// The same from text; `place` names it in messages.
    ///
    /// # Errors
    /// If the text does not parse, or a key is unknown.
    pub fn parse(text: &str, place: &str, folder: &Path, overrides: &[String]) -> Result<Self> {
        let mut config = if text.trim().is_empty() {
            Self::default()
        } else {
            // Straight from the text first: its errors then name a line.
            let yaml = serde_yaml::Deserializer::from_str(text);
            serde_path_to_error::deserialize::<_, Self>(yaml)
                .map_err(|error| parse_error(place, error))?
        };
        config.map_paths(|path| folder.join(path));
        if overrides.is_empty() {
            return Ok(config);
        }
        let current = std::env::current_dir().map_err(Error::io("find", Path::new(".")))?;
        for text in overrides {
            config = config.with_override(text, &current)?;
        }
        Ok(config)
    }

    fn with_override(&self, text: &str, current: &Path) -> Result<Self> {
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| Error::config("--set", format!("expected key=value, found `{text}`")))?;
        let place = format!("--set {key}");
        let internal = |error: serde_yaml::Error| Error::config(place.as_str(), error.to_string());
        let mut value: serde_yaml::Value = serde_yaml::from_str(value).map_err(internal)?;
        if PATH_KEYS.contains(&key) {
            absolute(&mut value, current);
        }
        let mut whole = serde_yaml::to_value(self).map_err(internal)?;
        let mut slot = &mut whole;
        for (depth, part) in key.split('.').enumerate() {
            let mapping = match slot {
                serde_yaml::Value::Mapping(mapping) => mapping,
                _ => {
                    let parent: Vec<&str> = key.split('.').take(depth).collect();
                    return Err(Error::config(
                        place,
                        format!("`{}` holds no keys", parent.join(".")),
                    ));
                }
            };
            if !mapping.contains_key(part) {
                let known: Vec<&str> = mapping.keys().filter_map(|key| key.as_str()).collect();
                return Err(Error::config(place, unknown_key(part, &known)));
            }
            slot = &mut mapping[part];
        }
        *slot = value;
        serde_path_to_error::deserialize(whole).map_err(|error| parse_error(&place, error))
    }

    fn map_paths(&mut self, map: impl Fn(&Path) -> PathBuf) {
        match &mut self.policy.checkpoint {
            Some(Checkpoints::One(path)) => *path = map(path),
            Some(Checkpoints::List(paths)) => {
                paths.iter_mut().for_each(|path| *path = map(path));
            }
            None => {}
        }
        for path in
            [&mut self.policy.reference, &mut self.rollouts.path, &mut self.rollouts.tokenizer]
                .into_iter()
                .flatten()
        {
            *path = map(path);
        }
    }

    /// Checks every number, and fills in what the preset decides.
    ///
    /// # Errors
    /// At the first field that is missing or out of range.
    pub fn resolve(mut self) -> Result<Self> {
        let algorithm = self.algorithm()?;
        let filter = &self.filter;
        match filter.strategy {
            Strategy::TopP | Strategy::TopK => {
                range("filter.value", filter.value, 0.0, 1.0)?;
            }
            Strategy::TopKAbs => {
                range("filter.value", filter.value, 1.0, 1e9)?;
                if filter.value.fract() != 0.0 {
                    return Err(Error::config(
                        "filter.value",
                        format!(
                            "expected a whole number of groups for top_k_abs, found {}",
                            filter.value
                        ),
                    ));
                }
            }
            Strategy::MinP => range("filter.value", filter.value, 0.0, 1.0)?,
            Strategy::Threshold => range("filter.value", filter.value, f64::MIN, f64::MAX)?,
            Strategy::None => {}
        }
        let temperature = self.policy.temperature;
        if !(temperature > 0.0 && temperature.is_finite()) {
            return Err(Error::config(
                "policy.temperature",
                format!("expected a number above 0, found {temperature}"),
            ));
        }
        self.trainable()?;
        if let BucketsConfig::Edges(edges) = &self.decomposition.buckets
            && !edges.is_sorted_by(|low, high| low < high)
        {
            return Err(Error::config(
                "decomposition.buckets",
                format!("expected a number of buckets or ascending edges, found {edges:?}"),
            ));
        }
        if let BucketsConfig::Count(count) = self.decomposition.buckets
            && count > 1000
        {
            return Err(Error::config(
                "decomposition.buckets",
                format!("expected at most 1000 buckets, found {count}"),
            ));
        }
        if self.decomposition.debias {
            check_debias(&algorithm)?;
        }
        if let Threads::Count(count) = self.threads
            && !(1..=1024).contains(&count)
        {
            return Err(Error::config(
                "threads",
                format!("expected auto or 1 to 1024, found {count}"),
            ));
        }
        self.algorithm = self.algorithm.filled(&algorithm);
        Ok(self)
    }

    /// The loss: the preset with its overrides.
    ///
    /// # Errors
    /// If a number is out of range, or one that the preset needs is missing.
    pub fn algorithm(&self) -> Result<Algorithm> {
        let section = &self.algorithm;
        let preset = section.preset.algorithm();
        let algorithm = Algorithm {
            advantage: section.advantage.unwrap_or(preset.advantage),
            surrogate: Surrogate {
                form: section.surrogate.unwrap_or(preset.surrogate.form),
                clip_low: section.clip_low.unwrap_or(preset.surrogate.clip_low),
                clip_high: section.clip_high.unwrap_or(preset.surrogate.clip_high),
                dual_clip: number_or(section.dual_clip, preset.surrogate.dual_clip),
                log_ratio_clamp: number_or(
                    section.log_ratio_clamp,
                    preset.surrogate.log_ratio_clamp,
                ),
            },
            aggregation: section.aggregation.unwrap_or(preset.aggregation),
            norm_length: section.norm_length.or(preset.norm_length),
            gamma: section.gamma.unwrap_or(preset.gamma),
            lam: section.lam.unwrap_or(preset.lam),
            kl: KlPenalty {
                coef: section.kl.coef.unwrap_or(preset.kl.coef),
                estimator: section.kl.estimator.unwrap_or(preset.kl.estimator),
                gradient: section.kl.gradient.unwrap_or(preset.kl.gradient),
                log_ratio_clamp: number_or(section.kl.log_ratio_clamp, preset.kl.log_ratio_clamp),
                value_clamp: number_or(section.kl.value_clamp, preset.kl.value_clamp),
            },
            kl_placement: section.kl.placement.unwrap_or(preset.kl_placement),
            entropy_coef: section.entropy_coef.unwrap_or(preset.entropy_coef),
            importance: section.importance.or(preset.importance),
        };
        range("algorithm.clip_low", algorithm.surrogate.clip_low, 0.0, 1.0)?;
        range("algorithm.clip_high", algorithm.surrogate.clip_high, 0.0, 1e6)?;
        if let Some(dual_clip) = algorithm.surrogate.dual_clip {
            range("algorithm.dual_clip", dual_clip, 1.0, 1e6)?;
        }
        for (key, clamp) in [
            ("algorithm.log_ratio_clamp", algorithm.surrogate.log_ratio_clamp),
            ("algorithm.kl.log_ratio_clamp", algorithm.kl.log_ratio_clamp),
            ("algorithm.kl.value_clamp", algorithm.kl.value_clamp),
        ] {
            range(key, clamp.unwrap_or(1.0), f64::MIN_POSITIVE, 1e6)?;
        }
        if let Some(importance) = algorithm.importance {
            range("algorithm.importance.cap", importance.cap, f64::MIN_POSITIVE, 1e6)?;
        }
        range("algorithm.gamma", algorithm.gamma, 0.0, 1.0)?;
        range("algorithm.lam", algorithm.lam, 0.0, 1.0)?;
        range("algorithm.kl.coef", algorithm.kl.coef, 0.0, 1e6)?;
        range("algorithm.entropy_coef", algorithm.entropy_coef, 0.0, 1e6)?;
        if let Some(length) = algorithm.norm_length {
            range("algorithm.norm_length", length, f64::MIN_POSITIVE, 1e9)?;
        }
        if algorithm.aggregation == Aggregation::SeqMeanTokenSumNorm {
            match algorithm.norm_length {
                Some(length) if length > 0.0 && length.is_finite() => {}
                found => {
                    let found = found.map_or("none".into(), |length| length.to_string());
                    return Err(Error::config(
                        "algorithm.norm_length",
                        format!(
                            "expected the generation limit in tokens, which seq_mean_token_sum_norm divides by, found {found}"
                        ),
                    ));
                }
            }
        }
        Ok(algorithm)
    }

    fn trainable(&self) -> Result<regex::Regex> {
        regex::Regex::new(&self.policy.trainable).map_err(|error| {
            // The last line says what is wrong; those before it draw the place.
            let error = error.to_string();
            let reason = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
            Error::config(
                "policy.trainable",
                format!(
                    "expected a regular expression, found `{}`: {reason}",
                    self.policy.trainable
                ),
            )
        })
    }

    /// The filter.
    pub fn filter(&self) -> Filter {
        let FilterConfig { strategy, mass, value, include_zero, on_empty, .. } = self.filter;
        Filter { strategy, mass, value, include_zero, on_empty }
    }

    /// The buckets of reward variance; none if there is at most one.
    pub fn buckets(&self) -> Option<Buckets> {
        match &self.decomposition.buckets {
            BucketsConfig::Count(0 | 1) => None,
            BucketsConfig::Count(count) => Some(Buckets::Quantiles(*count)),
            BucketsConfig::Edges(edges) => Some(Buckets::Edges(edges.clone())),
        }
    }

    /// How the rollouts are read.
    pub fn read_options(&self) -> ReadOptions {
        ReadOptions {
            kind: self.policy.kind,
            tokenizer: self.rollouts.tokenizer.clone(),
            single: self.rollouts.single,
            missing_reward: self.rollouts.missing_reward,
        }
    }

    /// How the policy is loaded onto a device.
    ///
    /// # Errors
    /// If `policy.trainable` is no regular expression.
    pub fn policy_options(&self, device: Device) -> Result<PolicyOptions> {
        let policy = &self.policy;
        Ok(PolicyOptions {
            kind: policy.kind,
            inputs: match &policy.inputs {
                InputsName::Auto(_) => Inputs::Auto,
                InputsName::Order(roles) => Inputs::Order(roles.clone()),
            },
            output: match &policy.output {
                OutputName::Index(index) => Output::Named(index.to_string()),
                OutputName::Name(name) if name == "auto" => Output::Auto,
                OutputName::Name(name) => Output::Named(name.clone()),
            },
            trainable: self.trainable()?,
            dtype: policy.dtype,
            observation_dtype: policy.observation_dtype,
            observation_shape: None,
            optimize_graph: policy.optimize_graph,
            device,
        })
    }

    /// The checkpoint of every step, for the steps of the rollouts; rollouts without steps are
    /// studied under each checkpoint of a list.
    ///
    /// # Errors
    /// If no checkpoint is named, or their number does not fit the steps.
    pub fn checkpoints(&self, steps: &[Option<i64>]) -> Result<Vec<PathBuf>> {
        let key = "policy.checkpoint";
        match &self.policy.checkpoint {
            None => Err(Error::config(
                key,
                "expected a TorchScript file, found none; name it in the file or with --set policy.checkpoint=PATH",
            )),
            Some(Checkpoints::One(path)) => {
                let text = path.to_string_lossy();
                if !text.contains("{step}") {
                    return Ok(vec![path.clone(); steps.len()]);
                }
                steps
                    .iter()
                    .map(|step| {
                        let step = step.ok_or_else(|| {
                            Error::config(key, "has {step} in it, and the rollouts name no steps")
                        })?;
                        Ok(PathBuf::from(text.replace("{step}", &step.to_string())))
                    })
                    .collect()
            }
            Some(Checkpoints::List(paths)) if paths.is_empty() => {
                Err(Error::config(key, "expected at least one file, found an empty list"))
            }
            Some(Checkpoints::List(paths)) => {
                if steps != [None] && paths.len() != steps.len() {
                    return Err(Error::config(
                        key,
                        format!(
                            "expected as many checkpoints as the rollouts have steps ({}), found {}",
                            steps.len(),
                            paths.len()
                        ),
                    ));
                }
                Ok(paths.clone())
            }
        }
    }

    /// The configuration as YAML.
    ///
    /// # Errors
    /// If a value cannot be written as YAML.
    pub fn to_yaml(&self) -> Result<String> {
        serde_yaml::to_string(self).map_err(|error| Error::config("resolved", error.to_string()))
    }
}

impl AlgorithmConfig {
    fn filled(&self, algorithm: &Algorithm) -> Self {
        Self {
            preset: self.preset,
            advantage: Some(algorithm.advantage),
            surrogate: Some(algorithm.surrogate.form),
            clip_low: Some(algorithm.surrogate.clip_low),
            clip_high: Some(algorithm.surrogate.clip_high),
            dual_clip: Some(algorithm.surrogate.dual_clip.into()),
            log_ratio_clamp: Some(algorithm.surrogate.log_ratio_clamp.into()),
            aggregation: Some(algorithm.aggregation),
            norm_length: algorithm.norm_length,
            gamma: Some(algorithm.gamma),
            lam: Some(algorithm.lam),
            kl: KlConfig {
                coef: Some(algorithm.kl.coef),
                estimator: Some(algorithm.kl.estimator),
                gradient: Some(algorithm.kl.gradient),
                placement: Some(algorithm.kl_placement),
                log_ratio_clamp: Some(algorithm.kl.log_ratio_clamp.into()),
                value_clamp: Some(algorithm.kl.value_clamp.into()),
            },
            entropy_coef: Some(algorithm.entropy_coef),
            importance: algorithm.importance,
        }
    }
}

/// Keys whose values are paths.
const PATH_KEYS: [&str; 4] =
    ["policy.checkpoint", "policy.reference", "rollouts.path", "rollouts.tokenizer"];

fn absolute(value: &mut serde_yaml::Value, folder: &Path) {
    match value {
        serde_yaml::Value::String(path) => {
            *path = folder.join(path.as_str()).to_string_lossy().into_owned();
        }
        serde_yaml::Value::Sequence(paths) => {
            paths.iter_mut().for_each(|path| absolute(path, folder));
        }
        _ => {}
    }
}

fn range(key: &str, value: f64, low: f64, high: f64) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    let expected = if high >= 1e6 {
        if low > f64::MIN {
            format!("a finite number of at least {low}")
        } else {
            "a finite number".into()
        }
    } else {
        format!("a number from {low} to {high}")
    };
    Err(Error::config(key, format!("expected {expected}, found {value}")))
}

fn check_debias(algorithm: &Algorithm) -> Result<()> {
    let sums = matches!(
        algorithm.aggregation,
        Aggregation::SeqMeanTokenSum | Aggregation::SeqMeanTokenSumNorm
    );
    if algorithm.importance.is_some() {
        return Err(Error::config(
            "decomposition.debias",
            "the bias is known at ratio 1 only; leave algorithm.importance out",
        ));
    }
    if algorithm.advantage.mean_baseline_factor(2).is_some() && sums {
        return Ok(());
    }
    Err(Error::config(
        "decomposition.debias",
        format!(
            "the bias is known for a mean baseline without a spread to divide by (advantage dr_grpo or rloo) and sums over tokens (seq_mean_token_sum, seq_mean_token_sum_norm); found {} and {}",
            word(&algorithm.advantage),
            word(&algorithm.aggregation)
        ),
    ))
}

/// A choice as it is written in a file.
fn word(choice: &impl Serialize) -> String {
    serde_yaml::to_string(choice).map_or_else(|_| "?".into(), |word| word.trim().to_owned())
}

fn unknown_key(key: &str, known: &[&str]) -> String {
    match nearest(key, known.iter().copied()) {
        Some(nearest) => format!("unknown key `{key}`; did you mean `{nearest}`?"),
        None => format!("unknown key `{key}`; known are {}", known.join(", ")),
    }
}

/// serde's message with the dotted key, and the nearest known name where one is unknown.
fn parse_error(place: &str, error: serde_path_to_error::Error<serde_yaml::Error>) -> Error {
    let key = error.path().to_string();
    let message = error.into_inner().to_string();
    // serde_yaml repeats the path in front.
    let message = message.strip_prefix(&format!("{key}: ")).unwrap_or(&message).to_owned();
    let place = if key == "." || place.ends_with(&format!(" {key}")) {
        place.to_owned()
    } else {
        format!("{place}: {key}")
    };
    let names: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let is_unknown = message.contains("unknown field") || message.contains("unknown variant");
    match names.split_first() {
        Some((unknown, known)) if is_unknown => {
            let location = message.rfind(" at line ").map_or("", |at| &message[at..]);
            let what = if message.contains("unknown field") {
                unknown_key(unknown, known)
            } else {
                format!("expected one of {}, found `{unknown}`", known.join(", "))
            };
            Error::config(place, format!("{what}{location}"))
        }
        _ => Error::config(place, message),
    }
}
