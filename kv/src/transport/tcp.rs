//! Shell: the transport over TCP, which always works.
//!
//! Called by the fabric; calls the stream. The connection is opened by the door token's holder and every request carries
//! its grant's token. **Its bytes are not encrypted**: only tokens that came over the authenticated link open anything,
//! but who can read the network can read KV and tokens. Use it on a network that is trusted as far.
//! Never: keeps a connection on which something went wrong; the next batch opens a fresh one.

use std::{
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use super::{
    Transport,
    batch::{Batch, Direction, RegionId},
    descriptor::{Descriptor, Offer, TransportKind},
    error::{Refusal, TransferError},
    proto::{ANSWER, Op, Request, read_answer},
    region::Region,
    session::{Session, Wire},
    sockets,
    stream::{Intake, PageList, cut, send_segment},
    transfer::Progress,
    wait::{Bounds, hung_up, readable, receive, send},
};

/// Reaches hosts that listen.
#[derive(Debug)]
pub struct Tcp {
    /// Where this host's own listener is to be dialled.
    pub(crate) advertised: Option<SocketAddr>,
}

impl Transport for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn register(&self, _: RegionId, _: &Region) -> Result<(), TransferError> {
        Ok(())
    }

    fn offer(&self, _: RegionId) -> Option<Offer> {
        let address = self.advertised?.to_string();
        Some(Offer { kind: TransportKind::Tcp, address })
    }

    fn connect(&self, peer: &Descriptor) -> Result<Session, TransferError> {
        let address = peer.socket(TransportKind::Tcp);
        let address = address.ok_or_else(|| TransferError::Unreachable("the peer offers no TCP".to_owned()))?;
        Session::start(TransportKind::Tcp, peer.host, TcpWire { address, socket: None })
    }
}

struct TcpWire {
    address: SocketAddr,
    socket: Option<OwnedFd>,
}

impl Wire for TcpWire {
    fn run(&mut self, batch: &Batch, progress: &Progress) -> Result<(), TransferError> {
        let socket = match self.socket.take().filter(|socket| !hung_up(socket.as_fd())) {
            Some(socket) => socket,
            None => sockets::dial(self.address, progress)?,
        };
        exchange(&socket, batch, progress)?;
        self.socket = Some(socket);
        Ok(())
    }
}

/// The request for a batch.
pub(crate) fn request(op: Op, batch: &Batch, until: Option<Instant>) -> Request {
    let left = until.map_or(batch.deadline, |until| until.saturating_duration_since(Instant::now()));
    Request {
        op,
        region: batch.remote,
        token: batch.grant,
        limit_ms: u32::try_from(left.as_millis()).unwrap_or(u32::MAX),
        pages: batch.pages.iter().map(|page| (page.remote, page.len)).collect(),
        checksums: batch.checksums.clone(),
    }
}

/// Receives an answer and reads it.
pub(crate) fn answered(socket: &OwnedFd, bounds: &impl Bounds) -> Result<u32, TransferError> {
    let mut answer = [0; ANSWER];
    receive(socket.as_fd(), &mut answer, bounds)?;
    read_answer(&answer)
}

fn exchange(socket: &OwnedFd, batch: &Batch, progress: &Progress) -> Result<(), TransferError> {
    let local: Vec<(u64, u32)> = batch.pages.iter().map(|page| (page.local, page.len)).collect();
    let op = match batch.direction {
        Direction::Pull => Op::Pull,
        Direction::Push => Op::Push,
    };
    let mut request = request(op, batch, progress.until());
    if batch.direction == Direction::Pull {
        // Compared on this side.
        request.checksums = super::batch::Checksums::None;
    }
    send(socket.as_fd(), &request.encode(), progress)?;
    answered(socket, progress)?;
    match batch.direction {
        Direction::Pull => pull(socket, batch, &local, progress),
        Direction::Push => push(socket, batch, &local, progress),
    }
}

fn pull(socket: &OwnedFd, batch: &Batch, local: PageList<'_>, progress: &Progress) -> Result<(), TransferError> {
    let mut intake = Intake::new(&batch.local, local, &batch.checksums);
    for segment in cut(local) {
        if answered(socket, progress)? != segment.bytes {
            return Err(Refusal::Malformed.into());
        }
        progress.advance(intake.take(socket.as_fd(), &segment, progress)?);
    }
    answered(socket, progress).map(drop)
}

fn push(socket: &OwnedFd, batch: &Batch, local: PageList<'_>, progress: &Progress) -> Result<(), TransferError> {
    for segment in cut(local) {
        send_segment(socket.as_fd(), &[], (&batch.local, local), &segment, progress)?;
        if readable(socket.as_fd()) {
            // An answer before the end is a no.
            break;
        }
    }
    answered(socket, progress)?;
    progress.advance(batch.pages.len());
    Ok(())
}
