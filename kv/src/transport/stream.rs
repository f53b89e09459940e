//! Shell: a list of pages as a stream of bytes on a socket, both ways.
//!
//! Called by the `tcp` session and by the serving side. Adjacent pages become one slice of a vectored call, so no byte
//! is copied in this process. Never: keeps an address beyond one call.

use std::{
    hash::Hasher,
    io::{IoSlice, IoSliceMut},
    os::fd::BorrowedFd,
    slice,
};

use twox_hash::XxHash3_64;

use super::{
    batch::{Checksums, Segment, Verifier, page_sum, segments},
    error::TransferError,
    region::Region,
    wait::{Bounds, receive, receive_all, send_all},
};

/// Pages of one region, in the order of the stream: (offset, bytes).
pub(crate) type PageList<'a> = &'a [(u64, u32)];

/// The segments of a page list.
pub(crate) fn cut(pages: PageList<'_>) -> impl Iterator<Item = Segment> + '_ {
    segments(|page| pages[page].1, pages.len())
}

/// Where a segment's bytes lie in memory, adjacent pages joined.
fn runs(region: &Region, pages: PageList<'_>, segment: &Segment) -> Result<Vec<(*mut u8, usize)>, TransferError> {
    let mut runs: Vec<(*mut u8, usize)> = Vec::with_capacity(segment.pages.len());
    for page in segment.pages.clone() {
        let (at, len) = pages[page];
        let whole = segment.pages.len() > 1 || (segment.skip == 0 && segment.bytes == len);
        let (at, len) = if whole { (at, len) } else { (at + u64::from(segment.skip), segment.bytes) };
        let start = region.at(at, u64::from(len)).ok_or(TransferError::OutOfBounds { page })?;
        match runs.last_mut() {
            Some((last, bytes)) if last.wrapping_add(*bytes) == start => *bytes += len as usize,
            _ => runs.push((start, len as usize)),
        }
    }
    Ok(runs)
}

/// Sends one segment after `head`.
pub(crate) fn send_segment(
    fd: BorrowedFd<'_>,
    head: &[u8],
    (region, pages): (&Region, PageList<'_>),
    segment: &Segment,
    bounds: &impl Bounds,
) -> Result<(), TransferError> {
    let runs = runs(region, pages, segment)?;
    let mut slices = Vec::with_capacity(runs.len() + 1);
    if !head.is_empty() {
        slices.push(IoSlice::new(head));
    }
    for (start, bytes) in runs {
        // SAFETY: the range was checked against the mapping, which `region` holds. The kernel reads it; if another
        // process writes it meanwhile, the receiver's checksum says so.
        slices.push(IoSlice::new(unsafe { slice::from_raw_parts(start, bytes) }));
    }
    send_all(fd, &mut slices, bounds)
}

/// The receiving end of a stream of pages.
pub(crate) struct Intake<'a> {
    region: &'a Region,
    pages: PageList<'a>,
    verifier: Verifier<'a>,
    /// The sum of a page that spans segments.
    open: Option<XxHash3_64>,
    good: usize,
}

impl<'a> Intake<'a> {
    /// For pages that lie inside `region`.
    pub(crate) fn new(region: &'a Region, pages: PageList<'a>, checksums: &'a Checksums) -> Self {
        Self { region, pages, verifier: Verifier::new(checksums, pages.len()), open: None, good: 0 }
    }

    /// Receives one segment into place and compares the pages that end in it. Returns the pages that are good by now.
    pub(crate) fn take(
        &mut self,
        fd: BorrowedFd<'_>,
        segment: &Segment,
        bounds: &impl Bounds,
    ) -> Result<usize, TransferError> {
        let runs = runs(self.region, self.pages, segment)?;
        // SAFETY: the ranges were checked against the mapping, which `region` holds; they are joined only where they
        // follow each other, and the kernel alone writes them during the call.
        let slice = |(start, bytes)| IoSliceMut::new(unsafe { slice::from_raw_parts_mut(start, bytes) });
        receive_all(fd, &mut runs.into_iter().map(slice).collect::<Vec<_>>(), bounds)?;
        self.compare(segment)
    }

    /// Takes a segment that lies in place and says how many pages, from the first on, are good by now.
    pub(crate) fn compare(&mut self, segment: &Segment) -> Result<usize, TransferError> {
        if segment.skip == 0 && segment.ends_page {
            for page in segment.pages.clone() {
                let (at, len) = self.pages[page];
                let sum = if self.verifier.wanted() { page_sum(self.bytes(page, at, len)?) } else { 0 };
                self.good = self.verifier.next(sum)?;
            }
            return Ok(self.good);
        }
        let page = segment.pages.start;
        if self.verifier.wanted() {
            let bytes = self.bytes(page, self.pages[page].0 + u64::from(segment.skip), segment.bytes)?;
            self.open.get_or_insert_with(XxHash3_64::new).write(bytes);
        }
        if segment.ends_page {
            let sum = self.open.take().map_or(0, |open| open.finish());
            self.good = self.verifier.next(sum)?;
        }
        Ok(self.good)
    }

    fn bytes(&self, page: usize, at: u64, len: u32) -> Result<&'a [u8], TransferError> {
        let start = self.region.at(at, u64::from(len)).ok_or(TransferError::OutOfBounds { page })?;
        // SAFETY: the range was checked against the mapping, which `region` holds for as long as the slice lives.
        Ok(unsafe { slice::from_raw_parts(start, len as usize) })
    }
}

/// Receives and forgets what comes until the peer closes the connection.
pub(crate) fn drain(fd: BorrowedFd<'_>, bounds: &impl Bounds) -> Result<(), TransferError> {
    let mut scratch = vec![0; 64 << 10];
    loop {
        receive(fd, &mut scratch[..1], bounds)?;
        while rustix::io::read(fd, &mut scratch[..]).is_ok_and(|got| got == 64 << 10) {
            bounds.halted()?;
        }
    }
}
