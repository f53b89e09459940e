//! What peers may touch: grants, and the check of every offset and length against them.
//!
//! Called by the transfer agent (issue, renew, revoke) and by every serving path, whatever the transport.
//! Pure but for its lock: time is an argument. Bounds: `GRANTS_MAX` grants.

use std::{
    collections::HashMap,
    fmt,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    batch::{Direction, RegionId},
    error::Refusal,
};

/// Grants of one host at most, those included that ended while a peer still used them.
pub const GRANTS_MAX: usize = 65_536;

/// 128 random bits that stand for a grant. Whoever has them has the right: they travel over authenticated links only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GrantToken(pub [u8; 16]);

impl fmt::Debug for GrantToken {
    /// Shows a fingerprint, never the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GrantToken(#{:08x})", super::batch::page_sum(&self.0) as u32)
    }
}

/// The right of one peer to move some bytes until some time.
#[derive(Debug, Clone)]
pub struct Grant {
    /// Names it on the wire.
    pub token: GrantToken,
    /// Seen from the peer: `Pull` lets it read, `Push` lets it write.
    pub direction: Direction,
    /// The region.
    pub region: RegionId,
    /// Byte ranges of the region, in any order.
    pub ranges: Vec<Range<u64>>,
    /// When the lease ends.
    pub expires: Instant,
}

#[derive(Debug)]
struct Entry {
    direction: Direction,
    region: RegionId,
    /// Sorted, joined where they touch, not empty.
    ranges: Vec<Range<u64>>,
    expires: Instant,
    uses: usize,
    revoked: bool,
}

/// The grants of one host.
#[derive(Debug, Default)]
pub struct Grants {
    table: Mutex<HashMap<GrantToken, Entry>>,
}

/// Sorts ranges and joins those that touch or overlap.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| range.start < range.end);
    ranges.sort_by_key(|range| range.start);
    let mut out: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

impl Entry {
    fn covers(&self, at: u64, len: u64) -> bool {
        let Some(end) = at.checked_add(len) else { return false };
        let after = self.ranges.partition_point(|range| range.start <= at);
        after > 0 && len > 0 && end <= self.ranges[after - 1].end
    }

    fn alive(&self, now: Instant) -> Result<(), Refusal> {
        match (self.revoked, self.expires <= now) {
            (true, _) => Err(Refusal::UnknownGrant),
            (false, true) => Err(Refusal::Expired),
            (false, false) => Ok(()),
        }
    }
}

impl Grants {
    /// A table without grants.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn table(&self) -> MutexGuard<'_, HashMap<GrantToken, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a grant valid; `Busy` when the table is full, also when its token is taken.
    pub fn issue(&self, grant: Grant) -> Result<(), Refusal> {
        let mut table = self.table();
        if table.len() >= GRANTS_MAX || table.contains_key(&grant.token) {
            return Err(Refusal::Busy);
        }
        let Grant { token, direction, region, ranges, expires } = grant;
        table.insert(token, Entry { direction, region, ranges: joined(ranges), expires, uses: 0, revoked: false });
        Ok(())
    }

    /// Moves the end of a lease; false when it has ended already or never was.
    pub fn renew(&self, token: GrantToken, expires: Instant, now: Instant) -> bool {
        match self.table().get_mut(&token) {
            Some(entry) if entry.alive(now).is_ok() => {
                entry.expires = expires;
                true
            }
            _ => false,
        }
    }

    /// Ends a grant. Returns the transfers that still use it: until [`Grants::in_flight`] says 0, its pages may still
    /// be read (pull) or written (push) by the peer and must not be reused.
    pub fn revoke(&self, token: GrantToken) -> usize {
        let mut table = self.table();
        let Some(entry) = table.get_mut(&token) else { return 0 };
        entry.revoked = true;
        let uses = entry.uses;
        if uses == 0 {
            table.remove(&token);
        }
        uses
    }

    /// Transfers that use a grant now.
    #[must_use]
    pub fn in_flight(&self, token: GrantToken) -> usize {
        self.table().get(&token).map_or(0, |entry| entry.uses)
    }

    /// Removes grants that expired and that nobody uses; returns their tokens.
    pub fn sweep(&self, now: Instant) -> Vec<GrantToken> {
        let mut table = self.table();
        let over = |entry: &Entry| entry.uses == 0 && entry.expires <= now;
        let gone: Vec<GrantToken> = table.iter().filter(|(_, entry)| over(entry)).map(|(token, _)| *token).collect();
        for token in &gone {
            table.remove(token);
        }
        gone
    }

    /// Grants in the table.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a count for gauges")]
    pub fn len(&self) -> usize {
        self.table().len()
    }

    /// Checks a request against its grant and notes one use more until the guard is dropped.
    ///
    /// `pages` are (offset, length) in the region.
    pub(crate) fn admit(
        self: &Arc<Self>,
        ask: Ask,
        pages: impl IntoIterator<Item = (u64, u32)>,
        now: Instant,
    ) -> Result<Use, Refusal> {
        let mut table = self.table();
        let entry = table.get_mut(&ask.token).ok_or(Refusal::UnknownGrant)?;
        entry.alive(now)?;
        if entry.direction != ask.direction {
            return Err(Refusal::WrongDirection);
        }
        if entry.region != ask.region {
            return Err(Refusal::NoRegion);
        }
        let outside = pages.into_iter().position(|(at, len)| !entry.covers(at, u64::from(len)));
        if let Some(page) = outside {
            return Err(Refusal::NotGranted { page: u32::try_from(page).unwrap_or(u32::MAX) });
        }
        entry.uses += 1;
        Ok(Use { grants: Arc::clone(self), token: ask.token })
    }
}

/// What a request names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask {
    pub(crate) token: GrantToken,
    pub(crate) direction: Direction,
    pub(crate) region: RegionId,
}

/// One transfer that uses a grant.
#[derive(Debug)]
pub(crate) struct Use {
    grants: Arc<Grants>,
    token: GrantToken,
}

impl Use {
    /// Whether the lease still runs.
    pub(crate) fn alive(&self, now: Instant) -> Result<(), Refusal> {
        self.grants.table().get(&self.token).ok_or(Refusal::UnknownGrant)?.alive(now)
    }

    /// How much of the lease is left, as far as is known now: it may be renewed or revoked.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        let table = self.grants.table();
        table.get(&self.token).map_or(Duration::ZERO, |entry| entry.expires.saturating_duration_since(now))
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut table = self.grants.table();
        let Some(entry) = table.get_mut(&self.token) else { return };
        entry.uses = entry.uses.saturating_sub(1);
        if entry.uses == 0 && entry.revoked {
            table.remove(&self.token);
        }
    }
}
