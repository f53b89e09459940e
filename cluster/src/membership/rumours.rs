//! Which news about records is new: decides what gossip passes on and what it lets end here.
//!
//! Called by foca for each rumour in a packet. Pure. Bounds: one entry for each name, [`NAMES_MAX`] at most.

use std::{collections::BTreeMap, sync::mpsc};

use foca::{BroadcastHandler, Invalidates};
use starling_ids::{Incarnation, NodeId};

use super::{Identity, message::Rumour};
use crate::discovery::DELTA_MAX;

/// Names remembered; beyond it all are forgotten, which costs some packets and no correctness.
const NAMES_MAX: usize = 65_536;
/// Longest encoded rumour in bytes: a name, two numbers and a small change.
const RUMOUR_MAX: usize = 100 + DELTA_MAX;

/// The newest version heard of each process: of each name at each place.
#[derive(Debug)]
pub(super) struct RumourBook {
    heard: BTreeMap<(NodeId, u32), (Incarnation, u64)>,
    told: mpsc::Sender<Rumour>,
}

/// A rumour replaces older ones about the same process, or about an earlier life, among those still to be passed on.
#[derive(Debug)]
pub(super) struct RumourKey(Rumour);

impl Invalidates for RumourKey {
    fn invalidates(&self, other: &Self) -> bool {
        let (new, old) = (&self.0, &other.0);
        let same = new.incarnation == old.incarnation && new.place == old.place && new.version >= old.version;
        new.node == old.node && (same || new.incarnation > old.incarnation)
    }
}

impl RumourBook {
    /// New ones are told to the other end of `told`, which the driver empties after each call.
    pub(super) fn new(told: mpsc::Sender<Rumour>) -> Self {
        Self { heard: BTreeMap::new(), told }
    }
}

/// Something else than a rumour.
#[derive(Debug, thiserror::Error)]
#[error("not a rumour")]
pub(super) struct NoRumour;

impl BroadcastHandler<Identity> for RumourBook {
    type Key = RumourKey;
    type Error = NoRumour;

    fn receive_item(&mut self, data: &[u8], sender: Option<&Identity>) -> Result<Option<RumourKey>, NoRumour> {
        if data.len() > RUMOUR_MAX {
            return Err(NoRumour);
        }
        let rumour: Rumour = rmp_serde::from_slice(data).map_err(|_| NoRumour)?;
        let age = (rumour.incarnation, rumour.version);
        let process = (rumour.node.clone(), rumour.place);
        if self.heard.get(&process).is_some_and(|heard| *heard >= age) {
            return Ok(None);
        }
        if self.heard.len() >= NAMES_MAX {
            self.heard.clear();
        }
        self.heard.insert(process, age);
        // The driver holds the receiver for as long as it holds this book.
        let teller = sender.and_then(|sender| sender.node.clone());
        if self.told.send(Rumour { teller, ..rumour.clone() }).is_err() {
            return Err(NoRumour);
        }
        Ok(Some(RumourKey(rumour)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_newer_versions_are_passed_on() {
        let (told, heard) = mpsc::channel();
        let mut book = RumourBook::new(told);
        let node = NodeId::new("w1").expect("name");
        let mut offer_at = |place, incarnation, version| {
            let (node, incarnation) = (node.clone(), Incarnation(incarnation));
            let rumour = Rumour { node, incarnation, place, version, delta: None, teller: None };
            book.receive_item(&rmp_serde::to_vec(&rumour).expect("encodes"), None).expect("a rumour").is_some()
        };
        let mut offer = |incarnation, version| offer_at(5, incarnation, version);
        let passed = [offer(1, 1), offer(1, 1), offer(1, 3), offer(1, 2), offer(2, 1), offer(1, 9)];
        assert_eq!(passed, [true, false, true, false, true, false]);
        assert!(offer_at(6, 2, 1) && !offer_at(6, 2, 1), "another process of the name in the same life");
        assert_eq!(heard.try_iter().count(), 4);
        assert!(book.receive_item(b"\xc1 no", None).is_err());
        let longest = Rumour {
            node: NodeId::new(&"x".repeat(48)).expect("name"),
            incarnation: Incarnation(u64::MAX - 1),
            place: u32::MAX,
            version: u64::MAX,
            delta: None,
            teller: None,
        };
        assert!(rmp_serde::to_vec(&longest).expect("encodes").len() <= RUMOUR_MAX - DELTA_MAX);
    }
}
