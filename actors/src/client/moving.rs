//! A running request that goes on at another worker before its own one has ended it.
//!
//! Called by the stream of its frames when the worker asks its client to leave. The next worker is found and opened while
//! the answer goes on; it takes the request over from the worker, which then says that nothing more comes from there.
//! Never: drops the old stream before that word. Bounds: one at a time, [`LOOK_MAX`] for finding a place.

use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use starling_cluster::stream::StreamError;
use starling_ids::{Metric, WorkerId};
use tokio::time::timeout;

use super::{journey::Journey, stream::Leg};
use crate::generate::{Moves, Said, WayNote};

/// Longest wait for another worker that takes it.
const LOOK_MAX: Duration = Duration::from_secs(30);

/// The next worker of a request, as far as it is found.
#[derive(Default)]
pub(super) enum Next {
    /// None is looked for.
    #[default]
    Nobody,
    /// It is being found and asked.
    Sought(BoxFuture<'static, Option<Leg>>),
    /// It has been asked, and says nothing before it has taken over.
    Found(Box<Leg>),
    /// It has taken over, and this was its first word.
    Speaks(Box<Leg>, Bytes),
}

impl Next {
    /// Begins to look, unless it is being looked for already.
    pub(super) fn seek(&mut self, journey: &mut Journey, leg: &Leg) {
        if !matches!(self, Self::Nobody) {
            return;
        }
        let from = Moves { worker: leg.worker.clone(), incarnation: leg.incarnation, attempt: leg.attempt };
        let fork = journey.fork(from);
        *self = Self::Sought(Box::pin(async move { timeout(LOOK_MAX, fork.follow()).await.ok().flatten() }));
    }

    /// Waits for its next change; for ever when there is none. Cancelling the wait loses nothing.
    pub(super) async fn turn(&mut self) {
        match self {
            Self::Nobody | Self::Speaks(..) => std::future::pending().await,
            Self::Sought(search) => {
                let found = search.await;
                if found.is_none() {
                    count("no_place");
                }
                *self = found.map_or(Self::Nobody, |leg| Self::Found(Box::new(leg)));
            }
            Self::Found(leg) => match leg.rx.recv().await {
                Some(Ok(bytes)) if bytes.is_empty() => {}
                // It drains, too, and says so again when it has the request.
                Some(Ok(bytes)) if matches!(Said::read(&bytes), Ok(Said::Way(WayNote::Leave))) => {}
                Some(Ok(bytes)) => {
                    if let Self::Found(leg) = std::mem::take(self) {
                        *self = Self::Speaks(leg, bytes);
                    }
                }
                refused => {
                    refuse(&leg.worker, refused.and_then(Result::err).as_ref());
                    *self = Self::Nobody;
                }
            },
        }
    }

    /// The old worker has ended it: waits for the next one's first word. `None` when it was lost.
    pub(super) async fn arrive(&mut self) -> Option<(Leg, Bytes)> {
        loop {
            match std::mem::take(self) {
                Self::Nobody => return None,
                Self::Speaks(leg, bytes) => return Some((*leg, bytes)),
                waits => {
                    *self = waits;
                    self.turn().await;
                }
            }
        }
    }

    /// The old worker was lost: the next one, when it has taken over and its answer begins with this token.
    pub(super) fn rescue(&mut self, answered: usize) -> Option<(Leg, Bytes)> {
        match std::mem::take(self) {
            Self::Speaks(leg, bytes) if begins_at(&bytes) == Some(answered) => Some((*leg, bytes)),
            _ => None,
        }
    }
}

/// Where an answer goes on, when this is the word that says so.
pub(super) fn begins_at(bytes: &[u8]) -> Option<usize> {
    match Said::read(bytes) {
        Ok(Said::Way(WayNote::From(answered))) => Some(answered as usize),
        _ => None,
    }
}

fn refuse(worker: &WorkerId, error: Option<&StreamError>) {
    count("refused");
    let error = error.map_or_else(|| "it ended".to_owned(), ToString::to_string);
    tracing::info!(%worker, error, "a running request was not taken over; it goes on where it is");
}

/// Counts what became of a move.
pub(super) fn count(outcome: &'static str) {
    metrics::counter!(Metric::GatewayMoved.name(), "outcome" => outcome).increment(1);
}
