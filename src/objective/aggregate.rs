//! From per-token losses to one number, with denominators that belong to the whole optimiser batch.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::{expect_shape, precise};
use crate::error::{Error, Result};

/// How per-token losses `L` `[B, T]` become one loss. `m` is the mask of sampled tokens and `R` the
/// number of rows that hold one; rows without a sampled token belong to no mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// `Σ L·m / Σ m` over the whole batch (DAPO, arXiv 2503.14476, Eq. 8).
    TokenMean,
    /// `1/R Σ_i (Σ_t L·m / Σ_t m)` (GRPO, arXiv 2402.03300, Eq. 3).
    SeqMeanTokenMean,
    /// `1/R Σ_i Σ_t L·m`.
    SeqMeanTokenSum,
    /// `1/(R·norm_length) Σ_i Σ_t L·m`, a constant in place of the lengths (Dr.GRPO, arXiv
    /// 2503.20783, Section 3.2).
    SeqMeanTokenSumNorm,
}

impl Aggregation {
    /// The share ω of a group in the loss of a batch, from their numbers of non-empty rows and of
    /// sampled tokens: the batch loss is the ω-weighted sum of the losses of its groups taken alone.
    pub fn group_share(self, group: Counts, batch: Counts) -> f64 {
        let (part, whole) = match self {
            Self::TokenMean => (group.tokens, batch.tokens),
            _ => (group.rows, batch.rows),
        };
        if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
    }
}

/// How much of a batch or group was sampled by the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rows with at least one sampled token.
    pub rows: usize,
    /// Sampled tokens.
    pub tokens: usize,
}

/// The weight of every token in the loss of one optimiser batch.
///
/// It is made once, from the mask of the whole batch; a micro-batch takes its rows out of it with
/// [`micro_batch`](Self::micro_batch). The sum of the micro-batches' weighted losses is therefore
/// the loss of the batch, however it is split, and there is no way to normalise by a micro-batch.
#[derive(Debug)]
pub struct TokenWeights {
    /// `[b]`, the weight of one sampled token of each row.
    row_weights: Tensor,
    /// `[b, t]`, true on sampled tokens.
    mask: Tensor,
}

impl TokenWeights {
    /// Weights from the mask `[B, T]` (any dtype, non-zero on sampled tokens) of the whole batch.
    ///
    /// # Errors
    /// If the mask is not two-dimensional, or `norm_length` is missing or not positive where
    /// [`Aggregation::SeqMeanTokenSumNorm`] needs it.
    pub fn new(aggregation: Aggregation, norm_length: Option<f64>, mask: &Tensor) -> Result<Self> {
        if mask.dim() != 2 {
            return Err(Error::Argument {
                argument: "mask",
                expected: "shape [B, T]".into(),
                found: format!("{:?}", mask.size()),
            });
        }
        let mask = mask.ne(0);
        let kind = precise(mask.device());
        let lengths = mask.sum_dim_intlist(1, false, kind);
        let occupied = lengths.gt(0);
        // An empty batch has loss 0, not 0/0.
        let rows = occupied.sum(kind).clamp_min(1.0);
        let row_weights = match aggregation {
            Aggregation::TokenMean => {
                let tokens = lengths.sum(kind).clamp_min(1.0);
                lengths.ones_like() / tokens
            }
            Aggregation::SeqMeanTokenMean => lengths.clamp_min(1.0).reciprocal() / rows,
            Aggregation::SeqMeanTokenSum => lengths.ones_like() / rows,
            Aggregation::SeqMeanTokenSumNorm => {
                let length =
                    norm_length.filter(|length| *length > 0.0).ok_or_else(|| Error::Argument {
                        argument: "norm_length",
                        expected: "a positive length for seq_mean_token_sum_norm".into(),
                        found: format!("{norm_length:?}"),
                    })?;
                lengths.ones_like() / (rows * length)
            }
        };
        Ok(Self { row_weights, mask })
    }

    /// The weights of `count` rows from `start` on, for losses padded to `tokens` columns only.
    pub fn micro_batch(&self, start: i64, count: i64, tokens: i64) -> Self {
        Self {
            row_weights: self.row_weights.narrow(0, start, count),
            mask: self.mask.narrow(0, start, count).narrow(1, 0, tokens),
        }
    }

    /// The weights of chosen rows, `[k]` int64, for losses padded to `tokens` columns only.
    pub fn select(&self, rows: &Tensor, tokens: i64) -> Self {
        Self {
            row_weights: self.row_weights.index_select(0, rows),
            mask: self.mask.index_select(0, rows).narrow(1, 0, tokens),
        }
    }

    /// The same on a device.
    pub fn to_device(&self, device: Device) -> Self {
        Self { row_weights: self.row_weights.to_device(device), mask: self.mask.to_device(device) }
    }

    /// `[b]`, the weight of one sampled token of each row.
    pub fn row_weights(&self) -> &Tensor {
        &self.row_weights
    }

    /// `[b, t]`, true on sampled tokens.
    pub fn mask(&self) -> &Tensor {
        &self.mask
    }

    /// The weighted sum of per-token losses `[b, t]`: these rows' share of the batch loss, a
    /// scalar of the losses' dtype. What lies outside the mask, NaN included, does not count.
    ///
    /// # Errors
    /// If the losses are not of the shape of the mask.
    pub fn sum(&self, losses: &Tensor) -> Result<Tensor> {
        expect_shape("losses", losses, &self.mask)?;
        let losses = losses.where_self(&self.mask, &losses.zeros_like());
        let per_row = losses.sum_dim_intlist(1, false, losses.kind());
        Ok(per_row.dot(&self.row_weights.to_kind(losses.kind())))
    }
}

impl TokenWeights {
    /// `[b, t]`, the derivative of [`sum`](Self::sum) with respect to each loss: the row's weight
    /// on sampled tokens, 0 elsewhere.
    pub fn per_token(&self, kind: Kind) -> Tensor {
        self.row_weights.unsqueeze(1).to_kind(kind) * self.mask.to_kind(kind)
    }
}
