//! Fetches one blob: whom to ask, in which order, and when to ask again.
//!
//! Called by [`Blobs::get`], which bounds the time. Nodes whose records name the digest come first, in an order of their own
//! for each fetch; then some others, who may have fetched it before. When nothing comes for a moment, the next one is asked
//! beside those that are silent: a lost packet of a first connection costs seconds, and any holder is as good. Whoever is
//! busy is asked again later. Bounds: [`BESIDE_MAX`] nodes asked at one time.

use std::{sync::Mutex, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, stream::FuturesUnordered};
use rand::seq::SliceRandom;
use starling_ids::{EndpointName, Incarnation, Metric, NodeId, RequestId};
use tokio::time::Instant;

use super::{BLOB_ENDPOINT, BLOB_MAX, BlobDigest, BlobError, Blobs, lock};
use crate::{
    discovery::{NodeState, NodeView, Snapshot},
    stream::{Context, FaultKind, Opened, StreamError},
};

/// Longest fetch from one node.
const FETCH_TIME_MAX: Duration = Duration::from_secs(15);
/// Nodes asked in one round although their records do not name the blob.
const GUESSES_MAX: usize = 8;
/// Rounds in which nobody holds it, before it is taken for unknown: a record may be on its way.
const ROUNDS_UNKNOWN: u32 = 3;
/// Silence of all that were asked, after which one more is: well above the round trips of a first connection nearby.
const BESIDE_AFTER: Duration = Duration::from_millis(500);
/// Nodes asked for one blob at one time.
const BESIDE_MAX: usize = 3;
const AGAIN_FIRST: Duration = Duration::from_millis(100);
const AGAIN_MAX: Duration = Duration::from_secs(2);

/// Asks round after round; ends with the blob, or when nobody holds it. `last` is what was last said against it.
pub(super) async fn fetch(blobs: &Blobs, digest: BlobDigest, last: &Mutex<String>) -> Result<Bytes, BlobError> {
    let _place = blobs.shelf.inner.fetching.acquire().await;
    let mut unknown = 0;
    for round in 0_u32.. {
        let heard = Heard::new(BESIDE_AFTER);
        let ask = |(node, incarnation): Holder, heard| async move {
            let outcome = from(blobs, (&node, incarnation), digest, heard).await;
            outcome.map_err(|error| {
                tracing::debug!(%node, %digest, %error, "blob not fetched");
                *lock(last) = format!("{node}: {error}");
                matches!(&error, StreamError::Rejected(fault) if fault.kind == FaultKind::NotFound)
            })
        };
        let nobody_holds_it = match first_of(holders(blobs, digest), ask, &heard).await {
            Ok(bytes) => {
                metrics::counter!(Metric::BlobsFetched.name(), "outcome" => "fetched").increment(1);
                // One that finds no room is used all the same.
                if let Err(error) = blobs.shelf.keep(digest, bytes.clone(), false) {
                    tracing::warn!(%digest, %error, "a fetched blob is not kept");
                }
                return Ok(bytes);
            }
            Err(nobody_holds_it) => nobody_holds_it,
        };
        unknown += u32::from(nobody_holds_it);
        if unknown >= ROUNDS_UNKNOWN {
            break;
        }
        tokio::time::sleep(AGAIN_FIRST.saturating_mul(1 << round.min(8)).min(AGAIN_MAX)).await;
    }
    metrics::counter!(Metric::BlobsFetched.name(), "outcome" => "not_found").increment(1);
    Err(BlobError::NotFound(digest))
}

/// A node that may have it, and in which life.
type Holder = (NodeId, Incarnation);

/// When something last came from any of those that were asked, and the silence after which one more is.
#[derive(Debug)]
struct Heard {
    last: Mutex<Instant>,
    beside_after: Duration,
}

impl Heard {
    fn new(beside_after: Duration) -> Self {
        Self { last: Mutex::new(Instant::now()), beside_after }
    }

    fn now(&self) {
        *lock(&self.last) = Instant::now();
    }

    fn silent_at(&self) -> Instant {
        *lock(&self.last) + self.beside_after
    }
}

/// The first good answer. One holder is asked, and the next when that one fails, or beside it when it is silent. When all
/// failed: whether each said that it does not hold the blob.
async fn first_of<'a, T, F>(
    holders: Vec<Holder>,
    ask: impl Fn(Holder, &'a Heard) -> F,
    heard: &'a Heard,
) -> Result<T, bool>
where
    F: Future<Output = Result<T, bool>>,
{
    let (mut left, mut asked) = (holders.into_iter(), FuturesUnordered::new());
    let (mut nobody_holds_it, mut one_ended) = (true, true);
    loop {
        let silent = Instant::now() >= heard.silent_at() && asked.len() < BESIDE_MAX;
        if (std::mem::take(&mut one_ended) || silent)
            && let Some(holder) = left.next()
        {
            heard.now();
            asked.push(ask(holder, heard));
        }
        tokio::select! {
            answer = asked.next() => match answer {
                Some(Ok(blob)) => return Ok(blob),
                Some(Err(not_held)) => (nobody_holds_it, one_ended) = (nobody_holds_it && not_held, true),
                None => return Err(nobody_holds_it),
            },
            () = tokio::time::sleep_until(heard.silent_at()), if asked.len() < BESIDE_MAX && left.len() > 0 => {}
        }
    }
}

