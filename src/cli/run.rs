//! What every command that fills a run directory shares.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use gradprism::log::RunDirectory;
use serde::Serialize;

use super::{ConfigArgs, DONE, INTERRUPTED};

/// Options of a run.
#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// The run directory [default: runs/<config name>-<time>]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Replace an earlier run in the run directory
    #[arg(long)]
    force: bool,
    /// Print errors only
    #[arg(long, short)]
    pub quiet: bool,
    /// Print the summary as JSON instead of a table
    #[arg(long)]
    json: bool,
}

impl RunArgs {
    /// `--out`, or a name from the configuration's and the time, with a number if it is taken.
    pub fn claim_directory(&self) -> anyhow::Result<RunDirectory> {
        if let Some(out) = &self.out {
            return Ok(RunDirectory::create(out, self.force)?);
        }
        let name = self.config.config.file_stem().unwrap_or_default().to_string_lossy();
        let time = chrono::Local::now().format("%Y%m%d-%H%M%S");
        let base = format!("runs/{name}-{time}");
        let mut path = PathBuf::from(&base);
        let mut attempt = 2;
        loop {
            match RunDirectory::create(&path, false) {
                // Another run took the name, perhaps this very moment.
                Err(_) if path.exists() && attempt < 1000 => {
                    path = PathBuf::from(format!("{base}-{attempt}"));
                    attempt += 1;
                }
                outcome => return Ok(outcome?),
            }
        }
    }

    /// Prints the summary as it was asked for; `written` is what the run left.
    pub fn print(
        &self,
        summary: &impl Serialize,
        written: &Path,
        table: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.json {
            serde_json::to_writer_pretty(&mut out, summary).map_err(std::io::Error::from)?;
            writeln!(out)?;
        } else if !self.quiet {
            write!(out, "{}", table())?;
            writeln!(out, "\nwritten to {}", written.display())?;
        }
        Ok(())
    }
}

/// The exit code of a run that is written.
pub fn outcome(partial: bool) -> u8 {
    if partial {
        tracing::warn!("interrupted: what was finished is written, and marked partial");
        return INTERRUPTED;
    }
    DONE
}
