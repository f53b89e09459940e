//! Cached blocks of a peer instead of computing them: whose, how many, and from which of its tiers.
//!
//! Called by the joint choice. A peer's device blocks are there at once; those in its host's memory and on its disk must be read
//! before they move, at the rates that it reports, and both go on side by side: the slower of the two counts. So a chain is taken
//! as deep as that pays: to the end of the device, of the host's memory or of the disk. Pure.
//! Bounds: two holders by what is on the device and two by all tiers; [`LOOKED_AT`] workers instead of the chosen one.

use super::{
    super::{
        below::{Below, Load, Reads},
        fleet::Slot,
        policy::{Cost, Question},
    },
    OVERHEAD_MS, SHORT_TOKENS, Source, usable,
};

/// Moving blocks must beat computing them by this factor.
const PULL_GAIN: f64 = 1.5;

/// Workers that are looked at instead of the chosen one.
const LOOKED_AT: usize = 4;

/// Who has the most of a prompt, and who has the most beside that one; of equals the least busy. By the device alone, then by
/// all tiers where somebody has a part of it on a slower one.
pub(super) struct Holders {
    device: [Option<Slot>; 2],
    deep: [Option<Slot>; 2],
}

impl Holders {
    /// `None` when nobody has as much as is worth moving, or nobody's blocks can be reached.
    pub(super) fn of(question: &Question<'_>) -> Option<Self> {
        if !question.fleet.has_reachable() {
            return None;
        }
        let worth = |most: u32| most.saturating_mul(question.ask.block_tokens) >= SHORT_TOKENS;
        let device = question.hits.iter().copied().max().is_some_and(worth);
        let deep = (0..question.below.len()).any(|slot| worth(reach(question, slot)) && lent(question, slot).any());
        if !device && !deep {
            return None;
        }
        Some(Self {
            device: if device { best(question, |slot| question.hits[slot]) } else { [None; 2] },
            deep: if deep { best(question, |slot| reach(question, slot)) } else { [None; 2] },
        })
    }

    /// Of whom one worker would have blocks.
    fn beside(&self, slot: Slot) -> impl Iterator<Item = Slot> {
        let first = |list: &[Option<Slot>; 2]| list.iter().flatten().copied().find(|holder| *holder != slot);
        let (device, deep) = (first(&self.device), first(&self.deep));
        device.into_iter().chain(deep.filter(|deep| Some(*deep) != device))
    }
}

/// The two workers of which the most can be had.
fn best(question: &Question<'_>, depth: impl Fn(Slot) -> u32) -> [Option<Slot>; 2] {
    let rank = |slot: Slot| (depth(slot), std::cmp::Reverse(question.fleet.in_flight(slot)));
    let mut best: [Option<Slot>; 2] = [None, None];
    for slot in (0..question.fleet.width()).filter(|slot| depth(*slot) > 0) {
        if best[1].is_some_and(|second| rank(slot) <= rank(second)) || !usable(question, slot) {
            continue;
        }
        best[1] = Some(slot);
        if best[0].is_none_or(|first| rank(slot) > rank(first)) {
            best.swap(0, 1);
        }
    }
    best
}

/// What a worker has on its slower tiers and would read for another one.
fn lent(question: &Question<'_>, slot: Slot) -> Below {
    let hits = question.hits[slot];
    let below = question.below.get(slot).filter(|below| below.any()).copied().unwrap_or_default();
    let lends = question.fleet.heard[slot].tiers.is_some_and(|tiers| tiers.lends);
    if lends { below.after(hits) } else { Below { device: hits, ..Below::default() } }
}

/// Leading blocks that can be had of a worker in all.
fn reach(question: &Question<'_>, slot: Slot) -> u32 {
    lent(question, slot).depths()[2]
}

/// One way to have blocks of a holder.
struct Gift {
    from: Slot,
    /// Leading blocks.
    blocks: u32,
    reads: Reads,
    /// Until they are there, milliseconds.
    ms: f64,
}

impl Gift {
    fn source(&self, ms: f64) -> Source {
        Source { slot: self.from, compute: false, blocks: self.blocks, ms, reads: self.reads }
    }
}

