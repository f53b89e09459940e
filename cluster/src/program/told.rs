//! Messages to actors on other nodes, sent without waiting for an answer.
//!
//! An [`Outbox`] belongs to one [`super::RemoteActor`] and its clones. While it holds messages, a task of the node's
//! handler set sends them, in order, over one stream, and closes it once the other side has taken them all into the
//! actor's mailbox. Bounds: [`MESSAGES_MAX`] messages and [`BYTES_MAX`] bytes an outbox; behind it the stream's window
//! and the actor's mailbox, so a slow actor fills its senders' outboxes and no memory. Delivery is at most once.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::FutureExt;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use starling_ids::{Metric, NodeId, RequestId};
use thiserror::Error;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use super::{
    actor::{Actor, Mailbox},
    call::{CallInfo, current_call},
    codec::{decode_request, encode},
    error::{CallError, DirectoryFault, RequestFault},
    gate::Pass,
    handlers::{Asked, Run},
    instances::InstanceId,
    monitor::Life,
};
use crate::{
    mesh::Mesh,
    stream::{Advice, Context, Fault, FaultKind, Opened, StreamError},
    wire::limits::FRAME_PAYLOAD_MAX,
};

/// Messages that wait for one actor on this node.
const MESSAGES_MAX: usize = 1_024;
/// Their bytes.
const BYTES_MAX: usize = 16 << 20;
/// Between two tries to reach the node.
const TRY_AGAIN: Duration = Duration::from_millis(100);
/// The longest such wait.
const TRY_AGAIN_MAX: Duration = Duration::from_secs(2);
/// How long a refusal answers further messages at once.
const REFUSED_FOR: Duration = Duration::from_secs(1);

/// Why a message was not taken for sending.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TellError {
    /// The directory knows that the actor's node is down or in another life.
    #[error(transparent)]
    Directory(#[from] DirectoryFault),
    /// The outbox is full: the actor or the way to it is slow.
    #[error("{MESSAGES_MAX} messages or {} MiB wait for this actor already", BYTES_MAX >> 20)]
    Full,
    /// The last message came to a node where no such actor runs.
    #[error("no actor {name:?} runs on {node}")]
    NoActor {
        /// The node.
        node: NodeId,
        /// The actor.
        name: String,
    },
    /// The message cannot be sent: it cannot be encoded, or is too large.
    #[error(transparent)]
    Message(RequestFault),
    /// This node has ended, or works on too much.
    #[error("this node sends nothing now")]
    Closed,
}

impl TellError {
    /// What may be tried next. The message was not sent.
    #[must_use]
    pub fn advice(&self) -> Advice {
        match self {
            Self::Directory(fault) => CallError::Directory(fault.clone()).advice(),
            Self::Full => Advice::RetryAfter(100),
            Self::NoActor { .. } | Self::Message(_) | Self::Closed => Advice::GiveUp,
        }
    }
}

/// One message on the wire.
#[derive(Serialize, Deserialize)]
struct Told {
    /// The call that it was sent in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    context: Option<Context>,
    body: ByteBuf,
}

/// Messages on their way to one actor.
#[derive(Debug)]
pub(super) struct Outbox {
    to: InstanceId,
    name: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Bytes>,
    bytes: usize,
    sending: bool,
    /// Answers what is told until then.
    refused: Option<(Instant, TellError)>,
}

