//! The whole life of streams, as random deeds of both sides over a link in memory, held against a simple model; and
//! hostile frames in any order.
//!
//! `STARLING_FUZZ_SECONDS=600 cargo test -p starling-cluster link::tests::model` runs as long; a failure prints its seed.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context as TaskContext, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use starling_ids::{Incarnation, RequestId};

use super::setup::{endpoint, id};
use crate::{
    link::{
        mux::{Ended, Mux, OpenError},
        outgoing::Batch,
    },
    stream::{
        Context, Endpoints, Fault, FaultKind, Incoming, Opened, StreamError, StreamHandler, StreamRx, StreamTx,
        TrySendError,
    },
    supervise::{TaskOwner, Tasks},
    wire::{
        Closing, Decoder, FailWhy, Frame, Hello, OpenHead, Party, encode, fuzz,
        limits::{self, STREAM_WINDOW_FRAMES},
    },
};

/// Keeps what wants in until the test decides.
#[derive(Default, Clone)]
struct Door(Arc<Mutex<VecDeque<Incoming>>>);

impl StreamHandler for Door {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        self.0.lock().unwrap().push_back(incoming);
        Box::pin(async {})
    }
}

/// One end of the link.
struct End {
    mux: Arc<Mux>,
    door: Door,
    decoder: Decoder,
    /// Bytes on their way here.
    wire: VecDeque<u8>,
    _tasks: TaskOwner,
}

fn end(dialled: bool) -> End {
    let (door, endpoints, tasks) = (Door::default(), Endpoints::default(), Tasks::closed(1000));
    let owner = TaskOwner::open(&tasks);
    endpoints.serve(endpoint("t/t/door"), Arc::new(door.clone()));
    let hello = Hello::new(Party::Node, id("peer"), Incarnation(1), "test".into());
    let mux = Mux::new(&hello, dialled, endpoints, tasks);
    End { mux, door, decoder: Decoder::default(), wire: VecDeque::new(), _tasks: owner }
}

/// How a sender ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finish {
    End,
    Fail,
    Dropped,
}

/// What must hold of one direction.
#[derive(Debug, Default)]
struct Direction {
    sent: Vec<(u32, usize)>,
    finish: Option<Finish>,
    read: usize,
    reader_left: bool,
    over: bool,
}

/// One direction as a test holds it.
struct Flow {
    tx: Option<StreamTx>,
    rx: Option<StreamRx>,
    model: Direction,
}

type Opening = Pin<Box<dyn Future<Output = Result<Opened, OpenError>>>>;

/// A stream that was asked for and not answered yet, as its opener holds it.
struct Asking {
    tag: u32,
    by: usize,
    opening: Opening,
}

/// A stream that its acceptor accepted.
struct Accepted {
    tag: u32,
    tx: StreamTx,
    rx: StreamRx,
}

struct World<'a> {
    random: &'a mut fuzz::Random,
    ends: [End; 2],
    asking: Vec<Asking>,
    accepted: Vec<Accepted>,
    rejected: Vec<u32>,
    /// Two for each stream.
    flows: Vec<Flow>,
    next_tag: u32,
    next_number: u32,
}

fn poll<T>(future: &mut (impl Future<Output = T> + Unpin + ?Sized)) -> Poll<T> {
    Pin::new(future).poll(&mut TaskContext::from_waker(Waker::noop()))
}

fn payload(number: u32, len: usize) -> Bytes {
    let mut bytes = vec![0; len.max(4)];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes.into()
}

