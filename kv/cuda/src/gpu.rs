//! Shell: one GPU, if there is one.
//!
//! Owns the context and the loaded kernels. Called first of all; every other type holds a handle of it.

use std::{fmt, sync::Arc};

use cudarc::driver::{
    CudaContext, CudaFunction,
    result::{self, DriverError},
    sys,
};

use crate::{
    error::{CudaError, Doing},
    kernels,
};

/// Thread blocks that keep one multiprocessor's memory pipes busy.
const BLOCKS_EACH: u32 = 8;

/// A handle of a GPU; clones share it.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    context: Arc<CudaContext>,
    copy: CudaFunction,
    sum: CudaFunction,
    name: String,
    blocks: u32,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({}: {})", self.inner.context.ordinal(), self.inner.name)
    }
}

/// Whether the driver can be called at all. The library panics when it is called without one, so this comes first.
fn driver() -> Result<(), CudaError> {
    // SAFETY: it opens the driver's library and runs its initialisers, which is what the library is for.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::Missing("the driver's library libcuda.so.1 was not found".to_owned()));
    }
    let missing = |error: DriverError| CudaError::Missing(format!("the driver does not start: {:?}", error.0));
    result::init().map_err(missing)
}

impl Gpu {
    /// How many there are; [`CudaError::Missing`] when the driver is absent or does not start.
    pub fn count() -> Result<usize, CudaError> {
        driver()?;
        let count = CudaContext::device_count().doing("counting GPUs")?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The GPU with this number, from 0 on, its context made and the kernels loaded.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(CudaError::Missing(format!("number {ordinal} was asked for, {count} are here")));
        }
        let context = CudaContext::new(ordinal).doing("opening the GPU")?;
        // SAFETY: all memory that this crate hands to kernels is named by address and kept alive by the fence of its use;
        // no slice of the library is shared between streams, which is what the tracking is for.
        unsafe { context.disable_event_tracking() };
        let module = context.load_module(kernels::ptx()).doing("loading the kernels")?;
        let copy = module.load_function("copy_pages").doing("finding copy_pages")?;
        let sum = module.load_function("sum_pages").doing("finding sum_pages")?;
        let name = context.name().doing("asking for the GPU's name")?;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(attribute).doing("asking for the GPU's size")?;
        let blocks = u32::try_from(multiprocessors).unwrap_or(1).max(1) * BLOCKS_EACH;
        Ok(Self { inner: Arc::new(Inner { context, copy, sum, name, blocks }) })
    }

    /// What its maker calls it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Its memory, bytes: free and total.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.inner.context.mem_get_info().doing("asking for free memory")
    }

    /// What tells it apart from every other GPU.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        let uuid = self.inner.context.uuid().doing("asking for the GPU's identity")?;
        Ok(uuid.bytes.map(|byte| byte.cast_unsigned()))
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// Makes its context this thread's own, as every call of the driver needs.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.inner.context.bind_to_thread().doing("binding the GPU to a thread")
    }

    pub(crate) fn copy_pages(&self) -> &CudaFunction {
        &self.inner.copy
    }

    pub(crate) fn sum_pages(&self) -> &CudaFunction {
        &self.inner.sum
    }

    /// Thread blocks that a copy should have at least.
    pub(crate) fn blocks(&self) -> u32 {
        self.inner.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with a GPU this opens it; on one without it is the one line that an operator reads.
    #[test]
    fn a_machine_without_a_gpu_says_so_and_does_not_panic() {
        match Gpu::open(0) {
            Ok(gpu) => assert!(!gpu.name().is_empty()),
            Err(CudaError::Missing(why)) => assert!(!why.is_empty()),
            Err(other) => panic!("{other}"),
        }
    }
}
