//! The one error type of the library.

use std::path::{Path, PathBuf};

/// What the library returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong. A message says where, what was expected, what was found, and what
/// to do where that is not plain.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration file or an override does not parse, names an unknown key, or asks for what
    /// cannot be had.
    #[error("configuration: {place}: {problem}")]
    Config {
        /// The dotted key, or the file with its line.
        place: String,
        /// What was expected and what was found.
        problem: String,
    },

    /// A line of a rollout file, or of a file of tasks, breaks the format.
    #[error("{}:{line}: field `{field}`: {problem}", path.display())]
    RolloutLine {
        /// The rollout file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The field, with the position in it where there is one.
        field: String,
        /// What was expected and what was found.
        problem: String,
    },

    /// A rollout file, or a file of tasks, parses, but cannot be used as a whole.
    #[error("{}: {problem}", path.display())]
    Rollouts {
        /// The rollout file.
        path: PathBuf,
        /// What was expected and what was found.
        problem: String,
    },

    /// A checkpoint is missing, damaged, not TorchScript, frozen, or of an unsuitable signature.
    #[error("checkpoint {}: {problem}", path.display())]
    Checkpoint {
        /// The TorchScript file.
        path: PathBuf,
        /// What was expected and what was found.
        problem: String,
    },

    /// An environment cannot be set up as asked, has no task, or failed while a policy acted in it.
    #[error("environment {name}: {problem}")]
    Environment {
        /// Its name in configurations.
        name: String,
        /// What was expected and what was found.
        problem: String,
    },

    /// A device that this build of libtorch, or this machine, does not offer.
    #[error("device {device}: {problem}")]
    Device {
        /// The device as it was asked for.
        device: String,
        /// Why it cannot be used.
        problem: String,
    },

    /// A run directory cannot be made, or holds something that would be lost.
    #[error("output directory {}: {problem}", path.display())]
    Output {
        /// The directory.
        path: PathBuf,
        /// Why it cannot be used.
        problem: String,
    },

    /// A file could not be read or written.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// What was tried: "read", "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        cause: std::io::Error,
    },

    /// A tensor argument of a library call has the wrong shape, or values that the call forbids.
    #[error("{argument}: expected {expected}, found {found}")]
    Argument {
        /// The name of the argument.
        argument: &'static str,
        /// What the call takes.
        expected: String,
        /// What it was given.
        found: String,
    },

    /// A loss or a gradient is not finite.
    #[error("{place}: {what} is not finite (found {found}); {remedy}")]
    NonFinite {
        /// The trajectory or group.
        place: String,
        /// The quantity.
        what: String,
        /// The value found.
        found: f64,
        /// What to look at.
        remedy: String,
    },

    /// An operation of libtorch failed.
    #[error("libtorch, while {doing}: {message}")]
    Torch {
        /// What the library was about to do.
        doing: String,
        /// libtorch's own message, without its C++ backtrace.
        message: String,
    },
}

impl Error {
    /// A configuration error at a key or file.
    pub fn config(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Config { place: place.into(), problem: problem.into() }
    }

    /// A checkpoint error.
    pub fn checkpoint(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        Self::Checkpoint { path: path.into(), problem: problem.into() }
    }

    /// For `map_err` on file operations.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| Self::Io { action, path, cause }
    }

    /// Says which group libtorch was at work on.
    pub(crate) fn in_group(self, id: &str) -> Self {
        match self {
            Self::Torch { doing, message } => {
                Self::Torch { doing: format!("{doing} for group `{id}`"), message }
            }
            other => other,
        }
    }

    pub(crate) fn torch(doing: &str, message: &str) -> Self {
        Self::Torch { doing: doing.into(), message: without_backtrace(message) }
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::torch("computing", &error.to_string())
    }
}

/// libtorch appends the C++ frames to its messages; they help nobody who uses the program.
pub(crate) fn without_backtrace(message: &str) -> String {
    let end = message.find("\nException raised from").unwrap_or(message.len());
    let message = message[..end].trim().trim_start_matches("Internal torch error: ");
    // A traceback of TorchScript ends in what went wrong.
    if message.contains("TorchScript interpreter") {
        let last = message.lines().rfind(|line| !line.trim().is_empty());
        return last.unwrap_or(message).trim().to_owned();
    }
    message.to_owned()
}

/// The name of `known` that `name` was probably meant to be.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(name, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= candidate.len().max(name.len()) / 2)
        .min()
        .map(|(_, candidate)| candidate)
}
