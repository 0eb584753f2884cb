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
        parameter: *mut i64,
        transposed: *mut c_int,
        padding_idx: *mut i64,
    );
    fn gp_site_take(
        sites: *mut RawSites,
        at: usize,
        input: *mut *mut C_tensor,
        delta: *mut *mut C_tensor,
    );
    fn gp_sites_uncovered(sites: *const RawSites, out: *mut i64, capacity: usize) -> usize;
}

/// How the gradient of a parameter follows from the input `x` and the arriving gradient δ of a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// `y = x M`: the gradient of `M` is `xᵀδ`; of its transpose, if `M` is that, `δᵀx`.
    Linear {
        /// Whether `M` is the parameter's transpose.
        transposed: bool,
    },
    /// `y` is rows of the parameter: δ added at the rows `x`, but for the padding row.
    Embedding {
        /// The row that gets no gradient; −1 for none.
        padding_idx: i64,
    },
    /// `y = x ∘ w` over the last dimension: `Σ δ ∘ x`.
    Elementwise,
    /// `y = x + w` over the last dimension: `Σ δ`.
    Bias,
}

/// One use of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    pub site_use: Use,
    /// The index of the parameter.
    pub parameter: usize,
}

/// The uses of parameters in one graph, with a capture armed at each.
pub(crate) struct Sites {
    raw: NonNull<RawSites>,
    pub list: Vec<Site>,
    /// Parameters with a use of an unknown kind.
    pub uncovered: Vec<usize>,
}

impl Sites {
    /// Walks the graph that `root` hangs on.
    pub fn find(root: &Tensor, parameters: &[&Tensor]) -> Result<Self, String> {
        let pointers: Vec<*mut C_tensor> =
            parameters.iter().map(|parameter| parameter.as_ptr().cast_mut()).collect();
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
        for at in 0..count {
            let (mut kind, mut parameter, mut transposed, mut padding_idx) = (0, 0, 0, -1);
            // SAFETY: `at` is below the count, and all four places are ours.
            unsafe {
                gp_site_describe(
                    raw.as_ptr(),
                    at,
                    &mut kind,
                    &mut parameter,
                    &mut transposed,
                    &mut padding_idx,
                );
            }
            let site_use = match kind {
                0 => Use::Linear { transposed: transposed != 0 },
                1 => Use::Embedding { padding_idx },
                2 => Use::Elementwise,
                _ => Use::Bias,
            };
            sites.list.push(Site { site_use, parameter: parameter as usize });
        }
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

    /// The input of a use, none for a bias, and the gradient that arrived there, none if none did.
    pub fn take(&mut self, at: usize) -> (Option<Tensor>, Option<Tensor>) {
        if at >= self.list.len() {
            return (None, None);
        }
        let (mut input, mut delta) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: `at` is in range; what comes back is null or ours, freed as tch frees.
        unsafe {
            gp_site_take(self.raw.as_ptr(), at, &mut input, &mut delta);
            let own = |tensor: *mut C_tensor| {
                NonNull::new(tensor).map(|tensor| Tensor::from_ptr(tensor.as_ptr()))
            };
            (own(input), own(delta))
        }
    }
}

impl Drop for Sites {
    fn drop(&mut self) {
        // SAFETY: freed once.
        unsafe { gp_sites_free(self.raw.as_ptr()) }
    }
}
