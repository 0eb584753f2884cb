//! The training loop, and its parts, each usable alone in a `tch` training loop of one's own.
//!
//! A [`Trainer`] samples groups of trajectories from a [`Source`], makes advantages of their rewards,
//! splits the gradients now and then, filters, updates the policy, and saves. [`TextSource`] plays the
//! environments of [`crate::env`]. An [`Observer`] looks on: it is handed what a step sampled, its
//! split and its record, writes or draws what it likes, and may end the run.
//!
//! ```no_run
//! use std::ops::ControlFlow;
//!
//! use gradprism::config::Config;
//! use gradprism::trainer::{Observer, StepRecord, Trainer};
//!
//! /// Prints the mean reward, and stops once it is high enough.
//! struct UntilGood;
//!
//! impl Observer for UntilGood {
//!     fn step(&mut self, record: &StepRecord) -> gradprism::Result<ControlFlow<()>> {
//!         let reward = record.sampled.reward_mean;
//!         println!("step {}: reward {reward:.3}", record.step);
//!         Ok(if reward > 0.24 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
//!     }
//! }
//!
//! # fn main() -> gradprism::Result<()> {
//! let config = Config::load("configs/bandit.yaml".as_ref(), &[])?;
//! let mut trainer = Trainer::prepare(config, None)?;
//! trainer.save_to("checkpoints".as_ref())?;
//! let report = trainer.run(&mut UntilGood)?;
//! println!("{} steps in {:.1} s", report.steps, report.time.total);
//! # Ok(())
//! # }
//! ```
//!
//! An [`Optimizer`] takes the gradients of micro-batches and makes one update of them: clipping
//! ([`clip`]), learning rate ([`schedule`]), [`adamw`]. A [`checkpoint`] outlives a kill at any
//! moment. [`stop`] says when to end a run early.
//!
//! ```no_run
//! use gradprism::trainer::{AdamW, AdamWOptions, CheckpointStore, Keep, Optimizer, Schedule};
//! # use gradprism::policy::{Policy, PolicyOptions};
//! # fn loss(_: &Policy, _: usize) -> tch::Tensor { todo!() }
//! # fn main() -> gradprism::Result<()> {
//! let policy = Policy::load("policy.pt".as_ref(), &PolicyOptions::default())?;
//! let adamw = AdamW::of_policy(AdamWOptions { learning_rate: 1e-5, ..Default::default() }, &policy)?;
//! let mut optimizer = Optimizer::new(adamw, Schedule::default(), Some(1.0), 3)?;
//! let mut store = CheckpointStore::open("checkpoints".as_ref(), Keep { last: 3, best: true })?;
//! for step in 0..100 {
//!     for micro_batch in 0..4 {
//!         optimizer.backward(&loss(&policy, micro_batch))?;
//!     }
//!     let update = optimizer.step()?;
//!     println!("step {step}: gradient norm {}, learning rate {}", update.norm, update.learning_rate);
//!     if step % 10 == 9 {
//!         let mut checkpoint = store.begin(step + 1)?;
//!         checkpoint.policy("policy.pt", &policy)?;
//!         checkpoint.tensors("optimizer.safetensors", &optimizer.state())?;
//!         checkpoint.commit(None)?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```

pub mod adamw;
pub mod checkpoint;
pub mod clip;
mod critic;
mod optimizer;
mod prepare;
mod record;
mod run;
mod sampling;
mod saving;
pub mod schedule;
mod score;
mod source;
mod state;
pub mod stop;
mod text;
mod update;

pub use adamw::{AdamW, AdamWOptions};
pub use checkpoint::{Checkpoint, CheckpointStore, Keep};
pub use critic::Critic;
pub use optimizer::{Optimizer, Update};
pub use record::{
    ReasoningRecord, SampleRecord, SplitRecord, StepRecord, Times, TrainReport, UpdateRecord,
    ValidationRecord,
};
pub use run::{Observer, Silent, Trainer};
pub use schedule::{Decay, Schedule};
pub use source::{Outcome, SampledGroup, Source, SourceRequest, Visit};
pub use state::POLICY as POLICY_FILE;
pub use text::TextSource;
pub use update::{Learners, UpdatePlan};
