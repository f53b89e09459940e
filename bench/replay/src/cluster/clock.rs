//! What happens on the virtual clock, and in which order: by time, ties in the order of their making.
//!
//! Called by [`super::Cluster`]. Data alone.

use std::{cmp::Ordering, time::Duration};

use starling_actors::report::LoadReport;
use starling_ids::BlockHash;
use starling_kv::events::KvEvent;

#[derive(Debug)]
pub(super) enum Event {
    Arrive(usize),
    /// A gateway asks the router that is `tried` in its rank.
    Ask {
        request: usize,
        tried: usize,
    },
    /// The question is at that router.
    Decide {
        request: usize,
        router: usize,
        tried: usize,
    },
    /// The shard looks after those that wait.
    Look,
    Submit {
        worker: usize,
        request: usize,
    },
    Stepped {
        worker: usize,
    },
    News {
        worker: usize,
        events: Vec<KvEvent>,
        report: Option<Box<LoadReport>>,
    },
    Confirmed {
        request: usize,
        number: u64,
    },
    Prefilled(usize),
    Ended(usize),
    KillOwner,
    /// A gateway hears that the router is dead.
    Noticed {
        gateway: usize,
        router: usize,
    },
    /// The next in rank begins to follow the workers.
    TakeOver {
        router: usize,
    },
    /// Its question for an inventory is at the worker.
    Snapshot {
        worker: usize,
    },
    Inventory {
        worker: usize,
        blocks: Vec<(Option<BlockHash>, BlockHash)>,
    },
}

#[derive(Debug)]
pub(super) struct Due {
    pub(super) at: Duration,
    pub(super) serial: u64,
    pub(super) event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.serial == other.serial
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.serial).cmp(&(other.at, other.serial))
    }
}
