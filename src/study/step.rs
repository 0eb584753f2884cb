//! One step: the groups of a batch, a few at a time, to the record of the batch.

use super::Observer;
use super::{BatchRecord, BucketRecord, GroupRecord, ParameterRecord, PreparedBatch};
use crate::config::{Config, EngineName, OldLogprobs};
use crate::error::{Error, Result};
use crate::gradient::{
    BatchedEngine, Coefficients, Coherence, ComponentSums, Debias, Engine, GroupInput,
    GroupProducts, PackResult, PlainEngine, RowStats, Scorer, Split, split,
};
use crate::objective::{AdvantageEstimator, Aggregation, Algorithm, KlPlacement};
use crate::policy::Policy;
use crate::rollout::Batch;

/// `debias` holds at ratio 1; log-probabilities of another program differ by rounding.
const ON_POLICY_LOG_RATIO: f64 = 0.02;

/// What batches are decomposed with.
#[derive(Clone, Copy)]
pub struct Decomposer<'a> {
    /// A resolved configuration: of interest are `policy.temperature`, `rollouts.old_logprobs` and
    /// `decomposition`.
    pub config: &'a Config,
    /// The loss.
    pub algorithm: &'a Algorithm,
    /// The reference policy; if there is one it wins over the log-probabilities of the trajectories.
    pub reference: Option<&'a Policy>,
}

impl<'a> Decomposer<'a> {
    /// The engine that the configuration asks for. It remembers what it has checked of a policy, so that
    /// one engine should be kept over steps.
    pub fn engine(&self) -> Box<dyn Engine> {
        let decomposition = &self.config.decomposition;
        let plain =
            PlainEngine { by_parameter: decomposition.by_parameter, scores: decomposition.bound };
        let sketch = decomposition.sketch_dimensions;
        match decomposition.engine {
            EngineName::Loop => Box::new(plain),
            name => Box::new(BatchedEngine::new(
                plain,
                decomposition.token_budget,
                name != EngineName::Auto,
                decomposition.seed,
                (name == EngineName::Sketch).then_some(sketch),
            )),
        }
    }

    /// How the trajectories are scored under a policy.
    pub fn scorer<'s>(&'s self, policy: &'s Policy) -> Scorer<'s> {
        Scorer {
            policy,
            reference: self.reference,
            algorithm: self.algorithm,
            temperature: self.config.policy.temperature,
            recompute_old: self.config.rollouts.old_logprobs == OldLogprobs::Recompute,
            components: self.config.decomposition.components,
        }
    }

    /// Advantages and shares of a batch, taken once.
    ///
    /// # Errors
    /// If the algorithm needs something that the trajectories lack, or libtorch fails.
    pub fn prepare(&self, policy: &Policy, batch: &Batch) -> Result<PreparedBatch> {
        match self.algorithm.kl_placement {
            KlPlacement::Reward if self.algorithm.kl.coef > 0.0 => {
                PreparedBatch::with_kl_in_reward(&self.scorer(policy), batch)
            }
            _ => PreparedBatch::new(self.algorithm, batch),
        }
    }

    /// Splits the gradient of every group of a batch under a policy, unless the observer asks to stop.
    /// `step` is the name of the batch in the record.
    ///
    /// # Errors
    /// If libtorch fails, or a loss or a gradient is not finite.
    pub fn step(
        &self,
        policy: &Policy,
        batch: &Batch,
        prepared: &PreparedBatch,
        step: Option<i64>,
        engine: &mut dyn Engine,
        observer: &mut dyn Observer,
    ) -> Result<BatchRecord> {
        let algorithm = self.algorithm;
        let work = Step {
            config: self.config,
            policy,
            batch,
            scorer: self.scorer(policy),
            prepared,
            named_step: step,
            coefficients: Coefficients {
                kl: algorithm.kl_loss_coef(),
                entropy: algorithm.entropy_coef,
            },
            debias: self.config.decomposition.debias.then_some(Debias {
                leave_one_out: algorithm.advantage == AdvantageEstimator::Rloo,
                norm_length: match algorithm.aggregation {
                    Aggregation::SeqMeanTokenSumNorm => algorithm.norm_length.unwrap_or(1.0),
                    _ => 1.0,
                },
            }),
        };
        work.run(engine, observer)
    }
}

/// What a step works with.
struct Step<'a> {
    config: &'a Config,
    policy: &'a Policy,
    batch: &'a Batch,
    scorer: Scorer<'a>,
    prepared: &'a PreparedBatch,
    named_step: Option<i64>,
    coefficients: Coefficients,
    debias: Option<Debias>,
}

/// What adds up over the groups.
#[derive(Default)]
struct Totals {
    sums: ComponentSums,
    task_coherence: Coherence,
    reg_coherence: Coherence,
    stats: RowStats,
    records: Vec<(usize, GroupRecord)>,
    buckets: Vec<BucketRecord>,
}

