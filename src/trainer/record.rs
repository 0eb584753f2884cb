//! The results of training, as they are written: a line of `steps.jsonl` a step, and `summary.json`.

use serde::{Deserialize, Serialize};

use super::optimizer::Update;
use super::source::{Outcome, SampledGroup};
use crate::diagnostics::{self, Regime};
use crate::filter::{KeptRecord, variance};
use crate::gradient::{LossTerms, RowStats, mean};
use crate::study::{BatchRecord, PolicyRecord, RatioRecord};

/// A training run's results.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TrainReport {
    /// Whether it was interrupted before its last step; it can be resumed.
    pub partial: bool,
    /// Why it ended before its last step, if a rule ended it.
    pub stopped: Option<String>,
    /// The policy.
    pub policy: PolicyRecord,
    /// Steps made, those before a resumption among them.
    pub steps: u64,
    /// The step that this process began with.
    pub first_step: u64,
    /// Updates of the weights.
    pub updates: u64,
    /// Updates that were skipped since their gradient was not finite.
    pub failed_updates: u64,
    /// The last validation.
    pub validation: Option<ValidationRecord>,
    /// Where the time of this process went.
    pub time: Times,
    /// What is odd.
    pub warnings: Vec<String>,
    /// The last step.
    pub last: Option<StepRecord>,
}

/// A step.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StepRecord {
    /// From 0.
    pub step: u64,
    /// What was sampled.
    pub sampled: SampleRecord,
    /// What the filter kept.
    pub kept: KeptRecord,
    /// The updates; none if there was nothing to learn from.
    pub update: Option<UpdateRecord>,
    /// The split of its gradients, if it was decomposed.
    pub split: Option<SplitRecord>,
    /// The state of the reasoning, if it was diagnosed.
    pub reasoning: Option<ReasoningRecord>,
    /// The validation after the step.
    pub validation: Option<ValidationRecord>,
    /// Where the time went.
    pub time: Times,
}

/// What a decomposition says in short; `prompts.jsonl` has it by group.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SplitRecord {
    /// Mean signal-to-noise ratio of the groups.
    pub snr_mean: Option<f64>,
    /// Its median.
    pub snr_median: Option<f64>,
    /// Signal-to-noise ratio of the batch.
    pub snr_batch: Option<f64>,
    /// The share of groups with a significant signal.
    pub significant_share: f64,
    /// The mean share of the regularizers in ‖g_task‖ + ‖g_reg‖.
    pub dominance_mean: Option<f64>,
}

impl SplitRecord {
    pub(super) fn new(record: &BatchRecord) -> Self {
        Self {
            snr_mean: record.snr_mean,
            snr_median: record.snr_median,
            snr_batch: record.signal.map(|signal| signal.snr),
            significant_share: record.significant_share,
            dominance_mean: record.dominance_mean,
        }
    }
}

/// What a diagnosis says in short; TensorBoard has the rest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ReasoningRecord {
    /// I(X; Z) per token; none where it could not be measured, here and below.
    pub mi_estimate: Option<f64>,
    /// H(Z | X) per token.
    pub conditional_entropy_est: Option<f64>,
    /// The share of trajectories with a span to score.
    pub valid_share: f64,
    /// The regime.
    pub regime: Option<Regime>,
    /// Whether the early warning is on.
    pub alarm: bool,
}

impl ReasoningRecord {
    pub(super) fn new(record: &diagnostics::StepRecord) -> Self {
        let metrics = record.metrics.as_ref();
        Self {
            mi_estimate: metrics.map(|metrics| metrics.token.mi_estimate),
            conditional_entropy_est: metrics.map(|metrics| metrics.conditional_entropy_est),
            valid_share: record.valid_share,
            regime: record.judgement.regime,
            alarm: record.judgement.alarm,
        }
    }
}

