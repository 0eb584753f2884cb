//! The results of a study, as they are written: a line of `prompts.jsonl` a group, an entry of
//! `summary.json` a step.

use serde::Serialize;
use tch::Device;

use super::prepare::PreparedBatch;
use crate::error::Result;
use crate::filter::{KeptRecord, Scores, StepFilter, Verdict};
use crate::gradient::{
    BatchSignal, ComponentNorms, GroupResult, RowStats, Split, mean, median, spearman,
};
use crate::objective::{Algorithm, KlPlacement};
use crate::policy::Policy;
use crate::rollout::{Group, ReadReport};

/// A study's results.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StudyReport {
    /// Whether it was interrupted: what is here is finished, and more was to come.
    pub partial: bool,
    /// The policy: checkpoint-independent facts.
    pub policy: PolicyRecord,
    /// What the reader left out or found odd.
    pub read: ReadReport,
    /// What else is odd.
    pub warnings: Vec<String>,
    /// One record a step.
    pub steps: Vec<BatchRecord>,
}

/// The policy of a study.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PolicyRecord {
    /// Elements of all parameters, a tied weight once.
    pub parameters: usize,
    /// Elements of those that gradients are taken of.
    pub trainable: usize,
    /// Vocabulary size or number of actions.
    pub choices: i64,
    /// Its dtype.
    pub dtype: String,
    /// Where it ran.
    pub device: String,
}

impl PolicyRecord {
    /// Describes a policy that is loaded onto a device.
    pub fn new(policy: &Policy, device: Device) -> Self {
        Self {
            parameters: policy.parameters().iter().map(|parameter| parameter.numel()).sum(),
            trainable: policy.trainable().map(|parameter| parameter.numel()).sum(),
            choices: policy.choices(),
            dtype: crate::policy::dtype_name(policy.dtype()),
            device: crate::native::device_name(device),
        }
    }
}

/// A group: a line of `prompts.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub struct GroupRecord {
    /// The step of the file.
    pub step: Option<i64>,
    /// The group's name.
    pub group_id: String,
    /// Its trajectories with a sampled token.
    pub group_size: usize,
    /// Its sampled tokens.
    pub tokens: usize,
    /// The mean reward.
    pub reward_mean: f64,
    /// The unbiased variance of the rewards.
    pub reward_variance: f64,
    /// The split of its gradient.
    #[serde(flatten)]
    pub split: Split,
    /// √RV·√((G − 1)/G)·√mean‖s_i‖², which ‖g_task‖ cannot exceed; none unless it was asked for and
    /// holds. s_i is the row's score, `h_i = −A_i s_i`; off-policy the ratio and its clipping are part
    /// of it.
    pub bound: Option<f64>,
    /// `bound` − ‖g_task‖.
    pub bound_slack: Option<f64>,
    /// Whether the filter keeps it.
    pub kept: bool,
    /// The split by parameter, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_parameter: Option<Vec<ParameterRecord>>,
    /// What the filter can rank it by.
    #[serde(skip)]
    pub scores: Scores,
}

/// The split of one parameter's share of a group's gradient.
#[derive(Clone, Debug, Serialize)]
pub struct ParameterRecord {
    /// The parameter's name.
    pub name: String,
    /// The split.
    #[serde(flatten)]
    pub split: Split,
}

impl GroupRecord {
    pub(super) fn new(
        step: Option<i64>,
        prepared: &PreparedBatch,
        index: usize,
        group: &Group,
        split: &Split,
        rows: &[RowStats],
    ) -> Self {
        let counts = group.counts();
        let entropies: Vec<(f64, f64)> = rows.iter().map(|row| (row.entropy, row.tokens)).collect();
        let scores = Scores {
            reward_variance: prepared.reward_variances[index],
            snr: Some(split.snr),
            signal_sq: Some(split.signal_sq),
            ..Scores::of_rewards(&group.rewards(), counts.tokens).with_entropies(&entropies)
        };
        Self {
            step,
            group_id: group.id.clone(),
            group_size: counts.rows,
            tokens: counts.tokens,
            reward_mean: scores.reward_mean,
            reward_variance: scores.reward_variance,
            split: split.clone(),
            bound: None,
            bound_slack: None,
            kept: true,
            by_parameter: None,
            scores,
        }
    }

