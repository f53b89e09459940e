//! From an outbox to a stream: one task per request and per subscriber, owned by the worker actor.
//!
//! Called by the doors once a stream is accepted. A slow client makes its own task wait for credit; what the
//! engine produces meanwhile waits in the outbox, which holds the request's whole budget. Whatever ends the task,
//! the sequences are cancelled unless they ended, and the client sees a typed end. While the worker wants to be rid of its
//! requests, clients that can are asked now and then to go elsewhere.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use serde::Serialize;
use starling_cluster::stream::{Fault, FaultKind, StreamRx, StreamTx};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval_at, sleep_until},
};

use super::{
    WorkerShared,
    leaving::LiveEntry,
    port::{CancelGuard, Command, Delivery, Port},
    publisher::{SubscriberId, encode},
};
use crate::{
    generate::WayNote,
    report::{LoadReport, WorkerNews},
};

/// How often a silent request stream shows that its worker is alive; well below the reader's inactivity limit.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// An engine that has not come round for this long is not vouched for.
const STUCK: Duration = Duration::from_secs(10);

/// What the client of a cut-off answer reads, whichever of the two it was.
const WORKER_ENDED: &str = "the worker ended before the answer did: it is shutting down, or it failed and starts again";

/// How often a subscriber hears of the load even if it stays as it is.
pub(crate) const REPORT_EVERY: Duration = Duration::from_millis(200);

/// A sending half that ends with a typed fault when it is dropped without another end.
#[derive(Debug)]
pub(crate) struct TypedEnd(Option<StreamTx>);

impl TypedEnd {
    pub(crate) fn new(tx: StreamTx) -> Self {
        Self(Some(tx))
    }

    fn end(mut self, fault: Option<Fault>) {
        match (self.0.take(), fault) {
            (Some(tx), Some(fault)) => tx.fail(fault),
            (Some(tx), None) => tx.end(),
            (None, _) => {}
        }
    }
}

impl Drop for TypedEnd {
    fn drop(&mut self) {
        if let Some(tx) = self.0.take() {
            tx.fail(Fault::new(FaultKind::Unavailable, WORKER_ENDED));
        }
    }
}

/// Counts a request as in flight at this worker while it lives.
#[derive(Debug)]
pub(crate) struct InFlightGuard(Arc<WorkerShared>);

impl InFlightGuard {
    pub(crate) fn new(shared: &Arc<WorkerShared>) -> Self {
        shared.in_flight.send_modify(|count| *count += 1);
        Self(shared.clone())
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.in_flight.send_modify(|count| *count = count.saturating_sub(1));
    }
}

/// How long after a client was asked to leave it is asked again; twice as long each time.
const LEAVE_AGAIN: Duration = Duration::from_secs(1);
const LEAVE_AGAIN_MAX: Duration = Duration::from_secs(16);

/// When to ask a client to leave.
#[derive(Debug)]
pub(crate) struct Wish {
    wanted: watch::Receiver<bool>,
    pause: Duration,
    next: Instant,
}

impl Wish {
    pub(crate) fn of(shared: &WorkerShared) -> Self {
        Self { wanted: shared.leave.subscribe(), pause: LEAVE_AGAIN, next: Instant::now() }
    }

    /// Waits until it is to be asked. Never, when it cannot leave. Cancelling the wait loses nothing.
    async fn due(wish: &mut Option<Self>) {
        let Some(wish) = wish else { return std::future::pending().await };
        if wish.wanted.wait_for(|wanted| *wanted).await.is_err() {
            return std::future::pending().await;
        }
        sleep_until(wish.next).await;
        wish.next = Instant::now() + wish.pause;
        wish.pause = (wish.pause * 2).min(LEAVE_AGAIN_MAX);
    }
}

/// A request's stream from accept to end.
pub(crate) struct RequestStream {
    pub(crate) outbox: mpsc::Receiver<Delivery>,
    pub(crate) tx: TypedEnd,
    /// Kept so that the opener's half is not cancelled; nothing is read from it.
    pub(crate) rx: StreamRx,
    pub(crate) cancel: CancelGuard,
    pub(crate) in_flight: InFlightGuard,
    pub(crate) deadline: Option<Instant>,
    /// While it can leave: who asks it to, and its entry among those that may.
    pub(crate) leave: Option<(Wish, LiveEntry)>,
}

