//! What one transfer is asked to do: which pages, in which direction, with which checksums, until when.
//!
//! Called by the transfer agent; read by every transport. Pure: it touches no memory of a region.
//! Bounds: `PAGES_MAX` pages of at most `PAGE_BYTES_MAX` each.

use std::{any::Any, borrow::Cow, fmt, ops::Range, time::Duration};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::{error::TransferError, grant::GrantToken, region::Region};

/// Pages of one batch at most.
pub const PAGES_MAX: usize = 65_536;
/// Bytes of one page at most.
pub const PAGE_BYTES_MAX: u32 = 256 << 20;

/// Which way the bytes go, seen from the side that posts the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the peer's region into the local one.
    Pull,
    /// From the local region into the peer's.
    Push,
}

/// One of a host's regions, counted in the order in which they were registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RegionId(pub u32);

/// Bytes that lie together on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page {
    /// Offset in the local region, bytes.
    pub local: u64,
    /// Offset in the peer's region, bytes.
    pub remote: u64,
    /// Bytes, at least 1.
    pub len: u32,
}

/// What the bytes of a batch must hash to. All are xxh3-64 with seed 0.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Checksums {
    /// Nothing is compared.
    #[default]
    None,
    /// One for each page, in the order of the batch.
    Pages(Vec<u64>),
    /// One for each `pages` pages in a row (a block whose layers are pages): [`fold`] of their page sums. The last
    /// group may be shorter.
    Groups {
        /// Pages of a group, at least 1.
        pages: u32,
        /// The sums, in the order of the batch.
        sums: Vec<u64>,
    },
}

/// The sum of one page.
#[must_use]
pub fn page_sum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// The sum of a group from the sums of its pages: xxh3-64 over them as little-endian bytes.
#[must_use]
pub fn fold(sums: &[u64]) -> u64 {
    let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    XxHash3_64::oneshot(&bytes)
}

/// Something to be dropped when nothing touches a batch's pages any more: pins, a lease, a permit.
pub struct Hold(#[allow(dead_code, reason = "it is only ever dropped")] Option<Box<dyn Any + Send>>);

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hold")
    }
}

/// One transfer.
#[derive(Debug)]
pub struct Batch {
    /// Which way.
    pub direction: Direction,
    /// The memory on this side.
    pub local: Region,
    /// The memory on the other side.
    pub remote: RegionId,
    /// What to move, in this order.
    pub pages: Vec<Page>,
    /// What it must hash to. A pull is checked here, a push by the peer, before either counts as done.
    pub checksums: Checksums,
    /// What the peer granted.
    pub grant: GrantToken,
    /// How long it may take from `post` on.
    pub deadline: Duration,
    /// Dropped at its very end.
    pub hold: Hold,
}

impl Batch {
    /// A batch without checksums that may take 2 s plus 1 s for each 64 MiB.
    #[must_use]
    pub fn new(direction: Direction, local: &Region, remote: RegionId, pages: Vec<Page>, grant: GrantToken) -> Self {
        let bytes: u64 = pages.iter().map(|page| u64::from(page.len)).sum();
        let deadline = Duration::from_secs(2) + Duration::from_millis(bytes.saturating_mul(1000) >> 26);
        Self {
            direction,
            local: local.clone(),
            remote,
            pages,
            checksums: Checksums::None,
            grant,
            deadline,
            hold: Hold(None),
        }
    }

    /// The same with checksums.
    #[must_use]
    pub fn with_checksums(self, checksums: Checksums) -> Self {
        Self { checksums, ..self }
    }

    /// The same with another deadline.
    #[must_use]
    pub fn within(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// The same, keeping `guard` until nothing touches its pages any more, however it ends.
    #[must_use]
    pub fn holding(self, guard: impl Any + Send) -> Self {
        Self { hold: Hold(Some(Box::new(guard))), ..self }
    }

    /// Bytes of all pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages.iter().map(|page| u64::from(page.len)).sum()
    }

