//! What every engine gives of a group.

use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::rows::{GroupInput, RowStats, Scorer};
use super::split::GroupProducts;
use crate::error::Result;
use crate::policy::Policy;

/// Takes the gradients of groups' trajectories.
pub trait Engine {
    /// How many of the next groups it takes at once, at least one. `groups` are their sizes: the
    /// number of trajectories and the tokens of the longest.
    fn pack(&self, _policy: &Policy, _groups: &[(usize, usize)]) -> usize {
        1
    }

    /// The inner products of each group's gradients, and their sums. `tick` is called once a
    /// trajectory, and may ask to stop: the result is then `None`.
    ///
    /// # Errors
    /// If libtorch fails or a loss or a gradient is not finite.
    fn groups(
        &mut self,
        scorer: &Scorer,
        inputs: &[GroupInput],
        tick: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<PackResult>>;

    /// What the user should know of how the engine worked, since the last call.
    fn notes(&mut self) -> Vec<String> {
        Vec::new()
    }
}

/// How the regularizer is taken apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Components {
    /// KL and entropy apart, at a backward pass each.
    #[default]
    Separate,
    /// Their weighted sum, in one pass.
    Combined,
}

/// A part of the regularizer whose gradient is taken by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The KL term, at coefficient 1.
    Kl,
    /// Minus the entropy, at coefficient 1.
    Entropy,
    /// The KL term and minus the entropy, each with its coefficient.
    Combined,
}

/// What an engine gives of a few groups that it took at once.
#[derive(Debug)]
pub struct PackResult {
    /// One a group, in their order.
    pub groups: Vec<GroupResult>,
    /// The gradients of the groups' losses.
    pub gradients: PackGradients,
}

/// Gradients of the losses of `P` groups: for every trainable parameter `[P, ..]` of its shape, or,
/// of a sketch, `[P, k]`.
#[derive(Debug)]
pub struct PackGradients {
    /// Of the task; none where all are 0.
    pub task: Option<Vec<Tensor>>,
    /// Of the regularizer's parts.
    pub parts: Vec<(Part, Vec<Tensor>)>,
}

/// What an engine gives of a group.
#[derive(Debug)]
pub struct GroupResult {
    /// Inner products of the whole vectors.
    pub products: GroupProducts,
    /// The same for every trainable parameter, if that was asked for.
    pub by_parameter: Vec<GroupProducts>,
    /// For the bound: the squared norm of the row's share of the score, for rows of advantage 0;
    /// empty if it was not asked for.
    pub score_norms_sq: Vec<Option<f64>>,
    /// Sums over the sampled tokens of each row.
    pub stats: Vec<RowStats>,
}
