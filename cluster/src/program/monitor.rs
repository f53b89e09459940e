//! The life of an actor as others see it: started, restarted, stopped, or gone with its node.
//!
//! Called by programs through handles. The node of the actor serves a subscription; a broken link is not a death, only
//! the directory says that a node is down. Bounds: one stream a monitor; a reader that falls behind sees the newest
//! state, with all restarts counted.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context as Poller, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt, Stream, StreamExt, future::BoxFuture, stream::BoxStream};
use serde::{Deserialize, Serialize};
use starling_ids::{EndpointName, Incarnation, NodeId, RequestId};
use tokio::sync::watch;

use super::codec::{decode, decode_request, encode_reply};
use crate::{
    discovery::Snapshot,
    mesh::{Mesh, WeakMesh},
    stream::{Context, Fault, FaultKind, Incoming, StreamError, StreamHandler, StreamRx, StreamTx},
};

/// Where a node tells about its actors.
const MONITOR_ENDPOINT: &str = "starling/programs/monitor";
/// Between two tries to reach a node that is a member.
const TRY_AGAIN: Duration = Duration::from_millis(200);

/// Where an actor is, as its node counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Life {
    /// Lives begun.
    pub(super) starts: u64,
    /// Whether one is under way.
    pub(super) running: bool,
    /// No other will follow.
    pub(super) ended: bool,
    /// Lives tried, with those whose start failed; the number of the last one.
    #[serde(default)]
    pub(super) begun: u64,
    /// The number of the last life that is over.
    #[serde(default)]
    pub(super) over: u64,
    /// That life ended by a failure.
    #[serde(default)]
    pub(super) failed: bool,
    /// Why no other follows, when it was told.
    #[serde(default)]
    pub(super) why: Option<StopReason>,
}

impl Life {
    /// Whether the life of this number is over.
    fn is_over(&self, number: u64) -> bool {
        self.ended || self.over >= number
    }
}

/// Why an actor is not started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// Somebody stopped it.
    Asked,
    /// Its owner has ended, or the owner's node is down.
    OwnerGone,
    /// Its node left the cluster in order.
    Leaving,
    /// It ended by itself and its restart policy leaves it at that.
    Finished,
    /// It failed and its restart policy leaves it at that.
    Failed,
    /// It was gone before anybody could tell.
    Unknown,
}

/// What happened to an actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActorEvent {
    /// It runs; the first event about a running actor, also when it had been started long before.
    Started,
    /// It died and runs again.
    Restarted {
        /// Restarts so far.
        restarts: u64,
    },
    /// It has ended and is not started again. Nothing follows.
    Stopped(StopReason),
    /// Its node is down or lives in another incarnation. Nothing follows.
    NodeDown,
}

/// What `now` tells after `before`. Pure.
fn news(before: Option<Life>, now: Life) -> Vec<ActorEvent> {
    let mut events = Vec::new();
    let seen = before.map_or(0, |life| life.starts);
    if now.starts > seen {
        let first = seen == 0;
        events.push(if first { ActorEvent::Started } else { ActorEvent::Restarted { restarts: now.starts - 1 } });
    }
    if now.ended && !before.is_some_and(|life| life.ended) {
        events.push(ActorEvent::Stopped(now.why.unwrap_or(StopReason::Unknown)));
    }
    events
}

/// A [`Stream`] of [`ActorEvent`]s. Ends after [`ActorEvent::Stopped`] or [`ActorEvent::NodeDown`], and with the node of
/// whoever follows.
pub struct Monitor {
    events: BoxStream<'static, ActorEvent>,
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Monitor")
    }
}

impl Monitor {
    pub(super) fn new(mesh: &Mesh, node: NodeId, incarnation: Incarnation, name: String) -> Self {
        let watching = Watching::new(mesh, node, incarnation, name);
        let events = futures::stream::unfold(watching, |mut watching| async move {
            let event = watching.next().await?;
            Some((event, watching))
        });
        Self { events: events.boxed() }
    }

    /// The next event; `None` after the last one.
    pub async fn next(&mut self) -> Option<ActorEvent> {
        self.events.next().await
    }
}

impl Stream for Monitor {
    type Item = ActorEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Poller<'_>) -> Poll<Option<ActorEvent>> {
        self.events.poll_next_unpin(cx)
    }
}

struct Watching {
    mesh: Mesh,
    node: NodeId,
    incarnation: Incarnation,
    name: String,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    seen: Option<Life>,
    rx: Option<(StreamRx, StreamTx)>,
    waiting: VecDeque<ActorEvent>,
    over: bool,
}

/// Resolves when one life of an actor is over, for whatever reason; `number` counts from 1.
pub(super) async fn life_over(mesh: &Mesh, node: &NodeId, incarnation: Incarnation, name: &str, number: u64) {
    let mut watching = Watching::new(mesh, node.clone(), incarnation, name.to_owned());
    while !watching.over && !watching.seen.is_some_and(|life| life.is_over(number)) {
        watching.step().await;
    }
}

impl Watching {
    fn new(mesh: &Mesh, node: NodeId, incarnation: Incarnation, name: String) -> Self {
        let (snapshots, waiting) = (mesh.watch(), VecDeque::new());
        Self { mesh: mesh.clone(), node, incarnation, name, snapshots, seen: None, rx: None, waiting, over: false }
    }