    /// Whether its pages lie inside the local region and its numbers make sense.
    pub(crate) fn check(&self) -> Result<(), TransferError> {
        if self.pages.len() > PAGES_MAX {
            return Err(TransferError::Unsupported(format!("{} pages, at most {PAGES_MAX}", self.pages.len())));
        }
        let wrong = |page: &Page| {
            page.len == 0 || page.len > PAGE_BYTES_MAX || !self.local.holds(page.local, u64::from(page.len))
        };
        if let Some(page) = self.pages.iter().position(wrong) {
            return Err(TransferError::OutOfBounds { page });
        }
        let sums = match &self.checksums {
            Checksums::None => true,
            Checksums::Pages(sums) => sums.len() == self.pages.len(),
            Checksums::Groups { pages, sums } => *pages > 0 && sums.len() == self.pages.len().div_ceil(*pages as usize),
        };
        if sums { Ok(()) } else { Err(TransferError::Unsupported("checksums do not fit the pages".to_owned())) }
    }
}

/// Compares page sums, in the order of the pages, with what was promised.
#[derive(Debug)]
pub(crate) struct Verifier<'a> {
    promised: Cow<'a, Checksums>,
    pages: usize,
    seen: usize,
    /// Sums of the group that is not complete.
    open: Vec<u64>,
}

impl Verifier<'static> {
    /// The same as [`Verifier::new`], with sums of its own.
    pub(crate) fn owning(promised: Checksums, pages: usize) -> Self {
        Self { promised: Cow::Owned(promised), pages, seen: 0, open: Vec::new() }
    }
}

impl<'a> Verifier<'a> {
    /// For a batch of `pages` pages.
    pub(crate) fn new(promised: &'a Checksums, pages: usize) -> Self {
        Self { promised: Cow::Borrowed(promised), pages, seen: 0, open: Vec::new() }
    }

    /// Whether sums are wanted at all.
    pub(crate) fn wanted(&self) -> bool {
        *self.promised.as_ref() != Checksums::None
    }

    /// Takes the sum of the next page (any number if none is wanted) and says how many pages are good by now.
    pub(crate) fn next(&mut self, sum: u64) -> Result<usize, TransferError> {
        let page = self.seen;
        self.seen += 1;
        match self.promised.as_ref() {
            Checksums::None => Ok(self.seen),
            Checksums::Pages(sums) if sums.get(page) == Some(&sum) => Ok(self.seen),
            Checksums::Pages(_) => Err(TransferError::Checksum { page }),
            Checksums::Groups { pages, sums } => {
                let size = *pages as usize;
                self.open.push(sum);
                let group = page / size;
                if self.open.len() < size && self.seen < self.pages {
                    return Ok(group * size);
                }
                let good = sums.get(group) == Some(&fold(&self.open));
                self.open.clear();
                if good { Ok(self.seen) } else { Err(TransferError::Checksum { page: group * size }) }
            }
        }
    }
}

/// A part of a page list that is sent as one write: whole pages or a piece of a large one, about a megabyte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Pages that it touches.
    pub(crate) pages: Range<usize>,
    /// Bytes of its first page that went before; more than 0 only when it touches one page.
    pub(crate) skip: u32,
    /// Bytes.
    pub(crate) bytes: u32,
    /// Whether its last page ends with it.
    pub(crate) ends_page: bool,
}

const SEGMENT_BYTES: u32 = 1 << 20;
const SEGMENT_PAGES: usize = 256;

/// Cuts a list of page lengths. Both sides cut alike, so nothing about it crosses the wire.
pub(crate) fn segments(lengths: impl Fn(usize) -> u32, pages: usize) -> impl Iterator<Item = Segment> {
    let (mut at, mut skip) = (0, 0_u32);
    std::iter::from_fn(move || {
        if at >= pages {
            return None;
        }
        let left = lengths(at) - skip;
        if skip > 0 || left > SEGMENT_BYTES {
            let bytes = left.min(SEGMENT_BYTES);
            let piece = Segment { pages: at..at + 1, skip, bytes, ends_page: bytes == left };
            (at, skip) = if bytes == left { (at + 1, 0) } else { (at, skip + bytes) };
            return Some(piece);
        }
        let (first, mut bytes) = (at, 0);
        while at < pages && at - first < SEGMENT_PAGES && bytes + lengths(at).min(SEGMENT_BYTES + 1) <= SEGMENT_BYTES {
            bytes += lengths(at);
            at += 1;
        }
        Some(Segment { pages: first..at, skip: 0, bytes, ends_page: true })
    })
}
