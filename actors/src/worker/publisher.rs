//! Numbers a worker's KV events and hands them to every subscriber.
//!
//! Called by the engine thread between steps; never waits. A subscriber's queue is bounded; one that falls behind
//! it is cut off, so that it must subscribe again and take a new inventory: nothing is left out silently.
//! Bounds: [`QUEUE_FRAMES`] frames a subscriber beyond its inventory, [`SUBSCRIBERS_MAX`] subscribers.

use bytes::Bytes;
use starling_ids::{BlockHash, Incarnation, WorkerId};
use starling_kv::{
    events::{EventBatch, KvEvent},
    index::Tier,
    tier::TierInventory,
};
use tokio::sync::mpsc;

use crate::report::{INVENTORY_PART_BLOCKS, InventoryPart, WorkerNews};

/// Frames that wait for a subscriber; one a step, so some seconds of a busy engine.
pub(crate) const QUEUE_FRAMES: usize = 1_024;

/// Subscribers of one worker: an indexer per router node.
pub(crate) const SUBSCRIBERS_MAX: usize = 256;

/// The numbering and the subscribers of one engine.
#[derive(Debug)]
pub(crate) struct Publisher {
    worker: WorkerId,
    incarnation: Incarnation,
    next: u64,
    subscribers: Vec<mpsc::Sender<Bytes>>,
}

impl Publisher {
    pub(crate) fn new(worker: WorkerId, incarnation: Incarnation) -> Self {
        Self { worker, incarnation, next: 0, subscribers: Vec::new() }
    }

    /// A queue that begins with `inventory` and what lies `below`, then carries every batch. `None` when there are too many
    /// already.
    pub(crate) fn subscribe(
        &mut self,
        inventory: &[(Option<BlockHash>, BlockHash)],
        below: &[TierInventory],
    ) -> Option<mpsc::Receiver<Bytes>> {
        self.subscribers.retain(|subscriber| !subscriber.is_closed());
        if self.subscribers.len() >= SUBSCRIBERS_MAX {
            return None;
        }
        let device = inventory.chunks(INVENTORY_PART_BLOCKS).map(|blocks| (Tier::Device, blocks));
        let mut parts: Vec<_> = device.collect();
        for (tier, blocks) in below {
            parts.extend(blocks.chunks(INVENTORY_PART_BLOCKS).map(|blocks| (*tier, blocks)));
        }
        if parts.is_empty() {
            parts.push((Tier::Device, &[]));
        }
        let (sender, queue) = mpsc::channel(parts.len() + QUEUE_FRAMES);
        let last = parts.len() - 1;
        for (number, (tier, blocks)) in parts.into_iter().enumerate() {
            let news = WorkerNews::Inventory(InventoryPart {
                worker: self.worker.clone(),
                incarnation: self.incarnation,
                seq: self.next,
                more: number < last,
                blocks: blocks.to_vec(),
                tier,
            });
            sender.try_send(encode(&news)?).ok()?;
        }
        self.subscribers.push(sender);
        Some(queue)
    }

    /// Hands one step's events to every subscriber and cuts off those that have no room.
    pub(crate) fn publish(&mut self, events: Vec<KvEvent>) {
        if events.is_empty() {
            return;
        }
        let seq = self.next;
        self.next += events.len() as u64;
        if self.subscribers.is_empty() {
            return;
        }
        let batch = EventBatch { worker: self.worker.clone(), incarnation: self.incarnation, seq, events };
        match encode(&WorkerNews::Events(batch)) {
            Some(frame) => self.subscribers.retain(|subscriber| subscriber.try_send(frame.clone()).is_ok()),
            None => self.subscribers.clear(),
        }
    }
}

/// The bytes of a frame; `None` when it cannot be written, which is a fault of ours and logged.
pub(crate) fn encode(news: &WorkerNews) -> Option<Bytes> {
    match rmp_serde::to_vec(news) {
        Ok(bytes) => Some(bytes.into()),
        Err(error) => {
            tracing::error!(%error, "an event could not be encoded");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use starling_ids::NodeId;

    use super::*;

    fn publisher() -> Publisher {
        Publisher::new(WorkerId { node: NodeId::new("n").expect("name"), index: 0 }, Incarnation(1))
    }

    fn stored(hash: u128) -> Vec<KvEvent> {
        vec![KvEvent::Stored { parent: None, blocks: vec![BlockHash(hash)] }]
    }

    fn read(queue: &mut mpsc::Receiver<Bytes>) -> Option<WorkerNews> {
        queue.try_recv().ok().map(|bytes| rmp_serde::from_slice(&bytes).expect("decodes"))
    }

    #[test]
    fn an_inventory_comes_first_and_says_what_follows_it() {
        let mut publisher = publisher();
        publisher.publish(stored(1));
        let blocks: Vec<_> = (0..INVENTORY_PART_BLOCKS as u128 + 1).map(|at| (None, BlockHash(at))).collect();
        let mut queue = publisher.subscribe(&blocks, &[]).expect("room");
        publisher.publish(stored(2));
        let Some(WorkerNews::Inventory(first)) = read(&mut queue) else { panic!("inventory") };
        assert!(first.more && first.seq == 1 && first.blocks.len() == INVENTORY_PART_BLOCKS);
        let Some(WorkerNews::Inventory(second)) = read(&mut queue) else { panic!("inventory") };
        assert!(!second.more && second.blocks.len() == 1);
        let Some(WorkerNews::Events(batch)) = read(&mut queue) else { panic!("events") };
        assert_eq!((batch.seq, batch.events), (1, stored(2)));
    }

    #[test]
    fn an_empty_inventory_is_still_sent() {
        let mut queue = publisher().subscribe(&[], &[]).expect("room");
        assert!(matches!(read(&mut queue), Some(WorkerNews::Inventory(part)) if !part.more && part.blocks.is_empty()));
    }

    #[test]
    fn act_04_a_subscriber_that_lags_is_cut_off_and_the_others_go_on() {
        let mut publisher = publisher();
        let mut slow = publisher.subscribe(&[], &[]).expect("room");
        let mut seen = 0;
        let mut fast = publisher.subscribe(&[], &[]).expect("room");
        for at in 0..QUEUE_FRAMES as u128 + 10 {
            publisher.publish(stored(at));
            while read(&mut fast).is_some() {
                seen += 1;
            }
        }
        assert_eq!(seen, QUEUE_FRAMES + 11);
        let mut got = 0;
        while read(&mut slow).is_some() {
            got += 1;
        }
        assert_eq!(got, QUEUE_FRAMES + 1, "all up to the cut, in order");
        assert!(matches!(slow.try_recv(), Err(mpsc::error::TryRecvError::Disconnected)));
    }

    #[test]
    fn subscribers_are_bounded_and_the_gone_make_room() {
        let mut publisher = publisher();
        let mut queues: Vec<_> = (0..SUBSCRIBERS_MAX).map(|_| publisher.subscribe(&[], &[]).expect("room")).collect();
        assert!(publisher.subscribe(&[], &[]).is_none());
        queues.pop();
        assert!(publisher.subscribe(&[], &[]).is_some());
    }
}
