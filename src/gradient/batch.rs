//! A whole batch: sums of the groups' gradients, and what follows from them and from the splits.

use serde::Serialize;
use tch::Tensor;

use super::engine::{PackGradients, Part};
use super::gram::{GradientVector, Gram, gram};
use super::split::{Coefficients, Split};
use crate::error::Result;

/// A weighted sum of gradient vectors; nothing until the first is added.
#[derive(Debug, Default)]
struct Sum(Option<GradientVector>);

impl Sum {
    /// Adds `Σ_x weights_x vectors_x` over the first dimension of the vectors, `[P, ..]`.
    fn add(&mut self, weights: &[f64], vectors: &[Tensor]) {
        let _no_grad = tch::no_grad_guard();
        let Some(first) = vectors.first() else { return };
        let options = (first.kind(), first.device());
        let weights = Tensor::from_slice(weights).to_kind(options.0).to_device(options.1);
        match &mut self.0 {
            None => {
                let terms = vectors.iter().map(|vector| weighted(&weights, vector));
                self.0 = Some(terms.collect());
            }
            Some(sum) => {
                for (sum, vector) in sum.iter_mut().zip(vectors) {
                    if vector.size()[0] == 1 {
                        // One pass over memory.
                        let _ = sum.addcmul_(&vector.select(0, 0), &weights);
                    } else {
                        *sum += weighted(&weights, vector);
                    }
                }
            }
        }
    }

    fn merge(&mut self, other: Self) {
        match (&mut self.0, other.0) {
            (sum @ None, term) => *sum = term,
            (Some(sum), Some(term)) => {
                let _no_grad = tch::no_grad_guard();
                for (sum, term) in sum.iter_mut().zip(term) {
                    *sum += term;
                }
            }
            (Some(_), None) => {}
        }
    }
}

/// `Σ_x weights_x vector_x`, of the shape of one.
fn weighted(weights: &Tensor, vector: &Tensor) -> Tensor {
    let size = vector.size();
    let flat = vector.reshape([size[0], -1]);
    weights.unsqueeze(0).mm(&flat).reshape(&size[1..])
}

/// The task part and the parts of the regularizer of a sum over groups.
#[derive(Debug, Default)]
pub struct ComponentSums {
    task: Sum,
    parts: Vec<(Part, Sum)>,
}

impl ComponentSums {
    /// Adds groups' gradients with their shares of the batch.
    pub fn add(&mut self, shares: &[f64], gradients: &PackGradients) {
        if let Some(task) = &gradients.task {
            self.task.add(shares, task);
        }
        for (part, vectors) in &gradients.parts {
            self.part(*part).add(shares, vectors);
        }
    }

    fn part(&mut self, part: Part) -> &mut Sum {
        let at = self.parts.iter().position(|(other, _)| *other == part).unwrap_or_else(|| {
            self.parts.push((part, Sum::default()));
            self.parts.len() - 1
        });
        &mut self.parts[at].1
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: Self) {
        self.task.merge(other.task);
        for (part, sum) in other.parts {
            self.part(part).merge(sum);
        }
    }

    /// The gradient of the loss, one tensor a trainable parameter: task and weighted regularizers.
    /// None if nothing was added. Of a sketch it is the sketch of that.
    pub fn loss_gradient(&self, coefficients: Coefficients) -> Option<GradientVector> {
        let mut total = Sum::default();
        let parts = self.parts.iter().map(|(part, sum)| (coefficients.of(*part), sum));
        for (weight, sum) in std::iter::once((1.0, &self.task)).chain(parts) {
            if let Some(sum) = &sum.0 {
                let vectors: Vec<Tensor> = sum.iter().map(|tensor| tensor.unsqueeze(0)).collect();
                total.add(&[weight], &vectors);
            }
        }
        total.0
    }

    /// The norms of the parts and of their combinations, divided by `share`.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn norms(&self, coefficients: Coefficients, share: f64) -> Result<ComponentNorms> {
        let mut vectors = vec![self.task.0.as_ref()];
        vectors.extend(self.parts.iter().map(|(_, sum)| sum.0.as_ref()));
        let n = vectors.len();
        let gram = Gram::total(n, &gram(&vectors, false)?);
        let task: Vec<f64> = (0..n).map(|at| f64::from(at == 0)).collect();
        let reg: Vec<f64> = std::iter::once(0.0)
            .chain(self.parts.iter().map(|(part, _)| coefficients.of(*part)))
            .collect();
        let total: Vec<f64> = task.iter().zip(&reg).map(|(task, reg)| task + reg).collect();
        let unit = |part: Part| {
            let found = 1 + self.parts.iter().position(|(other, _)| *other == part)?;
            Some((0..n).map(|at| f64::from(at == found)).collect::<Vec<f64>>())
        };
        let (kl, entropy) = (unit(Part::Kl), unit(Part::Entropy));
        let norm = |weights: &[f64]| gram.norm_sq(weights).sqrt() / share;
        let cosine = |left: &[f64], right: &[f64]| {
            let scale = (gram.norm_sq(left) * gram.norm_sq(right)).sqrt();
            (scale > 0.0).then(|| (gram.product(left, right) / scale).clamp(-1.0, 1.0))
        };
        Ok(ComponentNorms {
            task: norm(&task),
            kl: kl.as_deref().map(norm),
            entropy: entropy.as_deref().map(norm),
            reg: norm(&reg),
            total: norm(&total),
            cos_task_reg: cosine(&task, &reg),
            cos_kl_entropy: kl.zip(entropy).and_then(|(kl, entropy)| cosine(&kl, &entropy)),
            cos_task_total: cosine(&task, &total),
        })
    }
}

/// Norms and cosines of a sum over groups; KL and entropy at coefficient 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ComponentNorms {
    /// ‖g_task‖.
    pub task: f64,
    /// ‖g_KL‖; none without a reference policy or if the parts were combined.
    pub kl: Option<f64>,
    /// ‖g_entropy‖; none if the parts were combined.
    pub entropy: Option<f64>,
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
    /// Adds the task gradients of groups, whose norms are known; one of norm 0 has no direction and
    /// is left out.
    pub fn add_task(&mut self, gradients: &PackGradients, norms: &[f64]) {
        if let Some(task) = &gradients.task {
            self.count += present(norms);
            self.sum.add(&inverse(norms, 1.0), task);
        }
    }

    /// Adds the gradients of the groups' regularizers.
    pub fn add_regularizer(
        &mut self,
        gradients: &PackGradients,
        coefficients: Coefficients,
        norms: &[f64],
    ) {
        self.count += present(norms);
        for (part, vectors) in &gradients.parts {
            self.sum.add(&inverse(norms, coefficients.of(*part)), vectors);
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

fn present(norms: &[f64]) -> usize {
    norms.iter().filter(|norm| **norm > 0.0).count()
}

/// `factor/norm`, and 0 where the norm is.
fn inverse(norms: &[f64], factor: f64) -> Vec<f64> {
    norms.iter().map(|norm| if *norm > 0.0 { factor / norm } else { 0.0 }).collect()
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