    /// The bound holds where `h_i = −A_i s_i` and Σ A_i² = (G − 1)·RV, up to the factor of a
    /// leave-one-out mean.
    pub(super) fn set_bound(
        &mut self,
        algorithm: &Algorithm,
        prepared: &PreparedBatch,
        index: usize,
        result: &GroupResult,
    ) {
        let rows = self.group_size as f64;
        let Some(factor) = algorithm.advantage.mean_baseline_factor(self.group_size) else {
            return;
        };
        // With the KL penalty in the rewards, their variance is not the one that is known.
        let penalised = algorithm.kl_placement == KlPlacement::Reward && algorithm.kl.coef > 0.0;
        if self.reward_variance == 0.0 || penalised {
            return;
        }
        let advantages = prepared.row_advantages(index);
        let scores: f64 = advantages
            .iter()
            .zip(&result.score_norms_sq)
            .zip(&self.split.trajectory_task_norms)
            .map(|((advantage, score_sq), norm)| match score_sq {
                Some(score_sq) => *score_sq,
                None => (norm / advantage).powi(2),
            })
            .sum();
        // s_i is G times the row's share: its mean square is G times their sum.
        let bound =
            factor * (self.reward_variance * (rows - 1.0) / rows).sqrt() * (rows * scores).sqrt();
        self.bound = Some(bound);
        self.bound_slack = Some(bound - self.split.task_norm);
    }
}

/// Ratios of the policy to the one that sampled, over sampled tokens.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct RatioRecord {
    /// Mean ratio.
    pub mean: f64,
    /// Largest ratio.
    pub max: f64,
    /// Mean |log-ratio|.
    pub mean_abs_log_ratio: f64,
    /// Mean of r − 1 − log r, an estimate of KL(old‖new).
    pub approx_kl: f64,
    /// The share of tokens whose gradient the clipping cuts.
    pub clip_fraction: f64,
    /// (Σ r)²/(n Σ r²): the share of the tokens that the weights leave effective.
    pub effective_sample_size: f64,
}

impl RatioRecord {
    /// From the sums over all rows.
    pub fn of(stats: &RowStats) -> Self {
        let per_token = |sum: f64| sum / stats.tokens.max(1.0);
        Self {
            mean: per_token(stats.ratio),
            max: stats.ratio_max,
            mean_abs_log_ratio: per_token(stats.log_ratio_abs),
            approx_kl: per_token(stats.approx_kl),
            clip_fraction: per_token(stats.clipped),
            effective_sample_size: if stats.ratio_sq > 0.0 {
                stats.ratio.powi(2) / (stats.tokens * stats.ratio_sq)
            } else {
                0.0
            },
        }
    }
}

/// A bucket of reward variance.
#[derive(Clone, Debug, Serialize)]
pub struct BucketRecord {
    /// From 0, by ascending reward variance.
    pub bucket: usize,
    /// Its groups.
    pub groups: usize,
    /// The smallest reward variance in it.
    pub reward_variance_min: f64,
    /// The largest.
    pub reward_variance_max: f64,
    /// Norms of the mean gradient over its groups, weighted by their shares.
    pub norm_of_mean: ComponentNorms,
    /// Means of the groups' own norms.
    pub mean_of_norms: MeanNorms,
    /// The mean signal-to-noise ratio.
    pub snr_mean: f64,
}

/// Means over groups of their norms.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MeanNorms {
    /// ‖g_task‖.
    pub task: f64,
    /// ‖g_KL‖ at coefficient 1.
    pub kl: Option<f64>,
    /// ‖g_entropy‖ at coefficient 1.
    pub entropy: Option<f64>,
    /// ‖g_reg‖.
    pub reg: f64,
    /// ‖g_task + g_reg‖.
    pub total: f64,
}

