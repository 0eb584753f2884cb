//! The metrics of the mutual-information family, from a matrix of cross scores.
//!
//! With `L[i, j] = log π(Z_i | X_j)` (sums over the `n_i` tokens of `Z_i`), `c(i)` the column of row
//! `i`'s own context, and `P` columns:
//!
//! ```text
//! matched_i        = L[i, c(i)]                       log π(Z_i | X_i)
//! mixture_i        = logsumexp_j L[i, j] − log P      log 1/P Σ_j π(Z_i | X_j)
//! mi_seq_estimate  = mean_i (matched_i − mixture_i)   I(X; Z) = H(Z) − H(Z | X), at most log P
//! mi_estimate      = mean_i (matched_i / n_i − marginal_i)
//! mi_zscore        = mi_estimate / (std_i marginal_i + 10⁻³)
//! ```
//!
//! The formulas are those of RAGEN-2 (arXiv 2604.06268, Eq. 1), the names those of its code. Per token
//! there are two marginals, and they disagree: [`Marginal`].
//!
//! `log P − mi_seq_estimate` is the mean contrastive loss `−log softmax_j(L[i, j])[c(i)]` (InfoNCE, arXiv
//! 1807.03748): hence the upper bound. Mixing every context's distribution with one template,
//! `p_α = (1 − α) p + α q`, leaves at most `(1 − α)` of the mutual information, since it is convex in the
//! channel.

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::retrieval::Retrieval;
use crate::error::{Error, Result};
use crate::gradient::mean;
use crate::objective::precise;

/// Keeps a z-score finite where all marginals agree, as in RAGEN.
const STD_EPSILON: f64 = 1e-3;

/// How `log π(Z)` is taken per token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Marginal {
    /// `(logsumexp_j L[i, j] − log P) / n_i`: the mixture of the contexts, then per token. Eq. 1 of the
    /// paper.
    #[default]
    Paper,
    /// `logsumexp_j (L[i, j] / n_i) − log P`: per token, then mixed. The code of RAGEN; a mixture of no
    /// distributions, and larger, since it does not share `log P` among the tokens.
    Code,
}

/// A matrix of cross scores with what is needed to read it.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossScores {
    /// `[N, P]`, row by row.
    log_likelihood: Vec<f64>,
    lengths: Vec<usize>,
    columns: Vec<usize>,
    signatures: Vec<usize>,
}

impl CrossScores {
    /// `log_likelihood` `[N, P]` holds the sums `log π(Z_i | X_j)`, `lengths` `[N]` the tokens they are
    /// sums over, `columns` `[N]` each row's own column, and `signatures` `[P]` is equal where contexts
    /// are. One transfer from the device.
    ///
    /// # Errors
    /// If shapes disagree, a length is 0, a column does not exist, a score is NaN or above every
    /// number, or a row has probability 0 under its own context.
    pub fn new(
        log_likelihood: &Tensor,
        lengths: &[usize],
        columns: &[usize],
        signatures: &[usize],
    ) -> Result<Self> {
        let (rows, contexts) = (lengths.len(), signatures.len());
        let refuse = |argument, expected: String, found: String| {
            Err(Error::Argument { argument, expected, found })
        };
        let shape = [rows as i64, contexts as i64];
        if log_likelihood.size() != shape || rows == 0 || contexts == 0 {
            return refuse(
                "log_likelihood",
                format!("a row a length and a column a signature, shape {shape:?}, none 0"),
                format!("shape {:?}", log_likelihood.size()),
            );
        }
        if columns.len() != rows || columns.iter().any(|column| *column >= contexts) {
            return refuse(
                "columns",
                format!("{rows} columns below {contexts}"),
                format!("{columns:?}"),
            );
        }
        if lengths.contains(&0) {
            return refuse("lengths", "at least one token a row".into(), "0".into());
        }
        let numbers = log_likelihood.detach().to_kind(precise(log_likelihood.device()));
        let log_likelihood: Vec<f64> = Vec::try_from(numbers.to_device(Device::Cpu).reshape([-1]))?;
        if let Some(at) =
            log_likelihood.iter().position(|score| score.is_nan() || *score == f64::INFINITY)
        {
            return refuse(
                "log_likelihood",
                "log-probabilities".into(),
                format!(
                    "{} in row {}, column {}",
                    log_likelihood[at],
                    at / contexts,
                    at % contexts
                ),
            );
        }
        let scores = Self {
            log_likelihood,
            lengths: lengths.to_vec(),
            columns: columns.to_vec(),
            signatures: signatures.to_vec(),
        };
        if let Some(row) = (0..rows).find(|row| scores.matched(*row) == f64::NEG_INFINITY) {
            return refuse(
                "log_likelihood",
                "a probability above 0 of every row under its own context".into(),
                format!("0 in row {row}"),
            );
        }
        Ok(scores)
    }

