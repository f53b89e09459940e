//! A request that waits for a worker with room: its stream stays open, and is its place.
//!
//! Whatever ends the stream gives the place up at once, by a guard. Meanwhile empty frames say that the place is kept, so
//! that a frozen shard is noticed. Whoever gives a reservation back hands it on in the same step; [`pump`] looks after what no
//! request tells: reports, new workers, time that is over.

use std::{
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use bytes::Bytes;
use starling_cluster::stream::{Context, Fault, FaultKind, StreamRx, StreamTx};
use starling_ids::{Metric, ModelId};
use tokio::{
    sync::{Notify, oneshot},
    time::{MissedTickBehavior, interval},
};

use super::{
    Outcome, Reserved, hold, lock,
    mind::{Mind, Verdict},
    post,
};
use crate::{route::queue::Place, view::View};

/// How often those that wait are looked after.
const LOOK: Duration = Duration::from_millis(10);

/// How often one that waits is told that its place is kept. Clients give up after [`crate::client::SIGN_MAX`].
const SIGN: Duration = Duration::from_millis(1_000);

/// A place in the queue and what comes out of it.
pub(super) struct Waiting {
    _place: PlaceGuard,
    turn: oneshot::Receiver<Verdict>,
}

impl Waiting {
    pub(super) fn new(mind: &Arc<Mutex<Mind>>, model: ModelId, place: Place, turn: oneshot::Receiver<Verdict>) -> Self {
        metrics::gauge!(Metric::RouterQueueDepth.name()).increment(1.0);
        // The place goes before the ear: whoever is handed room listens.
        Self { _place: PlaceGuard { mind: mind.clone(), model, place }, turn }
    }

    /// Its turn may have come already.
    pub(super) fn at_once(mut self) -> Result<Outcome, Fault> {
        match self.turn.try_recv() {
            Ok(verdict) => verdict.map(Outcome::Routed),
            Err(_) => Ok(Outcome::Waits(self)),
        }
    }
}

struct PlaceGuard {
    mind: Arc<Mutex<Mind>>,
    model: ModelId,
    place: Place,
}

impl Drop for PlaceGuard {
    fn drop(&mut self) {
        metrics::gauge!(Metric::RouterQueueDepth.name()).decrement(1.0);
        lock(&self.mind).leave(&self.model, self.place);
    }
}

/// Waits for the turn of one request; then its stream is the reservation.
pub(super) async fn wait(mut waiting: Waiting, tx: StreamTx, mut rx: StreamRx, context: Context) {
    let mut signs = interval(SIGN);
    signs.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let verdict = loop {
        tokio::select! {
            biased;
            verdict = &mut waiting.turn => break verdict,
            // One that waits says nothing: this is its end, its cancel or its break.
            frame = rx.recv() => if !matches!(frame, Some(Ok(_))) {
                drop(waiting);
                tx.end();
                return;
            },
            _ = signs.tick() => {
                // No credit: the client does not read, and is told when it does.
                tx.try_send(Bytes::new()).ok();
            }
        }
    };
    drop(waiting);
    match verdict {
        Ok(Ok(Reserved { guard, reply })) => match tx.try_send(reply) {
            Ok(()) => hold(guard, tx, rx, context).await,
            Err(error) => {
                tracing::debug!(request = %context.request, %error, "nobody reads what was decided");
                drop(guard);
                tx.end();
            }
        },
        Ok(Err(fault)) => tx.fail(fault),
        Err(_) => tx.fail(Fault::new(FaultKind::Unavailable, "the router shard is starting")),
    }
}

/// How often it is looked whether running requests should go elsewhere.
const BALANCE: Duration = Duration::from_millis(500);

/// Looks now and then whether running requests should go elsewhere.
pub(super) async fn balance(mind: Weak<Mutex<Mind>>, view: Arc<View>) {
    loop {
        tokio::time::sleep(BALANCE).await;
        let Some(mind) = mind.upgrade() else { return };
        lock(&mind).rebalance(&view.catalog());
    }
}

/// Looks after those that wait, while there are any.
pub(super) async fn pump(mind: Weak<Mutex<Mind>>, view: Arc<View>, waits: Arc<Notify>) {
    loop {
        waits.notified().await;
        loop {
            tokio::time::sleep(LOOK).await;
            let Some(mind) = mind.upgrade() else { return };
            let catalog = view.catalog();
            let (letters, idle) = {
                let mut mind = lock(&mind);
                let letters = mind.turn(&catalog);
                (letters, mind.waiting() == 0)
            };
            post(&mind, letters);
            if idle {
                break;
            }
        }
    }
}
