//! The Link actor: owns one connection to one peer, and with it every stream on it.
//!
//! Parent: the supervisor `links`; no children; four tasks in a set of its own (reader, writer, watch, key).
//! Called by [`super::links`], which starts it. Bounds: see [`super::mux`].
//! If it dies, however: its tasks end, the socket closes, every stream breaks at once on this side and within a
//! round trip on the other, and [`super::links`] is told; the next open dials again. It is never restarted
//! itself, because a connection cannot be.

use std::sync::Arc;

use futures::future::BoxFuture;
use metrics::Gauge;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use starling_ids::Metric;
use tokio::task::JoinSet;

use super::{
    io,
    links::LinksMsg,
    mux::{Ended, Mux},
};
use crate::{
    config::Timings,
    security::Connection,
    supervise::Handle,
    wire::{Closing, Decoder, limits},
};

/// What a link hears from its own tasks.
pub(crate) enum LinkMsg {
    /// One of them has ended.
    Over(Ended),
}

impl ractor::Message for LinkMsg {}

/// What it is started with.
pub(crate) struct LinkArgs {
    pub(crate) mux: Arc<Mux>,
    pub(crate) connection: Connection,
    pub(crate) decoder: Decoder,
    pub(crate) timings: Timings,
    /// Resolves when the key that the peer has proved is accepted no more.
    pub(crate) key_removed: BoxFuture<'static, ()>,
    pub(crate) links: Handle<LinksMsg>,
}

pub(crate) struct Link;

pub(crate) struct State {
    /// Dropped first: streams break before the socket closes.
    guard: Guard,
    tasks: JoinSet<()>,
}

/// Takes no new streams once the peer's key is removed, and cuts off what is left after a while.
async fn retire(mux: Arc<Mux>, key_removed: BoxFuture<'static, ()>) -> Ended {
    key_removed.await;
    tracing::debug!(peer = %mux.peer, "the link's key was removed");
    mux.close(Closing::Duplicate);
    tokio::time::sleep(limits::KEY_REMOVED_GRACE).await;
    Ended { reason: "the key that the other side had proved was removed from the cluster".into(), orderly: false }
}

/// Ends the streams and tells the registry, whatever ended the actor.
struct Guard {
    mux: Arc<Mux>,
    links: Handle<LinksMsg>,
    ended: Option<Ended>,
    open: Gauge,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let torn = || Ended { reason: "the link's actor ended".into(), orderly: false };
        let ended = self.ended.take().or_else(|| self.mux.ended()).unwrap_or_else(torn);
        self.mux.end(&ended);
        self.open.decrement(1.0);
        // Without a registry nobody is left to be told.
        self.links.cast(LinksMsg::Ended(self.mux.clone(), ended)).ok();
    }
}

impl Actor for Link {
    type Msg = LinkMsg;
    type State = State;
    type Arguments = Option<LinkArgs>;

    async fn pre_start(&self, myself: ActorRef<LinkMsg>, args: Option<LinkArgs>) -> Result<State, ActorProcessingErr> {
        let LinkArgs { mux, connection, decoder, timings, key_removed, links } =
            args.ok_or("a link is started once")?;
        let open = metrics::gauge!(Metric::LinksOpen.name());
        open.increment(1.0);
        let guard = Guard { mux: mux.clone(), links, ended: None, open };
        let (from, to) = tokio::io::split(connection);
        let mut tasks = JoinSet::new();
        let report = |mux: Arc<Mux>, myself: ActorRef<LinkMsg>| {
            move |ended: Ended| {
                // At once, not when the actor gets to it.
                mux.end(&ended);
                myself.send_message(LinkMsg::Over(ended)).ok();
            }
        };
        let (over, reading) = (report(mux.clone(), myself.clone()), io::read(mux.clone(), from, decoder));
        tasks.spawn(async move { over(reading.await) });
        let (over, writing) = (report(mux.clone(), myself.clone()), io::write(mux.clone(), to));
        tasks.spawn(async move { over(writing.await) });
        let (over, watching) = (report(mux.clone(), myself.clone()), io::watch(mux.clone(), timings));
        tasks.spawn(async move { over(watching.await) });
        let (over, retiring) = (report(mux.clone(), myself), retire(mux, key_removed));
        tasks.spawn(async move { over(retiring.await) });
        Ok(State { guard, tasks })
    }

    async fn handle(
        &self,
        myself: ActorRef<LinkMsg>,
        message: LinkMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let LinkMsg::Over(ended) = message;
        tracing::debug!(peer = %state.guard.mux.peer, reason = %ended.reason, "link over");
        state.guard.ended.get_or_insert(ended);
        myself.stop(None);
        Ok(())
    }

    /// Says goodbye when it is stopped from above, so that the other side does not take it for a crash.
    async fn post_stop(&self, _myself: ActorRef<LinkMsg>, state: &mut State) -> Result<(), ActorProcessingErr> {
        if state.guard.ended.is_none() {
            state.guard.mux.close(Closing::Leaving);
            // The writer ends after the goodbye; a peer that takes nothing is not waited for.
            let goodbye = async { while state.tasks.join_next().await.is_some_and(|task| task.is_err()) {} };
            tokio::time::timeout(std::time::Duration::from_millis(500), goodbye).await.ok();
        }
        Ok(())
    }
}
