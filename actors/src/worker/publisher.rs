//! Numbers a worker's KV events and hands them to every subscriber.
//!
//! Called by the engine thread between steps; never waits. A subscriber's queue is bounded; one that falls behind
//! it is cut off, so that it must subscribe again and take a new inventory: nothing is left out silently. Now and then it tells
//! digests of what the engine really holds, and on request what is in the buckets that differ.
//! Bounds: [`QUEUE_FRAMES`] frames a subscriber beyond its inventory, [`SUBSCRIBERS_MAX`] subscribers.

use std::time::{Duration, Instant};

use bytes::Bytes;
use starling_ids::{BlockHash, Incarnation, WorkerId};
use starling_kv::{
    events::{EventBatch, KvEvent},
    hash::BucketDigests,
    index::Tier,
    tier::TierInventory,
};
use tokio::sync::mpsc;

use crate::report::{
    BUCKET_PART_BLOCKS, BucketAsk, BucketPart, CacheDigests, INVENTORY_PART_BLOCKS, InventoryPart, Subscribe,
    WorkerNews,
};

/// Frames that wait for a subscriber; one a step, so some seconds of a busy engine.
pub(crate) const QUEUE_FRAMES: usize = 1_024;

/// Subscribers of one worker: an indexer per router node.
pub(crate) const SUBSCRIBERS_MAX: usize = 256;

/// How often what an engine holds is told in digests, while it works.
pub(crate) const DIGEST_EVERY: Duration = Duration::from_secs(5);

/// One subscriber of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SubscriberId(u64);

#[derive(Debug)]
struct Subscriber {
    id: SubscriberId,
    queue: mpsc::Sender<Bytes>,
    digests: bool,
}

/// The numbering and the subscribers of one engine.
#[derive(Debug)]
pub(crate) struct Publisher {
    worker: WorkerId,
    incarnation: Incarnation,
    /// Its blocks are not told at all; routers guess them.
    silent: bool,
    next: u64,
    subscribers: Vec<Subscriber>,
    ids: u64,
    /// The engine has worked since digests were told.
    stirred: bool,
    told: Option<Instant>,
}

impl Publisher {
    pub(crate) fn new(worker: WorkerId, incarnation: Incarnation, silent: bool) -> Self {
        let (subscribers, next, ids) = (Vec::new(), 0, 0);
        Self { worker, incarnation, silent, next, subscribers, ids, stirred: false, told: None }
    }

    /// A queue that begins with `inventory` and what lies `below`, then carries every batch. `None` when there are too many
    /// already.
    pub(crate) fn subscribe(
        &mut self,
        inventory: &[(Option<BlockHash>, BlockHash)],
        below: &[TierInventory],
        wants: Subscribe,
    ) -> Option<(SubscriberId, mpsc::Receiver<Bytes>)> {
        self.subscribers.retain(|subscriber| !subscriber.queue.is_closed());
        if self.subscribers.len() >= SUBSCRIBERS_MAX {
            return None;
        }
        let (inventory, below) = if self.silent { Default::default() } else { (inventory, below) };
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
        self.ids += 1;
        let id = SubscriberId(self.ids);
        self.subscribers.push(Subscriber { id, queue: sender, digests: wants.digests && !self.silent });
        Some((id, queue))
    }

    /// Hands one step's events to every subscriber and cuts off those that have no room.
    pub(crate) fn publish(&mut self, events: Vec<KvEvent>) {
        if events.is_empty() || self.silent {
            return;
        }
        self.stirred = true;
        let seq = self.next;
        self.next += events.len() as u64;
        if self.subscribers.is_empty() {
            return;
        }
        let batch = EventBatch { worker: self.worker.clone(), incarnation: self.incarnation, seq, events };
        self.tell(&WorkerNews::Events(batch), |_| true);
    }

    /// The engine did something: what it holds may be another set than it said.
    pub(crate) fn stir(&mut self) {
        self.stirred = true;
    }

