//! Our index under the replay: the caller looks up inline, events go to writer threads, each worker's to always the same one.
//!
//! Called by `index`. The threads are the bench's: in the product, the subscriptions' own tasks apply the events.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

use starling_ids::{BlockHash, Incarnation, NodeId, WorkerId};
use starling_kv::{
    events::KvEvent,
    index::{IndexLimits, Overlap, PrefixIndex},
};

use super::{
    drive::Subject,
    log::{Log, Op, mix},
};

const LIFE: Incarnation = Incarnation(1);

enum Task {
    Event(u32, KvEvent),
    Flush(Sender<()>),
}

/// See the module.
#[derive(Debug)]
pub struct Ours {
    index: Arc<PrefixIndex>,
    writers: Vec<Sender<Task>>,
    threads: Vec<JoinHandle<()>>,
    overlaps: Vec<Overlap>,
}

fn hash(block: u32) -> BlockHash {
    BlockHash(u128::from(mix(0x1111, block)) << 64 | u128::from(mix(0x2222, block)))
}

impl Ours {
    /// An index of as many shards as threads that write to it.
    ///
    /// # Panics
    /// When a worker cannot be added: more than an index takes.
    #[must_use]
    pub fn new(workers: u32, threads: usize) -> Self {
        let limits = IndexLimits { memberships_max: usize::MAX / 2, shards: threads };
        let index = Arc::new(PrefixIndex::new(limits));
        let node = NodeId::new("mock").expect("a name");
        let names: Vec<WorkerId> =
            (0..workers).map(|index| WorkerId { node: node.clone(), index: index as u16 }).collect();
        for name in &names {
            index.add_worker(name.clone(), LIFE).expect("room");
        }
        let names = Arc::new(names);
        let (mut writers, mut handles) = (Vec::new(), Vec::new());
        for _ in 0..threads {
            let (sender, receiver) = channel();
            let (index, names) = (index.clone(), names.clone());
            writers.push(sender);
            handles.push(std::thread::spawn(move || write(&index, &names, &receiver)));
        }
        Self { index, writers, threads: handles, overlaps: Vec::new() }
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        self.writers.clear();
        for thread in self.threads.drain(..) {
            thread.join().expect("a writer ends");
        }
    }
}

fn write(index: &PrefixIndex, names: &[WorkerId], tasks: &Receiver<Task>) {
    for task in tasks {
        match task {
            Task::Event(worker, event) => {
                index.apply(&names[worker as usize], LIFE, &event).expect("a known worker");
            }
            Task::Flush(done) => done.send(()).expect("somebody waits"),
        }
    }
}

impl Subject for Ours {
    type Event = (u32, KvEvent);
    type Query = Vec<BlockHash>;

    fn event(&self, log: &Log, op: &Op) -> Self::Event {
        let hashes =
            |range: &std::ops::Range<usize>| log.blocks[range.clone()].iter().map(|block| hash(*block)).collect();
        match op {
            Op::Find { .. } => (0, KvEvent::Removed { blocks: Vec::new() }),
            Op::Store { worker, parent, chain } => {
                (*worker, KvEvent::Stored { parent: parent.map(hash), blocks: hashes(chain) })
            }
            Op::Remove { worker, blocks } => (*worker, KvEvent::Removed { blocks: hashes(blocks) }),
        }
    }

    fn query(&self, chain: &[u32]) -> Vec<BlockHash> {
        chain.iter().map(|block| hash(*block)).collect()
    }

    fn find(&mut self, query: &Vec<BlockHash>) -> usize {
        self.index.overlaps(query, &mut self.overlaps);
        self.overlaps.len()
    }

    fn scores(&mut self, query: &Vec<BlockHash>) -> Vec<(u32, u32)> {
        let found = self.index.matches(query, usize::MAX);
        let mut scores: Vec<(u32, u32)> =
            found.iter().map(|found| (u32::from(found.worker.index), found.depth as u32)).collect();
        scores.sort_unstable();
        scores
    }

    fn enqueue(&mut self, event: Self::Event) {
        let (worker, event) = event;
        let writer = worker as usize % self.writers.len();
        self.writers[writer].send(Task::Event(worker, event)).expect("the writers live");
    }

    fn drain(&mut self) {
        let (sender, done) = channel();
        for writer in &self.writers {
            writer.send(Task::Flush(sender.clone())).expect("the writers live");
        }
        self.writers.iter().for_each(|_| done.recv().expect("the writers live"));
    }
}
