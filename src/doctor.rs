//! What this build and this machine have, and what to do about each problem.

use serde::Serialize;

/// The release of `tch` that this crate is written for, and the libtorch that it wants.
const TCH: (&str, &str) = ("0.26", "2.13.0");

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// What was found.
    pub found: String,
    /// What to do, if anything.
    pub remedy: Option<String>,
    /// Whether nothing will work before that is done.
    pub is_error: bool,
}

impl Check {
    fn fine(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, found: found.into(), remedy: None, is_error: false }
    }

    fn advice(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, found: found.into(), remedy: Some(remedy.into()), is_error: false }
    }
}

/// Looks at versions, CUDA, threads, and whether libtorch computes.
pub fn checks() -> Vec<Check> {
    let mut checks = vec![
        Check::fine("gradprism", env!("CARGO_PKG_VERSION")),
        version(),
        Check::fine("libtorch folder", env!("GRADPRISM_LIBTORCH_LIB")),
        arithmetic(),
        cuda(),
    ];
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    checks.push(Check::fine(
        "threads",
        format!(
            "{} of libtorch, {cores} processors (threads: N in a configuration changes the former)",
            tch::get_num_threads()
        ),
    ));
    checks
}

fn version() -> Check {
    let (tch, wanted) = TCH;
    let found = crate::native::libtorch_version();
    let text = format!("{found}, with tch {tch}, which wants {wanted}");
    if found == wanted {
        return Check::fine("libtorch", text);
    }
    Check::advice("libtorch", text, "run ./libtorch-setup.sh, then build again")
}

/// A gradient that is known: d/dx x² = 2x.
fn arithmetic() -> Check {
    let x = tch::Tensor::from_slice(&[3.0]).set_requires_grad(true);
    let gradient =
        tch::Tensor::f_run_backward(&[x.square().sum(tch::Kind::Double)], &[&x], false, false)
            .ok()
            .and_then(|gradients| gradients.first().map(|gradient| gradient.double_value(&[0])));
    match gradient {
        Some(6.0) => Check::fine("autograd", "works"),
        found => Check {
            name: "autograd",
            found: format!("expected the gradient 6 of x² at 3, found {found:?}"),
            remedy: Some(
                "this libtorch is damaged: remove its folder, run ./libtorch-setup.sh, build again"
                    .into(),
            ),
            is_error: true,
        },
    }
}

fn cuda() -> Check {
    if !tch::utils::has_cuda() {
        return Check::advice(
            "CUDA",
            "not in this build of libtorch",
            "for a GPU: ./libtorch-setup.sh --cuda, then build again",
        );
    }
    match tch::Cuda::device_count() {
        0 => Check::advice(
            "CUDA",
            "in this build, but libtorch sees no device",
            "is the driver installed (nvidia-smi), and CUDA_VISIBLE_DEVICES right?",
        ),
        count => Check::fine("CUDA", format!("{count} devices")),
    }
}
