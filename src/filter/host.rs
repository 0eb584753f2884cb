//! The one place where the filter waits for the device.

use std::cell::Cell;

use tch::{Device, Tensor};

use crate::error::Result;

thread_local! {
    static READS: Cell<u64> = const { Cell::new(0) };
}

/// How often the filters of this thread have read from a device, and so waited for it. On the CPU a
/// read counts too, though there is nothing to wait for.
pub fn host_reads() -> u64 {
    READS.get()
}

/// Integers or bools, any shape, as a flat list; one synchronisation.
pub(super) fn read(numbers: &Tensor) -> Result<Vec<i64>> {
    READS.set(READS.get() + 1);
    let numbers = numbers.f_to_kind(tch::Kind::Int64)?.f_to_device(Device::Cpu)?;
    Ok(Vec::try_from(numbers.f_reshape([-1])?)?)
}
