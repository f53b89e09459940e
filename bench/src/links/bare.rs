//! The bare socket: length-delimited frames over one TCP connection, plain or under the mesh's TLS.
//!
//! What a careful program would write by hand for many streams over one socket: `length u32 | stream u32 | kind u8 |
//! payload`, one writer that drains what waits into one write of up to 64 KiB, one reader that takes whatever has
//! arrived and hands each frame to its stream's queue. No credits, no cancel, no deadlines, no failures.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::{mpsc, oneshot},
};

use super::common::{Client, Counts, Failure, Plan, Rx, Tx, decode_plan, encode_plan, encode_token, produce};

/// Frames that wait for the writer.
const QUEUE: usize = 4096;
/// Frames that wait for one reader.
const WINDOW: usize = 64;
/// Bytes put together in one write.
const WRITE: usize = 64 << 10;
/// The read buffer.
const READ: usize = 256 << 10;

const OPEN: u8 = 1;
const DATA: u8 = 2;
const CALL: u8 = 3;
const REPLY: u8 = 4;
/// All streams' tokens come from one loop without tasks and queues.
const LOOP: u8 = 5;

struct Out {
    stream: u32,
    kind: u8,
    payload: Vec<u8>,
}

fn put(out: &mut BytesMut, stream: u32, kind: u8, payload: &[u8]) {
    out.put_u32(u32::try_from(5 + payload.len()).unwrap_or(u32::MAX));
    out.put_u32(stream);
    out.put_u8(kind);
    out.put_slice(payload);
}

async fn write(mut to: impl AsyncWrite + Unpin, mut queue: mpsc::Receiver<Out>) -> std::io::Result<()> {
    let (mut waiting, mut out) = (Vec::with_capacity(1024), BytesMut::with_capacity(2 * WRITE));
    while queue.recv_many(&mut waiting, 1024).await > 0 {
        for Out { stream, kind, payload } in waiting.drain(..) {
            put(&mut out, stream, kind, &payload);
            if out.len() >= WRITE {
                to.write_all(&out).await?;
                out.clear();
            }
        }
        to.write_all(&out).await?;
        to.flush().await?;
        out.clear();
    }
    Ok(())
}

struct Frames<R> {
    from: R,
    buffer: BytesMut,
}

impl<R: AsyncRead + Unpin> Frames<R> {
    fn new(from: R) -> Self {
        Self { from, buffer: BytesMut::with_capacity(READ) }
    }

