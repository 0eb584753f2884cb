//! The split of one group's gradient: signal, task noise and regularizers, from inner products
//! alone.
//!
//! With `h_i = G·g_i` over the `G` rows of a group, so that their mean is the group's task gradient
//! `g`, and `K_ij = ⟨h_i, h_j⟩`:
//!
//! ```text
//! signal² = (Σ_ij K_ij − Σ_i K_ii) / (G(G − 1))     unbiased for ‖E h‖² if rows are independent
//! noise²  = ‖g‖² − signal² = tr(Σ̂)/G                the variance of the group's mean
//! SNR     = √max(signal², 0) / (√noise² + ‖g_reg‖)
//! ```
//!
//! Signal² is a U-statistic and may come out negative. It is exactly unbiased where a row's weight
//! ignores the other rows, as under `seq_mean_token_sum` and `seq_mean_token_sum_norm`; under
//! `token_mean` its bias is O(1/G) (measured at G = 8: signal −1.6 %, noise +4.5 %). A baseline
//! that is the group's own mean reward makes rows depend on each other:
//! `E⟨h_i, h_j⟩ = ‖E g‖²·(1 + 1/(G − 1)²)` for the mean with and without the row itself, which
//! [`Debias`] takes out.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use tch::{Kind, Tensor};

use super::engine::Part;
use super::gram::{GradientVector, Gram, gram};
use crate::error::Result;

/// Up to this many rows the sign-flip test takes all flips, beyond it a seeded sample.
const EXACT_FLIPS: usize = 12;
/// The size of that sample.
const SAMPLED_FLIPS: usize = 4096;

/// The inner products of a group's gradients: its `G` rows' task gradients, then those of the parts
/// of the regularizer.
#[derive(Clone, Debug)]
pub struct GroupProducts {
    /// G.
    pub rows: usize,
    /// The parts of the regularizer, from row `G` on.
    pub parts: Vec<Part>,
    /// `[G + parts]²`.
    pub gram: Gram,
    /// Of a sketch, the independent estimates whose sum `gram` is; empty where it is exact.
    pub replicates: Vec<Gram>,
}

impl GroupProducts {
    /// Exact products.
    pub fn exact(rows: usize, parts: Vec<Part>, gram: Gram) -> Self {
        Self { rows, parts, gram, replicates: Vec::new() }
    }

    /// Exact products of gradients that were taken elsewhere: of each row's share of the task loss, one
    /// tensor a parameter.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn of_rows(gradients: &[GradientVector]) -> Result<Self> {
        let vectors: Vec<Option<&GradientVector>> = gradients.iter().map(Some).collect();
        let total = Gram::total(gradients.len(), &gram(&vectors, false)?);
        Ok(Self::exact(gradients.len(), Vec::new(), total))
    }
}

/// The factors of the regularizers in the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coefficients {
    /// λ_KL.
    pub kl: f64,
    /// λ_H.
    pub entropy: f64,
}

impl Coefficients {
    /// The factor of a part in the loss.
    pub fn of(self, part: Part) -> f64 {
        match part {
            Part::Kl => self.kl,
            Part::Entropy => self.entropy,
            Part::Combined => 1.0,
        }
    }
}

/// Takes out the bias that a mean baseline brings into products of different rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Debias {
    /// Whether the baseline is the mean of the other rows (RLOO) or includes the row (Dr.GRPO).
    pub leave_one_out: bool,
    /// The constant length that the loss divides by; 1 for plain sums.
    pub norm_length: f64,
}

impl Debias {
    /// `1 + 1/(G − 1)²`.
    fn factor(rows: usize) -> f64 {
        1.0 + 1.0 / ((rows as f64 - 1.0).powi(2))
    }
}

