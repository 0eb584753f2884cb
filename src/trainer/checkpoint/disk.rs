//! The operations that put a checkpoint on a disk.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Everything that a [`CheckpointStore`](super::CheckpointStore) changes on a disk goes through here.
/// Another implementation can keep checkpoints elsewhere than in files; the tests have one that fails
/// at a chosen operation. Checkpoints are read as files.
pub trait Disk {
    /// Makes a folder and those above it; one that exists is no error.
    ///
    /// # Errors
    /// As the system says.
    fn make_folder(&self, path: &Path) -> io::Result<()>;

    /// Makes a file that is not there yet.
    ///
    /// # Errors
    /// As the system says.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;

    /// Returns once the names in a folder will outlive a power cut.
    ///
    /// # Errors
    /// As the system says.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// Renames a folder in one move.
    ///
    /// # Errors
    /// As the system says, and if the new name is taken by anything but an empty folder.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a folder with what is in it.
    ///
    /// # Errors
    /// As the system says.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// A file that is being written.
pub trait DiskFile: Write {
    /// Returns once what was written will outlive a power cut.
    ///
    /// # Errors
    /// As the system says.
    fn sync(&mut self) -> io::Result<()>;
}

/// The file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct FileSystem;

impl Disk for FileSystem {
    fn make_folder(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        // Elsewhere a folder cannot be opened as a file.
        if cfg!(unix) {
            let synced = File::open(path)?.sync_all();
            // Some network file systems have no such operation for folders.
            if !matches!(&synced, Err(error) if error.kind() == io::ErrorKind::InvalidInput) {
                return synced;
            }
        }
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir_all(path)
    }
}

impl DiskFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
