//! AdamW whose state can be saved: the optimisers of `tch` keep theirs to themselves.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::objective::expect_shape;
use crate::policy::{Parameter, Policy, unify};

/// Learning rate and decays; the defaults are torch's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWOptions {
    /// The full learning rate.
    pub learning_rate: f64,
    /// The decay of the mean gradient.
    pub beta1: f64,
    /// The decay of the mean squared gradient.
    pub beta2: f64,
    /// Added to the root of the mean square; above 0.
    pub epsilon: f64,
    /// The decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 }
    }
}

impl AdamWOptions {
    fn check(&self) -> Result<()> {
        let known: fn(f64) -> bool = |value| value >= 0.0 && value.is_finite();
        // A weight without any gradient yet would become 0/0.
        let above_zero: fn(f64) -> bool = |value| value > 0.0 && value.is_finite();
        let below_one: fn(f64) -> bool = |value| (0.0..1.0).contains(&value);
        for (argument, value, fits, expected) in [
            ("learning_rate", self.learning_rate, known, "a number of at least 0"),
            ("beta1", self.beta1, below_one, "a number from 0 to below 1"),
            ("beta2", self.beta2, below_one, "a number from 0 to below 1"),
            ("epsilon", self.epsilon, above_zero, "a number above 0"),
            ("weight_decay", self.weight_decay, known, "a number of at least 0"),
        ] {
            if !fits(value) {
                return Err(Error::Argument {
                    argument,
                    expected: expected.into(),
                    found: value.to_string(),
                });
            }
        }
        Ok(())
    }
}

/// AdamW (arXiv 1711.05101, Algorithm 2) with the arithmetic of `torch.optim.AdamW`. With gradient g,
/// learning rate η, and t the updates of the parameter, this one among them:
///
/// ```text
/// w ← w·(1 − η·weight_decay)
/// m ← β₁ m + (1 − β₁) g
/// v ← β₂ v + (1 − β₂) g²
/// w ← w − η/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)
/// ```
///
/// As in torch, a parameter without a gradient is left alone, decay included, and m and v have the
/// parameter's own dtype: in half precision an update of less than a 256th of a weight is lost, so
/// train in float32. A weight that is known under several names is one parameter, and is stepped once.
#[derive(Debug)]
pub struct AdamW {
    options: AdamWOptions,
    parameters: Vec<Parameter>,
    moments: Vec<Moments>,
}

/// What is remembered of a parameter.
#[derive(Debug)]
struct Moments {
    /// t
    updates: i64,
    /// m
    mean: Tensor,
    /// v
    mean_square: Tensor,
}

impl AdamW {
    /// An optimiser of named tensors that require a gradient; they are stepped in place. Two names
    /// of one weight must be handles of one tensor, as `shallow_clone` gives them, for its gradient to
    /// be whole. Sort what comes from a `HashMap`, such as the variables of a `VarStore`: sums over
    /// the parameters are taken in this order, and are rounded by it.
    ///
    /// # Errors
    /// If an option is out of range, a tensor is not floating or requires no gradient, two tensors
    /// overlap in memory without being the same, or two parameters have one name.
    pub fn new(
        options: AdamWOptions,
        named: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<Self> {
        options.check()?;
        let parameters = unify(named)?;
        let mut names = std::collections::HashSet::new();
        for parameter in &parameters {
            let refuse = |found: &str| Error::Argument {
                argument: "named",
                expected: "distinct names of floating-point tensors that require a gradient".into(),
                found: format!("`{}`, {found}", parameter.name()),
            };
            if !parameter.tensor.is_floating_point() {
                return Err(refuse(&format!("of {:?}", parameter.tensor.kind())));
            }
            if !parameter.tensor.requires_grad() {
                return Err(refuse("which requires none"));
            }
            if !parameter.names.iter().all(|name| names.insert(name)) {
                return Err(refuse("twice"));
            }
        }
        let zeros = |parameter: &Parameter| parameter.tensor.detach().zeros_like();
        let moments = parameters
            .iter()
            .map(|parameter| Moments {
                updates: 0,
                mean: zeros(parameter),
                mean_square: zeros(parameter),
            })
            .collect();
        Ok(Self { options, parameters, moments })
    }

    /// An optimiser of the trainable parameters of a policy.
    ///
    /// # Errors
    /// If an option is out of range.
    pub fn of_policy(options: AdamWOptions, policy: &Policy) -> Result<Self> {
        let named = policy
            .trainable()
            .map(|parameter| (parameter.name().to_owned(), parameter.tensor.shallow_clone()));
        Self::new(options, named)
    }

    /// Learning rate and decays.
    pub fn options(&self) -> &AdamWOptions {
        &self.options
    }

    /// What it steps, each weight once; gradients come in this order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// One update along minus the gradients, one a parameter; `None` leaves a parameter as it is.
    /// Whether the gradients are finite is the caller's to see to, as [`Optimizer`](super::Optimizer)
    /// does.
    ///
    /// # Errors
    /// If there is not one gradient a parameter, of its shape; nothing is changed then. If libtorch
    /// fails.
    pub fn step(&mut self, gradients: &[Option<Tensor>], learning_rate: f64) -> Result<()> {
        if gradients.len() != self.parameters.len() {
            return Err(Error::Argument {
                argument: "gradients",
                expected: format!("one for each of {} parameters", self.parameters.len()),
                found: gradients.len().to_string(),
            });
        }
        let pairs = || self.parameters.iter().zip(gradients);
        for (parameter, gradient) in pairs() {
            if let Some(gradient) = gradient {
                expect_shape("gradients", gradient, &parameter.tensor)?;
            }
        }
        let _no_grad = tch::no_grad_guard();
        for ((parameter, gradient), moments) in pairs().zip(&mut self.moments) {
            if let Some(gradient) = gradient {
                let gradient = gradient.f_to_kind(parameter.tensor.kind())?;
                moments.step(&self.options, &parameter.tensor, &gradient, learning_rate)?;
            }
        }
        Ok(())
    }

    /// m, v and t of every parameter, under `exp_avg/NAME`, `exp_avg_sq/NAME` and `step/NAME`; the
    /// tensors are those that the next step changes.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let mut state = Vec::with_capacity(3 * self.parameters.len());
        for (parameter, moments) in self.parameters.iter().zip(&self.moments) {
            let name = parameter.name();
            state.push((format!("exp_avg/{name}"), moments.mean.shallow_clone()));
            state.push((format!("exp_avg_sq/{name}"), moments.mean_square.shallow_clone()));
            state.push((format!("step/{name}"), Tensor::from(moments.updates)));
        }
        state
    }

