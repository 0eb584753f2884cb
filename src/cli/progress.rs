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

/// Shows progress, writes each finished step of a study to TensorBoard, and passes Ctrl-C on.
pub struct Progress {
    bar: ProgressBar,
    plain: bool,
    total: usize,
    done: usize,
    started: Instant,
    interrupted: Arc<AtomicBool>,
    log: Option<StudyLog>,
}

impl Progress {
    pub fn new(quiet: bool, interrupted: Arc<AtomicBool>, log: Option<StudyLog>) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if quiet || !terminal {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        if let Ok(style) =
            ProgressStyle::with_template("{bar:32} {pos}/{len} trajectories  {per_sec}  {eta} left")
        {
            bar.set_style(style);
        }
        Self {
            bar,
            plain: !quiet && !terminal,
            total: 0,
            done: 0,
            started: Instant::now(),
            interrupted,
            log,
        }
    }

    /// Seconds since the start, and trajectories done.
    pub fn elapsed(&self) -> (f64, usize) {
        (self.started.elapsed().as_secs_f64(), self.done)
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Observer for Progress {
    fn start(&mut self, trajectories: usize) {
        self.total = trajectories;
        self.started = Instant::now();
        self.bar.set_length(trajectories as u64);
        self.bar.reset();
    }

    fn trajectory(&mut self) -> ControlFlow<()> {
        self.done += 1;
        self.bar.inc(1);
        // Plain output gets a line each tenth of the way.
        let tenth = |done: usize| done * 10 / self.total.max(1);
        if self.plain && tenth(self.done) > tenth(self.done - 1) {
            let rate = self.done as f64 / self.started.elapsed().as_secs_f64();
            let left = (self.total - self.done) as f64 / rate;
            tracing::info!(
                "{}/{} trajectories, {rate:.1} a second, {left:.0} s left",
                self.done,
                self.total
            );
        }
        if self.interrupted.load(Ordering::Relaxed) {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    fn step(&mut self, record: &BatchRecord) -> Result<()> {
        self.log.as_mut().map_or(Ok(()), |log| log.step(record))
    }

    fn warning(&mut self, message: &str) {
        self.bar.suspend(|| tracing::warn!("{message}"));
    }
}
