//! Some lines of a rollout file, as they stand there.

use std::io::{BufRead, Write};
use std::path::Path;

use super::reader::open;
use crate::error::{Error, Result};

/// Writes the lines with these ascending numbers, counted from 1, byte for byte; a compressed file is
/// read as what it holds.
///
/// # Errors
/// If the file cannot be read or is shorter than it was, or `output`, whose name is `to`, cannot be
/// written.
pub fn copy_lines(path: &Path, lines: &[usize], output: &mut impl Write, to: &Path) -> Result<()> {
    let mut input = open(path)?;
    let mut bytes = Vec::new();
    let mut at = 0;
    for line in lines {
        while at < *line {
            bytes.clear();
            if input.read_until(b'\n', &mut bytes).map_err(Error::io("read", path))? == 0 {
                return Err(Error::Rollouts {
                    path: path.to_path_buf(),
                    problem: format!(
                        "expected line {line}, which was there when the file was first read, found {at} lines; is it still being written?"
                    ),
                });
            }
            at += 1;
        }
        output.write_all(&bytes).map_err(Error::io("write", to))?;
    }
    output.flush().map_err(Error::io("write", to))
}
