//! Numbers a worker's KV events and hands them to every subscriber.
//!
//! Called by the engine thread between steps; never waits. A subscriber's queue is bounded; one that falls behind
//! it is cut off, so that it must subscribe again: nothing is left out silently. It goes on where it was while what it missed is
//! still kept, else with a new inventory. Now and then it tells
//! digests of what the engine really holds, and on request what is in the buckets that differ.
//! Bounds: [`KEPT_BYTES`] of batches kept, [`QUEUE_FRAMES`] frames a subscriber beyond its inventory, [`SUBSCRIBERS_MAX`] subscribers.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

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

/// How often what an engine holds is told in digests, while it works; the more it holds, the more seldom.
pub(crate) const DIGEST_EVERY: Duration = Duration::from_secs(5);

/// As many blocks more make the pause between digests longer by [`DIGEST_EVERY`]: reading them takes the engine's time.
const DIGEST_BLOCKS: usize = 65_536;

/// Bytes of the last batches that are kept for subscribers whose stream broke.
pub(crate) const KEPT_BYTES: usize = 1 << 20;

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
    /// How long after that they are told again.
    pause: Duration,
    /// Which life of the engine it is.
    epoch: u64,
    /// The last batches with the numbers of their first events, oldest first and without a gap.
    kept: VecDeque<(u64, Bytes)>,
    kept_bytes: usize,
}

impl Publisher {
    pub(crate) fn new(worker: WorkerId, incarnation: Incarnation, epoch: u64, silent: bool) -> Self {
        let (subscribers, next, ids, stirred, told) = (Vec::new(), 0, 0, false, None);
        let (kept, kept_bytes, pause) = (VecDeque::new(), 0, DIGEST_EVERY);
        Self { worker, incarnation, silent, next, subscribers, ids, stirred, told, pause, epoch, kept, kept_bytes }
    }

    /// A queue that goes on where a subscriber's stream broke. `None` when what it missed is not here any more, or was of
    /// another life of the engine: then it needs an inventory.
    pub(crate) fn resume(&mut self, wants: Subscribe) -> Option<(SubscriberId, mpsc::Receiver<Bytes>)> {
        let from = wants.from.filter(|from| from.epoch == self.epoch && from.seq <= self.next && !self.silent)?;
        self.subscribers.retain(|subscriber| !subscriber.queue.is_closed());
        let oldest = self.kept.front().map_or(self.next, |(seq, _)| *seq);
        if from.seq < oldest || self.subscribers.len() >= SUBSCRIBERS_MAX {
            return None;
        }
        // The batch in which it stopped comes again as a whole; the reader passes over what it knows.
        let first = self.kept.partition_point(|(seq, _)| *seq <= from.seq).saturating_sub(1);
        let missed = self.kept.range(first..).map(|(_, frame)| frame.clone());
        let (sender, queue) = mpsc::channel(missed.len() + QUEUE_FRAMES);
        for frame in missed {
            sender.try_send(frame).ok()?;
        }
        Some((self.enter(sender, wants), queue))
    }