impl Step<'_> {
    /// Takes every group, unless the observer asks to stop.
    fn run(&self, engine: &mut dyn Engine, observer: &mut dyn Observer) -> Result<BatchRecord> {
        let groups = &self.batch.groups;
        let buckets = self.config.buckets();
        let assigned = buckets.as_ref().map_or_else(
            || vec![0; groups.len()],
            |buckets| buckets.assign(&self.prepared.reward_variances),
        );
        // Bucket after bucket, so that one bucket's sums are held at a time; in a bucket groups of
        // about one length follow each other, those without a task gradient by themselves.
        let has_task = self.prepared.has_task();
        let mut order: Vec<usize> = (0..groups.len()).collect();
        order.sort_by_key(|group| (assigned[*group], has_task[*group], groups[*group].longest()));

        let mut totals = Totals::default();
        let mut partial = false;
        for bucket in order.chunk_by(|a, b| assigned[*a] == assigned[*b]) {
            let first = totals.records.len();
            let mut sums = ComponentSums::default();
            for alike in bucket.chunk_by(|a, b| has_task[*a] == has_task[*b]) {
                partial =
                    partial || !self.groups(alike, engine, observer, &mut sums, &mut totals)?;
            }
            let done = &totals.records[first..];
            if buckets.is_some() && !done.is_empty() {
                let share = done.iter().map(|(group, _)| self.prepared.shares[*group]).sum();
                let records: Vec<&GroupRecord> = done.iter().map(|(_, record)| record).collect();
                let norms = sums.norms(self.coefficients, share)?;
                totals.buckets.push(BucketRecord::new(assigned[bucket[0]], norms, &records));
            }
            totals.sums.merge(sums);
            if partial {
                break;
            }
        }
        let mut record = self.record(totals, partial)?;
        record.warnings.extend(engine.notes());
        Ok(record)
    }

    /// Takes groups, as many at once as the engine likes; false if the observer asked to stop.
    fn groups(
        &self,
        groups: &[usize],
        engine: &mut dyn Engine,
        observer: &mut dyn Observer,
        sums: &mut ComponentSums,
        totals: &mut Totals,
    ) -> Result<bool> {
        let mut rest = groups;
        while !rest.is_empty() {
            let sizes: Vec<(usize, usize)> = rest
                .iter()
                .map(|group| &self.batch.groups[*group])
                .map(|group| (group.trajectories.len(), group.longest()))
                .collect();
            let (pack, others) = rest.split_at(engine.pack(self.policy, &sizes).min(rest.len()));
            rest = others;
            let inputs = pack
                .iter()
                .map(|group| self.prepared.group_input(self.scorer.algorithm, self.batch, *group))
                .collect::<Result<Vec<GroupInput>>>()?;
            let result = engine
                .groups(&self.scorer, &inputs, &mut || observer.trajectory())
                .map_err(|error| error.in_group(&inputs[0].group.id))?;
            let Some(result) = result else { return Ok(false) };
            self.add(pack, &inputs, &result, sums, totals)?;
        }
        Ok(true)
    }

    /// Adds what an engine gave of some groups.
    fn add(
        &self,
        pack: &[usize],
        inputs: &[GroupInput],
        result: &PackResult,
        sums: &mut ComponentSums,
        totals: &mut Totals,
    ) -> Result<()> {
        let shares: Vec<f64> = pack.iter().map(|group| self.prepared.shares[*group]).collect();
        sums.add(&shares, &result.gradients);
        let (mut task_norms, mut reg_norms) = (Vec::new(), Vec::new());
        for ((index, input), group) in pack.iter().copied().zip(inputs).zip(&result.groups) {
            let split = self.split(&group.products, index);
            task_norms.push(split.task_norm);
            reg_norms.push(split.reg_norm);
            let mut stats = RowStats::default();
            group.stats.iter().for_each(|row| stats.merge(row));
            totals.stats.merge(&stats);
            if self.debias.is_some() {
                check_on_policy(&stats, &input.group.id)?;
            }
            let (prepared, step) = (self.prepared, self.named_step);
            let mut record =
                GroupRecord::new(step, prepared, index, input.group, &split, &group.stats);
            if self.config.decomposition.bound {
                record.set_bound(self.scorer.algorithm, prepared, index, group);
            }
            if !group.by_parameter.is_empty() {
                let parameters = self.policy.trainable().zip(&group.by_parameter);
                let records = parameters.map(|(parameter, products)| ParameterRecord {
                    name: parameter.name().into(),
                    split: self.split(products, index),
                });
                record.by_parameter = Some(records.collect());
            }
            totals.records.push((index, record));
        }
        totals.task_coherence.add_task(&result.gradients, &task_norms);
        totals.reg_coherence.add_regularizer(&result.gradients, self.coefficients, &reg_norms);
        Ok(())
    }

    fn split(&self, products: &GroupProducts, group: usize) -> Split {
        let seed = self.config.decomposition.seed.wrapping_add(group as u64);
        split(products, self.coefficients, self.debias, seed)
    }

    fn record(&self, mut totals: Totals, partial: bool) -> Result<BatchRecord> {
        let step = self.named_step.unwrap_or(0);
        totals.records.sort_by_key(|(group, _)| *group);
        let shares: Vec<f64> =
            totals.records.iter().map(|(group, _)| self.prepared.shares[*group]).collect();
        let whole = !shares.is_empty() && !partial;
        let mut record = BatchRecord::new(
            step,
            totals.records.into_iter().map(|(_, record)| record).collect(),
            &shares,
            whole.then(|| totals.sums.norms(self.coefficients, 1.0)).transpose()?,
            &totals.stats,
        );
        record.buckets = totals.buckets;
        record.task_coherence = totals.task_coherence.mean_cosine()?;
        record.reg_coherence = totals.reg_coherence.mean_cosine()?;
        record.partial = partial;
        if partial {
            record.buckets.clear();
            record.warnings.push(format!(
                "step {step} was interrupted: numbers of the batch as a whole are left out, and the groups are those of the smallest reward variances first"
            ));
        }
        Ok(record)
    }
}

/// The bias that `debias` takes out is known at ratio 1.
fn check_on_policy(stats: &RowStats, group: &str) -> Result<()> {
    if stats.log_ratio_max <= ON_POLICY_LOG_RATIO {
        return Ok(());
    }
    Err(Error::config(
        "decomposition.debias",
        format!(
            "expected rollouts of this very policy (ratio 1), found a log-ratio of {:.3} in group `{group}`; with rollouts.old_logprobs: recompute the checkpoint is taken for the sampler",
            stats.log_ratio_max
        ),
    ))
}
