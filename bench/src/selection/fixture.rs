//! A shard with workers of different loads, and an index of what they hold.

use std::{sync::Arc, time::Duration};

use starling_actors::route::{
    desk::{Ask, Decision, Desk},
    fleet::{Heard, Places, Slot, Standing},
    policy::{PolicyConfig, PolicyName},
    queue::rooms::Rooms,
    rates::Rates,
};
use starling_ids::{BlockHash, Incarnation, NodeId, RequestId, WorkerId};
use starling_kv::{
    events::KvEvent,
    hash::{HashSeed, block_hashes},
    index::{IndexLimits, PrefixIndex},
};

pub(super) const BLOCK: u32 = 16;
pub(super) const LIFE: Incarnation = Incarnation(1);

/// Who holds something of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holders {
    /// Eight workers, each another share of it.
    Eight,
    /// Every worker, up to 124 blocks of it.
    All,
}

/// One model's desk with a prompt for it.
pub(super) struct Shard {
    pub(super) desk: Desk,
    pub(super) hits: Vec<(Slot, u32)>,
    tokens: u32,
    hashes: Vec<BlockHash>,
}

impl Shard {
    /// The fixture of the peer's bench: 2,048 tokens, loads and hits by the worker's number.
    pub(super) fn like_theirs(policy: PolicyName, workers: usize) -> Result<Self, String> {
        let mut shard = Self::new(policy, workers, 2_048)?;
        shard.hits =
            (0..workers).map(|worker| (worker, (worker % 32) as u32 * 4)).filter(|(_, hit)| *hit > 0).collect();
        Ok(shard)
    }

    /// A prompt of 10,000 tokens and an index in which each worker also holds 64 blocks of its own.
    pub(super) fn with_index(
        policy: PolicyName,
        workers: usize,
        holders: Holders,
    ) -> Result<(Self, PrefixIndex), String> {
        let shard = Self::new(policy, workers, 10_000)?;
        let index = PrefixIndex::new(IndexLimits::default());
        for number in 0..workers {
            let id = worker(number)?;
            index.add_worker(id.clone(), LIFE).map_err(|error| error.to_string())?;
            let own: Vec<u32> = (0..64 * BLOCK).map(|at| at + 1_000_000 + number as u32 * 7).collect();
            let own = block_hashes(HashSeed(1), &own, BLOCK as usize);
            let held = match holders {
                Holders::Eight if number % (workers / 8).max(1) == 0 => 70 * (1 + number / (workers / 8).max(1)),
                Holders::Eight => 0,
                Holders::All => 1 + number % 32 * 4,
            };
            let held = shard.hashes[..held.min(shard.hashes.len())].to_vec();
            for blocks in [own, held].into_iter().filter(|blocks| !blocks.is_empty()) {
                let stored = KvEvent::Stored { parent: None, blocks };
                index.apply(&id, LIFE, &stored).map_err(|error| error.to_string())?;
            }
        }
        Ok((shard, index))
    }

    /// One in which a single worker has room for whoever is next; see [`super::grant`].
    pub(super) fn full(policy: PolicyName, workers: usize) -> Result<(Self, PrefixIndex), String> {
        let (mut shard, index) = Self::with_index(policy, workers, Holders::Eight)?;
        for number in 0..workers {
            let heard = Heard {
                at: Duration::from_secs(2),
                running: 32,
                prefill_tokens: 3 * 2_048 - u64::from(number == 0),
                blocks_pinned: if number % 2 == 0 { 30_000 } else { 142_000 },
                ..heard(number)
            };
            shard.desk.hear(&worker(number)?, LIFE, heard);
        }
        Ok((shard, index))
    }

    fn new(policy: PolicyName, workers: usize, tokens: u32) -> Result<Self, String> {
        let policy = PolicyConfig::named(policy).build().map_err(|error| error.to_string())?;
        let mut desk = Desk::new(policy, 7).with_rooms(Rooms::default());
        let places = Places { sequences: 64, waiting: 256, step_tokens: 2_048, blocks: 131_072, ..Places::default() };
        let labels = Arc::default();
        for number in 0..workers {
            let id = worker(number)?;
            desk.seat(&id, LIFE, places, Standing::Sound);
            desk.set_labels(&id, &labels);
            desk.hear(&id, LIFE, heard(number));
        }
        let prompt: Vec<u32> = (0..tokens).collect();
        let hashes = block_hashes(HashSeed(1), &prompt, BLOCK as usize);
        Ok(Self { desk, hits: Vec::new(), tokens, hashes })
    }

    /// The prompt's chain.
    pub(super) fn prompt(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// The hits, one entry a worker.
    pub(super) fn hits_by_slot(&self) -> Vec<u32> {
        let mut hits = vec![0; self.desk.fleet().width()];
        self.hits.iter().for_each(|(slot, hit)| hits[*slot] = *hit);
        hits
    }

    /// The request of a number.
    pub(super) fn ask(&self, number: usize) -> Ask<'_> {
        ask(number, self.tokens, &self.hashes)
    }

    /// Decides for the request of a number.
    pub(super) fn decide(
        &mut self,
        number: usize,
        decide: impl FnOnce(&mut Desk, &Ask<'_>, Duration) -> Option<Decision>,
    ) -> Option<Decision> {
        let ask = ask(number, self.tokens, &self.hashes);
        decide(&mut self.desk, &ask, Duration::from_secs(2))
    }
}

fn heard(number: usize) -> Heard {
    Heard {
        at: Duration::from_secs(1),
        running: (number % 17) as u32,
        prefill_tokens: number as u64 * u64::from(BLOCK),
        blocks_pinned: (number % 127) as u32,
        rates: Some(Rates { prefill_ms_per_token: 0.05, decode_ms_per_sequence: 0.1, step_ms: 8.0 }),
        ..Heard::default()
    }
}

pub(super) fn ask(number: usize, tokens: u32, hashes: &[BlockHash]) -> Ask<'_> {
    Ask {
        request: RequestId(number as u128),
        prompt_tokens: tokens,
        block_tokens: BLOCK,
        hashes,
        answer_tokens_max: 256,
        ..Ask::default()
    }
}

pub(super) fn worker(number: usize) -> Result<WorkerId, String> {
    let node = NodeId::new(&format!("node-{}", number / 8)).map_err(|error| error.to_string())?;
    Ok(WorkerId { node, index: (number % 8) as u16 })
}
