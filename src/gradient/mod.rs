//! The split of policy gradients: engines that take them, and the estimators on top.

mod assemble;
mod batch;
mod batched;
mod engine;
mod factors;
mod gram;
mod loss;
mod pack;
mod passes;
mod plain;
mod row_products;
mod rows;
mod sketch;
mod split;
mod statistics;

pub use batch::{BatchSignal, Coherence, ComponentNorms, ComponentSums};
pub use batched::BatchedEngine;
pub use engine::{Components, Engine, GroupResult, PackGradients, PackResult, Part};
pub use gram::{GradientVector, Gram, gram};
pub use loss::{LossBatch, LossTerms};
pub(crate) use pack::length_chunks;
pub use plain::PlainEngine;
pub use rows::{GroupInput, RowStats, Scorer};
pub(crate) use rows::{pad_rows, padded};
pub use split::{Coefficients, Debias, GroupProducts, SketchError, Split, split};
pub use statistics::{Buckets, mean, median, spearman};