/// Whom to ask in one round.
fn holders(blobs: &Blobs, digest: BlobDigest) -> Vec<Holder> {
    let (snapshot, own) = (blobs.mesh.snapshot(), blobs.mesh.node());
    let others = others(&snapshot, own);
    let names = |view: &&NodeView| {
        let mut instances = view.record.instances.iter();
        instances.any(|instance| instance.card == Some(digest) || instance.bundle == Some(digest))
    };
    let (mut named, mut guesses): (Vec<&NodeView>, Vec<&NodeView>) = others.partition(names);
    named.shuffle(&mut rand::rng());
    guesses.shuffle(&mut rand::rng());
    // A suspect may be slow: after the others.
    named.sort_by_key(|view| view.state);
    guesses.truncate(GUESSES_MAX);
    named.into_iter().chain(guesses).map(|view| (view.record.node.clone(), view.record.incarnation)).collect()
}

fn others<'a>(snapshot: &'a Snapshot, own: &'a NodeId) -> impl Iterator<Item = &'a NodeView> {
    let nodes = snapshot.nodes.iter();
    nodes.filter(move |view| view.record.node != *own && view.state != NodeState::Unreachable)
}

async fn from(
    blobs: &Blobs,
    (node, incarnation): (&NodeId, Incarnation),
    digest: BlobDigest,
    heard: &Heard,
) -> Result<Bytes, StreamError> {
    let broken = |reason: &str| StreamError::Broken(reason.to_owned());
    let endpoint = EndpointName::new(BLOB_ENDPOINT).map_err(|error| broken(&error.to_string()))?;
    let context = Context::new(RequestId::default(), FETCH_TIME_MAX);
    let body = Bytes::copy_from_slice(&digest.0);
    let Opened { reply, tx, mut rx } = blobs.mesh.open(node, incarnation, &endpoint, context, body).await?;
    tx.end();
    heard.now();
    let length = <[u8; 8]>::try_from(reply.as_ref()).map(u64::from_le_bytes).map_err(|_| broken("no length"))?;
    let length = usize::try_from(length).ok().filter(|length| *length <= BLOB_MAX);
    let length = length.ok_or_else(|| broken("longer than a blob may be"))?;
    let mut bytes = Vec::new();
    while let Some(chunk) = rx.recv().await {
        let chunk = chunk?;
        heard.now();
        if bytes.len() + chunk.len() > length {
            return Err(broken("longer than announced"));
        }
        bytes.extend_from_slice(&chunk);
    }
    if BlobDigest::of(&bytes) != digest {
        metrics::counter!(Metric::BlobsFetched.name(), "outcome" => "corrupt").increment(1);
        return Err(broken("its content does not match its digest"));
    }
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn nodes(count: usize) -> Vec<Holder> {
        (0..count).map(|n| (NodeId::new(&format!("n{n}")).unwrap(), Incarnation(1))).collect()
    }

    const SOON: Duration = Duration::from_millis(1);
    const NEVER: Duration = Duration::from_secs(3_600);

    /// A card that one holder did not give for seconds, its dial having lost a packet, kept a node from every worker.
    #[tokio::test]
    async fn a_silent_holder_does_not_keep_a_blob_from_those_who_ask_for_it() {
        let heard = Heard::new(SOON);
        let ask = |(node, _): Holder, _: &Heard| async move {
            if node.as_str() == "n0" {
                std::future::pending::<()>().await;
            }
            Ok::<_, bool>(node)
        };
        assert_eq!(first_of(nodes(3), ask, &heard).await.unwrap().as_str(), "n1");
    }

    #[tokio::test]
    async fn few_are_asked_at_one_time() {
        let (heard, asked) = (Heard::new(SOON), AtomicUsize::new(0));
        let most = AtomicUsize::new(0);
        let ask = |(node, _): Holder, _: &Heard| {
            most.fetch_max(asked.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            let asked = &asked;
            async move {
                match node.as_str() {
                    "n0" | "n1" => std::future::pending().await,
                    "n8" => Ok(()),
                    _ => {
                        asked.fetch_sub(1, Ordering::Relaxed);
                        Err(true)
                    }
                }
            }
        };
        // Two stay silent; the others fail one after the other.
        first_of(nodes(9), ask, &heard).await.unwrap();
        assert_eq!(most.into_inner(), BESIDE_MAX);
    }

    #[tokio::test]
    async fn while_something_comes_nobody_else_is_asked() {
        let (heard, asked) = (Heard::new(NEVER), AtomicUsize::new(0));
        let ask = |_: Holder, heard: &Heard| {
            asked.fetch_add(1, Ordering::Relaxed);
            heard.now();
            async {
                for _ in 0..50 {
                    tokio::task::yield_now().await;
                }
                Ok::<_, bool>(())
            }
        };
        first_of(nodes(9), ask, &heard).await.unwrap();
        assert_eq!(asked.into_inner(), 1);
    }

    #[tokio::test]
    async fn it_is_unknown_only_when_each_says_so() {
        let heard = Heard::new(NEVER);
        let all = |_: Holder, _: &Heard| async { Err::<(), _>(true) };
        assert_eq!(first_of(nodes(4), all, &heard).await, Err(true));
        let some = |(node, _): Holder, _: &Heard| async move { Err::<(), _>(node.as_str() != "n2") };
        assert_eq!(first_of(nodes(4), some, &heard).await, Err(false));
        assert_eq!(first_of(Vec::new(), some, &heard).await, Err(true));
    }
}
