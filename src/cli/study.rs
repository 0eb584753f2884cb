//! `gradprism study`.

use std::io::Write;

use clap::Args;
use gradprism::log::{StudyLog, page};
use gradprism::study::{Study, StudyReport};
use serde::Serialize;

use super::progress::{Meter, Progress};
use super::run::RunArgs;
use super::{DONE, table};

/// Options of the study.
#[derive(Args)]
pub struct StudyArgs {
    #[command(flatten)]
    pub run: RunArgs,
    /// Print the loss in formulas, with every number of the preset and the configuration, and stop
    #[arg(long)]
    explain: bool,
}

/// `summary.json`.
#[derive(Serialize)]
struct Summary<'a> {
    format: u32,
    gradprism: &'static str,
    #[serde(flatten)]
    report: &'a StudyReport,
    wall_time: WallTime,
}

/// The only part of a summary that differs between equal runs.
#[derive(Serialize)]
struct WallTime {
    seconds: f64,
    trajectories_per_second: f64,
}

pub fn run(args: &StudyArgs) -> anyhow::Result<u8> {
    let config = args.run.config.load()?.resolve()?;
    if args.explain {
        writeln!(std::io::stdout(), "{}", config.algorithm()?)?;
        return Ok(DONE);
    }
    super::set_threads(config.threads);
    let interrupted = super::interruption()?;
    let study = Study::prepare(config)?;
    let resolved = study.config().to_yaml()?;

    let directory = args.run.claim_directory()?;
    super::remove_on_exit(directory.path());
    directory.write_text("config.resolved.yaml", &resolved)?;
    let log = StudyLog::create(&directory, &resolved)?;
    let meter = Meter::new(args.run.quiet, "trajectories", interrupted);
    let mut progress = Progress { meter, log: Some(log) };
    let report = study.run(&mut progress)?;
    progress.meter.finish();

    let (seconds, done) = progress.meter.elapsed();
    let wall_time = WallTime { seconds, trajectories_per_second: done as f64 / seconds };
    let summary =
        Summary { format: 1, gradprism: env!("CARGO_PKG_VERSION"), report: &report, wall_time };
    let groups = report.steps.iter().flat_map(|step| &step.groups);
    directory.write_json_lines("prompts.jsonl", groups)?;
    directory.write_json("summary.json", &summary)?;
    directory.write_text("report.html", &page(&report, &resolved))?;
    drop(progress);
    let path = directory.finish()?;

    args.run.print(&summary, &path, || table::study(&report))?;
    Ok(super::run::outcome(report.partial))
}
