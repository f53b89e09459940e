//! Shell: the serving side's sockets: accepts data connections and does what their requests may.
//!
//! Owned by the fabric; calls the host's gate for every request. One thread accepts, one thread a connection serves; all
//! sleep while nobody asks. Never: touches a byte before the gate said yes; answers a connection that has not shown a
//! valid token within `FIRST_WORD`; keeps one that showed a wrong token.
//! Bounds: `CONNECTIONS` connections; each operation by the time limit it names, at most `LIMIT_MAX`.

use std::{
    net::{SocketAddr, TcpListener},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixListener,
    },
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::event::PollFlags;

use super::{
    batch::{Checksums, Direction},
    error::{Refusal, TransferError},
    grant::{Ask, Use},
    host::Host,
    lane::{Job, Lane, Lanes},
    proto::{ADDRESS_MAX, ANSWER, HEADER, Header, Op, Request, answer},
    region::Region,
    sockets,
    stream::{Intake, cut, drain, send_segment},
    wait::{receive, send, wait_any},
};

/// Data connections of one host.
pub const CONNECTIONS: usize = 512;
/// Time for a new connection to show a token.
const FIRST_WORD: Duration = Duration::from_secs(5);
/// Time for the rest of a request, and for an answer.
const REST: Duration = Duration::from_secs(5);
/// The longest operation.
const LIMIT_MAX: Duration = Duration::from_secs(600);

/// A transfer that the peer does by itself.
struct Begun {
    granted: Use,
    /// What is compared at its end: a push with checksums.
    promised: Option<(Region, Request)>,
}

impl Begun {
    /// Its outcome, as far as this side can tell.
    fn end(&self) -> Result<(), TransferError> {
        self.granted.alive(Instant::now())?;
        if let Some((region, request)) = &self.promised {
            let mut intake = Intake::new(region, &request.pages, &request.checksums);
            cut(&request.pages).try_for_each(|segment| intake.compare(&segment).map(drop))?;
            // Comparing takes a moment.
            self.granted.alive(Instant::now())?;
        }
        Ok(())
    }
}

/// Starts to serve on the listeners given, until the host stops.
pub(crate) fn start(
    host: &Arc<Host>,
    tcp: Option<TcpListener>,
    local: Option<UnixListener>,
    lanes: Option<Arc<dyn Lanes>>,
) -> Result<(), TransferError> {
    let host = Arc::clone(host);
    thread::Builder::new().name("kv-accept".to_owned()).spawn(move || accept(&host, &tcp, &local, &lanes))?;
    Ok(())
}

fn accept(host: &Arc<Host>, tcp: &Option<TcpListener>, local: &Option<UnixListener>, lanes: &Option<Arc<dyn Lanes>>) {
    let open = Arc::new(AtomicUsize::new(0));
    let listeners: Vec<_> = tcp.iter().map(AsFd::as_fd).chain(local.iter().map(AsFd::as_fd)).collect();
    while wait_any(&listeners, PollFlags::IN, &host.stop.bounds(None)).is_ok() {
        if let Some(listener) = tcp
            && let Ok((socket, _)) = listener.accept()
        {
            let tuned = sockets::tune(socket.as_fd());
            if tuned.is_ok() {
                admit(
                    Connection { host: Arc::clone(host), fd: socket.into(), local: false, lanes: lanes.clone() },
                    &open,
                );
            }
        }
        if let Some(listener) = local
            && let Ok((socket, _)) = listener.accept()
            && sockets::same_user(socket.as_fd())
            && socket.set_nonblocking(true).is_ok()
        {
            admit(Connection { host: Arc::clone(host), fd: socket.into(), local: true, lanes: lanes.clone() }, &open);
        }
    }
}

fn admit(connection: Connection, open: &Arc<AtomicUsize>) {
    if open.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS {
        open.fetch_sub(1, Ordering::AcqRel);
        return;
    }
    let count = Arc::clone(open);
    let thread = thread::Builder::new().name("kv-serve".to_owned()).spawn(move || {
        // Whatever ended it, closing the socket tells the peer.
        let _ended = connection.serve();
        drop(connection);
        count.fetch_sub(1, Ordering::AcqRel);
    });
    if thread.is_err() {
        open.fetch_sub(1, Ordering::AcqRel);
    }
}

struct Connection {
    host: Arc<Host>,
    fd: OwnedFd,
    /// Whether it is a local socket, which can carry descriptors.
    local: bool,
    lanes: Option<Arc<dyn Lanes>>,
}

