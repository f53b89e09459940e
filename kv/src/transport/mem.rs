//! Shell: the transport between two hosts of one process.
//!
//! Called by the fabric; calls the peer's gate and copies. Never: goes around a grant, though it could.

use std::{
    sync::{Arc, Weak},
    time::Instant,
};

use super::{
    Transport,
    batch::{Batch, Direction, RegionId, Verifier},
    copy,
    descriptor::{Descriptor, Offer, TransportKind},
    error::TransferError,
    grant::Ask,
    host::Host,
    region::Region,
    session::{Session, Wire},
    transfer::Progress,
};

/// Pages between two looks at deadline, cancellation and lease.
const LOOK_EVERY: usize = 16;

/// Reaches hosts of this process.
#[derive(Debug)]
pub struct Mem;

impl Transport for Mem {
    fn kind(&self) -> TransportKind {
        TransportKind::Mem
    }

    fn register(&self, _: RegionId, _: &Region) -> Result<(), TransferError> {
        Ok(())
    }

    fn offer(&self, _: RegionId) -> Option<Offer> {
        Some(Offer { kind: TransportKind::Mem, address: String::new() })
    }

    fn connect(&self, peer: &Descriptor) -> Result<Session, TransferError> {
        let host = Host::find(peer.host);
        let host = host.ok_or_else(|| TransferError::Unreachable("the peer is another process".to_owned()))?;
        Session::start(TransportKind::Mem, peer.host, MemWire { host: Arc::downgrade(&host) })
    }
}

struct MemWire {
    host: Weak<Host>,
}

impl Wire for MemWire {
    fn run(&mut self, batch: &Batch, progress: &Progress) -> Result<(), TransferError> {
        let host = self.host.upgrade().filter(|host| !host.stop.stopped()).ok_or(TransferError::PeerGone)?;
        let pages: Vec<(u64, u32)> = batch.pages.iter().map(|page| (page.remote, page.len)).collect();
        let ask = Ask { token: batch.grant, direction: batch.direction, region: batch.remote };
        let (remote, granted) = host.admit(ask, &pages)?;
        copy_pages(batch, &remote, progress, || {
            if host.stop.stopped() {
                return Err(TransferError::PeerGone);
            }
            Ok(granted.alive(Instant::now())?)
        })
    }
}

/// Copies all pages of a batch between two mappings of this process. `look` is asked now and then, and at the end,
/// whether the transfer still stands.
pub(crate) fn copy_pages(
    batch: &Batch,
    remote: &Region,
    progress: &Progress,
    mut look: impl FnMut() -> Result<(), TransferError>,
) -> Result<(), TransferError> {
    let mut verifier = Verifier::new(&batch.checksums, batch.pages.len());
    let mut good = 0;
    for (index, page) in batch.pages.iter().enumerate() {
        if index % LOOK_EVERY == 0 {
            progress.halted()?;
            look()?;
            copy::fence();
            progress.advance(good);
        }
        let ends = (batch.local.at(page.local, u64::from(page.len)), remote.at(page.remote, u64::from(page.len)));
        let (Some(local), Some(remote)) = ends else { return Err(TransferError::OutOfBounds { page: index }) };
        let (from, to) = match batch.direction {
            Direction::Pull => (remote, local),
            Direction::Push => (local, remote),
        };
        // SAFETY: both ranges were checked against their mappings above, and both mappings are held by their regions.
        let sum = unsafe { copy::page(from, to, page.len as usize, verifier.wanted()) };
        good = verifier.next(sum)?;
    }
    copy::fence();
    look()?;
    progress.advance(good);
    Ok(())
}