/// The split of one group's gradient. Norms are those of the group's own loss. What is undefined is
/// `None`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Split {
    /// ‖g_task‖.
    pub task_norm: f64,
    /// The estimate of ‖E g_task‖², negative by chance where there is little signal.
    pub signal_sq: f64,
    /// Its jackknife standard error; none for fewer than three rows.
    pub signal_sq_se: Option<f64>,
    /// The share of sign flips of the rows that give at least this signal²: a test of no signal.
    /// None where the task gradient is 0.
    pub signal_p: Option<f64>,
    /// The estimate of tr(Σ)/G.
    pub noise_sq: f64,
    /// Its jackknife standard error; none for fewer than three rows.
    pub noise_sq_se: Option<f64>,
    /// The signal-to-noise ratio; 0 where signal² is not positive.
    pub snr: f64,
    /// Its jackknife standard error; none where signal² is not positive or for fewer than three
    /// rows.
    pub snr_se: Option<f64>,
    /// An estimate of ‖∇J‖², J the expected reward; only where the bias was taken out.
    pub policy_gradient_sq: Option<f64>,
    /// ‖g_KL‖ at coefficient 1; none without a reference policy or if the parts of the regularizer
    /// were combined.
    pub kl_unit_norm: Option<f64>,
    /// ‖g_entropy‖ at coefficient 1; none if the parts of the regularizer were combined.
    pub entropy_unit_norm: Option<f64>,
    /// ‖λ_KL g_KL + λ_H g_entropy‖.
    pub reg_norm: f64,
    /// ‖g_task + g_reg‖.
    pub total_norm: f64,
    /// ‖g_reg‖ / (‖g_task‖ + ‖g_reg‖); none where both are 0.
    pub dominance: Option<f64>,
    /// The cosine of task and regularizer gradients.
    pub cos_task_reg: Option<f64>,
    /// The cosine of KL and entropy gradients.
    pub cos_kl_entropy: Option<f64>,
    /// The cosine of task and total gradients.
    pub cos_task_total: Option<f64>,
    /// ‖g_i‖ of every row.
    pub trajectory_task_norms: Vec<f64>,
    /// How far a sketch may be off; none where the products are exact.
    pub sketch_se: Option<Box<SketchError>>,
}

/// Standard errors of a sketch, by jackknife over its dimensions: what another seed would change.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct SketchError {
    pub task_norm: Option<f64>,
    pub signal_sq: Option<f64>,
    pub noise_sq: Option<f64>,
    pub snr: Option<f64>,
    pub kl_unit_norm: Option<f64>,
    pub entropy_unit_norm: Option<f64>,
    pub reg_norm: Option<f64>,
    pub total_norm: Option<f64>,
    pub dominance: Option<f64>,
    pub cos_task_reg: Option<f64>,
    pub cos_kl_entropy: Option<f64>,
    pub cos_task_total: Option<f64>,
}

/// Splits a group's gradient. `seed` matters only to the sign-flip test of groups of more than
/// twelve rows.
///
/// # Panics
/// If the products are not those of `rows` and the parts of the regularizer.
pub fn split(
    products: &GroupProducts,
    coefficients: Coefficients,
    debias: Option<Debias>,
    seed: u64,
) -> Split {
    let rows = products.rows;
    let rows_gram = RowProducts::new(&products.gram, rows);
    let factor = debias.map_or(1.0, |_| Debias::factor(rows));
    let found = Measures::new(products, &products.gram, coefficients, factor);
    let jackknife = rows_gram.jackknife(factor, found.reg_norm);
    Split {
        task_norm: found.task_norm,
        signal_sq: found.estimate.signal_sq,
        signal_sq_se: jackknife.as_ref().map(|se| se.signal_sq),
        signal_p: rows_gram.sign_flip_p(seed),
        noise_sq: found.estimate.noise_sq,
        noise_sq_se: jackknife.as_ref().map(|se| se.noise_sq),
        snr: found.estimate.snr(found.reg_norm),
        snr_se: jackknife.filter(|_| found.estimate.signal_sq > 0.0).map(|se| se.snr),
        policy_gradient_sq: debias.map(|debias| {
            // The leave-in mean shrinks the expected gradient by (G − 1)/G, the constant length by
            // its inverse.
            let baseline =
                if debias.leave_one_out { 1.0 } else { (rows as f64 - 1.0) / rows as f64 };
            found.estimate.signal_sq * (debias.norm_length / baseline).powi(2)
        }),
        kl_unit_norm: found.kl_unit_norm,
        entropy_unit_norm: found.entropy_unit_norm,
        reg_norm: found.reg_norm,
        total_norm: found.total_norm,
        dominance: found.dominance(),
        cos_task_reg: found.cos_task_reg,
        cos_kl_entropy: found.cos_kl_entropy,
        cos_task_total: found.cos_task_total,
        trajectory_task_norms: (0..rows)
            .map(|row| products.gram.get(row, row).max(0.0).sqrt())
            .collect(),
        sketch_se: sketch_error(products, coefficients, factor).map(Box::new),
    }
}

/// What follows from the inner products without looking at single rows.
struct Measures {
    task_norm: f64,
    estimate: Estimate,
    kl_unit_norm: Option<f64>,
    entropy_unit_norm: Option<f64>,
    reg_norm: f64,
    total_norm: f64,
    cos_task_reg: Option<f64>,
    cos_kl_entropy: Option<f64>,
    cos_task_total: Option<f64>,
}

