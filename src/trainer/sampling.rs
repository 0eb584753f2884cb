//! What a step asks of a source: groups to learn from, and groups to be validated by.

use std::time::Instant;

use super::record::{SampleRecord, Times, ValidationRecord, has_equal_rewards};
use super::run::Trainer;
use super::source::{SampledGroup, SourceRequest, Visit};
use crate::config::{OnLimit, TrainSections};
use crate::error::{Error, Result};

/// Visits of validations, apart from those of training.
const VALIDATION: u64 = 1 << 63;
/// Tasks of validations begin here, far from those of training.
const VALIDATION_TASKS: u64 = 1 << 31;

impl Trainer {
    /// Groups for a step, with dynamic sampling until there are enough whose rewards differ. What was
    /// accepted is never thrown away: a step that could not use it has left it to this one.
    pub(super) fn sample(&mut self, time: &mut Times) -> Result<(SampleRecord, Vec<SampledGroup>)> {
        let started = Instant::now();
        let wanted = self.sections.training.groups;
        let dynamic = self.sections.sampling.dynamic_sampling();
        let mut accepted = std::mem::take(&mut self.state.carried);
        let carried = accepted.len();
        let mut left_out = Vec::new();
        let mut rounds = 0;
        while accepted.len() < wanted && rounds < dynamic.map_or(1, |dynamic| dynamic.rounds) {
            let request = SourceRequest {
                visits: self.visits(wanted - accepted.len()),
                group_size: self.sections.training.group_size,
                greedy: false,
            };
            let groups = self.parts.source.sample(&self.parts.policy, &request)?;
            check_groups(&groups, &request)?;
            rounds += 1;
            for group in groups {
                let is_empty = dynamic.is_some() && has_equal_rewards(&group);
                if is_empty { &mut left_out } else { &mut accepted }.push(group);
            }
        }
        time.sampling = started.elapsed().as_secs_f64();
        let record = SampleRecord {
            rounds,
            left_out: left_out.len(),
            carried,
            ..SampleRecord::new(accepted[carried..].iter().chain(&left_out))
        };
        Ok((record, accepted))
    }

    /// The next tasks of the run.
    fn visits(&mut self, count: usize) -> Vec<Visit> {
        let training = &self.sections.training;
        let run = (training.seed & u64::from(u32::MAX)) << 32;
        let first = self.state.visits;
        self.state.visits += count as u64;
        let task = |visit: u64| training.tasks.map_or(visit, |tasks| visit % tasks);
        (first..self.state.visits)
            .map(|visit| Visit { task: run | (task(visit) % VALIDATION_TASKS), visit })
            .collect()
    }

    /// What to do about too few groups, if dynamic sampling has found too few.
    fn shortage(&self, sampled: &SampleRecord) -> Option<OnLimit> {
        let dynamic = self.sections.sampling.dynamic_sampling()?;
        (sampled.accepted() < self.sections.training.groups).then_some(dynamic.on_limit)
    }

    /// Whether the step learns nothing since it is short of groups.
    pub(super) fn is_held_back(&self, sampled: &SampleRecord) -> bool {
        self.shortage(sampled).is_some_and(|choice| choice != OnLimit::Train)
    }

    /// What groups depend on beside the weights, in a few words for a checkpoint.
    pub(super) fn sampled_under(&self) -> String {
        let TrainSections { environment, sampling, training, .. } = &self.sections;
        let temperature = self.config.policy.temperature;
        format!("{environment:?} {sampling:?} {temperature} {}", training.group_size)
    }

    /// Drops groups that were left to a step under other settings.
    pub(super) fn drop_foreign_groups(&mut self) {
        let dropped = self.state.carried.len();
        if dropped > 0 && self.state.carried_under != Some(self.sampled_under()) {
            self.state.carried.clear();
            self.report.warnings.push(format!(
                "{dropped} groups of the step before are dropped: environment, sampling, policy.temperature or training.group_size are no longer what they were sampled under"
            ));
        }
    }

    pub(super) fn stop_if_short(&mut self, sampled: &SampleRecord) {
        if self.shortage(sampled) == Some(OnLimit::Stop) {
            self.state.stopped = Some(format!(
                "dynamic sampling found {} of {} groups with unequal rewards in {} rounds",
                sampled.accepted(),
                self.sections.training.groups,
                sampled.rounds
            ));
        }
    }

    pub(super) fn validate(&mut self, time: &mut Times) -> Result<Option<ValidationRecord>> {
        let validation = &self.sections.validation;
        let due = validation.every > 0
            && (self.end().is_some() || self.state.step.is_multiple_of(validation.every));
        if !due {
            return Ok(None);
        }
        let started = Instant::now();
        let run = (self.sections.training.seed & u64::from(u32::MAX)) << 32;
        let request = SourceRequest {
            // The same tasks each time, and other luck.
            visits: (0..validation.groups as u64)
                .map(|index| Visit {
                    task: run | (VALIDATION_TASKS + index),
                    visit: VALIDATION | (self.state.step << 24) | index,
                })
                .collect(),
            group_size: validation.group_size,
            greedy: validation.greedy,
        };
        let source = self.parts.validation.as_mut().unwrap_or(&mut self.parts.source);
        let groups = source.sample(&self.parts.policy, &request)?;
        check_groups(&groups, &request)?;
        let record = ValidationRecord::new(&groups);
        self.state.validation = Some(record);
        time.validation = started.elapsed().as_secs_f64();
        Ok(Some(record))
    }
}

/// What the loop relies on of a source of someone's own.
fn check_groups(groups: &[SampledGroup], request: &SourceRequest) -> Result<()> {
    let refuse = |expected: String, found: String| {
        Err(Error::Argument { argument: "the groups of a source", expected, found })
    };
    if groups.len() != request.visits.len() {
        return refuse(format!("{} of them", request.visits.len()), groups.len().to_string());
    }
    for SampledGroup { group, outcomes } in groups {
        let rows = group.trajectories.len();
        if rows == 0 || outcomes.len() != rows {
            return refuse(
                "trajectories, and an outcome for each".into(),
                format!("{rows} and {} in group `{}`", outcomes.len(), group.id),
            );
        }
        for row in &group.trajectories {
            let length = row.content.len();
            let old = row.old_logprobs.as_ref().map(Vec::len);
            if row.sampled() == 0 || row.mask.len() != length || old != Some(length) {
                return refuse(
                    "a sampled token, a mask and old_logprobs of the length of the response".into(),
                    format!("{} sampled of {length} in group `{}`", row.sampled(), group.id),
                );
            }
            if !row.reward.is_finite() {
                return refuse(
                    "finite rewards".into(),
                    format!("{} in group `{}`", row.reward, group.id),
                );
            }
        }
    }
    Ok(())
}
