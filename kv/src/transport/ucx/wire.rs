//! Shell: a session's side of UCX: the link to the owner, and batches that this side moves by itself: it asks the owner's
//! gate, reads or writes the pages, and says when it is done. Batches of messages are [`super::talk`]'s.
//!
//! Called by the session's thread, on which its worker lives. After an error everything that could still touch the pages
//! goes before the call returns: requests, endpoint, worker; the control connection goes last, because its end tells the
//! owner that the pages are quiet. The next batch builds anew. Bounds: `WINDOW` operations under way.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    sync::Arc,
};

use ucx_sys::{Endpoint, Memory, RemoteKey, Request, Worker};

use super::{
    super::{
        batch::{Batch, Checksums, Direction, RegionId, Segment},
        error::{Refusal, TransferError},
        grant::GrantToken,
        host::PROBE,
        proto::{self, ADDRESS_MAX, Op},
        session::Wire,
        shm::Begun,
        sockets,
        stream::Intake,
        tcp::answered,
        transfer::Progress,
        wait::{hung_up, readable, receive, send},
    },
    Node, WINDOW, failed, local,
    message::Inbox,
    offer::Window,
    pace::{Pace, Turn},
    plan::pieces,
    talk::{Failed, Talk},
};

/// Operations or turns between two looks at deadline, cancellation, lease and peer.
pub(super) const LOOK_EVERY: usize = 32;

/// See the module.
pub(super) struct UcxWire {
    node: Arc<Node>,
    control: SocketAddr,
    door: GrantToken,
    windows: [(RegionId, u64, Window); 2],
    /// Whether pages travel as messages.
    messages: bool,
    link: Option<Link>,
}

/// A connection; dropped in this order.
pub(super) struct Link {
    /// None where pages travel as messages.
    keys: HashMap<RegionId, RemoteKey>,
    pub(super) endpoint: Endpoint,
    pub(super) worker: Worker,
    pub(super) inbox: Rc<Inbox>,
    pub(super) socket: OwnedFd,
}

impl UcxWire {
    /// For a peer whose descriptor said all this.
    pub(super) fn new(
        node: Arc<Node>,
        (control, door): (SocketAddr, GrantToken),
        windows: [(RegionId, u64, Window); 2],
        messages: bool,
    ) -> Self {
        Self { node, control, door, windows, messages, link: None }
    }

    fn dial(&self, progress: &Progress) -> Result<Link, TransferError> {
        let socket = sockets::dial(self.control, progress)?;
        let (worker, inbox) = (Worker::new(&self.node.context).map_err(local)?, Rc::<Inbox>::default());
        let (theirs, windows) = if self.messages {
            let taken = Rc::clone(&inbox);
            worker.on_message(move |header, bytes| taken.take(header, bytes)).map_err(local)?;
            (self.lane(&socket, &worker.address().map_err(local)?, progress)?, &[][..])
        } else {
            (self.lane(&socket, &[], progress)?, &self.windows[..])
        };
        // SAFETY: it came from the process whose descriptor, with its UCX keys, came over the authenticated link.
        let endpoint = unsafe { worker.connect(&theirs) };
        let endpoint =
            endpoint.map_err(|fault| TransferError::Unreachable(format!("no UCX lane to the peer: {fault}")))?;
        let mut keys = HashMap::new();
        for (id, _, window) in windows {
            // SAFETY: it came in that descriptor.
            let key = unsafe { endpoint.key(&window.key) };
            keys.insert(*id, key.map_err(local)?);
        }
        Ok(Link { keys, endpoint, worker, inbox, socket })
    }

    /// Has the owner open a worker, which knows `ours` if that is not empty, and learns its address.
    fn lane(&self, socket: &OwnedFd, ours: &[u8], progress: &Progress) -> Result<Vec<u8>, TransferError> {
        let (pages, checksums, limit_ms) = (Vec::new(), Checksums::None, ours.len() as u32);
        let ask = proto::Request { op: Op::Lane, region: PROBE, token: self.door, limit_ms, pages, checksums };
        send(socket.as_fd(), &ask.encode(), progress)?;
        send(socket.as_fd(), ours, progress)?;
        let len = answered(socket, progress)? as usize;
        if !(1..=ADDRESS_MAX).contains(&len) {
            return Err(Refusal::Malformed.into());
        }
        let mut address = vec![0; len];
        receive(socket.as_fd(), &mut address, progress)?;
        Ok(address)
    }

    /// The owner keeps the connection after a no, unless it did not know the token.
    fn refused(&mut self, link: Link, error: TransferError) -> TransferError {
        let kept = matches!(error, TransferError::Refused(refusal) if refusal != Refusal::UnknownGrant);
        self.link = kept.then_some(link);
        error
    }
}