/// What a step sampled, over all of its rounds: groups that dynamic sampling left out are among them, or
/// the numbers would not be those of the policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SampleRecord {
    /// Groups.
    pub groups: usize,
    /// Trajectories.
    pub trajectories: usize,
    /// Sampled tokens.
    pub tokens: usize,
    /// Mean reward.
    pub reward_mean: f64,
    /// Mean over groups of the unbiased variance of the rewards.
    pub reward_variance_mean: f64,
    /// The share of groups whose rewards are all equal.
    pub all_equal_share: f64,
    /// The share of groups whose rewards are all 0.
    pub all_zero_share: f64,
    /// The share of trajectories that reached the goal; none where there is no goal.
    pub success: Option<f64>,
    /// Mean number of sampled tokens of a trajectory.
    pub length_mean: f64,
    /// Mean number of responses of a trajectory.
    pub turns_mean: f64,
    /// Mean number of refused actions of a trajectory.
    pub invalid_actions_mean: f64,
    /// The share of responses that had not the form.
    pub malformed_share: f64,
    /// The share of trajectories that had no room for another turn.
    pub truncated_share: f64,
    /// Mean of what was taken off a reward for length.
    pub overlong_penalty_mean: f64,
    /// How often groups were sampled.
    pub rounds: u64,
    /// Groups that dynamic sampling left out, for their rewards were all equal.
    pub left_out: usize,
    /// Groups that the step before had accepted and made no update with, being short of them. This step
    /// learns from them too; the other numbers leave them out.
    pub carried: usize,
}

impl SampleRecord {
    /// Groups that the step can learn from.
    pub fn accepted(&self) -> usize {
        self.carried + self.groups - self.left_out
    }

    pub(super) fn new<'a>(groups: impl IntoIterator<Item = &'a SampledGroup>) -> Self {
        let groups: Vec<&SampledGroup> = groups.into_iter().collect();
        let rows = || groups.iter().flat_map(|group| &group.group.trajectories);
        let outcomes: Vec<&Outcome> = groups.iter().flat_map(|group| &group.outcomes).collect();
        let of = |number: &dyn Fn(&Outcome) -> f64| {
            mean(&outcomes.iter().map(|outcome| number(outcome)).collect::<Vec<f64>>())
                .unwrap_or(0.0)
        };
        let rewards: Vec<f64> = rows().map(|row| row.reward).collect();
        let variances: Vec<f64> =
            groups.iter().map(|group| variance(group.group.rewards())).collect();
        let share = |holds: &dyn Fn(&SampledGroup) -> bool| {
            groups.iter().filter(|group| holds(group)).count() as f64 / groups.len().max(1) as f64
        };
        let tokens: usize = rows().map(|row| row.sampled()).sum();
        let turns: usize = outcomes.iter().map(|outcome| outcome.turns).sum();
        let malformed: usize = outcomes.iter().map(|outcome| outcome.malformed).sum();
        let successes: Option<Vec<f64>> = outcomes
            .iter()
            .map(|outcome| outcome.success.map(|success| f64::from(u8::from(success))))
            .collect();
        Self {
            groups: groups.len(),
            trajectories: rewards.len(),
            tokens,
            reward_mean: mean(&rewards).unwrap_or(0.0),
            reward_variance_mean: mean(&variances).unwrap_or(0.0),
            all_equal_share: share(&has_equal_rewards),
            all_zero_share: share(&|group| {
                group.group.trajectories.iter().all(|row| row.reward == 0.0)
            }),
            success: successes.as_deref().and_then(mean),
            length_mean: tokens as f64 / rewards.len().max(1) as f64,
            turns_mean: of(&|outcome| outcome.turns as f64),
            invalid_actions_mean: of(&|outcome| outcome.invalid_actions as f64),
            malformed_share: malformed as f64 / turns.max(1) as f64,
            truncated_share: of(&|outcome| f64::from(u8::from(outcome.truncated))),
            overlong_penalty_mean: of(&|outcome| outcome.overlong_penalty),
            rounds: 1,
            left_out: 0,
            carried: 0,
        }
    }
}

/// Whether all rewards of a group are one number: there is nothing to learn from it.
pub(super) fn has_equal_rewards(group: &SampledGroup) -> bool {
    let rewards = group.group.rewards();
    rewards.iter().all(|reward| *reward == rewards[0])
}

/// The updates of a step. Losses are means over its updates, each before the update.
#[derive(Clone, Debug, Default, Serialize)]
pub struct UpdateRecord {
    /// Updates made.
    pub updates: u64,
    /// Updates skipped since their gradient was not finite.
    pub failed: u64,
    /// The task loss.
    pub task_loss: f64,
    /// The KL penalty at coefficient 1; 0 without a reference policy.
    pub kl: f64,
    /// The entropy, aggregated as the loss is.
    pub entropy: f64,
    /// The mean norm of the gradient before clipping.
    pub grad_norm: f64,
    /// The mean factor of the clipping.
    pub clip_factor: f64,
    /// The learning rate of the last update.
    pub learning_rate: f64,
    /// Ratios to the policy that sampled.
    pub ratio: RatioRecord,
    /// The value loss.
    pub value_loss: Option<f64>,
    /// The mean norm of the critic's gradient before clipping.
    pub value_grad_norm: Option<f64>,
    /// How much of the variance of the returns the values that advantages were made of explain:
    /// `1 − Var(R − V)/Var(R)`; none if all returns are equal.
    pub explained_variance: Option<f64>,
    /// Tokens that were read, prompts and observations among them, over all epochs.
    pub tokens: usize,
}

