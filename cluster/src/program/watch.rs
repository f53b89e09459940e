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
pub struct InstanceWatch {
    events: BoxStream<'static, InstanceEvent>,
}

impl std::fmt::Debug for InstanceWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InstanceWatch")
    }
}

struct State {
    snapshots: watch::Receiver<Arc<Snapshot>>,
    wanted: Box<Wanted>,
    told: Option<Vec<InstanceView>>,
    waiting: VecDeque<InstanceEvent>,
}

impl InstanceWatch {
    pub(super) fn new(mesh: &Mesh, wanted: impl Fn(&InstanceView) -> bool + Send + Sync + 'static) -> Self {
        let state = State { snapshots: mesh.watch(), wanted: Box::new(wanted), told: None, waiting: VecDeque::new() };
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
                self.snapshots.changed().await.ok()?;
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
