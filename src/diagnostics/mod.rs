//! Has the policy begun to answer every input with one template? Entropy within an input does not tell:
//! `H(Z) = I(X; Z) + H(Z | X)`, and template collapse eats the first term (RAGEN-2, arXiv 2604.06268).
//!
//! [`CrossPlan`] scores the reasoning spans of a batch under each other's contexts, [`CrossScores`] turns
//! the matrix into [`Metrics`], [`History`] remembers them from step to step, and says where the policy
//! stands ([`Regime`]) and when to look ([`Cusum`]). [`Diagnosis`] is the whole way.

mod alarm;
mod cross;
mod diagnosis;
mod examiner;
mod history;
mod metrics;
mod prepare;
mod record;
mod regime;
mod retrieval;
mod sampling;
mod spans;

pub use alarm::Cusum;
pub use cross::{Cost, CrossPlan, ScoreOptions, Scored};
pub use diagnosis::Diagnosis;
pub use examiner::{Examined, Examiner, Observer, Silent};
pub use history::{Ema, Entry, History, JudgeOptions, Judgement, Measured, ema};
pub use metrics::{CrossScores, Marginal, Metrics, TokenMetrics};
pub use record::{ByMarginal, DiagnosisReport, RowRecord, StepRecord};
pub use regime::{Baseline, Regime};
pub use retrieval::Retrieval;
pub use sampling::{Draw, Sampling};
pub use spans::{Span, SpanCounts, offered};
