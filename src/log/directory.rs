//! The run directory: filled under a temporary name, renamed when it is whole.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{Error, Result};

/// The file by which a directory is known to be a run's.
const MARKER: &str = "config.resolved.yaml";

/// A directory that is being filled. Until [`finish`](Self::finish) nothing stands under the final
/// name, and whatever was there is untouched; if it is dropped before, nothing is left.
#[derive(Debug)]
pub struct RunDirectory {
    target: PathBuf,
    staging: PathBuf,
    finished: bool,
}

impl RunDirectory {
    /// Makes the directory under a temporary name beside its final one.
    ///
    /// # Errors
    /// If the final name is taken (by anything, unless `force`; by something else than a run even
    /// then), or the directory cannot be written.
    pub fn create(target: &Path, force: bool) -> Result<Self> {
        let refuse = |problem: String| Error::Output { path: target.to_path_buf(), problem };
        if target.file_name().is_none() {
            return Err(refuse("expected the path of a directory to make".into()));
        }
        if target.exists() && !is_empty_directory(target) {
            if !target.is_dir() {
                return Err(refuse("a file of that name exists".into()));
            }
            if !target.join(MARKER).exists() {
                return Err(refuse(format!(
                    "exists and is no run directory (it holds no {MARKER}); choose another with --out"
                )));
            }
            if !force {
                return Err(refuse(
                    "holds an earlier run; choose another with --out, or replace it with --force"
                        .into(),
                ));
            }
        }
        let target = std::path::absolute(target).map_err(|error| refuse(error.to_string()))?;
        let parent = target.parent().unwrap_or(Path::new("/"));
        std::fs::create_dir_all(parent)
            .map_err(|error| refuse(format!("cannot make its parent: {error}")))?;
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let staging = parent.join(format!(".{name}.{}.partial", std::process::id()));
        std::fs::create_dir(&staging)
            .map_err(|error| refuse(format!("cannot write beside it: {error}")))?;
        Ok(Self { target, staging, finished: false })
    }

    /// Where files are written for now.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Where they will be.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Writes a text file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_text(&self, name: &str, text: &str) -> Result<()> {
        let path = self.staging.join(name);
        std::fs::write(&path, text).map_err(Error::io("write", &path))
    }

    /// Writes a JSON file, indented.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let path = self.staging.join(name);
        let mut text = serde_json::to_string_pretty(value)
            .map_err(|error| Error::io("write", &path)(error.into()))?;
        text.push('\n');
        self.write_text(name, &text)
    }

    /// Writes one JSON object a line.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_json_lines<'a, T: Serialize + 'a>(
        &self,
        name: &str,
        values: impl IntoIterator<Item = &'a T>,
    ) -> Result<()> {
        let path = self.staging.join(name);
        let write = || -> std::io::Result<()> {
            let mut file = std::io::BufWriter::new(std::fs::File::create(&path)?);
            for value in values {
                serde_json::to_writer(&mut file, value)?;
                file.write_all(b"\n")?;
            }
            file.flush()
        };
        write().map_err(Error::io("write", &path))
    }

    /// Gives the directory its final name.
    ///
    /// # Errors
    /// If an earlier run cannot be replaced.
    pub fn finish(mut self) -> Result<PathBuf> {
        let refuse = |error: std::io::Error| Error::Output {
            path: self.target.clone(),
            problem: format!("the run is whole, but cannot be put there: {error}"),
        };
        let old = self.staging.with_extension("old");
        let replaces = self.target.exists() && !is_empty_directory(&self.target);
        if replaces {
            std::fs::rename(&self.target, &old).map_err(refuse)?;
        }
        if let Err(error) = std::fs::rename(&self.staging, &self.target) {
            if replaces {
                // Best effort: the earlier run is worth more than a tidy name.
                let _ = std::fs::rename(&old, &self.target);
            }
            return Err(refuse(error));
        }
        self.finished = true;
        if replaces {
            std::fs::remove_dir_all(&old).map_err(Error::io("remove", &old))?;
        }
        Ok(self.target.clone())
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing more can be done about a failure here.
            let _ = std::fs::remove_dir_all(&self.staging);
        }
    }
}

fn is_empty_directory(path: &Path) -> bool {
    std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}
