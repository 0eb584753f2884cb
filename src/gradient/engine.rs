//! What every engine gives of a group.

use std::ops::ControlFlow;

use super::gram::GradientVector;
use super::rows::{GroupInput, RowStats, Scorer};
use super::split::GroupProducts;
use crate::error::Result;

/// Takes the gradients of a group's trajectories.
pub trait Engine {
    /// The inner products and sums of a group's gradients. `tick` is called once a trajectory, and
    /// may ask to stop: the result is then `None`.
    ///
    /// # Errors
    /// If libtorch fails or a loss or a gradient is not finite.
    fn group(
        &mut self,
        scorer: &Scorer,
        input: &GroupInput,
        tick: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<GroupResult>>;

    /// What the user should know of how the engine worked, since the last call.
    fn notes(&mut self) -> Vec<String> {
        Vec::new()
    }
}

/// The gradients of a group's loss, at coefficient 1.
#[derive(Debug)]
pub struct GroupGradients {
    /// The task gradient; none where it is 0.
    pub task: Option<GradientVector>,
    /// The KL gradient; none without a reference policy.
    pub kl: Option<GradientVector>,
    /// The gradient of minus the entropy.
    pub entropy: GradientVector,
}

/// What an engine gives of a group.
#[derive(Debug)]
pub struct GroupResult {
    /// Inner products of the whole vectors.
    pub products: GroupProducts,
    /// The same for every trainable parameter, if that was asked for.
    pub by_parameter: Vec<GroupProducts>,
    /// The sums over the rows.
    pub gradients: GroupGradients,
    /// For the bound: the squared norm of the row's share of the score, for rows of advantage 0;
    /// empty if it was not asked for.
    pub score_norms_sq: Vec<Option<f64>>,
    /// Sums over the sampled tokens of each row.
    pub stats: Vec<RowStats>,
}
