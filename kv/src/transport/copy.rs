//! Shell: copies one page and hashes it on the way.
//!
//! Called by `mem` and `shm`. Never: looks beyond the page.

use std::ptr;

use super::batch::page_sum;

/// Copies `len` bytes and returns their xxh3-64 if `sum`, else 0. Ranges may overlap.
///
/// # Safety
/// `from` has `len` readable bytes and `to` has `len` writable ones.
pub(crate) unsafe fn page(from: *const u8, to: *mut u8, len: usize, sum: bool) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy(from, to, len) };
    // SAFETY: the caller's promise. Others may write these bytes meanwhile; then the sum is of no use, and no more.
    if sum { page_sum(unsafe { std::slice::from_raw_parts(to, len) }) } else { 0 }
}
