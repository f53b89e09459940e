//! Shell: memory on a GPU, and the ticket by which another process of this machine reaches it.
//!
//! Allocated with `cuMemAlloc`, in one piece, because memory of the driver's pools cannot be shared between processes.
//! Freed when the last handle and the last use by a kernel are gone.

use std::{any::Any, fmt, str::FromStr, sync::Arc};

use cudarc::driver::{result, sys};

use crate::{
    error::{CudaError, Doing},
    gpu::Gpu,
    pages::Place,
};

/// What kernels may read and write.
pub(crate) trait Memory {
    /// Where it is.
    fn place(&self) -> Place;

    /// Keeps it where it is while a kernel may use it.
    fn keep(&self) -> Arc<dyn Any + Send + Sync>;
}

/// A handle of memory on a GPU; clones share it.
#[derive(Debug, Clone)]
pub struct DeviceMemory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    place: Place,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the address is of an allocation made in `new`; no handle and no kernel that was kept is left.
        let freed =
            self.gpu.bind().and_then(|()| unsafe { result::free_sync(self.place.base) }.doing("freeing memory"));
        self.gpu
            .context()
            .record_err(freed.map_err(|_| cudarc::driver::DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN)));
    }
}

impl DeviceMemory {
    /// `len` bytes, at least 1, of zeroes.
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self, CudaError> {
        gpu.bind()?;
        let len = len.max(1);
        // SAFETY: it only reserves; the memory is written below before anybody can read it.
        let base = unsafe { result::malloc_sync(len) }.doing("allocating memory on the GPU")?;
        let inner = Inner { gpu: gpu.clone(), place: Place { base, len: len as u64 } };
        // SAFETY: `len` bytes from `base` on were allocated just now.
        unsafe { result::memset_d8_sync(base, 0, len) }.doing("clearing memory on the GPU")?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Its GPU.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.inner.gpu
    }

    /// Bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a memory is never empty")]
    pub fn len(&self) -> u64 {
        self.inner.place.len
    }

    /// Copies from host memory and waits; for what is small or done once. A range that does not lie inside is
    /// [`CudaError::OutOfBounds`] of page 0, and nothing is copied.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let to = self.inside(at, bytes.len())?;
        // SAFETY: the range was checked; the call returns when `bytes` was read.
        unsafe { result::memcpy_htod_sync(to, bytes) }.doing("copying to the GPU")
    }

    /// Copies to host memory and waits; bounds as in [`DeviceMemory::write`].
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        let from = self.inside(at, bytes.len())?;
        // SAFETY: the range was checked; the call returns when `bytes` was written.
        unsafe { result::memcpy_dtoh_sync(bytes, from) }.doing("copying from the GPU")
    }

    fn inside(&self, at: u64, len: usize) -> Result<u64, CudaError> {
        self.inner.gpu.bind()?;
        let end = at.checked_add(len as u64).filter(|end| *end <= self.len());
        end.map(|_| self.inner.place.base + at).ok_or(CudaError::OutOfBounds { page: 0 })
    }

    /// A ticket by which another process of this machine opens this memory, all of it and for writing too. It is a
    /// secret: it goes over authenticated links only.
    pub fn share(&self) -> Result<ShareTicket, CudaError> {
        self.inner.gpu.bind()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the address is of a live allocation of `cuMemAlloc`, and the handle is ours to be written.
        let result = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.inner.place.base) };
        result.result().doing("sharing memory of the GPU")?;
        let handle = handle.reserved.map(|byte| byte.cast_unsigned());
        let (machine, process) = (machine()?, std::process::id());
        Ok(ShareTicket { machine, process, gpu: self.inner.gpu.uuid()?, len: self.len(), handle })
    }
}

impl Memory for DeviceMemory {
    fn place(&self) -> Place {
        self.inner.place
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.inner) as Arc<dyn Any + Send + Sync>
    }
}

/// This boot of this machine.
pub(crate) fn machine() -> Result<u128, CudaError> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).map_err(|error| CudaError::Ticket(format!("{path}: {error}")))?;
    let digits = text.trim().replace('-', "");
    u128::from_str_radix(&digits, 16).map_err(|error| CudaError::Ticket(format!("{path}: {error}")))
}

/// What another process needs to open shared memory. As text: `cuda1:MACHINE:PROCESS:GPU:BYTES:HANDLE`, numbers in hex.
#[derive(Clone, PartialEq, Eq)]
pub struct ShareTicket {
    pub(crate) machine: u128,
    pub(crate) process: u32,
    pub(crate) gpu: [u8; 16],
    pub(crate) len: u64,
    pub(crate) handle: [u8; 64],
}

impl fmt::Debug for ShareTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShareTicket({} bytes of process {})", self.len, self.process)
    }
}

impl fmt::Display for ShareTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpu = u128::from_be_bytes(self.gpu);
        write!(f, "cuda1:{:032x}:{:x}:{gpu:032x}:{:x}:", self.machine, self.process, self.len)?;
        self.handle.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for ShareTicket {
    type Err = CudaError;

    fn from_str(text: &str) -> Result<Self, CudaError> {
        let bad = |what: &str| CudaError::Ticket(format!("{what} cannot be read"));
        let parts: Vec<&str> = text.split(':').collect();
        let &["cuda1", machine, process, gpu, len, handle] = parts.as_slice() else {
            return Err(bad("a text that is not cuda1:MACHINE:PROCESS:GPU:BYTES:HANDLE"));
        };
        let digits: Vec<u8> = handle.bytes().filter(u8::is_ascii_hexdigit).collect();
        if digits.len() != 128 || handle.len() != 128 {
            return Err(bad("the handle"));
        }
        let mut bytes = [0; 64];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| bad("the handle"))?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| bad("the handle"))?;
        }
        Ok(Self {
            machine: u128::from_str_radix(machine, 16).map_err(|_| bad("the machine"))?,
            process: u32::from_str_radix(process, 16).map_err(|_| bad("the process"))?,
            gpu: u128::from_str_radix(gpu, 16).map_err(|_| bad("the GPU"))?.to_be_bytes(),
            len: u64::from_str_radix(len, 16).ok().filter(|len| *len > 0).ok_or_else(|| bad("the length"))?,
            handle: bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket() -> ShareTicket {
        let handle = std::array::from_fn(|at| at as u8 * 3);
        ShareTicket { machine: 7 << 100, process: 4242, gpu: *b"0123456789abcdef", len: 1 << 33, handle }
    }

    #[test]
    fn a_ticket_reads_back_and_shows_no_handle_in_a_log() {
        let text = ticket().to_string();
        assert_eq!(text.parse(), Ok(ticket()));
        assert_eq!(format!("{:?}", ticket()), "ShareTicket(8589934592 bytes of process 4242)");
    }

    #[test]
    fn a_ticket_that_was_cut_or_changed_is_refused_by_part() {
        let text = ticket().to_string();
        for end in 0..text.len() {
            assert!(text[..end].parse::<ShareTicket>().is_err(), "{end}");
        }
        let wrong = text.replace("cuda1", "cuda2").parse::<ShareTicket>().unwrap_err().to_string();
        assert!(wrong.contains("cuda1:MACHINE"), "{wrong}");
        let wrong = text.replace(":200000000:", ":0:").parse::<ShareTicket>().unwrap_err().to_string();
        assert!(wrong.contains("the length"), "{wrong}");
    }
}
