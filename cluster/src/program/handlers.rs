//! How each shape of handler answers a stream: one value, many values, both ways.
//!
//! Called by links and local opens through [`Door`]. A unary answer travels in the accept when it is ready within
//! [`ANSWER_IN_ACCEPT`]; a later one is a frame, so that a slow handler is not bound by the opener's wait for a verdict
//! and is dropped when its asker leaves. Bounds: the gate's.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{FutureExt, Stream, StreamExt, future::BoxFuture};
use metrics::Gauge;
use serde::{Serialize, de::DeserializeOwned};
use starling_ids::{Metric, NodeId};
use tokio::time::{Instant, timeout_at};

use super::{
    call::CallInfo,
    codec::{decode_request, encode_reply},
    gate::{Gate, Pass},
    opening::Opening,
};
use crate::stream::{Acceptor, Fault, FaultKind, Incoming, StreamHandler, StreamTx};

/// A handler that takes longer is accepted without an answer yet.
const ANSWER_IN_ACCEPT: Duration = Duration::from_secs(1);

/// What a stream brings once it is inside.
pub(super) struct Asked {
    pub(super) peer: NodeId,
    pub(super) body: Bytes,
    pub(super) acceptor: Acceptor,
    /// When its asker stops waiting.
    pub(super) deadline: Option<Instant>,
    /// When it stops waiting for a yes or no.
    pub(super) verdict: Option<Instant>,
}

pub(super) type Run = dyn Fn(Asked) -> BoxFuture<'static, ()> + Send + Sync;

/// An endpoint: its gate, that of its node, and one shape of handler.
#[derive(Clone)]
pub(super) struct Door {
    pub(super) gate: Arc<Gate>,
    pub(super) node: Arc<Gate>,
    pub(super) home: NodeId,
    pub(super) run: Arc<Run>,
}

/// One request inside of an endpoint and of its node.
struct Inside {
    _passes: (Pass, Pass),
    gauge: Gauge,
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.gauge.decrement(1.0);
    }
}

impl Door {
    fn enter(&self, peer: &NodeId) -> Result<Inside, Fault> {
        // A node that leaves goes on asking itself: what runs may need that to finish.
        let passes = (self.node.enter_from(*peer == self.home)?, self.gate.enter()?);
        let gauge = metrics::gauge!(Metric::ProgramInFlight.name());
        gauge.increment(1.0);
        Ok(Inside { _passes: passes, gauge })
    }
}

impl StreamHandler for Door {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let Incoming { peer, context, body, acceptor } = incoming;
        let inside = match self.enter(&peer) {
            Ok(inside) => inside,
            Err(fault) => {
                acceptor.reject(fault);
                return std::future::ready(()).boxed();
            }
        };
        let verdict = Instant::now().checked_add(context.answer_within());
        let call = CallInfo::new(peer.clone(), context);
        let answer = (self.run)(Asked { peer, body, acceptor, deadline: call.deadline(), verdict });
        call.scope(async move {
            answer.await;
            drop(inside);
        })
        .boxed()
    }
}

/// One value in, one value out.
pub(super) fn unary<Req, Resp, F, Fut>(handler: F) -> Arc<Run>
where
    Req: DeserializeOwned + Send + 'static,
    Resp: Serialize + Send + 'static,
    F: Fn(Req) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Resp, Fault>> + Send + 'static,
{
    let handler = Arc::new(handler);
    Arc::new(move |asked: Asked| {
        let handler = handler.clone();
        let Asked { body, acceptor, deadline, .. } = asked;
        let work = async move {
            let answer = handler(decode_request(&body)?).await?;
            encode_reply(&answer)
        };
        answer_one(work.boxed(), acceptor, deadline).boxed()
    })
}