impl Wire for UcxWire {
    fn run(&mut self, batch: &Batch, progress: &Progress) -> Result<(), TransferError> {
        let (_, len, window) = self
            .windows
            .iter()
            .find(|(id, ..)| *id == batch.remote)
            .ok_or(TransferError::Refused(Refusal::NoRegion))?;
        let link = match self.link.take().filter(|link| !hung_up(link.socket.as_fd())) {
            Some(link) => link,
            None => self.dial(progress)?,
        };
        if self.messages {
            return match (Talk { batch, progress, link: &link }).run() {
                Ok(()) => {
                    self.link = Some(link);
                    Ok(())
                }
                Err(Failed::Before(error)) => Err(self.refused(link, error)),
                Err(Failed::OnTheWay(error)) => Err(error),
            };
        }
        let key = link.keys.get(&batch.remote).ok_or(TransferError::Refused(Refusal::NoRegion))?;
        let promised = match batch.direction {
            Direction::Pull => Checksums::None,
            Direction::Push => batch.checksums.clone(),
        };
        let begun = match Begun::ask(&link.socket, batch, promised, progress) {
            Ok(begun) => begun,
            Err(error) => return Err(self.refused(link, error)),
        };
        let known = self.node.memory(&batch.local);
        let mover = Mover { batch, progress, link: &link, key, base: window.base, len: *len, known: known.as_deref() };
        mover.run(begun)?;
        progress.advance(batch.pages.len());
        self.link = Some(link);
        Ok(())
    }
}

/// One batch on its way.
struct Mover<'a> {
    batch: &'a Batch,
    progress: &'a Progress,
    link: &'a Link,
    key: &'a RemoteKey,
    /// The address of the peer's region in the peer, and its bytes.
    base: u64,
    len: u64,
    known: Option<&'a Memory>,
}

impl Mover<'_> {
    fn run(&self, mut begun: Begun<'_>) -> Result<(), TransferError> {
        let pages: Vec<(u64, u32)> = self.batch.pages.iter().map(|page| (page.local, page.len)).collect();
        let mut intake = Intake::new(&self.batch.local, &pages, &self.batch.checksums);
        let mut pieces = pieces(&self.batch.pages);
        let mut under_way: VecDeque<(Segment, Request)> = VecDeque::with_capacity(WINDOW);
        let (mut pace, mut steps) = (Pace::new(), 0);
        loop {
            while under_way.len() < WINDOW
                && let Some(piece) = pieces.next()
            {
                let request = self.post(&piece)?;
                under_way.push_back((piece, request));
            }
            let Some((piece, request)) = under_way.front() else { break };
            if request.over().map_err(failed)? {
                if self.batch.direction == Direction::Pull {
                    self.progress.advance(intake.compare(piece)?);
                }
                under_way.pop_front();
                self.step(&mut steps, &mut begun)?;
            } else {
                self.wait(&mut pace, &mut steps, &mut begun)?;
            }
        }
        if self.batch.direction == Direction::Push {
            // Only this says that the peer has the bytes.
            let flush = self.link.endpoint.flush().map_err(failed)?;
            while !flush.over().map_err(failed)? {
                self.wait(&mut pace, &mut steps, &mut begun)?;
            }
        }
        begun.end()
    }

    /// Begins one operation.
    fn post(&self, piece: &Segment) -> Result<Request, TransferError> {
        let index = piece.pages.start;
        let page = self.batch.pages.get(index).ok_or(TransferError::OutOfBounds { page: index })?;
        let (skip, bytes) = (u64::from(piece.skip), u64::from(piece.bytes));
        let remote =
            page.remote.checked_add(skip).filter(|at| at.checked_add(bytes).is_some_and(|end| end <= self.len));
        let address = remote.and_then(|at| self.base.checked_add(at));
        let here = page.local.checked_add(skip).and_then(|at| self.batch.local.at(at, bytes));
        let (Some(there), Some(here)) = (address, here) else { return Err(TransferError::OutOfBounds { page: index }) };
        let len = piece.bytes as usize;
        // SAFETY: the range lies in the local region, which the batch holds; `run` of the wire returns only when the
        // request is over or its worker is gone, and `known` is the registration of that region.
        let begun = unsafe {
            match self.batch.direction {
                Direction::Pull => self.key.get(here, len, there, self.known),
                Direction::Push => self.key.put(here, len, there, self.known),
            }
        };
        begun.map_err(failed)
    }

    fn step(&self, steps: &mut usize, begun: &mut Begun<'_>) -> Result<(), TransferError> {
        *steps += 1;
        if steps.is_multiple_of(LOOK_EVERY) { self.look(begun) } else { Ok(()) }
    }

    fn wait(&self, pace: &mut Pace, steps: &mut usize, begun: &mut Begun<'_>) -> Result<(), TransferError> {
        let socket = self.link.socket.as_fd();
        if pace.turn(&self.link.worker, &[socket], self.progress)? != Turn::Slept {
            return self.step(steps, begun);
        }
        self.look(begun)?;
        // Nothing was asked: whatever the owner says now, it is not part of this batch.
        if readable(socket) { Err(TransferError::PeerGone) } else { Ok(()) }
    }

    fn look(&self, begun: &mut Begun<'_>) -> Result<(), TransferError> {
        self.progress.halted()?;
        self.link.endpoint.alive().map_err(failed)?;
        begun.look()
    }
}
