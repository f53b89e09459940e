//! What a fleet's columns amount to for the cost in milliseconds: one number a worker in each, ready to be run down.
//!
//! Kept by [`super::fleet`], which works a worker's entries out anew when something about it changed: some ten times a second
//! for each worker, while a decision looks at all workers. Read by [`super::policy`]. Pure.

use starling_ids::WorkerId;
use starling_kv::index::Holder;

use super::{
    fleet::{Fleet, Places, Slot},
    rates::Rates,
};

/// Which slot a holder of the prefix index has, found once and kept: workers come and go seldom, and a request may find
/// thousands of holders. Bounds: one entry for each lane of the index.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    holders: Vec<Option<Holder>>,
    /// Beside them, in as few bytes as possible: a look-up runs down both.
    slots: Vec<u32>,
}

/// Of a holder whose worker serves another model.
const NOBODY: u32 = u32::MAX;

impl Lanes {
    /// Workers came or went.
    pub(super) fn clear(&mut self) {
        self.holders.clear();
        self.slots.clear();
    }

    /// The slot of a holder; none when its worker serves another model.
    #[inline]
    pub(super) fn slot(
        &mut self,
        holder: Holder,
        who: impl Fn(Holder) -> Option<WorkerId>,
        fleet: &Fleet,
    ) -> Option<Slot> {
        let lane = holder.lane();
        if self.holders.get(lane) != Some(&Some(holder)) {
            let slot = who(holder).and_then(|worker| fleet.slot(&worker));
            if self.holders.len() <= lane {
                self.holders.resize(lane + 1, None);
                self.slots.resize(lane + 1, NOBODY);
            }
            self.holders[lane] = Some(holder);
            self.slots[lane] = slot.and_then(|slot| u32::try_from(slot).ok()).unwrap_or(NOBODY);
        }
        self.slots.get(lane).filter(|slot| **slot != NOBODY).map(|slot| *slot as Slot)
    }
}

/// The larger of two numbers; one instruction for several, where [`f64::max`] also looks for what is no number.
#[inline(always)]
pub(super) fn larger(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

/// The smaller of two numbers, likewise.
#[inline(always)]
fn smaller(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}

/// One entry a worker in each; see the module. Times in milliseconds.
#[derive(Debug, Default)]
pub(super) struct Columns {
    /// Until the prompt tokens queued there are computed.
    queue: Vec<f64>,
    /// Computing one prompt token.
    prefill: Vec<f64>,
    /// One step as it is now.
    step: Vec<f64>,
    /// Tokens in one step, at least 1.
    step_tokens: Vec<f64>,
    /// Waiting for a place in the batch, for each token of an answer.
    place: Vec<f64>,
    /// What running answers lose by one prompt token.
    harm: Vec<f64>,
    /// KV blocks that are free, less than none when more are promised; plenty when they are not known.
    free: Vec<f64>,
    /// Waiting for one KV block that is lacking, for each token of an answer.
    block: Vec<f64>,
    /// KV blocks that it would still take; any number of one that has nothing to do, and where they are not known or not held back.
    pub(super) left: Vec<f64>,
    /// It should be given one request more now.
    pub(super) open: Vec<bool>,
    /// How many should.
    pub(super) open_count: usize,
    /// Sequences that it would still take; any number of one that has nothing to do or does not say.
    pub(super) room: Vec<u32>,
    /// Sequences.
    pub(super) in_flight: Vec<u32>,
    /// All of them.
    pub(super) in_flight_total: u64,
    /// A number for the worker that is the same on every node.
    pub(super) keys: Vec<u64>,
}

/// One worker's entries, as far as the cost in milliseconds is made of them; see [`Columns`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Worker {
    pub(super) queue: f64,
    pub(super) prefill: f64,
    pub(super) step: f64,
    pub(super) step_tokens: f64,
    pub(super) place: f64,
    pub(super) harm: f64,
    pub(super) free: f64,
    pub(super) block: f64,
}

impl Columns {
    /// One worker's entries.
    pub(super) fn worker(&self, slot: Slot) -> Worker {
        Worker {
            queue: self.queue[slot],
            prefill: self.prefill[slot],
            step: self.step[slot],
            step_tokens: self.step_tokens[slot],
            place: self.place[slot],
            harm: self.harm[slot],
            free: self.free[slot],
            block: self.block[slot],
        }
    }

    /// The first so many entries of [`Worker::prefill`].
    pub(super) fn prefill(&self, width: usize) -> &[f64] {
        &self.prefill[..width]
    }

    /// Adds to each worker's sum what `of` says of it and of its number. At most as many of each as there are workers.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "ten slices in step: by number it reads best")]
    pub(super) fn each(&self, sums: &mut [f64], numbers: &[u32], of: impl Fn(Worker, u32) -> f64) {
        // Equal lengths known beforehand: then no bound is checked inside, and several go at a time.
        let width = sums.len().min(numbers.len());
        let (sums, numbers) = (&mut sums[..width], &numbers[..width]);
        let (queue, prefill, step) = (&self.queue[..width], &self.prefill[..width], &self.step[..width]);
        let (step_tokens, place) = (&self.step_tokens[..width], &self.place[..width]);
        let (harm, free, block) = (&self.harm[..width], &self.free[..width], &self.block[..width]);
        for at in 0..width {
            let worker = Worker {
                queue: queue[at],
                prefill: prefill[at],
                step: step[at],
                step_tokens: step_tokens[at],
                place: place[at],
                harm: harm[at],
                free: free[at],
                block: block[at],
            };
            sums[at] += of(worker, numbers[at]);
        }
    }

