//! Files of tasks: JSONL, one a line, plain or compressed.

use std::io::BufRead;
use std::path::Path;

use crate::error::Error;
use crate::rollout::open;

/// What is wrong with a line: its field, and what was expected and found there.
pub(super) struct Fault {
    pub field: &'static str,
    pub problem: String,
}

/// Reads every line that is not empty.
pub(super) fn read<T>(
    path: &Path,
    parse: impl Fn(&str) -> Result<T, Fault>,
) -> Result<Vec<T>, Error> {
    let mut tasks = Vec::new();
    for (index, bytes) in open(path)?.split(b'\n').enumerate() {
        let bytes = bytes.map_err(Error::io("read", path))?;
        let at = |fault: Fault| Error::RolloutLine {
            path: path.to_path_buf(),
            line: index + 1,
            field: fault.field.into(),
            problem: fault.problem,
        };
        let text = std::str::from_utf8(&bytes).map_err(|error| {
            at(Fault { field: "line", problem: format!("expected UTF-8 text: {error}") })
        })?;
        let text = text.trim_start_matches('\u{feff}').trim();
        if !text.is_empty() {
            tasks.push(parse(text).map_err(at)?);
        }
    }
    if tasks.is_empty() {
        return Err(Error::Rollouts {
            path: path.to_path_buf(),
            problem: "expected a task a line, found none".into(),
        });
    }
    Ok(tasks)
}

/// A line as the type of its fields.
pub(super) fn json<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, Fault> {
    serde_json::from_str(text)
        .map_err(|error| Fault { field: "line", problem: format!("expected JSON: {error}") })
}

/// The task of a seed: consecutive seeds go through the list in its order, again and again.
pub(super) fn in_turn<T>(tasks: &[T], seed: super::Seed) -> &T {
    &tasks[(seed.task % tasks.len() as u64) as usize]
}
