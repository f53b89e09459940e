//! Whether another worker should compute a prompt, or give what it has of it: the joint choice of both.
//!
//! Called by [`super::desk`] once its policy has chosen. What computing a prompt costs elsewhere, moving its blocks, and
//! waiting for a place here are added up in milliseconds and compared with computing it here. A prompt is computed for
//! another worker only when one of the two has a role of its own; cached blocks are pulled between any two.
//! Pure. Never: chooses a worker that failed this request, or two of the same.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{
    below::Load,
    fleet::{Slot, Standing},
    policy::{Cost, Question},
    wishes::Wishes,
};

/// What a worker is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts and answers.
    #[default]
    Both,
    /// Computes prompts for others; whole requests only when there is nobody else.
    Prefill,
    /// Computes answers; long prompts are computed by others when there are any.
    Decode,
}

impl Role {
    /// Whether it computes prompts for others.
    #[must_use]
    pub const fn prefills(self) -> bool {
        matches!(self, Self::Both | Self::Prefill)
    }

    /// Whether it takes requests.
    #[must_use]
    pub const fn decodes(self) -> bool {
        matches!(self, Self::Both | Self::Decode)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// A word that is no role.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no role; roles are prefill, decode and both")]
pub struct NoRole(String);

impl FromStr for Role {
    type Err = NoRole;

    fn from_str(text: &str) -> Result<Self, NoRole> {
        match text {
            "both" => Ok(Self::Both),
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            other => Err(NoRole(other.to_owned())),
        }
    }
}

/// How fast blocks come to a worker, as it tells.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct KvLink {
    /// Bytes of one of its blocks; 0 when its blocks cannot be reached.
    pub block_bytes: u64,
    /// Learned speed of transfers to its node.
    pub bytes_per_ms: f64,
}

impl KvLink {
    /// Milliseconds that so many blocks take; none when they cannot come.
    #[must_use]
    pub fn transfer_ms(&self, blocks: u32) -> Option<f64> {
        let known = self.block_bytes > 0 && self.bytes_per_ms > 0.0;
        // Below 2^52 bytes, so exact.
        known.then(|| self.block_bytes as f64 * f64::from(blocks) / self.bytes_per_ms)
    }
}

/// Fewer tokens to compute are computed where they are needed.
pub const SHORT_TOKENS: u32 = 256;
/// What a second worker costs besides: messages, tickets, the last tokens computed again.
const OVERHEAD_MS: f64 = 5.0;
/// A worker with a role of its own is kept to it while that costs at most this many times as much.
const ROLE_SLACK: f64 = 1.5;
/// Moving blocks must beat computing them by this factor.
const PULL_GAIN: f64 = 1.5;

/// Workers that are looked at instead of the chosen one.
const LOOKED_AT: usize = 4;

/// Where the first blocks of a request come from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Source {
    /// From whom.
    pub slot: Slot,
    /// It computes the prompt; else it gives what it has.
    pub compute: bool,
    /// Leading blocks expected from there.
    pub blocks: u32,
    /// What the whole way is expected to cost, milliseconds.
    pub ms: f64,
}

/// The joint choice: who answers, and where its first blocks come from. `by_ms` says that the policy that chose goes by
/// time: then another worker may answer, when with the cached blocks of a peer it is sooner than the chosen one.
#[must_use]
pub fn join(question: &Question<'_>, eligible: &[Slot], chosen: Slot, by_ms: bool) -> (Slot, Option<Source>) {
    if question.ask.choices > 1 {
        return (chosen, None);
    }
    // Among workers that all do everything, no prompt waits to be computed by a second one.
    if question.fleet.has_specialists()
        && let Some((decode, source)) = split(question, eligible, chosen)
    {
        return (decode, Some(source));
    }
    // Most requests end here: nobody has enough of it.
    let Some(holders) = Holders::of(question) else { return (chosen, None) };
    if by_ms && let Some((slot, source)) = pull_elsewhere(question, &holders, eligible, chosen) {
        return (slot, Some(source));
    }
    (chosen, pull(question, &holders, chosen))
}

