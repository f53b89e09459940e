//! News about instances, derived from the directory's snapshots.
//!
//! Called by programs. A reader that falls behind gets fewer, larger differences, never a gap. Bounds: at most
//! [`EVENTS_MAX`] events wait; more become one resync.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{Stream, StreamExt, stream::BoxStream};
use tokio::sync::watch;

use super::instances::{self, InstanceEvent, InstanceView};
use crate::{discovery::Snapshot, mesh::Mesh};

/// Changes told one by one; more at once are told as a whole.
const EVENTS_MAX: usize = 256;

type Wanted = dyn Fn(&InstanceView) -> bool + Send + Sync;

/// A [`Stream`] of [`InstanceEvent`]s, the first of which is a resync with what is known now. Ends with the node.
///
/// What holds, for a reader that applies every event to a map by [`super::InstanceId`]:
///
/// - After the last event that is ready, the map is what [`crate::mesh::Mesh::list_instances`] shows.
/// - `Added` is only told of instances that the map lacks, `Changed` and `Removed` only of those it has. A node that
///   starts again is another instance: the old one is removed.
/// - Events are net: changes that came while the reader was busy are told as one, or not at all when they cancelled one
///   another out. Nothing is queued for a slow reader, so it costs no memory, and is never told something outdated.
/// - More than 256 changes at once come as one `Resync`: forget the map and take this one.
/// - Nodes see changes of others within a gossip round or two of one another, not at the same moment.
pub struct InstanceWatch {
    events: BoxStream<'static, InstanceEvent>,
}

impl std::fmt::Debug for InstanceWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InstanceWatch")
    }
}

struct State {
    mesh: Mesh,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    wanted: Box<Wanted>,
    told: Option<Vec<InstanceView>>,
    waiting: VecDeque<InstanceEvent>,
}

impl InstanceWatch {
    pub(super) fn new(mesh: &Mesh, wanted: impl Fn(&InstanceView) -> bool + Send + Sync + 'static) -> Self {
        let (snapshots, wanted, waiting) = (mesh.watch(), Box::new(wanted), VecDeque::new());
        let state = State { mesh: mesh.clone(), snapshots, wanted, told: None, waiting };
        let events = futures::stream::unfold(state, |mut state| async move {
            let event = state.next().await?;
            Some((event, state))
        });
        Self { events: events.boxed() }
    }

    /// The next news; `None` when the node has ended.
    pub async fn next(&mut self) -> Option<InstanceEvent> {
        self.events.next().await
    }
}

impl Stream for InstanceWatch {
    type Item = InstanceEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<InstanceEvent>> {
        self.events.poll_next_unpin(cx)
    }
}

impl State {
    async fn next(&mut self) -> Option<InstanceEvent> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return Some(event);
            }
            if self.told.is_some() {
                tokio::select! {
                    changed = self.snapshots.changed() => changed.ok()?,
                    () = self.mesh.ended() => return None,
                }
            }
            let snapshot = self.snapshots.borrow_and_update().clone();
            let now = instances::list(&snapshot, &self.wanted);
            match self.told.replace(now.clone()) {
                None => return Some(InstanceEvent::Resync(now)),
                Some(before) => self.waiting = instances::difference(&before, &now, EVENTS_MAX).into(),
            }
        }
    }
}
