//! The streams of one link: opened, answered, fed, and all ended at once when the link ends.
//!
//! Shared by the link's reader and writer, by openers, and by the halves of its streams. Never waits (but for room,
//! when it opens) and never touches the socket: frames come in through [`super::incoming`] and leave through
//! [`super::outgoing`]. Bounds, all of a link together [`limits::LINK_BYTES_MAX`]: at most
//! [`limits::STREAMS_PER_LINK_MAX`] streams; payloads that wait for the writer are reserved in `room`
//! ([`limits::LINK_QUEUE_BYTES`]), answers are below [`limits::LINK_CONTROL_BYTES`]; unread frames are below a window a
//! stream and [`limits::LINK_UNREAD_BYTES`] in all.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use starling_ids::{Incarnation, NodeId};
use tokio::sync::{Semaphore, oneshot, watch};

use super::{
    outgoing::{Batch, Outgoing},
    table::{Asking, Deadline, Entry, Stage, Table},
};
use crate::{
    stream::{Endpoints, Fault, FaultKind, Opened, StreamError, inbox::Last, window::Window},
    supervise::Tasks,
    wire::{Closing, FailWhy, Frame, Hello, OpenHead, StreamId, limits},
};

/// Why a link is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) reason: Arc<str>,
    /// It was closed in good order; a stream that was not answered may be opened on another link.
    pub(crate) orderly: bool,
}

/// Why an open came to nothing.
#[derive(Debug)]
pub(crate) enum OpenError {
    Stream(StreamError),
    /// The link was closed in good order before it took the open: try another link.
    Closed,
}

/// One link, seen by everybody but the tasks that move its bytes.
pub(crate) struct Mux {
    /// Unique in this process; later links have higher numbers.
    pub(crate) number: u64,
    pub(crate) peer: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) dialled: bool,
    pub(super) payload_max: usize,
    /// What the other side's readers take.
    pub(super) window: Window,
    /// Payload bytes that may still be queued.
    pub(super) room: Semaphore,
    pub(super) out: Outgoing,
    table: Mutex<Table>,
    over: watch::Sender<Option<Ended>>,
    born: Instant,
    heard_ms: AtomicU64,
    pub(super) endpoints: Endpoints,
    pub(super) handlers: Tasks,
}

impl std::fmt::Debug for Mux {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mux({} {} #{})", self.peer, self.incarnation, self.number)
    }
}

