//! Actors that end with their owner: an actor elsewhere, or a whole node.
//!
//! The node of the child keeps watch, so nothing has to reach it for the child to end: an owner that is gone from the
//! directory, or whose life its own node calls over, takes its children with it. A broken link alone ends nobody.
//! Parent: the root supervisor. Bounds: one task and one subscription an owner. If it dies: it is started again and
//! reads who is owned from the book of actors.

use std::{collections::BTreeMap, fmt, sync::Arc};

use ractor::{ActorProcessingErr, ActorRef};
use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, NodeId};
use tokio::task::{AbortHandle, JoinSet};

use super::monitor::{StopReason, life_over};
use crate::{
    discovery::Snapshot,
    mesh::{Mesh, WeakMesh},
    stream::{Fault, FaultKind},
};

tokio::task_local! {
    static MYSELF: Arc<Myself>;
}

/// The actor whose code runs, in the life that runs it.
#[derive(Debug)]
pub(super) struct Myself {
    pub(super) node: NodeId,
    pub(super) name: Arc<str>,
    pub(super) life: u64,
}

/// Runs an actor's code, so that what it starts elsewhere knows its owner.
pub(super) async fn as_actor<F: Future>(myself: Arc<Myself>, work: F) -> F::Output {
    MYSELF.scope(myself, work).await
}

/// Who a linked actor ends with.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct Owner {
    pub(super) node: NodeId,
    pub(super) incarnation: Incarnation,
    /// An actor there by its name, in its life of this number; none for the node itself.
    pub(super) actor: Option<(String, u64)>,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.actor {
            Some((name, _)) => write!(f, "{} programs/{name}", self.node),
            None => write!(f, "{}", self.node),
        }
    }
}

impl Owner {
    /// The actor whose handler runs on this node, or this node.
    pub(super) fn current(mesh: &Mesh) -> Self {
        let here = |myself: &Arc<Myself>| {
            (myself.node == *mesh.node()).then(|| (myself.name.as_ref().to_owned(), myself.life))
        };
        let actor = MYSELF.try_with(here).ok().flatten();
        Self { node: mesh.node().clone(), incarnation: mesh.incarnation(), actor }
    }

    fn is_gone(&self, snapshot: &Snapshot) -> bool {
        snapshot.node(&self.node).is_none_or(|view| view.record.incarnation != self.incarnation)
    }

    /// Whether a child can be linked to it now: it is who asks, and it lives as far as this node knows.
    pub(super) fn check(&self, mesh: &Mesh, from: &NodeId) -> Result<(), Fault> {
        if self.node != *from {
            return Err(Fault::new(FaultKind::Invalid, format!("{from} cannot make {} an owner", self.node)));
        }
        let snapshot = mesh.snapshot();
        let known = snapshot.node(&self.node).map(|view| view.record.incarnation);
        match known {
            Some(current) if current == self.incarnation => Ok(()),
            Some(current) if current > self.incarnation => {
                let message = format!("{} is in incarnation {current}, not {}", self.node, self.incarnation);
                Err(Fault::new(FaultKind::StaleIncarnation, message))
            }
            // Who asks is alive; the news of it is on its way.
            _ => Err(Fault::new(FaultKind::Unavailable, format!("this node has not heard of {} yet", self.node))),
        }
    }
}

/// The actor.
pub(super) struct Owners;

pub(super) struct OwnersMsg;

impl ractor::Message for OwnersMsg {}

impl ractor::Actor for Owners {
    type Msg = OwnersMsg;
    type State = JoinSet<()>;
    type Arguments = WeakMesh;

    async fn pre_start(&self, _myself: ActorRef<OwnersMsg>, mesh: WeakMesh) -> Result<JoinSet<()>, ActorProcessingErr> {
        let mut tasks = JoinSet::new();
        tasks.spawn(keep_watch(mesh));
        Ok(tasks)
    }
}

/// Follows every owner that somebody has, and stops following those that nobody has any more.
async fn keep_watch(mesh: WeakMesh) {
    let mut tasks = JoinSet::new();
    let mut followed: BTreeMap<Owner, AbortHandle> = BTreeMap::new();
    loop {
        let Some(strong) = mesh.upgrade() else { return };
        let owners = strong.programs().owners();
        followed.retain(|owner, task| {
            let owned = owners.contains(owner);
            if !owned {
                task.abort();
            }
            owned && !task.is_finished()
        });
        for owner in owners {
            let begin = |owner: &Owner| tasks.spawn(follow(strong.clone(), owner.clone()));
            followed.entry(owner).or_insert_with_key(begin);
        }
        let relook = strong.programs().relook();
        drop(strong);
        tokio::select! {
            () = relook.notified() => {}
            Some(_) = tasks.join_next() => {}
        }
    }
}

async fn follow(mesh: Mesh, owner: Owner) {
    match &owner.actor {
        Some((name, life)) => life_over(&mesh, &owner.node, owner.incarnation, name, *life).await,
        None => {
            let mut snapshots = mesh.watch();
            // An error is the end of this node, which stops its actors by itself.
            if snapshots.wait_for(|snapshot| owner.is_gone(snapshot)).await.is_err() {
                return;
            }
        }
    }
    for name in mesh.programs().owned_by(&owner) {
        tracing::info!(actor = %name, %owner, "stopped: its owner is gone");
        if let Err(fault) = mesh.programs().stop(&mesh, &name, StopReason::OwnerGone).await {
            tracing::warn!(actor = %name, %fault, "an actor without an owner was not stopped");
        }
    }
}
