//! What a checkpoint holds, by which it is known to be whole.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use flate2::Crc;
use serde::{Deserialize, Serialize};

/// The file in the folder of a checkpoint; it is written last.
pub(super) const MANIFEST: &str = "manifest.json";
/// Of the file.
const FORMAT: u32 = 1;
/// Bytes that are read at a time.
const BLOCK: usize = 1 << 20;

/// The manifest of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: u32,
    pub step: u64,
    /// Higher is better.
    pub score: Option<f64>,
    pub files: BTreeMap<String, Content>,
    /// Of this with 0 in its place, without white space.
    crc32: u32,
}

/// Size and checksum of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct Content {
    pub bytes: u64,
    pub crc32: u32,
}

impl Content {
    /// Of a file as it is.
    pub fn of(path: &Path) -> std::io::Result<Self> {
        Ok(Self { bytes: std::fs::metadata(path)?.len(), crc32: checksum_of(path)? })
    }
}

impl Manifest {
    pub fn new(step: u64) -> Self {
        Self { format: FORMAT, step, score: None, files: BTreeMap::new(), crc32: 0 }
    }

    /// The text of the file.
    pub fn into_text(mut self) -> serde_json::Result<String> {
        self.crc32 = self.checksum()?;
        Ok(serde_json::to_string_pretty(&self)? + "\n")
    }

    fn checksum(&self) -> serde_json::Result<u32> {
        let bare = serde_json::to_vec(&Self { crc32: 0, ..self.clone() })?;
        let mut crc = Crc::new();
        crc.update(&bare);
        Ok(crc.sum())
    }

    /// Reads the manifest of a folder and checks that every file of it has its size. Hands back what
    /// is wrong.
    pub fn read(folder: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(folder.join(MANIFEST))
            .map_err(|error| format!("{MANIFEST} cannot be read: {error}"))?;
        let manifest: Self = serde_json::from_str(&text)
            .map_err(|error| format!("{MANIFEST} is damaged: {error}"))?;
        if manifest.format != FORMAT {
            return Err(format!(
                "{MANIFEST} is of format {}, and this version knows format {FORMAT}",
                manifest.format
            ));
        }
        if manifest.checksum().ok() != Some(manifest.crc32) {
            return Err(format!("{MANIFEST} is damaged: its checksum is another"));
        }
        for (name, content) in &manifest.files {
            let found = std::fs::metadata(folder.join(name))
                .map_err(|error| format!("{name} cannot be read: {error}"))?
                .len();
            if found != content.bytes {
                return Err(format!("{name} has {found} bytes instead of {}", content.bytes));
            }
        }
        Ok(manifest)
    }

    /// Reads every file and compares checksums. Hands back what is wrong.
    pub fn verify(&self, folder: &Path) -> Result<(), String> {
        for (name, content) in &self.files {
            let found = checksum_of(&folder.join(name))
                .map_err(|error| format!("{name} cannot be read: {error}"))?;
            if found != content.crc32 {
                return Err(format!("{name} is damaged: its checksum is another"));
            }
        }
        Ok(())
    }
}

fn checksum_of(path: &Path) -> std::io::Result<u32> {
    let mut file = File::open(path)?;
    let mut crc = Crc::new();
    let mut block = vec![0; BLOCK];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(crc.sum()),
            count => crc.update(&block[..count]),
        }
    }
}
