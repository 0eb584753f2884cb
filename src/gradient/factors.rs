//! The gradient of a parameter by rows, from what a use of it gives: for a linear layer the sum over
//! tokens of outer products `u ⊗ v`, which need not be formed.

use tch::{Kind, Tensor};

use super::gram::sum_kind;
use crate::native::{Convolution, Layout, Site, Sites, Use};

/// Elements of gradients by rows that one use may take where they have to be formed.
const FORMED: i64 = 1 << 28;
/// Elements up to which the gradient of an embedding is formed: below it costs less than finding
/// the pairs of equal tokens.
const FORMED_EMBEDDING: i64 = 1 << 22;

/// Why a use cannot be taken apart by trajectories: its tensors are not rows × tokens, or it would
/// take too much memory.
#[derive(Debug)]
pub(super) struct NotByRow;

/// The gradient of a parameter `[height, width]` (of any other shape, its first dimension and the
/// rest) that one use brings to each row.
pub(super) enum ByRow {
    /// The sum over tokens of `left ⊗ right`.
    Outer {
        /// `[rows, tokens, height]`
        left: Tensor,
        /// `[rows, tokens, width]`
        right: Tensor,
    },
    /// The sum over tokens of `right` added at the row of the parameter that the token picks.
    Picked {
        /// `[rows, tokens]` int64
        picked: Tensor,
        /// `[rows, tokens, width]`
        right: Tensor,
    },
    /// The gradients themselves, `[rows, height·width]`.
    Formed(Tensor),
}

/// `height` and `width` of a parameter.
pub(super) fn height_and_width(size: &[i64]) -> (i64, i64) {
    match size {
        [] => (1, 1),
        [width] => (1, *width),
        [height, rest @ ..] => (*height, rest.iter().product()),
    }
}

/// What use `at` gives to each of `rows` rows, from its input and the gradient that arrived.
pub(super) fn by_row(
    sites: &Sites,
    at: usize,
    input: Option<Tensor>,
    delta: Tensor,
    rows: i64,
    size: &[i64],
) -> Result<ByRow, NotByRow> {
    let site = &sites.list[at];
    let (input, delta) = (input.map(widened), widened(delta));
    let need = || input.as_ref().ok_or(NotByRow);
    let found = match &site.site_use {
        Use::Linear => linear(site, need()?, &delta, rows)?,
        Use::Embedding { padding_idx } => embedding(site, need()?, &delta, *padding_idx, rows)?,
        Use::Elementwise => {
            ByRow::Formed(summed(&(&delta * need()?), &delta.size(), &site.sizes, rows)?)
        }
        Use::Bias => ByRow::Formed(summed(&delta, &delta.size(), &site.sizes, rows)?),
        Use::Batched => ByRow::Formed(batched(need()?, &delta, rows)?),
        Use::Convolution(convolution) => convolve(need()?, &delta, convolution, size, rows)?,
        Use::ChannelBias => ByRow::Formed(channel_bias(&delta, rows)?),
    };
    laid_out(sites, at, found, rows, size)
}

fn widened(tensor: Tensor) -> Tensor {
    tensor.to_kind(sum_kind(tensor.kind()))
}

/// `[rows, tokens, width]` of a tensor whose leading dimensions run over trajectories and tokens.
fn tokens(tensor: &Tensor, rows: i64, width: i64) -> Result<Tensor, NotByRow> {
    let count = tensor.numel() as i64;
    if width == 0 || count == 0 || count % (rows * width) != 0 {
        return Err(NotByRow);
    }
    Ok(tensor.reshape([rows, count / (rows * width), width]))
}

fn last(size: &[i64]) -> Result<i64, NotByRow> {
    size.last().copied().ok_or(NotByRow)
}

/// `left ⊗ right`, left along the first dimension of what the use sees.
fn linear(site: &Site, input: &Tensor, delta: &Tensor, rows: i64) -> Result<ByRow, NotByRow> {
    let (inward, outward) = (last(&input.size())?, last(&delta.size())?);
    if site.sizes.iter().product::<i64>() != inward * outward {
        return Err(NotByRow);
    }
    let (left, right) = (tokens(input, rows, inward)?, tokens(delta, rows, outward)?);
    if left.size()[1] != right.size()[1] {
        return Err(NotByRow);
    }
    Ok(ByRow::Outer { left, right })
}