impl Connection {
    fn serve(&self) -> Result<(), TransferError> {
        let mut patience = Some(FIRST_WORD);
        // The grant in use while the peer moves bytes itself.
        let mut begun: Option<Begun> = None;
        // Dropped before `begun`: the peer's last writes must not meet pages that were given to others.
        let mut lane: Option<Box<dyn Lane>> = None;
        loop {
            if let Some(lane) = &lane {
                lane.until_readable(self.fd.as_fd(), &self.host.stop.bounds(None))?;
            }
            let request = self.read(patience)?;
            match request.op {
                Op::Lane => self.open(&request, &mut lane)?,
                Op::LanePull | Op::LanePush => self.talk(&request, lane.as_deref())?,
                _ => self.perform(request, &mut begun)?,
            }
            patience = None;
        }
    }

    fn open(&self, request: &Request, lane: &mut Option<Box<dyn Lane>>) -> Result<(), TransferError> {
        if let Err(refusal) = self.host.admit(ask(request), &request.pages) {
            return self.refuse(refusal);
        }
        let Some(lanes) = self.lanes.clone() else { return self.refuse(Refusal::NotOffered) };
        let len = request.limit_ms as usize;
        if len > ADDRESS_MAX {
            return Err(Refusal::Malformed.into());
        }
        let mut peer = vec![0; len];
        receive(self.fd.as_fd(), &mut peer, &self.host.stop.bounds(Some(REST)))?;
        let opened = match lanes.open(&peer) {
            Ok(opened) => lane.insert(opened),
            Err(error) => {
                tracing::warn!(%error, "a peer's way into this process");
                return self.refuse(Refusal::Busy);
            }
        };
        self.answer(Ok(()), opened.address().len() as u32)?;
        send(self.fd.as_fd(), opened.address(), &self.host.stop.bounds(Some(REST)))
    }

    fn read(&self, patience: Option<Duration>) -> Result<Request, TransferError> {
        let read = self.receive(patience);
        if let Err(error @ TransferError::Refused(_)) = &read {
            self.answer(Err(error), 0)?;
        }
        read
    }

    fn receive(&self, patience: Option<Duration>) -> Result<Request, TransferError> {
        let mut header = [0; HEADER];
        // Whoever was served often asks again at once.
        let bounds = self.host.stop.bounds(patience);
        let bounds = if patience.is_none() { bounds.soon() } else { bounds };
        receive(self.fd.as_fd(), &mut header, &bounds)?;
        let header = Header::decode(&header)?;
        let mut body = vec![0; header.body()];
        receive(self.fd.as_fd(), &mut body, &self.host.stop.bounds(Some(REST)).soon())?;
        Ok(header.with_body(&body)?)
    }

    fn answer(&self, result: Result<(), &TransferError>, number: u32) -> Result<(), TransferError> {
        send(self.fd.as_fd(), &answer(result, number), &self.host.stop.bounds(Some(REST)))
    }

    /// Says no; the connection stays open only for a peer whose token was known.
    fn refuse(&self, refusal: Refusal) -> Result<(), TransferError> {
        self.answer(Err(&refusal.into()), 0)?;
        if refusal == Refusal::UnknownGrant { Err(refusal.into()) } else { Ok(()) }
    }

    fn perform(&self, request: Request, begun: &mut Option<Begun>) -> Result<(), TransferError> {
        match request.op {
            Op::Pull => self.pull(&request),
            Op::Push => self.push(&request),
            Op::Map | Op::MapWritable => self.map(&request),
            Op::BeginPull | Op::BeginPush => self.begin(request, begun),
            Op::Still => {
                let Begun { granted, .. } = begun.as_ref().ok_or(TransferError::Refused(Refusal::Malformed))?;
                match granted.alive(Instant::now()) {
                    Ok(()) => self.answer(Ok(()), left_ms(granted)),
                    Err(refusal) => self.answer(Err(&refusal.into()), 0),
                }
            }
            Op::End => {
                let begun = begun.take().ok_or(TransferError::Refused(Refusal::Malformed))?;
                let outcome = begun.end();
                drop(begun);
                self.answer(outcome.as_ref().copied(), 0)
            }
            Op::Lane | Op::LanePull | Op::LanePush => Err(Refusal::Malformed.into()),
        }
    }

    /// Pages as messages, over the lane that the peer opened on this connection.
    fn talk(&self, request: &Request, lane: Option<&dyn Lane>) -> Result<(), TransferError> {
        let lane = lane.ok_or(TransferError::Refused(Refusal::Malformed))?;
        let (region, granted) = match self.host.admit(ask(request), &request.pages) {
            Ok(admitted) => admitted,
            Err(refusal) => return self.refuse(refusal),
        };
        let alive = || Ok(granted.alive(Instant::now())?);
        let Request { pages, checksums, .. } = request;
        let bounds = self.host.stop.bounds(Some(limit(request)));
        let job = Job { region: &region, pages, checksums, fd: self.fd.as_fd(), bounds: &bounds, alive: &alive };
        let push = request.op == Op::LanePush;
        if push {
            lane.expect(&job);
        }
        self.answer(Ok(()), 0)?;
        let moved = if push { lane.take(&job) } else { lane.send(&job) };
        let outcome = moved.and_then(|()| alive());
        drop(granted);
        match &outcome {
            Ok(()) | Err(TransferError::Checksum { .. } | TransferError::Refused(_)) => {
                self.answer(outcome.as_ref().copied(), 0)
            }
            Err(error) => Err(error.clone()),
        }
    }

