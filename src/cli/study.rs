//! `gradprism study`.

use std::io::Write;

use clap::Args;
use gradprism::log::{StudyLog, page};
use gradprism::study::Study;

use super::progress::{Meter, Progress};
use super::run::{RunArgs, Summary, outcome};
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

pub fn run(args: &StudyArgs) -> anyhow::Result<u8> {
    let config = args.run.config.load()?.resolve()?;
    if args.explain {
        writeln!(std::io::stdout(), "{}", config.algorithm()?)?;
        return Ok(DONE);
    }
    super::set_threads(config.threads);
    let interrupted = super::interruption()?;
    let study = Study::prepare(config)?;
    let (directory, resolved) = args.run.open(study.config())?;
    let log = StudyLog::create(&directory, &resolved)?;
    let meter = Meter::new(args.run.quiet, "trajectories", interrupted);
    let mut progress = Progress { meter, log: Some(log) };
    let report = study.run(&mut progress)?;
    progress.meter.finish();

    let summary = Summary::new(&report, Some(progress.meter.wall_time()));
    let groups = report.steps.iter().flat_map(|step| &step.groups);
    directory.write_json_lines("prompts.jsonl", groups)?;
    directory.write_json("summary.json", &summary)?;
    directory.write_text("report.html", &page(&report, &resolved))?;
    drop(progress);
    let path = directory.finish()?;

    args.run.print(&summary, &path, || table::study(&report))?;
    Ok(outcome(report.partial))
}