/// Adds up the updates of a step.
#[derive(Default)]
pub(super) struct UpdateSums {
    pub record: UpdateRecord,
    attempts: f64,
    value_attempts: f64,
    stats: RowStats,
}

impl UpdateSums {
    /// A micro-batch, of so many tokens that its forward pass read.
    pub fn add_loss(&mut self, terms: &LossTerms, read: usize) {
        self.record.tokens += read;
        self.record.task_loss += terms.task;
        self.record.kl += terms.kl;
        self.record.entropy += terms.entropy;
        terms.stats.iter().for_each(|row| self.stats.merge(row));
    }

    /// An update of the policy.
    pub fn add_update(&mut self, update: &Update) {
        self.attempts += 1.0;
        self.record.updates += u64::from(update.made);
        self.record.failed += u64::from(!update.made);
        self.record.grad_norm += update.norm;
        self.record.clip_factor += update.clip_factor;
        self.record.learning_rate = update.learning_rate;
    }

    /// An update of the critic.
    pub fn add_value_update(&mut self, loss: f64, update: &Update) {
        self.value_attempts += 1.0;
        *self.record.value_loss.get_or_insert(0.0) += loss;
        *self.record.value_grad_norm.get_or_insert(0.0) += update.norm;
    }

    /// Means of what was added.
    pub fn finish(mut self) -> UpdateRecord {
        let record = &mut self.record;
        for number in [
            &mut record.task_loss,
            &mut record.kl,
            &mut record.entropy,
            &mut record.grad_norm,
            &mut record.clip_factor,
        ] {
            *number /= self.attempts.max(1.0);
        }
        for number in [&mut record.value_loss, &mut record.value_grad_norm].into_iter().flatten() {
            *number /= self.value_attempts.max(1.0);
        }
        record.ratio = RatioRecord::of(&self.stats);
        self.record
    }
}

/// A validation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValidationRecord {
    /// Mean reward.
    pub reward_mean: f64,
    /// The standard error of that over tasks; none of one task.
    pub reward_se: Option<f64>,
    /// The share of trajectories that reached the goal.
    pub success: Option<f64>,
    /// Trajectories.
    pub trajectories: usize,
}

impl ValidationRecord {
    pub(super) fn new(groups: &[SampledGroup]) -> Self {
        let sampled = SampleRecord::new(groups);
        let means: Vec<f64> =
            groups.iter().filter_map(|group| mean(&group.group.rewards())).collect();
        let count = means.len() as f64;
        Self {
            reward_mean: sampled.reward_mean,
            reward_se: (means.len() > 1).then(|| (variance(means) / count).sqrt()),
            success: sampled.success,
            trajectories: sampled.trajectories,
        }
    }
}

/// Seconds by what they were spent on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Sampling.
    pub sampling: f64,
    /// Log-probabilities of the reference policy, values, entropies, advantages, and the filter.
    pub scoring: f64,
    /// The decomposition.
    pub decomposition: f64,
    /// The diagnosis.
    pub diagnosis: f64,
    /// Updates.
    pub update: f64,
    /// Validations.
    pub validation: f64,
    /// Checkpoints; they come after a step is recorded, and are in the sum over a run alone.
    pub checkpoint: f64,
    /// All of it, and what lies between.
    pub total: f64,
    /// Tokens sampled.
    pub sampled_tokens: usize,
    /// Tokens that updates read, prompts and observations among them, over all epochs.
    pub updated_tokens: usize,
}

impl Times {
    /// Tokens sampled a second.
    pub fn sampling_rate(&self) -> Option<f64> {
        (self.sampling > 0.0).then(|| self.sampled_tokens as f64 / self.sampling)
    }

    /// Tokens that updates read a second.
    pub fn update_rate(&self) -> Option<f64> {
        (self.update > 0.0).then(|| self.updated_tokens as f64 / self.update)
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.sampling += other.sampling;
        self.scoring += other.scoring;
        self.decomposition += other.decomposition;
        self.diagnosis += other.diagnosis;
        self.update += other.update;
        self.validation += other.validation;
        self.checkpoint += other.checkpoint;
        self.total += other.total;
        self.sampled_tokens += other.sampled_tokens;
        self.updated_tokens += other.updated_tokens;
    }
}
