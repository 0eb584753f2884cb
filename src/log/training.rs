//! The run directory of a training run: written while it runs, and taken up again after a kill.
//!
//! | file | what it holds |
//! |---|---|
//! | `config.resolved.yaml` | the configuration with every default |
//! | `checkpoints/` | see [`crate::trainer::checkpoint`] |
//! | `steps.jsonl` | a line a step |
//! | `prompts.jsonl` | a line a group of every step that was decomposed |
//! | `rollouts.jsonl` | the trajectories of some steps, if that is asked for: a rollout file |
//! | `events.out.tfevents.*` | one more for every time it was taken up |
//! | `summary.json` | once it has ended |

use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::directory::{MARKER, check_apart};
use super::events::EventWriter;
use super::{diagnosis, filter, study};
use crate::config::Config;
use crate::diagnostics::{self, History};
use crate::error::{Error, Result};
use crate::rollout::{Batch, RolloutLine};
use crate::study::BatchRecord;
use crate::trainer::{Outcome, StepRecord};

/// Held by the process that writes.
const LOCK: &str = ".lock";
const CHECKPOINTS: &str = "checkpoints";
const STEPS: &str = "steps.jsonl";
const PROMPTS: &str = "prompts.jsonl";
const ROLLOUTS: &str = "rollouts.jsonl";

/// A run directory that this process alone writes to, as long as this lives; a kill frees it too.
#[derive(Debug)]
pub struct TrainingDirectory {
    path: PathBuf,
    _lock: File,
}

impl TrainingDirectory {
    /// A directory for a new run: a new one, an empty one, or with `force` one that holds an earlier
    /// run, which is removed. `files` are those that the run reads, which must not lie in it.
    ///
    /// # Errors
    /// If the name is taken, another process writes there, or it cannot be written.
    pub fn create<'a>(
        path: &Path,
        force: bool,
        files: impl IntoIterator<Item = &'a Path>,
    ) -> Result<Self> {
        let refuse = |problem: &str| Error::Output { path: path.into(), problem: problem.into() };
        let names = names(path)?;
        let is_run = names.iter().any(|name| name == MARKER);
        if is_run && !force {
            return Err(refuse(
                "holds an earlier run; go on with it by --resume, choose another with --out, or replace it with --force",
            ));
        }
        if !is_run && names.iter().any(|name| name != LOCK) {
            return Err(refuse(
                "exists and is no run directory (it holds no config.resolved.yaml); choose another with --out",
            ));
        }
        let directory = Self::lock(path)?;
        check_apart(&directory.path, files)?;
        for name in names.iter().filter(|name| *name != LOCK) {
            let old = directory.path.join(name);
            let removed = if old.is_dir() {
                std::fs::remove_dir_all(&old)
            } else {
                std::fs::remove_file(&old)
            };
            removed.map_err(Error::io("remove", &old))?;
        }
        Ok(directory)
    }

    /// The directory of an earlier run, or a new one if there is none: what was begun is gone on with.
    ///
    /// # Errors
    /// If it holds something else, another process writes there, or it cannot be written.
    pub fn resume(path: &Path) -> Result<Self> {
        let names = names(path)?;
        let holds = |file: &str| names.iter().any(|name| name == file);
        let is_of_training = holds(MARKER) && (holds(LOCK) || holds(CHECKPOINTS));
        if names.iter().any(|name| name != LOCK) && !is_of_training {
            return Err(Error::Output {
                path: path.into(),
                problem:
                    "exists and is not the directory of a training run; choose another with --out"
                        .into(),
            });
        }
        Self::lock(path)
    }

    /// Checks, where there is no checkpoint, that none is missing: the steps in the log are no more than
    /// a run makes before its first one.
    ///
    /// # Errors
    /// If they are more; they would be lost.
    pub fn check_no_checkpoint(&self, every: u64) -> Result<()> {
        let path = self.path.join(STEPS);
        let Ok(file) = File::open(&path) else { return Ok(()) };
        let steps = BufReader::new(file).lines().count() as u64;
        if steps <= every {
            return Ok(());
        }
        Err(Error::Output {
            path: self.path.clone(),
            problem: format!(
                "its log has {steps} steps, and there is no checkpoint to go on from; put {CHECKPOINTS}/ back, or begin again with --force"
            ),
        })
    }

    fn lock(path: &Path) -> Result<Self> {
        let refuse = |problem: String| Error::Output { path: path.into(), problem };
        std::fs::create_dir_all(path)
            .map_err(|error| refuse(format!("cannot be made: {error}")))?;
        let lock = File::create(path.join(LOCK))
            .map_err(|error| refuse(format!("cannot be written: {error}")))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(refuse("another gradprism is training there".into()));
            }
            // Some network file systems have no locks.
            Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => {
                return Err(refuse(format!("cannot be locked: {error}")));
            }
        }
        let path = path.canonicalize().map_err(Error::io("find", path))?;
        Ok(Self { path, _lock: lock })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of its checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join(CHECKPOINTS)
    }

    /// The configuration that it was begun with; none of a new one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn earlier_config(&self) -> Result<Option<String>> {
        self.read_text(MARKER)
    }

    /// What a file of it holds; none if there is no such file.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read_text(&self, name: &str) -> Result<Option<String>> {
        let path = self.path.join(name);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("read", &path)(error)),
        }
    }

    /// Removes a file, if it is there.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }

    /// Writes a text file, in one move.
    ///
    /// # Errors
    /// If it cannot be written; an earlier one is then untouched.
    pub fn write_text(&self, name: &str, text: &str) -> Result<()> {
        replace(&self.path.join(name), |file| file.write_all(text.as_bytes()))
    }

    /// Writes a JSON file, indented, in one move.
    ///
    /// # Errors
    /// If it cannot be written; an earlier one is then untouched.
    pub fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        replace(&self.path.join(name), |file| {
            serde_json::to_writer_pretty(&mut *file, value)?;
            file.write_all(b"\n")
        })
    }
}

