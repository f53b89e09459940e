//! Whether a member that gossip cannot reach lives: looked for over TCP, as cheaply as that can be done.
//!
//! A knock is a TCP connection and nothing else: the host says whether anybody listens. A visit asks over the link or the
//! session that connects the two nodes already, and only without one makes a TLS handshake. Handshakes cost processor time on
//! both sides, and busy processors are what makes members look dead: so there are few of them at a time, with a pause
//! between, which grows while they are in vain.
//!
//! Run in tasks of the Membership actor. Bounds: [`KNOCKS_MAX`] knocks and [`HANDSHAKES_MAX`] handshakes at a time,
//! [`VISIT_TIME`] each.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::{net::TcpStream, sync::Semaphore, time::timeout};

use super::{
    driver::{Look, Peer, Proof, VERIFY_MAX},
    outreach::{addressed, for_address},
};
use crate::{
    security::{Alpn, Tls, TlsError},
    session::{Caller, Ops},
    stream::{Fault, FaultKind},
};

/// The operation by which a node shows that it is there.
pub(super) const OP_HERE: &str = "membership/here";
/// A little less than the driver waits, so that the answer is not late.
const VISIT_TIME: Duration = Duration::from_millis(VERIFY_MAX.as_millis() as u64 - 100);
const KNOCKS_MAX: usize = 16;
const HANDSHAKES_MAX: usize = 2;
/// Between the beginnings of two handshakes: after one that told something, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(8));

/// Looks for a member over TCP; `None`: that has shown nothing, or there are too many looks already.
pub type Visit = Arc<dyn Fn(Peer, Look) -> BoxFuture<'static, Option<Proof>> + Send + Sync>;

/// Asks a member, over what connects it with this node already, whether it is there: whether it has answered in time.
/// `None`: nothing connects them.
pub type Ask = Arc<dyn Fn(Peer, Duration) -> BoxFuture<'static, Option<bool>> + Send + Sync>;

/// Visits in each of these ways, the cheapest first, then by a handshake.
#[must_use]
pub fn visits(ways: Vec<Ask>, tls: Tls) -> Visit {
    let (ways, pace) = (Arc::new(ways), Pace::default());
    let knocks = Arc::new(Semaphore::new(KNOCKS_MAX));
    Arc::new(move |peer, look| {
        let (ways, pace, knocks, tls) = (ways.clone(), pace.clone(), knocks.clone(), tls.clone());
        Box::pin(async move {
            match look {
                Look::Knock => {
                    let _one = knocks.try_acquire().ok()?;
                    knock(peer.address).await
                }
                Look::Visit => {
                    for way in ways.iter() {
                        if let Some(answered) = way(peer.clone(), VISIT_TIME).await {
                            return Some(if answered { Proof::Alive } else { Proof::Silent });
                        }
                    }
                    let place = pace.take(Instant::now())?;
                    let proof = shake_hands(&tls, &peer).await;
                    place.found(proof);
                    Some(proof)
                }
            }
        })
    })
}

async fn knock(address: SocketAddr) -> Option<Proof> {
    match timeout(VISIT_TIME, TcpStream::connect(address)).await {
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Some(Proof::Refused),
        _ => None,
    }
}

/// Ends well only if a process with the cluster key answers under the member's name, and answers now. Nothing is said
/// after it.
async fn shake_hands(tls: &Tls, peer: &Peer) -> Proof {
    let handshake = tls.connect(peer.address, Some(&peer.node), Alpn::Link, VISIT_TIME);
    match timeout(VISIT_TIME, handshake).await {
        Ok(Ok(_connection)) => Proof::Alive,
        Ok(Err(TlsError::Connect(_, error))) if error.kind() == io::ErrorKind::ConnectionRefused => Proof::Refused,
        Ok(Err(error)) => {
            tracing::debug!(node = %peer.node, %error, "a visit was in vain");
            Proof::Silent
        }
        Err(_) => Proof::Silent,
    }
}

/// Asks over an actor session where `is_open` says that there is one.
#[must_use]
pub fn ask_by_session(caller: Caller, is_open: Arc<dyn Fn(&Peer) -> bool + Send + Sync>) -> Ask {
    Arc::new(move |peer, limit| {
        if !is_open(&peer) {
            return Box::pin(std::future::ready(None));
        }
        let asked = caller(peer.node.clone(), OP_HERE, addressed(peer.address, &[]), limit);
        Box::pin(async move {
            match asked.await {
                Ok(_) => Some(true),
                // It broke, which may be the session's own fault.
                Err(fault) if fault.kind == FaultKind::Unavailable => None,
                Err(_) => Some(false),
            }
        })
    })
}

/// Answers [`OP_HERE`] as the node at `own`.
pub(super) fn serve_here(ops: &Ops, own: SocketAddr) {
    let here = move |body: &Bytes| match for_address(own, body) {
        Some(_) => Ok(Bytes::new()),
        None => Err(Fault::new(FaultKind::NotFound, format!("this is the node at {own}, and another one was asked"))),
    };
    ops.serve(OP_HERE, Arc::new(move |_from, body| Box::pin(std::future::ready(here(&body)))));
}

/// When the next handshake may begin.
#[derive(Debug, Clone, Default)]
struct Pace(Arc<Mutex<Paced>>);

#[derive(Debug, Default)]
struct Paced {
    running: usize,
    pause: Duration,
    next: Option<Instant>,
}

/// A handshake that may run. Dropped, it is over.
#[derive(Debug)]
struct Place(Pace);

impl Pace {
    fn take(&self, now: Instant) -> Option<Place> {
        let mut paced = self.lock();
        if paced.running >= HANDSHAKES_MAX || paced.next.is_some_and(|next| now < next) {
            return None;
        }
        paced.running += 1;
        paced.next = Some(now + paced.pause.max(PAUSE.0));
        Some(Place(self.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, Paced> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    fn found(&self, proof: Proof) {
        let mut paced = self.0.lock();
        paced.pause = match proof {
            Proof::Silent => (paced.pause.max(PAUSE.0) * 2).min(PAUSE.1),
            Proof::Alive | Proof::Refused => PAUSE.0,
        };
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.lock().running -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_are_few_and_rarer_while_they_are_in_vain() {
        let (pace, mut now) = (Pace::default(), Instant::now());
        let first = pace.take(now).expect("the first one");
        assert!(pace.take(now).is_none(), "not at once");
        let second = pace.take(now + PAUSE.0).expect("a second one");
        assert!(pace.take(now + 9 * PAUSE.0).is_none(), "two at a time");
        drop(second);
        first.found(Proof::Silent);
        drop(first);
        now += 9 * PAUSE.0;
        let third = pace.take(now).expect("a third one");
        third.found(Proof::Silent);
        drop(third);
        assert!(pace.take(now + PAUSE.0).is_none());
        let fourth = pace.take(now + 2 * PAUSE.0).expect("after the longer pause");
        fourth.found(Proof::Alive);
        drop(fourth);
        assert!(pace.take(now + 7 * PAUSE.0).is_some());
        assert!(pace.take(now + 8 * PAUSE.0).is_some(), "the pause is short again");
    }
}