async fn answer_one(mut work: BoxFuture<'static, Result<Bytes, Fault>>, acceptor: Acceptor, deadline: Option<Instant>) {
    match tokio::time::timeout(ANSWER_IN_ACCEPT, &mut work).await {
        Ok(Ok(reply)) => {
            if let Some((tx, _rx)) = acceptor.accept(reply) {
                tx.end();
            }
        }
        Ok(Err(fault)) => acceptor.reject(fault),
        Err(_) => {
            // None: the asker has left, and the work is dropped with this future.
            let Some((tx, _rx)) = acceptor.accept(Bytes::new()) else { return };
            let outcome = tokio::select! {
                outcome = work => outcome,
                _reason = tx.cancelled() => return,
                () = at(deadline) => Err(too_late()),
            };
            conclude(tx, outcome).await;
        }
    }
}

async fn conclude(tx: StreamTx, outcome: Result<Bytes, Fault>) {
    match outcome {
        Ok(reply) => match tx.send(reply).await {
            Ok(()) => tx.end(),
            Err(error) => tracing::debug!(%error, "an answer was not delivered"),
        },
        Err(fault) => tx.fail(fault),
    }
}

fn too_late() -> Fault {
    Fault::new(FaultKind::DeadlineExceeded, "the answer took too long")
}

/// Drops the work when the time is over: nobody waits for it any more.
async fn within<T>(limit: Option<Instant>, work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    match limit {
        Some(at) => timeout_at(at, work).await.unwrap_or_else(|_| Err(too_late())),
        None => work.await,
    }
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// One value in, many out. The future decides whether the request is taken, before any data flows.
pub(super) fn streaming<Req, Resp, F, Fut, S>(handler: F) -> Arc<Run>
where
    Req: DeserializeOwned + Send + 'static,
    Resp: Serialize + Send + 'static,
    F: Fn(Req) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<S, Fault>> + Send + 'static,
    S: Stream<Item = Result<Resp, Fault>> + Send + 'static,
{
    let handler = Arc::new(handler);
    Arc::new(move |asked: Asked| {
        let handler = handler.clone();
        async move {
            let answers = match decode_request(&asked.body) {
                Ok(request) => within(asked.verdict, handler(request)).await,
                Err(fault) => Err(fault),
            };
            match answers {
                Ok(answers) => {
                    let Some((tx, _rx)) = asked.acceptor.accept(Bytes::new()) else { return };
                    forward(Box::pin(answers), tx).await;
                }
                Err(fault) => asked.acceptor.reject(fault),
            }
        }
        .boxed()
    })
}

async fn forward<Resp: Serialize>(mut answers: impl Stream<Item = Result<Resp, Fault>> + Unpin, tx: StreamTx) {
    loop {
        let next = tokio::select! {
            biased;
            _reason = tx.cancelled() => return,
            next = answers.next() => next,
        };
        let outcome = match next {
            None => return tx.end(),
            Some(Ok(value)) => encode_reply(&value),
            Some(Err(fault)) => Err(fault),
        };
        match outcome {
            Ok(frame) => match tx.send(frame).await {
                Ok(()) => {}
                // The other side has left, or the time is over: it knows.
                Err(error @ crate::stream::StreamError::TooLarge { .. }) => {
                    return tx.fail(Fault::new(FaultKind::Internal, error.to_string()));
                }
                Err(_) => return,
            },
            Err(fault) => return tx.fail(fault),
        }
    }
}

/// Both ways. The handler's return refuses the call, or ends the answers: cleanly, or with its fault.
pub(super) fn duplex<Req, Resp, F, Fut>(handler: F) -> Arc<Run>
where
    Req: DeserializeOwned + Send + 'static,
    Resp: Serialize + Send + 'static,
    F: Fn(Opening<Req, Resp>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Fault>> + Send + 'static,
{
    let handler = Arc::new(handler);
    Arc::new(move |asked: Asked| {
        let handler = handler.clone();
        async move {
            let (opening, verdict) = Opening::new(asked.acceptor);
            let outcome = within(asked.deadline, handler(opening)).await;
            verdict.conclude(outcome).await;
        }
        .boxed()
    })
}