impl Measures {
    fn new(products: &GroupProducts, gram: &Gram, coefficients: Coefficients, factor: f64) -> Self {
        let (rows, parts) = (products.rows, &products.parts);
        let n = gram.len();
        assert_eq!(n, rows + parts.len(), "products of rows and of parts of the regularizer");
        let task: Vec<f64> = (0..n).map(|index| f64::from(index < rows)).collect();
        let reg: Vec<f64> = std::iter::repeat_n(0.0, rows)
            .chain(parts.iter().map(|part| coefficients.of(*part)))
            .collect();
        let total: Vec<f64> = task.iter().zip(&reg).map(|(task, reg)| task + reg).collect();
        let unit = |part: Part| {
            let at = rows + parts.iter().position(|other| *other == part)?;
            Some((0..n).map(|index| f64::from(index == at)).collect::<Vec<f64>>())
        };
        let (kl, entropy) = (unit(Part::Kl), unit(Part::Entropy));
        let norm = |weights: &[f64]| gram.norm_sq(weights).sqrt();
        let cosine = |left: &[f64], right: &[f64]| {
            let scale = norm(left) * norm(right);
            (scale > 0.0).then(|| (gram.product(left, right) / scale).clamp(-1.0, 1.0))
        };
        Self {
            task_norm: norm(&task),
            estimate: RowProducts::new(gram, rows).estimate(None, factor),
            kl_unit_norm: kl.as_deref().map(norm),
            entropy_unit_norm: entropy.as_deref().map(norm),
            reg_norm: norm(&reg),
            total_norm: norm(&total),
            cos_task_reg: cosine(&task, &reg),
            cos_kl_entropy: kl.zip(entropy).and_then(|(kl, entropy)| cosine(&kl, &entropy)),
            cos_task_total: cosine(&task, &total),
        }
    }

    fn dominance(&self) -> Option<f64> {
        let sum = self.task_norm + self.reg_norm;
        (sum > 0.0).then(|| self.reg_norm / sum)
    }

    /// In the order of [`SketchError`].
    fn numbers(&self) -> [Option<f64>; 12] {
        [
            Some(self.task_norm),
            Some(self.estimate.signal_sq),
            Some(self.estimate.noise_sq),
            Some(self.estimate.snr(self.reg_norm)),
            self.kl_unit_norm,
            self.entropy_unit_norm,
            Some(self.reg_norm),
            Some(self.total_norm),
            self.dominance(),
            self.cos_task_reg,
            self.cos_kl_entropy,
            self.cos_task_total,
        ]
    }
}

/// Every measure with one dimension of the sketch left out at a time; the replicates add up to the
/// products.
fn sketch_error(
    products: &GroupProducts,
    coefficients: Coefficients,
    factor: f64,
) -> Option<SketchError> {
    let count = products.replicates.len() as f64;
    if count < 2.0 {
        return None;
    }
    let left: Vec<[Option<f64>; 12]> = products
        .replicates
        .iter()
        .map(|replicate| {
            let mut gram = products.gram.clone();
            gram.add_scaled(replicate, -1.0);
            gram.scale(count / (count - 1.0));
            Measures::new(products, &gram, coefficients, factor).numbers()
        })
        .collect();
    let error = |at: usize| {
        let values: Vec<f64> = left.iter().filter_map(|numbers| numbers[at]).collect();
        (values.len() == left.len()).then(|| jackknife_error(&values))
    };
    Some(SketchError {
        task_norm: error(0),
        signal_sq: error(1),
        noise_sq: error(2),
        snr: error(3),
        kl_unit_norm: error(4),
        entropy_unit_norm: error(5),
        reg_norm: error(6),
        total_norm: error(7),
        dominance: error(8),
        cos_task_reg: error(9),
        cos_kl_entropy: error(10),
        cos_task_total: error(11),
    })
}

/// The standard error of a number from its values with one observation left out at a time.
fn jackknife_error(left: &[f64]) -> f64 {
    let n = left.len() as f64;
    let mean = left.iter().sum::<f64>() / n;
    ((n - 1.0) / n * left.iter().map(|value| (value - mean).powi(2)).sum::<f64>()).sqrt()
}

/// Signal² and noise² of a group or of all its rows but one.
#[derive(Clone, Copy)]
struct Estimate {
    signal_sq: f64,
    noise_sq: f64,
}