fn embedding(
    site: &Site,
    ids: &Tensor,
    delta: &Tensor,
    padding_idx: i64,
    rows: i64,
) -> Result<ByRow, NotByRow> {
    let (height, width) = height_and_width(&site.sizes);
    let right = tokens(delta, rows, width)?;
    let picked = tokens(ids, rows, 1)?.squeeze_dim(-1);
    if picked.size()[1] != right.size()[1] {
        return Err(NotByRow);
    }
    // The padding row gets no gradient.
    let right = if padding_idx >= 0 {
        right.masked_fill(&picked.eq(padding_idx).unsqueeze(-1), 0.0)
    } else {
        right
    };
    if site.layout == Layout::Same && rows * height * width > FORMED_EMBEDDING {
        return Ok(ByRow::Picked { picked, right });
    }
    picked_formed(&picked, &right, height).map(ByRow::Formed)
}

/// The gradients `[rows, height·width]` that picked tokens add up to.
pub(super) fn picked_formed(
    picked: &Tensor,
    right: &Tensor,
    height: i64,
) -> Result<Tensor, NotByRow> {
    let (rows, width) = (right.size()[0], last(&right.size())?);
    if rows * height * width > FORMED {
        return Err(NotByRow);
    }
    let first = Tensor::arange(rows, (Kind::Int64, right.device())) * height;
    let index = (picked + first.unsqueeze(1)).reshape([-1]);
    let formed = Tensor::zeros([rows * height, width], (right.kind(), right.device())).index_add(
        0,
        &index,
        &right.reshape([-1, width]),
    );
    Ok(formed.reshape([rows, height * width]))
}

/// `[rows, numel of sizes]`: per row the sum of a gradient of `shape`, whose first dimension runs
/// over rows first, to the sizes that were broadcast to it.
fn summed(gradient: &Tensor, shape: &[i64], sizes: &[i64], rows: i64) -> Result<Tensor, NotByRow> {
    let (Some(first), true) = (shape.first(), gradient.size() == shape) else {
        return Err(NotByRow);
    };
    let spread = sizes.len() < shape.len() || sizes.first() == Some(&1);
    if first % rows != 0 || !spread || sizes.len() > shape.len() {
        return Err(NotByRow);
    }
    let mut split = vec![rows, first / rows];
    split.extend(&shape[1..]);
    // Ones in front of the sizes, and the rows before them.
    let mut target = vec![1; split.len()];
    target[0] = rows;
    let start = split.len() - sizes.len();
    if start > 1 {
        target[start..].copy_from_slice(sizes);
    } else {
        target[2..].copy_from_slice(&sizes[1..]);
    }
    let gradient = gradient.reshape(&split);
    if target[1..target.len() - 1].iter().all(|size| *size == 1) && target.last() == split.last() {
        // Over all but the last dimension: a product with ones is the fastest sum.
        let width = split[split.len() - 1];
        let gradient = gradient.reshape([rows, -1, width]);
        return Ok(ones(&gradient).bmm(&gradient).squeeze_dim(1));
    }
    Ok(gradient.sum_to_size(&target).reshape([rows, -1]))
}

/// `[rows, 1, tokens]`
fn ones(tokens: &Tensor) -> Tensor {
    let size = tokens.size();
    Tensor::ones([1, 1, size[1]], (tokens.kind(), tokens.device()))
        .expand([size[0], 1, size[1]], false)
}

/// `[rows, E·in·out]` of inputs `[E, n, in]` and gradients `[E, n, out]`, n over rows first.
fn batched(input: &Tensor, delta: &Tensor, rows: i64) -> Result<Tensor, NotByRow> {
    let (input_size, delta_size) = (input.size(), delta.size());
    let ([batch, count, inward], [other, same, outward]) =
        (input_size.as_slice(), delta_size.as_slice())
    else {
        return Err(NotByRow);
    };
    if batch != other || count != same || count % rows != 0 {
        return Err(NotByRow);
    }
    if rows * batch * inward * outward > FORMED {
        return Err(NotByRow);
    }
    let split = |tensor: &Tensor, width: i64| {
        tensor.reshape([*batch, rows, count / rows, width]).transpose(0, 1).reshape([
            rows * batch,
            count / rows,
            width,
        ])
    };
    let formed = split(input, *inward).transpose(1, 2).bmm(&split(delta, *outward));
    Ok(formed.reshape([rows, batch * inward * outward]))
}

