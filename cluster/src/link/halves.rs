//! How the two halves of a stream reach the link that carries it.
//!
//! Built by [`super::mux`] when a stream is accepted. Never waits but for room in the writer's queue.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use futures::{FutureExt, future::BoxFuture};
use tokio::{sync::mpsc, time::Instant};

use super::mux::Mux;
use crate::{
    stream::{
        Context, StreamError, StreamRx, StreamTx,
        channel::{Feedback, Item, Lane, Outlet, STREAM_WINDOW_FRAMES},
        gauges::OpenGuard,
    },
    wire::{FailWhy, Frame, StreamId, limits::CREDIT_PORTION},
};

/// What the link's table keeps of a stream.
pub(super) struct Made {
    pub(super) inbound: mpsc::Sender<Item>,
    pub(super) lane: Arc<Lane>,
}

/// Both halves of an accepted stream, and the link's side of them.
pub(super) fn make(
    mux: &Arc<Mux>,
    stream: StreamId,
    context: &Context,
    deadline: Option<Instant>,
) -> (StreamTx, StreamRx, Made) {
    let (inbound, queue) = mpsc::channel(STREAM_WINDOW_FRAMES + 1);
    let lane = Lane::new(context, mux.window);
    let open = OpenGuard::new(context);
    let outlet = Arc::new(Outbound { mux: mux.clone(), stream });
    let feedback = Arc::new(Inbound { mux: mux.clone(), stream, taken: AtomicU32::new(0) });
    let tx = StreamTx::new(outlet, lane.clone(), deadline, open.clone());
    let rx = StreamRx::new(queue, feedback, deadline, open);
    (tx, rx, Made { inbound, lane })
}

/// Drops halves of a stream that never came about. What they send is about an id that the other side has
/// given up, and is ignored there.
pub(super) fn discard(tx: StreamTx, rx: StreamRx) {
    drop((tx, rx));
}

#[derive(Debug)]
struct Outbound {
    mux: Arc<Mux>,
    stream: StreamId,
}

impl Outlet for Outbound {
    fn frame_max(&self) -> usize {
        self.mux.payload_max
    }

    fn reserve(&self, len: usize) -> BoxFuture<'_, Result<(), StreamError>> {
        async move {
            match self.mux.room.acquire_many(room(len)).await {
                Ok(reserved) => {
                    reserved.forget();
                    Ok(())
                }
                Err(_) => Err(StreamError::Broken("the link is gone".to_owned())),
            }
        }
        .boxed()
    }

    fn try_reserve(&self, len: usize) -> bool {
        self.mux.room.try_acquire_many(room(len)).map(|reserved| reserved.forget()).is_ok()
    }

    fn push(&self, item: Item) {
        let stream = self.stream;
        let frame = match item {
            Item::Data(payload) => {
                let room = room(payload.len());
                self.mux.send_data(Frame::Data { stream, payload }, room);
                return;
            }
            Item::End => Frame::End { stream },
            Item::Fail(fault) => Frame::Fail { stream, why: FailWhy::Fault(fault) },
            Item::Broken(why) => Frame::Fail { stream, why: FailWhy::Dropped(why.to_string()) },
        };
        // Behind the data of the stream, so that it is the last word.
        self.mux.send_data(frame, 0);
        self.mux.sender_over(stream);
    }
}

#[derive(Debug)]
struct Inbound {
    mux: Arc<Mux>,
    stream: StreamId,
    taken: AtomicU32,
}

impl Feedback for Inbound {
    fn taken(&self) {
        // Only the one reader counts here.
        if self.taken.fetch_add(1, Ordering::Relaxed) + 1 >= CREDIT_PORTION {
            let frames = self.taken.swap(0, Ordering::Relaxed);
            self.mux.send_control(Frame::Credit { stream: self.stream, frames }, 0);
        }
    }

    fn cancel(&self) {
        self.mux.send_control(Frame::Cancel { stream: self.stream }, 0);
    }

    fn closed(&self) {
        self.mux.reader_over(self.stream);
    }
}

/// Frames are far below 4 GiB; the limit table says so.
fn room(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
