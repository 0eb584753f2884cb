//! Progress: a bar on a terminal, plain lines elsewhere, nothing when quiet.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use gradprism::Result;
use gradprism::log::StudyLog;
use gradprism::study::{BatchRecord, Observer};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How far a command is, and whether Ctrl-C asks it to stop.
pub struct Meter {
    bar: ProgressBar,
    plain: bool,
    /// What is counted.
    unit: &'static str,
    total: usize,
    done: usize,
    /// Done by an earlier process.
    skipped: usize,
    /// Said beside it.
    said: String,
    started: Instant,
    interrupted: Arc<AtomicBool>,
}

impl Meter {
    pub fn new(quiet: bool, unit: &'static str, interrupted: Arc<AtomicBool>) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if quiet || !terminal {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        let template =
            format!("{{bar:32}} {{pos}}/{{len}} {unit}  {{per_sec}}  {{eta}} left  {{msg}}");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        Self {
            bar,
            plain: !quiet && !terminal,
            unit,
            total: 0,
            done: 0,
            skipped: 0,
            said: String::new(),
            started: Instant::now(),
            interrupted,
        }
    }

    pub fn start(&mut self, total: usize) {
        self.total = total;
        self.started = Instant::now();
        self.bar.set_length(total as u64);
        self.bar.reset();
    }

    pub fn advance(&mut self, count: usize) -> ControlFlow<()> {
        let before = self.done;
        self.done += count;
        self.bar.inc(count as u64);
        // Plain output gets a line each tenth of the way.
        let tenth = |done: usize| done * 10 / self.total.max(1);
        if self.plain && tenth(self.done) > tenth(before) {
            let rate = self.rate();
            let left = (self.total - self.done) as f64 / rate;
            let said = if self.said.is_empty() { "" } else { ": " };
            tracing::info!(
                "{}/{} {}, {rate:.1} a second, {left:.0} s left{said}{}",
                self.done,
                self.total,
                self.unit,
                self.said
            );
        }
        if self.interrupted.load(Ordering::Relaxed) {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    /// What was done by an earlier process.
    pub fn skip(&mut self, count: usize) {
        self.done += count;
        self.skipped += count;
        self.bar.set_position(self.done as u64);
    }

    /// What to say beside the progress.
    pub fn message(&mut self, message: String) {
        if !self.plain {
            self.bar.set_message(message.clone());
        }
        self.said = message;
    }

    pub fn warning(&self, message: &str) {
        self.bar.suspend(|| tracing::warn!("{message}"));
    }

    /// For a summary: seconds since the start, and how much was done in each.
    pub fn wall_time(&self) -> serde_json::Value {
        let seconds = self.started.elapsed().as_secs_f64();
        let rate = format!("{}_per_second", self.unit);
        serde_json::json!({ "seconds": seconds, (rate): self.rate() })
    }

    /// By this process.
    fn rate(&self) -> f64 {
        (self.done - self.skipped) as f64 / self.started.elapsed().as_secs_f64()
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Shows the progress of a study, writes each finished step to TensorBoard if there is a log, and passes
/// Ctrl-C on.
pub struct Progress {
    pub meter: Meter,
    pub log: Option<StudyLog>,
}

impl Observer for Progress {
    fn start(&mut self, trajectories: usize) {
        self.meter.start(trajectories);
    }

    fn trajectory(&mut self) -> ControlFlow<()> {
        self.meter.advance(1)
    }

    fn step(&mut self, record: &BatchRecord) -> Result<()> {
        self.log.as_mut().map_or(Ok(()), |log| log.step(record))
    }

    fn warning(&mut self, message: &str) {
        self.meter.warning(message);
    }
}
