//! Inner products of per-trajectory gradients from what the uses of a parameter give: for a matrix,
//! the sum over tokens of outer products `u ⊗ v`.

use tch::{Kind, Tensor};

use crate::native::Use;
use crate::objective::precise;

/// Elements of per-trajectory gradients that are held at a time.
const CHUNK: i64 = 1 << 22;

/// From this height on a matrix is a vocabulary's.
const LARGE: i64 = 8192;

/// One use of a parameter in a batch of `rows` trajectories, after the backward pass.
pub(super) struct Arrived {
    pub site_use: Use,
    pub input: Option<Tensor>,
    pub delta: Tensor,
}

/// Why a use cannot be taken apart by trajectories: its tensors are not rows × tokens.
#[derive(Debug)]
pub(super) struct NotByRow;

/// `[rows, tokens, width]` of a tensor whose leading dimensions run over trajectories and tokens.
fn by_row(tensor: &Tensor, rows: i64, width: i64) -> Result<Tensor, NotByRow> {
    let count = tensor.numel() as i64;
    if width == 0 || count % (rows * width) != 0 || count == 0 {
        return Err(NotByRow);
    }
    Ok(tensor.reshape([rows, count / (rows * width), width]))
}

/// The products `[rows, rows]`, float64 on the device, of the gradients of one parameter, whose uses
/// are added before any product is taken.
pub(super) fn products(
    parameter: &Tensor,
    uses: &[Arrived],
    rows: i64,
) -> Result<Tensor, NotByRow> {
    let size = parameter.size();
    match size.as_slice() {
        [width] => {
            let mut sum = Tensor::zeros([rows, *width], (parameter.kind(), parameter.device()));
            for arrived in uses {
                let delta = by_row(&arrived.delta, rows, *width)?;
                sum += match (arrived.site_use, &arrived.input) {
                    (Use::Bias, _) => delta.sum_dim_intlist(1, false, delta.kind()),
                    (Use::Elementwise, Some(input)) if input.size() == arrived.delta.size() => {
                        let input = by_row(input, rows, *width)?;
                        (delta * input).sum_dim_intlist(1, false, sum.kind())
                    }
                    _ => return Err(NotByRow),
                };
            }
            let sum = sum.to_kind(precise(sum.device()));
            Ok(sum.mm(&sum.tr()))
        }
        [height, width] => matrix_products(*height, *width, uses, rows),
        _ => Err(NotByRow),
    }
}

/// Tokens of one use as factors of outer products: `u [rows, tokens, height]`, or the row that a
/// token picks, and `v [rows, tokens, width]`.
enum Left {
    Dense(Tensor),
    Picked(Tensor),
}

struct Factors {
    left: Left,
    right: Tensor,
}

fn factors(height: i64, width: i64, arrived: &Arrived, rows: i64) -> Result<Factors, NotByRow> {
    let input = arrived.input.as_ref().ok_or(NotByRow)?;
    match arrived.site_use {
        Use::Linear { transposed } => {
            let (left, right) =
                if transposed { (&arrived.delta, input) } else { (input, &arrived.delta) };
            let (left, right) = (by_row(left, rows, height)?, by_row(right, rows, width)?);
            if left.size()[1] != right.size()[1] {
                return Err(NotByRow);
            }
            Ok(Factors { left: Left::Dense(left), right })
        }
        Use::Embedding { padding_idx } => {
            let right = by_row(&arrived.delta, rows, width)?;
            let picked = by_row(input, rows, 1)?.squeeze_dim(-1);
            if picked.size()[1] != right.size()[1] {
                return Err(NotByRow);
            }
            // The padding row gets no gradient.
            let right = if padding_idx >= 0 {
                right.masked_fill(&picked.eq(padding_idx).unsqueeze(-1), 0.0)
            } else {
                right
            };
            Ok(Factors { left: Left::Picked(picked), right })
        }
        Use::Elementwise | Use::Bias => Err(NotByRow),
    }
}

