//! From what each micro-batch shows of every parameter to the products and sums of a pack.

use tch::{Kind, Tensor};

use super::engine::{GroupResult, PackGradients, PackResult, Part};
use super::factors::{ByRow, height_and_width};
use super::gram::{Gram, products_of_packs, sum_kind};
use super::plain::not_finite;
use super::row_products::{Uses, products};
use super::rows::{GroupInput, RowStats};
use super::sketch::Projections;
use super::split::GroupProducts;
use crate::error::Result;
use crate::objective::precise;

/// What micro-batches have shown so far, parameter by parameter.
pub(super) struct Batches {
    groups: i64,
    /// Sums over the rows of each group, `[P, numel]` or `[P, k]`; none is 0.
    parts: Vec<(Part, Vec<Option<Tensor>>)>,
    task: Vec<TaskOf>,
    has_task: bool,
}

/// The task gradients of one parameter by rows.
#[derive(Default)]
struct TaskOf {
    /// Exactly: a micro-batch's rows and uses.
    batches: Vec<(i64, Vec<ByRow>)>,
    /// Sketches `[rows, k]`, a micro-batch each.
    sketches: Vec<Tensor>,
}

impl Batches {
    pub fn new(parameters: usize, groups: i64) -> Self {
        Self {
            groups,
            parts: Vec::new(),
            task: (0..parameters).map(|_| TaskOf::default()).collect(),
            has_task: false,
        }
    }

    /// Adds the gradients of a part of the regularizer: by uses, or `whole` where a parameter is
    /// taken row by row.
    pub fn add_part(
        &mut self,
        part: Part,
        uses: Vec<Vec<ByRow>>,
        whole: Vec<(usize, Option<Tensor>)>,
        parameters: &[&Tensor],
        mut sketch: Option<&mut Projections>,
    ) {
        let _no_grad = tch::no_grad_guard();
        let groups = self.groups;
        let mut sums: Vec<Option<Tensor>> = uses
            .iter()
            .enumerate()
            .map(|(index, list)| {
                let (height, width) = height_and_width(&parameters[index].size());
                match sketch.as_deref_mut() {
                    None => Uses { height, width, rows: 0, list }.group_sums(groups),
                    Some(sketch) => sketch
                        .rows(index, parameters[index], list)
                        .map(|rows| sum_of_groups(&rows, groups)),
                }
            })
            .collect();
        for (index, gradient) in whole {
            sums[index] = gradient.map(|gradient| {
                let gradient = gradient.reshape([1, -1]);
                match sketch.as_deref_mut() {
                    None => gradient,
                    Some(sketch) => sketch.formed(index, parameters[index], gradient),
                }
            });
        }
        match self.parts.iter_mut().find(|(other, _)| *other == part) {
            None => self.parts.push((part, sums)),
            Some((_, totals)) => {
                for (total, sum) in totals.iter_mut().zip(sums) {
                    *total = match (total.take(), sum) {
                        (Some(total), Some(sum)) => Some(total + sum),
                        (total, sum) => total.or(sum),
                    };
                }
            }
        }
    }

    /// Adds the task gradients of a micro-batch.
    pub fn add_task(
        &mut self,
        uses: Vec<Vec<ByRow>>,
        rows: i64,
        parameters: &[&Tensor],
        mut sketch: Option<&mut Projections>,
    ) {
        let _no_grad = tch::no_grad_guard();
        self.has_task = true;
        for (index, list) in uses.into_iter().enumerate() {
            match sketch.as_deref_mut() {
                None => self.task[index].batches.push((rows, list)),
                Some(sketch) => {
                    let sketched = sketch.rows(index, parameters[index], &list);
                    self.task[index].sketches.push(sketched.unwrap_or_else(|| {
                        let dimensions = sketch.dimensions();
                        Tensor::zeros([rows, dimensions], options(parameters[index]))
                    }));
                }
            }
        }
    }

    /// All products and sums; `order` says which row of the pack each row of the micro-batches is.
    pub fn assemble(
        self,
        parameters: &[&Tensor],
        order: &[usize],
        sketch: Option<&mut Projections>,
    ) -> Result<Assembled> {
        let _no_grad = tch::no_grad_guard();
        let names: Vec<Part> = self.parts.iter().map(|(part, _)| *part).collect();
        let rows = order.len() / self.groups as usize;
        let place = Tensor::from_slice(&inverse(order, rows));
        match sketch {
            Some(sketch) => self.assemble_sketch(parameters, &place, names, sketch.dimensions()),
            None => self.assemble_exact(parameters, &place, names, rows),
        }
    }

