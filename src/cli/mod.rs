//! The commands: parse, call the library, print.

mod diagnose;
mod doctor;
mod filter;
mod filter_table;
mod inspect;
mod progress;
mod run;
mod study;
mod table;
mod train;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, Parser, Subcommand};
use gradprism::config::{Config, Threads};
use gradprism::error::Error;

/// Done.
const DONE: u8 = 0;
/// Something failed.
const FAILED: u8 = 1;
/// Wrong usage or configuration.
const WRONG_USAGE: u8 = 2;
/// Interrupted by the user.
const INTERRUPTED: u8 = 130;

/// Splits policy gradients, prompt by prompt, into signal, task noise and regularizers.
#[derive(Parser)]
#[command(version, about, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Decompose the gradients of stored rollouts
    Study(study::StudyArgs),
    /// Train a policy in a text environment: sample, filter, update
    Train(train::TrainArgs),
    /// Mutual information and collapse regime of stored rollouts
    Diagnose(diagnose::DiagnoseArgs),
    /// Keep the groups of a rollout file that a filter chooses
    Filter(filter::FilterArgs),
    /// Print what a TorchScript checkpoint is: signature, parameters, tied weights, problems
    Inspect(inspect::InspectArgs),
    /// Print versions, devices and threads, and what to do about each problem
    Doctor(doctor::DoctorArgs),
}

/// What every command with a configuration takes.
#[derive(Args)]
struct ConfigArgs {
    /// The YAML file
    config: PathBuf,
    /// Override a field, such as algorithm.clip_high=0.28; may be given several times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// cpu, cuda, cuda:N or auto
    #[arg(long)]
    device: Option<String>,
}

impl ConfigArgs {
    fn load(&self) -> gradprism::Result<Config> {
        let mut overrides = self.overrides.clone();
        overrides.extend(self.device.iter().map(|device| format!("device={device}")));
        Config::load(&self.config, &overrides)
    }
}

/// Runs the command line, and turns its outcome into an exit code.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let quiet = match &cli.command {
        Command::Study(args) => args.run.quiet,
        Command::Train(args) => args.run.quiet,
        Command::Diagnose(args) => args.run.quiet,
        Command::Filter(args) => args.run.quiet,
        Command::Inspect(_) | Command::Doctor(_) => false,
    };
    start_logging(quiet);
    announce_panics();
    let outcome = std::panic::catch_unwind(|| match &cli.command {
        Command::Study(args) => study::run(args),
        Command::Train(args) => train::run(args),
        Command::Diagnose(args) => diagnose::run(args),
        Command::Filter(args) => filter::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Doctor(args) => doctor::run(args),
    });
    let Ok(outcome) = outcome else { return ExitCode::from(FAILED) };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) if is_closed_pipe(&error) => ExitCode::from(DONE),
        Err(error) => {
            complain(&format!("error: {error:#}"));
            let is_usage = matches!(error.downcast_ref::<Error>(), Some(Error::Config { .. }));
            ExitCode::from(if is_usage { WRONG_USAGE } else { FAILED })
        }
    }
}

/// A line on the error stream; there is nowhere to say that it cannot be written.
fn complain(message: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{message}");
}

/// A panic is a fault of ours, or libtorch out of memory; the user gets one line of it, and all of it
/// on request.
fn announce_panics() {
    let full = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0") {
            return full(panic);
        }
        let payload = panic.payload();
        let message = payload.downcast_ref::<String>().map(String::as_str);
        let message =
            message.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or_default();
        let message = message.split("\\nException raised from").next().unwrap_or_default();
        complain(&format!(
            "error: a fault inside gradprism: {message}\n(RUST_BACKTRACE=1 shows where; please report it)"
        ));
    }));
}

/// `gradprism ... | head` is no error.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

fn start_logging(quiet: bool) {
    let level = if quiet { tracing::Level::ERROR } else { tracing::Level::INFO };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .log_internal_errors(false)
        .without_time()
        .init();
}

unsafe extern "C" {
    /// POSIX: ends the process without destructors.
    safe fn _exit(code: i32) -> !;
}

/// What a second Ctrl-C removes.
static LEFT_BEHIND: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();

/// Names the folder that is removed if the program must end at once.
fn remove_on_exit(folder: &Path) {
    let _ = LEFT_BEHIND.set(folder.to_path_buf());
}

/// A flag that Ctrl-C sets. A second Ctrl-C ends the program at once.
fn interruption() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&flag);
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            if let Some(folder) = LEFT_BEHIND.get() {
                let _ = std::fs::remove_dir_all(folder);
                // The run directory itself, unless an earlier run is in it.
                let _ = folder.parent().map(std::fs::remove_dir);
            }
            // `exit` would run libtorch's destructors under the thread that is at work.
            _exit(i32::from(INTERRUPTED))
        }
    })?;
    Ok(flag)
}

fn set_threads(threads: Threads) {
    if let Threads::Count(count) = threads {
        tch::set_num_threads(i32::from(count));
    }
}
