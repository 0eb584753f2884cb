//! Exact inner products and sums of the gradients of one parameter by rows.

use tch::{Device, Kind, Tensor};

use super::factors::ByRow;
use crate::objective::precise;

/// Elements of gradients by rows that are formed at a time: they stay in the caches until their
/// products are taken.
const CHUNK: i64 = 1 << 22;
/// From this height on a matrix is a vocabulary's.
const LARGE: i64 = 8192;

/// The gradient of one parameter, `[height, width]`, by the rows of one batch: the sum over its uses.
pub(super) struct Uses<'a> {
    pub height: i64,
    pub width: i64,
    pub rows: i64,
    pub list: &'a [ByRow],
}

impl Uses<'_> {
    /// The sums over the rows of each group, `[groups, height·width]`; groups are equally large, one
    /// after the other.
    pub fn group_sums(&self, groups: i64) -> Option<Tensor> {
        let sums = self.list.iter().map(|used| self.group_sum(used, groups));
        sums.reduce(|mut sum, term| {
            sum += term;
            sum
        })
    }

    fn group_sum(&self, used: &ByRow, groups: i64) -> Tensor {
        let (height, width) = (self.height, self.width);
        let joined = |tensor: &Tensor, last: i64| tensor.reshape([groups, -1, last]);
        match used {
            ByRow::Outer { left, right } => {
                joined(left, height).transpose(1, 2).bmm(&joined(right, width))
            }
            ByRow::Picked { picked, right } => {
                let first = Tensor::arange(groups, (Kind::Int64, right.device())) * height;
                let index = (picked.reshape([groups, -1]) + first.unsqueeze(1)).reshape([-1]);
                Tensor::zeros([groups * height, width], (right.kind(), right.device())).index_add_(
                    0,
                    &index,
                    &right.reshape([-1, width]),
                )
            }
            ByRow::Formed(formed) => formed.reshape([groups, -1, height * width]).sum_dim_intlist(
                1,
                false,
                formed.kind(),
            ),
        }
        .reshape([groups, height * width])
    }

    /// A slice of the gradients, `[rows, count·width]` from height `start` on.
    fn slice(&self, start: i64, count: i64) -> Option<Tensor> {
        let (rows, width) = (self.rows, self.width);
        let parts = self.list.iter().map(|used| {
            let part = match used {
                ByRow::Outer { left, right } => {
                    left.narrow(2, start, count).transpose(1, 2).bmm(right)
                }
                ByRow::Formed(formed) => formed.narrow(1, start * width, count * width),
                ByRow::Picked { picked, right } => picked_slice(picked, right, start, count),
            };
            part.reshape([rows, count * width])
        });
        parts.reduce(|sum, part| sum + part)
    }

    /// Whether products of pairs of tokens, and the sum by itself, cost less than the gradients,
    /// whose sum is a sum of what is formed anyhow.
    fn prefers_pairs(&self, groups: i64) -> bool {
        let mut tokens = 0;
        for used in self.list {
            match used {
                ByRow::Outer { right, .. } | ByRow::Picked { right, .. } => {
                    tokens += right.size()[1];
                }
                ByRow::Formed(_) => return false,
            }
        }
        let (rows, matrix) = (self.rows / groups, self.height * self.width);
        tokens *= rows;
        // Forming a gradient is a few passes over memory.
        tokens * tokens * (self.height + self.width) < (rows * rows + 4 * rows) * matrix
    }
}

/// What picked tokens bring to the rows of the parameter from `start` on, `[rows·count, width]`.
fn picked_slice(picked: &Tensor, right: &Tensor, start: i64, count: i64) -> Tensor {
    let (rows, width) = (right.size()[0], right.size()[2]);
    let device = right.device();
    let first = Tensor::arange(rows, (Kind::Int64, device)).unsqueeze(1) * count;
    let inside = picked.ge(start).logical_and(&picked.lt(start + count)).reshape([-1]);
    let inside = inside.nonzero().squeeze_dim(-1);
    let index = (picked - start + first).reshape([-1]).index_select(0, &inside);
    let terms = right.reshape([-1, width]).index_select(0, &inside);
    Tensor::zeros([rows * count, width], (right.kind(), device)).index_add_(0, &index, &terms)
}

/// The products of rows `[groups, rows, rows]` in float64, and the sums `[groups, height·width]`, of
/// one parameter whose rows come in batches; of several batches the group is one.
pub(super) fn products(batches: &[Uses], groups: i64) -> (Tensor, Tensor) {
    if batches.iter().all(|batch| batch.prefers_pairs(groups)) {
        let sums = batches.iter().filter_map(|batch| batch.group_sums(groups));
        if let Some(sum) = sums.reduce(|sum, term| sum + term) {
            return (through_pairs(batches, groups), sum);
        }
    }
    through_gradients(batches, groups)
}

/// Dtype and device of what the uses hold.
fn options_of(batches: &[Uses]) -> (Kind, Device) {
    let held = batches.iter().flat_map(|batch| batch.list).map(|used| match used {
        ByRow::Outer { right, .. } | ByRow::Picked { right, .. } => right,
        ByRow::Formed(formed) => formed,
    });
    held.map(|tensor| (tensor.kind(), tensor.device())).next().unwrap_or((Kind::Float, Device::Cpu))
}