    fn assemble_exact(
        self,
        parameters: &[&Tensor],
        place: &Tensor,
        names: Vec<Part>,
        rows: usize,
    ) -> Result<Assembled> {
        let groups = self.groups;
        let (mut parts, mut task): (Vec<(Part, Vec<Tensor>)>, Vec<Tensor>) = (
            names.iter().map(|part| (*part, Vec::with_capacity(parameters.len()))).collect(),
            Vec::with_capacity(if self.has_task { parameters.len() } else { 0 }),
        );
        let mut row_products = Vec::new();
        let mut sum_products = Vec::new();
        let mut sums_of_parts: Vec<_> =
            self.parts.into_iter().map(|(_, sums)| sums.into_iter()).collect();
        for (parameter, task_of) in parameters.iter().zip(self.task) {
            let (height, width) = height_and_width(&parameter.size());
            let zeros = || Tensor::zeros([groups, height * width], options(parameter));
            let mut vectors = Vec::new();
            if self.has_task {
                let batches: Vec<Uses> = task_of
                    .batches
                    .iter()
                    .map(|(rows, list)| Uses { height, width, rows: *rows, list })
                    .collect();
                let used = batches.iter().any(|batch| !batch.list.is_empty());
                let (matrix, sum) = if used {
                    products(&batches, groups)
                } else {
                    let size = [groups, rows as i64, rows as i64];
                    (
                        Tensor::zeros(size, (precise(parameter.device()), parameter.device())),
                        zeros(),
                    )
                };
                row_products.push(matrix);
                vectors.push(sum);
            }
            for sums in &mut sums_of_parts {
                vectors.push(sums.next().flatten().unwrap_or_else(zeros));
            }
            if !vectors.is_empty() {
                sum_products.push(products_of_packs(&vectors, parameter.device()));
            }
            let mut size = vec![groups];
            size.extend(parameter.size());
            let mut vectors = vectors.into_iter().map(|vector| vector.reshape(&size));
            if self.has_task {
                task.extend(vectors.next());
            }
            for ((_, part), vector) in parts.iter_mut().zip(vectors) {
                part.push(vector);
            }
        }
        let row_products = stacked(&row_products, Some(place))?;
        let sum_products = stacked(&sum_products, None)?;
        let sums = usize::from(self.has_task) + names.len();
        let groups = groups as usize;
        let grams = (0..groups)
            .map(|group| {
                (0..parameters.len())
                    .map(|parameter| {
                        let at = parameter * groups + group;
                        let rows_of = |n: usize| at * n * n..(at + 1) * n * n;
                        join(
                            rows,
                            row_products.get(rows_of(rows)),
                            sum_products.get(rows_of(sums)).unwrap_or_default(),
                            names.len(),
                        )
                    })
                    .collect()
            })
            .collect();
        let task = self.has_task.then_some(task);
        Ok(Assembled {
            gradients: PackGradients { task, parts },
            names,
            rows,
            grams,
            replicates: Vec::new(),
        })
    }

    fn assemble_sketch(
        self,
        parameters: &[&Tensor],
        place: &Tensor,
        names: Vec<Part>,
        dimensions: i64,
    ) -> Result<Assembled> {
        let groups = self.groups;
        let rows = place.size()[0];
        let zeros = |parameter: &Tensor| Tensor::zeros([groups, dimensions], options(parameter));
        let parts: Vec<(Part, Vec<Tensor>)> = self
            .parts
            .into_iter()
            .map(|(part, sums)| {
                let sums = sums.into_iter().zip(parameters);
                (
                    part,
                    sums.map(|(sum, parameter)| sum.unwrap_or_else(|| zeros(parameter))).collect(),
                )
            })
            .collect();
        // [L, P, G, k], rows in the order of the group.
        let by_row: Vec<Tensor> = self
            .task
            .iter()
            .zip(parameters)
            .map(|(task_of, parameter)| {
                if task_of.sketches.is_empty() {
                    return Tensor::zeros([groups, rows, dimensions], options(parameter));
                }
                let joined = Tensor::cat(&task_of.sketches, 0).reshape([groups, rows, dimensions]);
                joined.index_select(1, &place.to_device(joined.device()))
            })
            .collect();
        let task = self.has_task.then(|| {
            by_row.iter().map(|rows| rows.sum_dim_intlist(1, false, rows.kind())).collect()
        });
        // [L, P, G + parts, k]
        let vectors: Vec<Tensor> = (0..parameters.len())
            .map(|at| {
                let mut all = vec![by_row[at].shallow_clone()];
                all.extend(parts.iter().map(|(_, sums)| sums[at].unsqueeze(1)));
                Tensor::cat(&all, 1)
            })
            .collect();
        let vectors = Tensor::f_stack(&vectors, 0)?;
        let vectors = vectors.to_kind(precise(vectors.device()));
        let by_parameter = numbers(&vectors.matmul(&vectors.transpose(2, 3)))?;
        // [P, k, G + parts, L]: one estimate a dimension.
        let by_dimension = vectors.permute([1, 3, 2, 0]);
        let replicates = numbers(&by_dimension.matmul(&by_dimension.transpose(2, 3)))?;
        let n = rows as usize + names.len();
        let gram = |numbers: &[f64], at: usize| {
            Gram::from_products(numbers[at * n * n..(at + 1) * n * n].to_vec())
        };
        let (groups, dimensions) = (groups as usize, dimensions as usize);
        Ok(Assembled {
            gradients: PackGradients { task, parts },
            names,
            rows: rows as usize,
            grams: (0..groups)
                .map(|group| {
                    (0..parameters.len())
                        .map(|parameter| gram(&by_parameter, parameter * groups + group))
                        .collect()
                })
                .collect(),
            replicates: (0..groups)
                .map(|group| {
                    (0..dimensions).map(|at| gram(&replicates, group * dimensions + at)).collect()
                })
                .collect(),
        })
    }
}