impl Estimate {
    fn snr(self, reg_norm: f64) -> f64 {
        if self.signal_sq <= 0.0 {
            return 0.0;
        }
        self.signal_sq.sqrt() / (self.noise_sq.max(0.0).sqrt() + reg_norm)
    }
}

/// Standard errors.
struct Jackknife {
    signal_sq: f64,
    noise_sq: f64,
    snr: f64,
}

/// `K`, with the sums that every estimate starts from.
struct RowProducts {
    rows: usize,
    k: Vec<f64>,
    /// Σ_j K_ij.
    row_sums: Vec<f64>,
    sum: f64,
    trace: f64,
}

impl RowProducts {
    fn new(gram: &Gram, rows: usize) -> Self {
        let scale = (rows * rows) as f64;
        let k: Vec<f64> =
            (0..rows * rows).map(|at| scale * gram.get(at / rows, at % rows)).collect();
        let row_sums: Vec<f64> = k.chunks(rows).map(|row| row.iter().sum()).collect();
        let sum = row_sums.iter().sum();
        let trace = (0..rows).map(|row| k[row * rows + row]).sum();
        Self { rows, k, row_sums, sum, trace }
    }

    fn diagonal(&self, row: usize) -> f64 {
        self.k[row * self.rows + row]
    }

    /// The estimates from all rows, or all but one. Noise² is tr(Σ̂)/G with G the size of the whole
    /// group in either case: what the jackknife varies is the estimate, not the estimand.
    fn estimate(&self, left_out: Option<usize>, factor: f64) -> Estimate {
        let (mut sum, mut trace, mut n) = (self.sum, self.trace, self.rows as f64);
        if let Some(row) = left_out {
            sum -= 2.0 * self.row_sums[row] - self.diagonal(row);
            trace -= self.diagonal(row);
            n -= 1.0;
        }
        let signal_sq = (sum - trace) / (n * (n - 1.0));
        // tr(Σ̂) = mean of K_ii − signal².
        let noise_sq = (trace / n - signal_sq) / self.rows as f64;
        // ‖g‖² = signal² + noise², however much of it is called signal.
        let debiased = signal_sq / factor;
        Estimate { signal_sq: debiased, noise_sq: noise_sq + (signal_sq - debiased) }
    }

    /// Leave-one-out standard errors, advantages and regularizer held fixed.
    fn jackknife(&self, factor: f64, reg_norm: f64) -> Option<Jackknife> {
        if self.rows < 3 {
            return None;
        }
        let left: Vec<Estimate> =
            (0..self.rows).map(|row| self.estimate(Some(row), factor)).collect();
        let error = |of: &dyn Fn(&Estimate) -> f64| {
            jackknife_error(&left.iter().map(of).collect::<Vec<f64>>())
        };
        Some(Jackknife {
            signal_sq: error(&|estimate| estimate.signal_sq),
            noise_sq: error(&|estimate| estimate.noise_sq),
            snr: error(&|estimate| estimate.snr(reg_norm)),
        })
    }

    /// Under no signal, h_i and −h_i are equally likely: the share of sign patterns whose
    /// Σ_{i≠j} s_i s_j K_ij is at least the observed one, which is among them.
    fn sign_flip_p(&self, seed: u64) -> Option<f64> {
        if self.trace <= 0.0 {
            return None;
        }
        let observed = self.sum - self.trace;
        // Patterns that tie up to rounding count.
        let threshold = observed - 1e-12 * self.trace * self.rows as f64;
        let exact = self.rows <= EXACT_FLIPS;
        // A pattern and its negative are one: the last sign stays.
        let patterns = if exact { 1_usize << (self.rows - 1) } else { SAMPLED_FLIPS };
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let signs: Vec<f64> = (0..patterns * self.rows)
            .map(|at| {
                let (pattern, row) = (at / self.rows, at % self.rows);
                let flipped = if exact { pattern >> row & 1 == 1 } else { random.random() };
                if flipped { -1.0 } else { 1.0 }
            })
            .collect();
        let size = self.rows as i64;
        let signs = Tensor::from_slice(&signs).reshape([patterns as i64, size]);
        let products = Tensor::from_slice(&self.k).reshape([size, size]);
        let sums = (signs.mm(&products) * signs).sum_dim_intlist(1, false, Kind::Double);
        let reached = (sums - self.trace).ge(threshold).sum(Kind::Int64).int64_value(&[]) as usize;
        if exact {
            return Some(reached as f64 / patterns as f64);
        }
        // The observed pattern is one of the patterns.
        Some((reached + 1) as f64 / (patterns + 1) as f64)
    }
}
