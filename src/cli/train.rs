//! `gradprism train`.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Context;
use clap::Args;
use gradprism::config::Config;
use gradprism::diagnostics::{self, History};
use gradprism::log::{TrainLog, TrainingDirectory, number};
use gradprism::rollout::Batch;
use gradprism::study::BatchRecord;
use gradprism::trainer::checkpoint::latest;
use gradprism::trainer::{Checkpoint, Observer, Outcome, StepRecord, TrainReport, Trainer};

use super::progress::Meter;
use super::run::{CONFIG, RunArgs, Summary, outcome};

/// Options of training.
#[derive(Args)]
pub struct TrainArgs {
    #[command(flatten)]
    pub run: RunArgs,
    /// Go on from the last checkpoint in the run directory; without one, begin
    #[arg(long, requires = "out", conflicts_with = "force")]
    resume: bool,
}

const SUMMARY: &str = "summary.json";

pub fn run(args: &TrainArgs) -> anyhow::Result<u8> {
    let config = args.run.config.load()?.resolve_training()?;
    super::set_threads(config.threads);
    let interrupted = super::interruption()?;
    let meter = Meter::new(args.run.quiet, "steps", interrupted);
    let resolved = config.to_yaml()?;

    let (mut trainer, directory) = if args.resume {
        let directory = TrainingDirectory::resume(args.run.out().context("--resume needs --out")?)?;
        announce_changes(&directory, &config, &meter)?;
        let checkpoint = checkpoint(&directory, &config, &meter)?;
        (Trainer::prepare(config, checkpoint.as_ref())?, directory)
    } else {
        // Before anything is made or removed.
        let trainer = Trainer::prepare(config, None)?;
        let directory = args.run.claim(|path, force| {
            TrainingDirectory::create(path, force, args.run.files_read(trainer.config()))
        })?;
        (trainer, directory)
    };
    if directory.earlier_config()?.is_none() {
        directory.write_text(CONFIG, &resolved)?;
    }
    if let (Some(reason), Some(earlier)) = (trainer.end(), directory.read_text(SUMMARY)?) {
        let summary: serde_json::Value = serde_json::from_str(&earlier).context(SUMMARY)?;
        args.run.print(&summary, directory.path(), || format!("nothing to do: {reason}\n"))?;
        return Ok(outcome(false));
    }
    trainer.save_to(&directory.checkpoints())?;
    let log = TrainLog::open(&directory, trainer.config(), trainer.steps())?;

    let mut progress = Progress { meter, log, directory: &directory, config: Some(resolved) };
    let report = trainer.run(&mut progress)?;
    progress.meter.finish();
    let summary = Summary::new(&report, Some(progress.meter.wall_time()));
    directory.write_json(SUMMARY, &summary)?;
    args.run.print(&summary, directory.path(), || table(&report))?;
    Ok(outcome(report.partial))
}

/// The newest whole checkpoint; damaged newer ones are told.
fn checkpoint(
    directory: &TrainingDirectory,
    config: &Config,
    meter: &Meter,
) -> anyhow::Result<Option<Checkpoint>> {
    let Some(found) = latest(&directory.checkpoints())? else {
        // The log was written under the earlier configuration.
        let earlier = directory.earlier_config()?.unwrap_or_default();
        let earlier = Config::parse(&earlier, CONFIG, directory.path(), &[])?;
        let every = |config: &Config| config.train_sections().checkpoint.every;
        directory.check_no_checkpoint(every(&earlier).max(every(config)))?;
        meter.warning("there is no checkpoint yet: the run begins at its first step");
        return Ok(None);
    };
    for damaged in &found.damaged {
        meter.warning(&format!("{damaged}; an earlier checkpoint is taken"));
    }
    tracing::info!("going on after step {}", found.checkpoint.step());
    Ok(Some(found.checkpoint))
}

