//! Streams inside one process: two bounded channels with the semantics of a link and no serialization.
//!
//! Called by [`crate::mesh::Mesh::open`] when the node addressed is this one. The handler's future runs in
//! the node's task set, never detached. Bounds: a window a direction ([`super::window`]).

use std::sync::Arc;

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use starling_ids::{EndpointName, NodeId};
use tokio::{sync::oneshot, time::Instant};

use super::{
    Acceptor, Context, Endpoints, Fault, FaultKind, Incoming, Opened, StreamError, StreamRx, StreamTx,
    channel::Outlet,
    gauges::OpenGuard,
    inbox::{Inbox, Last},
    lane::Lane,
    reader::Feedback,
    window::Window,
};
use crate::{supervise::Tasks, wire::limits::FRAME_PAYLOAD_MAX};

/// One direction seen from its sender: straight into the reader's queue.
#[derive(Debug)]
struct Direct(Arc<Inbox>);

impl Outlet for Direct {
    fn frame_max(&self) -> usize {
        FRAME_PAYLOAD_MAX
    }

    fn reserve(&self, _len: usize) -> BoxFuture<'_, Result<(), StreamError>> {
        async { Ok(()) }.boxed()
    }

    fn try_reserve(&self, _len: usize) -> bool {
        true
    }

    fn push(&self, frame: Bytes) {
        // Never over the window, because the lane has the same one; dropped when the reader is gone.
        self.0.deliver(frame);
    }

    fn finish(&self, last: Last) {
        self.0.finish(last);
    }
}

/// One direction seen from its reader.
#[derive(Debug)]
struct Back(Arc<Lane>);

impl Feedback for Back {
    fn credit(&self, amount: u32) {
        self.0.grant(amount);
    }

    fn cancel(&self) {
        self.0.stop(StreamError::Cancelled);
    }

    fn closed(&self) {}
}

fn pair(context: &Context, deadline: Option<Instant>) -> ((StreamTx, StreamRx), (StreamTx, StreamRx)) {
    let (near_open, far_open) = (OpenGuard::new(context), OpenGuard::new(context));
    let (near_lane, far_lane) = (Lane::new(context, Window::OURS), Lane::new(context, Window::OURS));
    let (to_far, to_near) = (Inbox::new(), Inbox::new());
    let near = (
        StreamTx::new(Arc::new(Direct(to_far.clone())), near_lane.clone(), deadline, near_open.clone()),
        StreamRx::new(to_near.clone(), Arc::new(Back(far_lane.clone())), deadline, near_open)
            .with_default_inactivity(context),
    );
    let far = (
        StreamTx::new(Arc::new(Direct(to_near)), far_lane, deadline, far_open.clone()),
        StreamRx::new(to_far, Arc::new(Back(near_lane)), deadline, far_open),
    );
    (near, far)
}

/// Opens a stream to an endpoint of this node.
pub(crate) async fn open(
    endpoints: &Endpoints,
    tasks: &Tasks,
    node: &NodeId,
    (endpoint, context, body): (&EndpointName, Context, Bytes),
) -> Result<Opened, StreamError> {
    let Some(handler) = endpoints.get(endpoint) else {
        return Err(StreamError::Rejected(endpoints.not_found(endpoint)));
    };
    let (sender, receiver) = oneshot::channel();
    let (for_pair, deadline) = (context.clone(), context.deadline());
    let acceptor = Acceptor::new(move |verdict| match verdict {
        Ok(reply) => {
            let ((tx, rx), far) = pair(&for_pair, deadline);
            sender.send(Ok(Opened { reply, tx, rx })).is_ok().then_some(far)
        }
        Err(fault) => {
            // An opener that has gone needs no reason.
            sender.send(Err(StreamError::Rejected(fault))).ok();
            None
        }
    });
    let limit = context.answer_within();
    let incoming = Incoming { peer: node.clone(), context, body, acceptor };
    // The handler is entered inside the task: whatever it does, it cannot hurt the opener.
    if !tasks.spawn(async move { handler.open(incoming).await }) {
        return Err(StreamError::Rejected(Fault::new(FaultKind::Overloaded, "too many streams are being handled")));
    }
    match tokio::time::timeout(limit, receiver).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(StreamError::Broken("the handler vanished".to_owned())),
        Err(_) => Err(StreamError::Deadline),
    }
}
