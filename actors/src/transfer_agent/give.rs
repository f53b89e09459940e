//! What a holder gives of a chain: what is on its device, or becomes ready there; then what its lower tiers still have.
//!
//! Called by [`super::hold`] for a ticket whose request does not run here. Never: a block before those that come before it in
//! the chain. Bounds: those of the ticket. Whatever ends the ticket drops what is on its way, and its guards give it back.

use starling_cluster::stream::{StreamRx, StreamTx};
use starling_ids::BlockHash;
use starling_kv::hash::block_hashes;
use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};

use super::{
    hold::{GrantGuard, Held, STUCK, Work, grant, hear, issue, say},
    raise::{Filled, raise},
    wire::Told,
};
use crate::{
    transfer::{End, Limits},
    worker::{Command, Lent, Watch},
};

/// A chain that is given away.
struct Giving<'a> {
    held: &'a Held,
    hashes: Vec<BlockHash>,
    grants: GrantGuard,
    from: Origin,
    /// Blocks given so far, from the first one on.
    count: usize,
}

/// Where its next blocks come from.
enum Origin {
    Device(mpsc::Receiver<Lent>),
    Lower(mpsc::Receiver<Filled>),
    /// It is all given.
    Nowhere,
}

/// The next blocks of a chain; `None` when no more come from there.
enum Part {
    Device(Option<Lent>),
    Lower(Option<Filled>),
}

impl<'a> Giving<'a> {
    /// Asks the engine to lend the chain. `None` when it is too busy to hear of it.
    fn begin(held: &'a Held, work: Option<&Work>) -> Option<Self> {
        let mut hashes = block_hashes(held.seed, &held.tokens, held.block_tokens);
        hashes.truncate(held.ask.blocks as usize);
        let (sender, lent) = mpsc::channel(hashes.len() + 2);
        let key = work.map(|work| work.cancel.key);
        let watch = Watch { hashes: hashes.clone(), tokens: held.tokens.clone(), work: key, lent: sender, count: 0 };
        held.port.commands.try_send(Command::Lend(Box::new(watch))).ok()?;
        Some(Self { held, hashes, grants: GrantGuard::new(held), from: Origin::Device(lent), count: 0 })
    }

    /// The next part; never once all is given.
    async fn part(&mut self) -> Part {
        match &mut self.from {
            Origin::Device(lent) => Part::Device(lent.recv().await),
            Origin::Lower(filled) => Part::Lower(filled.recv().await),
            Origin::Nowhere => std::future::pending().await,
        }
    }

    /// What is said of a part. `None` when it cannot be given.
    async fn tell(&mut self, part: Part) -> Option<Vec<Told>> {
        let mut told = Vec::new();
        match part {
            Part::Device(next) => {
                let Lent { pins, sealed } = next?;
                if !pins.slots().is_empty() {
                    let slots = pins.slots().to_vec();
                    self.held.kv.pinned(self.held.ticket.1, pins);
                    let first = self.count;
                    self.count += slots.len();
                    told.push(grant(self.held, first, slots, &mut self.grants).await?);
                }
                if sealed && !self.descend() {
                    self.from = Origin::Nowhere;
                    told.push(Told::Sealed);
                }
            }
            Part::Lower(Some(Filled { pins, granted })) => {
                self.held.kv.pinned(self.held.ticket.1, pins);
                told.push(issue(self.held, granted, &mut self.grants)?);
            }
            Part::Lower(None) => {
                self.from = Origin::Nowhere;
                told.push(Told::Sealed);
            }
        }
        Some(told)
    }

    /// Goes on with what lies below the device, when that may have more. What is computed for the taker comes from the device alone.
    fn descend(&mut self) -> bool {
        // What the taker has already need not be read.
        let next = self.count.max(self.held.ask.first as usize);
        let more = !self.held.ask.compute && self.held.kv.lower.is_some() && next < self.hashes.len();
        if more {
            self.from = Origin::Lower(raise(self.held, &self.hashes, next));
        }
        more
    }
}

/// Serves a ticket until it ends.
pub(super) async fn serve(held: &Held, tx: &StreamTx, rx: &mut StreamRx) -> End {
    let mut work = match held.ask.compute.then(|| Work::begin(held)).transpose() {
        Ok(work) => work,
        Err(_) => return End::Broken,
    };
    let Some(mut giving) = Giving::begin(held, work.as_ref()) else { return End::Broken };
    let mut alive = interval(Limits::default().lease / 4);
    alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let told = tokio::select! {
            biased;
            said = rx.recv() => match said {
                Some(Ok(bytes)) => match hear(held, &bytes, &giving.grants) {
                    Err(end) => return end,
                    Ok(_) => continue,
                },
                _ => return End::PeerGone,
            },
            told = Work::next(&mut work) => match told {
                Ok(told) => vec![told],
                Err(end) => return end,
            },
            part = giving.part() => match giving.tell(part).await {
                Some(told) => told,
                None => return End::Broken,
            },
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
