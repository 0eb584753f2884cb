//! A whole batch: sums of the groups' gradients, and what follows from them and from the splits.

use serde::Serialize;
use tch::Tensor;

use super::engine::GroupGradients;
use super::gram::{GradientVector, Gram, gram};
use super::split::{Coefficients, Split};
use crate::error::Result;

/// A weighted sum of gradient vectors; nothing until the first is added.
#[derive(Debug, Default)]
struct Sum(Option<GradientVector>);

impl Sum {
    fn add(&mut self, weight: f64, vector: &GradientVector) {
        let _no_grad = tch::no_grad_guard();
        match &mut self.0 {
            None => {
                self.0 = Some(vector.iter().map(|tensor| tensor * weight).collect());
            }
            Some(sum) => {
                for (sum, term) in sum.iter_mut().zip(vector) {
                    // One pass over memory: sum += term·weight.
                    let weight = Tensor::from(weight).to_kind(sum.kind()).to_device(sum.device());
                    let _ = sum.addcmul_(term, &weight);
                }
            }
        }
    }
}

/// The task, KL and entropy parts of a sum over groups, at coefficient 1.
#[derive(Debug, Default)]
pub struct ComponentSums {
    task: Sum,
    kl: Sum,
    entropy: Sum,
}

/// Which of the three a combination takes, and with what factor.
const TASK: usize = 0;
const KL: usize = 1;
const ENTROPY: usize = 2;

impl ComponentSums {
    /// Adds a group's gradients with its share of the batch.
    pub fn add(&mut self, share: f64, gradients: &GroupGradients) {
        if let Some(task) = &gradients.task {
            self.task.add(share, task);
        }
        if let Some(kl) = &gradients.kl {
            self.kl.add(share, kl);
        }
        self.entropy.add(share, &gradients.entropy);
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: Self) {
        for (sum, term) in [
            (&mut self.task, other.task),
            (&mut self.kl, other.kl),
            (&mut self.entropy, other.entropy),
        ] {
            if let Some(term) = term.0 {
                match sum.0 {
                    None => sum.0 = Some(term),
                    Some(_) => sum.add(1.0, &term),
                }
            }
        }
    }

    /// The gradient of the loss, one tensor a trainable parameter: task and weighted regularizers.
    /// None if nothing was added.
    pub fn loss_gradient(&self, coefficients: Coefficients) -> Option<GradientVector> {
        let mut total = Sum::default();
        for (weight, part) in
            [(1.0, &self.task), (coefficients.kl, &self.kl), (coefficients.entropy, &self.entropy)]
        {
            if let Some(part) = &part.0 {
                total.add(weight, part);
            }
        }
        total.0
    }

    /// The norms of the parts and of their combinations, divided by `share`.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn norms(&self, coefficients: Coefficients, share: f64) -> Result<ComponentNorms> {
        let parts = [self.task.0.as_ref(), self.kl.0.as_ref(), self.entropy.0.as_ref()];
        let gram = Gram::total(3, &gram(&parts, false)?);
        let mut reg = [0.0; 3];
        reg[KL] = coefficients.kl;
        reg[ENTROPY] = coefficients.entropy;
        let mut total = reg;
        total[TASK] = 1.0;
        let unit = |part: usize| {
            let mut weights = [0.0; 3];
            weights[part] = 1.0;
            weights
        };
        let norm = |weights: [f64; 3]| gram.norm_sq(&weights).sqrt() / share;
        let cosine = |left: [f64; 3], right: [f64; 3]| {
            let scale = (gram.norm_sq(&left) * gram.norm_sq(&right)).sqrt();
            (scale > 0.0).then(|| (gram.product(&left, &right) / scale).clamp(-1.0, 1.0))
        };
        Ok(ComponentNorms {
            task: norm(unit(TASK)),
            kl: self.kl.0.as_ref().map(|_| norm(unit(KL))),
            entropy: norm(unit(ENTROPY)),
            reg: norm(reg),
            total: norm(total),
            cos_task_reg: cosine(unit(TASK), reg),
            cos_kl_entropy: cosine(unit(KL), unit(ENTROPY)),
            cos_task_total: cosine(unit(TASK), total),
        })
    }
}