    /// Rows `N`.
    pub fn rows(&self) -> usize {
        self.lengths.len()
    }

    /// Columns `P`.
    pub fn contexts(&self) -> usize {
        self.signatures.len()
    }

    /// The scores `[P]` of a row under every context.
    pub fn row(&self, row: usize) -> &[f64] {
        let contexts = self.contexts();
        &self.log_likelihood[row * contexts..(row + 1) * contexts]
    }

    /// The tokens of a row.
    pub fn length(&self, row: usize) -> usize {
        self.lengths[row]
    }

    /// The column of a row's own context.
    pub fn column(&self, row: usize) -> usize {
        self.columns[row]
    }

    /// What is equal where contexts are equal, `[P]`.
    pub fn signatures(&self) -> &[usize] {
        &self.signatures
    }

    /// The same scores with other own columns, such as permuted ones, under which nothing but chance is
    /// left.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_columns(&self, columns: &[usize]) -> Result<Self> {
        let matrix = Tensor::from_slice(&self.log_likelihood)
            .reshape([self.rows() as i64, self.contexts() as i64]);
        Self::new(&matrix, &self.lengths, columns, &self.signatures)
    }

    /// `log π(Z_i | X_i)`.
    fn matched(&self, row: usize) -> f64 {
        self.row(row)[self.columns[row]]
    }

    /// `log 1/P Σ_j π(Z_i | X_j)`.
    fn mixture(&self, row: usize) -> f64 {
        log_sum_exp(self.row(row).iter().copied()) - (self.contexts() as f64).ln()
    }

    /// `log π(Z_i)` per token.
    fn marginal(&self, row: usize, marginal: Marginal) -> f64 {
        let length = self.lengths[row] as f64;
        match marginal {
            Marginal::Paper => self.mixture(row) / length,
            Marginal::Code => {
                log_sum_exp(self.row(row).iter().map(|score| score / length))
                    - (self.contexts() as f64).ln()
            }
        }
    }

    fn of_rows(&self, value: impl Fn(usize) -> f64) -> Vec<f64> {
        (0..self.rows()).map(value).collect()
    }

    /// Every metric, per token under a marginal.
    pub fn metrics(&self, marginal: Marginal) -> Metrics {
        let per_token = |row: usize| self.matched(row) / self.lengths[row] as f64;
        let matched_log_prob_mean = average(&self.of_rows(per_token));
        let mixtures = self.of_rows(|row| self.mixture(row));
        let matched = average(&self.of_rows(|row| self.matched(row)));
        let mi_seq_estimate = matched - average(&mixtures);
        let marginal_std_seq = std(&mixtures);
        Metrics {
            token: self.token_metrics(marginal),
            matched_log_prob_mean,
            conditional_entropy_est: -matched_log_prob_mean,
            mi_upper_bound: (self.contexts() as f64).ln(),
            mi_seq_estimate,
            conditional_entropy_seq_est: -matched,
            reasoning_entropy_seq_est: -average(&mixtures),
            marginal_std_seq,
            mi_zscore_seq: z_score(mi_seq_estimate, marginal_std_seq),
            retrieval: Retrieval::new(self),
        }
    }

    /// The metrics that the marginal decides.
    pub fn token_metrics(&self, marginal: Marginal) -> TokenMetrics {
        let marginals = self.of_rows(|row| self.marginal(row, marginal));
        let gains =
            self.of_rows(|row| self.matched(row) / self.lengths[row] as f64 - marginals[row]);
        let mi_estimate = average(&gains);
        let marginal_std = std(&marginals);
        TokenMetrics {
            mi_estimate,
            mi_estimate_se: self.clustered_error(&gains, mi_estimate),
            marginal_log_prob_mean: average(&marginals),
            reasoning_entropy_est: -average(&marginals),
            marginal_std,
            mi_zscore: z_score(mi_estimate, marginal_std),
        }
    }

    /// The standard error of a mean over rows, when those of one context vary together: the spread of
    /// the contexts' sums (Liang and Zeger 1986). None for fewer than two contexts with rows.
    fn clustered_error(&self, values: &[f64], mean: f64) -> Option<f64> {
        let mut sums = vec![None; self.contexts()];
        for (value, column) in values.iter().zip(&self.columns) {
            *sums[*column].get_or_insert(0.0) += value - mean;
        }
        let sums: Vec<f64> = sums.into_iter().flatten().collect();
        let clusters = sums.len() as f64;
        let squares: f64 = sums.iter().map(|sum| sum * sum).sum();
        (clusters > 1.0)
            .then(|| (clusters / (clusters - 1.0) * squares).sqrt() / values.len() as f64)
    }
}

