//! Everything that can be said of a checkpoint without rollouts.

use std::path::Path;

use serde::Serialize;
use tch::Kind;

use super::check::{self, Problem};
use super::parameters::{self, Parameter};
use super::sample::{self, CacheMethod};
use super::signature::{self, Signature};
use super::{PolicyKind, PolicyOptions};
use crate::error::{Error, Result, without_backtrace};
use crate::native::Module;

/// What was found in a checkpoint; loading a policy starts from it.
pub struct Inspection {
    pub(super) module: Module,
    pub(super) parameters: Vec<Parameter>,
    /// Its forward as written in Python.
    pub forward: String,
    /// What the arguments of forward are given, if that could be found out.
    pub signature: Option<Signature>,
    /// The vocabulary size or number of actions, if forward could be called.
    pub choices: Option<i64>,
    /// Whether it has a `forward_cached` that can be sampled with.
    pub cache: bool,
    /// The distinct dtypes of the floating-point parameters.
    pub dtypes: Vec<Kind>,
    /// Buffers: their number and elements.
    pub buffers: (usize, usize),
    /// Whether the file was saved in train mode.
    pub saved_in_train_mode: bool,
    /// What is wrong with it.
    pub problems: Vec<Problem>,
}

/// A parameter as [`Inspection::parameters`] lists it.
#[derive(Clone, Debug, Serialize)]
pub struct ParameterInfo {
    /// All names; more than one for a tied weight.
    pub names: Vec<String>,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its dtype.
    pub dtype: String,
    /// Its elements.
    pub elements: usize,
    /// Whether it requires a gradient and is selected.
    pub trainable: bool,
}

impl Inspection {
    /// Loads a file and looks at it.
    ///
    /// # Errors
    /// If the file cannot be loaded at all; everything else is a [`Problem`].
    pub fn run(path: &Path, options: &PolicyOptions) -> Result<Self> {
        let size = std::fs::metadata(path).map_err(Error::io("read the checkpoint", path))?;
        if size.is_dir() {
            return Err(Error::checkpoint(path, "expected a TorchScript file, found a directory"));
        }
        let mut module =
            Module::load(path, options.device).map_err(|message| loading_error(path, &message))?;
        let internal = |message: String| Error::checkpoint(path, without_backtrace(&message));
        let saved_in_train_mode = module.is_training();
        module.set_training(false).map_err(internal)?;
        if let Some(kind) = options.dtype.kind() {
            module.cast(kind).map_err(internal)?;
        }
        let parameters = parameters::read(&module, &options.trainable)
            .map_err(|error| Error::checkpoint(path, error.to_string()))?;
        let buffers = module.named_buffers().map_err(internal)?;
        let dtypes = parameters::kinds(&parameters);
        let mut problems = weight_problems(&parameters, &buffers, &dtypes, options);

        let (forward, signature) = match module.arguments() {
            Err(message) => {
                problems.push(Problem::Error(without_backtrace(&message)));
                (String::new(), None)
            }
            Ok(arguments) => {
                let resolved = signature::resolve(&arguments, options.kind, &options.inputs);
                let signature = match resolved {
                    Ok(signature) => Some(signature),
                    Err(message) => {
                        problems.push(Problem::Error(message));
                        None
                    }
                };
                (signature::describe(&arguments), signature)
            }
        };
        let cache = sample::find_cache(&module).map_err(internal)?;
        if let CacheMethod::Other(found) = &cache {
            problems.push(Problem::Warning(format!(
                "its {found} is not used: a key-value cache takes {}",
                sample::CACHED_SCHEMA
            )));
        }
        let mut choices = None;
        let can_try = options.kind == PolicyKind::CausalLm || options.observation_shape.is_some();
        if let (Some(signature), true) = (&signature, can_try) {
            let kind = dtypes.first().copied().unwrap_or(Kind::Float);
            let trial = check::run(&module, signature, options, kind);
            choices = trial.choices;
            // What is said of the parameters explains why no gradient reaches them.
            let known = problems.iter().any(|problem| matches!(problem, Problem::NotTrainable(_)));
            problems.extend(
                trial
                    .problems
                    .into_iter()
                    .filter(|problem| !known || !matches!(problem, Problem::NotTrainable(_))),
            );
        }
        Ok(Self {
            module,
            parameters,
            forward,
            signature,
            choices,
            cache: cache == CacheMethod::Usable,
            dtypes,
            buffers: (buffers.len(), buffers.iter().map(|(_, buffer)| buffer.numel()).sum()),
            saved_in_train_mode,
            problems,
        })
    }

