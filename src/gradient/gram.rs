//! Inner products of gradient vectors, summed in float64 whatever the dtype of the gradients.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::objective::precise;

/// A gradient: one tensor a trainable parameter, in the policy's order.
pub type GradientVector = Vec<Tensor>;

/// Elements of one vector whose products are taken at a time.
const CHUNK: i64 = 1 << 16;
/// Elements up to which a model's gradients are joined to one vector.
const SMALL: i64 = 1 << 20;

/// The dtype in which gradients of a dtype are added: half precision would lose the small terms of a
/// long sum.
pub(super) fn sum_kind(kind: Kind) -> Kind {
    match kind {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        kind => kind,
    }
}

/// The symmetric matrix of the inner products of `n` vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct Gram {
    n: usize,
    products: Vec<f64>,
}

impl Gram {
    /// All products 0.
    pub fn zeros(n: usize) -> Self {
        Self { n, products: vec![0.0; n * n] }
    }

    /// From the products in row-major order.
    ///
    /// # Panics
    /// If their number is not a square.
    pub fn from_products(products: Vec<f64>) -> Self {
        let n = products.len().isqrt();
        assert_eq!(n * n, products.len(), "the products of n vectors are n × n numbers");
        Self { n, products }
    }

    /// The number of vectors.
    pub fn len(&self) -> usize {
        self.n
    }

    /// Whether it is the matrix of no vector.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// ⟨v_i, v_j⟩.
    pub fn get(&self, i: usize, j: usize) -> f64 {
        self.products[i * self.n + j]
    }

    /// The squared norm of `Σ_i weights_i v_i`, never below 0.
    pub fn norm_sq(&self, weights: &[f64]) -> f64 {
        self.product(weights, weights).max(0.0)
    }

    /// The inner product of `Σ_i left_i v_i` and `Σ_j right_j v_j`.
    pub fn product(&self, left: &[f64], right: &[f64]) -> f64 {
        (0..self.n)
            .map(|i| left[i] * (0..self.n).map(|j| self.get(i, j) * right[j]).sum::<f64>())
            .sum()
    }

    /// Whether every product is finite.
    pub fn is_finite(&self) -> bool {
        self.products.iter().all(|product| product.is_finite())
    }

    pub(super) fn set(&mut self, i: usize, j: usize, product: f64) {
        self.products[i * self.n + j] = product;
    }

    /// Adds `factor` times another matrix of the same size.
    pub(super) fn add_scaled(&mut self, other: &Self, factor: f64) {
        for (sum, term) in self.products.iter_mut().zip(&other.products) {
            *sum += factor * term;
        }
    }

    /// Multiplies every product.
    pub(super) fn scale(&mut self, factor: f64) {
        self.products.iter_mut().for_each(|product| *product *= factor);
    }

    /// The sum of the matrices of the parameters: the products of the whole vectors.
    pub fn total<'a>(n: usize, parts: impl IntoIterator<Item = &'a Gram>) -> Self {
        let mut total = Self::zeros(n);
        parts.into_iter().for_each(|part| total.add_scaled(part, 1.0));
        total
    }
}

/// The inner products of vectors, `None` being the zero vector; one matrix a parameter if
/// `by_parameter`, else one in all. One transfer from the device.
///
/// # Errors
/// If libtorch fails.
pub fn gram(vectors: &[Option<&GradientVector>], by_parameter: bool) -> Result<Vec<Gram>> {
    let n = vectors.len();
    let present: Vec<usize> = (0..n).filter(|index| vectors[*index].is_some()).collect();
    let vectors: Vec<&GradientVector> = vectors.iter().filter_map(|vector| *vector).collect();
    let Some(first) = vectors.first() else { return Ok(vec![Gram::zeros(n)]) };
    let (parameters, device) = (first.len(), first.first().map_or(Device::Cpu, Tensor::device));
    let elements: usize = first.iter().map(Tensor::numel).sum();

    let _no_grad = tch::no_grad_guard();
    let matrices = if !by_parameter && elements as i64 <= SMALL {
        // A small model: its vectors as whole rows.
        let rows: Vec<Tensor> = vectors.iter().map(|vector| flat(vector)).collect();
        vec![products_of_rows(&rows, device)]
    } else {
        (0..parameters)
            .map(|parameter| {
                let rows: Vec<Tensor> =
                    vectors.iter().map(|vector| vector[parameter].reshape([-1])).collect();
                products_of_rows(&rows, device)
            })
            .collect()
    };
    let mut matrices = Tensor::f_stack(&matrices, 0)?;
    if !by_parameter {
        matrices = matrices.sum_dim_intlist(0, true, matrices.kind());
    }
    let count = matrices.size()[0];
    let numbers: Vec<f64> = Vec::try_from(matrices.to_kind(Kind::Double).reshape([-1]))?;
    let width = present.len();
    Ok((0..count as usize)
        .map(|matrix| {
            let mut gram = Gram::zeros(n);
            for (a, i) in present.iter().enumerate() {
                for (b, j) in present.iter().enumerate() {
                    gram.products[i * n + j] = numbers[(matrix * width + a) * width + b];
                }
            }
            gram
        })
        .collect())
}

fn flat(vector: &GradientVector) -> Tensor {
    let parts: Vec<Tensor> = vector.iter().map(|tensor| tensor.reshape([-1])).collect();
    Tensor::cat(&parts, 0)
}

/// `X Xᵀ` of equally long rows, chunk by chunk.
fn products_of_rows(rows: &[Tensor], device: Device) -> Tensor {
    let rows: Vec<Tensor> = rows.iter().map(|row| row.unsqueeze(0)).collect();
    products_of_packs(&rows, device).squeeze_dim(0)
}

/// The products `[P, n, n]` of `n` vectors `[P, length]` of each of `P` groups. float32 chunks are
/// short enough that their products lose nothing to speak of, and are summed in float64; half
/// precision is widened first.
pub(super) fn products_of_packs(vectors: &[Tensor], device: Device) -> Tensor {
    let wide = precise(device);
    let kind = sum_kind(vectors[0].kind());
    let (groups, length) = (vectors[0].size()[0], vectors[0].size()[1]);
    let n = vectors.len() as i64;
    let mut products = Tensor::zeros([groups, n, n], (wide, device));
    let mut start = 0;
    while start < length {
        let count = CHUNK.min(length - start);
        let chunk: Vec<Tensor> =
            vectors.iter().map(|vector| vector.narrow(1, start, count).to_kind(kind)).collect();
        let chunk = Tensor::stack(&chunk, 1);
        products += chunk.bmm(&chunk.transpose(1, 2)).to_kind(wide);
        start += count;
    }
    products
}
