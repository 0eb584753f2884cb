//! Where a run computes.

use serde::{Deserialize, Serialize};
use tch::Device;

use super::Auto;
use crate::error::{Error, Result};

/// A device by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceName(pub String);

impl Default for DeviceName {
    fn default() -> Self {
        Self("auto".into())
    }
}

impl DeviceName {
    /// The device; `auto` is the first CUDA device, or the CPU.
    ///
    /// # Errors
    /// If the name is none, or this build or machine has no such device.
    pub fn resolve(&self) -> Result<Device> {
        let unusable = |problem: String| Error::Device { device: self.0.clone(), problem };
        let index = match self.0.as_str() {
            "auto" => return Ok(Device::cuda_if_available()),
            "cpu" => return Ok(Device::Cpu),
            "cuda" => 0,
            other => match other.strip_prefix("cuda:").and_then(|index| index.parse().ok()) {
                Some(index) => index,
                None => {
                    return Err(Error::config(
                        "device",
                        format!("expected auto, cpu, cuda or cuda:N, found `{other}`"),
                    ));
                }
            },
        };
        if !tch::utils::has_cuda() {
            return Err(unusable(
                "this libtorch is a CPU build; ./libtorch-setup.sh --cuda fetches one with CUDA, then build again".into(),
            ));
        }
        let count = tch::Cuda::device_count();
        if index as i64 >= count {
            return Err(unusable(format!(
                "libtorch sees {count} CUDA devices; is the driver installed and CUDA_VISIBLE_DEVICES right?"
            )));
        }
        Ok(Device::Cuda(index))
    }
}

/// A number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected auto or a number of threads")]
pub enum Threads {
    /// libtorch's choice: one a physical core.
    Auto(Auto),
    /// This many.
    Count(u16),
}

impl Default for Threads {
    fn default() -> Self {
        Self::Auto(Auto::Auto)
    }
}