impl MeanNorms {
    fn new(groups: &[&GroupRecord]) -> Self {
        let of = |norm: fn(&Split) -> Option<f64>| {
            let norms: Option<Vec<f64>> = groups.iter().map(|group| norm(&group.split)).collect();
            norms.and_then(|norms| mean(&norms))
        };
        let always = |norm: fn(&Split) -> Option<f64>| of(norm).unwrap_or(0.0);
        Self {
            task: always(|split| Some(split.task_norm)),
            kl: of(|split| split.kl_unit_norm),
            entropy: of(|split| split.entropy_unit_norm),
            reg: always(|split| Some(split.reg_norm)),
            total: always(|split| Some(split.total_norm)),
        }
    }
}

impl BucketRecord {
    pub(super) fn new(
        bucket: usize,
        norm_of_mean: ComponentNorms,
        groups: &[&GroupRecord],
    ) -> Self {
        let variances = || groups.iter().map(|group| group.reward_variance);
        let snrs: Vec<f64> = groups.iter().map(|group| group.split.snr).collect();
        Self {
            bucket,
            groups: groups.len(),
            reward_variance_min: variances().fold(f64::INFINITY, f64::min),
            reward_variance_max: variances().fold(0.0, f64::max),
            norm_of_mean,
            mean_of_norms: MeanNorms::new(groups),
            snr_mean: mean(&snrs).unwrap_or(0.0),
        }
    }
}

/// A step: its groups and what they add up to.
#[derive(Clone, Debug, Serialize)]
pub struct BatchRecord {
    /// The step of the file, or the place of the checkpoint, or 0.
    pub step: i64,
    /// Whether some groups are missing since the study was interrupted.
    pub partial: bool,
    /// Groups.
    pub group_count: usize,
    /// Trajectories with a sampled token.
    pub trajectories: usize,
    /// Sampled tokens.
    pub tokens: usize,
    /// The mean number of sampled tokens of a trajectory.
    pub length_mean: f64,
    /// The mean reward over trajectories.
    pub reward_mean: f64,
    /// The mean over groups of the reward variance.
    pub reward_variance_mean: f64,
    /// The share of groups whose rewards are all 0.
    pub all_zero_share: f64,
    /// The share of groups whose rewards are all equal.
    pub all_equal_share: f64,
    /// Norms of the batch's gradient; none of an empty record.
    pub grad_norm: Option<ComponentNorms>,
    /// Signal and noise of the batch.
    pub signal: Option<BatchSignal>,
    /// The mean signal-to-noise ratio of the groups.
    pub snr_mean: Option<f64>,
    /// Its median.
    pub snr_median: Option<f64>,
    /// The share of groups with `signal_p` of at most 0.05.
    pub significant_share: f64,
    /// The mean share of the regularizers in ‖g_task‖ + ‖g_reg‖.
    pub dominance_mean: Option<f64>,
    /// Spearman's correlation of reward variance and signal-to-noise ratio.
    pub spearman_rv_snr: Option<f64>,
    /// Spearman's correlation of reward variance and signal².
    pub spearman_rv_signal: Option<f64>,
    /// The mean pairwise cosine of the groups' task gradients.
    pub task_coherence: Option<f64>,
    /// The mean pairwise cosine of the groups' regularizer gradients: near 1 where the regularizer
    /// does not care for the prompt.
    pub reg_coherence: Option<f64>,
    /// Ratios.
    pub ratio: RatioRecord,
    /// The mean entropy of a sampled token.
    pub entropy_mean: f64,
    /// The mean KL estimate of a sampled token; none without a reference policy.
    pub kl_mean: Option<f64>,
    /// What the filter keeps.
    pub kept: KeptRecord,
    /// Buckets of reward variance.
    pub buckets: Vec<BucketRecord>,
    /// What is odd about this step.
    pub warnings: Vec<String>,
    /// The groups, in file order; they are written to `prompts.jsonl`.
    #[serde(skip)]
    pub groups: Vec<GroupRecord>,
}

