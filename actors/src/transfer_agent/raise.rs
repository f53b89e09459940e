//! What a holder has of a chain on its lower tiers, read into room of its device for a taker.
//!
//! Called by [`super::hold`] once the device has no more of it. The engine gives room between two of its steps; everything else
//! happens beside it, on a blocking thread: the tiers' threads read and verify, and what came is compared with what was asked for,
//! written to its room and summed for the grant. The room goes back with the ticket: the taker has the blocks then, and the tiers
//! still have them. Never: grants a block that is not the one that was asked for; waits longer than [`LIMIT`].
//! Bounds: [`RAISES`] chains at a time for one worker; room as the engine gives it to guests; [`FILLED_MAX`] parts on their way.
//! Whatever goes wrong, the rest does not come, and the taker computes it.

use std::{sync::Arc, time::Duration};

use starling_engine::backend::{BlockSlot, KvMemory};
use starling_ids::{BlockHash, Metric, TokenId};
use starling_kv::{
    index::Tier,
    tier::{Reading, TierBlock},
    transport::page_sum,
};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot};

use super::{face::KvFace, hold::Held};
use crate::{
    transfer::Granted,
    worker::{Blocks, Command, Port, Room, RoomAsk},
};

/// Chains that are read at one time for takers of one worker's blocks.
const RAISES: usize = 8;
/// Longest that one chain is read. A taker that computes sooner ends its ticket before.
const LIMIT: Duration = Duration::from_secs(3);
/// Parts that wait to be granted.
const FILLED_MAX: usize = 4;
/// Blocks that are granted together when they are there together.
const PART: usize = 8;
/// How often room is asked for, half as much each time.
const ROOM_TRIES: u32 = 3;

/// Blocks that are in their room, for one grant.
#[derive(Debug)]
pub(super) struct Filled {
    /// Their room.
    pub(super) pins: Blocks,
    /// What they are.
    pub(super) granted: Vec<Granted>,
}

/// Begins to read what follows the first `from` blocks of a chain. What is received are its next blocks, in order, until no more
/// comes.
pub(super) fn raise(held: &Held, hashes: &[BlockHash], from: usize) -> mpsc::Receiver<Filled> {
    let (sender, filled) = mpsc::channel(FILLED_MAX);
    let chain = Chain {
        hashes: hashes.to_vec(),
        tokens: held.tokens.clone(),
        block_tokens: held.block_tokens,
        from,
        memory: held.kv.memory.clone(),
    };
    // Refused when the worker died just now: then nothing comes.
    held.port.tasks.spawn(run(held.port.clone(), held.kv.clone(), chain, sender));
    filled
}

/// What is wanted and where it goes.
struct Chain {
    hashes: Vec<BlockHash>,
    tokens: Arc<[TokenId]>,
    block_tokens: usize,
    /// The first block that is not on the device.
    from: usize,
    memory: KvMemory,
}

impl Chain {
    /// Writes a block to its room if it is the one at this place of the chain.
    fn place(&self, at: usize, block: &TierBlock, slot: BlockSlot) -> Option<Granted> {
        let parent = at.checked_sub(1).and_then(|before| self.hashes.get(before)).copied();
        let tokens = self.tokens.get(at * self.block_tokens..(at + 1) * self.block_tokens)?;
        let bytes: &[u8] = &block.bytes;
        let right = Some(&block.hash) == self.hashes.get(at) && block.parent == parent && *block.tokens == *tokens;
        if !right || bytes.len() as u64 != self.memory.block_bytes {
            return None;
        }
        self.memory.region.write(u64::from(slot.0) * self.memory.block_bytes, bytes)?;
        Some(Granted { index: u32::try_from(at).ok()?, slot, checksum: page_sum(bytes), wave: 0 })
    }
}

async fn run(port: Arc<Port>, kv: Arc<KvFace>, chain: Chain, sender: mpsc::Sender<Filled>) {
    let fetching = async {
        let permit = kv.raises.try_acquire().ok()?;
        let reading = kv.lower.as_ref()?.read(chain.hashes.get(chain.from..)?, LIMIT)?;
        let room = room(&port, reading.blocks()).await?;
        Some((permit, reading, room))
    };
    let begun: Option<(SemaphorePermit<'_>, Reading, Blocks)> = tokio::select! {
        biased;
        () = sender.closed() => None,
        begun = fetching => begun,
    };
    let Some((_permit, reading, room)) = begun else { return };
    // It has its own limit, and ends sooner when nobody wants the blocks any more.
    if tokio::task::spawn_blocking(move || fill(&chain, reading, room, &sender)).await.is_err() {
        tracing::error!("reading blocks of a lower tier for another worker panicked");
    }
}

/// Room for so many blocks, or for a part of them when others have the rest.
async fn room(port: &Port, blocks: usize) -> Option<Blocks> {
    for halved in 0..ROOM_TRIES {
        let (reply, answer) = oneshot::channel();
        let ask = RoomAsk { hashes: Vec::new(), tokens: Arc::default(), extra: (blocks >> halved).max(1), reply };
        port.commands.try_send(Command::Room(Box::new(ask))).ok()?;
        if let Some(Room { room, .. }) = answer.await.ok()? {
            return Some(room);
        }
    }
    None
}

/// Reads, compares, writes and hands on, as long as somebody takes it.
fn fill(chain: &Chain, mut reading: Reading, mut room: Blocks, sender: &mpsc::Sender<Filled>) {
    let wanted = reading.blocks().min(room.slots().len());
    let (mut came, mut part) = (0, Vec::with_capacity(PART));
    while came < wanted {
        let slot = room.slots()[part.len()];
        let next = reading.next_block().and_then(|(tier, block)| {
            let granted = chain.place(chain.from + came, &block, slot)?;
            Some((tier, granted))
        });
        let Some((tier, granted)) = next else { break };
        metrics::counter!(Metric::TransferRaised.name(), "outcome" => name(tier)).increment(1);
        part.push(granted);
        came += 1;
        if part.len() == PART || came == wanted || !reading.is_here() {
            let granted = std::mem::take(&mut part);
            let pins = room.split_front(granted.len());
            if sender.blocking_send(Filled { pins, granted }).is_err() {
                // Its ticket is over.
                return;
            }
        }
    }
    if came < wanted {
        metrics::counter!(Metric::TransferRaised.name(), "outcome" => "lost").increment((wanted - came) as u64);
        tracing::debug!(came, wanted, "blocks of a lower tier did not come for another worker");
    }
}

/// So many chains at a time.
pub(super) fn permits() -> Semaphore {
    Semaphore::new(RAISES)
}

const fn name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
    }
}