    /// Takes up a state, bit for bit. Tensors of other names do not matter.
    ///
    /// # Errors
    /// If a parameter's state is missing or of another shape or dtype; nothing is changed then.
    pub fn restore(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let state: HashMap<&str, &Tensor> =
            state.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let restored: Vec<Moments> = self
            .parameters
            .iter()
            .map(|parameter| {
                let (name, tensor) = (parameter.name(), &parameter.tensor);
                let moment = |key: &str| -> Result<Tensor> {
                    let (size, kind) = (tensor.size(), tensor.kind());
                    let found = saved(&state, &format!("{key}/{name}"), &size, kind)?;
                    // A copy, of the device and the layout of the parameter.
                    let mut moment = tensor.detach().zeros_like();
                    moment.f_copy_(found)?;
                    Ok(moment)
                };
                Ok(Moments {
                    updates: saved(&state, &format!("step/{name}"), &[], Kind::Int64)?
                        .int64_value(&[]),
                    mean: moment("exp_avg")?,
                    mean_square: moment("exp_avg_sq")?,
                })
            })
            .collect::<Result<_>>()?;
        self.moments = restored;
        Ok(())
    }
}

impl Moments {
    /// Under no-grad. The order of operations is torch's, so that the result is too.
    fn step(
        &mut self,
        options: &AdamWOptions,
        parameter: &Tensor,
        gradient: &Tensor,
        learning_rate: f64,
    ) -> Result<()> {
        let mut weight = parameter.shallow_clone();
        self.updates += 1;
        if options.weight_decay != 0.0 {
            let _ = weight.f_mul_scalar_(1.0 - learning_rate * options.weight_decay)?;
        }
        let _ = self.mean.f_lerp_(gradient, 1.0 - options.beta1)?;
        // torch: addcmul with value 1 − β₂, which is taken into the first factor there too.
        let scaled = gradient.f_mul_scalar(1.0 - options.beta2)?;
        let _ = self.mean_square.f_mul_scalar_(options.beta2)?.f_addcmul_(&scaled, gradient)?;

        let updates = self.updates as f64;
        let correction1 = 1.0 - options.beta1.powf(updates);
        let correction2 = 1.0 - options.beta2.powf(updates);
        let denominator = (self.mean_square.f_sqrt()?.f_div_scalar(correction2.sqrt())?)
            .f_add_scalar(options.epsilon)?;
        // torch: addcdiv with value −η/(1 − β₁ᵗ), which multiplies before it is divided.
        let change = self.mean.f_mul_scalar(-(learning_rate / correction1))?.f_div(&denominator)?;
        let _ = weight.f_add_(&change)?;
        Ok(())
    }
}

/// A tensor of a saved state, checked.
pub(super) fn saved<'a>(
    state: &HashMap<&str, &'a Tensor>,
    name: &str,
    size: &[i64],
    kind: Kind,
) -> Result<&'a Tensor> {
    let refuse = |found: String| Error::Argument {
        argument: "state",
        expected: format!("`{name}`, {kind:?} {size:?}, of an optimiser of the same parameters"),
        found,
    };
    let tensor = *state.get(name).ok_or_else(|| refuse("none of that name".into()))?;
    if tensor.size() != size || tensor.kind() != kind {
        return Err(refuse(format!("{:?} {:?}", tensor.kind(), tensor.size())));
    }
    Ok(tensor)
}
