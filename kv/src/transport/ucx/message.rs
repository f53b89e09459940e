//! Shell: pages as messages, between processes of one machine: the owner of the bytes sends, the other side puts them in
//! place and hashes them on the way.
//!
//! Called by both sides of a connection. Where a lane has no hardware behind it, UCX makes messages of a one-sided operation
//! too, and the bytes are read once more for their hash; here they go from UCX's own memory into place and into the hash at
//! once. Never: takes a message that is not the one expected next. Bounds: `MESSAGE_BYTES` a message, `WINDOW` under way.

use std::{cell::RefCell, collections::VecDeque, hash::Hasher};

use twox_hash::XxHash3_64;
use ucx_sys::{Endpoint, Fault, Request};

use super::{
    super::{
        batch::{Checksums, Verifier},
        copy,
        error::{Refusal, TransferError},
        region::Region,
        stream::PageList,
    },
    WINDOW, failed,
};

/// Bytes of a page in one message at most. With its header a message fits one piece of UCX's shared memory
/// ([`super::PIECE_BYTES`]), so that it is not put together in a third place.
pub(super) const MESSAGE_BYTES: u32 = 16 << 10;

/// The headers: each message has its number, from 0 again after 255, four times as many as can be under way.
static NUMBERS: [u8; 256] = {
    let (mut numbers, mut at) = ([0; 256], 0);
    while at < 256 {
        numbers[at] = at as u8;
        at += 1;
    }
    numbers
};

/// A part of a page that is one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// Index of the page.
    pub(super) page: usize,
    /// Where it begins in the region.
    pub(super) at: u64,
    /// Bytes.
    pub(super) len: u32,
    /// Whether the page begins and ends with it.
    pub(super) ends: (bool, bool),
    /// Its header.
    pub(super) header: &'static [u8],
}

/// Cuts pages into messages. Both sides cut alike.
#[derive(Debug, Default)]
pub(super) struct Cut {
    page: usize,
    skip: u32,
    number: u8,
}

impl Cut {
    /// The next message.
    pub(super) fn next(&mut self, pages: PageList<'_>) -> Option<Part> {
        let (page, skip) = (self.page, self.skip);
        let (at, bytes) = *pages.get(page)?;
        let len = (bytes - skip).min(MESSAGE_BYTES);
        let ends = (skip == 0, skip + len == bytes);
        let header = &NUMBERS[usize::from(self.number)..=usize::from(self.number)];
        (self.page, self.skip) = if ends.1 { (page + 1, 0) } else { (page, skip + len) };
        self.number = self.number.wrapping_add(1);
        // An offset that wraps is outside of every region.
        Some(Part { page, at: at.saturating_add(u64::from(skip)), len, ends, header })
    }
}

/// Sends all pages. `wait` is called again and again: with true when nothing can go on before the peer does something.
pub(super) fn send_pages(
    endpoint: &Endpoint,
    region: &Region,
    pages: PageList<'_>,
    mut wait: impl FnMut(bool) -> Result<(), TransferError>,
) -> Result<(), TransferError> {
    let mut cut = Cut::default();
    let mut under_way: VecDeque<Request> = VecDeque::with_capacity(WINDOW);
    loop {
        while under_way.len() < WINDOW
            && let Some(part) = cut.next(pages)
        {
            let request = send(endpoint, region, &part)?;
            if !request.over().map_err(failed)? {
                under_way.push_back(request);
            }
            wait(false)?;
        }
        let Some(request) = under_way.front() else { return Ok(()) };
        if request.over().map_err(failed)? {
            under_way.pop_front();
        } else {
            wait(true)?;
        }
    }
}

fn send(endpoint: &Endpoint, region: &Region, part: &Part) -> Result<Request, TransferError> {
    let from = region.at(part.at, u64::from(part.len)).ok_or(TransferError::OutOfBounds { page: part.page })?;
    // SAFETY: the range lies in the region, which the caller holds until all requests are over or the worker is gone.
    let sent: Result<Request, Fault> = unsafe { endpoint.send(part.header, from, part.len as usize) };
    sent.map_err(failed)
}

/// What a side expects.
struct Expected {
    region: Region,
    pages: Vec<(u64, u32)>,
    verifier: Verifier<'static>,
    cut: Cut,
    /// The sum of a page that is not complete.
    open: Option<XxHash3_64>,
    good: usize,
    wrong: Option<TransferError>,
}

/// Where messages go. Without pages that are expected they are forgotten.
#[derive(Default)]
pub(super) struct Inbox(RefCell<Option<Expected>>);

impl Inbox {
    /// Expects these pages of a region from now on.
    pub(super) fn expect(&self, region: &Region, pages: Vec<(u64, u32)>, checksums: Checksums) {
        let verifier = Verifier::owning(checksums, pages.len());
        let (region, cut) = (region.clone(), Cut::default());
        *self.0.borrow_mut() = Some(Expected { region, pages, verifier, cut, open: None, good: 0, wrong: None });
    }

    /// Expects nothing: no page is touched any more.
    pub(super) fn close(&self) {
        *self.0.borrow_mut() = None;
    }

    /// Takes one message.
    pub(super) fn take(&self, header: &[u8], bytes: &[u8]) {
        if let Some(expected) = &mut *self.0.borrow_mut()
            && expected.wrong.is_none()
        {
            expected.wrong = expected.take(header, bytes).err();
        }
    }

    /// Pages from the first on that are in place and good, and whether those are all.
    pub(super) fn good(&self) -> Result<(usize, bool), TransferError> {
        let expected = self.0.borrow();
        let Some(expected) = &*expected else { return Ok((0, true)) };
        copy::fence();
        match &expected.wrong {
            Some(error) => Err(error.clone()),
            None => Ok((expected.good, expected.cut.page == expected.pages.len())),
        }
    }
}

impl Expected {
    fn take(&mut self, header: &[u8], bytes: &[u8]) -> Result<(), TransferError> {
        let part = self.cut.next(&self.pages).ok_or(TransferError::Refused(Refusal::Malformed))?;
        if header != part.header || bytes.len() != part.len as usize {
            return Err(Refusal::Malformed.into());
        }
        let to = self.region.at(part.at, u64::from(part.len)).ok_or(TransferError::OutOfBounds { page: part.page })?;
        let (wanted, whole) = (self.verifier.wanted(), part.ends == (true, true));
        if wanted && !whole {
            self.open.get_or_insert_with(XxHash3_64::new).write(bytes);
        }
        // SAFETY: the range was checked against the mapping, which `region` holds; the bytes are another memory's.
        let sum = unsafe { copy::page(bytes.as_ptr(), to, bytes.len(), wanted && whole) };
        if part.ends.1 {
            let sum = self.open.take().map_or(sum, |open| open.finish());
            self.good = self.verifier.next(sum)?;
        }
        Ok(())
    }
}
