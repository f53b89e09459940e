//! One step of a roll, asked of this node: made here first, then offered to every member.
//!
//! Called by the command line's operations and by programs through [`crate::mesh::Mesh::keys`]. Bounds: one step at a
//! time on a node; [`MEMBERS_AT_ONCE`] members at a time, [`TRIES`] tries each of [`super::exchange::ANSWER_WITHIN`].

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::StreamExt;
use starling_ids::NodeId;
use tokio::{
    sync::{Mutex, watch},
    task::spawn_blocking,
};

use super::{
    exchange::{self, Told, with_member},
    rules::{RollError, Step, outcome},
    view::{NodeRing, RingView},
};
use crate::{
    discovery::Snapshot,
    security::{Changed, ClusterKey, KeyId, Keys},
    session::{Caller, Ops},
    stream::Fault,
};

const MEMBERS_AT_ONCE: usize = 32;
const TRIES: usize = 3;
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(200);

/// Rolls keys. Cheap to clone; all clones take turns.
#[derive(Clone)]
pub struct KeyRoller(Arc<Inner>);

struct Inner {
    node: NodeId,
    keys: Keys,
    caller: Caller,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    turn: Mutex<()>,
}

impl std::fmt::Debug for KeyRoller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KeyRoller({}, {})", self.0.node, self.0.keys.ring())
    }
}

/// A step that was made here, and who has taken it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rolled {
    /// The key it was about.
    pub key: KeyId,
    /// Every member, this node included, by name.
    pub nodes: Vec<NodeRing>,
}

impl Rolled {
    /// Members that have not taken it.
    #[must_use]
    pub fn failed(&self) -> Vec<&NodeRing> {
        self.nodes.iter().filter(|node| node.fault.is_some()).collect()
    }
}

impl KeyRoller {
    /// For the node of this name. Answers the exchanges of others from now on.
    pub(crate) fn new(
        node: NodeId,
        keys: Keys,
        (caller, ops): (Caller, &Ops),
        snapshots: watch::Receiver<Arc<Snapshot>>,
    ) -> Self {
        exchange::serve(ops, &keys);
        Self(Arc::new(Inner { node, keys, caller, snapshots, turn: Mutex::new(()) }))
    }

    /// The ring of this node.
    #[must_use]
    pub fn ring(&self) -> RingView {
        RingView::from(&*self.0.keys.ring())
    }

    /// Takes a ring that came another way, as if a member had offered it. Whether it was newer.
    #[cfg(test)]
    pub(super) fn take(&self, ring: crate::security::KeyRing) -> Result<bool, crate::security::KeyError> {
        self.0.keys.adopt(ring)
    }

    /// What every member holds, by name. A member that does not say is listed with the reason.
    pub async fn list(&self) -> Vec<NodeRing> {
        let others = self.ask_others(false).await;
        let own = self.ring();
        self.with_own(others, (own.clone(), own), None)
    }

    /// Accepts one more key everywhere; `None` makes a new one.
    pub async fn add(&self, key: Option<ClusterKey>) -> Result<Rolled, RollError> {
        self.step(Step::Add(key.unwrap_or_else(ClusterKey::generate))).await
    }

    /// Seals with this key everywhere, once every member holds it.
    pub async fn promote(&self, key: KeyId) -> Result<Rolled, RollError> {
        self.step(Step::Use(key)).await
    }

    /// Accepts this key no more, once no member seals with it. Links and sessions that were made with it are replaced.
    pub async fn remove(&self, key: KeyId) -> Result<Rolled, RollError> {
        self.step(Step::Remove(key)).await
    }

    async fn step(&self, step: Step) -> Result<Rolled, RollError> {
        let _turn = self.0.turn.lock().await;
        // This node may be the one that is behind: asking brings the newest ring.
        let others = self.ask_others(false).await;
        let next = step.apply(&self.0.keys.ring(), &others)?;
        step.check(&others)?;
        let (key, before) = (step.key(), self.ring());
        let befores: BTreeMap<NodeId, RingView> =
            others.iter().filter_map(|other| Some((other.node.clone(), other.after.clone()?))).collect();
        let not_kept = match next {
            Some(_) => self.change(step, others).await?.kept.err().map(|error| error.to_string()),
            None => None,
        };
        let wanted = self.ring();
        let others = self.ask_others(true).await;
        let others = others.into_iter().map(|other| {
            // An answer may come with the second try, from a node that has taken the ring with the first.
            let before = befores.get(&other.node).cloned().or(other.before);
            match (before, other.after) {
                (Some(before), Some(after)) => outcome(other.node, &wanted, (before, after), other.fault),
                (before, after) => NodeRing { node: other.node, before, after, fault: other.fault },
            }
        });
        Ok(Rolled { key, nodes: self.with_own(others.collect(), (before, wanted), not_kept) })
    }

    /// Changes the ring of this node on a thread that may block.
    async fn change(&self, step: Step, others: Vec<NodeRing>) -> Result<Changed, RollError> {
        let keys = self.0.keys.clone();
        // The ring may have changed since it was looked at; a step made meanwhile changes nothing.
        let make =
            move || keys.change(|ring| step.apply(ring, &others).map(|next| next.unwrap_or_else(|| ring.clone())));
        Ok(spawn_blocking(make).await.map_err(|error| RollError::Failed(error.to_string()))??)
    }

    fn with_own(
        &self,
        mut nodes: Vec<NodeRing>,
        (before, after): (RingView, RingView),
        not_kept: Option<String>,
    ) -> Vec<NodeRing> {
        nodes.push(outcome(self.0.node.clone(), &after.clone(), (before, after), not_kept));
        nodes.sort_by(|a, b| a.node.cmp(&b.node));
        nodes
    }

    /// Every other member, each with a few tries. A `fault` beside an answer says that the ring was not kept.
    async fn ask_others(&self, offer: bool) -> Vec<NodeRing> {
        let snapshot = self.0.snapshots.borrow().clone();
        let others = snapshot.nodes.iter().map(|view| view.record.node.clone()).filter(|node| *node != self.0.node);
        let asked = others.map(|node| async move {
            match self.ask(&node, offer).await {
                Ok(Told { before, after, not_kept }) => {
                    NodeRing { node, before: Some(before), after: Some(after), fault: not_kept }
                }
                Err(fault) => NodeRing::silent(node, fault.to_string()),
            }
        });
        let asked: Vec<_> = asked.collect();
        futures::stream::iter(asked).buffer_unordered(MEMBERS_AT_ONCE).collect().await
    }

    async fn ask(&self, node: &NodeId, offer: bool) -> Result<Told, Fault> {
        let mut tried = 0;
        loop {
            tried += 1;
            match with_member(&self.0.keys, &self.0.caller, node, offer).await {
                Err(fault) if tried < TRIES => {
                    tracing::debug!(%node, %fault, "asked again about its keys");
                    tokio::time::sleep(PAUSE).await;
                }
                outcome => return outcome,
            }
        }
    }
}
