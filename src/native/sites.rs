//! The safe side of `sites.cpp`: where the parameters of a graph are used.

use std::ffi::{c_char, c_int};
use std::ptr::NonNull;

use tch::Tensor;
use torch_sys::C_tensor;

use super::check;

#[repr(C)]
struct RawSites {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn gp_sites_find(
        root: *const C_tensor,
        parameters: *const *mut C_tensor,
        count: usize,
        out: *mut *mut RawSites,
    ) -> *mut c_char;
    fn gp_sites_free(sites: *mut RawSites);
    fn gp_sites_count(sites: *const RawSites) -> usize;
    fn gp_site_describe(
        sites: *const RawSites,
        at: usize,
        site_use: *mut c_int,
        layout: *mut c_int,
        parameter: *mut i64,
    );
    fn gp_site_numbers(
        sites: *const RawSites,
        at: usize,
        sizes: c_int,
        out: *mut i64,
        capacity: usize,
    ) -> usize;
    fn gp_sites_uncovered(sites: *const RawSites, out: *mut i64, capacity: usize) -> usize;
    fn gp_sites_backward(
        sites: *mut RawSites,
        root: *const C_tensor,
        gradient: *const C_tensor,
        keep_graph: c_int,
        extra: *const *mut C_tensor,
        count: usize,
        out: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn gp_site_take(
        sites: *mut RawSites,
        at: usize,
        last: c_int,
        input: *mut *mut C_tensor,
        delta: *mut *mut C_tensor,
    );
    fn gp_site_pull_back(
        sites: *const RawSites,
        at: usize,
        gradient: *const C_tensor,
        out: *mut *mut C_tensor,
    ) -> *mut c_char;
}

/// How the gradient of what a use sees of a parameter, `W`, follows from the input `x` and the
/// arriving gradient δ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// `y = x W`: `xᵀδ`.
    Linear,
    /// `y` is rows of `W`: δ added at the rows `x`, but for the padding row.
    Embedding {
        /// The row that gets no gradient; −1 for none.
        padding_idx: i64,
    },
    /// `y = x ∘ W`, broadcast: `δ ∘ x`, summed to the shape of `W`.
    Elementwise,
    /// `y = x + W`, broadcast: δ, summed to the shape of `W`.
    Bias,
    /// `y_e = x_e W_e` for every e of the first dimension: `x_eᵀδ_e`.
    Batched,
    /// `y = x * W`, a convolution over one or two dimensions.
    Convolution(Convolution),
    /// The bias of that: δ, summed over all but the second dimension.
    ChannelBias,
}

/// Strides, paddings and dilations, one a dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Convolution {
    pub stride: Vec<i64>,
    pub padding: Vec<i64>,
    pub dilation: Vec<i64>,
    pub groups: i64,
}

/// How the elements of `W` lie in the parameter that it is a view of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One after the other.
    Same,
    /// As those of the transposed matrix.
    Transposed,
    /// Otherwise: [`Sites::pull_back`] knows.
    Other,
}

/// One use of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    pub site_use: Use,
    pub layout: Layout,
    /// The sizes of `W`.
    pub sizes: Vec<i64>,
    /// The index of the parameter.
    pub parameter: usize,
}

/// The uses of parameters in one graph. Holds the graph until it is dropped.
pub(crate) struct Sites {
    raw: NonNull<RawSites>,
    pub list: Vec<Site>,
    /// Parameters with a use of an unknown kind.
    pub uncovered: Vec<usize>,
}

impl Sites {
    /// Walks the graph that `root` hangs on.
    pub fn find(root: &Tensor, parameters: &[&Tensor]) -> Result<Self, String> {
        let pointers = pointers(parameters);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointers are of live tensors, which the call does not keep; `raw` is written
        // before success.
        check(unsafe {
            gp_sites_find(root.as_ptr(), pointers.as_ptr(), pointers.len(), &mut raw)
        })?;
        let raw = NonNull::new(raw).ok_or("no graph was walked")?;
        let mut sites = Self { raw, list: Vec::new(), uncovered: Vec::new() };
        // SAFETY: `raw` is live from here on until it is dropped.
        let count = unsafe { gp_sites_count(raw.as_ptr()) };
        sites.list = (0..count).map(|at| sites.describe(at)).collect();
        let mut uncovered = vec![0_i64; parameters.len()];
        // SAFETY: at most `capacity` numbers are written.
        let count =
            unsafe { gp_sites_uncovered(raw.as_ptr(), uncovered.as_mut_ptr(), uncovered.len()) };
        sites.uncovered = uncovered[..count.min(parameters.len())]
            .iter()
            .map(|parameter| *parameter as usize)
            .collect();
        Ok(sites)
    }

