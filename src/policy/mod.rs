//! The TorchScript policy: loading, checking, and its forward pass.

mod check;
mod continuation;
mod fit;
mod inspect;
mod parameters;
mod sample;
mod save;
mod signature;

pub use check::Problem;
pub use continuation::Continuation;
pub use inspect::dtype_name;
pub use inspect::{Inspection, ParameterInfo};
pub use parameters::Parameter;
pub(crate) use parameters::unify;
pub use sample::{Sample, SampleRequest, SamplingOptions, StopReason};
pub use signature::{Inputs, Output, Role, Signature};

use std::cell::Cell;
use std::path::{Path, PathBuf};

use regex::Regex;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::native::Module;
use crate::rollout::{Content, Trajectory};

/// What a policy maps to what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKind {
    /// Token ids `[B, T]` to the logits `[B, T, V]` of each next token.
    #[default]
    CausalLm,
    /// Observations `[N, ..]` to the logits `[N, A]` of the actions.
    Step,
}

/// The dtype in which a policy runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// That of the file.
    #[default]
    Keep,
    /// IEEE single precision.
    Float32,
    /// IEEE double precision.
    Float64,
    /// bfloat16.
    Bfloat16,
    /// IEEE half precision.
    Float16,
}

impl Dtype {
    fn kind(self) -> Option<Kind> {
        match self {
            Self::Keep => None,
            Self::Float32 => Some(Kind::Float),
            Self::Float64 => Some(Kind::Double),
            Self::Bfloat16 => Some(Kind::BFloat16),
            Self::Float16 => Some(Kind::Half),
        }
    }
}

/// The dtype of the observations that a step policy is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObservationDtype {
    /// The dtype of the policy's parameters.
    #[default]
    Float,
    /// Integers, for policies that look observations up.
    Int64,
}

impl ObservationDtype {
    /// The dtype of observations for a policy of parameters of `policy`.
    fn kind(self, policy: Kind) -> Kind {
        match self {
            Self::Float => policy,
            Self::Int64 => Kind::Int64,
        }
    }
}

/// How to load a policy.
#[derive(Clone, Debug)]
pub struct PolicyOptions {
    /// What it maps to what.
    pub kind: PolicyKind,
    /// How the arguments of forward are found.
    pub inputs: Inputs,
    /// How the logits are found in its output.
    pub output: Output,
    /// Selects the trainable parameters by name.
    pub trainable: Regex,
    /// The dtype to run in.
    pub dtype: Dtype,
    /// The dtype of observations.
    pub observation_dtype: ObservationDtype,
    /// The shape of one observation, for the trial call of a step policy.
    pub observation_shape: Option<Vec<i64>>,
    /// Lets TorchScript's executor profile and fuse. It slows the second and third call down, and
    /// hides the nodes of the autograd graph.
    pub optimize_graph: bool,
    /// Where to run.
    pub device: Device,
}

impl Default for PolicyOptions {
    fn default() -> Self {
        Self {
            kind: PolicyKind::default(),
            inputs: Inputs::default(),
            output: Output::default(),
            // An empty pattern matches every name.
            trainable: Regex::new("").unwrap_or_else(|_| unreachable!("an empty pattern is valid")),
            dtype: Dtype::default(),
            observation_dtype: ObservationDtype::default(),
            observation_shape: None,
            optimize_graph: false,
            device: Device::Cpu,
        }
    }
}

/// A loaded TorchScript policy, in eval mode, whose forward has been tried once.
pub struct Policy {
    path: PathBuf,
    module: Module,
    options: PolicyOptions,
    signature: Signature,
    parameters: Vec<Parameter>,
    kind: Kind,
    choices: i64,
    has_cache: bool,
    /// Whether the cache has been held to the plain forward.
    cache_is_checked: Cell<bool>,
    warnings: Vec<String>,
}

impl Policy {
    /// Loads a file onto the device, and checks it by a few small forward passes.
    ///
    /// # Errors
    /// If the file is missing, damaged, not TorchScript, or frozen; if its forward takes or returns
    /// something else than the kind of policy does; if it holds non-finite weights or no trainable
    /// parameter.
    pub fn load(path: &Path, options: &PolicyOptions) -> Result<Self> {
        Self::from_inspection(path, options, Inspection::run(path, options)?)
    }

