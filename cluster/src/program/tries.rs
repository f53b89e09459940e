//! What the clients of one endpoint share: turns, open requests, the retry budget; and the choice of an instance.
//!
//! Called by [`super::Client`] for each try. Bounds: one count an instance with open requests; the instances of one
//! snapshot, kept so that they are not put together for each call.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use starling_ids::EndpointName;

use super::{
    budget::RetryBudget,
    endpoint::RESERVED,
    error::DirectoryFault,
    instances::{self, InstanceId, InstanceView},
    pick::{Candidate, Picker, callable},
};
use crate::{discovery::Snapshot, near};

/// Open requests by instance.
#[derive(Debug, Default)]
struct Counts(Mutex<HashMap<InstanceId, usize>>);

impl Counts {
    fn change<T>(&self, change: impl FnOnce(&mut HashMap<InstanceId, usize>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// One open request; counted until it is dropped.
#[derive(Debug)]
pub(super) struct InFlight {
    counts: Arc<Counts>,
    pub(super) instance: InstanceId,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.counts.change(|counts| {
            if let Some(open) = counts.get_mut(&self.instance) {
                *open = open.saturating_sub(1);
                if *open == 0 {
                    counts.remove(&self.instance);
                }
            }
        });
    }
}

/// Shared by an endpoint, its clones and their clients.
#[derive(Debug)]
pub(super) struct Shared {
    counts: Arc<Counts>,
    pub(super) budget: RetryBudget,
    turn: AtomicUsize,
    known: Mutex<Option<Known>>,
}

#[derive(Debug, Clone)]
struct Known {
    snapshot: Arc<Snapshot>,
    instances: Arc<[Arc<InstanceView>]>,
}

impl Shared {
    /// Begins with some turn, so that programs that start together do not all ask the first instance.
    pub(super) fn new() -> Arc<Self> {
        let turn = AtomicUsize::new(usize::from(rand::random::<u16>()));
        Arc::new(Self { counts: Arc::default(), budget: RetryBudget::default(), turn, known: Mutex::default() })
    }

    /// Counts a request as open there.
    pub(super) fn in_flight(&self, instance: &InstanceId) -> InFlight {
        self.counts.change(|counts| *counts.entry(instance.clone()).or_insert(0) += 1);
        InFlight { counts: self.counts.clone(), instance: instance.clone() }
    }

    fn known(&self, snapshot: Arc<Snapshot>, endpoint: &EndpointName) -> Arc<[Arc<InstanceView>]> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match known.as_ref() {
            Some(known) if Arc::ptr_eq(&known.snapshot, &snapshot) => known.instances.clone(),
            _ => {
                let instances: Arc<[_]> = instances::of(&snapshot, endpoint).into_iter().map(Arc::new).collect();
                *known = Some(Known { snapshot, instances: instances.clone() });
                instances
            }
        }
    }

    /// One of the instances that were not tried yet.
    pub(super) fn choose(
        &self,
        snapshot: &Arc<Snapshot>,
        endpoint: &EndpointName,
        picker: &Picker,
        tried: &[InstanceId],
    ) -> Result<InstanceId, DirectoryFault> {
        let known = self.known(snapshot.clone(), endpoint);
        if known.is_empty() {
            return Err(unknown(snapshot, endpoint));
        }
        let untried = known.iter().filter(|view| !tried.contains(&view.id)).cloned();
        let candidates: Vec<Candidate> = self.counts.change(|counts| {
            let open = |id: &InstanceId| counts.get(id).copied().unwrap_or(0);
            let candidate = |instance: Arc<InstanceView>| Candidate { in_flight: open(&instance.id), instance };
            callable(untried).into_iter().map(candidate).collect()
        });
        // A retry takes nobody's turn: else one that refuses would be the first of every call.
        let turn = self.turn.fetch_add(usize::from(tried.is_empty()), Ordering::Relaxed);
        match picker.pick(&candidates, turn, rand::random()) {
            Some(at) => Ok(candidates[at].instance.id.clone()),
            None => Err(DirectoryFault::NoneServing { endpoint: endpoint.clone(), listed: known.len() }),
        }
    }
}

/// No instance is known: says what is.
fn unknown(snapshot: &Snapshot, endpoint: &EndpointName) -> DirectoryFault {
    let own = |name: &str| name.split('/').next() == Some(RESERVED);
    let all = snapshot.nodes.iter().flat_map(|view| &view.record.instances).map(|instance| instance.endpoint.as_str());
    // The product's own endpoints are no help to a program, unless it asked for one of them.
    let names = all.filter(|name| own(endpoint.as_str()) || !own(name));
    let none = if snapshot.nodes.len() <= 1 {
        "; this node knows no other member yet (`Client::wait_for` waits for an instance)"
    } else {
        "; no program of this cluster serves anything yet (`Client::wait_for` waits for an instance)"
    };
    DirectoryFault::Unknown { endpoint: endpoint.clone(), hint: near::hint(endpoint.as_str(), names, none) }
}
