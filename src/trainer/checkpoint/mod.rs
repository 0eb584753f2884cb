//! Checkpoints that a kill at any moment, a full disk and a power cut leave whole.
//!
//! A store is a folder; a checkpoint is a folder in it, `SERIAL-step-STEP`, with files of the trainer's
//! choice and a manifest of their sizes and checksums. It is filled under a hidden name, every file and
//! the folder are synced, and it is renamed; only then are older ones removed. The newest is the one
//! saved last, whatever its step: who resumes from an older one and goes another way has that way from
//! then on. One process at a time writes to a store.

mod disk;
mod manifest;
mod random;
mod tensors;
mod writer;

pub use disk::{Disk, DiskFile, FileSystem};
pub use random::{restore_torch_generator, torch_generator};
pub use writer::{CheckpointWriter, Committed};

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use tch::Tensor;

use crate::error::{Error, Result};
pub(super) use manifest::Content;
use manifest::Manifest;

/// A checkpoint that is being filled.
const STAGING: &str = ".partial";
/// A checkpoint that is being removed.
const REMOVED: &str = ".removed";

/// Which checkpoints stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The last ones; at least one stays.
    pub last: usize,
    /// Whether the one of the highest score stays too; of equal ones the earliest.
    pub best: bool,
}

/// A folder of checkpoints.
pub struct CheckpointStore {
    folder: PathBuf,
    keep: Keep,
    disk: Box<dyn Disk>,
}

impl CheckpointStore {
    /// Opens a folder to save to, and makes it if it is not there. What a killed process has left
    /// half-done in it is removed.
    ///
    /// # Errors
    /// If it cannot be made or written: better now than when there is something to lose.
    pub fn open(folder: &Path, keep: Keep) -> Result<Self> {
        Self::on(Box::new(FileSystem), folder, keep)
    }

    /// The same on another disk.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn on(disk: Box<dyn Disk>, folder: &Path, keep: Keep) -> Result<Self> {
        let store = Self { folder: folder.to_path_buf(), keep, disk };
        let refuse = |problem: &str, error: std::io::Error| Error::Output {
            path: folder.to_path_buf(),
            problem: format!("{problem}: {error}"),
        };
        store.disk.make_folder(folder).map_err(|error| refuse("cannot be made", error))?;
        let probe = || {
            store.clear()?;
            store.disk.make_folder(&folder.join(STAGING))?;
            store.disk.remove_folder(&folder.join(STAGING))
        };
        probe().map_err(|error| refuse("checkpoints cannot be written there", error))?;
        Ok(store)
    }

    /// Begins a checkpoint of a step.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn begin(&mut self, step: u64) -> Result<CheckpointWriter<'_>> {
        self.clear().map_err(|error| Error::Output {
            path: self.folder.clone(),
            problem: format!("an unfinished checkpoint cannot be removed: {error}"),
        })?;
        let serial = entries(&self.folder)?.first().map_or(0, |entry| entry.serial) + 1;
        let target = self.folder.join(format!("{serial:06}-step-{step}"));
        CheckpointWriter::new(self, self.folder.join(STAGING), target, step)
    }

    /// The newest checkpoint that is whole; see [`latest`].
    ///
    /// # Errors
    /// As [`latest`].
    pub fn latest(&self) -> Result<Option<Latest>> {
        latest(&self.folder)
    }

    /// The highest score of its checkpoints; none if none has one.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn best_score(&self) -> Result<Option<f64>> {
        let scores = entries(&self.folder)?;
        let scores = scores.iter().filter_map(|entry| Manifest::read(&entry.path).ok()?.score);
        Ok(scores.reduce(f64::max))
    }

    /// Removes what is half-done.
    fn clear(&self) -> std::io::Result<()> {
        for name in [STAGING, REMOVED] {
            let path = self.folder.join(name);
            if path.exists() {
                self.disk.remove_folder(&path)?;
            }
        }
        Ok(())
    }

    /// Removes the checkpoints that are not to be kept; hands back what could not be done. One that
    /// cannot be read counts for nothing and is left alone.
    fn prune(&self) -> Vec<String> {
        let entries = match entries(&self.folder) {
            Ok(entries) => entries,
            Err(error) => return vec![error.to_string()],
        };
        let whole: Vec<(&Entry, Option<f64>)> = entries
            .iter()
            .filter_map(|entry| Some((entry, Manifest::read(&entry.path).ok()?.score)))
            .collect();
        let best = best(whole.iter().map(|(entry, score)| (entry.serial, *score)));
        let mut warnings = Vec::new();
        for (entry, _) in whole.iter().skip(self.keep.last.max(1)) {
            if self.keep.best && best == Some(entry.serial) {
                continue;
            }
            // In one move, so that no half-removed one is found later.
            let removed = self.folder.join(REMOVED);
            let remove = self
                .disk
                .rename(&entry.path, &removed)
                .and_then(|()| self.disk.remove_folder(&removed));
            if let Err(error) = remove {
                warnings.push(format!("{} cannot be removed: {error}", entry.path.display()));
            }
        }
        warnings
    }
}