impl World<'_> {
    fn deed(&mut self) {
        match self.random.below(100) {
            0..8 => self.open(),
            8..16 => self.answer(),
            16..46 => self.send(),
            46..70 => self.read(),
            70..74 => self.finish(),
            74..77 => self.leave(),
            77..79 => self.withdraw(),
            _ => {
                let (side, most) = (self.random.below(2), 1 << self.random.below(18));
                self.carry(side, most);
            }
        }
        self.look();
    }

    fn open(&mut self) {
        if self.asking.len() + self.flows.len() > 60 {
            return;
        }
        let (by, tag) = (self.random.below(2), self.next_tag);
        self.next_tag += 1;
        let mux = self.ends[by].mux.clone();
        let context = Context::new(RequestId(1), Duration::from_secs(3600));
        let head = OpenHead { endpoint: endpoint("t/t/door"), context };
        let mut opening: Opening = Box::pin(async move { mux.open(head, payload(tag, 4)).await });
        assert!(poll(&mut opening).is_pending());
        self.asking.push(Asking { tag, by, opening });
    }

    fn answer(&mut self) {
        let side = self.random.below(2);
        let Some(incoming) = self.ends[side].door.0.lock().unwrap().pop_front() else { return };
        let tag = u32::from_be_bytes(incoming.body[..4].try_into().unwrap());
        match self.random.below(6) {
            0 => {
                self.rejected.push(tag);
                incoming.acceptor.reject(Fault::new(FaultKind::Overloaded, "full"));
            }
            1 => {
                self.rejected.push(tag);
                drop(incoming);
            }
            _ => {
                if let Some((tx, rx)) = incoming.acceptor.accept(payload(tag, 4)) {
                    self.accepted.push(Accepted { tag, tx, rx });
                }
            }
        }
    }

    /// Openers that have been answered get their halves.
    fn look(&mut self) {
        let mut at = 0;
        while at < self.asking.len() {
            let Poll::Ready(answer) = poll(&mut self.asking[at].opening) else {
                at += 1;
                continue;
            };
            let Asking { tag, .. } = self.asking.remove(at);
            match answer {
                Ok(Opened { reply, tx, rx }) => {
                    assert_eq!(reply, payload(tag, 4));
                    let far = self.accepted.iter().position(|far| far.tag == tag).expect("it was accepted");
                    let far = self.accepted.remove(far);
                    self.flows.push(Flow { tx: Some(tx), rx: Some(far.rx), model: Direction::default() });
                    self.flows.push(Flow { tx: Some(far.tx), rx: Some(rx), model: Direction::default() });
                }
                Err(OpenError::Stream(StreamError::Rejected(_))) => {
                    assert!(self.rejected.contains(&tag), "a reject that nobody said");
                }
                Err(other) => panic!("{other:?}"),
            }
        }
    }

    fn some_flow(&mut self) -> Option<usize> {
        (!self.flows.is_empty()).then(|| self.random.below(self.flows.len()))
    }

    fn send(&mut self) {
        let Some(at) = self.some_flow() else { return };
        let flow = &mut self.flows[at];
        let Some(tx) = &flow.tx else { return };
        for _ in 0..1 + self.random.below(8) {
            let len = match self.random.below(40) {
                0 => self.random.below(2 << 20),
                1 => self.random.below(100_000),
                2..6 => self.random.below(20_000),
                _ => self.random.below(60),
            };
            self.next_number += 1;
            match tx.try_send(payload(self.next_number, len)) {
                Ok(()) => flow.model.sent.push((self.next_number, len.max(4))),
                Err(TrySendError::Full(_)) => {}
                Err(TrySendError::Failed(error)) => {
                    assert_eq!(error, StreamError::Cancelled);
                    assert!(flow.model.reader_left, "cancelled by nobody");
                }
            }
            let unread = &flow.model.sent[flow.model.read..];
            if !flow.model.reader_left {
                assert!(unread.len() <= STREAM_WINDOW_FRAMES, "more frames than the window");
                let bytes: usize = unread.iter().map(|(_, len)| len.min(&(limits::STREAM_WINDOW_BYTES / 4 * 3))).sum();
                assert!(bytes <= limits::STREAM_WINDOW_BYTES, "more bytes than the window");
            }
        }
    }

    fn read(&mut self) {
        let Some(at) = self.some_flow() else { return };
        for _ in 0..1 + self.random.below(20) {
            if !read_one(&mut self.flows[at]) {
                return;
            }
        }
    }

    fn finish(&mut self) {
        let Some(at) = self.some_flow() else { return };
        let flow = &mut self.flows[at];
        let Some(tx) = flow.tx.take() else { return };
        let finish = *self.random.of(&[Finish::End, Finish::Fail, Finish::Dropped]);
        flow.model.finish = Some(finish);
        match finish {
            Finish::End => tx.end(),
            Finish::Fail => tx.fail(Fault::new(FaultKind::Internal, "asked to")),
            Finish::Dropped => drop(tx),
        }
    }

    fn leave(&mut self) {
        let Some(at) = self.some_flow() else { return };
        self.flows[at].rx = None;
        self.flows[at].model.reader_left = true;
    }

    fn withdraw(&mut self) {
        if !self.asking.is_empty() {
            let at = self.random.below(self.asking.len());
            let gone = self.asking.swap_remove(at);
            // What the acceptor makes of it is about nobody; it must still come to an end.
            self.accepted.retain(|far| far.tag != gone.tag);
            assert!(gone.by < 2);
        }
    }

    /// Moves bytes from one end towards the other, in portions that respect no frame.
    fn carry(&mut self, from: usize, most: usize) {
        let mut batch = Batch::default();
        self.ends[from].mux.out.take(&mut batch);
        let bytes = taken(&batch);
        self.ends[from].mux.written(&mut batch);
        let to = &mut self.ends[1 - from];
        to.wire.extend(bytes);
        let portion: Vec<u8> = to.wire.drain(..most.min(to.wire.len())).collect();
        to.decoder.buffer().extend_from_slice(&portion);
        assert_eq!(to.mux.take_all(&mut to.decoder), Ok(None), "honest ends break no rules");
    }

    async fn settle(&mut self) {
        for _ in 0..3 {
            // Handlers are tasks of their own.
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            while self.ends.iter().any(|end| !end.wire.is_empty() || ready(&end.mux)) {
                for side in 0..2 {
                    self.carry(side, usize::MAX);
                }
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
            }
            self.look();
        }
    }

    /// Everything that was sent arrives, every end is told, and nothing is left.
    async fn end(mut self) {
        self.settle().await;
        for flow in &mut self.flows {
            while read_one(flow) {}
        }
        self.settle().await;
        for flow in &mut self.flows {
            while read_one(flow) {}
            let Direction { sent, finish, read, reader_left, over } = &flow.model;
            if !reader_left {
                assert!(*read == sent.len() || flow.tx.is_some(), "{} of {} arrived", read, sent.len());
                assert_eq!(*over, finish.is_some());
            } else if let (Some(tx), false) = (&flow.tx, *over) {
                assert_eq!(tx.is_cancelled(), Some(StreamError::Cancelled));
            }
        }
        self.flows.clear();
        self.asking.clear();
        self.accepted.clear();
        self.ends.iter().for_each(|end| end.door.0.lock().unwrap().clear());
        self.settle().await;
        self.ends.iter().for_each(|end| end.door.0.lock().unwrap().clear());
        self.settle().await;
        for end in &self.ends {
            assert_eq!(end.mux.load().0, 0, "streams are left");
            assert_eq!(end.mux.room.available_permits(), limits::LINK_QUEUE_BYTES, "room is lost");
            end.mux.close(Closing::Leaving);
            end.mux.end(&Ended { reason: "over".into(), orderly: true });
        }
    }
}

