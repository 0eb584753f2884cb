//! What a checkpoint of a run holds beside weights and optimisers.

use serde::{Deserialize, Serialize};
use tch::Device;

use super::checkpoint::{
    Checkpoint, CheckpointWriter, Content, restore_torch_generator, torch_generator,
};
use super::record::ValidationRecord;
use super::source::SampledGroup;
use super::stop::{EmptyFiltersState, ValidationFloorState, VarianceCollapseState};
use super::{Critic, Optimizer};
use crate::diagnostics::History;
use crate::error::{Error, Result};
use crate::filter::AdaptiveState;
use crate::policy::Policy;

/// Of `state.json`.
const FORMAT: u32 = 1;

/// The policy in training.
pub const POLICY: &str = "policy.pt";
pub(super) const REFERENCE: &str = "reference.pt";
pub(super) const CRITIC: &str = "critic.pt";
const OPTIMIZER: &str = "optimizer.safetensors";
const CRITIC_OPTIMIZER: &str = "critic_optimizer.safetensors";
const RANDOM: &str = "random.safetensors";
const STATE: &str = "state.json";

/// Numbers that go with a run from step to step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    format: u32,
    /// Steps made.
    pub step: u64,
    /// Groups sampled so far.
    pub visits: u64,
    /// The file of the reference policy.
    pub reference: Option<Content>,
    /// Whether the reference policy has been refreshed.
    pub refreshed: bool,
    pub filter: AdaptiveState,
    pub variance_collapse: VarianceCollapseState,
    pub empty_filters: EmptyFiltersState,
    pub validation_floor: ValidationFloorState,
    pub history: Option<History>,
    pub validation: Option<ValidationRecord>,
    pub stopped: Option<String>,
    /// Groups of a step that was short of them: the policy is still the one that sampled them.
    pub carried: Vec<SampledGroup>,
    /// What they were sampled under; under anything else they are dropped.
    pub carried_under: Option<String>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            format: FORMAT,
            step: 0,
            visits: 0,
            reference: None,
            refreshed: false,
            filter: AdaptiveState::default(),
            variance_collapse: VarianceCollapseState::default(),
            empty_filters: EmptyFiltersState::default(),
            validation_floor: ValidationFloorState::default(),
            history: None,
            validation: None,
            stopped: None,
            carried: Vec::new(),
            carried_under: None,
        }
    }
}

/// Everything that a checkpoint holds.
pub(super) struct Saved<'a> {
    pub state: &'a State,
    pub policy: &'a Policy,
    pub optimizer: &'a Optimizer,
    pub reference: Option<&'a Policy>,
    pub critic: Option<&'a Critic>,
    pub device: Device,
}

impl Saved<'_> {
    pub fn write(&self, writer: &mut CheckpointWriter) -> Result<()> {
        writer.policy(POLICY, self.policy)?;
        writer.tensors(OPTIMIZER, &self.optimizer.state())?;
        if let Some(reference) = self.reference.filter(|_| self.state.refreshed) {
            writer.policy(REFERENCE, reference)?;
        }
        if let Some(critic) = self.critic {
            writer.policy(CRITIC, critic.model())?;
            writer.tensors(CRITIC_OPTIMIZER, &critic.optimizer.state())?;
        }
        let mut generators = vec![("cpu".to_owned(), torch_generator(Device::Cpu)?)];
        if self.device != Device::Cpu {
            generators.push(("device".to_owned(), torch_generator(self.device)?));
        }
        writer.tensors(RANDOM, &generators)?;
        writer.json(STATE, self.state)
    }
}

/// The numbers of a checkpoint.
pub(super) fn read_state(checkpoint: &Checkpoint) -> Result<State> {
    let state: State = checkpoint.json(STATE)?;
    if state.format != FORMAT {
        return Err(Error::checkpoint(
            checkpoint.path(),
            format!("expected {STATE} of format {FORMAT}, found {}", state.format),
        ));
    }
    Ok(state)
}

/// Puts optimisers and random generators into the state of a checkpoint.
pub(super) fn restore(
    checkpoint: &Checkpoint,
    optimizer: &mut Optimizer,
    critic: Option<&mut Critic>,
    device: Device,
) -> Result<()> {
    optimizer.restore(&checkpoint.tensors(OPTIMIZER)?)?;
    if let Some(critic) = critic {
        critic.optimizer.restore(&checkpoint.tensors(CRITIC_OPTIMIZER)?)?;
    }
    for (name, state) in checkpoint.tensors(RANDOM)? {
        let device = if name == "cpu" { Device::Cpu } else { device };
        restore_torch_generator(device, &state)?;
    }
    Ok(())
}
