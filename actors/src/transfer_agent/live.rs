//! The side that a running request leaves: grants its blocks while it goes on, then hands it over.
//!
//! Called by [`super::hold`] for a ticket about a live request. What is full is granted at once, then each block as it
//! becomes full; when the taker says that it has caught up, the request ends here and the rest of its blocks is granted,
//! with all its tokens. Whatever ends this before leaves the request where it is. A prompt that is computed for the taker
//! goes the same way: it is handed over with its first token, without a word.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use starling_cluster::stream::{StreamRx, StreamTx};
use starling_ids::AttemptId;
use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};

use super::{
    hold::{GrantGuard, Held, STUCK, Work, grant, hear, say},
    wire::Told,
};
use crate::{
    transfer::{End, Limits, holder::Word},
    worker::{Blocks, Command, Leaving, LentLive},
};

/// Serves a ticket for the live request that is this attempt here, or without one computes the prompt for the taker.
pub(super) async fn serve(held: &Held, attempt: Option<AttemptId>, tx: &StreamTx, rx: &mut StreamRx) -> End {
    let mut grants = GrantGuard::new(held);
    let mut work = match attempt.is_none().then(|| Work::begin(held)).transpose() {
        Ok(work) => work,
        Err(_) => return End::Broken,
    };
    let live = attempt.and_then(|attempt| held.port.lives.find((held.ask.asked.request, attempt)));
    let Some(key) = work.as_ref().map(|work| work.cancel.key).or(live) else { return End::Aborted };
    let (mut count, room) = (held.ask.first as usize, held.ask.blocks as usize);
    let (sender, mut lent) = mpsc::channel(room.saturating_sub(count) + 2);
    let cut = Arc::new(AtomicBool::new(false));
    let asked = attempt.map(|_| cut.clone());
    let leaving = Leaving { key, choice: held.ask.asked.choice, count, room, cut: asked, lent: sender, begun: false };
    if held.port.commands.try_send(Command::Leave(Box::new(leaving))).is_err() {
        return End::Broken;
    }
    let mut alive = interval(Limits::default().lease / 4);
    alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut gone, mut heard) = (false, None);
    loop {
        let told = tokio::select! {
            biased;
            said = rx.recv() => match said {
                Some(Ok(bytes)) => match hear(held, &bytes, &grants) {
                    Ok(Word::Cut) => {
                        heard.get_or_insert_with(Instant::now);
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
            told = Work::next(&mut work) => match told {
                Ok(told) => vec![told],
                Err(end) => return end,
            },
            next = lent.recv(), if !gone => {
                let Some((pins, last)) = part(held, next, attempt.is_some(), heard) else { return End::Aborted };
                gone = match &last {
                    Some(Told::Sealed) => attempt.is_none(),
                    last => last.is_some(),
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
        if let Err(end) = say(tx, told).await {
            return end;
        }
    }
}

/// The next blocks of what leaves and what is said after them. `None` when it has ended and its taker has no use of the rest.
fn part(held: &Held, next: Option<LentLive>, live: bool, heard: Option<Instant>) -> Option<(Blocks, Option<Told>)> {
    let none = || Blocks::new(Vec::new(), &held.kv.returns);
    match next {
        Some(LentLive::Full { pins, first }) => Some((pins, (first && live).then_some(Told::Sealed))),
        Some(LentLive::Last { pins, tokens, computed, left }) => {
            let ran_on_us = heard.map(|heard| signed_us(left, heard));
            let computed = u32::try_from(computed).unwrap_or(u32::MAX);
            Some((pins, Some(Told::Last { tokens, computed, ran_on_us, left_us: us_since(left) })))
        }
        Some(LentLive::Over) => Some((none(), Some(Told::Over))),
        // It has ended by itself: with its first token, if it was begun for the taker.
        None => (!live).then(|| (none(), Some(Told::Sealed))),
    }
}

fn us_since(then: Instant) -> u64 {
    u64::try_from(then.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// From `from` to `to`, which may be before it, microseconds.
fn signed_us(to: Instant, from: Instant) -> i64 {
    let us = |time: std::time::Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    us(to.saturating_duration_since(from)) - us(from.saturating_duration_since(to))
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
