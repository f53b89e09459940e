//! Shell: another process's GPU memory, mapped into this process.
//!
//! Closed when the last handle and the last use by a kernel are gone. Its owner must keep it allocated until then: the
//! lease of the transfer ticket says how long.

use std::{any::Any, sync::Arc};

use cudarc::driver::{DriverError, sys};

use crate::{
    error::{CudaError, Doing},
    gpu::Gpu,
    memory::{Memory, ShareTicket, machine},
    pages::Place,
};

/// A handle of a peer's memory; clones share it.
#[derive(Debug, Clone)]
pub struct PeerMemory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    place: Place,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let closed = self.gpu.bind().and_then(|()| {
            // SAFETY: the address is of a mapping made in `open`; no handle and no kernel that was kept is left.
            unsafe { sys::cuIpcCloseMemHandle(self.place.base) }.result().doing("closing shared memory")
        });
        self.gpu.context().record_err(closed.map_err(|_| DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN)));
    }
}

impl PeerMemory {
    /// Maps what the ticket names. [`CudaError::Ticket`] when it is from another machine or from this very process.
    pub fn open(gpu: &Gpu, ticket: &ShareTicket) -> Result<Self, CudaError> {
        if ticket.machine != machine()? {
            return Err(CudaError::Ticket(
                "it is from another machine, or from before a restart of this one".to_owned(),
            ));
        }
        if ticket.process == std::process::id() {
            return Err(CudaError::Ticket("it is of this process, which uses its own memory directly".to_owned()));
        }
        gpu.bind()?;
        let handle = sys::CUipcMemHandle { reserved: ticket.handle.map(u8::cast_signed) };
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: the handle was made by the driver of the sharing process; one that it does not know is refused.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut base, handle, flags) };
        opened.result().doing("opening a peer's memory of the GPU")?;
        let place = Place { base, len: ticket.len };
        Ok(Self { inner: Arc::new(Inner { gpu: gpu.clone(), place }) })
    }

    /// Bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a memory is never empty")]
    pub fn len(&self) -> u64 {
        self.inner.place.len
    }
}

impl Memory for PeerMemory {
    fn place(&self) -> Place {
        self.inner.place
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.inner) as Arc<dyn Any + Send + Sync>
    }
}
