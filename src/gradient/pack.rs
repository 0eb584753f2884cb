//! Several groups, or a part of one, in one padded batch, and the losses on its logits,
//! differentiated in closed form as far as the logits.

use tch::{Kind, Tensor};

use super::engine::{Components, Part};
use super::rows::{self, GroupInput, RowStats, Scorer};
use crate::error::Result;
use crate::objective::{self, Term, TokenWeights, Tokens};
use crate::rollout::Trajectory;

/// Rows of one forward pass.
pub(super) struct Micro<'a> {
    pub rows: Vec<&'a Trajectory>,
    /// The group of each, for messages.
    groups: Vec<&'a str>,
    /// `[B, T]` float64 on the CPU.
    advantages: Tensor,
    /// `[B, T]` float64: the weight of each token in its group's loss.
    weights: Tensor,
    /// `[B, T]` bool.
    mask: Tensor,
    /// Whether any advantage of the groups is other than 0. A part of a group has a task pass where
    /// the group has, though all its own advantages be 0: its rows belong to the products.
    has_task: bool,
}

impl<'a> Micro<'a> {
    /// All rows of groups, one after the other.
    pub fn new(inputs: &'a [GroupInput]) -> Result<Self> {
        let rows: Vec<&Trajectory> =
            inputs.iter().flat_map(|input| &input.group.trajectories).collect();
        let length = longest_response(&rows);
        let join = |of: &dyn Fn(&GroupInput) -> Tensor| {
            let parts: Vec<Tensor> = inputs
                .iter()
                .map(|input| {
                    let part = of(input);
                    part.constant_pad_nd([0, length - part.size()[1]])
                })
                .collect();
            Tensor::f_cat(&parts, 0)
        };
        let advantages = join(&|input| input.advantages.shallow_clone())?;
        Ok(Self {
            groups: inputs
                .iter()
                .flat_map(|input| input.group.trajectories.iter().map(|_| input.group.id.as_str()))
                .collect(),
            has_task: advantages.ne(0.0).any().int64_value(&[]) != 0,
            advantages,
            weights: join(&|input| input.weights.per_token(Kind::Double))?,
            mask: join(&|input| input.weights.mask().to_kind(Kind::Uint8))?.to_kind(Kind::Bool),
            rows,
        })
    }

    /// Rows of any groups, each with the name of its group, with advantages and weights `[B, T]` that
    /// were taken on the whole optimiser batch.
    pub fn of_rows(
        rows: Vec<&'a Trajectory>,
        groups: Vec<&'a str>,
        advantages: &Tensor,
        weights: &TokenWeights,
    ) -> Self {
        let length = longest_response(&rows);
        let cut = |tensor: Tensor| tensor.narrow(1, 0, length);
        Self {
            advantages: cut(advantages.shallow_clone()),
            weights: cut(weights.per_token(Kind::Double)),
            mask: cut(weights.mask().shallow_clone()),
            has_task: true,
            groups,
            rows,
        }
    }

    /// Some of the rows, in the order given.
    pub fn select(&self, chosen: &[usize]) -> Self {
        let rows: Vec<&Trajectory> = chosen.iter().map(|row| self.rows[*row]).collect();
        let length = longest_response(&rows);
        let index: Vec<i64> = chosen.iter().map(|row| *row as i64).collect();
        let index = Tensor::from_slice(&index).to_device(self.mask.device());
        let pick = |tensor: &Tensor| tensor.index_select(0, &index).narrow(1, 0, length);
        Self {
            groups: chosen.iter().map(|row| self.groups[*row]).collect(),
            advantages: pick(&self.advantages),
            weights: pick(&self.weights),
            mask: pick(&self.mask),
            has_task: self.has_task,
            rows,
        }
    }

    /// Whether the groups have a task gradient.
    pub fn has_task(&self) -> bool {
        self.has_task
    }

    /// Chunks of its rows, as [`length_chunks`].
    pub fn chunks(&self, budget: usize) -> Vec<Vec<usize>> {
        length_chunks(&self.rows, budget)
    }
}

/// Chunks of rows of at most `budget` padded tokens, alike in length: the largest of as many rows as
/// fit, shortest first.
pub(crate) fn length_chunks(rows: &[&Trajectory], budget: usize) -> Vec<Vec<usize>> {
    let tokens = |row: &usize| rows[*row].forward_tokens();
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(tokens);
    let mut chunks: Vec<Vec<usize>> = Vec::new();
    for row in order {
        match chunks.last_mut() {
            Some(chunk) if (chunk.len() + 1) * tokens(&row) <= budget => chunk.push(row),
            _ => chunks.push(vec![row]),
        }
    }
    chunks
}

fn longest_response(rows: &[&Trajectory]) -> i64 {
    rows.iter().map(|row| row.content.len()).max().unwrap_or(0) as i64
}

/// The losses of a batch as functions of its logits `[n, V]`.
pub(super) struct Upstream {
    log_probs: Tensor,
    actions: Tensor,
    temperature: f64,
    kind: Kind,
    /// `[n]`: derivatives of the weighted losses with respect to the log-probabilities.
    task: Option<Tensor>,
    kl: Option<Tensor>,
    /// `[n]`
    weights: Tensor,
    coefficients: (f64, f64),
    /// `[3]`: the weighted sums of task, KL and entropy.
    sums: Tensor,
}