/// Carries a request's frames until it ends, its client leaves, or its time is over.
pub(crate) async fn forward(stream: RequestStream) {
    let RequestStream { mut outbox, tx, rx, mut cancel, in_flight, deadline, leave } = stream;
    let (mut wish, live) = leave.unzip();
    let Some(sender) = tx.0.as_ref() else { return };
    let late = sleep_until(deadline.unwrap_or_else(|| Instant::now() + Duration::from_secs(86_400)));
    tokio::pin!(late);
    let mut keep_alive = interval_at(Instant::now() + KEEP_ALIVE, KEEP_ALIVE);
    keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let end = loop {
        tokio::select! {
            biased;
            _ = sender.cancelled() => break None,
            () = &mut late => break Some(Fault::new(FaultKind::DeadlineExceeded, "the request's time is over")),
            delivery = outbox.recv() => match delivery {
                Some(Delivery::Frame(frame)) => {
                    if let Err(fault) = send(sender, &frame).await {
                        break fault;
                    }
                }
                Some(Delivery::End) => {
                    cancel.ended = true;
                    break None;
                }
                Some(Delivery::Fail(fault)) => {
                    cancel.ended = true;
                    break Some(fault);
                }
                Some(Delivery::Moved) => {
                    cancel.ended = true;
                    break send(sender, &WayNote::Moved).await.err().flatten();
                }
                Some(Delivery::From(answered)) => {
                    if let Err(fault) = send(sender, &WayNote::From(answered)).await {
                        break fault;
                    }
                }
                None => break Some(Fault::new(FaultKind::Unavailable, WORKER_ENDED)),
            },
            () = Wish::due(&mut wish) => {
                if let Ok(bytes) = rmp_serde::to_vec(&WayNote::Leave) {
                    // Asked again later when there is no credit.
                    sender.try_send(bytes.into()).ok();
                }
            }
            _ = keep_alive.tick() => {
                if cancel.port.pulse.age() < STUCK {
                    // No credit means that the reader has frames to read.
                    sender.try_send(Bytes::new()).ok();
                }
            }
        }
    };
    drop(live);
    // The sequences go first, then the count, then the client hears of it.
    drop(cancel);
    drop(in_flight);
    tx.end(end);
    drop(rx);
}

/// Sends one frame; the error says how the stream is to end.
async fn send(tx: &StreamTx, frame: &impl Serialize) -> Result<(), Option<Fault>> {
    let bytes = rmp_serde::to_vec(frame)
        .map_err(|error| Some(Fault::new(FaultKind::Internal, format!("a frame could not be encoded: {error}"))))?;
    // A failed send means that the client left or its time is over; both have been told already.
    tx.send(bytes.into()).await.map_err(|_| None)
}

/// One subscriber's stream.
pub(crate) struct Subscription {
    pub(crate) id: SubscriberId,
    pub(crate) queue: mpsc::Receiver<Bytes>,
    pub(crate) tx: StreamTx,
    pub(crate) rx: StreamRx,
    pub(crate) port: Arc<Port>,
    pub(crate) shared: Arc<WorkerShared>,
}

/// Carries events and load reports until the subscriber leaves, falls behind, or the engine ends.
pub(crate) async fn publish(subscription: Subscription) {
    let Subscription { id, mut queue, tx, mut rx, port, shared } = subscription;
    let mut listening = true;
    let mut load = port.load.clone();
    load.mark_changed();
    let mut heartbeat = interval_at(Instant::now() + REPORT_EVERY, REPORT_EVERY);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let end = loop {
        let frame = tokio::select! {
            biased;
            _ = tx.cancelled() => break None,
            frame = queue.recv() => match frame {
                Some(frame) => frame,
                None => {
                    let why = "the event queue was cut: it was full, or the worker restarts; subscribe again";
                    break Some(Fault::new(FaultKind::Unavailable, why));
                }
            },
            asked = rx.recv(), if listening => {
                match asked {
                    Some(Ok(frame)) => ask(&port, id, &frame),
                    // It has nothing to ask, or is gone, which shows above.
                    _ => listening = false,
                }
                continue;
            }
            changed = load.changed() => match changed {
                Ok(()) => report(&mut load, &port, &shared),
                Err(_) => break Some(Fault::new(FaultKind::Unavailable, "the worker is being restarted")),
            },
            _ = heartbeat.tick() => report(&mut load, &port, &shared),
        };
        if tx.send(frame).await.is_err() {
            break None;
        }
    };
    match end {
        Some(fault) => tx.fail(fault),
        None => tx.end(),
    }
    drop(rx);
}

/// A subscriber found that what it knows differs.
fn ask(port: &Port, id: SubscriberId, frame: &[u8]) {
    match rmp_serde::from_slice(frame) {
        // A full channel is no loss: the next digests differ as well.
        Ok(ask) => drop(port.commands.try_send(Command::Buckets(id, ask))),
        Err(error) => tracing::debug!(%error, "a question of a newer release"),
    }
}

fn report(load: &mut watch::Receiver<LoadReport>, port: &Port, shared: &WorkerShared) -> Bytes {
    let mut report = load.borrow_and_update().clone();
    report.turn_age_ms = u64::try_from(port.pulse.age().as_millis()).unwrap_or(u64::MAX);
    if let Some(kv) = port.kv.get() {
        report.link = kv.link();
    }
    report.draining = shared.draining.load(Ordering::Relaxed);
    encode(&WorkerNews::Load(report)).unwrap_or_default()
}