    async fn next(&mut self) -> Option<ActorEvent> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return Some(event);
            }
            if self.over {
                return None;
            }
            self.step().await;
        }
    }

    /// Waits for one piece of news, from the actor's node or from the directory.
    async fn step(&mut self) {
        if self.is_down() {
            self.over = true;
            return self.waiting.push_back(ActorEvent::NodeDown);
        }
        match self.rx.as_mut() {
            None => self.subscribe().await,
            Some((rx, _tx)) => tokio::select! {
                heard = rx.recv() => self.hear(heard),
                changed = self.snapshots.changed() => self.over |= changed.is_err(),
                () = self.mesh.ended() => self.over = true,
            },
        }
    }

    fn is_down(&self) -> bool {
        if self.node == *self.mesh.node() {
            return self.incarnation != self.mesh.incarnation();
        }
        let snapshot = self.snapshots.borrow();
        snapshot.node(&self.node).is_none_or(|view| view.record.incarnation != self.incarnation)
    }

    async fn subscribe(&mut self) {
        let Ok(endpoint) = EndpointName::new(MONITOR_ENDPOINT) else { return self.over = true };
        let Ok(body) = encode_reply(&self.name) else { return self.over = true };
        let context = Context::subscription(RequestId(rand::random()));
        match self.mesh.open(&self.node, self.incarnation, &endpoint, context, body).await {
            Ok(opened) => {
                self.rx = Some((opened.rx, opened.tx));
                self.hear(Some(Ok(opened.reply)));
            }
            Err(StreamError::Rejected(fault)) if fault.kind == FaultKind::NotFound => self.ended(),
            Err(error) => {
                tracing::debug!(actor = %self.name, node = %self.node, %error, "not monitored now");
                tokio::select! {
                    () = tokio::time::sleep(TRY_AGAIN) => {}
                    changed = self.snapshots.changed() => self.over |= changed.is_err(),
                    () = self.mesh.ended() => self.over = true,
                }
            }
        }
    }

    fn hear(&mut self, heard: Option<Result<Bytes, StreamError>>) {
        match heard {
            Some(Ok(frame)) => match decode::<Life>(&frame) {
                Ok(life) => {
                    self.waiting.extend(news(self.seen, life));
                    self.over |= life.ended;
                    self.seen = Some(life);
                }
                Err(error) => {
                    tracing::warn!(%error, "news of an actor cannot be read");
                    self.rx = None;
                }
            },
            None => self.ended(),
            Some(Err(_)) => self.rx = None,
        }
    }

    fn ended(&mut self) {
        self.over = true;
        self.waiting.push_back(ActorEvent::Stopped(StopReason::Unknown));
    }
}

/// Lets other nodes, and this one, follow the actors of this node.
pub(super) fn serve(mesh: &Mesh) {
    if let Ok(endpoint) = EndpointName::new(MONITOR_ENDPOINT) {
        mesh.endpoints().serve(endpoint, Arc::new(MonitorDoor(mesh.downgrade())));
    }
}

struct MonitorDoor(WeakMesh);

impl StreamHandler for MonitorDoor {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let life = decode_request::<String>(&incoming.body).and_then(|name| {
            let mesh = self.0.upgrade();
            let life = mesh.and_then(|mesh| mesh.programs().life(&name));
            life.ok_or_else(|| Fault::new(FaultKind::NotFound, format!("no actor {name:?} on this node")))
        });
        async move {
            match life {
                Ok(life) => tell(incoming, life).await,
                Err(fault) => incoming.acceptor.reject(fault),
            }
        }
        .boxed()
    }
}

async fn tell(incoming: Incoming, mut life: watch::Receiver<Life>) {
    let mut now = *life.borrow_and_update();
    let Ok(first) = encode_reply(&now) else { return };
    let Some((tx, _rx)) = incoming.acceptor.accept(first) else { return };
    while !now.ended {
        tokio::select! {
            _reason = tx.cancelled() => return,
            changed = life.changed() => {
                if changed.is_err() {
                    break;
                }
            }
        }
        now = *life.borrow_and_update();
        let Ok(frame) = encode_reply(&now) else { return };
        if tx.send(frame).await.is_err() {
            return;
        }
    }
    tx.end();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_count_every_restart_and_end_once() {
        let life = |starts, running, ended| Life { starts, running, ended, ..Life::default() };
        assert_eq!(news(None, life(1, true, false)), [ActorEvent::Started]);
        assert_eq!(news(None, life(4, true, false)), [ActorEvent::Started]);
        assert_eq!(news(None, life(0, false, false)), []);
        assert_eq!(news(Some(life(0, false, false)), life(1, true, false)), [ActorEvent::Started]);
        assert_eq!(news(Some(life(1, true, false)), life(1, false, false)), []);
        assert_eq!(news(Some(life(1, true, false)), life(3, true, false)), [ActorEvent::Restarted { restarts: 2 }]);
        let asked = Life { why: Some(StopReason::Asked), ..life(3, false, true) };
        assert_eq!(news(Some(life(3, true, false)), asked), [ActorEvent::Stopped(StopReason::Asked)]);
        assert_eq!(news(Some(life(3, false, true)), life(3, false, true)), []);
    }

    #[test]
    fn a_life_is_over_by_its_number_or_with_the_actor() {
        let life = Life { begun: 3, over: 2, ..Life::default() };
        assert_eq!([1, 2, 3].map(|number| life.is_over(number)), [true, true, false]);
        assert!(Life { ended: true, ..life }.is_over(3));
    }
}
