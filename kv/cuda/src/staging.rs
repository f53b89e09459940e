//! Shell: host memory that a GPU reaches and that every transport can move.
//!
//! Owns a shared region, pinned for the GPU for as long as a handle, a lease or a kernel uses it. What is leased to whom
//! is decided by [`Pieces`], which is pure. Bounds: the region; a lease that does not fit now is refused at once.

use std::{
    any::Any,
    collections::BTreeMap,
    ffi::c_void,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::{DriverError, sys};
use starling_kv::transport::Region;

use crate::{
    error::{CudaError, Doing},
    gpu::Gpu,
    memory::Memory,
    pages::Place,
};

/// Leases begin and end at multiples of this many bytes, so that no two touch one page of the operating system.
const LEASE_ALIGN: usize = 4096;

/// A handle of pinned host memory; clones share it.
#[derive(Debug, Clone)]
pub struct Staging {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    region: Region,
    device: u64,
    pieces: Mutex<Pieces>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let released = self.gpu.bind().and_then(|()| {
            // SAFETY: the region was registered in `new` and is still mapped; no lease and no kernel is left.
            unsafe { sys::cuMemHostUnregister(self.region.base().cast::<c_void>()) }.result().doing("unpinning")
        });
        self.gpu.context().record_err(released.map_err(|_| DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN)));
    }
}

impl Inner {
    fn pieces(&self) -> MutexGuard<'_, Pieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Staging {
    /// `len` bytes, rounded up to a multiple of 4 KiB, pinned and mapped for the GPU.
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self, CudaError> {
        let len = len.max(1).next_multiple_of(LEASE_ALIGN);
        let region = Region::shared("starling-kv-staging", len)?;
        region.populate()?;
        gpu.bind()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let base = region.base().cast::<c_void>();
        // SAFETY: the region is a mapping of `len` bytes, present since `populate`, and outlives the registration.
        unsafe { sys::cuMemHostRegister_v2(base, len, flags) }.result().doing("pinning host memory")?;
        let mut inner = Inner { gpu: gpu.clone(), region, device: 0, pieces: Mutex::new(Pieces::new(len)) };
        // SAFETY: the range was registered with DEVICEMAP just now.
        let mapped = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut inner.device, base, 0) };
        mapped.result().doing("mapping pinned memory")?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The same memory as transports see it; a lease's [`Lease::offset`] is an offset in it.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.inner.region
    }

    /// `len` bytes in one piece, until the lease is dropped.
    pub fn lease(&self, len: usize) -> Result<Lease, CudaError> {
        let mut pieces = self.inner.pieces();
        let Some((offset, len)) = pieces.take(len) else {
            return Err(CudaError::StagingFull { wanted: len, free: pieces.largest() });
        };
        Ok(Lease { held: Arc::new(Held { staging: Arc::clone(&self.inner), offset, len }) })
    }

    /// Bytes that are not leased.
    #[must_use]
    pub fn free(&self) -> usize {
        self.inner.pieces().free.values().sum()
    }
}

/// A part of the staging memory; clones share it, and the last one, or the last kernel that uses it, gives it back.
#[derive(Debug, Clone)]
pub struct Lease {
    held: Arc<Held>,
}

#[derive(Debug)]
struct Held {
    staging: Arc<Inner>,
    offset: usize,
    len: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.staging.pieces().give(self.offset, self.len);
    }
}

impl Lease {
    /// Where it begins in [`Staging::region`], bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.held.offset as u64
    }

    /// Bytes: what was asked for, rounded up to a multiple of 4 KiB.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a lease is never empty")]
    pub fn len(&self) -> u64 {
        self.held.len as u64
    }
}

impl Memory for Lease {
    fn place(&self) -> Place {
        Place { base: self.held.staging.device + self.offset(), len: self.len() }
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.held) as Arc<dyn Any + Send + Sync>
    }
}

/// Which parts are free: offset to length, never two that touch.
#[derive(Debug)]
struct Pieces {
    free: BTreeMap<usize, usize>,
}

impl Pieces {
    fn new(len: usize) -> Self {
        Self { free: BTreeMap::from([(0, len)]) }
    }

    /// The first piece that is long enough, cut to a multiple of the alignment.
    fn take(&mut self, len: usize) -> Option<(usize, usize)> {
        let len = len.max(1).checked_next_multiple_of(LEASE_ALIGN)?;
        let (&offset, &piece) = self.free.iter().find(|(_, piece)| **piece >= len)?;
        self.free.remove(&offset);
        if piece > len {
            self.free.insert(offset + len, piece - len);
        }
        Some((offset, len))
    }

    fn give(&mut self, offset: usize, len: usize) {
        let (mut begin, mut end) = (offset, offset + len);
        if let Some(after) = self.free.remove(&end) {
            end += after;
        }
        if let Some((&before, &length)) = self.free.range(..offset).next_back()
            && before + length == offset
        {
            self.free.remove(&before);
            begin = before;
        }
        self.free.insert(begin, end - begin);
    }

    fn largest(&self) -> usize {
        self.free.values().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back_whole_in_every_order() {
        const K: usize = LEASE_ALIGN;
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut pieces = Pieces::new(8 * K);
            let taken = [pieces.take(1).unwrap(), pieces.take(K + 1).unwrap(), pieces.take(3 * K).unwrap()];
            assert_eq!(taken, [(0, K), (K, 2 * K), (3 * K, 3 * K)]);
            assert_eq!((pieces.take(3 * K), pieces.largest()), (None, 2 * K));
            for at in order {
                pieces.give(taken[at].0, taken[at].1);
            }
            assert_eq!(pieces.free, BTreeMap::from([(0, 8 * K)]), "{order:?}");
        }
        assert_eq!(Pieces::new(K).take(usize::MAX), None);
    }
}