/// Whether a process trains in this directory.
pub(super) fn is_in_training(path: &Path) -> bool {
    File::open(path.join(LOCK))
        .is_ok_and(|lock| matches!(lock.try_lock(), Err(TryLockError::WouldBlock)))
}

/// What lies in a folder; nothing if it does not exist.
fn names(path: &Path) -> Result<Vec<std::ffi::OsString>> {
    let list =
        || std::fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.file_name())).collect();
    match list() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed.map_err(|error: std::io::Error| Error::Output {
            path: path.into(),
            problem: format!("cannot be read: {error}"),
        }),
    }
}

/// Fills a file beside its place, syncs it, and moves it there.
fn replace(path: &Path, fill: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<()> {
    let beside = path.with_extension("partial");
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&beside)?;
        fill(&mut file)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)
    };
    write().map_err(|error| {
        let _ = std::fs::remove_file(&beside);
        Error::io("write", path)(error)
    })
}

/// Lines of JSON with a `step` each, that grow while a run goes on.
struct Lines {
    path: PathBuf,
    file: File,
}

impl Lines {
    /// Opens a file, and removes the lines of `step` and after, and what is no whole line: a killed
    /// process wrote them after its last checkpoint.
    fn open(path: PathBuf, step: u64) -> Result<Self> {
        #[derive(Deserialize)]
        struct Line {
            step: u64,
        }
        if path.exists() {
            let old = File::open(&path).map_err(Error::io("read", &path))?;
            replace(&path, |file| {
                let mut file = std::io::BufWriter::new(file);
                for line in BufReader::new(old).split(b'\n') {
                    let line = line?;
                    if serde_json::from_slice(&line).is_ok_and(|line: Line| line.step < step) {
                        file.write_all(&line)?;
                        file.write_all(b"\n")?;
                    }
                }
                file.flush()
            })?;
        }
        let file = File::options().create(true).append(true).open(&path);
        Ok(Self { file: file.map_err(Error::io("write", &path))?, path })
    }

    /// Adds lines, in one write.
    fn add<T: Serialize>(&mut self, values: &[T]) -> Result<()> {
        let mut text = Vec::new();
        let mut write = || -> std::io::Result<()> {
            for value in values {
                serde_json::to_writer(&mut text, value)?;
                text.push(b'\n');
            }
            self.file.write_all(&text)
        };
        write().map_err(Error::io("write", &self.path))
    }
}

/// Writes a training run as it goes.
pub struct TrainLog {
    events: EventWriter,
    steps: Lines,
    prompts: Lines,
    rollouts: Option<(Lines, u64)>,
    low: f64,
}

