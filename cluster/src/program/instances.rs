//! Instances of endpoints as a sorted list, and the difference between two such lists. Pure.
//!
//! Called by clients and watches with the directory's snapshot. Bounds: one row an instance.

use std::{cmp::Ordering, collections::BTreeMap};

use starling_ids::{EndpointName, Incarnation, NodeId};

use crate::discovery::{InstanceKind, Lifecycle, NodeState, Routable, Snapshot};

/// One instance in one life of its node. After a restart of the node it is another instance.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId {
    /// What it answers to.
    pub endpoint: EndpointName,
    /// Where.
    pub node: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
}

impl std::fmt::Display for InstanceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}.{}", self.endpoint, self.node, self.incarnation)
    }
}

/// What this node knows about an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceView {
    /// Which.
    pub id: InstanceId,
    /// What for.
    pub kind: InstanceKind,
    /// Where in its life.
    pub lifecycle: Lifecycle,
    /// What membership and this node's links say about its node.
    pub state: NodeState,
    /// As published.
    pub labels: BTreeMap<String, String>,
}

impl InstanceView {
    /// Whether a request may be sent to it now: it serves, and its node is not known to be out of reach.
    #[must_use]
    pub fn is_callable(&self) -> bool {
        Routable::of(self.lifecycle, self.state) != Routable::No
    }
}

/// The instances that `wanted` takes, sorted by (endpoint, node): the same snapshot gives the same list everywhere.
pub(super) fn list(snapshot: &Snapshot, wanted: impl Fn(&InstanceView) -> bool) -> Vec<InstanceView> {
    let views = snapshot.nodes.iter().flat_map(|view| {
        view.record.instances.iter().map(move |instance| InstanceView {
            id: InstanceId {
                endpoint: instance.endpoint.clone(),
                node: view.record.node.clone(),
                incarnation: view.record.incarnation,
            },
            kind: instance.kind,
            lifecycle: instance.lifecycle,
            state: view.state,
            labels: instance.labels.clone(),
        })
    });
    let mut list: Vec<InstanceView> = views.filter(wanted).collect();
    list.sort_by(|one, two| one.id.cmp(&two.id));
    list
}

/// Instances of one endpoint, sorted by node; cheaper than [`list`] on a large directory.
pub(super) fn of(snapshot: &Snapshot, endpoint: &EndpointName) -> Vec<InstanceView> {
    let found = |view: &crate::discovery::NodeView| {
        let at = view.record.instances.binary_search_by(|instance| instance.endpoint.cmp(endpoint)).ok()?;
        let instance = &view.record.instances[at];
        let (node, incarnation) = (view.record.node.clone(), view.record.incarnation);
        Some(InstanceView {
            id: InstanceId { endpoint: endpoint.clone(), node, incarnation },
            kind: instance.kind,
            lifecycle: instance.lifecycle,
            state: view.state,
            labels: instance.labels.clone(),
        })
    };
    snapshot.nodes.iter().filter_map(found).collect()
}

/// News about instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceEvent {
    /// Forget what you have: these are all, sorted. Always the first event; later after a burst of changes.
    Resync(Vec<InstanceView>),
    /// A new one.
    Added(InstanceView),
    /// Lifecycle, node state or labels are others now.
    Changed(InstanceView),
    /// It is gone: unregistered, or its node is down or in another life.
    Removed(InstanceId),
}

/// What turns `old` into `new`, both sorted by id: removals and changes in order. More than `max` become one resync.
pub(super) fn difference(old: &[InstanceView], new: &[InstanceView], max: usize) -> Vec<InstanceEvent> {
    let mut events = Vec::new();
    let (mut left, mut right) = (old.iter().peekable(), new.iter().peekable());
    loop {
        let order = match (left.peek(), right.peek()) {
            (None, None) => break,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(before), Some(now)) => before.id.cmp(&now.id),
        };
        let before = if order.is_le() { left.next() } else { None };
        let now = if order.is_ge() { right.next() } else { None };
        match (before, now) {
            (Some(before), Some(now)) if before != now => events.push(InstanceEvent::Changed(now.clone())),
            (Some(before), None) => events.push(InstanceEvent::Removed(before.id.clone())),
            (None, Some(now)) => events.push(InstanceEvent::Added(now.clone())),
            _ => {}
        }
        if events.len() > max {
            return vec![InstanceEvent::Resync(new.to_vec())];
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn view(node: u8, lifecycle: Lifecycle) -> InstanceView {
        InstanceView {
            id: InstanceId {
                endpoint: EndpointName::new("a/b/c").unwrap(),
                node: NodeId::new(&format!("n{node}")).unwrap(),
                incarnation: Incarnation(1),
            },
            kind: InstanceKind::Service,
            lifecycle,
            state: NodeState::Alive,
            labels: BTreeMap::new(),
        }
    }

    fn views() -> impl Strategy<Value = Vec<InstanceView>> {
        let lifecycle = prop_oneof![Just(Lifecycle::Serving), Just(Lifecycle::Draining)];
        proptest::collection::btree_map(0..20u8, lifecycle, 0..20).prop_map(|map| {
            let mut views: Vec<_> = map.into_iter().map(|(node, lifecycle)| view(node, lifecycle)).collect();
            views.sort_by(|one, two| one.id.cmp(&two.id));
            views
        })
    }

    fn apply(list: &mut BTreeMap<InstanceId, InstanceView>, event: InstanceEvent) {
        match event {
            InstanceEvent::Resync(all) => *list = all.into_iter().map(|view| (view.id.clone(), view)).collect(),
            InstanceEvent::Added(view) => assert!(list.insert(view.id.clone(), view).is_none()),
            InstanceEvent::Changed(view) => assert!(list.insert(view.id.clone(), view).is_some()),
            InstanceEvent::Removed(id) => assert!(list.remove(&id).is_some()),
        }
    }

    proptest! {
        #[test]
        fn applying_the_difference_gives_the_new_list(old in views(), new in views(), max in 0..30usize) {
            let mut list: BTreeMap<_, _> = old.iter().map(|view| (view.id.clone(), view.clone())).collect();
            let events = difference(&old, &new, max);
            prop_assert!(events.len() <= max.max(1));
            events.into_iter().for_each(|event| apply(&mut list, event));
            prop_assert_eq!(list.into_values().collect::<Vec<_>>(), new.clone());
            prop_assert!(difference(&new, &new, max).is_empty());
        }
    }
}