/// Of inputs `[N, C, ..]` and gradients `[N, D, ..]`, N over rows first.
fn convolve(
    input: &Tensor,
    delta: &Tensor,
    convolution: &Convolution,
    size: &[i64],
    rows: i64,
) -> Result<ByRow, NotByRow> {
    let [channels, _, kernel @ ..] = size else { return Err(NotByRow) };
    // A convolution over one dimension is one over two, the first of length 1.
    let flat = kernel.len() == 1;
    let two = |numbers: &[i64], fill: i64| match numbers {
        [last] => vec![fill, *last],
        all => all.to_vec(),
    };
    let input = if flat { input.unsqueeze(2) } else { input.shallow_clone() };
    if input.dim() != 4 || input.size()[0] % rows != 0 {
        return Err(NotByRow);
    }
    let patches = input
        .f_im2col(
            two(kernel, 1),
            two(&convolution.dilation, 1),
            two(&convolution.padding, 0),
            two(&convolution.stride, 1),
        )
        .map_err(|_| NotByRow)?;
    let (groups, count) = (convolution.groups, input.size()[0]);
    let places = patches.size()[2];
    if delta.numel() as i64 != count * channels * places {
        return Err(NotByRow);
    }
    // [rows, groups, tokens, width], tokens over the inputs of a row and the places.
    let split = |tensor: &Tensor, width: i64| {
        tensor
            .reshape([rows, count / rows, groups, width / groups, places])
            .permute([0, 2, 1, 4, 3])
            .reshape([rows, groups, count / rows * places, width / groups])
    };
    let (left, right) = (split(delta, *channels), split(&patches, patches.size()[1]));
    if groups == 1 {
        return Ok(ByRow::Outer { left: left.squeeze_dim(1), right: right.squeeze_dim(1) });
    }
    Ok(ByRow::Formed(left.transpose(2, 3).matmul(&right).reshape([rows, -1])))
}

/// `[rows, C]` of gradients `[N, C, ..]`, N over rows first.
fn channel_bias(delta: &Tensor, rows: i64) -> Result<Tensor, NotByRow> {
    let size = delta.size();
    if size.len() < 2 || size[0] % rows != 0 {
        return Err(NotByRow);
    }
    Ok(delta.reshape([rows, size[0] / rows, size[1], -1]).sum_dim_intlist(
        [1_i64, 3].as_slice(),
        false,
        delta.kind(),
    ))
}

/// From the layout of what the use sees to that of the parameter.
fn laid_out(
    sites: &Sites,
    at: usize,
    found: ByRow,
    rows: i64,
    size: &[i64],
) -> Result<ByRow, NotByRow> {
    let site = &sites.list[at];
    let (height, width) = height_and_width(size);
    let fits = |left: &Tensor, right: &Tensor| {
        left.size()[2] == height && right.size()[2] == width && size.len() > 1
    };
    match (found, site.layout) {
        (ByRow::Outer { left, right }, Layout::Same) if fits(&left, &right) => {
            Ok(ByRow::Outer { left, right })
        }
        (ByRow::Outer { left, right }, Layout::Transposed) if fits(&right, &left) => {
            Ok(ByRow::Outer { left: right, right: left })
        }
        (ByRow::Picked { picked, right }, Layout::Same) => Ok(ByRow::Picked { picked, right }),
        (ByRow::Formed(formed), Layout::Same) => Ok(ByRow::Formed(formed)),
        (ByRow::Outer { left, right }, _) => {
            if rows * left.size()[2] * right.size()[2] > FORMED {
                return Err(NotByRow);
            }
            let formed = left.transpose(1, 2).bmm(&right).reshape([rows, -1]);
            laid_out(sites, at, ByRow::Formed(formed), rows, size)
        }
        (ByRow::Picked { .. }, _) => Err(NotByRow),
        (ByRow::Formed(formed), _) => {
            let back: Vec<Tensor> = (0..rows)
                .map(|row| sites.pull_back(at, &formed.select(0, row).reshape(&site.sizes)))
                .collect::<Result<Vec<Tensor>, String>>()
                .map_err(|_| NotByRow)?;
            Ok(ByRow::Formed(Tensor::stack(&back, 0).reshape([rows, -1])))
        }
    }
}