    fn enter(&mut self, queue: mpsc::Sender<Bytes>, wants: Subscribe) -> SubscriberId {
        self.ids += 1;
        let id = SubscriberId(self.ids);
        self.subscribers.push(Subscriber { id, queue, digests: wants.digests && !self.silent });
        id
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
                epoch: self.epoch,
            });
            sender.try_send(encode(&news)?).ok()?;
        }
        Some((self.enter(sender, wants), queue))
    }

    /// Hands one step's events to every subscriber and cuts off those that have no room.
    pub(crate) fn publish(&mut self, events: Vec<KvEvent>) {
        if events.is_empty() || self.silent {
            return;
        }
        self.stirred = true;
        let seq = self.next;
        self.next += events.len() as u64;
        if self.ids == 0 {
            // Whoever comes first takes an inventory.
            return;
        }
        let batch = EventBatch { worker: self.worker.clone(), incarnation: self.incarnation, seq, events };
        let Some(frame) = encode(&WorkerNews::Events(batch)) else {
            self.kept.clear();
            self.subscribers.clear();
            return;
        };
        self.keep(seq, frame.clone());
        self.subscribers.retain(|subscriber| subscriber.queue.try_send(frame.clone()).is_ok());
    }

    /// Keeps a batch for those whose stream breaks, and drops the oldest ones.
    fn keep(&mut self, seq: u64, frame: Bytes) {
        self.kept_bytes += frame.len();
        self.kept.push_back((seq, frame));
        while self.kept_bytes > KEPT_BYTES
            && let Some((_, oldest)) = self.kept.pop_front()
        {
            self.kept_bytes -= oldest.len();
        }
    }

    /// The engine did something: what it holds may be another set than it said.
    pub(crate) fn stir(&mut self) {
        self.stirred = true;
    }

    /// When digests should be told; `None` while nobody wants them or nothing happened.
    pub(crate) fn digests_due(&self, now: Instant) -> Option<Duration> {
        let wanted = self.stirred && self.subscribers.iter().any(|subscriber| subscriber.digests);
        let passed = self.told.map_or(Duration::MAX, |told| now.saturating_duration_since(told));
        wanted.then(|| self.pause.saturating_sub(passed))
    }

    /// Tells what each cache holds, by the engine's own book and with all its events published.
    pub(crate) fn tell_digests(
        &mut self,
        device: &[(Option<BlockHash>, BlockHash)],
        below: &[TierInventory],
        now: Instant,
    ) {
        (self.stirred, self.told) = (false, Some(now));
        let blocks = device.len() + below.iter().map(|(_, blocks)| blocks.len()).sum::<usize>();
        self.pause = DIGEST_EVERY * u32::try_from(1 + blocks / DIGEST_BLOCKS).unwrap_or(u32::MAX);
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
    use crate::report::ReadUpTo;

    const PLAIN: Subscribe = Subscribe { digests: false, from: None };

    fn publisher() -> Publisher {
        Publisher::new(WorkerId { node: NodeId::new("n").expect("name"), index: 0 }, Incarnation(1), 3, false)
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
        let (id, mut queue) = publisher.subscribe(&[], &[], Subscribe { digests: true, from: None }).expect("room");
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
    fn a_stream_that_broke_goes_on_where_it_was() {
        let mut publisher = publisher();
        let from = |epoch, seq| Subscribe { digests: false, from: Some(ReadUpTo { epoch, seq }) };
        publisher.publish(stored(1));
        let mut queue = publisher.subscribe(&[], &[], PLAIN).expect("room").1;
        assert!(matches!(read(&mut queue), Some(WorkerNews::Inventory(part)) if part.epoch == 3 && part.seq == 1));
        publisher.publish([stored(2), stored(3)].concat());
        publisher.publish(stored(4));
        let seqs = |queue: &mut mpsc::Receiver<Bytes>| {
            let news = std::iter::from_fn(|| read(queue));
            news.map(|news| if let WorkerNews::Events(batch) = news { batch.seq } else { u64::MAX }).collect::<Vec<_>>()
        };
        let resumed = |publisher: &mut Publisher, epoch, seq| {
            publisher.resume(from(epoch, seq)).map(|(_, mut queue)| (seqs(&mut queue), queue))
        };
        // In the middle of a batch: it comes again whole. At the end: nothing is missing.
        assert_eq!(resumed(&mut publisher, 3, 1).expect("kept").0, [1, 3]);
        assert_eq!(resumed(&mut publisher, 3, 2).expect("kept").0, [1, 3]);
        let (missed, mut queue) = resumed(&mut publisher, 3, 4).expect("kept");
        publisher.publish(stored(5));
        assert_eq!((missed, seqs(&mut queue)), (vec![3], vec![4]));
        assert!(resumed(&mut publisher, 3, 0).is_none(), "before anybody listened");
        assert!(resumed(&mut publisher, 2, 3).is_none(), "another life of the engine");
        assert!(resumed(&mut publisher, 3, 99).is_none() && publisher.resume(PLAIN).is_none());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut publisher = publisher();
        let queue = publisher.subscribe(&[], &[], PLAIN).expect("room");
        for at in 0..20_000u128 {
            publisher
                .publish(vec![KvEvent::Removed { blocks: (0..16).map(|hash| BlockHash(at << 64 | hash)).collect() }]);
        }
        assert!(publisher.kept_bytes <= KEPT_BYTES && publisher.kept.len() > 1_000);
        let first = publisher.kept[0].0;
        assert!(first > 0 && publisher.kept.iter().enumerate().all(|(at, (seq, _))| *seq == first + at as u64));
        assert!(
            publisher.resume(Subscribe { digests: false, from: Some(ReadUpTo { epoch: 3, seq: first - 1 }) }).is_none()
        );
        drop(queue);
    }

    #[test]
    fn a_silent_one_tells_nothing_of_its_blocks() {
        let worker = WorkerId { node: NodeId::new("n").expect("name"), index: 0 };
        let mut publisher = Publisher::new(worker, Incarnation(1), 3, true);
        let wants = Subscribe { digests: true, from: None };
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