impl TrainLog {
    /// Begins at a step; what was written at this step and after is taken back. `config` goes to
    /// TensorBoard as text.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn open(directory: &TrainingDirectory, config: &Config, step: u64) -> Result<Self> {
        let path = directory.path();
        let every = config.train_sections().training.rollouts_every;
        // Also where no more are written: what is taken back is taken back everywhere.
        let rollouts = path.join(ROLLOUTS);
        let rollouts = (every > 0 || rollouts.exists())
            .then(|| Lines::open(rollouts, step))
            .transpose()?
            .filter(|_| every > 0);
        let mut events = EventWriter::resume(path, step as i64)?;
        events.text("config", step as i64, &format!("```yaml\n{}\n```", config.to_yaml()?))?;
        Ok(Self {
            events,
            steps: Lines::open(path.join(STEPS), step)?,
            prompts: Lines::open(path.join(PROMPTS), step)?,
            rollouts: rollouts.map(|lines| (lines, every)),
            low: config.diagnostics.low,
        })
    }

    /// Writes the trajectories of a step, if it is one of those that are asked for.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn sampled(&mut self, batch: &Batch, outcomes: &[Outcome]) -> Result<()> {
        let Some((lines, every)) = &mut self.rollouts else { return Ok(()) };
        if batch.step.is_some_and(|step| !step.unsigned_abs().is_multiple_of(*every)) {
            return Ok(());
        }
        let mut outcomes = outcomes.iter();
        let mut values = Vec::new();
        for group in &batch.groups {
            for trajectory in &group.trajectories {
                let line = RolloutLine::new(batch.step, &group.id, trajectory);
                let text = outcomes.next().and_then(|outcome| outcome.text.as_ref());
                values.push(match text {
                    Some((prompt, response)) => line.with_text(prompt, response),
                    None => line,
                });
            }
        }
        lines.add(&values)
    }

    /// Writes a step.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn step(&mut self, record: &StepRecord) -> Result<()> {
        for (tag, value) in scalars(record) {
            self.events.scalar(tag, record.step as i64, value)?;
        }
        for (tag, value) in filter::scalars(&record.kept) {
            self.events.scalar(tag, record.step as i64, value)?;
        }
        self.events.flush()?;
        self.steps.add(std::slice::from_ref(record))
    }

    /// Writes a decomposition.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn decomposed(&mut self, record: &BatchRecord) -> Result<()> {
        study::write_split(&mut self.events, record)?;
        self.prompts.add(&record.groups)
    }

    /// Writes a diagnosis.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn diagnosed(&mut self, record: &diagnostics::StepRecord, history: &History) -> Result<()> {
        diagnosis::write_diagnosis(&mut self.events, record, history, self.low)
    }
}

/// The numbers of a step under their tags, but for the filter's.
fn scalars(record: &StepRecord) -> Vec<(&'static str, Option<f64>)> {
    let StepRecord { sampled, update, validation, time, .. } = record;
    let some = |number: f64| Some(number);
    let mut scalars = vec![
        ("reward/mean", some(sampled.reward_mean)),
        ("reward/success", sampled.success),
        ("reward/variance_mean", some(sampled.reward_variance_mean)),
        ("reward/all_equal_share", some(sampled.all_equal_share)),
        ("reward/all_zero_share", some(sampled.all_zero_share)),
        ("reward/overlong_penalty_mean", some(sampled.overlong_penalty_mean)),
        ("sampling/length_mean", some(sampled.length_mean)),
        ("sampling/turns_mean", some(sampled.turns_mean)),
        ("sampling/invalid_actions_mean", some(sampled.invalid_actions_mean)),
        ("sampling/malformed_share", some(sampled.malformed_share)),
        ("sampling/truncated_share", some(sampled.truncated_share)),
        ("sampling/rounds", some(sampled.rounds as f64)),
        ("sampling/left_out", some(sampled.left_out as f64)),
        ("sampling/carried", some(sampled.carried as f64)),
        ("perf/sampling_tokens_per_second", time.sampling_rate()),
        ("perf/update_tokens_per_second", time.update_rate()),
        ("perf/seconds/sampling", some(time.sampling)),
        ("perf/seconds/scoring", some(time.scoring)),
        ("perf/seconds/decomposition", some(time.decomposition)),
        ("perf/seconds/diagnosis", some(time.diagnosis)),
        ("perf/seconds/update", some(time.update)),
        ("perf/seconds/validation", some(time.validation)),
        ("perf/seconds/total", some(time.total)),
    ];
    if let Some(validation) = validation {
        scalars.push(("validation/reward_mean", some(validation.reward_mean)));
        scalars.push(("validation/success", validation.success));
    }
    if let Some(update) = update {
        scalars.extend([
            ("loss/task", some(update.task_loss)),
            ("loss/kl", some(update.kl)),
            ("loss/entropy", some(update.entropy)),
            ("loss/value", update.value_loss),
            ("loss/explained_variance", update.explained_variance),
            ("loss/approx_kl", some(update.ratio.approx_kl)),
            ("loss/clip_fraction", some(update.ratio.clip_fraction)),
            ("loss/ratio_mean", some(update.ratio.mean)),
            ("loss/ratio_max", some(update.ratio.max)),
            ("loss/effective_sample_size", some(update.ratio.effective_sample_size)),
            ("optimizer/grad_norm", some(update.grad_norm)),
            ("optimizer/value_grad_norm", update.value_grad_norm),
            ("optimizer/clip_factor", some(update.clip_factor)),
            ("optimizer/learning_rate", some(update.learning_rate)),
            ("optimizer/updates", some(update.updates as f64)),
            ("optimizer/failed", some(update.failed as f64)),
        ]);
    }
    scalars
}