/// A pair of workers of which at least one has a role of its own, when it is worth it.
fn split(question: &Question<'_>, eligible: &[Slot], chosen: Slot) -> Option<(Slot, Source)> {
    let fleet = question.fleet;
    let role = |slot: Slot| fleet.places[slot].role;
    let blocks = question.ask.prompt_tokens / question.ask.block_tokens.max(1);
    let long = |slot: Slot| {
        let missed = question.missed_tokens(slot);
        missed >= SHORT_TOKENS && missed >= question.ask.prompt_tokens / 4
    };
    if !long(chosen) {
        return None;
    }
    let cost = Cost::default();
    let whole = |slot: Slot| cost.judge(question, slot).total();
    let able = |slot: &Slot| usable(question, *slot) && role(*slot).prefills();
    // Cheapest first; a dedicated one before others that cost as much.
    let prefills = (0..fleet.width()).filter(able).map(|slot| (whole(slot), slot));
    let mut prefills: Vec<(f64, Slot)> = prefills.collect();
    prefills.sort_by(|a, b| a.0.total_cmp(&b.0).then(role_rank(role(a.1)).cmp(&role_rank(role(b.1)))));
    prefills.truncate(8);
    let answer = |slot: Slot| {
        let terms = cost.judge(question, slot);
        let lacking = blocks.saturating_sub(question.hits[slot]);
        Some(terms.place + terms.blocks + fleet.heard[slot].link.transfer_ms(lacking)? + OVERHEAD_MS)
    };
    let decodes = eligible.iter().copied().filter(|slot| role(*slot).decodes() && long(*slot));
    let mut best: Option<(f64, Slot, Slot)> = None;
    for decode in decodes {
        let Some(answer) = answer(decode) else { continue };
        let dedicated = |prefill: Slot| role(prefill) == Role::Prefill || role(decode) == Role::Decode;
        let partner = prefills.iter().find(|(_, prefill)| *prefill != decode && dedicated(*prefill));
        let Some((prefill_ms, prefill)) = partner else { continue };
        let total = prefill_ms + answer;
        // The policy's own choice is kept among equals: it spreads them.
        let better = best.is_none_or(|(known, _, at)| {
            total < known - 1e-6 || (decode == chosen && at != chosen && total <= known + 1e-6)
        });
        if better {
            best = Some((total, decode, *prefill));
        }
    }
    let (ms, decode, slot) = best?;
    let slack = if role(decode) == Role::Decode || role(slot) == Role::Prefill { ROLE_SLACK } else { 1.0 };
    let worth = ms <= whole(chosen) * slack + OVERHEAD_MS;
    worth.then_some((decode, Source { slot, compute: true, blocks, ms }))
}

fn role_rank(role: Role) -> u8 {
    u8::from(role != Role::Prefill)
}

/// Who has the most of a prompt, and who has the most beside that one; of equals the least busy.
struct Holders([Option<Slot>; 2]);

impl Holders {
    /// `None` when nobody has as much as is worth moving, or nobody's blocks can be reached.
    fn of(question: &Question<'_>) -> Option<Self> {
        if !question.fleet.has_reachable() {
            return None;
        }
        let most = question.hits.iter().copied().max()?;
        if most * question.ask.block_tokens < SHORT_TOKENS {
            return None;
        }
        let rank = |slot: Slot| (question.hits[slot], std::cmp::Reverse(question.fleet.in_flight(slot)));
        let mut best: [Option<Slot>; 2] = [None, None];
        for slot in (0..question.fleet.width()).filter(|slot| question.hits[*slot] > 0) {
            if best[1].is_some_and(|second| rank(slot) <= rank(second)) || !usable(question, slot) {
                continue;
            }
            best[1] = Some(slot);
            if best[0].is_none_or(|first| rank(slot) > rank(first)) {
                best.swap(0, 1);
            }
        }
        Some(Self(best))
    }

