//! `gradprism filter`.

use clap::Args;
use gradprism::error::Error;
use gradprism::log::{FilterLog, RunDirectory, score_by_rank};
use gradprism::sift::{Sift, SiftReport};
use serde::Serialize;

use super::progress::{Meter, Progress};
use super::run::RunArgs;
use super::{DONE, INTERRUPTED, filter_table};

/// Options of the filter.
#[derive(Args)]
pub struct FilterArgs {
    #[command(flatten)]
    pub run: RunArgs,
}

/// `summary.json`.
#[derive(Serialize)]
struct Summary<'a> {
    format: u32,
    gradprism: &'static str,
    score: &'static str,
    #[serde(flatten)]
    report: &'a SiftReport,
}

pub fn run(args: &FilterArgs) -> anyhow::Result<u8> {
    let config = args.run.config.load()?.resolve()?;
    super::set_threads(config.threads);
    let interrupted = super::interruption()?;
    let sift = Sift::prepare(config)?;
    let resolved = sift.config().to_yaml()?;
    let rollouts = sift.path().to_path_buf();
    let filter = sift.config().filter.clone();

    let directory = args.run.claim_directory()?;
    super::remove_on_exit(directory.path());
    if directory.holds(&rollouts) {
        return Err(Error::Rollouts {
            path: rollouts,
            problem: "lies in the run directory, where the new run would replace it; choose another with --out".into(),
        }
        .into());
    }
    directory.write_text("config.resolved.yaml", &resolved)?;
    let meter = Meter::new(args.run.quiet, "trajectories", interrupted);
    let mut progress = Progress { meter, log: None };
    let report = sift.run(&mut progress)?;
    progress.meter.finish();
    let Some(report) = report else {
        tracing::warn!("interrupted: nothing is written, since not every group was judged");
        return Ok(INTERRUPTED);
    };
    report.write_kept(&rollouts, &directory.path().join("kept.jsonl"))?;
    let score = filter.score.name();
    let summary =
        Summary { format: 1, gradprism: env!("CARGO_PKG_VERSION"), score, report: &report };
    write_records(&directory, &summary)?;
    log(&directory, &resolved, &report, score)?;
    let path = directory.finish()?;

    let kept = path.join("kept.jsonl");
    args.run.print(&summary, &kept, || filter_table::sift(&report, &filter))?;
    Ok(DONE)
}

fn write_records(directory: &RunDirectory, summary: &Summary) -> gradprism::Result<()> {
    let groups = summary.report.steps.iter().flat_map(|step| &step.groups);
    directory.write_json_lines("groups.jsonl", groups)?;
    if let Some(study) = &summary.report.study {
        let groups = study.steps.iter().flat_map(|step| &step.groups);
        directory.write_json_lines("prompts.jsonl", groups)?;
    }
    directory.write_json("summary.json", summary)
}

/// TensorBoard, and a picture a step.
fn log(
    directory: &RunDirectory,
    resolved: &str,
    report: &SiftReport,
    score: &str,
) -> gradprism::Result<()> {
    let mut log = FilterLog::create(directory, resolved)?;
    for step in &report.steps {
        let picture = score_by_rank(step, score);
        log.step(step, &picture)?;
        let name = match report.steps.len() {
            1 => "score_by_rank.png".to_owned(),
            _ => format!("score_by_rank-{}.png", step.step),
        };
        directory.write_picture(&name, &picture)?;
    }
    Ok(())
}
