//! Whether another worker should compute a prompt, or give what it has of it: the joint choice of both.
//!
//! Called by [`super::desk`] once its policy has chosen. What computing a prompt costs elsewhere, moving its blocks, and
//! waiting for a place here are added up in milliseconds and compared with computing it here. A prompt is computed for
//! another worker only when one of the two has a role of its own; cached blocks are pulled between any two.
//! Pure. Never: chooses a worker that failed this request, or two of the same.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use self::pull::{Holders, pull, pull_elsewhere};
use super::{
    below::Reads,
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
    /// Of blocks that it gives, what it reads from its slower tiers.
    pub reads: Reads,
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
    worth.then_some((decode, Source { slot, compute: true, blocks, ms, reads: Reads::default() }))
}

fn role_rank(role: Role) -> u8 {
    u8::from(role != Role::Prefill)
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

mod pull;
#[cfg(test)]
mod tests;