    fn begin(&self, request: Request, begun: &mut Option<Begun>) -> Result<(), TransferError> {
        let (region, granted) = match self.host.admit(ask(&request), &request.pages) {
            Ok(admitted) => admitted,
            Err(refusal) => return self.refuse(refusal),
        };
        let push = request.op == Op::BeginPush;
        let promised = (push && request.checksums != Checksums::None).then_some((region, request));
        let left = left_ms(&granted);
        *begun = Some(Begun { granted, promised });
        self.answer(Ok(()), left)
    }

    fn pull(&self, request: &Request) -> Result<(), TransferError> {
        let (region, granted) = match self.host.admit(ask(request), &request.pages) {
            Ok(admitted) => admitted,
            Err(refusal) => return self.refuse(refusal),
        };
        let bounds = self.host.stop.bounds(Some(limit(request)));
        send(self.fd.as_fd(), &answer(Ok(()), 0), &bounds)?;
        for segment in cut(&request.pages) {
            // A lease that ends on the way ends the stream.
            if let Err(refusal) = granted.alive(Instant::now()) {
                return send(self.fd.as_fd(), &answer(Err(&refusal.into()), 0), &bounds);
            }
            let go = answer(Ok(()), segment.bytes);
            send_segment(self.fd.as_fd(), &go, (&region, &request.pages), &segment, &bounds)?;
        }
        // What was read after the last look counts only if the lease still runs.
        match granted.alive(Instant::now()) {
            Ok(()) => send(self.fd.as_fd(), &answer(Ok(()), 0), &bounds),
            Err(refusal) => send(self.fd.as_fd(), &answer(Err(&refusal.into()), 0), &bounds),
        }
    }

    fn push(&self, request: &Request) -> Result<(), TransferError> {
        let (region, granted) = match self.host.admit(ask(request), &request.pages) {
            Ok(admitted) => admitted,
            Err(refusal) => return self.refuse(refusal),
        };
        let bounds = self.host.stop.bounds(Some(limit(request)));
        send(self.fd.as_fd(), &answer(Ok(()), 0), &bounds)?;
        let mut intake = Intake::new(&region, &request.pages, &request.checksums);
        for segment in cut(&request.pages) {
            let alive = granted.alive(Instant::now()).map_err(TransferError::from);
            let taken = alive.and_then(|()| intake.take(self.fd.as_fd(), &segment, &bounds).map(drop));
            match taken {
                Ok(()) => {}
                Err(error @ (TransferError::Checksum { .. } | TransferError::Refused(_))) => {
                    // Said at once, so that the peer stops. What it has sent by then is read, or the reset that closing
                    // would cause could overtake the answer.
                    drop(granted);
                    self.answer(Err(&error), 0)?;
                    drain(self.fd.as_fd(), &bounds)?;
                    return Err(error);
                }
                Err(error) => return Err(error),
            }
        }
        drop(granted);
        self.answer(Ok(()), 0)
    }

    fn map(&self, request: &Request) -> Result<(), TransferError> {
        let writable = request.op == Op::MapWritable;
        let region = match self.host.admit(ask(request), &request.pages) {
            Ok((region, _)) if self.local && region.fd().is_some() => region,
            Ok(_) => return self.refuse(Refusal::NotOffered),
            Err(refusal) => return self.refuse(refusal),
        };
        let bytes: [u8; ANSWER] = answer(Ok(()), 0);
        sockets::send_with_fd(
            self.fd.as_fd(),
            &bytes,
            region.share(writable)?.as_fd(),
            &self.host.stop.bounds(Some(REST)),
        )
    }
}

fn ask(request: &Request) -> Ask {
    let push = matches!(request.op, Op::Push | Op::BeginPush | Op::MapWritable | Op::LanePush);
    let direction = if push { Direction::Push } else { Direction::Pull };
    Ask { token: request.token, direction, region: request.region }
}

/// The rest of a lease, ms, rounded up so that the peer does not ask for nothing.
fn left_ms(granted: &Use) -> u32 {
    u32::try_from(granted.left(Instant::now()).as_millis()).unwrap_or(u32::MAX).saturating_add(1)
}

fn limit(request: &Request) -> Duration {
    Duration::from_millis(u64::from(request.limit_ms)).min(LIMIT_MAX)
}

/// Where a listener listens, as a peer must dial it.
pub(crate) fn advertised(listener: &TcpListener, advertise: Option<std::net::IpAddr>) -> Option<SocketAddr> {
    let bound = listener.local_addr().ok()?;
    Some(SocketAddr::new(advertise.unwrap_or(bound.ip()), bound.port()))
}