    /// When digests should be told; `None` while nobody wants them or nothing happened.
    pub(crate) fn digests_due(&self, now: Instant) -> Option<Duration> {
        let wanted = self.stirred && self.subscribers.iter().any(|subscriber| subscriber.digests);
        let passed = self.told.map_or(Duration::MAX, |told| now.saturating_duration_since(told));
        wanted.then(|| DIGEST_EVERY.saturating_sub(passed))
    }

    /// Tells what each cache holds, by the engine's own book and with all its events published.
    pub(crate) fn tell_digests(
        &mut self,
        device: &[(Option<BlockHash>, BlockHash)],
        below: &[TierInventory],
        now: Instant,
    ) {
        (self.stirred, self.told) = (false, Some(now));
        for (tier, blocks) in caches(device, below) {
            let mut digests = BucketDigests::default();
            blocks.iter().for_each(|(_, hash)| digests.toggle(*hash));
            let (worker, incarnation, seq) = (self.worker.clone(), self.incarnation, self.next);
            let digests = digests.parts().to_vec();
            let told = CacheDigests { worker, incarnation, seq, tier, digests };
            self.tell(&WorkerNews::Digests(told), |subscriber| subscriber.digests);
        }
    }

    /// Tells one subscriber what is in some buckets of a cache, by the engine's own book and with all its events published.
    pub(crate) fn tell_buckets(
        &mut self,
        to: SubscriberId,
        ask: BucketAsk,
        device: &[(Option<BlockHash>, BlockHash)],
        below: &[TierInventory],
    ) {
        let Some((tier, blocks)) = caches(device, below).find(|(tier, _)| *tier == ask.tier) else { return };
        for bucket in (0..BucketDigests::BUCKETS).filter(|bucket| ask.buckets >> bucket & 1 == 1) {
            let inside = blocks.iter().map(|(_, hash)| *hash).filter(|hash| BucketDigests::bucket(*hash) == bucket);
            let inside: Vec<BlockHash> = inside.collect();
            let mut parts: Vec<&[BlockHash]> = inside.chunks(BUCKET_PART_BLOCKS).collect();
            if parts.is_empty() {
                parts.push(&[]);
            }
            let last = parts.len() - 1;
            for (number, part) in parts.into_iter().enumerate() {
                let (worker, incarnation, seq) = (self.worker.clone(), self.incarnation, self.next);
                let (bucket, more, blocks) = (bucket as u8, number < last, part.to_vec());
                let told = BucketPart { worker, incarnation, seq, tier, bucket, more, blocks };
                self.tell(&WorkerNews::Bucket(told), |subscriber| subscriber.id == to);
            }
        }
    }

    /// To some subscribers; those of them that have no room are cut off.
    fn tell(&mut self, news: &WorkerNews, to: impl Fn(&Subscriber) -> bool) {
        match encode(news) {
            Some(frame) => self
                .subscribers
                .retain(|subscriber| !to(subscriber) || subscriber.queue.try_send(frame.clone()).is_ok()),
            None => self.subscribers.clear(),
        }
    }
}

