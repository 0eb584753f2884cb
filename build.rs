//! Compiles the C++ shim of `src/native` and tells the linker where libtorch lies.

use std::env;
use std::path::{Path, PathBuf};

const SHIM: [&str; 2] = ["src/native/shim.cpp", "src/native/sites.cpp"];

fn main() {
    println!("cargo::rerun-if-changed=src/native");
    if env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        println!("cargo::rustc-env=GRADPRISM_LIBTORCH_LIB=");
        return;
    }
    // torch-sys says which libtorch it was built with; its `links` name is `tch`.
    let Some(lib) = env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from) else {
        println!(
            "cargo::error=torch-sys did not say where libtorch lies: run ./libtorch-setup.sh first"
        );
        return;
    };
    compile_shim(&lib);

    // The binary, tests and examples find libtorch from wherever they are started.
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    // Without this the linker drops libtorch_cuda, which no symbol refers to, and CUDA seems absent.
    println!("cargo::rustc-link-arg=-Wl,--no-as-needed");
    println!("cargo::rustc-link-search=native={}", lib.display());
    for name in ["torch_cuda", "torch"] {
        if lib.join(format!("lib{name}.so")).exists() {
            println!("cargo::rustc-link-arg=-l{name}");
        }
    }
    // For `gradprism doctor`.
    println!("cargo::rustc-env=GRADPRISM_LIBTORCH_LIB={}", lib.display());
    // For the build scripts of crates that depend on this one; the README shows how to use it.
    println!("cargo::metadata=libtorch_lib={}", lib.display());
}

fn compile_shim(lib: &Path) {
    println!("cargo::rerun-if-env-changed=LIBTORCH_INCLUDE");
    println!("cargo::rerun-if-env-changed=LIBTORCH_CXX11_ABI");
    let root = env::var_os("LIBTORCH_INCLUDE")
        .map(PathBuf::from)
        .or_else(|| lib.parent().map(Path::to_path_buf))
        .unwrap_or_default();
    let include = root.join("include");
    let abi = env::var("LIBTORCH_CXX11_ABI").unwrap_or_else(|_| "1".into());
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        // In a debug build too: walking a graph is a good part of a small batch.
        .opt_level(2)
        // Warnings of libtorch's headers are not ours to mend.
        .flag(format!("-isystem{}", include.display()))
        .flag(format!("-isystem{}", include.join("torch/csrc/api/include").display()))
        .flag("-Wall")
        .define("_GLIBCXX_USE_CXX11_ABI", abi.as_str())
        .files(SHIM)
        .compile("gradprism_shim");
}
