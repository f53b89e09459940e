//! What goes wrong and how it is mended: the owner of the shard dies, the next in rank begins from nothing.
//!
//! The product's routers follow all workers all the time; here one that owns nothing follows nobody, so that what is
//! measured is the worse case: a new owner that must fetch every worker's inventory before it decides.

use std::time::Duration;

use starling_engine::Engine;
use starling_ids::BlockHash;
use starling_kv::index::{IndexLimits, PrefixIndex};

use super::{Cluster, Event, Following, LIFE, Router, SimError};
use crate::trace::mix;

/// From a death to the first who knows it: what the membership's bars on ten nodes measured at the median.
const DETECTION: Duration = Duration::from_millis(1_100);
/// Bytes of one block of an inventory on the wire.
const ENTRY_BYTES: f64 = 36.0;
/// What a link carries, bytes a second.
const LINK: f64 = 1e9;

impl Cluster<'_> {
    /// Puts the faults on the clock.
    pub(super) fn plan_faults(&mut self) {
        if let Some(at) = self.setup.faults.kill_owner.filter(|_| !self.setup.decide_apart) {
            self.after(at, Event::KillOwner);
        }
        if let Some((from, lasts)) = self.setup.faults.freeze_gateway {
            // The last in rank: it neither owns the shard nor takes it over.
            let gateway = self.ranked(0).last().copied().unwrap_or_default();
            self.frozen = Some((gateway, from, from + lasts));
        }
    }

    pub(super) fn kill_owner(&mut self) {
        let Some(owner) = self.routers.iter().position(|router| matches!(router, Router::Decides(_))) else { return };
        if let Router::Decides(desk) = self.routers[owner] {
            self.desks[desk] = None;
        }
        self.routers[owner] = Router::Dead;
        self.scatter();
        self.following.iter_mut().for_each(|following| *following = Following::Nobody);
        let heir = self.ranked(0).into_iter().find(|router| self.routers[*router] != Router::Dead);
        for gateway in 0..self.gateways.len() {
            let gossip = self.setup.gossip.mul_f64((mix(self.setup.seed, gateway as u64) % 1_000) as f64 / 1e3);
            self.after(DETECTION + gossip, Event::Noticed { gateway, router: owner });
            if heir == Some(gateway) {
                self.after(DETECTION + gossip, Event::TakeOver { router: gateway });
            }
        }
    }

    pub(super) fn noticed(&mut self, gateway: usize, router: usize) {
        let dead = self.nodes[router].clone();
        self.gateways[gateway].routers.retain(|node| *node != dead);
    }

    pub(super) fn take_over(&mut self, router: usize) -> Result<(), SimError> {
        self.routers[router] = Router::Rebuilding;
        self.index = PrefixIndex::new(IndexLimits::default());
        for worker in 0..self.workers.len() {
            self.index.add_worker(self.workers[worker].id.clone(), LIFE)?;
            self.following[worker] = Following::Catching(Vec::new());
            self.after(self.setup.wire, Event::Snapshot { worker });
        }
        Ok(())
    }

    pub(super) fn snapshot(&mut self, worker: usize) {
        let blocks = self.workers[worker].engine.inventory();
        let carried = Duration::from_secs_f64(blocks.len() as f64 * ENTRY_BYTES / LINK);
        self.after(self.setup.wire + carried, Event::Inventory { worker, blocks });
    }

    pub(super) fn take_inventory(
        &mut self,
        worker: usize,
        blocks: &[(Option<BlockHash>, BlockHash)],
    ) -> Result<(), SimError> {
        let id = self.workers[worker].id.clone();
        self.index.reset(&id, LIFE, blocks)?;
        let waited = std::mem::replace(&mut self.following[worker], Following::Live);
        if let Following::Catching(events) = waited {
            for event in &events {
                self.index.apply(&id, LIFE, event)?;
            }
        }
        if self.following.iter().all(|following| matches!(following, Following::Live)) {
            self.open_desk()?;
        }
        Ok(())
    }

    /// All inventories are in: the new owner decides, by what the workers last said of their load.
    fn open_desk(&mut self) -> Result<(), SimError> {
        let Some(router) = self.routers.iter().position(|router| *router == Router::Rebuilding) else { return Ok(()) };
        let mut desk = self.new_desk(self.desks.len() as u64)?;
        for (worker, heard) in self.workers.iter().zip(&self.heard) {
            if let Some(heard) = heard {
                desk.hear(&worker.id, LIFE, *heard);
            }
        }
        self.routers[router] = Router::Decides(self.desks.len());
        self.desks.push(Some(desk));
        Ok(())
    }
}