impl Mux {
    pub(crate) fn new(peer: &Hello, dialled: bool, endpoints: Endpoints, handlers: Tasks) -> Arc<Self> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let now = Instant::now();
        Arc::new(Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            peer: peer.node.clone(),
            incarnation: peer.incarnation,
            dialled,
            payload_max: limits::FRAME_PAYLOAD_MAX.min(peer.payload_max as usize),
            window: Window::new(peer.window, peer.window_bytes),
            room: Semaphore::new(limits::LINK_QUEUE_BYTES),
            out: Outgoing::new(),
            table: Mutex::new(Table::new(if dialled { 1 } else { 2 }, now)),
            over: watch::channel(None).0,
            born: now,
            heard_ms: AtomicU64::new(0),
            endpoints,
            handlers,
        })
    }

    /// Opens a stream and waits for its answer.
    pub(crate) async fn open(self: &Arc<Self>, head: OpenHead, body: Bytes) -> Result<Opened, OpenError> {
        if body.len() > self.payload_max {
            let error = StreamError::TooLarge { len: body.len(), limit: self.payload_max };
            return Err(OpenError::Stream(error));
        }
        let (deadline, limit) = (head.context.deadline(), head.context.answer_within());
        match tokio::time::timeout(limit, self.ask(head, body, deadline)).await {
            Ok(answer) => answer,
            Err(_) => Err(OpenError::Stream(StreamError::Deadline)),
        }
    }

    async fn ask(self: &Arc<Self>, head: OpenHead, body: Bytes, deadline: Deadline) -> Result<Opened, OpenError> {
        let room = u32::try_from(body.len()).unwrap_or(u32::MAX);
        match self.room.acquire_many(room).await {
            Ok(reserved) => reserved.forget(),
            Err(_) => return Err(self.closed()),
        }
        let (sender, receiver) = oneshot::channel();
        let asking = Asking { answer: sender, context: head.context.clone(), deadline };
        let stage = Stage::Asking(Box::new(asking));
        let stream = match self.insert_asking(stage) {
            Ok(stream) => stream,
            Err(error) => {
                self.room.add_permits(room as usize);
                return Err(error);
            }
        };
        // Whoever stops waiting, by dropping this future or by its limit, withdraws the question.
        let _withdraw = Withdraw(self, stream);
        if !self.out.try_control(&Frame::Open { stream, head: Box::new(head), body }, room as usize) {
            self.remove(stream);
            self.room.add_permits(room as usize);
            let fault = Fault::new(FaultKind::Overloaded, "the link has too much to write already");
            return Err(OpenError::Stream(StreamError::Rejected(fault)));
        }
        receiver.await.unwrap_or_else(|_| Err(self.closed()))
    }

    fn insert_asking(&self, stage: Stage) -> Result<StreamId, OpenError> {
        let mut table = self.table();
        if table.ended.is_some() {
            drop(table);
            return Err(self.closed());
        }
        if table.streams.len() >= limits::STREAMS_PER_LINK_MAX {
            let fault = Fault::new(FaultKind::Overloaded, "too many streams on one link");
            return Err(OpenError::Stream(StreamError::Rejected(fault)));
        }
        let stream = table.next;
        // Ids are never reused: a link that has used them all up takes no more and is replaced.
        let Some(next) = stream.checked_add(2) else {
            table.retiring.get_or_insert(Closing::Idle);
            return Err(OpenError::Stream(StreamError::Broken("the link has used all its stream ids".to_owned())));
        };
        table.next = next;
        table.streams.insert(stream, Entry::new(stage));
        Ok(stream)
    }

    fn closed(&self) -> OpenError {
        match self.ended() {
            Some(ended) if !ended.orderly => OpenError::Stream(StreamError::Broken(ended.reason.to_string())),
            _ => OpenError::Closed,
        }
    }

    /// A reader of this side will read no more.
    pub(super) fn reader_over(&self, stream: StreamId) {
        let mut table = self.table();
        if let Some(entry) = table.streams.get_mut(&stream) {
            entry.inbox = None;
        }
        table.drop_if_over(stream, &self.out);
    }

    /// A sender of this side will send no more.
    pub(super) fn sender_over(&self, stream: StreamId) {
        let mut table = self.table();
        let lane = table.streams.get_mut(&stream).and_then(|entry| entry.lane.take());
        table.drop_if_over(stream, &self.out);
        drop((table, lane));
    }

    pub(super) fn remove(&self, stream: StreamId) -> Option<Entry> {
        let mut table = self.table();
        let entry = table.streams.remove(&stream);
        table.note_empty(&self.out);
        entry
    }

    /// The opener stopped waiting. Nothing to do once it was answered.
    fn withdraw(&self, stream: StreamId) {
        let mut table = self.table();
        if !matches!(table.streams.get(&stream), Some(Entry { stage: Stage::Asking(..), .. })) {
            return;
        }
        let entry = table.streams.remove(&stream);
        // The accept may be under way: the cancel stops its sender, the failure its reader.
        self.out.control(&Frame::Cancel { stream });
        let why = Box::new(FailWhy::Dropped("the opener went away".to_owned()));
        self.out.control(&Frame::Fail { stream, why });
        table.note_empty(&self.out);
        drop((table, entry));
    }

    /// Ends the link for everybody: each stream breaks now, with this reason.
    pub(crate) fn end(&self, ended: &Ended) {
        let streams = {
            let mut table = self.table();
            table.ended.get_or_insert_with(|| ended.clone());
            table.streams.drain().collect::<Vec<_>>()
        };
        self.room.close();
        self.out.close();
        let broken = || StreamError::Broken(ended.reason.to_string());
        for (_, entry) in streams {
            if let Stage::Asking(asking) = entry.stage {
                let error = if ended.orderly { OpenError::Closed } else { OpenError::Stream(broken()) };
                asking.answer.send(Err(error)).ok();
            }
            entry.lane.inspect(|lane| lane.stop(broken()));
            // Behind the data that has arrived.
            entry.inbox.inspect(|inbox| inbox.finish(Last::Broken(ended.reason.clone())));
        }
        self.over.send_if_modified(|over| over.is_none() && over.replace(ended.clone()).is_none());
    }

    /// Says goodbye and takes no more opens. With `Idle` and `Duplicate` only when there are no streams; then
    /// a `Duplicate` is closed as soon as the last one has ended.
    pub(crate) fn close(&self, why: Closing) {
        let mut table = self.table();
        let patient = matches!(why, Closing::Idle | Closing::Duplicate);
        if table.ended.is_some() {
            return;
        }
        if patient && !table.streams.is_empty() {
            if why == Closing::Duplicate {
                table.retiring = Some(why);
            }
            return;
        }
        table.say_goodbye(why, &self.out);
    }

    /// Why it is over, if it is.
    pub(crate) fn ended(&self) -> Option<Ended> {
        self.table().ended.clone()
    }

    /// Whether it takes new streams.
    pub(crate) fn is_open(&self) -> bool {
        let table = self.table();
        table.ended.is_none() && table.retiring.is_none()
    }

    /// Streams open now, and since when there have been none.
    pub(crate) fn load(&self) -> (usize, Duration) {
        let table = self.table();
        (table.streams.len(), table.empty_since.elapsed())
    }

    /// Time since it was made.
    pub(crate) fn age(&self) -> Duration {
        self.born.elapsed()
    }

    /// Bytes arrived.
    pub(crate) fn heard(&self) {
        let now = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard_ms.store(now, Ordering::Relaxed);
    }

    /// Time since bytes arrived last.
    pub(crate) fn silence(&self) -> Duration {
        self.born.elapsed().saturating_sub(Duration::from_millis(self.heard_ms.load(Ordering::Relaxed)))
    }

    /// Asks the other side to show that it is there: whether anything came from it within `limit`. `None`: the link has
    /// ended.
    pub(crate) async fn answers(&self, limit: Duration) -> Option<bool> {
        const LOOK_EVERY: Duration = Duration::from_millis(20);
        let asked = Instant::now();
        self.out.control(&Frame::Ping(0));
        while asked.elapsed() < limit {
            tokio::time::sleep(LOOK_EVERY).await;
            if self.ended().is_some() {
                return None;
            }
            if self.silence() < asked.elapsed() {
                return Some(true);
            }
        }
        Some(false)
    }

    /// A batch has been written.
    pub(super) fn written(&self, batch: &mut Batch) {
        let room = self.out.written(batch);
        if room > 0 {
            self.room.add_permits(room);
        }
    }

    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Withdraw<'a>(&'a Mux, StreamId);

impl Drop for Withdraw<'_> {
    fn drop(&mut self) {
        self.0.withdraw(self.1);
    }
}
