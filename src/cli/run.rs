//! What every command that fills a run directory shares.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use gradprism::config::Config;
use gradprism::log::RunDirectory;
use serde::Serialize;

use super::{ConfigArgs, DONE, INTERRUPTED};

/// The configuration with every default, in a run directory.
pub const CONFIG: &str = "config.resolved.yaml";

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
    /// Claims the run directory, and puts the resolved configuration, returned as text, into it.
    pub fn open(&self, config: &Config) -> anyhow::Result<(RunDirectory, String)> {
        let resolved = config.to_yaml()?;
        let directory = self.claim(RunDirectory::create)?;
        super::remove_on_exit(directory.path());
        directory.check_apart(self.files_read(config))?;
        directory.write_text(CONFIG, &resolved)?;
        Ok((directory, resolved))
    }

    /// What must not lie in the run directory: the files that the configuration names, and its own,
    /// unless it is one that a run has written and writes again.
    pub fn files_read<'a>(&'a self, config: &'a Config) -> impl Iterator<Item = &'a Path> {
        let own = self.config.config.as_path();
        let is_written = own.file_name().is_some_and(|name| name == CONFIG);
        config.files_read().into_iter().chain((!is_written).then_some(own))
    }

    /// The directory that was asked for.
    pub fn out(&self) -> Option<&Path> {
        self.out.as_deref()
    }

    /// Makes `--out`, or a name from the configuration's and the time, with a number if it is taken.
    pub fn claim<D>(
        &self,
        create: impl Fn(&Path, bool) -> gradprism::Result<D>,
    ) -> gradprism::Result<D> {
        if let Some(out) = &self.out {
            return create(out, self.force);
        }
        let name = self.config.config.file_stem().unwrap_or_default().to_string_lossy();
        let time = chrono::Local::now().format("%Y%m%d-%H%M%S");
        let base = format!("runs/{name}-{time}");
        let mut path = PathBuf::from(&base);
        let mut attempt = 2;
        loop {
            match create(&path, false) {
                // Another run took the name, perhaps this very moment.
                Err(_) if path.exists() && attempt < 1000 => {
                    path = PathBuf::from(format!("{base}-{attempt}"));
                    attempt += 1;
                }
                outcome => return outcome,
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

/// A report with what every summary begins and ends with.
#[derive(Serialize)]
pub struct Summary<'a, R> {
    format: u32,
    gradprism: &'static str,
    #[serde(flatten)]
    report: &'a R,
    /// The only part that differs between equal runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    wall_time: Option<serde_json::Value>,
}

impl<'a, R> Summary<'a, R> {
    pub fn new(report: &'a R, wall_time: Option<serde_json::Value>) -> Self {
        Self { format: 1, gradprism: env!("CARGO_PKG_VERSION"), report, wall_time }
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