    /// The least time in which a worker would compute what it lacks of a prompt, milliseconds, among those with so many blocks
    /// `left` for it; infinite when there is none. `prompt` are its tokens and those of a block.
    pub(super) fn least(&self, left: &[f64], hits: &[u32], prompt: (f64, f64)) -> f64 {
        let (tokens, block) = prompt;
        let of = |left: f64, hits: u32, prefill: f64| {
            // The last token is always computed, for what follows it.
            let missed = larger(tokens - f64::from(hits) * block, 1.0);
            if missed <= left * block { missed * prefill } else { f64::INFINITY }
        };
        let width = left.len().min(hits.len()).min(self.prefill.len());
        let (left, rest) = left[..width].as_chunks::<8>();
        let (hits, hits_rest) = hits[..width].as_chunks::<8>();
        let (prefill, prefill_rest) = self.prefill[..width].as_chunks::<8>();
        // Eight side by side, as one after the other none could begin before the one ahead of it was compared.
        let mut least = [f64::INFINITY; 8];
        for ((left, hits), prefill) in left.iter().zip(hits).zip(prefill) {
            for at in 0..8 {
                least[at] = smaller(of(left[at], hits[at], prefill[at]), least[at]);
            }
        }
        let rest = rest.iter().zip(hits_rest).zip(prefill_rest);
        rest.map(|((left, hits), prefill)| of(*left, *hits, *prefill)).chain(least).fold(f64::INFINITY, smaller)
    }

    /// Notes how many KV blocks a worker would still take, and whether it should be given one request more now.
    pub(super) fn note_room(&mut self, slot: Slot, left: u64, open: bool) {
        let any = self.room[slot] == u32::MAX;
        // Far below 2^52, so exact; any number is rounded, and larger than what anybody needs.
        self.left[slot] = if any { f64::INFINITY } else { left as f64 };
        self.open_count = self.open_count + usize::from(open) - usize::from(self.open[slot]);
        self.open[slot] = open;
    }

    /// Whether every worker would take so many sequences and prompt tokens, in blocks of that size.
    pub(super) fn all_take(&self, sequences: u32, tokens: f64, block: f64) -> bool {
        // Counted to the end: several go at a time, and nearly always all of them do.
        self.room.iter().filter(|room| **room < sequences).count() == 0
            && self.left.iter().filter(|left| **left * block < tokens).count() == 0
    }

    /// One worker more.
    pub(super) fn widen(&mut self) {
        for column in [
            &mut self.queue,
            &mut self.prefill,
            &mut self.step,
            &mut self.place,
            &mut self.harm,
            &mut self.free,
            &mut self.block,
        ] {
            column.push(0.0);
        }
        self.step_tokens.push(1.0);
        self.left.push(f64::INFINITY);
        self.open.push(true);
        self.open_count += 1;
        self.room.push(u32::MAX);
        self.in_flight.push(0);
        self.keys.push(0);
    }

    /// Works a worker's entries out: `load` is its sequences in flight, prompt tokens queued and KV blocks taken.
    pub(super) fn refresh(&mut self, slot: Slot, rates: Rates, places: Places, load: (u32, u64, u64)) {
        let (in_flight, queued, taken) = load;
        self.in_flight_total = self.in_flight_total - u64::from(self.in_flight[slot]) + u64::from(in_flight);
        self.in_flight[slot] = in_flight;
        let bound = places.sequences.saturating_add(places.waiting);
        let any = places.sequences == 0 || in_flight == 0;
        self.room[slot] = if any { u32::MAX } else { bound.saturating_sub(in_flight) };
        // Counts stay far below 2^52, where these conversions would start to round.
        let (in_flight, queued, taken) = (f64::from(in_flight), queued as f64, taken as f64);
        let sequences = f64::from(places.sequences);
        let decoding = in_flight.min(sequences.max(1.0));
        let step = rates.step_ms + decoding * rates.decode_ms_per_sequence;
        let step_tokens = f64::from(places.step_tokens.max(1));
        let over = in_flight + 1.0 - sequences;
        let total = f64::from(places.blocks);
        let known = total > 0.0 && taken > 0.0;
        self.queue[slot] = queued * rates.prefill_ms_per_token + (queued / step_tokens).ceil() * step;
        self.prefill[slot] = rates.prefill_ms_per_token;
        self.step[slot] = step;
        self.step_tokens[slot] = step_tokens;
        self.place[slot] = if sequences > 0.0 && over > 0.0 { over / sequences * step } else { 0.0 };
        self.harm[slot] = decoding * rates.prefill_ms_per_token;
        self.free[slot] = if total > 0.0 { total - taken } else { f64::MAX };
        // Blocks come back as answers end: all that are taken in one answer's time.
        self.block[slot] = if known { step / taken } else { 0.0 };
    }
}
