//! Random projections of gradients, of which inner products are estimated without bias.
//!
//! A gradient matrix `M` of a parameter is sketched by `u_q = r_qᵀ M s_q`, q = 1..k, with signs
//! `r_q`, `s_q` that are independent and ±1 with equal chance. For two gradients `M`, `N` of the same
//! parameter `E u_q(M) u_q(N) = ⟨M, N⟩`, so that the mean over q estimates the product without bias;
//! each q is an independent estimate, which gives the error. Of a sum of outer products of tokens,
//! `M = Σ u ⊗ v`, it is `Σ (r_qᵀu)(s_qᵀv)`: no matrix is formed. A sketch is linear, so that sketches
//! of sums over rows, groups and batches are sums of sketches.
//!
//! The variance of one `u_q(M)²` lies between 2‖M‖⁴, where M has many alike singular values, and
//! 8‖M‖⁴, where it has one; over the parameters of a model it averages out.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

use super::factors::{ByRow, height_and_width};
use super::gram::sum_kind;

/// The signs for every parameter, made when they are first asked for.
#[derive(Debug)]
pub(super) struct Projections {
    dimensions: i64,
    seed: u64,
    by_parameter: Vec<Option<Projection>>,
}

impl Projections {
    /// `dimensions` is k.
    pub fn new(dimensions: i64, seed: u64) -> Self {
        Self { dimensions, seed, by_parameter: Vec::new() }
    }

    /// k.
    pub fn dimensions(&self) -> i64 {
        self.dimensions
    }

    /// The sketches `[rows, k]` of the gradients by rows of parameter `index`; none if it is unused.
    pub fn rows(&mut self, index: usize, parameter: &Tensor, uses: &[ByRow]) -> Option<Tensor> {
        if uses.is_empty() {
            return None;
        }
        self.projection(index, parameter).sketch(uses)
    }

    /// The sketches `[rows, k]` of gradients `[rows, numel]` of parameter `index`.
    pub fn formed(&mut self, index: usize, parameter: &Tensor, gradients: Tensor) -> Tensor {
        self.projection(index, parameter).formed(&gradients)
    }

    /// The same, of a parameter whose signs were made before; zeros if they were not.
    pub fn of(&self, index: usize, gradients: &Tensor) -> Tensor {
        match self.by_parameter.get(index) {
            Some(Some(projection)) => projection.formed(gradients),
            _ => {
                let size = [gradients.size()[0], self.dimensions];
                Tensor::zeros(size, (gradients.kind(), gradients.device()))
            }
        }
    }

    fn projection(&mut self, index: usize, parameter: &Tensor) -> &Projection {
        if self.by_parameter.len() <= index {
            self.by_parameter.resize_with(index + 1, || None);
        }
        let kind = sum_kind(parameter.kind());
        self.by_parameter[index].get_or_insert_with(|| {
            Projection::new(
                height_and_width(&parameter.size()),
                self.dimensions,
                (self.seed, index as u64),
                (kind, parameter.device()),
            )
        })
    }
}

/// The signs for one parameter `[height, width]`.
#[derive(Debug)]
struct Projection {
    /// `[height, k]`
    left: Tensor,
    /// `[width, k]`
    right: Tensor,
}

impl Projection {
    /// The same for the same `seed`; `stream` tells parameters apart.
    fn new(
        (height, width): (i64, i64),
        dimensions: i64,
        (seed, stream): (u64, u64),
        (kind, device): (Kind, Device),
    ) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream);
        let bits = Tensor::from_slice(&[1_u8, 2, 4, 8, 16, 32, 64, 128]);
        let mut signs = |rows: i64| {
            let count = rows * dimensions;
            let mut bytes = vec![0_u8; (count as usize).div_ceil(8)];
            random.fill_bytes(&mut bytes);
            let drawn = Tensor::from_slice(&bytes).unsqueeze(1).bitwise_and_tensor(&bits).ne(0);
            let drawn = drawn.reshape([-1]).narrow(0, 0, count).to_device(device);
            (drawn.to_kind(kind) * 2.0 - 1.0).reshape([rows, dimensions])
        };
        // A vector has one row, whose sign would not matter.
        let right = signs(width);
        let left =
            if height == 1 { Tensor::ones([1, dimensions], (kind, device)) } else { signs(height) };
        Self { left, right }
    }

    /// The sketches `[rows, k]` of the gradients of a parameter by rows; inner products of these are
    /// the means over q.
    fn sketch(&self, uses: &[ByRow]) -> Option<Tensor> {
        let sum = uses.iter().map(|used| self.sketch_of(used)).reduce(|sum, term| sum + term)?;
        Some(self.scaled(sum))
    }

    fn formed(&self, gradients: &Tensor) -> Tensor {
        self.scaled(self.sketch_of(&ByRow::Formed(gradients.shallow_clone())))
    }

    fn scaled(&self, sum: Tensor) -> Tensor {
        sum / (self.right.size()[1] as f64).sqrt()
    }

    fn sketch_of(&self, used: &ByRow) -> Tensor {
        let (height, width) = (self.left.size()[0], self.right.size()[0]);
        let terms = match used {
            ByRow::Outer { left, right } => left.matmul(&self.left) * right.matmul(&self.right),
            ByRow::Picked { picked, right } => {
                let size = [picked.size()[0], picked.size()[1], self.left.size()[1]];
                let signs = self.left.index_select(0, &picked.reshape([-1])).reshape(size);
                signs * right.matmul(&self.right)
            }
            ByRow::Formed(formed) => {
                formed.reshape([-1, height, width]).matmul(&self.right) * &self.left
            }
        };
        terms.sum_dim_intlist(1, false, terms.kind())
    }
}
