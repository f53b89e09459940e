//! Asks the processor for a line of memory ahead of its use.
//!
//! Called where many places are known before the first is read: their waits overlap.

/// A hint; changes nothing.
#[inline]
pub(super) fn prefetch<T>(of: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the address is that of a live value, and a prefetch neither reads nor writes as far as the program sees.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(of).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _: &T = of;
}
