//! Which one-sided operations a batch becomes: pages that touch on both sides are one, large pages are several.
//!
//! Called by the wire. Pure. Bounds: `PIECE_BYTES` an operation, so that a deadline, a cancellation or an ended lease is
//! never far behind.

use super::super::batch::{Page, Segment};

/// Bytes of one operation at most.
const PIECE_BYTES: u32 = 1 << 20;

fn follows(last: &Page, next: &Page) -> bool {
    let len = u64::from(last.len);
    last.local.checked_add(len) == Some(next.local) && last.remote.checked_add(len) == Some(next.remote)
}

/// Cuts a batch, in its order. The bytes of a piece lie together on both sides.
pub(super) fn pieces(pages: &[Page]) -> impl Iterator<Item = Segment> + '_ {
    let (mut at, mut skip) = (0, 0_u32);
    std::iter::from_fn(move || {
        let page = pages.get(at)?;
        let left = page.len - skip;
        if skip > 0 || left > PIECE_BYTES {
            let bytes = left.min(PIECE_BYTES);
            let piece = Segment { pages: at..at + 1, skip, bytes, ends_page: bytes == left };
            (at, skip) = if bytes == left { (at + 1, 0) } else { (at, skip + bytes) };
            return Some(piece);
        }
        let (first, mut bytes) = (at, page.len);
        at += 1;
        while let Some(next) = pages.get(at)
            && follows(&pages[at - 1], next)
            && next.len <= PIECE_BYTES - bytes
        {
            bytes += next.len;
            at += 1;
        }
        Some(Segment { pages: first..at, skip: 0, bytes, ends_page: true })
    })
}