    /// Loads a policy that is only scored with: whether it has trainable parameters does not matter.
    ///
    /// # Errors
    /// As [`load`](Self::load), but for parameters that are missing or require no gradient.
    pub fn load_without_gradient(path: &Path, options: &PolicyOptions) -> Result<Self> {
        let mut inspection = Inspection::run(path, options)?;
        inspection.problems.retain(|problem| !matches!(problem, Problem::NotTrainable(_)));
        Self::from_inspection(path, options, inspection)
    }

    fn from_inspection(
        path: &Path,
        options: &PolicyOptions,
        inspection: Inspection,
    ) -> Result<Self> {
        let mut warnings = Vec::new();
        for problem in inspection.problems {
            match problem {
                Problem::Error(message) | Problem::NotTrainable(message) => {
                    return Err(Error::checkpoint(path, message));
                }
                Problem::Warning(message) => {
                    warnings.push(format!("{}: {message}", path.display()));
                }
            }
        }
        let (Some(signature), Some(choices)) = (inspection.signature, inspection.choices) else {
            return Err(Error::checkpoint(path, "its forward could not be tried"));
        };
        Ok(Self {
            path: path.to_path_buf(),
            module: inspection.module,
            options: options.clone(),
            signature,
            parameters: inspection.parameters,
            kind: inspection.dtypes.first().copied().unwrap_or(Kind::Float),
            choices,
            has_cache: inspection.cache,
            cache_is_checked: Cell::new(false),
            warnings,
        })
    }

    /// The file it came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What was found odd, but does not keep it from being used; each begins with the file's name.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Where it runs.
    pub fn device(&self) -> Device {
        self.options.device
    }

    /// The dtype of its parameters (of the first, if they differ).
    pub fn dtype(&self) -> Kind {
        self.kind
    }

    /// The size of the vocabulary, or the number of actions.
    pub fn choices(&self) -> i64 {
        self.choices
    }

    /// All parameters, a tied weight once.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The parameters that gradients are taken with respect to.
    pub fn trainable(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(|parameter| parameter.trainable)
    }

    /// Logits `[B, T, V]` of a causal language model for token ids `[B, T]` and a mask `[B, T]`
    /// (int64, 1 on tokens, 0 on padding).
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn token_logits(&self, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
        token_logits(&self.module, &self.signature, &self.options, ids, mask)
            .map_err(|message| Error::torch("calling forward", &message))
    }

    /// Logits `[N, A]` of a step policy for observations `[N, ..]`.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn step_logits(&self, observations: &Tensor) -> Result<Tensor> {
        step_logits(&self.module, &self.signature, &self.options, observations)
            .map_err(|message| Error::torch("calling forward", &message))
    }

    /// The logits `[T, V]` from which the response of one trajectory was chosen, one row a
    /// position; no padding is involved.
    ///
    /// # Errors
    /// If libtorch fails, or the trajectory is not of the policy's kind.
    pub fn response_logits(&self, trajectory: &Trajectory) -> Result<Tensor> {
        let device = self.device();
        match (&trajectory.content, self.options.kind) {
            (Content::Tokens { prompt_ids, response_ids }, PolicyKind::CausalLm) => {
                // The last token predicts nothing that was sampled.
                let read: Vec<i64> = prompt_ids
                    .iter()
                    .chain(&response_ids[..response_ids.len() - 1])
                    .copied()
                    .collect();
                let ids = Tensor::from_slice(&read).unsqueeze(0).to_device(device);
                let logits = self.token_logits(&ids, &ids.ones_like())?;
                // Position p − 1 predicts the first token of the response.
                let first = prompt_ids.len() as i64 - 1;
                Ok(logits.select(0, 0).narrow(0, first, response_ids.len() as i64))
            }
            (Content::Steps { observations, shape, actions }, PolicyKind::Step) => {
                let mut size = vec![actions.len() as i64];
                size.extend(shape);
                let kind = self.options.observation_dtype.kind(self.kind);
                let observations = Tensor::from_slice(observations).reshape(size);
                self.step_logits(&observations.to_kind(kind).to_device(device))
            }
            _ => Err(Error::Argument {
                argument: "trajectory",
                expected: format!("one of a {:?} policy", self.options.kind),
                found: "the other kind".into(),
            }),
        }
    }
}