    fn describe(&self, at: usize) -> Site {
        let (mut kind, mut layout, mut parameter) = (0, 0, 0);
        // SAFETY: `at` is below the count, and the three places are ours.
        unsafe {
            gp_site_describe(self.raw.as_ptr(), at, &mut kind, &mut layout, &mut parameter);
        }
        let numbers = self.numbers(at, false);
        let site_use = match kind {
            0 => Use::Linear,
            1 => Use::Embedding { padding_idx: numbers.first().copied().unwrap_or(-1) },
            2 => Use::Elementwise,
            3 => Use::Bias,
            4 => Use::Batched,
            5 => Use::Convolution(convolution(&numbers)),
            _ => Use::ChannelBias,
        };
        let layout = match layout {
            0 => Layout::Same,
            1 => Layout::Transposed,
            _ => Layout::Other,
        };
        Site { site_use, layout, sizes: self.numbers(at, true), parameter: parameter as usize }
    }

    fn numbers(&self, at: usize, sizes: bool) -> Vec<i64> {
        let mut numbers = vec![0; 16];
        // SAFETY: `at` is below the count; at most `capacity` numbers are written.
        let count = unsafe {
            gp_site_numbers(
                self.raw.as_ptr(),
                at,
                c_int::from(sizes),
                numbers.as_mut_ptr(),
                numbers.len(),
            )
        };
        numbers.truncate(count);
        numbers
    }

