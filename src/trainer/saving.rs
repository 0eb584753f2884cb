//! When a checkpoint is saved, and what may be.

use std::time::Instant;

use tch::Kind;

use super::Critic;
use super::record::StepRecord;
use super::run::{Observer, Trainer};
use super::state::Saved;
use crate::error::{Error, Result};
use crate::policy::Policy;

impl Trainer {
    /// After the last step and every so many.
    pub(super) fn is_checkpoint_due(&self) -> bool {
        self.end().is_some() || self.state.step.is_multiple_of(self.sections.checkpoint.every)
    }

    /// Whether the best checkpoint is kept, and this would be it by a validation.
    pub(super) fn is_best(&self, record: &StepRecord) -> Result<bool> {
        let (Some(store), Some(validation)) = (&self.store, &record.validation) else {
            return Ok(false);
        };
        let is_better = |best: Option<f64>| best.is_none_or(|best| validation.reward_mean > best);
        Ok(self.sections.checkpoint.best && is_better(store.best_score()?))
    }

    /// What the best checkpoint has the highest of.
    pub(super) fn score(&self, record: &StepRecord) -> Option<f64> {
        match self.sections.validation.every {
            0 => Some(record.sampled.reward_mean),
            _ => record.validation.map(|validation| validation.reward_mean),
        }
    }

    pub(super) fn save(&mut self, score: Option<f64>, observer: &mut dyn Observer) -> Result<()> {
        let Some(store) = &mut self.store else { return Ok(()) };
        let started = Instant::now();
        for policy in [Some(&self.parts.policy), self.parts.critic.as_ref().map(Critic::model)] {
            policy.map_or(Ok(()), require_finite_weights)?;
        }
        let saved = Saved {
            state: &self.state,
            policy: &self.parts.policy,
            optimizer: &self.parts.optimizer,
            reference: self.parts.reference.as_ref(),
            critic: self.parts.critic.as_ref(),
            device: self.parts.policy.device(),
        };
        let mut writer = store.begin(self.state.step)?;
        saved.write(&mut writer)?;
        let committed = writer.commit(score)?;
        observer.saved(&committed.path);
        for warning in committed.warnings {
            self.warn(observer, warning);
        }
        let seconds = started.elapsed().as_secs_f64();
        self.report.time.checkpoint += seconds;
        self.report.time.total += seconds;
        Ok(())
    }
}

/// What has diverged is not saved: a run could not go on from it.
fn require_finite_weights(policy: &Policy) -> Result<()> {
    for parameter in policy.parameters().iter().filter(|it| it.tensor.numel() > 0) {
        let found = parameter.tensor.detach().f_abs()?.f_max()?.to_kind(Kind::Double);
        let found = found.double_value(&[]);
        if !found.is_finite() {
            return Err(Error::NonFinite {
                place: policy.path().display().to_string(),
                what: format!("a weight of `{}` after the update", parameter.name()),
                found,
                remedy: "the training has diverged, and earlier checkpoints are untouched: lower optimizer.learning_rate".into(),
            });
        }
    }
    Ok(())
}
