//! The run directory: filled inside itself under a hidden name, so that nothing half-written shows.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::picture::Picture;
use crate::error::{Error, Result};

/// The file by which a directory is known to be a run's.
pub(super) const MARKER: &str = "config.resolved.yaml";
/// Where files lie until the run is whole.
const STAGING: &str = ".partial";

/// A directory that is being filled. Making it claims the name, so that no other run can take it;
/// until [`finish`](Self::finish) an earlier run in it is untouched, and if it is dropped before,
/// nothing of this one is left.
#[derive(Debug)]
pub struct RunDirectory {
    target: PathBuf,
    staging: PathBuf,
    /// The folders that were made for it, outermost first.
    made: Vec<PathBuf>,
    finished: bool,
}

impl RunDirectory {
    /// Claims a directory: a new one, an empty one, or with `force` one that holds an earlier run.
    ///
    /// # Errors
    /// If the name is taken by anything else, another run is writing there, or the directory cannot
    /// be written.
    pub fn create(target: &Path, force: bool) -> Result<Self> {
        let refuse = |problem: String| Error::Output { path: target.to_path_buf(), problem };
        let mut made = Vec::new();
        if target.symlink_metadata().is_ok() {
            if !target.exists() {
                return Err(refuse("is a link that leads nowhere".into()));
            }
            Self::check_existing(target, force).map_err(refuse)?;
        } else {
            make_folders(target, &mut made)
                .map_err(|error| refuse(format!("cannot be made: {error}")))?;
        }
        let claimed = target
            .canonicalize()
            .and_then(|target| std::fs::create_dir(target.join(STAGING)).map(|()| target));
        match claimed {
            Ok(target) => Ok(Self { staging: target.join(STAGING), target, made, finished: false }),
            Err(error) => {
                remove_empty(&made);
                Err(refuse(format!("cannot be written: {error}")))
            }
        }
    }

    fn check_existing(target: &Path, force: bool) -> std::result::Result<(), String> {
        if !target.is_dir() {
            return Err("a file of that name exists".into());
        }
        let names: Vec<std::ffi::OsString> = std::fs::read_dir(target)
            .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.file_name())).collect())
            .map_err(|error| format!("cannot be read: {error}"))?;
        if super::training::is_in_training(target) {
            return Err("another gradprism is training there".into());
        }
        let is_run = names.iter().any(|name| name == MARKER);
        let is_unfinished = names.iter().any(|name| name == STAGING);
        let is_only_unfinished = is_unfinished && names.len() == 1;
        if !(names.is_empty() || is_run || is_only_unfinished) {
            return Err(format!(
                "exists and is no run directory (it holds no {MARKER}); choose another with --out"
            ));
        }
        if is_unfinished {
            if !force {
                return Err(format!(
                    "holds an unfinished run ({STAGING}): another gradprism is writing there, or one was killed; choose another with --out, or replace it with --force"
                ));
            }
            std::fs::remove_dir_all(target.join(STAGING))
                .map_err(|error| format!("its unfinished run cannot be removed: {error}"))?;
        }
        if is_run && !force {
            return Err(
                "holds an earlier run; choose another with --out, or replace it with --force"
                    .into(),
            );
        }
        Ok(())
    }

    /// Where files are written for now.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Checks that files that the run reads do not lie in the directory, where it would replace them.
    ///
    /// # Errors
    /// If one does.
    pub fn check_apart<'a>(&self, files: impl IntoIterator<Item = &'a Path>) -> Result<()> {
        check_apart(&self.target, files)
    }

    /// Writes a text file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_text(&self, name: &str, text: &str) -> Result<()> {
        let path = self.staging.join(name);
        std::fs::write(&path, text).map_err(Error::io("write", &path))
    }

    /// Writes a picture as a PNG file.
    ///
    /// # Errors
    /// If it cannot be encoded or written.
    pub fn write_picture(&self, name: &str, picture: &Picture) -> Result<()> {
        let path = self.staging.join(name);
        std::fs::write(&path, picture.to_png()?).map_err(Error::io("write", &path))
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

    /// Puts the files of the run in the place of an earlier one's.
    ///
    /// # Errors
    /// If that cannot be done; the files are then left where they are, and the message says where.
    pub fn finish(mut self) -> Result<PathBuf> {
        // Whatever happens from here on, the run is whole and is kept.
        self.finished = true;
        let replace = || -> std::io::Result<()> {
            for entry in std::fs::read_dir(&self.target)? {
                let entry = entry?;
                if entry.file_name() == STAGING {
                    continue;
                }
                if entry.file_type()?.is_dir() {
                    std::fs::remove_dir_all(entry.path())?;
                } else {
                    std::fs::remove_file(entry.path())?;
                }
            }
            for entry in std::fs::read_dir(&self.staging)? {
                let entry = entry?;
                std::fs::rename(entry.path(), self.target.join(entry.file_name()))?;
            }
            std::fs::remove_dir(&self.staging)
        };
        replace().map_err(|error| Error::Output {
            path: self.target.clone(),
            problem: format!(
                "the run is whole and lies in {}, but cannot be put in place: {error}",
                self.staging.display()
            ),
        })?;
        Ok(self.target.clone())
    }
}

/// Refuses files that lie in a directory whose contents are to be replaced.
pub(super) fn check_apart<'a>(
    target: &Path,
    files: impl IntoIterator<Item = &'a Path>,
) -> Result<()> {
    let lies_here = |file: &&Path| file.canonicalize().is_ok_and(|file| file.starts_with(target));
    let Some(file) = files.into_iter().find(lies_here) else { return Ok(()) };
    Err(Error::Output {
        path: target.to_path_buf(),
        problem: format!(
            "holds {}, which this run reads and would replace; choose another with --out",
            file.display()
        ),
    })
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing more can be done about a failure here.
            let _ = std::fs::remove_dir_all(&self.staging);
            remove_empty(&self.made);
        }
    }
}

/// Makes a folder and those above it, the folder itself by this call alone; notes what it made.
fn make_folders(target: &Path, made: &mut Vec<PathBuf>) -> std::io::Result<()> {
    let target = std::path::absolute(target)?;
    let missing: Vec<&Path> =
        target.ancestors().skip(1).take_while(|folder| !folder.exists()).collect();
    for folder in missing.into_iter().rev() {
        match std::fs::create_dir(folder) {
            Ok(()) => made.push(folder.to_path_buf()),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                remove_empty(made);
                return Err(error);
            }
        }
    }
    std::fs::create_dir(&target).inspect_err(|_| remove_empty(made))?;
    made.push(target);
    Ok(())
}

/// Removes folders again, innermost first; one that others have filled meanwhile stays.
fn remove_empty(made: &[PathBuf]) {
    for folder in made.iter().rev() {
        let _ = std::fs::remove_dir(folder);
    }
}
