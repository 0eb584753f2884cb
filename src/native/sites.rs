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