/// The ways in which one worker can have more of the prompt than it has.
fn gifts<'a>(question: &'a Question<'_>, holders: &'a Holders, taker: Slot) -> impl Iterator<Item = Gift> + 'a {
    let fleet = question.fleet;
    let have = question.hits[taker];
    // The last token is computed in any case.
    let most = question.ask.prompt_tokens.saturating_sub(1) / question.ask.block_tokens.max(1);
    holders.beside(taker).flat_map(move |from| {
        let below = lent(question, from);
        let tiers = fleet.heard[from].tiers.unwrap_or_default();
        let mut before = 0;
        below.depths().into_iter().filter_map(move |depth| {
            let blocks = depth.min(most);
            let gained = blocks.checked_sub(have)?;
            if blocks == std::mem::replace(&mut before, blocks) || gained * question.ask.block_tokens < SHORT_TOKENS {
                return None;
            }
            let reads = below.reads(tiers, have, blocks);
            let moving = fleet.heard[taker].link.transfer_ms(gained)?;
            let ms = moving.max(reads.ms) + reads.wait_ms + OVERHEAD_MS;
            // Rates that are no numbers are not counted on.
            (reads.ms + ms).is_finite().then_some(Gift { from, blocks, reads, ms })
        })
    })
}

/// A worker that has more of the prompt than the chosen one, when its blocks come sooner than they are computed.
pub(super) fn pull(question: &Question<'_>, holders: &Holders, chosen: Slot) -> Option<Source> {
    let worth = |gift: Gift| {
        let saved = computing(question, chosen, gift.blocks) - gift.ms;
        (saved > gift.ms * (PULL_GAIN - 1.0)).then_some((saved, gift))
    };
    let best = gifts(question, holders, chosen).filter_map(worth).max_by(|a, b| a.0.total_cmp(&b.0));
    best.map(|(_, gift)| gift.source(gift.ms))
}

/// How long the chosen one takes by itself to have so many leading blocks: its own slower tiers may have some of them.
fn computing(question: &Question<'_>, chosen: Slot, blocks: u32) -> f64 {
    let fleet = question.fleet;
    let gained = blocks.saturating_sub(question.hits[chosen]);
    let rates = fleet.rates[chosen];
    let below = question.below.get(chosen).copied().unwrap_or_default().after(question.hits[chosen]);
    let own = fleet.heard[chosen].tiers.map_or(Load::default(), |tiers| {
        below.load(tiers, f64::from(question.ask.block_tokens) * rates.prefill_ms_per_token, gained)
    });
    let computed = f64::from((gained - own.blocks) * question.ask.block_tokens);
    let steps = (computed / f64::from(fleet.places[chosen].step_tokens.max(1))).ceil();
    computed * rates.prefill_ms_per_token + steps * rates.step_ms + own.ms
}

/// Another worker than the chosen one, which is behind: with a peer's cached blocks, often those of the chosen one itself,
/// it answers sooner. It must be sooner by [`PULL_GAIN`], for what is compared are predictions.
pub(super) fn pull_elsewhere(
    question: &Question<'_>,
    holders: &Holders,
    eligible: &[Slot],
    chosen: Slot,
) -> Option<(Slot, Source)> {
    let (cost, fleet) = (Cost::default(), question.fleet);
    let stay = cost.judge(question, chosen).total();
    // The chosen one is about as soon as any pull could be.
    if stay <= (OVERHEAD_MS + fleet.rates[chosen].step_ms) * PULL_GAIN {
        return None;
    }
    // The least busy ones are as good as any.
    let mut others: Vec<Slot> = Vec::with_capacity(LOOKED_AT + 1);
    let busy = |slot: Slot| (fleet.in_flight(slot), fleet.queued_tokens(slot));
    for slot in eligible.iter().copied().filter(|slot| *slot != chosen) {
        if others.len() == LOOKED_AT && others.last().is_some_and(|last| busy(slot) >= busy(*last)) {
            continue;
        }
        let at = others.partition_point(|other| busy(*other) <= busy(slot));
        others.insert(at, slot);
        others.truncate(LOOKED_AT);
    }
    let mut hits = question.hits.to_vec();
    let mut best: Option<(Slot, Source)> = None;
    for slot in others.into_iter().filter(|slot| usable(question, *slot)) {
        let have = hits[slot];
        for gift in gifts(question, holders, slot) {
            hits[slot] = gift.blocks;
            let ms = gift.ms + cost.judge(&Question { hits: &hits, ..*question }, slot).total();
            if best.is_none_or(|(_, known)| ms < known.ms) {
                best = Some((slot, gift.source(ms)));
            }
        }
        hits[slot] = have;
    }
    best.filter(|(_, source)| source.ms * PULL_GAIN < stay)
}
