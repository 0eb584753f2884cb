//! `gradprism diagnose`.

use std::ops::ControlFlow;

use clap::Args;
use comfy_table::{Cell, CellAlignment, Color};
use gradprism::diagnostics::{
    Cost, Diagnosis, DiagnosisReport, History, Observer, Regime, StepRecord,
};
use gradprism::log::{DiagnosisLog, number, with_error};

use super::progress::Meter;
use super::run::{RunArgs, Summary, outcome};
use super::table::bare;

/// Options of the diagnosis.
#[derive(Args)]
pub struct DiagnoseArgs {
    #[command(flatten)]
    pub run: RunArgs,
}

pub fn run(args: &DiagnoseArgs) -> anyhow::Result<u8> {
    let config = args.run.config.load()?.resolve()?;
    super::set_threads(config.threads);
    let interrupted = super::interruption()?;
    let diagnosis = Diagnosis::prepare(config)?;
    let low = diagnosis.config().diagnostics.low;
    let state = diagnosis.config().diagnostics.state.clone();

    let (directory, resolved) = args.run.open(diagnosis.config())?;
    let log = DiagnosisLog::create(&directory, &resolved, low)?;
    let meter = Meter::new(args.run.quiet, "sequences", interrupted);
    let mut progress = Progress { meter, log };
    let (report, history) = diagnosis.run(&mut progress)?;
    progress.meter.finish();

    let summary = Summary::new(&report, Some(progress.meter.wall_time()));
    let rows = report.steps.iter().flat_map(|step| &step.rows);
    directory.write_json_lines("scores.jsonl", rows)?;
    directory.write_json("diagnosis.json", &summary)?;
    directory.write_json("state.json", &history)?;
    drop(progress);
    let path = directory.finish()?;
    // After the run is whole: a run that failed has not been.
    if let Some(state) = state {
        history.save(&state)?;
    }
    args.run.print(&summary, &path, || table(&report))?;
    Ok(outcome(report.partial))
}

/// Shows progress, writes each finished step to TensorBoard, and passes Ctrl-C on.
struct Progress {
    meter: Meter,
    log: DiagnosisLog,
}

impl Observer for Progress {
    fn start(&mut self, cost: &Cost) {
        tracing::info!(
            "scoring {} sequences ({} distinct spans under {} distinct contexts): {} tokens, {} with padding, in {} forward passes",
            cost.sequences,
            cost.spans,
            cost.contexts,
            cost.tokens,
            cost.padded_tokens,
            cost.forward_passes
        );
        self.meter.start(cost.sequences);
    }

    fn scored(&mut self, sequences: usize) -> ControlFlow<()> {
        self.meter.advance(sequences)
    }

    fn step(&mut self, record: &StepRecord, history: &History) -> gradprism::Result<()> {
        self.log.step(record, history)
    }

    fn warning(&mut self, message: &str) {
        self.meter.warning(message);
    }
}

/// A line a step.
fn table(report: &DiagnosisReport) -> String {
    let mut table = bare([
        "step",
        "valid",
        "spans",
        "contexts",
        "H(Z|X)",
        "I(X;Z) a token",
        "a span",
        "at most",
        "retrieved",
        "chance",
        "z",
        "z (EMA)",
        "CUSUM",
        "regime",
    ]);
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for step in &report.steps {
        table.add_row(row(step));
    }
    let mut text = format!("{table}\n");
    if report.steps.last().is_some_and(|step| step.judgement.baseline.is_none()) {
        text.push_str(
            "no baseline yet: a healthy run's state.json as diagnostics.baseline is one, or the first diagnostics.baseline_steps of a run\n",
        );
    }
    text
}

fn row(step: &StepRecord) -> Vec<Cell> {
    let judgement = &step.judgement;
    let optional = |value: Option<f64>| value.map_or("-".into(), number);
    let of = |value: fn(&gradprism::diagnostics::Metrics) -> String| {
        step.metrics.as_ref().map_or("-".into(), value)
    };
    let regime = match judgement.regime {
        None => Cell::new("-"),
        Some(Regime::Diverse) => Cell::new(Regime::Diverse.name()).fg(Color::Green),
        Some(Regime::Compressed) => Cell::new(Regime::Compressed.name()),
        Some(regime) => Cell::new(regime.name()).fg(Color::Red),
    };
    let cusum = Cell::new(optional(judgement.cusum));
    vec![
        Cell::new(step.step),
        Cell::new(format!("{}/{}", step.spans.valid_trajectories, step.spans.trajectories)),
        Cell::new(step.cost.rows),
        Cell::new(step.cost.contexts),
        Cell::new(of(|metrics| number(metrics.conditional_entropy_est))),
        Cell::new(of(|metrics| {
            with_error(metrics.token.mi_estimate, metrics.token.mi_estimate_se)
        })),
        Cell::new(of(|metrics| number(metrics.mi_seq_estimate))),
        Cell::new(of(|metrics| number(metrics.mi_upper_bound))),
        Cell::new(of(|metrics| number(metrics.retrieval.retrieval_accuracy))),
        Cell::new(of(|metrics| number(metrics.retrieval.retrieval_chance_level))),
        Cell::new(of(|metrics| number(metrics.token.mi_zscore))),
        Cell::new(optional(judgement.ema.map(|ema| ema.mi_zscore_ema))),
        if judgement.alarm { cusum.fg(Color::Red) } else { cusum },
        regime,
    ]
}
