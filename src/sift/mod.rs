//! The filter as a job of its own: a rollout file in; which of its groups are kept, and why, out.
//!
//! Rewards and lengths are in the file. Entropies take a forward pass of the policy over every
//! trajectory; `snr` and `signal` are measured by a [`Study`], whose report comes along.

mod entropy;
mod record;

pub use record::{ReasonCounts, SiftGroup, SiftReport, SiftStep};

use std::path::{Path, PathBuf};

use entropy::EntropyRun;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::filter::{Need, OnEmpty, Scores};
use crate::rollout::{self, ReadReport, Rollouts};
use crate::study::{Observer, Study};

/// A filter job whose inputs are read and checked.
pub struct Sift {
    config: Config,
    path: PathBuf,
    read: ReadReport,
    batches: Vec<SiftBatch>,
    source: Source,
}

/// The groups of a step, before any verdict.
struct SiftBatch {
    step: Option<i64>,
    groups: Vec<SiftGroup>,
}

/// Where scores beyond those of the rollouts come from.
enum Source {
    Rollouts(Rollouts),
    Entropies(Box<EntropyRun>),
    Gradients(Box<Study>),
}

impl Source {
    fn rollouts(&self) -> &Rollouts {
        match self {
            Self::Rollouts(rollouts) => rollouts,
            Self::Entropies(run) => run.rollouts(),
            Self::Gradients(study) => study.rollouts(),
        }
    }
}

impl Sift {
    /// Reads the rollouts, and the first checkpoint if the score needs a policy, and checks all that
    /// can be checked before anything is computed.
    ///
    /// # Errors
    /// At the first thing that is wrong with the configuration, the rollouts or the policies.
    pub fn prepare(config: Config) -> Result<Self> {
        let config = config.resolve()?;
        let path = config.rollouts_path()?;
        // Its lines are read again when the kept ones are written.
        if path.exists() && !path.is_file() {
            return Err(Error::Rollouts {
                path,
                problem: "expected a file, which is read twice, found a folder or a pipe".into(),
            });
        }
        let source = match config.filter.score.need() {
            Need::Rollouts => Source::Rollouts(rollout::read(&path, &config.read_options())?),
            Need::Forward => Source::Entropies(Box::new(EntropyRun::prepare(&config)?)),
            Need::Gradient => Source::Gradients(Box::new(Study::prepare(config.clone())?)),
        };
        let rollouts = source.rollouts();
        if !matches!(source, Source::Rollouts(_)) {
            check_one_policy_a_step(&config, rollouts)?;
        }
        Ok(Self { read: rollouts.report.clone(), batches: batches(rollouts), config, path, source })
    }

    /// The configuration with every default filled in.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The rollout file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Measures what has to be measured, and judges every group. None if the observer asked to stop:
    /// a file of which only a part was judged is of no use.
    ///
    /// # Errors
    /// If libtorch fails, a loss, a gradient or an entropy is not finite, a later checkpoint is
    /// unusable, or no group of a step is kept and that is an error.
    pub fn run(mut self, observer: &mut dyn Observer) -> Result<Option<SiftReport>> {
        let mut report = SiftReport {
            read: self.read,
            score: self.config.filter.score,
            warnings: Vec::new(),
            steps: Vec::new(),
            study: None,
        };
        if !matches!(self.source, Source::Gradients(_)) {
            // A study says these itself.
            report.read.warnings().iter().for_each(|warning| observer.warning(warning));
        }
        match self.source {
            Source::Rollouts(_) => {}
            Source::Entropies(run) => {
                let Some(entropies) = run.run(observer)? else { return Ok(None) };
                for (group, rows) in groups_mut(&mut self.batches).zip(&entropies) {
                    group.scores = group.scores.with_entropies(rows);
                }
            }
            Source::Gradients(study) => {
                let study = study.run(observer)?;
                if study.partial {
                    return Ok(None);
                }
                let records = study.steps.iter().flat_map(|step| &step.groups);
                for (group, record) in groups_mut(&mut self.batches).zip(records) {
                    group.scores = record.scores;
                }
                report.study = Some(study);
            }
        }
        let mut filter = self.config.filter.step_filter().marking();
        for SiftBatch { step, mut groups } in self.batches {
            let scores: Vec<Scores> = groups.iter().map(|group| group.scores).collect();
            let (verdicts, kept) = filter.judge(&scores)?;
            for (group, verdict) in groups.iter_mut().zip(verdicts) {
                group.verdict = verdict;
            }
            let step = SiftStep::new(step.unwrap_or(0), groups, kept);
            if kept.groups == 0 {
                let problem = format!("step {}: the filter keeps no group", step.step);
                if self.config.filter.on_empty == OnEmpty::Error {
                    return Err(Error::Rollouts {
                        path: self.path,
                        problem: format!(
                            "{problem}, and filter.on_empty is error; choose skip or keep_all, or a wider filter"
                        ),
                    });
                }
                observer.warning(&problem);
                report.warnings.push(problem);
            }
            report.steps.push(step);
        }
        Ok(Some(report))
    }
}

/// Of several policies on the same rollouts, which one's scores should count is not for us to say.
fn check_one_policy_a_step(config: &Config, rollouts: &Rollouts) -> Result<()> {
    let steps: Vec<Option<i64>> = rollouts.batches.iter().map(|batch| batch.step).collect();
    let checkpoints = config.checkpoints(&steps)?.len();
    if checkpoints == steps.len() {
        return Ok(());
    }
    Err(Error::config(
        "policy.checkpoint",
        format!("expected one checkpoint to filter rollouts without steps by, found {checkpoints}"),
    ))
}

fn batches(rollouts: &Rollouts) -> Vec<SiftBatch> {
    rollouts
        .batches
        .iter()
        .map(|batch| SiftBatch {
            step: batch.step,
            groups: batch.groups.iter().map(|group| SiftGroup::new(batch.step, group)).collect(),
        })
        .collect()
}

fn groups_mut(batches: &mut [SiftBatch]) -> impl Iterator<Item = &mut SiftGroup> {
    batches.iter_mut().flat_map(|batch| &mut batch.groups)
}
