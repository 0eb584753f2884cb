//! Which argument of forward is what, and which tensor of its output holds the logits.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::PolicyKind;
use crate::native::Argument;

/// What an argument of forward is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Token ids `[B, T]`, int64.
    InputIds,
    /// 1 on tokens, 0 on padding, `[B, T]`, int64.
    AttentionMask,
    /// The position of each token among those of its row, `[B, T]`, int64.
    PositionIds,
    /// Observations `[T, ..]` of a step policy.
    Observation,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::InputIds => "input_ids",
            Self::AttentionMask => "attention_mask",
            Self::PositionIds => "position_ids",
            Self::Observation => "observation",
        }
    }
}

/// How the arguments are found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Inputs {
    /// By their names in the module.
    #[default]
    Auto,
    /// By their order.
    Order(Vec<Role>),
}

/// How the logits are found in the output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// The only tensor of a fitting shape, or the one named `logits`.
    #[default]
    Auto,
    /// By the key of a dictionary or the index of a tuple.
    Named(String),
}

/// The arguments that a call of forward is given, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// In the order of the module.
    pub arguments: Vec<(String, Role)>,
}

/// `forward(input_ids: Tensor, use_cache: bool = ...)`
pub(super) fn describe(arguments: &[Argument]) -> String {
    format!("forward({})", list(arguments))
}

/// `input_ids: Tensor, use_cache: bool = ...`
pub(super) fn list(arguments: &[Argument]) -> String {
    let arguments: Vec<String> = arguments
        .iter()
        .map(|argument| {
            let default = if argument.has_default { " = ..." } else { "" };
            format!("{}: {}{default}", argument.name, argument.type_name)
        })
        .collect();
    arguments.join(", ")
}

/// Assigns roles to arguments, or says why that cannot be done.
pub(super) fn resolve(
    arguments: &[Argument],
    kind: PolicyKind,
    inputs: &Inputs,
) -> Result<Signature, String> {
    let found = describe(arguments);
    let main = match kind {
        PolicyKind::CausalLm => Role::InputIds,
        PolicyKind::Step => Role::Observation,
    };
    let assigned: Vec<(&Argument, Role)> = match inputs {
        Inputs::Order(roles) => {
            if roles.len() > arguments.len() {
                return Err(format!(
                    "policy.inputs names {} arguments, and the module has {found}",
                    roles.len()
                ));
            }
            arguments.iter().zip(roles.iter().copied()).collect()
        }
        Inputs::Auto => by_name(arguments, main),
    };
    if let Some((argument, _)) =
        assigned.iter().find(|(argument, _)| !argument.type_name.contains("Tensor"))
    {
        return Err(format!("expected `{}` to be a tensor, found {found}", argument.name));
    }
    if assigned.iter().filter(|(_, role)| *role == main).count() != 1 {
        return Err(format!(
            "expected one argument for {}, found {found}; say what the arguments are, in order, in policy.inputs, such as [input_ids, attention_mask]",
            main.name()
        ));
    }
    if let Some(left) = arguments.iter().find(|argument| {
        !argument.has_default && !assigned.iter().any(|(known, _)| known == argument)
    }) {
        return Err(format!(
            "cannot tell what to pass for `{}` of {found}; policies take input_ids, with attention_mask and position_ids if they want, or one observation; if it is one of these, name the arguments, in order, in policy.inputs",
            left.name
        ));
    }
    let arguments =
        assigned.into_iter().map(|(argument, role)| (argument.name.clone(), role)).collect();
    Ok(Signature { arguments })
}

/// Arguments with a known name; failing `input_ids`, the only required tensor of another name.
fn by_name(arguments: &[Argument], main: Role) -> Vec<(&Argument, Role)> {
    let mut assigned: Vec<(&Argument, Role)> = Vec::new();
    let mut others = Vec::new();
    for argument in arguments {
        let role = [Role::InputIds, Role::AttentionMask, Role::PositionIds, Role::Observation]
            .into_iter()
            .find(|role| role.name() == argument.name)
            .filter(|role| *role == main || main == Role::InputIds && *role != Role::Observation);
        match role {
            Some(role) => assigned.push((argument, role)),
            None if !argument.has_default && argument.type_name.contains("Tensor") => {
                others.push(argument);
            }
            None => {}
        }
    }
    if let ([only], false) = (others.as_slice(), assigned.iter().any(|(_, role)| *role == main)) {
        assigned.push((only, main));
    }
    assigned
}

/// The logits among the tensors of an output: floating, with the leading dimensions `lead` and one
/// more for the vocabulary or the actions. Hands back the reason if there is no single one.
pub(super) fn select_logits(
    mut outputs: Vec<(String, Tensor)>,
    output: &Output,
    lead: &[i64],
) -> Result<Tensor, String> {
    let fits = |tensor: &Tensor| {
        let size = tensor.size();
        tensor.is_floating_point()
            && size.len() == lead.len() + 1
            && size.starts_with(lead)
            && size.last() > Some(&0)
    };
    let found = outputs
        .iter()
        .map(|(name, tensor)| {
            let name = if name.is_empty() { String::new() } else { format!("`{name}` ") };
            format!("{name}{:?} {:?}", tensor.kind(), tensor.size())
        })
        .collect::<Vec<_>>()
        .join(", ");
    let found = if found.is_empty() { "no tensor".to_owned() } else { found };
    let expected = format!("floating-point logits of shape {lead:?} and a last dimension");
    let position = match output {
        Output::Named(wanted) => {
            let position =
                outputs.iter().position(|(name, _)| name == wanted).ok_or_else(|| {
                    format!("policy.output names `{wanted}`; the output of forward holds {found}")
                })?;
            if !fits(&outputs[position].1) {
                return Err(format!("expected {expected}, found {found}"));
            }
            position
        }
        Output::Auto => {
            let fitting: Vec<usize> =
                (0..outputs.len()).filter(|index| fits(&outputs[*index].1)).collect();
            let mut by_name = fitting
                .iter()
                .copied()
                .filter(|index| outputs[*index].0.rsplit('.').next() == Some("logits"));
            let named = by_name.next().filter(|_| by_name.next().is_none());
            match (named, fitting.as_slice()) {
                (Some(index), _) => index,
                (None, [index]) => *index,
                (None, []) => return Err(format!("expected {expected}, found {found}")),
                (None, _) => {
                    return Err(format!(
                        "cannot tell which of {found} holds the logits; name it in policy.output"
                    ));
                }
            }
        }
    };
    Ok(outputs.swap_remove(position).1)
}