/// The logits of a batch of trajectories at the positions of their responses, one trajectory after
/// the other, without padding.
#[derive(Debug)]
pub struct BatchLogits {
    /// `[n, V]`
    pub logits: Tensor,
    /// `[n]` int64, what was chosen.
    pub actions: Tensor,
}

impl Policy {
    /// The logits of several trajectories in one padded forward pass.
    ///
    /// # Errors
    /// If libtorch fails, or a trajectory is not of the policy's kind.
    pub fn batch_logits(&self, trajectories: &[&Trajectory]) -> Result<BatchLogits> {
        let device = self.device();
        let actions: Vec<i64> =
            trajectories.iter().flat_map(|row| row.content.actions()).copied().collect();
        let actions = Tensor::from_slice(&actions).to_device(device);
        let longest = trajectories.iter().map(|row| row.forward_tokens()).max().unwrap_or(0);
        let mut picked: Vec<i64> = Vec::new();
        let mut ids: Vec<i64> = Vec::new();
        let mut mask: Vec<i64> = Vec::new();
        let mut observations: Vec<f64> = Vec::new();
        let mut shape: Vec<i64> = Vec::new();
        for (row, trajectory) in trajectories.iter().enumerate() {
            let start = (row * longest) as i64;
            match &trajectory.content {
                Content::Tokens { prompt_ids, response_ids } => {
                    ids.extend(prompt_ids.iter().chain(response_ids));
                    let first = start + prompt_ids.len() as i64 - 1;
                    picked.extend(first..first + response_ids.len() as i64);
                    mask.resize(ids.len(), 1);
                    ids.resize((row + 1) * longest, 0);
                    mask.resize((row + 1) * longest, 0);
                }
                Content::Steps { observations: values, shape: one, actions } => {
                    observations.extend(values);
                    let width: i64 = one.iter().product();
                    picked.extend(start..start + actions.len() as i64);
                    observations.resize((row + 1) * longest * width as usize, 0.0);
                    shape.clone_from(one);
                }
            }
        }
        let rows = [trajectories.len() as i64, longest as i64];
        let logits = match self.options.kind {
            PolicyKind::CausalLm => {
                let tensor = |numbers: &[i64]| Tensor::from_slice(numbers).to_device(device);
                let ids = tensor(&ids).f_reshape(rows)?;
                self.token_logits(&ids, &tensor(&mask).f_reshape(rows)?)?
            }
            PolicyKind::Step => {
                let mut size = vec![rows[0] * rows[1]];
                size.extend(shape);
                let kind = self.options.observation_dtype.kind(self.kind);
                let observations = Tensor::from_slice(&observations).f_reshape(size)?;
                self.step_logits(&observations.to_kind(kind).to_device(device))?
            }
        };
        let picked = Tensor::from_slice(&picked).to_device(device);
        let logits =
            logits.reshape([rows[0] * rows[1], self.choices]).f_index_select(0, &picked)?;
        Ok(BatchLogits { logits, actions })
    }
}

/// What a trial and a loaded policy share: a call of forward with token ids.
fn token_logits(
    module: &Module,
    signature: &Signature,
    options: &PolicyOptions,
    ids: &Tensor,
    mask: &Tensor,
) -> std::result::Result<Tensor, String> {
    let positions = (mask.cumsum(-1, Kind::Int64) - 1).clamp_min(0);
    let inputs: Vec<(&str, &Tensor)> = signature
        .arguments
        .iter()
        .map(|(name, role)| {
            let tensor = match role {
                Role::AttentionMask => mask,
                Role::PositionIds => &positions,
                Role::InputIds | Role::Observation => ids,
            };
            (name.as_str(), tensor)
        })
        .collect();
    let outputs = module.forward(&inputs, options.optimize_graph)?;
    signature::select_logits(outputs, &options.output, &ids.size())
}

fn step_logits(
    module: &Module,
    signature: &Signature,
    options: &PolicyOptions,
    observations: &Tensor,
) -> std::result::Result<Tensor, String> {
    let inputs: Vec<(&str, &Tensor)> =
        signature.arguments.iter().map(|(name, _)| (name.as_str(), observations)).collect();
    let outputs = module.forward(&inputs, options.optimize_graph)?;
    signature::select_logits(outputs, &options.output, &observations.size()[..1])
}
