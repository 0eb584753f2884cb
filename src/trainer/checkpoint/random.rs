//! The state of libtorch's own random generators; `rand_chacha`'s are serde values.

use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::native;

/// The state of a device's default generator, `[n]` uint8 on the CPU, as `torch.get_rng_state` gives it.
///
/// # Errors
/// If libtorch does not know the device.
pub fn torch_generator(device: Device) -> Result<Tensor> {
    native::generator_state(device)
        .map_err(|message| Error::torch("reading a random generator", &message))
}

/// Puts a device's default generator into a state that [`torch_generator`] gave.
///
/// # Errors
/// If libtorch does not know the device, or the state is not one of its generators.
pub fn restore_torch_generator(device: Device, state: &Tensor) -> Result<()> {
    native::set_generator_state(device, state)
        .map_err(|message| Error::torch("restoring a random generator", &message))
}
