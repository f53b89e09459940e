//! How the two halves of a stream reach the link that carries it.
//!
//! Built by [`super::mux`] when a stream is accepted. Never waits but for room in the writer's queue.

use std::sync::Arc;

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use tokio::time::Instant;

use super::mux::Mux;
use crate::{
    stream::{
        Context, StreamError, StreamRx, StreamTx,
        channel::Outlet,
        gauges::OpenGuard,
        inbox::{Inbox, Last},
        lane::Lane,
        reader::Feedback,
    },
    wire::{FailWhy, Frame, StreamId},
};

/// What the link's table keeps of a stream.
pub(super) struct Made {
    pub(super) inbox: Arc<Inbox>,
    pub(super) lane: Arc<Lane>,
}

/// Both halves of an accepted stream, and the link's side of them.
pub(super) fn make(
    mux: &Arc<Mux>,
    stream: StreamId,
    context: &Context,
    deadline: Option<Instant>,
) -> (StreamTx, StreamRx, Made) {
    // Ids of one side's streams go by two.
    let (inbox, lane) = (Inbox::one_of_many(stream / 2), Lane::new(context, mux.window));
    let open = OpenGuard::new(context);
    let outlet = Arc::new(Outbound { mux: mux.clone(), stream });
    let feedback = Arc::new(Inbound { mux: mux.clone(), stream });
    let tx = StreamTx::new(outlet, lane.clone(), deadline, open.clone());
    let rx = StreamRx::new(inbox.clone(), feedback, deadline, open);
    (tx, rx, Made { inbox, lane })
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

    fn push(&self, frame: Bytes) {
        let room = frame.len();
        self.mux.out.data(self.stream, frame, room);
    }

    fn finish(&self, last: Last) {
        let stream = self.stream;
        let fail = |why| Frame::Fail { stream, why: Box::new(why) };
        let frame = match last {
            Last::End => Frame::End { stream },
            Last::Fail(fault) => fail(FailWhy::Fault(fault)),
            Last::Broken(why) => fail(FailWhy::Dropped(why.to_string())),
        };
        // Behind the data of the stream, so that it is the last word.
        self.mux.out.behind_data(&frame);
        self.mux.sender_over(stream);
    }
}

#[derive(Debug)]
struct Inbound {
    mux: Arc<Mux>,
    stream: StreamId,
}

impl Feedback for Inbound {
    fn credit(&self, amount: u32) {
        self.mux.out.control(&Frame::Credit { stream: self.stream, amount });
    }

    fn cancel(&self) {
        self.mux.out.control(&Frame::Cancel { stream: self.stream });
    }

    fn closed(&self) {
        self.mux.reader_over(self.stream);
    }
}

/// Frames are far below 4 GiB; the limit table says so.
fn room(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