    /// A backward pass from `root`, at which `gradient` arrives, as far as the uses. Returns the whole
    /// gradients of `extra` parameters, none where none arrives.
    pub fn backward(
        &mut self,
        root: &Tensor,
        gradient: &Tensor,
        keep_graph: bool,
        extra: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>, String> {
        let pointers = pointers(extra);
        let mut out = vec![std::ptr::null_mut(); extra.len()];
        // SAFETY: the pointers are of live tensors; `out` has a place for each of `extra`.
        check(unsafe {
            gp_sites_backward(
                self.raw.as_ptr(),
                root.as_ptr(),
                gradient.as_ptr(),
                c_int::from(keep_graph),
                pointers.as_ptr(),
                pointers.len(),
                out.as_mut_ptr(),
            )
        })?;
        // SAFETY: what comes back is null or ours.
        Ok(out.into_iter().map(|tensor| unsafe { owned(tensor) }).collect())
    }

    /// The input of a use, none for a bias, and the gradient that the last pass left there, none if
    /// none arrived. With `last` the input is let go of.
    pub fn take(&mut self, at: usize, last: bool) -> (Option<Tensor>, Option<Tensor>) {
        if at >= self.list.len() {
            return (None, None);
        }
        let (mut input, mut delta) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: `at` is in range; what comes back is null or ours.
        unsafe {
            gp_site_take(self.raw.as_ptr(), at, c_int::from(last), &mut input, &mut delta);
            (owned(input), owned(delta))
        }
    }

    /// Takes a gradient of the shape of `W` back to the shape of the parameter.
    pub fn pull_back(&self, at: usize, gradient: &Tensor) -> Result<Tensor, String> {
        if at >= self.list.len() {
            return Err(format!("there is no use {at}"));
        }
        let mut out = std::ptr::null_mut();
        // SAFETY: `at` is in range, and the gradient is live.
        check(unsafe { gp_site_pull_back(self.raw.as_ptr(), at, gradient.as_ptr(), &mut out) })?;
        // SAFETY: what comes back is null or ours.
        unsafe { owned(out) }.ok_or_else(|| "a view has no gradient".into())
    }
}

impl Drop for Sites {
    fn drop(&mut self) {
        // SAFETY: freed once.
        unsafe { gp_sites_free(self.raw.as_ptr()) }
    }
}

fn pointers(tensors: &[&Tensor]) -> Vec<*mut C_tensor> {
    tensors.iter().map(|tensor| tensor.as_ptr().cast_mut()).collect()
}

/// # Safety
/// `tensor` is null, or a tensor that nobody else frees.
unsafe fn owned(tensor: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: as the caller promises; tch frees it as libtorch made it.
    NonNull::new(tensor).map(|tensor| unsafe { Tensor::from_ptr(tensor.as_ptr()) })
}

/// Strides, paddings and dilations one after the other, then the groups.
fn convolution(numbers: &[i64]) -> Convolution {
    let dimensions = numbers.len() / 3;
    let part = |index: usize| numbers[index * dimensions..(index + 1) * dimensions].to_vec();
    Convolution {
        stride: part(0),
        padding: part(1),
        dilation: part(2),
        groups: numbers.last().copied().unwrap_or(1),
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;

    fn numbers(tensor: &Tensor) -> Vec<f64> {
        Vec::try_from(tensor.reshape([-1]).to_kind(Kind::Double)).unwrap()
    }

    /// `y = x W + b` with x = [[1, 2], [3, 4]], W = [[1, 0, 2], [0, 1, 3]], b = [1, 1, 1].
    fn layer() -> (Tensor, Tensor, Tensor) {
        let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).reshape([2, 2]);
        let weight = Tensor::from_slice(&[1.0, 0.0, 2.0, 0.0, 1.0, 3.0]).reshape([2, 3]);
        let bias = Tensor::ones([3], (Kind::Double, tch::Device::Cpu));
        (x, weight.set_requires_grad(true), bias.set_requires_grad(true))
    }

    #[test]
    fn a_linear_layer_and_its_bias() {
        let (x, weight, bias) = layer();
        let y = x.mm(&weight) + &bias;
        let mut sites = Sites::find(&y, &[&weight, &bias]).unwrap();
        assert!(sites.uncovered.is_empty());
        let delta = Tensor::from_slice(&[1.0, 0.0, 0.0, 0.0, 2.0, -1.0]).reshape([2, 3]);
        let whole = sites.backward(&y, &delta, false, &[&weight]).unwrap();
        // xᵀδ
        assert_eq!(numbers(whole[0].as_ref().unwrap()), [1.0, 6.0, -3.0, 2.0, 8.0, -4.0]);
        let at = |parameter| sites.list.iter().position(|site| site.parameter == parameter);
        let (weight_at, bias_at) = (at(0).unwrap(), at(1).unwrap());
        assert_eq!(sites.list[weight_at].site_use, Use::Linear);
        assert_eq!(sites.list[weight_at].sizes, [2, 3]);
        assert_eq!(sites.list[bias_at].site_use, Use::Bias);
        for at in [weight_at, bias_at] {
            let (input, found) = sites.take(at, true);
            assert_eq!(input.map(|input| numbers(&input)), (at == weight_at).then(|| numbers(&x)));
            assert_eq!(numbers(&found.unwrap()), numbers(&delta));
        }
        // The input was let go of.
        assert!(sites.take(weight_at, true).0.is_none());
        let count = sites.list.len();
        assert!(sites.take(count, true).1.is_none());
    }

    #[test]
    fn views_are_followed_and_pulled_back() {
        let (x, weight, _) = layer();
        // Columns 1 and 2, then the transpose of a transpose, then a slice that leaves one out.
        let transposed = weight.tr();
        let y = x.mm(&transposed.tr()) + 1.0;
        let sites = Sites::find(&y, &[&weight]).unwrap();
        assert_eq!(sites.list[0].layout, Layout::Same);

        let y = x.mm(&weight.narrow(1, 1, 2));
        let sites = Sites::find(&y, &[&weight]).unwrap();
        assert_eq!(
            (sites.list[0].layout, sites.list[0].sizes.as_slice()),
            (Layout::Other, &[2, 2][..])
        );
        let gradient = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).reshape([2, 2]);
        let back = sites.pull_back(0, &gradient).unwrap();
        assert_eq!(numbers(&back), [0.0, 1.0, 2.0, 0.0, 3.0, 4.0]);
        assert!(sites.pull_back(1, &gradient).is_err());

        let square =
            Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).reshape([2, 2]).set_requires_grad(true);
        let y = x.mm(&square.tr());
        assert_eq!(Sites::find(&y, &[&square]).unwrap().list[0].layout, Layout::Transposed);
    }

    #[test]
    fn an_unknown_use_is_told() {
        let (x, weight, bias) = layer();
        let y = x.mm(&weight.exp()) + &bias;
        let sites = Sites::find(&y, &[&weight, &bias]).unwrap();
        assert_eq!(sites.uncovered, [0]);
        assert_eq!(sites.list.len(), 1);
    }

    /// What libtorch throws comes back as a message, and what was made is usable or dropped after it.
    #[test]
    fn errors_of_libtorch_pass_as_messages() {
        let (x, weight, _) = layer();
        let y = x.mm(&weight);
        let mut sites = Sites::find(&y, &[&weight]).unwrap();
        let wrong = Tensor::ones([5], (Kind::Double, tch::Device::Cpu));
        assert!(sites.backward(&y, &wrong, true, &[]).unwrap_err().contains("shape"));
        let delta = y.ones_like();
        sites.backward(&y, &delta, false, &[&weight]).unwrap();
        // The graph is used up.
        assert!(sites.backward(&y, &delta, false, &[&weight]).unwrap_err().contains("second time"));

        // An input that was edited after it was used.
        let hidden = &x * 1.0;
        let y = hidden.mm(&weight);
        let mut edited = hidden.shallow_clone();
        let _ = edited.fill_(0.0);
        assert!(Sites::find(&y, &[&weight]).err().unwrap().contains("inplace"));
    }

    /// A panic drops the graph and what was captured, and the next walk knows nothing of it.
    #[test]
    fn a_panic_leaves_nothing_behind() {
        let (x, weight, bias) = layer();
        for _ in 0..3 {
            let y = x.mm(&weight) + &bias;
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let mut sites = Sites::find(&y, &[&weight, &bias]).unwrap();
                sites.backward(&y, &y.ones_like(), true, &[]).unwrap();
                let _held = sites.take(0, false);
                panic!("in the middle of a batch");
            }));
            assert!(panicked.is_err());
            let mut sites = Sites::find(&y, &[&weight, &bias]).unwrap();
            assert!(sites.take(0, false).1.is_none());
            sites.backward(&y, &y.ones_like(), false, &[]).unwrap();
            assert!(sites.take(0, false).1.is_some());
        }
        // No graph at all.
        let mut none = Sites::find(&x, &[&weight]).unwrap();
        assert!(none.list.is_empty());
        assert!(none.backward(&x, &x, false, &[&weight]).unwrap()[0].is_none());
    }
}