/// What the choice of the [`Marginal`] decides; in nats per token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TokenMetrics {
    /// I(X; Z): mean of matched − marginal. It estimates, and may come out below 0.
    pub mi_estimate: f64,
    /// Its standard error over contexts; not RAGEN's.
    pub mi_estimate_se: Option<f64>,
    /// The mean marginal.
    pub marginal_log_prob_mean: f64,
    /// H(Z): minus that.
    pub reasoning_entropy_est: f64,
    /// The population standard deviation of the marginals.
    pub marginal_std: f64,
    /// `mi_estimate / (marginal_std + 10⁻³)`.
    pub mi_zscore: f64,
}

/// Every metric of a score matrix, under RAGEN's names; in nats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Metrics {
    /// Those that the marginal decides.
    #[serde(flatten)]
    pub token: TokenMetrics,
    /// The mean of matched per token.
    pub matched_log_prob_mean: f64,
    /// H(Z | X) per token: minus that.
    pub conditional_entropy_est: f64,
    /// log P: what I(X; Z) of a sequence can reach.
    pub mi_upper_bound: f64,
    /// I(X; Z) of a sequence.
    pub mi_seq_estimate: f64,
    /// H(Z | X) of a sequence.
    pub conditional_entropy_seq_est: f64,
    /// H(Z) of a sequence.
    pub reasoning_entropy_seq_est: f64,
    /// The population standard deviation of the sequences' mixtures.
    pub marginal_std_seq: f64,
    /// `mi_seq_estimate / (marginal_std_seq + 10⁻³)`.
    pub mi_zscore_seq: f64,
    /// How often the own context scores best.
    #[serde(flatten)]
    pub retrieval: Retrieval,
}

/// A mean in units of a spread.
pub(super) fn z_score(mean: f64, std: f64) -> f64 {
    mean / (std + STD_EPSILON)
}

fn log_sum_exp(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let largest = values.clone().fold(f64::NEG_INFINITY, f64::max);
    largest + values.map(|value| (value - largest).exp()).sum::<f64>().ln()
}

/// The mean of what is never empty here.
fn average(values: &[f64]) -> f64 {
    mean(values).unwrap_or(0.0)
}

/// The population standard deviation.
fn std(values: &[f64]) -> f64 {
    let middle = average(values);
    average(&values.iter().map(|value| (value - middle).powi(2)).collect::<Vec<f64>>()).sqrt()
}
