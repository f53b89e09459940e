//! Shell: copies one page and hashes it on the way.
//!
//! Called by `mem` and `shm`. On x86-64 with AVX2 the source is read once: each 32 bytes go from their register both into
//! the hash and to memory, past the cache (non-temporal stores), which spares the destination's lines from being read
//! first. Elsewhere, and for short or oddly placed pages, it is a copy and then a hash.
//! Never: looks beyond the page.

#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ptr;

use super::batch::page_sum;

/// From here on stores go past the cache. Less is used again soon, more likely than not.
#[cfg(target_arch = "x86_64")]
const STREAM_BYTES: usize = 4096;

/// Copies `len` bytes and returns their xxh3-64 if `sum`, else 0. Ranges may overlap. [`fence`] must follow before another
/// thread is told.
///
/// # Safety
/// `from` has `len` readable bytes and `to` has `len` writable ones.
pub(crate) unsafe fn page(from: *const u8, to: *mut u8, len: usize, sum: bool) -> u64 {
    let apart = (from as usize).abs_diff(to as usize) >= len;
    #[cfg(target_arch = "x86_64")]
    if apart && len >= STREAM_BYTES && (to as usize).is_multiple_of(32) && std::is_x86_feature_detected!("avx2") {
        // SAFETY: the caller's promise; the ranges are apart, `to` is aligned and the CPU has AVX2, as checked above.
        return unsafe { if sum { x86::copy::<true>(from, to, len) } else { x86::copy::<false>(from, to, len) } };
    }
    if apart {
        // SAFETY: the caller's promise, and the ranges do not overlap.
        unsafe { ptr::copy_nonoverlapping(from, to, len) };
    } else {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy(from, to, len) };
    }
    // SAFETY: the caller's promise. Others may write these bytes meanwhile; then the sum is of no use, and no more.
    if sum { page_sum(unsafe { std::slice::from_raw_parts(to, len) }) } else { 0 }
}

/// Makes what [`page`] stored visible before what is stored next.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
