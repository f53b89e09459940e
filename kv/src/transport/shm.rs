//! Shell: the transport between processes of one machine: both map one memory, and this side copies.
//!
//! Called by the fabric; calls the copy. A local socket carries the region's descriptor once (read-only unless the grant
//! is to push), and before and after each batch one short message, so that the owner's gate decides, its grant counts a
//! use, and its death or its freeze is seen. A peer that maps a region can read all of it: `shm` is offered to processes
//! of the same user only, checked by the kernel's word for it.
//! A small pull whose pages have checksums is copied while the owner decides: it waits for the owner's yes before it counts, and
//! what its checksums vouch for needs no second word, so its end is told after it is over, and the answer is not waited for.
//! Never: lets what was copied count before the owner's gate said yes.

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use rustix::io;

use super::{
    Transport,
    batch::{Batch, Checksums, Direction, RegionId},
    descriptor::{Descriptor, HostId, Offer, TransportKind},
    error::{Refusal, TransferError},
    mem::copy_pages,
    proto::{ANSWER, Op, Request, read_answer},
    region::Region,
    session::{Session, Wire},
    sockets,
    tcp::{answered, request},
    transfer::Progress,
    wait::{Bounds, hung_up, receive, send},
};

/// Reaches hosts of this machine and this user.
#[derive(Debug)]
pub struct Shm {
    name: String,
    machine: String,
    /// Regions that have a descriptor to pass.
    shared: Mutex<Vec<RegionId>>,
}

impl Shm {
    /// For the host that listens at its local name, on this boot of this machine.
    pub(crate) fn new(host: HostId, machine: &str) -> Self {
        Self { name: sockets::local_name(host), machine: machine.to_owned(), shared: Mutex::default() }
    }
}

impl Transport for Shm {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn register(&self, id: RegionId, region: &Region) -> Result<(), TransferError> {
        if region.fd().is_some() {
            self.shared.lock().unwrap_or_else(PoisonError::into_inner).push(id);
        }
        Ok(())
    }

    fn offer(&self, region: RegionId) -> Option<Offer> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let address = self.name.clone();
        shared.contains(&region).then_some(Offer { kind: TransportKind::Shm, address })
    }

    fn connect(&self, peer: &Descriptor) -> Result<Session, TransferError> {
        let name =
            peer.address(TransportKind::Shm).filter(|_| peer.machine == self.machine && !self.machine.is_empty());
        let name = name.ok_or_else(|| TransferError::Unreachable("no shared memory with the peer".to_owned()))?;
        let wire = ShmWire { name: name.to_owned(), socket: None, untold: None, owed: false, maps: HashMap::new() };
        Session::start(TransportKind::Shm, peer.host, wire)
    }
}

/// Pulls of at most so many bytes are copied while the owner decides; for larger ones its answer costs nothing beside the copy.
const SMALL: u64 = 1 << 20;

struct ShmWire {
    name: String,
    socket: Option<OwnedFd>,
    /// What is to be told of the end of the last batch.
    untold: Option<Vec<u8>>,
    /// The owner still has to answer an end that was not waited for.
    owed: bool,
    /// The peer's regions that were mapped, to read or to write. A host's name is its own for ever, so they stay valid.
    maps: HashMap<(RegionId, Direction), Region>,
}

impl Wire for ShmWire {
    fn run(&mut self, batch: &Batch, progress: &Progress) -> Result<(), TransferError> {
        let socket = match self.socket.take().filter(|socket| !hung_up(socket.as_fd())) {
            Some(socket) => socket,
            None => {
                (self.owed, self.untold) = (false, None);
                sockets::dial_local(&self.name, progress)?
            }
        };
        // A socket that goes with an error tells the owner that nobody touches the pages any more.
        let known = self.maps.get(&(batch.remote, batch.direction)).cloned();
        let small = batch.direction == Direction::Pull && batch.bytes() <= SMALL;
        match known {
            Some(remote) if small && batch.checksums != Checksums::None => {
                self.copy_meanwhile(&socket, batch, &remote, progress)?;
            }
            known => {
                self.settle(&socket, progress)?;
                let remote = known.map_or_else(|| self.map(&socket, batch, progress), Ok)?;
                let mut begun = Begun::ask(&socket, batch, Checksums::None, progress)?;
                copy_pages(batch, &remote, progress, || begun.look())?;
                begun.end()?;
            }
        }
        self.socket = Some(socket);
        Ok(())
    }

    fn afterwards(&mut self) {
        let Some(end) = self.untold.take() else { return };
        let told = self.socket.as_ref().and_then(|socket| io::write(socket, &end).ok());
        self.owed = told == Some(end.len());
        if !self.owed {
            // A connection that goes says the same.
            self.socket = None;
        }
    }
}

