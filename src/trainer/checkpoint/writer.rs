//! A checkpoint that is being written.

use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use flate2::Crc;
use serde::Serialize;
use tch::Tensor;

use super::disk::DiskFile;
use super::manifest::{Content, MANIFEST, Manifest};
use super::{CheckpointStore, tensors};
use crate::error::{Error, Result};
use crate::policy::Policy;

/// Bytes that are gathered before they are written.
const BUFFER: usize = 1 << 20;

/// A checkpoint in the making, under a hidden name. [`commit`](Self::commit) gives it its place; if it
/// is dropped before, nothing of it is left.
pub struct CheckpointWriter<'a> {
    store: &'a CheckpointStore,
    staging: PathBuf,
    target: PathBuf,
    manifest: Manifest,
    /// Whether a file could not be written.
    failed: bool,
    committed: bool,
}

/// A checkpoint that is in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its folder.
    pub path: PathBuf,
    /// What the user should know: older checkpoints that could not be removed.
    pub warnings: Vec<String>,
}

impl<'a> CheckpointWriter<'a> {
    pub(super) fn new(
        store: &'a CheckpointStore,
        staging: PathBuf,
        target: PathBuf,
        step: u64,
    ) -> Result<Self> {
        let writer = Self {
            store,
            staging,
            target,
            manifest: Manifest::new(step),
            failed: false,
            committed: false,
        };
        writer
            .store
            .disk
            .make_folder(&writer.staging)
            .map_err(|error| writer.error("its folder cannot be made", &error))?;
        Ok(writer)
    }

    /// A policy as TorchScript that Python loads; see [`Policy::write_to`].
    ///
    /// # Errors
    /// As [`file`](Self::file).
    pub fn policy(&mut self, name: &str, policy: &Policy) -> Result<()> {
        self.file(name, |writer| policy.write_to(writer))
    }

    /// Named tensors as safetensors: the state of an optimiser or of a random generator.
    ///
    /// # Errors
    /// As [`file`](Self::file), and if two have one name or a dtype cannot be saved.
    pub fn tensors(&mut self, name: &str, named: &[(String, Tensor)]) -> Result<()> {
        self.file(name, |writer| tensors::write(named, writer))
    }

    /// Anything else: moving means, histories, the states of `rand`'s generators.
    ///
    /// # Errors
    /// As [`file`](Self::file).
    pub fn json(&mut self, name: &str, value: &impl Serialize) -> Result<()> {
        self.file(name, |writer| {
            serde_json::to_writer(&mut *writer, value)?;
            writer.write_all(b"\n")
        })
    }

    /// A file that `fill` writes. It is on the disk when this returns.
    ///
    /// # Errors
    /// If it cannot be written, or the name is none of a file or is taken. The checkpoint cannot be
    /// committed then.
    pub fn file(
        &mut self,
        name: &str,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<()> {
        let is_name = std::path::Path::new(name).file_name().is_some_and(|file| file == name);
        if !is_name || name == MANIFEST || self.manifest.files.contains_key(name) {
            return Err(Error::Argument {
                argument: "name",
                expected: format!(
                    "the name of a file, none of those written before, not {MANIFEST}"
                ),
                found: format!("`{name}`"),
            });
        }
        let content = self.write(name, fill)?;
        self.manifest.files.insert(name.to_owned(), content);
        Ok(())
    }

    fn write(
        &mut self,
        name: &str,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<Content> {
        let written = || -> io::Result<Content> {
            let file = self.store.disk.create(&self.staging.join(name))?;
            let mut file =
                Checked { file: BufWriter::with_capacity(BUFFER, file), crc: Crc::new(), bytes: 0 };
            fill(&mut file)?;
            file.flush()?;
            file.file.get_mut().sync()?;
            Ok(Content { bytes: file.bytes, crc32: file.crc.sum() })
        };
        written().map_err(|error| {
            self.failed = true;
            self.error(&format!("{name} cannot be written"), &error)
        })
    }

    /// Puts the checkpoint in its place, and then removes those that are not to be kept. A higher
    /// `score` makes a better checkpoint; one that is not finite is none.
    ///
    /// # Errors
    /// If it cannot be put in place, or is there but may not outlive a power cut. Earlier checkpoints
    /// are then as they were.
    pub fn commit(mut self, score: Option<f64>) -> Result<Committed> {
        if self.failed {
            return Err(Error::Output {
                path: self.target.clone(),
                problem:
                    "a file of this checkpoint could not be written, so that it cannot be committed"
                        .into(),
            });
        }
        self.manifest.score = score.filter(|score| score.is_finite());
        let text = (self.manifest.clone().into_text())
            .map_err(|error| self.error("its manifest cannot be written", &error.into()))?;
        self.write(MANIFEST, |writer| writer.write_all(text.as_bytes()))?;
        let place = || -> io::Result<()> {
            let disk = &self.store.disk;
            disk.sync_folder(&self.staging)?;
            disk.rename(&self.staging, &self.target)?;
            disk.sync_folder(&self.store.folder)
        };
        place().map_err(|error| self.error("it cannot be put in place", &error))?;
        self.committed = true;
        Ok(Committed { path: self.target.clone(), warnings: self.store.prune() })
    }

    fn error(&self, what: &str, error: &io::Error) -> Error {
        Error::Output {
            path: self.store.folder.clone(),
            problem: format!(
                "the checkpoint of step {} was not saved: {what}: {error}; earlier checkpoints are untouched",
                self.manifest.step
            ),
        }
    }
}

impl Drop for CheckpointWriter<'_> {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing more can be done about a failure here; the next checkpoint tries again.
            let _ = self.store.disk.remove_folder(&self.staging);
        }
    }
}

/// Counts and checks what passes through.
struct Checked {
    file: BufWriter<Box<dyn DiskFile>>,
    crc: Crc,
    bytes: u64,
}

impl Write for Checked {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.crc.update(&bytes[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