    /// Of whom one worker would have blocks, and how many are of use.
    fn beside(&self, question: &Question<'_>, slot: Slot) -> Option<(Slot, u32)> {
        let holder = self.0.into_iter().flatten().find(|holder| *holder != slot)?;
        // The last token is computed in any case.
        let most = question.ask.prompt_tokens.saturating_sub(1) / question.ask.block_tokens.max(1);
        Some((holder, question.hits[holder].min(most)))
    }
}

/// A worker that has more of the prompt than the chosen one, when its blocks come sooner than they are computed.
fn pull(question: &Question<'_>, holders: &Holders, chosen: Slot) -> Option<Source> {
    let fleet = question.fleet;
    let (slot, blocks) = holders.beside(question, chosen)?;
    let gained = blocks.checked_sub(question.hits[chosen])?;
    let tokens = gained * question.ask.block_tokens;
    if tokens < SHORT_TOKENS {
        return None;
    }
    let rates = fleet.rates[chosen];
    // Its own slower tiers may have the same.
    let below = question.below.get(chosen).copied().unwrap_or_default().after(question.hits[chosen]);
    let own = fleet.heard[chosen].tiers.map_or(Load::default(), |tiers| {
        below.load(tiers, f64::from(question.ask.block_tokens) * rates.prefill_ms_per_token, gained)
    });
    let computed = f64::from(tokens - own.blocks * question.ask.block_tokens);
    let steps = (computed / f64::from(fleet.places[chosen].step_tokens.max(1))).ceil();
    let computing = computed * rates.prefill_ms_per_token + steps * rates.step_ms + own.ms;
    let ms = fleet.heard[chosen].link.transfer_ms(gained)? + OVERHEAD_MS;
    (ms * PULL_GAIN < computing).then_some(Source { slot, compute: false, blocks, ms })
}

/// Another worker than the chosen one, which is behind: with a peer's cached blocks, often those of the chosen one itself,
/// it answers sooner. It must be sooner by [`PULL_GAIN`], for what is compared are predictions.
fn pull_elsewhere(
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
    let chance = |slot: Slot| {
        let (from, blocks) = holders.beside(question, slot)?;
        let gained = blocks.saturating_sub(question.hits[slot]);
        if gained * question.ask.block_tokens < SHORT_TOKENS || !usable(question, slot) {
            return None;
        }
        let moving = fleet.heard[slot].link.transfer_ms(gained)? + OVERHEAD_MS;
        let mut hits = question.hits.to_vec();
        hits[slot] = blocks;
        let ms = moving + cost.judge(&Question { hits: &hits, ..*question }, slot).total();
        Some((slot, Source { slot: from, compute: false, blocks, ms }))
    };
    let best = others.into_iter().filter_map(chance).min_by(|a, b| a.1.ms.total_cmp(&b.1.ms))?;
    (best.1.ms * PULL_GAIN < stay).then_some(best)
}

/// Whether a worker can give blocks to this request at all.
fn usable(question: &Question<'_>, slot: Slot) -> bool {
    let fleet = question.fleet;
    let reachable = fleet.heard[slot].link.block_bytes > 0;
    let barred = |worker| question.ask.exclude.contains(worker) || question.ask.leaves == Some(worker);
    let life = fleet.life(slot).is_some_and(|(worker, _)| !barred(worker));
    fleet.standing[slot] == Standing::Sound && reachable && life && borne(question, slot)
}

/// Whether the request bears what taints a worker has.
fn borne(question: &Question<'_>, slot: Slot) -> bool {
    if !question.fleet.tainted() {
        return true;
    }
    let none = Wishes::default();
    let wishes = question.ask.wishes.unwrap_or(&none);
    question.fleet.labels(slot).is_none_or(|labels| wishes.tolerates(labels))
}

#[cfg(test)]
mod tests;