    /// Stream, kind and payload of the next frame; the payload is a slice of the read buffer.
    async fn next(&mut self) -> std::io::Result<Option<(u32, u8, Bytes)>> {
        loop {
            if let Some(prefix) = self.buffer.first_chunk::<4>() {
                let length = u32::from_be_bytes(*prefix) as usize;
                if self.buffer.len() >= 4 + length {
                    self.buffer.advance(4);
                    let mut frame = self.buffer.split_to(length).freeze();
                    let (stream, kind) = (frame.get_u32(), frame.get_u8());
                    return Ok(Some((stream, kind, frame)));
                }
            }
            self.buffer.reserve(READ);
            if self.from.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }
}

/// The side that sends tokens and answers calls, for one connection.
pub(crate) async fn serve(
    from: impl AsyncRead + Unpin + Send + 'static,
    to: impl AsyncWrite + Unpin + Send + 'static,
) -> Result<(), Failure> {
    let (queue, waiting) = mpsc::channel(QUEUE);
    let mut tasks = tokio::task::JoinSet::new();
    // The writer starts with the first frame, because a loop without tasks writes by itself.
    let mut writer = Some((to, waiting));
    let mut frames = Frames::new(from);
    while let Some((stream, kind, payload)) = frames.next().await? {
        let (queue, plan) = (queue.clone(), decode_plan(&payload));
        if let Some((to, waiting)) = writer.take() {
            match plan {
                Some(plan) if kind == LOOP => {
                    tasks.spawn(async move { all_streams(to, plan).await.unwrap_or_default() })
                }
                _ => tasks.spawn(async move { write(to, waiting).await.unwrap_or_default() }),
            };
        }
        match (kind, plan) {
            (OPEN, Some(plan)) => {
                tasks.spawn(produce(Sender { stream, queue }, plan));
            }
            (CALL, _) => {
                // A task each, as every handler has one.
                tasks.spawn(async move {
                    let reply = Out { stream, kind: REPLY, payload: payload.to_vec() };
                    queue.send(reply).await.unwrap_or_default();
                });
            }
            _ => {}
        }
        while tasks.try_join_next().is_some() {}
    }
    Ok(())
}

async fn all_streams(mut to: impl AsyncWrite + Unpin, plan: Plan) -> std::io::Result<()> {
    let (mut out, mut payload) = (BytesMut::with_capacity(2 * WRITE), Vec::new());
    for index in 0.. {
        for stream in 0..plan.streams {
            payload.clear();
            encode_token(index, &mut payload);
            put(&mut out, stream, DATA, &payload);
            if out.len() >= WRITE {
                to.write_all(&out).await?;
                out.clear();
            }
        }
    }
    Ok(())
}

struct Sender {
    stream: u32,
    queue: mpsc::Sender<Out>,
}

impl Tx for Sender {
    async fn send(&mut self, payload: Vec<u8>) -> bool {
        self.queue.send(Out { stream: self.stream, kind: DATA, payload }).await.is_ok()
    }
}

#[derive(Default)]
struct Table {
    streams: HashMap<u32, mpsc::Sender<Bytes>>,
    calls: HashMap<u32, oneshot::Sender<Bytes>>,
}

/// The side that opens.
#[derive(Clone)]
pub(crate) struct BareClient {
    queue: mpsc::Sender<Out>,
    table: Arc<Mutex<Table>>,
    next: Arc<AtomicU32>,
}

impl BareClient {
    pub(crate) fn new(
        from: impl AsyncRead + Unpin + Send + 'static,
        to: impl AsyncWrite + Unpin + Send + 'static,
    ) -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE);
        tokio::spawn(async move { write(to, waiting).await.unwrap_or_default() });
        let table = Arc::new(Mutex::new(Table::default()));
        let shared = table.clone();
        tokio::spawn(async move {
            dispatch(Frames::new(from), &shared).await.unwrap_or_default();
        });
        Self { queue, table, next: Arc::default() }
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn send(&self, stream: u32, kind: u8, payload: Vec<u8>) -> Result<(), Failure> {
        self.queue.send(Out { stream, kind, payload }).await.map_err(|_| "the connection is gone".into())
    }
}

async fn dispatch(mut frames: Frames<impl AsyncRead + Unpin>, table: &Mutex<Table>) -> Result<(), Failure> {
    // Its own copy of where each stream's frames go: no lock for a frame.
    let mut streams: HashMap<u32, mpsc::Sender<Bytes>> = HashMap::new();
    while let Some((stream, kind, payload)) = frames.next().await? {
        if kind == REPLY {
            let call = table.lock().unwrap_or_else(PoisonError::into_inner).calls.remove(&stream);
            if let Some(call) = call {
                call.send(payload).unwrap_or_default();
            }
            continue;
        }
        if !streams.contains_key(&stream) {
            let table = table.lock().unwrap_or_else(PoisonError::into_inner);
            streams.extend(table.streams.get(&stream).map(|queue| (stream, queue.clone())));
        }
        streams.get(&stream).ok_or("a token of no stream")?.send(payload).await?;
    }
    Ok(())
}

impl Client for BareClient {
    type Rx = Receiver;

    async fn open(&self, plan: Plan) -> Result<Receiver, Failure> {
        let (sender, receiver) = mpsc::channel(WINDOW);
        self.table().streams.insert(plan.stream, sender);
        self.send(plan.stream, OPEN, encode_plan(plan)).await?;
        Ok(Receiver(receiver))
    }

    async fn call(&self, body: Vec<u8>) -> Result<Bytes, Failure> {
        let (sender, receiver) = oneshot::channel();
        let call = self.next.fetch_add(1, Ordering::Relaxed);
        self.table().calls.insert(call, sender);
        self.send(call, CALL, body).await?;
        Ok(receiver.await?)
    }
}

pub(crate) struct Receiver(mpsc::Receiver<Bytes>);

impl Rx for Receiver {
    async fn recv(&mut self) -> Option<Bytes> {
        self.0.recv().await
    }
}

/// Reads and counts all streams' tokens in one loop: what a socket can do when nobody is behind it.
pub(crate) async fn count_all(
    from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    plan: Plan,
    counts: Arc<Counts>,
) -> Result<(), Failure> {
    let mut out = BytesMut::new();
    put(&mut out, 0, LOOP, &encode_plan(plan));
    to.write_all(&out).await?;
    to.flush().await?;
    let mut frames = Frames::new(from);
    while let Some((stream, _, payload)) = frames.next().await? {
        counts.took(stream, &payload);
    }
    Ok(())
}
