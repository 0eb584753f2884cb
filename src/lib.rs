//! gradprism splits a policy gradient, as a prism splits light: per prompt, into signal, task noise,
//! and the gradients of the KL and entropy regularizers.
//!
//! Data flows one way: [`rollout`] → [`policy`] → [`objective`] → [`gradient`] → [`filter`] →
//! [`log`]. The whole way is a [`study`]; [`sift`] filters a file of rollouts; whether the policy still
//! reads its input is a matter of [`diagnostics`]. A [`trainer`] closes the loop, in the text environments
//! of [`mod@env`] or on trajectories of a source of one's own. [`objective`], [`gradient`] and [`filter`]
//! work on tensors alone and can be used in a training loop of one's own.
//!
//! The ideas are RAGEN-2's (arXiv 2604.06268); the estimators of signal and noise are described in
//! [`gradient::split`].

pub mod config;
pub mod diagnostics;
pub mod doctor;
pub mod env;
pub mod error;
pub mod filter;
pub mod gradient;
pub mod log;
mod native;
pub mod objective;
pub mod policy;
pub mod rollout;
pub mod sift;
pub mod study;
pub mod trainer;

pub use error::{Error, Result};