impl ShmWire {
    /// Takes the answer that was not waited for; what it says was of no use.
    fn settle(&mut self, socket: &OwnedFd, progress: &Progress) -> Result<(), TransferError> {
        if std::mem::take(&mut self.owed) {
            let mut answer = [0; ANSWER];
            receive(socket.as_fd(), &mut answer, progress)?;
        }
        Ok(())
    }

    /// Copies while the owner decides.
    fn copy_meanwhile(
        &mut self,
        socket: &OwnedFd,
        batch: &Batch,
        remote: &Region,
        progress: &Progress,
    ) -> Result<(), TransferError> {
        let asked = Begun::send(socket, batch, Checksums::None, progress)?;
        let copied = copy_pages(batch, remote, progress, || Ok(()));
        self.settle(socket, progress)?;
        // A no says more than what became of the bytes.
        let begun = asked.answered()?;
        copied?;
        if Instant::now() >= begun.lease {
            return begun.end();
        }
        self.untold = Some(begun.saying(Op::End));
        Ok(())
    }

    /// Maps the peer's region, with the first grant that allows it.
    fn map(&mut self, socket: &OwnedFd, batch: &Batch, progress: &Progress) -> Result<Region, TransferError> {
        let key = (batch.remote, batch.direction);
        let writable = batch.direction == Direction::Push;
        let op = if writable { Op::MapWritable } else { Op::Map };
        let ask = Request { pages: Vec::new(), checksums: Checksums::None, ..request(op, batch, progress.until()) };
        send(socket.as_fd(), &ask.encode(), progress)?;
        let (answer, fd) = sockets::receive_with_fd(socket.as_fd(), progress)?;
        read_answer(&answer)?;
        let region = Region::of_peer(fd.ok_or(TransferError::Refused(Refusal::Malformed))?, writable)?;
        self.maps.insert(key, region.clone());
        Ok(region)
    }
}

/// A batch whose pages the owner lets this side move by itself.
pub(crate) struct Begun<'a> {
    socket: &'a OwnedFd,
    batch: &'a Batch,
    progress: &'a Progress,
    /// When the lease ends, as far as is known.
    lease: Instant,
}

impl<'a> Begun<'a> {
    /// Asks the owner's gate. `promised` is what the owner shall compare at the end.
    pub(crate) fn ask(
        socket: &'a OwnedFd,
        batch: &'a Batch,
        promised: Checksums,
        progress: &'a Progress,
    ) -> Result<Self, TransferError> {
        Self::send(socket, batch, promised, progress)?.answered()
    }

    /// Asks without waiting for the answer, which [`Begun::answered`] takes.
    fn send(
        socket: &'a OwnedFd,
        batch: &'a Batch,
        promised: Checksums,
        progress: &'a Progress,
    ) -> Result<Self, TransferError> {
        let op = match batch.direction {
            Direction::Pull => Op::BeginPull,
            Direction::Push => Op::BeginPush,
        };
        let ask = Request { checksums: promised, ..request(op, batch, progress.until()) };
        send(socket.as_fd(), &ask.encode(), progress)?;
        Ok(Self { socket, batch, progress, lease: Instant::now() })
    }

    /// What the gate said.
    fn answered(self) -> Result<Self, TransferError> {
        let lease = after(answered(self.socket, self.progress)?);
        Ok(Self { lease, ..self })
    }

    /// Whether the owner still lives and the lease still runs; asks only when the lease known of is over.
    pub(crate) fn look(&mut self) -> Result<(), TransferError> {
        if hung_up(self.socket.as_fd()) {
            return Err(TransferError::PeerGone);
        }
        if Instant::now() >= self.lease {
            self.lease = after(self.say(Op::Still)?);
        }
        Ok(())
    }

    /// Tells the owner that the pages are quiet, and asks whether the lease still ran and the promise was kept.
    pub(crate) fn end(self) -> Result<(), TransferError> {
        self.say(Op::End).map(drop)
    }

    fn say(&self, op: Op) -> Result<u32, TransferError> {
        send(self.socket.as_fd(), &self.saying(op), self.progress)?;
        answered(self.socket, self.progress)
    }

    fn saying(&self, op: Op) -> Vec<u8> {
        let ask = request(op, self.batch, self.progress.until());
        Request { pages: Vec::new(), checksums: Checksums::None, ..ask }.encode()
    }
}

fn after(ms: u32) -> Instant {
    Instant::now() + Duration::from_millis(u64::from(ms))
}
