//! Replays an operation log on `ThreadPoolIndexer` over `ConcurrentRadixTreeCompressed`, by the same code as ours.

#[path = "../../../src/index_bench/command.rs"]
mod command;
#[path = "../../../src/index_bench/cpu.rs"]
mod cpu;
#[path = "../../../src/index_bench/drive.rs"]
mod drive;
#[path = "../../../src/index_bench/heap.rs"]
mod heap;
#[path = "../../../src/index_bench/log.rs"]
mod log;
#[path = "../../../src/index_bench/oracle.rs"]
mod oracle;

use command::Command;
use drive::Subject;
use dynamo_kv_router::{
    ConcurrentRadixTreeCompressed, LocalBlockHash, RouterEvent, SyncIndexer, ThreadPoolIndexer,
    protocols::{
        ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
        KvCacheStoredBlockData,
    },
};
use log::{Log, Op, mix};

#[global_allocator]
static HEAP: heap::Counting = heap::Counting;

struct Theirs {
    index: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    runtime: tokio::runtime::Runtime,
}

fn local(block: u32) -> LocalBlockHash {
    LocalBlockHash(mix(0x1111, block))
}

fn external(block: u32) -> ExternalSequenceBlockHash {
    ExternalSequenceBlockHash(mix(0x2222, block))
}

impl Subject for Theirs {
    type Event = RouterEvent;
    type Query = Vec<LocalBlockHash>;

    fn event(&self, log: &Log, op: &Op) -> RouterEvent {
        let (worker, data) = match op {
            Op::Find { .. } => (0, KvCacheEventData::Cleared),
            Op::Store { worker, parent, chain } => {
                let block = |block: &u32| KvCacheStoredBlockData {
                    block_hash: external(*block),
                    tokens_hash: local(*block),
                    mm_extra_info: None,
                };
                let blocks = log.blocks[chain.clone()].iter().map(block).collect();
                let parent_hash = parent.map(external);
                (*worker, KvCacheEventData::Stored(KvCacheStoreData { parent_hash, start_position: None, blocks }))
            }
            Op::Remove { worker, blocks } => {
                let block_hashes = log.blocks[blocks.clone()].iter().map(|block| external(*block)).collect();
                (*worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
            }
        };
        RouterEvent::new(u64::from(worker), KvCacheEvent { event_id: 0, data, dp_rank: 0 })
    }

    fn query(&self, chain: &[u32]) -> Self::Query {
        chain.iter().map(|block| local(*block)).collect()
    }

    fn find(&mut self, query: &Self::Query) -> usize {
        self.index.backend().find_matches(query, false).scores.len()
    }

    fn scores(&mut self, query: &Self::Query) -> Vec<(u32, u32)> {
        let found = self.index.backend().find_matches(query, false);
        let mut scores: Vec<_> =
            found.scores.iter().map(|(worker, depth)| (worker.worker_id as u32, *depth)).filter(|(_, d)| *d > 0).collect();
        scores.sort_unstable();
        scores
    }

    fn enqueue(&mut self, event: RouterEvent) {
        self.index.enqueue_event(event).expect("the writers live");
    }

    fn drain(&mut self) {
        self.runtime.block_on(self.index.flush_and_wait()).expect("the writers live");
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let command = Command::parse(&arguments).unwrap_or_else(|error| panic!("{error}"));
    let make = || Theirs {
        index: ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), command.threads, 16),
        runtime: tokio::runtime::Builder::new_current_thread().build().expect("runtime"),
    };
    println!("{}", command.run(make).unwrap_or_else(|error| panic!("{error}")));
}