/// A group with a sign-flip test at or below this counts as significant.
pub const SIGNIFICANT: f64 = 0.05;

impl BatchRecord {
    pub(super) fn new(
        step: i64,
        groups: Vec<GroupRecord>,
        shares: &[f64],
        grad_norm: Option<ComponentNorms>,
        stats: &RowStats,
    ) -> Self {
        let of = |value: fn(&GroupRecord) -> f64| groups.iter().map(value).collect::<Vec<f64>>();
        let share_of = |holds: fn(&GroupRecord) -> bool| {
            groups.iter().filter(|group| holds(group)).count() as f64 / groups.len().max(1) as f64
        };
        let snrs = of(|group| group.split.snr);
        let variances = of(|group| group.reward_variance);
        let dominance: Vec<f64> = groups.iter().filter_map(|group| group.split.dominance).collect();
        let trajectories: usize = groups.iter().map(|group| group.group_size).sum();
        let tokens: usize = groups.iter().map(|group| group.tokens).sum();
        let reward_sum: f64 = of(|group| group.scores.reward_sum).iter().sum();
        let per_token = |sum: f64| sum / stats.tokens.max(1.0);
        let signal = grad_norm.map(|norms| {
            let splits = groups.iter().map(|group| &group.split);
            BatchSignal::new(shares.iter().copied().zip(splits), &norms)
        });
        let has_kl = groups.iter().any(|group| group.split.kl_unit_norm.is_some());
        Self {
            step,
            partial: false,
            group_count: groups.len(),
            trajectories,
            tokens,
            length_mean: tokens as f64 / trajectories.max(1) as f64,
            reward_mean: reward_sum / trajectories.max(1) as f64,
            reward_variance_mean: mean(&variances).unwrap_or(0.0),
            all_zero_share: share_of(|group| {
                group.reward_variance == 0.0 && group.reward_mean == 0.0
            }),
            all_equal_share: share_of(|group| group.reward_variance == 0.0),
            grad_norm,
            signal,
            snr_mean: mean(&snrs),
            snr_median: median(&snrs),
            significant_share: share_of(|group| {
                group.split.signal_p.is_some_and(|p| p <= SIGNIFICANT)
            }),
            dominance_mean: mean(&dominance),
            spearman_rv_snr: spearman(&variances, &snrs),
            spearman_rv_signal: spearman(&variances, &of(|group| group.split.signal_sq)),
            task_coherence: None,
            reg_coherence: None,
            ratio: RatioRecord::of(stats),
            entropy_mean: per_token(stats.entropy),
            kl_mean: has_kl.then(|| per_token(stats.kl)),
            kept: KeptRecord::default(),
            buckets: Vec::new(),
            warnings: Vec::new(),
            groups,
        }
    }

    /// Marks what the filter keeps; all other numbers stay those of the whole batch.
    pub(super) fn mark_kept(&mut self, filter: &mut StepFilter) -> Result<()> {
        if self.groups.is_empty() {
            return Ok(());
        }
        let scores: Vec<Scores> = self.groups.iter().map(|group| group.scores).collect();
        let (verdicts, kept) = filter.judge(&scores)?;
        if kept.groups == 0 {
            self.warnings.push(format!("step {}: the filter keeps no group", self.step));
        }
        self.mark(&verdicts, kept);
        Ok(())
    }

    /// Marks what a filter decided, a verdict a group.
    pub(crate) fn mark(&mut self, verdicts: &[Verdict], kept: KeptRecord) {
        for (group, verdict) in self.groups.iter_mut().zip(verdicts) {
            group.kept = verdict.kept;
        }
        self.kept = kept;
    }
}