/// The serial of the highest score, from newest to oldest; of equal ones the earliest.
fn best(scores: impl Iterator<Item = (u64, Option<f64>)>) -> Option<u64> {
    let mut best: Option<(u64, f64)> = None;
    for (serial, score) in scores {
        if let Some(score) = score
            && best.is_none_or(|(_, highest)| score >= highest)
        {
            best = Some((serial, score));
        }
    }
    best.map(|(serial, _)| serial)
}

/// A folder by the name of a checkpoint.
struct Entry {
    serial: u64,
    path: PathBuf,
}

/// Newest first; none if there is no such folder.
fn entries(folder: &Path) -> Result<Vec<Entry>> {
    let list = || -> std::io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let serial = name.and_then(|name| name.split_once("-step-")?.0.parse().ok());
            entries.extend(serial.map(|serial| Entry { serial, path }));
        }
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.serial));
        Ok(entries)
    };
    match list() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed.map_err(Error::io("read", folder)),
    }
}

/// A checkpoint that was found whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
}

/// What [`latest`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct Latest {
    /// The newest checkpoint that is whole.
    pub checkpoint: Checkpoint,
    /// A sentence for every newer one, on what is wrong with it.
    pub damaged: Vec<String>,
}

/// The newest checkpoint of a folder that is whole: its manifest can be read, and every file has the
/// size and the checksum that it says. None if the folder holds no checkpoint.
///
/// # Errors
/// If the folder cannot be read, or holds checkpoints of which none is whole.
pub fn latest(folder: &Path) -> Result<Option<Latest>> {
    let mut damaged = Vec::new();
    for entry in entries(folder)? {
        match Checkpoint::check(&entry.path) {
            Ok(checkpoint) => return Ok(Some(Latest { checkpoint, damaged })),
            Err(problem) => damaged.push(format!("{}: {problem}", entry.path.display())),
        }
    }
    if damaged.is_empty() {
        return Ok(None);
    }
    Err(Error::checkpoint(
        folder,
        format!("none of its checkpoints is whole: {}", damaged.join("; ")),
    ))
}

impl Checkpoint {
    /// Opens the folder of one checkpoint and checks that it is whole.
    ///
    /// # Errors
    /// If it is not.
    pub fn open(path: &Path) -> Result<Self> {
        Self::check(path).map_err(|problem| Error::checkpoint(path, problem))
    }

    fn check(path: &Path) -> std::result::Result<Self, String> {
        let manifest = Manifest::read(path)?;
        manifest.verify(path)?;
        Ok(Self { path: path.to_path_buf(), manifest })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The step that it was saved after.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Its score, if it was given one.
    pub fn score(&self) -> Option<f64> {
        self.manifest.score
    }

    /// The path of one of its files: of the policy, for [`Policy::load`](crate::policy::Policy::load).
    ///
    /// # Errors
    /// If it holds no such file.
    pub fn file(&self, name: &str) -> Result<PathBuf> {
        if !self.manifest.files.contains_key(name) {
            let known: Vec<&str> = self.manifest.files.keys().map(String::as_str).collect();
            let found = format!("expected {name}, found {}", known.join(", "));
            return Err(Error::checkpoint(&self.path, found));
        }
        Ok(self.path.join(name))
    }

    /// Named tensors, on the CPU.
    ///
    /// # Errors
    /// If there is no such file, or it holds something else.
    pub fn tensors(&self, name: &str) -> Result<Vec<(String, Tensor)>> {
        let path = self.file(name)?;
        Tensor::read_safetensors(&path).map_err(|error| Error::checkpoint(&path, error.to_string()))
    }

    /// What was saved as JSON.
    ///
    /// # Errors
    /// If there is no such file, or it holds something else.
    pub fn json<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let path = self.file(name)?;
        let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
        serde_json::from_str(&text).map_err(|error| Error::checkpoint(&path, error.to_string()))
    }
}