/// From the gradients themselves, a slice of their rows at a time.
fn through_gradients(batches: &[Uses], groups: i64) -> (Tensor, Tensor) {
    let (height, width) = (batches[0].height, batches[0].width);
    let rows: i64 = batches.iter().map(|batch| batch.rows).sum();
    let (kind, device) = options_of(batches);
    let each = rows / groups;
    let mut products = Tensor::zeros([groups, each, each], (precise(device), device));
    let mut sums = Vec::new();
    let most = (CHUNK / (rows * width)).clamp(1, height);
    let slices = (height + most - 1) / most;
    let step = (height + slices - 1) / slices;
    let mut start = 0;
    while start < height {
        let count = step.min(height - start);
        // A batch that did not use the parameter has gradient 0.
        let zeros = |rows: i64| Tensor::zeros([rows, count * width], (kind, device));
        let mut parts: Vec<Tensor> = batches
            .iter()
            .map(|batch| batch.slice(start, count).unwrap_or_else(|| zeros(batch.rows)))
            .collect();
        let slice = if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(&parts, 0) };
        let slice = slice.reshape([groups, each, count * width]);
        products += slice.bmm(&slice.transpose(1, 2)).to_kind(products.kind());
        sums.push(slice.sum_dim_intlist(1, false, slice.kind()));
        start += count;
    }
    let sums = if sums.len() == 1 { sums.remove(0) } else { Tensor::cat(&sums, 1) };
    (products, sums)
}

/// All tokens of one use in one list, each with its row; those without a gradient are left out.
struct Tokens {
    left: Left,
    /// `[tokens, width]`
    right: Tensor,
    /// `[tokens]` int64
    owner: Tensor,
}

enum Left {
    /// `[tokens, height]`
    Dense(Tensor),
    /// `[tokens]`
    Picked(Tensor),
}

/// `K` from the pairs of tokens: ⟨u ⊗ v, u' ⊗ v'⟩ = ⟨u, u'⟩⟨v, v'⟩, summed by rows. Groups are taken
/// one after the other.
fn through_pairs(batches: &[Uses], groups: i64) -> Tensor {
    let rows: i64 = batches.iter().map(|batch| batch.rows).sum();
    let each = rows / groups;
    let products: Vec<Tensor> = (0..groups)
        .map(|group| {
            let mut first = 0;
            let mut tokens = Vec::new();
            for batch in batches {
                // Of several batches the group is one.
                let (from, count) =
                    if groups == 1 { (0, batch.rows) } else { (group * each, each) };
                for used in batch.list {
                    tokens.extend(Tokens::new(used, from, count, first));
                }
                first += batch.rows;
            }
            pairs(&tokens, each)
        })
        .collect();
    Tensor::stack(&products, 0)
}

impl Tokens {
    /// Those of `count` rows from `from` on, which are rows `first..` of the products.
    fn new(used: &ByRow, from: i64, count: i64, first: i64) -> Option<Self> {
        let rows = |tensor: &Tensor| tensor.narrow(0, from, count);
        let flat = |tensor: &Tensor| tensor.reshape([-1, tensor.size()[2]]);
        let (left, right) = match used {
            ByRow::Outer { left, right } => (Left::Dense(flat(&rows(left))), rows(right)),
            ByRow::Picked { picked, right } => {
                (Left::Picked(rows(picked).reshape([-1])), rows(right))
            }
            ByRow::Formed(_) => return None,
        };
        let device = right.device();
        let owner = Tensor::arange(count, (Kind::Int64, device)) + first;
        let owner = owner.unsqueeze(1).expand([count, right.size()[1]], false).reshape([-1]);
        Some(Self { left, right: flat(&right), owner }.without_zeros())
    }

    fn without_zeros(self) -> Self {
        let gradient = match &self.left {
            Left::Dense(left) if left.size()[1] >= LARGE => left,
            _ => &self.right,
        };
        let kept = gradient.abs().amax(1, false).nonzero().squeeze_dim(-1);
        let pick = |tensor: &Tensor| tensor.index_select(0, &kept);
        Self {
            left: match &self.left {
                Left::Dense(left) => Left::Dense(pick(left)),
                Left::Picked(picked) => Left::Picked(pick(picked)),
            },
            right: pick(&self.right),
            owner: pick(&self.owner),
        }
    }

    fn count(&self) -> i64 {
        self.owner.size()[0]
    }
}

fn pairs(uses: &[Tokens], rows: i64) -> Tensor {
    let device = uses.first().map_or(Device::Cpu, |tokens| tokens.right.device());
    let mut products = Tensor::zeros([rows, rows], (precise(device), device));
    for (at, first) in uses.iter().enumerate() {
        for (other, second) in uses.iter().enumerate().skip(at) {
            if first.count() == 0 || second.count() == 0 {
                continue;
            }
            let left = match (&first.left, &second.left) {
                (Left::Dense(a), Left::Dense(b)) => a.mm(&b.tr()),
                // The entry of u at the row that the other token picks.
                (Left::Dense(a), Left::Picked(b)) => a.index_select(1, b),
                (Left::Picked(a), Left::Dense(b)) => b.index_select(1, a).tr(),
                (Left::Picked(a), Left::Picked(b)) => {
                    a.unsqueeze(1).eq_tensor(&b.unsqueeze(0)).to_kind(first.right.kind())
                }
            };
            let pairs = (left * first.right.mm(&second.right.tr())).to_kind(products.kind());
            let by_first = Tensor::zeros([rows, second.count()], (products.kind(), device))
                .index_add(0, &first.owner, &pairs);
            let block = Tensor::zeros([rows, rows], (products.kind(), device)).index_add(
                1,
                &second.owner,
                &by_first,
            );
            // The pair of two uses counts from either side.
            products += if at == other { block } else { &block + block.tr() };
        }
    }
    products
}