impl Upstream {
    /// The losses on these logits, without a graph, and the sums of every row.
    ///
    /// # Errors
    /// If libtorch fails or a loss is not finite.
    pub fn new(
        scorer: &Scorer,
        micro: &Micro,
        logits: &Tensor,
        actions: &Tensor,
    ) -> Result<(Self, Vec<RowStats>)> {
        let _no_grad = tch::no_grad_guard();
        let log_probs = objective::log_probs(&logits.detach(), scorer.temperature);
        let (device, kind) = (log_probs.device(), log_probs.kind());
        let shape = micro.mask.size();
        // Where each of the n positions lies in [B, T].
        let places: Vec<i64> = micro
            .rows
            .iter()
            .enumerate()
            .flat_map(|(row, trajectory)| {
                let start = row as i64 * shape[1];
                start..start + trajectory.content.len() as i64
            })
            .collect();
        let places = Tensor::from_slice(&places).to_device(device);
        let spread = |flat: &Tensor| {
            Tensor::zeros([shape[0] * shape[1]], (flat.kind(), device))
                .index_copy(0, &places, flat)
                .reshape(&shape)
        };
        let gather = |padded: &Tensor| padded.reshape([-1]).index_select(0, &places);

        let logp = spread(&objective::gather(&log_probs, actions)?);
        let entropy = spread(&objective::entropy(&log_probs));
        let sampler = rows::padded_like(&micro.rows, &logp, |row| row.sampler_logprobs.as_deref());
        let tokens = Tokens {
            old_logp: scorer.old_rows(&micro.rows, &logp),
            ref_logp: scorer.reference_rows(&micro.rows, &logp)?,
            sampler_logp: sampler,
            advantages: micro.advantages.to_kind(kind).to_device(device),
            mask: micro.mask.to_device(device),
            logp,
        }
        .masked()?;
        let task = scorer.algorithm.task(&tokens);
        let kl = scorer.algorithm.kl(&tokens);
        let stats = scorer
            .stats(&tokens, &task, kl.as_ref(), &entropy)?
            .into_iter()
            .enumerate()
            .map(|(row, stats)| rows::finite(stats, micro.groups[row], micro.rows[row].line))
            .collect::<Result<Vec<RowStats>>>()?;

        let weights = micro.weights.to_kind(kind).to_device(device);
        let of_slope = |slope: &Tensor| gather(&(slope * &weights));
        let weighted = |values: &Tensor| {
            objective::masked(&(values * &weights), &tokens.mask).sum(Kind::Double)
        };
        let none = Tensor::zeros([], (Kind::Double, device));
        let sums = Tensor::f_stack(
            &[
                weighted(&task.value),
                kl.as_ref().map_or(none, |kl: &Term| weighted(&kl.value)),
                weighted(&entropy),
            ],
            0,
        )?;
        let upstream = Self {
            task: micro.has_task().then(|| of_slope(&task.slope)),
            kl: kl.as_ref().map(|kl| of_slope(&kl.slope)),
            weights: gather(&weights),
            log_probs,
            actions: actions.shallow_clone(),
            temperature: scorer.temperature,
            kind: logits.kind(),
            coefficients: (scorer.algorithm.kl_loss_coef(), scorer.algorithm.entropy_coef),
            sums,
        };
        Ok((upstream, stats))
    }

    /// The parts of the regularizer that have a gradient.
    pub fn parts(&self, components: Components) -> Vec<Part> {
        match components {
            Components::Separate => {
                let kl = self.kl.as_ref().map(|_| Part::Kl);
                kl.into_iter().chain([Part::Entropy]).collect()
            }
            Components::Combined => {
                let (kl, entropy) = self.coefficients;
                let any = (kl != 0.0 && self.kl.is_some()) || entropy != 0.0;
                any.then_some(Part::Combined).into_iter().collect()
            }
        }
    }

    /// The gradient of the task loss with respect to the logits `[n, V]`; none where it is 0.
    pub fn task(&self) -> Result<Option<Tensor>> {
        self.task.as_ref().map(|slope| self.logit_gradient(slope, None)).transpose()
    }

    /// The gradient of a part of the regularizer with respect to the logits `[n, V]`.
    pub fn part(&self, part: Part) -> Result<Tensor> {
        let zero = || self.weights.zeros_like();
        let kl = || self.kl.as_ref().map_or_else(zero, Tensor::shallow_clone);
        match part {
            Part::Kl => self.logit_gradient(&kl(), None),
            Part::Entropy => self.logit_gradient(&zero(), Some(&-&self.weights)),
            Part::Combined => {
                let (kl_coef, entropy_coef) = self.coefficients;
                let entropy = (entropy_coef != 0.0).then(|| &self.weights * -entropy_coef);
                self.logit_gradient(&(kl() * kl_coef), entropy.as_ref())
            }
        }
    }

    /// The gradient of the whole loss with respect to the logits `[n, V]`.
    pub fn loss(&self) -> Result<Tensor> {
        let (kl_coef, entropy_coef) = self.coefficients;
        let mut slope =
            self.task.as_ref().map_or_else(|| self.weights.zeros_like(), Tensor::shallow_clone);
        if let Some(kl) = self.kl.as_ref().filter(|_| kl_coef != 0.0) {
            slope += kl * kl_coef;
        }
        let entropy = (entropy_coef != 0.0).then(|| &self.weights * -entropy_coef);
        self.logit_gradient(&slope, entropy.as_ref())
    }

    /// The weighted sums of the task term, the KL term and the entropy, each at coefficient 1; one
    /// transfer from the device.
    pub fn sums(&self) -> Result<[f64; 3]> {
        let sums: Vec<f64> = Vec::try_from(&self.sums)?;
        Ok([sums[0], sums[1], sums[2]])
    }

    fn logit_gradient(&self, slope: &Tensor, entropy_slope: Option<&Tensor>) -> Result<Tensor> {
        let (log_probs, actions) = (&self.log_probs, &self.actions);
        objective::logit_gradient(log_probs, actions, slope, entropy_slope, self.temperature)
            .map(|gradient| gradient.to_kind(self.kind))
    }
}
