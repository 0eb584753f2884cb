//! The parameters of a module, a tied weight counted once.

use regex::Regex;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::native::Module;

/// One parameter tensor, under every name it has in the module.
#[derive(Debug)]
pub struct Parameter {
    /// Its dotted names; more than one if the weight is tied.
    pub names: Vec<String>,
    /// The leaf tensor.
    pub tensor: Tensor,
    /// Whether gradients are taken with respect to it.
    pub trainable: bool,
    /// Whether the file says that it requires a gradient.
    pub requires_grad_in_file: bool,
}

impl Parameter {
    /// The first of its names.
    pub fn name(&self) -> &str {
        &self.names[0]
    }

    /// The number of its elements.
    pub fn numel(&self) -> usize {
        self.tensor.numel()
    }
}

/// Reads the parameters. Weights of one storage, shape and layout are one parameter (the shim has
/// made them one tensor already). `selected` picks the trainable ones by name among those that the
/// file says require a gradient.
///
/// # Errors
/// As [`unify`], or if libtorch fails.
pub(super) fn read(module: &Module, selected: &Regex) -> Result<Vec<Parameter>> {
    let named = module
        .named_parameters()
        .map_err(|message| Error::torch("listing the parameters", &message))?;
    let mut parameters = unify(named)?;
    for parameter in &mut parameters {
        parameter.trainable = parameter.requires_grad_in_file
            && parameter.names.iter().any(|name| selected.is_match(name));
        if !parameter.trainable && parameter.requires_grad_in_file {
            // Autograd then spends nothing on it.
            let _ = parameter.tensor.set_requires_grad(false);
        }
    }
    Ok(parameters)
}

/// One parameter for all names of one storage, shape and layout, in order of first appearance;
/// trainable if it requires a gradient.
///
/// # Errors
/// If two parameters overlap in memory in any other way than by being equal: their gradients would
/// not be those of one vector of weights.
pub(crate) fn unify(named: impl IntoIterator<Item = (String, Tensor)>) -> Result<Vec<Parameter>> {
    let mut parameters: Vec<Parameter> = Vec::new();
    let mut index = std::collections::HashMap::new();
    for (name, tensor) in named {
        // Empty tensors share the null address, and nothing else.
        let address = if tensor.numel() == 0 { index.len() } else { tensor.data_ptr() as usize };
        let identity = (address, tensor.size(), tensor.stride());
        let slot = *index.entry(identity).or_insert_with(|| {
            let requires_grad = tensor.requires_grad();
            parameters.push(Parameter {
                names: Vec::new(),
                tensor,
                trainable: requires_grad,
                requires_grad_in_file: requires_grad,
            });
            parameters.len() - 1
        });
        parameters[slot].names.push(name);
    }
    refuse_overlap(&parameters)?;
    Ok(parameters)
}

fn refuse_overlap(parameters: &[Parameter]) -> Result<()> {
    let mut ranges: Vec<(usize, usize, &str)> = parameters
        .iter()
        .filter(|parameter| parameter.numel() > 0)
        .map(|parameter| {
            let tensor = &parameter.tensor;
            let extent: i64 = tensor
                .size()
                .iter()
                .zip(tensor.stride())
                .map(|(size, stride)| (size - 1) * stride)
                .sum();
            let start = tensor.data_ptr() as usize;
            let bytes = (extent as usize + 1) * tensor.kind().elt_size_in_bytes();
            (start, start + bytes, parameter.name())
        })
        .collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((_, end, first), (start, _, second)) = (pair[0], pair[1]);
        if start < end {
            return Err(Error::torch(
                "listing the parameters",
                &format!(
                    "`{first}` and `{second}` share memory without being the same tensor; export the module with the view computed in forward"
                ),
            ));
        }
    }
    Ok(())
}

/// The first parameter or buffer that holds a NaN or an infinity.
pub(super) fn first_non_finite<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a Tensor)>,
) -> Option<&'a str> {
    let _no_grad = tch::no_grad_guard();
    tensors
        .into_iter()
        .find(|(_, tensor)| {
            tensor.is_floating_point() && tensor.isfinite().all().int64_value(&[]) == 0
        })
        .map(|(name, _)| name)
}

/// The distinct dtypes of the floating-point parameters, in order of appearance.
pub(super) fn kinds(parameters: &[Parameter]) -> Vec<Kind> {
    let mut kinds = Vec::new();
    for parameter in parameters {
        let kind = parameter.tensor.kind();
        if parameter.tensor.is_floating_point() && !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds
}