/// Norms and cosines of a sum over groups; KL and entropy at coefficient 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ComponentNorms {
    /// ‖g_task‖.
    pub task: f64,
    /// ‖g_KL‖; none without a reference policy.
    pub kl: Option<f64>,
    /// ‖g_entropy‖.
    pub entropy: f64,
    /// ‖λ_KL g_KL + λ_H g_entropy‖.
    pub reg: f64,
    /// ‖g_task + g_reg‖.
    pub total: f64,
    /// The cosine of task and regularizer gradients.
    pub cos_task_reg: Option<f64>,
    /// The cosine of KL and entropy gradients.
    pub cos_kl_entropy: Option<f64>,
    /// The cosine of task and total gradients.
    pub cos_task_total: Option<f64>,
}

/// The mean pairwise cosine of vectors, from the sum of their unit vectors:
/// `(‖Σ u_x‖² − P)/(P(P − 1))`.
#[derive(Debug, Default)]
pub struct Coherence {
    sum: Sum,
    count: usize,
}

impl Coherence {
    /// Adds a vector of known norm; one of norm 0 has no direction and is left out.
    pub fn add(&mut self, vector: &GradientVector, norm: f64) {
        if norm > 0.0 {
            self.sum.add(1.0 / norm, vector);
            self.count += 1;
        }
    }

    /// Adds `kl·g_KL + entropy·g_entropy`.
    pub fn add_regularizer(
        &mut self,
        gradients: &GroupGradients,
        coefficients: Coefficients,
        norm: f64,
    ) {
        if norm > 0.0 {
            if let Some(kl) = &gradients.kl {
                self.sum.add(coefficients.kl / norm, kl);
            }
            self.sum.add(coefficients.entropy / norm, &gradients.entropy);
            self.count += 1;
        }
    }

    /// The mean pairwise cosine; none for fewer than two vectors.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn mean_cosine(&self) -> Result<Option<f64>> {
        if self.count < 2 {
            return Ok(None);
        }
        let norm_sq = Gram::total(1, &gram(&[self.sum.0.as_ref()], false)?).get(0, 0);
        let count = self.count as f64;
        Ok(Some((norm_sq - count) / (count * (count - 1.0))))
    }
}

/// Signal and noise of a batch, `h_x = P·ω_x·g_task(x)` over its `P` groups.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BatchSignal {
    /// ‖g_B‖² − noise²: prompts as given.
    pub signal_sq: f64,
    /// Σ ω_x² noise²(x): prompts as given.
    pub noise_sq: f64,
    /// √max(signal², 0)/(√noise² + ‖g_reg‖).
    pub snr: f64,
    /// The U-statistic over groups: prompts as a sample. None for one group.
    pub sample_signal_sq: Option<f64>,
    /// ‖g_B‖² minus that.
    pub sample_noise_sq: Option<f64>,
    /// tr(Σ)/‖G‖² per prompt (arXiv 1812.06162, Eq. 2.8): the number of prompts at which noise and
    /// signal are equal. None where the U-statistic is not positive.
    pub gradient_noise_scale: Option<f64>,
}

impl BatchSignal {
    /// From the shares and splits of the groups and the norms of the batch.
    pub fn new<'a>(
        groups: impl Iterator<Item = (f64, &'a Split)> + Clone,
        norms: &ComponentNorms,
    ) -> Self {
        let noise_sq: f64 =
            groups.clone().map(|(share, split)| share * share * split.noise_sq).sum();
        let task_sq = norms.task * norms.task;
        let signal_sq = task_sq - noise_sq;
        let count = groups.clone().count() as f64;
        // Σ ‖h_x‖² / P².
        let squares: f64 = groups.map(|(share, split)| (share * split.task_norm).powi(2)).sum();
        let sample_signal_sq = (count > 1.0).then(|| (task_sq - squares) * count / (count - 1.0));
        let sample_noise_sq = sample_signal_sq.map(|signal_sq| task_sq - signal_sq);
        let snr = if signal_sq > 0.0 {
            signal_sq.sqrt() / (noise_sq.max(0.0).sqrt() + norms.reg)
        } else {
            0.0
        };
        Self {
            signal_sq,
            noise_sq,
            snr,
            sample_signal_sq,
            sample_noise_sq,
            gradient_noise_scale: sample_signal_sq
                .zip(sample_noise_sq)
                .filter(|(signal_sq, _)| *signal_sq > 0.0)
                .map(|(signal_sq, noise_sq)| count * noise_sq / signal_sq),
        }
    }
}
