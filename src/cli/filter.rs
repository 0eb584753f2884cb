//! `gradprism filter`.

use clap::Args;
use gradprism::log::{FilterLog, RunDirectory, score_by_rank};
use gradprism::sift::{Sift, SiftReport};

use super::progress::{Meter, Progress};
use super::run::{RunArgs, Summary};
use super::{DONE, INTERRUPTED, filter_table};

/// Options of the filter.
#[derive(Args)]
pub struct FilterArgs {
    #[command(flatten)]
    pub run: RunArgs,
}

pub fn run(args: &FilterArgs) -> anyhow::Result<u8> {
    let config = args.run.config.load()?.resolve()?;
    super::set_threads(config.threads);
    let interrupted = super::interruption()?;
    let sift = Sift::prepare(config)?;
    let rollouts = sift.path().to_path_buf();
    let filter = sift.config().filter.clone();

    let (directory, resolved) = args.run.open(sift.config())?;
    let meter = Meter::new(args.run.quiet, "trajectories", interrupted);
    let mut progress = Progress { meter, log: None };
    let report = sift.run(&mut progress)?;
    progress.meter.finish();
    let Some(report) = report else {
        tracing::warn!("interrupted: nothing is written, since not every group was judged");
        return Ok(INTERRUPTED);
    };
    report.write_kept(&rollouts, &directory.path().join("kept.jsonl"))?;
    let summary = Summary::new(&report, None);
    write_records(&directory, &report)?;
    directory.write_json("summary.json", &summary)?;
    log(&directory, &resolved, &report)?;
    let path = directory.finish()?;

    let kept = path.join("kept.jsonl");
    args.run.print(&summary, &kept, || filter_table::sift(&report, &filter))?;
    Ok(DONE)
}

fn write_records(directory: &RunDirectory, report: &SiftReport) -> gradprism::Result<()> {
    let groups = report.steps.iter().flat_map(|step| &step.groups);
    directory.write_json_lines("groups.jsonl", groups)?;
    if let Some(study) = &report.study {
        let groups = study.steps.iter().flat_map(|step| &step.groups);
        directory.write_json_lines("prompts.jsonl", groups)?;
    }
    Ok(())
}

/// TensorBoard, and a picture a step.
fn log(directory: &RunDirectory, resolved: &str, report: &SiftReport) -> gradprism::Result<()> {
    let mut log = FilterLog::create(directory, resolved)?;
    for step in &report.steps {
        let picture = score_by_rank(step, report.score);
        log.step(step, &picture)?;
        let name = match report.steps.len() {
            1 => "score_by_rank.png".to_owned(),
            _ => format!("score_by_rank-{}.png", step.step),
        };
        directory.write_picture(&name, &picture)?;
    }
    Ok(())
}