fn matrix_products(
    height: i64,
    width: i64,
    uses: &[Arrived],
    rows: i64,
) -> Result<Tensor, NotByRow> {
    let factors = uses
        .iter()
        .map(|arrived| factors(height, width, arrived, rows))
        .collect::<Result<Vec<Factors>, NotByRow>>()?;
    // Tokens that bring no gradient, as those of the prompt to the head of a language model, are
    // left out where a matrix is so large that looking for them pays.
    let sparse = height >= LARGE;
    let factors: Vec<Tokens> =
        factors.into_iter().map(|factors| Tokens::new(factors, sparse)).collect();
    let tokens: i64 = factors.iter().map(|tokens| tokens.right.size()[0]).sum();
    let dense = factors.iter().all(|tokens| matches!(tokens.left, Left::Dense(_)));
    let through_tokens = tokens * tokens * (height + width);
    let through_weights = tokens * height * width + rows * rows * height * width;
    if dense && !sparse && through_weights <= through_tokens {
        Ok(through_gradients(height, width, &factors, rows))
    } else {
        Ok(through_token_pairs(&factors, rows))
    }
}

/// All tokens of one use in one list, each with its trajectory.
struct Tokens {
    left: Left,
    /// `[tokens, width]`
    right: Tensor,
    /// `[tokens]` int64, the trajectory of each.
    owner: Tensor,
}

impl Tokens {
    fn new(factors: Factors, sparse: bool) -> Self {
        let size = factors.right.size();
        let (rows, per_row, width) = (size[0], size[1], size[2]);
        let device = factors.right.device();
        let owner = Tensor::arange(rows, (Kind::Int64, device))
            .unsqueeze(1)
            .expand([rows, per_row], false)
            .reshape([-1]);
        let flat = |tensor: &Tensor| {
            let size = tensor.size();
            match size.get(2) {
                Some(last) => tensor.reshape([rows * per_row, *last]),
                None => tensor.reshape([-1]),
            }
        };
        let right = factors.right.reshape([rows * per_row, width]);
        let left = match factors.left {
            Left::Dense(left) => Left::Dense(flat(&left)),
            Left::Picked(picked) => Left::Picked(flat(&picked)),
        };
        let all = Self { left, right, owner };
        if sparse { all.without_zeros() } else { all }
    }

    fn without_zeros(self) -> Self {
        let gradient = match &self.left {
            Left::Dense(left) => left,
            Left::Picked(_) => &self.right,
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

/// `K` from the pairs of tokens: ⟨u ⊗ v, u' ⊗ v'⟩ = ⟨u, u'⟩⟨v, v'⟩, summed by trajectories.
fn through_token_pairs(uses: &[Tokens], rows: i64) -> Tensor {
    let device = uses[0].right.device();
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

/// `K` from the gradients themselves, a slice of their rows at a time.
fn through_gradients(height: i64, width: i64, uses: &[Tokens], rows: i64) -> Tensor {
    let device = uses[0].right.device();
    let mut products = Tensor::zeros([rows, rows], (precise(device), device));
    // Back to rows × tokens: here no token was left out.
    let shaped: Vec<(Tensor, Tensor)> = uses
        .iter()
        .filter_map(|tokens| match &tokens.left {
            Left::Dense(left) => {
                let per_row = tokens.count() / rows;
                Some((
                    left.reshape([rows, per_row, height]).transpose(1, 2),
                    tokens.right.reshape([rows, per_row, width]),
                ))
            }
            Left::Picked(_) => None,
        })
        .collect();
    let step = (CHUNK / (rows * width)).clamp(1, height);
    let mut start = 0;
    while start < height {
        let count = step.min(height - start);
        let mut gradients: Option<Tensor> = None;
        for (left, right) in &shaped {
            let part = left.narrow(1, start, count).bmm(right);
            gradients = Some(match gradients {
                Some(sum) => sum + part,
                None => part,
            });
        }
        if let Some(gradients) = gradients {
            let flat = gradients.reshape([rows, count * width]);
            products += flat.mm(&flat.tr()).to_kind(products.kind());
        }
        start += count;
    }
    products
}
