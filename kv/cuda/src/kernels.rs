//! The kernels: their source, what it was compiled to, and the compiler when it has to be done again.
//!
//! The compiled text is for compute capability 8.0 and later; the driver translates it for the GPU that is there.

use cudarc::nvrtc::{CompileOptions, Ptx, compile_ptx_with_opts, sys};

use starling_kv::transport::page_sum;

use crate::error::CudaError;

/// The kernels in CUDA C++.
pub const SOURCE: &str = include_str!("kernels/pages.cu");
/// The same, compiled by [`compile`].
pub const PTX: &str = include_str!("kernels/pages.ptx");

pub(crate) fn ptx() -> Ptx {
    Ptx::from_src(PTX)
}

/// Compiles [`SOURCE`] with NVRTC, which needs no GPU but its own library. The first line of what it returns says which
/// source it is of.
pub fn compile() -> Result<String, CudaError> {
    // SAFETY: it opens the compiler's library and runs its initialisers, which is what the library is for.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::Missing("the compiler's library libnvrtc.so was not found".to_owned()));
    }
    let options = CompileOptions { options: vec!["--gpu-architecture=compute_80".to_owned()], ..Default::default() };
    let failed = |error| CudaError::Driver { doing: "compiling the kernels", message: format!("{error:?}") };
    let ptx = compile_ptx_with_opts(SOURCE, options).map_err(failed)?.to_src();
    Ok(format!("// xxh3-64 of pages.cu: {:016x}\n{}\n", page_sum(SOURCE.as_bytes()), ptx.trim_end()))
}
