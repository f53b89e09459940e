//! What the Directory actor asks other nodes, and its answer to the same question from them.
//!
//! Run as tasks of the Directory actor; each ends with a message to it. Bounds: [`WAIT`] for every answer,
//! [`SERVED_MAX`] questions in work here: one more is refused as overloaded, and its asker goes elsewhere.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use ractor::ActorRef;
use starling_ids::{Metric, NodeId};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

use super::{
    actor::{DirectoryMsg, OP_DIRECTORY},
    exchange::{Ask, Told},
};
use crate::{
    session::Caller,
    stream::{Fault, FaultKind},
    supervise::Handle,
};

/// Longest wait for an answer.
const WAIT: Duration = Duration::from_secs(2);
/// Questions of other nodes in work at one time.
const SERVED_MAX: usize = 16;

/// Wakes the actor whenever `due` has come; `due` is moved by the actor.
pub(super) async fn clock(directory: ActorRef<DirectoryMsg>, mut due: watch::Receiver<Instant>) {
    loop {
        let at = *due.borrow_and_update();
        tokio::select! {
            () = sleep_until(at) => {
                if directory.cast(DirectoryMsg::Tick).is_err() || due.changed().await.is_err() {
                    return;
                }
            }
            moved = due.changed() => if moved.is_err() { return },
        }
    }
}

/// Asks `to` and brings the answer.
pub(super) async fn ask(caller: Caller, ticket: u64, to: NodeId, ask: Ask, answer_to: ActorRef<DirectoryMsg>) {
    let told = async { decode::<Told>(&caller(to.clone(), OP_DIRECTORY, encode(&ask)?, WAIT).await?) };
    let told = told.await.inspect_err(|fault| tracing::debug!(%to, %fault, asked = ask.label(), "no answer"));
    if answer_to.cast(DirectoryMsg::Told(ticket, told.ok())).is_err() {
        tracing::debug!("the directory is gone");
    }
}

/// Answers [`OP_DIRECTORY`].
pub(super) async fn answer(
    asked: Handle<DirectoryMsg>,
    served: Arc<AtomicUsize>,
    from: NodeId,
    body: Bytes,
) -> Result<Bytes, Fault> {
    let ask: Ask = decode(&body)?;
    if !ask.is_bounded() {
        return Err(Fault::new(FaultKind::Invalid, "more asked for than one question may"));
    }
    metrics::counter!(Metric::DirectoryAsks.name(), "kind" => ask.label()).increment(1);
    let _place = Place::take(&served).ok_or_else(|| Fault::new(FaultKind::Overloaded, "the directory is busy"))?;
    let (reply, answer) = tokio::sync::oneshot::channel();
    asked.cast(DirectoryMsg::Asked(from, ask, reply))?;
    let unavailable = || Fault::new(FaultKind::Unavailable, "the directory gives no answer");
    let told = timeout(WAIT, answer).await.map_err(|_| unavailable())?.map_err(|_| unavailable())?;
    encode(&told)
}

/// One of the [`SERVED_MAX`] places; given back when dropped.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(served: &Arc<AtomicUsize>) -> Option<Self> {
        let place = Self(served.clone());
        (served.fetch_add(1, Ordering::Relaxed) < SERVED_MAX).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn encode<T: serde::Serialize>(value: &T) -> Result<Bytes, Fault> {
    let bytes = rmp_serde::to_vec(value).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))?;
    Ok(bytes.into())
}

fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, Fault> {
    rmp_serde::from_slice(bytes).map_err(|error| Fault::new(FaultKind::Invalid, error.to_string()))
}
