//! Which bytes go where: spans against the memories they name, and how a list is cut for the kernel. Pure.

use crate::error::CudaError;

/// Pages of one call at most.
pub const GPU_PAGES_MAX: usize = 65_536;
/// Pages begin and end at multiples of this many bytes.
pub const PAGE_ALIGN: u64 = 16;
/// The shortest page that a GPU hashes, bytes: below it the format has other rules, and the host is quicker.
pub const SUM_BYTES_MIN: u64 = 256;

/// A memory that a GPU can address: where it begins, and its length in bytes. Made by the memories of this crate only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub(crate) base: u64,
    pub(crate) len: u64,
}

impl Place {
    /// Bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a memory is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn at(&self, offset: u64, len: u64) -> Option<u64> {
        offset.checked_add(len).filter(|end| *end <= self.len).map(|_| self.base + offset)
    }
}

/// Bytes that lie together on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Offset in the memory that is read, bytes.
    pub from: u64,
    /// Offset in the memory that is written, bytes.
    pub to: u64,
    /// Bytes.
    pub len: u64,
}

/// One page as the kernel reads it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct KernelPage {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: u64,
}

// SAFETY: three u64 in C layout, as `struct Page` in pages.cu; every bit pattern is valid and nothing is padding.
unsafe impl cudarc::driver::DeviceRepr for KernelPage {}
// SAFETY: as above.
unsafe impl cudarc::driver::ValidAsZeroBits for KernelPage {}

/// The list for the kernel, neighbours joined, or what is wrong with the first bad span.
pub(crate) fn list(from: Place, to: Place, spans: &[Span]) -> Result<Vec<KernelPage>, CudaError> {
    bounded(spans)?;
    let mut list: Vec<KernelPage> = Vec::with_capacity(spans.len());
    for (page, span) in spans.iter().enumerate() {
        let ends = (from.at(span.from, span.len), to.at(span.to, span.len));
        let (Some(begin), Some(target)) = ends else { return Err(CudaError::OutOfBounds { page }) };
        if span.len == 0 || (begin | target | span.len) % PAGE_ALIGN != 0 {
            return Err(CudaError::Misaligned { page });
        }
        match list.last_mut() {
            Some(last) if last.from + last.bytes == begin && last.to + last.bytes == target => last.bytes += span.len,
            _ => list.push(KernelPage { from: begin, to: target, bytes: span.len }),
        }
    }
    Ok(list)
}

/// The list for hashing: one page for each span, in order; `to` is not looked at.
pub(crate) fn hashed(memory: Place, spans: &[Span]) -> Result<Vec<KernelPage>, CudaError> {
    bounded(spans)?;
    let page = |(page, span): (usize, &Span)| {
        let begin = memory.at(span.from, span.len).ok_or(CudaError::OutOfBounds { page })?;
        if span.len < SUM_BYTES_MIN || (begin | span.len) % PAGE_ALIGN != 0 {
            return Err(CudaError::Misaligned { page });
        }
        Ok(KernelPage { from: begin, to: begin, bytes: span.len })
    };
    spans.iter().enumerate().map(page).collect()
}

fn bounded(spans: &[Span]) -> Result<(), CudaError> {
    if spans.len() > GPU_PAGES_MAX { Err(CudaError::TooMany { pages: spans.len() }) } else { Ok(()) }
}

/// Thread blocks for each page, so that a few large pages fill a GPU as well as many small ones: at least `wanted` in
/// all, none with less than 4 KiB, which is one round of a thread block.
pub(crate) fn slices(list: &[KernelPage], wanted: u32) -> u32 {
    let largest = list.iter().map(|page| page.bytes).max().unwrap_or(0);
    let useful = u32::try_from(largest.div_ceil(4096)).unwrap_or(u32::MAX).max(1);
    wanted.div_ceil(u32::try_from(list.len()).unwrap_or(u32::MAX).max(1)).clamp(1, useful)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: Place = Place { base: 0x1_0000, len: 4096 };
    const TO: Place = Place { base: 0x9_0000, len: 8192 };

    fn span(from: u64, to: u64, len: u64) -> Span {
        Span { from, to, len }
    }

    #[test]
    fn neighbours_on_both_sides_become_one_page() {
        let list = list(FROM, TO, &[span(0, 512, 512), span(512, 1024, 256), span(768, 0, 16)]).unwrap();
        let joined = KernelPage { from: 0x1_0000, to: 0x9_0000 + 512, bytes: 768 };
        assert_eq!(list, [joined, KernelPage { from: 0x1_0000 + 768, to: 0x9_0000, bytes: 16 }]);
    }

    #[test]
    fn nothing_outside_either_memory_is_named() {
        for bad in [span(4096, 0, 16), span(4080, 0, 32), span(0, 8192, 16), span(u64::MAX - 15, 0, 32)] {
            assert_eq!(list(FROM, TO, &[span(0, 0, 16), bad]), Err(CudaError::OutOfBounds { page: 1 }), "{bad:?}");
        }
        assert_eq!(hashed(FROM, &[span(4000, 0, 256)]), Err(CudaError::OutOfBounds { page: 0 }));
    }

    #[test]
    fn crooked_and_empty_pages_are_refused_by_number() {
        for bad in [span(8, 0, 16), span(0, 4, 16), span(0, 0, 24), span(0, 0, 0)] {
            assert_eq!(list(FROM, TO, &[bad]), Err(CudaError::Misaligned { page: 0 }), "{bad:?}");
        }
        assert_eq!(hashed(FROM, &[span(0, 0, 240)]), Err(CudaError::Misaligned { page: 0 }));
        let many = vec![span(0, 0, 16); GPU_PAGES_MAX + 1];
        assert_eq!(list(FROM, TO, &many), Err(CudaError::TooMany { pages: GPU_PAGES_MAX + 1 }));
    }

    #[test]
    fn few_large_pages_are_cut_and_small_ones_are_not() {
        let pages = |bytes, count| vec![KernelPage { from: 0, to: 0, bytes }; count];
        assert_eq!(slices(&pages(64 << 20, 1), 1024), 1024);
        assert_eq!(slices(&pages(16 << 10, 2000), 1024), 1);
        assert_eq!(slices(&pages(16 << 10, 10), 1024), 4);
        assert_eq!(slices(&[], 1024), 1);
    }
}
