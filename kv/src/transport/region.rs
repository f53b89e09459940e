//! Shell: memory that transfers may touch.
//!
//! Owns the mapping and its file descriptor. Called by engines for their KV memory and by every transport.
//!
//! Who may touch which bytes is not decided here: the block pool's states decide. A transfer reads only pages of
//! blocks that are pinned for it and writes only pages of blocks that are being filled for it; an engine writes only
//! blocks that it fills. A page that somebody else writes meanwhile (another process may hold a mapping) gives torn
//! bytes and nothing worse: bytes are data here, never lengths or addresses, and checksums are compared before use.

use std::{
    ffi::c_void,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr,
    sync::Arc,
};

use rustix::{fs, mm};

use super::error::TransferError;

/// A handle of one mapping; clones share it, and the last one unmaps it.
#[derive(Debug, Clone)]
pub struct Region {
    map: Arc<Mapping>,
}

#[derive(Debug)]
struct Mapping {
    base: *mut u8,
    len: usize,
    writable: bool,
    fd: Option<OwnedFd>,
}

// SAFETY: it is an address, a length and a descriptor; what keeps accesses apart is stated in the module's header.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are those of a mapping made here, and no handle of it is left.
        if let Err(error) = unsafe { mm::munmap(self.base.cast::<c_void>(), self.len) } {
            debug_assert!(false, "munmap: {error}");
        }
    }
}

impl Region {
    /// `len` bytes (at least 1) of zeroes that a peer on this host can map: a memfd, sealed so that no holder of it can
    /// shrink it under the others. Pages come into being when they are first touched.
    pub fn shared(name: &str, len: usize) -> Result<Self, TransferError> {
        let fd = fs::memfd_create(name, fs::MemfdFlags::CLOEXEC | fs::MemfdFlags::ALLOW_SEALING)?;
        fs::ftruncate(&fd, len.max(1) as u64)?;
        fs::fcntl_add_seals(&fd, fs::SealFlags::SHRINK | fs::SealFlags::GROW | fs::SealFlags::SEAL)?;
        Self::map(fd, len.max(1), true)
    }

    /// `len` bytes (at least 1) of zeroes of this process alone, on huge pages where the kernel gives them. The
    /// transport `shm` cannot reach them.
    pub fn private(len: usize) -> Result<Self, TransferError> {
        let len = len.max(1);
        let (protection, flags) = (mm::ProtFlags::READ | mm::ProtFlags::WRITE, mm::MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { mm::mmap_anonymous(ptr::null_mut(), len, protection, flags)? };
        // SAFETY: advice about the mapping made above; a kernel without huge pages says no, and that is all.
        let _without_huge_pages = unsafe { mm::madvise(base, len, mm::Advice::LinuxHugepage) };
        Ok(Self { map: Arc::new(Mapping { base: base.cast(), len, writable: true, fd: None }) })
    }

    /// A peer's memory by its descriptor, which must be sealed against shrinking.
    pub(crate) fn of_peer(fd: OwnedFd, writable: bool) -> Result<Self, TransferError> {
        let sealed = fs::fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(fs::SealFlags::SHRINK));
        match usize::try_from(fs::fstat(&fd)?.st_size) {
            Ok(len) if sealed && len > 0 => Self::map(fd, len, writable),
            _ => Err(TransferError::Unsupported("the peer's memory is empty or not sealed".to_owned())),
        }
    }

    fn map(fd: OwnedFd, len: usize, writable: bool) -> Result<Self, TransferError> {
        let protection = if writable { mm::ProtFlags::READ | mm::ProtFlags::WRITE } else { mm::ProtFlags::READ };
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { mm::mmap(ptr::null_mut(), len, protection, mm::MapFlags::SHARED, &fd, 0)? };
        // SAFETY: advice about the mapping made above; where shared memory has no huge pages, it changes nothing.
        let _without_huge_pages = unsafe { mm::madvise(base, len, mm::Advice::LinuxHugepage) };
        Ok(Self { map: Arc::new(Mapping { base: base.cast(), len, writable, fd: Some(fd) }) })
    }

    /// Makes every page of it present now, so that no transfer waits for the kernel to find one.
    pub fn populate(&self) -> Result<(), TransferError> {
        let advice = if self.map.writable { mm::Advice::LinuxPopulateWrite } else { mm::Advice::LinuxPopulateRead };
        // SAFETY: advice about a mapping that `self` holds; it changes no byte.
        unsafe { mm::madvise(self.map.base.cast::<c_void>(), self.map.len, advice)? };
        Ok(())
    }

    /// Bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.map.len
    }

    /// The memfd, if peers on this host can map it.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.map.fd.as_ref().map(AsFd::as_fd)
    }

    /// A second descriptor of the memfd, for reading only unless `writable`.
    pub(crate) fn share(&self, writable: bool) -> Result<OwnedFd, TransferError> {
        let Some(fd) = self.fd() else {
            return Err(TransferError::Unsupported("the region is not shared memory".to_owned()));
        };
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let access = if writable { fs::OFlags::RDWR } else { fs::OFlags::RDONLY };
        Ok(fs::open(path, access | fs::OFlags::CLOEXEC, fs::Mode::empty())?)
    }

    /// The first byte. It stays where it is as long as any handle lives. For reads and writes through it the rules in
    /// the module's header hold.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.map.base
    }

    /// Whether both handles are of one mapping.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.map, &other.map)
    }

    /// Whether `len` bytes from `at` on lie inside.
    #[must_use]
    pub fn holds(&self, at: u64, len: u64) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.map.len as u64)
    }

    /// The address of `len` bytes from `at` on, or `None` when they do not all lie inside.
    #[must_use]
    pub fn at(&self, at: u64, len: u64) -> Option<*mut u8> {
        // `at` is below `len()`, which is a usize.
        self.holds(at, len).then(|| self.map.base.wrapping_add(at as usize))
    }

    /// Copies from the region. `None`, and nothing copied, when the range does not lie inside.
    #[must_use]
    pub fn read(&self, at: u64, into: &mut [u8]) -> Option<()> {
        let from = self.at(at, into.len() as u64)?;
        // SAFETY: `from` has `into.len()` readable bytes; `into` is the caller's alone and cannot overlap a mapping that
        // is handed out only as a raw pointer.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Some(())
    }

    /// Copies into the region. `None`, and nothing copied, when the range does not lie inside or the region is a peer's
    /// that may only be read.
    #[must_use]
    pub fn write(&self, at: u64, from: &[u8]) -> Option<()> {
        let to = self.at(at, from.len() as u64).filter(|_| self.map.writable)?;
        // SAFETY: `to` has `from.len()` writable bytes and does not overlap `from`, as in `read`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Some(())
    }
}