/// Where in `order`, of rows that go group by group, each row of a group is.
fn inverse(order: &[usize], rows: usize) -> Vec<i64> {
    let mut places = vec![0; rows];
    for (place, row) in order.iter().enumerate().take(rows) {
        places[*row] = place as i64;
    }
    places
}

fn options(parameter: &Tensor) -> (Kind, tch::Device) {
    (sum_kind(parameter.kind()), parameter.device())
}

fn sum_of_groups(rows: &Tensor, groups: i64) -> Tensor {
    let width = rows.size()[1];
    rows.reshape([groups, -1, width]).sum_dim_intlist(1, false, rows.kind())
}

/// Matrices `[P, n, n]` of all parameters, one after the other, with rows and columns in the order of
/// `places`.
fn stacked(matrices: &[Tensor], places: Option<&Tensor>) -> Result<Vec<f64>> {
    if matrices.is_empty() {
        return Ok(Vec::new());
    }
    let mut all = Tensor::f_stack(matrices, 0)?;
    if let Some(places) = places {
        let places = places.to_device(all.device());
        all = all.index_select(2, &places).index_select(3, &places);
    }
    numbers(&all)
}

/// One transfer from the device.
fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(Vec::try_from(tensor.to_kind(Kind::Double).reshape([-1]))?)
}

/// The matrix of rows and parts from the products of the rows (none if they are 0) and those of the
/// sums. Of the products of a row with a part only their sum is ever used; each gets an equal share.
fn join(rows: usize, row_products: Option<&[f64]>, sum_products: &[f64], parts: usize) -> Gram {
    let mut joined = Gram::zeros(rows + parts);
    let n = sum_products.len().isqrt();
    let has_task = n > parts;
    if let (Some(row_products), true) = (row_products, has_task) {
        for (at, product) in row_products.iter().enumerate() {
            joined.set(at / rows, at % rows, *product);
        }
    }
    let first = usize::from(has_task);
    for a in 0..parts {
        for b in 0..parts {
            joined.set(rows + a, rows + b, sum_products[(first + a) * n + first + b]);
        }
        for row in 0..if has_task { rows } else { 0 } {
            let share = sum_products[first + a] / rows as f64;
            joined.set(row, rows + a, share);
            joined.set(rows + a, row, share);
        }
    }
    joined
}

/// The products and sums of a pack.
pub(super) struct Assembled {
    gradients: PackGradients,
    names: Vec<Part>,
    rows: usize,
    /// By group and parameter.
    grams: Vec<Vec<Gram>>,
    /// Of a sketch, by group and dimension.
    replicates: Vec<Vec<Gram>>,
}

impl Assembled {
    /// The gradient of one parameter summed over the groups, of the task or of the last part; and the
    /// root of the summed squares of what it is a sum of.
    pub fn sum_over_groups(&self, parameter: usize, of_task: bool) -> (Tensor, f64) {
        let last = self.gradients.parts.last().map(|(_, vectors)| vectors);
        let vectors = if of_task { self.gradients.task.as_ref() } else { last };
        let sum = vectors.map_or_else(
            || Tensor::zeros([1], (Kind::Float, tch::Device::Cpu)),
            |vectors| vectors[parameter].sum_dim_intlist(0, false, vectors[parameter].kind()),
        );
        let from = if of_task { 0..self.rows } else { self.rows..self.rows + self.names.len() };
        let squares: f64 = self
            .grams
            .iter()
            .map(|grams| from.clone().map(|at| grams[parameter].get(at, at)).sum::<f64>())
            .sum();
        (sum, squares.max(0.0).sqrt())
    }

    /// The results, with products by parameter if they are wanted.
    ///
    /// # Errors
    /// If a product is not finite.
    pub fn into_pack(
        self,
        inputs: &[GroupInput],
        stats: Vec<RowStats>,
        by_parameter: bool,
    ) -> Result<PackResult> {
        let mut replicates = self.replicates.into_iter();
        let groups = self
            .grams
            .into_iter()
            .zip(inputs)
            .zip(stats.chunks(self.rows))
            .map(|((grams, input), stats)| {
                let n = self.rows + self.names.len();
                let products =
                    |gram: Gram| GroupProducts::exact(self.rows, self.names.clone(), gram);
                let mut whole = products(Gram::total(n, &grams));
                whole.replicates = replicates.next().unwrap_or_default();
                if !whole.gram.is_finite() {
                    return Err(not_finite(&input.group.id));
                }
                let by_parameter = if by_parameter {
                    grams.into_iter().map(products).collect()
                } else {
                    Vec::new()
                };
                Ok(GroupResult {
                    products: whole,
                    by_parameter,
                    score_norms_sq: Vec::new(),
                    stats: stats.to_vec(),
                })
            })
            .collect::<Result<Vec<GroupResult>>>()?;
        Ok(PackResult { groups, gradients: self.gradients })
    }
}
