//! Named tensors as a safetensors file, front to back, one tensor in memory at a time.

use std::io::{self, Write};

use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

/// Writes tensors bit for bit. Larger elements come first, so that each is aligned.
///
/// # Errors
/// If the writer fails, or a tensor's dtype has no place in the format.
pub(super) fn write(tensors: &[(String, Tensor)], writer: &mut dyn Write) -> io::Result<()> {
    let mut sorted: Vec<&(String, Tensor)> = tensors.iter().collect();
    sorted.sort_by(|(left_name, left), (right_name, right)| {
        let size = |tensor: &Tensor| tensor.kind().elt_size_in_bytes();
        size(right).cmp(&size(left)).then_with(|| left_name.cmp(right_name))
    });
    let mut header = Map::new();
    let mut end = 0;
    for (name, tensor) in &sorted {
        let start = end;
        end += tensor.numel() * tensor.kind().elt_size_in_bytes();
        let entry = json!({
            "dtype": dtype(tensor.kind())?,
            "shape": tensor.size(),
            "data_offsets": [start, end],
        });
        if header.insert(name.clone(), entry).is_some() {
            return Err(invalid(format!("two tensors are named `{name}`")));
        }
    }
    let mut header = Value::Object(header).to_string();
    // Spaces, as the format asks, up to a multiple of 8 bytes.
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    writer.write_all(&(header.len() as u64).to_le_bytes())?;
    writer.write_all(header.as_bytes())?;
    for (_, tensor) in sorted {
        writer.write_all(&bytes(tensor).map_err(|error| io::Error::other(error.to_string()))?)?;
    }
    Ok(())
}

fn bytes(tensor: &Tensor) -> Result<Vec<u8>, tch::TchError> {
    let tensor = tensor.detach().f_to_device(Device::Cpu)?.f_contiguous()?;
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
    Ok(bytes)
}

fn dtype(kind: Kind) -> io::Result<&'static str> {
    Ok(match kind {
        Kind::Bool => "BOOL",
        Kind::Uint8 => "U8",
        Kind::Int8 => "I8",
        Kind::Int16 => "I16",
        Kind::Int => "I32",
        Kind::Int64 => "I64",
        Kind::BFloat16 => "BF16",
        Kind::Half => "F16",
        Kind::Float => "F32",
        Kind::Double => "F64",
        kind => return Err(invalid(format!("a tensor of {kind:?} cannot be saved"))),
    })
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}