    /// The parameters, a tied weight once.
    pub fn parameters(&self) -> Vec<ParameterInfo> {
        self.parameters
            .iter()
            .map(|parameter| ParameterInfo {
                names: parameter.names.clone(),
                shape: parameter.tensor.size(),
                dtype: dtype_name(parameter.tensor.kind()),
                elements: parameter.numel(),
                trainable: parameter.trainable,
            })
            .collect()
    }
}

/// The name that PyTorch gives a dtype.
pub fn dtype_name(kind: Kind) -> String {
    match kind {
        Kind::Float => "float32".into(),
        Kind::Double => "float64".into(),
        Kind::Half => "float16".into(),
        Kind::BFloat16 => "bfloat16".into(),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn weight_problems(
    parameters: &[Parameter],
    buffers: &[(String, tch::Tensor)],
    dtypes: &[Kind],
    options: &PolicyOptions,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    if parameters.is_empty() {
        problems.push(Problem::NotTrainable(
            "it has no parameters: it was frozen (torch.jit.freeze, optimize_for_inference), or its weights became constants; save the module unfrozen, as torch.jit.script(model).save(path) or torch.jit.trace(model, example).save(path) does".into(),
        ));
    } else if parameters.iter().all(|parameter| !parameter.requires_grad_in_file) {
        problems.push(Problem::NotTrainable(
            "none of its parameters requires a gradient; call parameter.requires_grad_(True) before exporting it".into(),
        ));
    } else if !parameters.iter().any(|parameter| parameter.trainable) {
        let example = parameters.iter().find(|parameter| parameter.requires_grad_in_file);
        problems.push(Problem::NotTrainable(format!(
            "policy.trainable `{}` matches no parameter that requires a gradient; one of them is `{}`",
            options.trainable,
            example.map_or("", |parameter| parameter.name()),
        )));
    }
    if let Some(parameter) = parameters
        .iter()
        .find(|parameter| parameter.trainable && !parameter.tensor.is_floating_point())
    {
        problems.push(Problem::Error(format!(
            "expected trainable parameters of a real floating-point dtype, found `{}` of {}",
            parameter.name(),
            dtype_name(parameter.tensor.kind())
        )));
    }
    let weights = parameters.iter().map(|parameter| (parameter.name(), &parameter.tensor));
    let named_buffers = buffers.iter().map(|(name, buffer)| (name.as_str(), buffer));
    if let Some(name) = parameters::first_non_finite(weights) {
        problems.push(Problem::Error(format!("parameter `{name}` holds NaN or infinity")));
    }
    // Masks of attention are filled with −∞ on purpose.
    if let Some((name, _)) = named_buffers
        .filter(|(_, buffer)| buffer.is_floating_point())
        .find(|(_, buffer)| buffer.isnan().any().int64_value(&[]) != 0)
    {
        problems.push(Problem::Error(format!("buffer `{name}` holds NaN")));
    }
    if dtypes.len() > 1 {
        let names: Vec<String> = dtypes.iter().copied().map(dtype_name).collect();
        problems.push(Problem::Warning(format!(
            "its parameters are of several dtypes: {}",
            names.join(", ")
        )));
    }
    problems
}

/// libtorch's errors on loading, in words that say what to do.
fn loading_error(path: &Path, message: &str) -> Error {
    let problem = if std::fs::metadata(path).is_ok_and(|data| data.len() == 0) {
        "expected a TorchScript file, found an empty file".to_owned()
    } else if message.contains("constants.pkl") {
        "expected TorchScript, found a file of torch.save (a state dict or a pickled model); export the model itself with torch.jit.script or torch.jit.trace".to_owned()
    } else if message.contains("failed finding central directory")
        || message.contains("not a ZIP archive")
        || message.contains("invalid header or archive is corrupted")
        || message.contains("file in archive is not in a subdirectory")
    {
        "expected a TorchScript archive; the file is truncated, damaged or of another format"
            .to_owned()
    } else {
        format!("libtorch cannot load it: {}", without_backtrace(message))
    };
    Error::checkpoint(path, problem)
}
