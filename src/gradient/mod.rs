//! The split of policy gradients: engines that take them, and the estimators on top.

mod batch;
mod batched;
mod engine;
mod factors;
mod gram;
mod plain;
mod rows;
mod split;
mod statistics;

pub use batch::{BatchSignal, Coherence, ComponentNorms, ComponentSums};
pub use batched::BatchedEngine;
pub use engine::{Engine, GroupGradients, GroupResult};
pub use gram::{GradientVector, Gram, gram};
pub use plain::PlainEngine;
pub(crate) use rows::padded;
pub use rows::{GroupInput, RowStats, Scorer};
pub use split::{Coefficients, Debias, GroupProducts, Split, split};
pub use statistics::{Buckets, mean, median, spearman};