/// Every cache with what it holds: a tier that is not there holds nothing.
fn caches<'a>(
    device: &'a [(Option<BlockHash>, BlockHash)],
    below: &'a [TierInventory],
) -> impl Iterator<Item = (Tier, &'a [(Option<BlockHash>, BlockHash)])> {
    Tier::ALL.into_iter().map(move |tier| match tier {
        Tier::Device => (tier, device),
        lower => (lower, below.iter().find(|(known, _)| *known == lower).map_or(&[][..], |(_, blocks)| blocks)),
    })
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

    const PLAIN: Subscribe = Subscribe { digests: false };

    fn publisher() -> Publisher {
        Publisher::new(WorkerId { node: NodeId::new("n").expect("name"), index: 0 }, Incarnation(1), false)
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
        let mut queue = publisher.subscribe(&blocks, &[], PLAIN).expect("room").1;
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
        let mut queue = publisher().subscribe(&[], &[], PLAIN).expect("room").1;
        assert!(matches!(read(&mut queue), Some(WorkerNews::Inventory(part)) if !part.more && part.blocks.is_empty()));
    }

    #[test]
    fn act_04_a_subscriber_that_lags_is_cut_off_and_the_others_go_on() {
        let mut publisher = publisher();
        let mut slow = publisher.subscribe(&[], &[], PLAIN).expect("room").1;
        let mut seen = 0;
        let mut fast = publisher.subscribe(&[], &[], PLAIN).expect("room").1;
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
        let mut queues: Vec<_> =
            (0..SUBSCRIBERS_MAX).map(|_| publisher.subscribe(&[], &[], PLAIN).expect("room").1).collect();
        assert!(publisher.subscribe(&[], &[], PLAIN).is_none());
        queues.pop();
        assert!(publisher.subscribe(&[], &[], PLAIN).is_some());
    }

    #[test]
    fn digests_go_to_who_wants_them_and_buckets_to_who_asks() {
        let mut publisher = publisher();
        let mut plain = publisher.subscribe(&[], &[], PLAIN).expect("room").1;
        let now = Instant::now();
        publisher.stir();
        assert_eq!(publisher.digests_due(now), None, "nobody wants them");
        let (id, mut queue) = publisher.subscribe(&[], &[], Subscribe { digests: true }).expect("room");
        assert_eq!(publisher.digests_due(now), Some(Duration::ZERO));
        assert!(read(&mut plain).is_some() && read(&mut queue).is_some(), "the inventories");
        let held = [(None, BlockHash(5)), (None, BlockHash(6)), (None, BlockHash(28 << 122))];
        publisher.tell_digests(&held, &[], now);
        assert_eq!(publisher.digests_due(now), None, "nothing happened since");
        publisher.stir();
        assert_eq!(publisher.digests_due(now + Duration::from_secs(1)), Some(Duration::from_secs(4)));
        let Some(WorkerNews::Digests(told)) = read(&mut queue) else { panic!("digests") };
        assert_eq!((told.tier, told.digests[3], told.digests.len()), (Tier::Device, Default::default(), 64));
        assert_ne!(told.digests[28], Default::default());
        assert!(
            std::iter::from_fn(|| read(&mut queue)).all(|news| matches!(news, WorkerNews::Digests(told)
            if told.digests == vec![Default::default(); 64])),
            "the tiers below are empty"
        );
        publisher.tell_buckets(id, BucketAsk { tier: Tier::Device, buckets: 1 | 1 << 3 }, &held, &[]);
        let Some(WorkerNews::Bucket(part)) = read(&mut queue) else { panic!("a bucket") };
        assert_eq!((part.bucket, part.more, part.blocks), (0, false, vec![BlockHash(5), BlockHash(6)]));
        let Some(WorkerNews::Bucket(part)) = read(&mut queue) else { panic!("a bucket") };
        assert_eq!((part.bucket, part.more, part.blocks), (3, false, Vec::new()));
        assert!(read(&mut queue).is_none() && read(&mut plain).is_none());
    }

    #[test]
    fn a_silent_one_tells_nothing_of_its_blocks() {
        let worker = WorkerId { node: NodeId::new("n").expect("name"), index: 0 };
        let mut publisher = Publisher::new(worker, Incarnation(1), true);
        let wants = Subscribe { digests: true };
        let mut queue = publisher.subscribe(&[(None, BlockHash(1))], &[], wants).expect("room").1;
        publisher.publish(stored(2));
        publisher.stir();
        assert_eq!(publisher.digests_due(Instant::now()), None);
        assert!(
            matches!(read(&mut queue), Some(WorkerNews::Inventory(part)) if part.blocks.is_empty() && part.seq == 0)
        );
        assert!(read(&mut queue).is_none());
    }
}