impl Outbox {
    pub(super) fn new(to: InstanceId, name: String) -> Arc<Self> {
        Arc::new(Self { to, name, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a message, and sees to it that somebody sends it.
    pub(super) fn put(self: &Arc<Self>, mesh: &Mesh, message: &impl Serialize) -> Result<(), TellError> {
        let frame = frame(message).map_err(TellError::Message)?;
        mesh.lives(&self.to.node, self.to.incarnation).map_err(|error| self.refusal(&error))?;
        {
            let mut state = self.lock();
            match &state.refused {
                Some((until, error)) if Instant::now() < *until => return Err(error.clone()),
                _ => state.refused = None,
            }
            if state.queue.len() >= MESSAGES_MAX || state.bytes + frame.len() > BYTES_MAX {
                return Err(TellError::Full);
            }
            state.bytes += frame.len();
            state.queue.push_back(frame);
            if std::mem::replace(&mut state.sending, true) {
                return Ok(());
            }
        }
        // Counted before it is started: whoever waits for the outboxes sees it.
        let Ok(pass) = mesh.programs().outgoing().enter() else {
            self.give_up(None, "closed");
            return Err(TellError::Closed);
        };
        let sending = Sending { outbox: self.clone(), mesh: mesh.clone(), over: false, _pass: pass };
        if mesh.spawn_handler(sending.run()) {
            return Ok(());
        }
        // The task set is closed or full; its future was dropped and has lost what was here.
        Err(TellError::Closed)
    }

    fn refusal(&self, error: &StreamError) -> TellError {
        match CallError::from(error.clone()) {
            CallError::Directory(fault) => fault.into(),
            CallError::Request(_) => TellError::NoActor { node: self.to.node.clone(), name: self.name.clone() },
        }
    }

    /// The first message, or the end of sending.
    fn first(&self) -> Option<Bytes> {
        let mut state = self.lock();
        let first = state.queue.pop_front();
        match &first {
            Some(frame) => state.bytes -= frame.len(),
            None => state.sending = false,
        }
        first
    }

    fn put_back(&self, frame: Bytes) {
        let mut state = self.lock();
        state.bytes += frame.len();
        state.queue.push_front(frame);
    }

    fn next(&self) -> Option<Bytes> {
        let mut state = self.lock();
        let next = state.queue.pop_front()?;
        state.bytes -= next.len();
        Some(next)
    }

    /// Nothing that waits will arrive.
    fn give_up(&self, refused: Option<TellError>, reason: &'static str) {
        let mut state = self.lock();
        let lost = state.queue.len() as u64;
        state.queue.clear();
        (state.bytes, state.sending) = (0, false);
        state.refused = refused.map(|error| (Instant::now() + REFUSED_FOR, error));
        drop(state);
        if lost > 0 {
            metrics::counter!(Metric::ProgramTellsLost.name(), "reason" => reason).increment(lost);
            tracing::warn!(to = %self.to, lost, reason, "messages were not delivered");
        }
    }
}

fn frame(message: &impl Serialize) -> Result<Bytes, RequestFault> {
    let body = ByteBuf::from(Vec::from(encode(message)?));
    let frame = encode(&Told { context: current_call().map(|call| call.child()), body })?;
    if frame.len() > FRAME_PAYLOAD_MAX {
        return Err(RequestFault::TooLarge { len: frame.len(), limit: FRAME_PAYLOAD_MAX });
    }
    Ok(frame)
}

/// The task that empties an outbox. Dropped early, it loses what is in it.
struct Sending {
    outbox: Arc<Outbox>,
    mesh: Mesh,
    over: bool,
    _pass: Pass,
}

impl Drop for Sending {
    fn drop(&mut self) {
        if !self.over {
            self.outbox.give_up(None, "the node ended");
        }
    }
}

impl Sending {
    async fn run(mut self) {
        self.send_all().await;
        // Somebody else may be sending by now.
        self.over = true;
    }

    async fn send_all(&self) {
        let mut wait = TRY_AGAIN;
        while let Some(first) = self.outbox.first() {
            match self.burst(first).await {
                Ok(()) => wait = TRY_AGAIN,
                Err(error) if self.is_final(&error) => {
                    let refusal = self.outbox.refusal(&error);
                    // The message that met the refusal is lost as well.
                    metrics::counter!(Metric::ProgramTellsLost.name(), "reason" => error.label()).increment(1);
                    return self.outbox.give_up(Some(refusal), error.label());
                }
                Err(error) => {
                    tracing::debug!(to = %self.outbox.to, %error, "messages wait");
                    sleep(wait).await;
                    wait = (wait * 2).min(TRY_AGAIN_MAX);
                }
            }
        }
    }

    /// Sends until the outbox is empty, and waits until the other side has taken it all.
    async fn burst(&self, first: Bytes) -> Result<(), StreamError> {
        let InstanceId { node, incarnation, endpoint } = &self.outbox.to;
        let context = Context::subscription(RequestId(rand::random()));
        let opened = self.mesh.open(node, *incarnation, endpoint, context, Bytes::new()).await;
        let Opened { tx, mut rx, .. } = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.outbox.put_back(first);
                return Err(error);
            }
        };
        let mut next = Some(first);
        while let Some(frame) = next {
            if let Err(error) = tx.send(frame.clone()).await {
                // Not sent: it goes first on the next stream.
                self.outbox.put_back(frame);
                return Err(error);
            }
            next = self.outbox.next();
        }
        tx.end();
        match rx.recv().await {
            Some(Err(error)) => Err(error),
            Some(Ok(_)) | None => Ok(()),
        }
    }

    /// Whether a later try cannot reach this life of the actor.
    fn is_final(&self, error: &StreamError) -> bool {
        match error {
            StreamError::UnknownNode(_) | StreamError::Down { .. } => true,
            StreamError::Stale { wanted, current, .. } => wanted < current,
            StreamError::Rejected(fault) | StreamError::Failed(fault) => {
                matches!(fault.kind, FaultKind::NotFound | FaultKind::StaleIncarnation)
            }
            _ => false,
        }
    }
}

/// The other side: puts messages into the mailbox as they come, while there is room and the actor runs.
pub(super) fn listen<A: Actor>(mailbox: Mailbox<A>, life: Arc<watch::Sender<Life>>) -> Arc<Run> {
    Arc::new(move |asked: Asked| {
        let (mailbox, life) = (mailbox.clone(), life.subscribe());
        async move {
            let Some((tx, mut rx)) = asked.acceptor.accept(Bytes::new()) else { return };
            let peer = asked.peer;
            while let Some(frame) = rx.recv().await {
                let Ok(frame) = frame else { return };
                match take(&mailbox, life.clone(), &peer, &frame).await {
                    Ok(()) => {}
                    Err(fault) if fault.kind == FaultKind::NotFound => return tx.fail(fault),
                    Err(fault) => tracing::warn!(%peer, %fault, "a message to an actor was lost"),
                }
            }
            tx.end();
        }
        .boxed()
    })
}

async fn take<A: Actor>(
    mailbox: &Mailbox<A>,
    mut life: watch::Receiver<Life>,
    peer: &NodeId,
    frame: &[u8],
) -> Result<(), Fault> {
    let Told { context, body } = decode_request(frame)?;
    let request: A::Request = decode_request(&body)?;
    let call = context.map(|context| CallInfo::new(peer.clone(), context));
    // One that is being restarted is waited for; its sender's queues are bounded.
    match life.wait_for(|life| life.running || life.ended).await {
        Ok(life) if life.running => {}
        _ => return Err(Fault::new(FaultKind::NotFound, "the actor has ended")),
    }
    mailbox.take(request, call).await
}
