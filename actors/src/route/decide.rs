//! One decision: filter, score, pick and reserve in a single step.
//!
//! Called by the router shard, which holds one [`Decider`] behind a lock for some microseconds per request.
//! Choice and count are one step, so requests that arrive together see each other. Never: I/O, a clock.
//! Bounds: the book by its reservations, receipts by their ring, the two small maps by the candidates.

use std::{collections::HashMap, time::Duration};

use starling_ids::{Incarnation, ModelId, RequestId, WorkerId};

use super::{
    load_book::{LoadBook, Need, ReservationKey},
    receipt::{Judged, Receipt, Receipts},
    score::{Facts, Rates, cost},
    tie::{Runner, pick},
};

/// How long a worker that failed a request is used only when there is no other.
pub const COOLING: Duration = Duration::from_millis(500);

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The request.
    pub request: RequestId,
    /// The model.
    pub model: &'a ModelId,
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// Tokens per block of this model.
    pub block_tokens: u32,
    /// Sequences.
    pub choices: u32,
    /// Token budget of the answer, all choices together.
    pub answer_tokens_max: u32,
    /// Workers that refused or failed this request; never chosen.
    pub exclude: &'a [WorkerId],
    /// Those of them that failed; others avoid them for [`COOLING`].
    pub failed: &'a [WorkerId],
}

/// A worker's last report, as the decision needs it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heard {
    /// When it came, on the shard's clock.
    pub at: Duration,
    /// Sequences running and waiting.
    pub sequences: u32,
    /// Prompt tokens not computed yet.
    pub prefill_tokens: u64,
    /// Learned rates; `None` before it has computed enough to know.
    pub rates: Option<Rates>,
}

/// A worker that could take the request.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Who.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Prefix blocks in its cache, by the index.
    pub hit_blocks: u32,
    /// Places in its batch.
    pub sequences_max: u32,
    /// Its last report; `None` before the first one.
    pub heard: Option<Heard>,
    /// Suspect, silent or broken off: taken only when there is no other.
    pub doubtful: bool,
}

/// What was decided; the reservation is held until its key is released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The reservation, which names the worker.
    pub key: ReservationKey,
    /// Prefix blocks expected in its cache.
    pub hit_blocks: u32,
}

/// The one who decides for a shard.
#[derive(Debug)]
pub struct Decider {
    book: LoadBook,
    receipts: Receipts,
    chosen_at: HashMap<WorkerId, u64>,
    cooling_until: HashMap<WorkerId, Duration>,
    decisions: u64,
    seed: u64,
}

impl Decider {
    /// A decider that has decided nothing. Deciders of different seeds break first ties differently.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            book: LoadBook::default(),
            receipts: Receipts::default(),
            chosen_at: HashMap::new(),
            cooling_until: HashMap::new(),
            decisions: 0,
            seed,
        }
    }

    /// Chooses a worker and counts the request there. `None` when no candidate is left.
    pub fn decide(&mut self, ask: &Ask<'_>, candidates: &[Candidate], now: Duration) -> Option<Decision> {
        for worker in ask.failed {
            self.cooling_until.insert(worker.clone(), now + COOLING);
        }
        self.forget_the_gone(candidates, now);
        let learned = |candidate: &Candidate| candidate.heard.and_then(|heard| heard.rates);
        let common = Rates::common(candidates.iter().filter_map(learned));
        let judged: Vec<Judged> = self.eligible(ask, candidates).map(|c| self.judge(ask, c, common)).collect();
        let runners: Vec<Runner<'_>> = judged
            .iter()
            .map(|judged| Runner {
                worker: &judged.worker,
                cost: judged.terms.total(),
                uncertain: judged.terms.uncertain(),
                last_chosen: self.chosen_at.get(&judged.worker).copied().unwrap_or(0),
            })
            .collect();
        let (chosen, near_equals) = pick(&runners, self.seed)?;
        let winner = judged.get(chosen)?.clone();
        self.decisions += 1;
        self.chosen_at.insert(winner.worker.clone(), self.decisions);
        let key =
            self.book.reserve(&winner.worker, winner.incarnation, ask.request, (need(ask, winner.hit_blocks), now));
        let (request, model) = (ask.request, ask.model.clone());
        self.receipts.push(Receipt { request, model, at: now, candidates: judged, chosen, near_equals });
        Some(Decision { key, hit_blocks: winner.hit_blocks })
    }

    /// Gives a reservation back. False when it was given back before.
    pub fn release(&mut self, key: &ReservationKey) -> bool {
        self.book.release(key)
    }

    /// Reservations held.
    #[must_use]
    pub fn reservations(&self) -> usize {
        self.book.len()
    }

    /// The last decisions about a request.
    #[must_use]
    pub fn explain(&self, request: RequestId) -> Vec<Receipt> {
        self.receipts.of(request)
    }

    /// Candidates that may be chosen: not excluded, and doubtful or cooling ones only when all are.
    fn eligible<'a>(&'a self, ask: &Ask<'a>, candidates: &'a [Candidate]) -> impl Iterator<Item = &'a Candidate> {
        let exclude = ask.exclude;
        let doubtful = |c: &Candidate| c.doubtful || self.cooling_until.contains_key(&c.worker);
        let left = move |c: &&Candidate| !exclude.contains(&c.worker);
        let some_sure = candidates.iter().filter(left).any(|c| !doubtful(c));
        candidates.iter().filter(left).filter(move |c| !(some_sure && doubtful(c)))
    }

    /// A worker that has not learned its rates is judged by the common ones.
    fn judge(&self, ask: &Ask<'_>, candidate: &Candidate, common: Rates) -> Judged {
        let heard = candidate.heard;
        let own = self.book.in_flight(&candidate.worker, candidate.incarnation, heard.map(|heard| heard.at));
        // The report lags behind the book, the book misses what others sent: the larger one is nearer to the truth.
        let in_flight = own.sequences.max(heard.map_or(0, |heard| heard.sequences));
        let facts = Facts {
            prompt_tokens: ask.prompt_tokens,
            hit_tokens: candidate.hit_blocks.saturating_mul(ask.block_tokens).min(ask.prompt_tokens),
            answer_tokens_max: ask.answer_tokens_max,
            in_flight,
            queued_tokens: own.unreported_tokens + heard.map_or(0, |heard| heard.prefill_tokens),
            sequences_max: candidate.sequences_max,
            rates: heard.and_then(|heard| heard.rates).map_or(common, |rates| rates.near(common)),
        };
        Judged {
            worker: candidate.worker.clone(),
            incarnation: candidate.incarnation,
            hit_blocks: candidate.hit_blocks,
            in_flight,
            terms: cost(&facts),
        }
    }

    /// Keeps the maps about workers from growing with every worker that ever was.
    fn forget_the_gone(&mut self, candidates: &[Candidate], now: Duration) {
        self.cooling_until.retain(|_, until| *until > now);
        if self.chosen_at.len() > 4 * candidates.len() + 64 {
            self.chosen_at.retain(|worker, _| candidates.iter().any(|c| c.worker == *worker));
        }
    }
}

fn need(ask: &Ask<'_>, hit_blocks: u32) -> Need {
    let hit_tokens = hit_blocks.saturating_mul(ask.block_tokens);
    Need {
        sequences: ask.choices.max(1),
        uncached_tokens: u64::from(ask.prompt_tokens.saturating_sub(hit_tokens)),
        answer_tokens: u64::from(ask.answer_tokens_max),
    }
}

#[cfg(test)]
mod tests;
