//! What filtering does to the loss and to the number of optimiser steps.

use serde::{Deserialize, Serialize};

use super::Selection;

/// How the loss of what is kept is scaled by the share that is kept.
///
/// The loss of a filtered batch is a mean over what was kept: without scaling, a batch of which a
/// tenth is kept moves the weights as far as a whole one. The factor belongs on the whole loss, KL and
/// entropy included; on the advantages alone it would leave the regularizers at full strength exactly
/// where little is learned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossScale {
    /// Factor 1.
    #[default]
    None,
    /// The kept share of the groups: each kept group then weighs what it weighs in the whole batch.
    Linear,
    /// Its square root, as learning rates are scaled with the batch size under Adam.
    Sqrt,
}

impl LossScale {
    /// What the whole loss of the kept groups is multiplied by, from 0 to 1. If none is kept there is
    /// no loss, and the factor is 0, or 1 without scaling.
    pub fn factor(self, selection: &Selection) -> f64 {
        let share = selection.count as f64 / selection.groups.max(1) as f64;
        match self {
            Self::None => 1.0,
            Self::Linear => share,
            Self::Sqrt => share.sqrt(),
        }
    }
}

/// How many optimiser steps so many groups make at `mini_batch_size` groups a step, the last of which
/// may be smaller; without a size the batch is one step. 0 of no groups.
///
/// A filter that keeps fewer groups makes fewer steps of the same size, and so a learning rate schedule
/// by optimiser steps runs slower. It cannot be otherwise without smaller mini-batches; but it must
/// be seen, and so [`KeptRecord`](super::KeptRecord) holds both numbers.
pub fn optimizer_steps(groups: usize, mini_batch_size: Option<usize>) -> usize {
    match mini_batch_size {
        Some(size) => groups.div_ceil(size.max(1)),
        None => groups.min(1),
    }
}