/// What is no longer as it was when the run was begun.
fn announce_changes(
    directory: &TrainingDirectory,
    config: &Config,
    meter: &Meter,
) -> anyhow::Result<()> {
    let Some(earlier) = directory.earlier_config()? else { return Ok(()) };
    let changed = config.differences(&earlier)?;
    if !changed.is_empty() {
        meter.warning(&format!(
            "the configuration is not that of the run so far: {}",
            changed.join(", ")
        ));
    }
    Ok(())
}

/// Shows progress, writes each finished step, and passes Ctrl-C on.
struct Progress<'a> {
    meter: Meter,
    log: TrainLog,
    directory: &'a TrainingDirectory,
    /// Written with the first step that was made under it.
    config: Option<String>,
}

impl Observer for Progress<'_> {
    fn start(&mut self, step: u64, steps: u64) {
        self.meter.start(steps as usize);
        self.meter.skip(step as usize);
    }

    fn sampled(&mut self, batch: &Batch, outcomes: &[Outcome]) -> gradprism::Result<()> {
        self.log.sampled(batch, outcomes)
    }

    fn decomposed(&mut self, record: &BatchRecord) -> gradprism::Result<()> {
        self.log.decomposed(record)
    }

    fn diagnosed(
        &mut self,
        record: &diagnostics::StepRecord,
        history: &History,
    ) -> gradprism::Result<()> {
        self.log.diagnosed(record, history)
    }

    fn step(&mut self, record: &StepRecord) -> gradprism::Result<ControlFlow<()>> {
        if let Some(config) = self.config.take() {
            self.directory.write_text(CONFIG, &config)?;
            self.directory.remove(SUMMARY)?;
        }
        self.log.step(record)?;
        self.meter.message(line(record));
        Ok(self.meter.advance(1))
    }

    fn saved(&mut self, path: &Path) {
        tracing::debug!("saved {}", path.display());
    }

    fn warning(&mut self, message: &str) {
        self.meter.warning(message);
    }
}

/// A step in a few words.
fn line(record: &StepRecord) -> String {
    let mut text = format!("reward {}", number(record.sampled.reward_mean));
    if let Some(success) = record.sampled.success {
        text.push_str(&format!(", success {}", number(success)));
    }
    text.push_str(&format!(", kept {} of {}", record.kept.groups, record.sampled.accepted()));
    if let Some(validation) = record.validation {
        text.push_str(&format!(", validation {}", number(validation.reward_mean)));
    }
    text
}

/// The run in a few lines.
fn table(report: &TrainReport) -> String {
    let mut text = format!(
        "{} steps, {} updates{}\n",
        report.steps,
        report.updates,
        match report.failed_updates {
            0 => String::new(),
            failed => format!(", {failed} skipped for a gradient that was not finite"),
        }
    );
    if let Some(reason) = &report.stopped {
        text.push_str(&format!("ended early: {reason}\n"));
    }
    if let Some(last) = &report.last {
        text.push_str(&format!("last step: {}\n", line(last)));
    }
    if let Some(validation) = &report.validation {
        let success = validation.success.map_or("-".into(), number);
        text.push_str(&format!(
            "validation: reward {}, success {success} of {} trajectories\n",
            gradprism::log::with_error(validation.reward_mean, validation.reward_se),
            validation.trajectories
        ));
    }
    let time = &report.time;
    let rate = |rate: Option<f64>| rate.map_or("-".into(), |rate| format!("{rate:.0}"));
    text.push_str(&format!(
        "tokens a second: {} sampled, {} read by updates\n",
        rate(time.sampling_rate()),
        rate(time.update_rate())
    ));
    let share = |seconds: f64| format!("{:.0} %", 100.0 * seconds / time.total.max(1e-9));
    text.push_str(&format!(
        "{:.1} s: sampling {}, scoring {}, decomposition {}, diagnosis {}, updates {}, validation {}, checkpoints {}\n",
        time.total,
        share(time.sampling),
        share(time.scoring),
        share(time.decomposition),
        share(time.diagnosis),
        share(time.update),
        share(time.validation),
        share(time.checkpoint)
    ));
    text
}
