//! The side that a running request leaves: grants its blocks while it goes on, then hands it over.
//!
//! Called by [`super::hold`] for a ticket about a live request. What is full is granted at once, then each block as it
//! becomes full; when the taker says that it has caught up, the request ends here and the rest of its blocks is granted,
//! with all its tokens. Whatever ends this before leaves the request where it is.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use starling_cluster::stream::{StreamRx, StreamTx};
use starling_ids::AttemptId;
use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};

use super::{
    hold::{GrantGuard, Held, STUCK, grant, hear},
    wire::Told,
};
use crate::{
    transfer::{End, Limits, holder::Word},
    worker::{Blocks, Command, Leaving, LentLive},
};

/// Serves a ticket for the live request that is this attempt here.
pub(super) async fn serve(held: &Held, attempt: AttemptId, tx: &StreamTx, rx: &mut StreamRx) -> End {
    let mut grants = GrantGuard::new(held);
    let Some(key) = held.port.lives.find((held.ask.asked.request, attempt)) else { return End::Aborted };
    let (mut count, room) = (held.ask.first as usize, held.ask.blocks as usize);
    let (sender, mut lent) = mpsc::channel(room.saturating_sub(count) + 2);
    let cut = Arc::new(AtomicBool::new(false));
    let leaving = Leaving { key, count, room, cut: cut.clone(), lent: sender, begun: false };
    if held.port.commands.try_send(Command::Leave(Box::new(leaving))).is_err() {
        return End::Broken;
    }
    let mut alive = interval(Limits::default().lease / 4);
    alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut gone = false;
    loop {
        let told = tokio::select! {
            biased;
            said = rx.recv() => match said {
                Some(Ok(bytes)) => match hear(held, &bytes, &grants) {
                    Ok(Word::Cut) => {
                        cut.store(true, Ordering::Release);
                        // A full channel wakes the thread as well.
                        held.port.commands.try_send(Command::Wake).ok();
                        continue;
                    }
                    Ok(_) => continue,
                    Err(end) => return end,
                },
                _ => return End::PeerGone,
            },
            next = lent.recv(), if !gone => {
                let (pins, last) = match next {
                    Some(LentLive::Full { pins, first }) => (pins, first.then_some(Told::Sealed)),
                    Some(LentLive::Last { pins, tokens, computed }) => {
                        gone = true;
                        (pins, Some(Told::Last { tokens, computed: u32::try_from(computed).unwrap_or(u32::MAX) }))
                    }
                    // It has ended by itself.
                    None => return End::Aborted,
                };
                match tell(held, &mut count, pins, &mut grants).await {
                    Some(told) => told.into_iter().chain(last).collect(),
                    // Its tokens go over in any case: what is not granted is computed there.
                    None if gone => last.into_iter().collect(),
                    None => return End::Broken,
                }
            }
            _ = alive.tick() => {
                if held.port.pulse.age() >= STUCK {
                    continue;
                }
                vec![Told::Alive]
            },
        };
        for told in told {
            let Ok(bytes) = rmp_serde::to_vec(&told) else { return End::Broken };
            if tx.send(bytes.into()).await.is_err() {
                return End::PeerGone;
            }
        }
    }
}

/// Pins blocks for the ticket and grants them.
async fn tell(held: &Held, count: &mut usize, pins: Blocks, grants: &mut GrantGuard) -> Option<Vec<Told>> {
    if pins.slots().is_empty() {
        return Some(Vec::new());
    }
    let slots = pins.slots().to_vec();
    held.kv.pinned(held.ticket.1, pins);
    let first = *count;
    *count += slots.len();
    grant(held, first, slots, grants).await.map(|told| vec![told])
}