fn ready(mux: &Mux) -> bool {
    mux.out.poll_ready(&TaskContext::from_waker(Waker::noop())).is_ready()
}

fn taken(batch: &Batch) -> Vec<u8> {
    let mut slices = Vec::with_capacity(10_000);
    batch.slices(0, &mut slices);
    slices.iter().flat_map(|slice| slice.iter().copied()).collect()
}

/// Reads one item and holds it against the model; whether there was a frame.
fn read_one(flow: &mut Flow) -> bool {
    let Some(rx) = &mut flow.rx else { return false };
    let model = &mut flow.model;
    let Poll::Ready(item) = poll(&mut Box::pin(rx.recv())) else { return false };
    let all_read = model.read == model.sent.len();
    match item {
        Some(Ok(frame)) => {
            let (number, len) = model.sent[model.read];
            assert_eq!(frame, payload(number, len), "in order and whole");
            model.read += 1;
            return true;
        }
        None if model.over => return false,
        None => assert_eq!((model.finish, all_read), (Some(Finish::End), true)),
        Some(Err(StreamError::Failed(fault))) => {
            assert_eq!(fault.message, "asked to");
            assert_eq!((model.finish, all_read), (Some(Finish::Fail), true));
        }
        Some(Err(StreamError::Broken(_))) => assert_eq!((model.finish, all_read), (Some(Finish::Dropped), true)),
        Some(Err(other)) => panic!("{other}"),
    }
    model.over = true;
    false
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn random_lives_of_streams_agree_with_the_model() {
    fuzz::seeds("lives of streams", 60, |random| {
        runtime().block_on(async {
            let deeds = 50 + random.below(600);
            let mut world = World {
                random,
                ends: [end(true), end(false)],
                asking: Vec::new(),
                accepted: Vec::new(),
                rejected: Vec::new(),
                flows: Vec::new(),
                next_tag: 0,
                next_number: 0,
            };
            for _ in 0..deeds {
                // No budget of its own: the noop waker would never be told that it is used up.
                tokio::task::unconstrained(async { world.deed() }).await;
                tokio::task::yield_now().await;
            }
            tokio::task::unconstrained(world.end()).await;
        });
    });
}

/// Any frame, mostly about streams that exist.
fn any_frame(random: &mut fuzz::Random) -> Frame {
    let stream = match random.below(10) {
        0 => random.next() as u32,
        _ => random.below(12) as u32,
    };
    let len = if random.below(50) == 0 { random.below(1 << 20) } else { random.below(100) };
    let context = Context::new(RequestId(1), Duration::from_millis(random.next() % 1_000_000));
    let fault = Fault::new(FaultKind::Invalid, "hostile");
    match random.below(40) {
        0..8 => {
            let at = *random.of(&["t/t/door", "t/t/door", "t/t/nobody"]);
            let head = OpenHead { endpoint: endpoint(at), context };
            Frame::Open { stream, head: Box::new(head), body: payload(7, len) }
        }
        8..12 => Frame::Accept { stream, reply: payload(1, len) },
        12..14 => Frame::Reject { stream, fault: Box::new(fault) },
        14..26 => Frame::Data { stream, payload: payload(2, len) },
        26..29 => Frame::Credit { stream, amount: random.next() as u32 },
        29..32 => Frame::Cancel { stream },
        32..34 => Frame::End { stream },
        34 => Frame::Fail { stream, why: Box::new(FailWhy::Fault(fault)) },
        35 => Frame::Fail { stream, why: Box::new(FailWhy::Dropped("gone".into())) },
        36 => Frame::Ping(random.next()),
        37 => Frame::Pong(random.next()),
        38 if random.below(20) == 0 => Frame::Goodbye(Closing::Leaving),
        _ if random.below(20) == 0 => {
            let hello = Hello::new(Party::Node, id("x"), Incarnation(1), "hostile".into());
            Frame::Hello(Box::new(hello))
        }
        _ => Frame::Pong(0),
    }
}

/// A peer that sends any frames in any order, reads its answers or does not, against a node that opens, accepts and
/// sends: nothing panics, and what a link may hold is never exceeded.
#[test]
fn hostile_frames_never_panic_and_never_grow_a_link() {
    fuzz::seeds("hostile frames", 100, |random| {
        runtime().block_on(tokio::task::unconstrained(async {
            let dialled = random.below(2) == 0;
            let mut victim = end(dialled);
            let (mut halves, mut opening): (Vec<(StreamTx, StreamRx)>, Vec<Opening>) = (Vec::new(), Vec::new());
            let peer_reads = random.below(3) > 0;
            for _ in 0..random.below(2000) {
                encode(&any_frame(random), victim.decoder.buffer());
                match victim.mux.take_all(&mut victim.decoder) {
                    Ok(None) => {}
                    Ok(Some(_)) | Err(_) => break,
                }
                match random.below(12) {
                    0 if opening.len() < 10 => {
                        let mux = victim.mux.clone();
                        let context = Context::new(RequestId(1), Duration::from_secs(3600));
                        let head = OpenHead { endpoint: endpoint("t/t/x"), context };
                        let mut asked: Opening = Box::pin(async move { mux.open(head, payload(1, 4)).await });
                        if poll(&mut asked).is_pending() {
                            opening.push(asked);
                        }
                    }
                    1 => tokio::task::yield_now().await,
                    2 => {
                        let incoming = victim.door.0.lock().unwrap().pop_front();
                        halves.extend(incoming.and_then(|incoming| incoming.acceptor.accept(Bytes::new())));
                    }
                    3 if !halves.is_empty() => drop(halves.swap_remove(random.below(halves.len()))),
                    4 if !halves.is_empty() => {
                        let at = random.below(halves.len());
                        drop(halves[at].0.try_send(payload(3, random.below(100_000))));
                        drop(poll(&mut Box::pin(halves[at].1.recv())));
                    }
                    5 if !opening.is_empty() => {
                        let at = random.below(opening.len());
                        if let Poll::Ready(answer) = poll(&mut opening[at]) {
                            drop(opening.swap_remove(at));
                            halves.extend(answer.ok().map(|opened| (opened.tx, opened.rx)));
                        }
                    }
                    _ => {}
                }
                if peer_reads {
                    let mut batch = Batch::default();
                    victim.mux.out.take(&mut batch);
                    drop(taken(&batch));
                    victim.mux.written(&mut batch);
                }
                bounded(&victim);
            }
            victim.mux.end(&Ended { reason: "over".into(), orderly: false });
            for (tx, mut rx) in halves {
                assert!(tx.try_send(Bytes::new()).is_err());
                while let Some(Ok(_)) = rx.recv().await {}
            }
            assert_eq!(victim.mux.load().0, 0);
        }));
    });
}

fn bounded(victim: &End) {
    let table = victim.mux.table();
    assert!(table.streams.len() <= limits::STREAMS_PER_LINK_MAX);
    let held: usize = table.streams.values().filter_map(|entry| entry.inbox.as_ref()).map(|inbox| inbox.held()).sum();
    assert!(held <= limits::LINK_UNREAD_BYTES);
}
