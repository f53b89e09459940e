//! What a desk is asked and what it answers.
//!
//! Made by the router shard and the simulator, read by the filters and scorers of [`super::policy`]. Pure data.

use starling_ids::{BlockHash, Incarnation, RequestId, WorkerId};

use super::{
    policy::Choice,
    wishes::{Labels, Wishes},
};
use crate::generate::KvSource;

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The request.
    pub request: RequestId,
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// Tokens per block of this model.
    pub block_tokens: u32,
    /// Hashes of the prompt's full blocks.
    pub hashes: &'a [BlockHash],
    /// Sequences.
    pub choices: u32,
    /// Token budget of the answer, all choices together.
    pub answer_tokens_max: u32,
    /// How long answers to such requests usually are, tokens; set by the desk.
    pub answer_expected: f64,
    /// What keeps requests together, when the client says so.
    pub session: Option<&'a str>,
    /// Workers that refused or failed this request; never chosen.
    pub exclude: &'a [WorkerId],
    /// Those of them that failed; others avoid them for [`super::gate::COOLING`].
    pub failed: &'a [WorkerId],
    /// The worker that it runs at and is to leave; never chosen, though nothing is held against it.
    pub leaves: Option<&'a WorkerId>,
    /// Whom it met before was told when it came: others are no longer kept from them for it.
    pub told: bool,
    /// What the client asks of the choice itself.
    pub wishes: Option<&'a Wishes>,
    /// Labels of the node where the request came in.
    pub origin: Option<&'a Labels>,
    /// It has waited so long that it may also wait for KV blocks where it goes: large prompts do not starve behind small ones.
    pub overdue: bool,
}

impl Default for Ask<'_> {
    /// An empty prompt of one answer, without wishes.
    fn default() -> Self {
        Self {
            request: RequestId(0),
            prompt_tokens: 0,
            block_tokens: 16,
            hashes: &[],
            choices: 1,
            answer_tokens_max: 1,
            answer_expected: 0.0,
            session: None,
            exclude: &[],
            failed: &[],
            leaves: None,
            told: false,
            wishes: None,
            origin: None,
            overdue: false,
        }
    }
}

/// What was decided; the reservation is held until it is released.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Names the reservation.
    pub ticket: Ticket,
    /// Who.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Prefix blocks expected in its cache.
    pub hit_blocks: u32,
    /// Prompt tokens that have to be computed for it, by that worker or by the one that computes its prompt; at least 1.
    pub computed_tokens: u64,
    /// Its cost and how many were as good.
    pub choice: Choice,
    /// Where its first blocks are to come from.
    pub source: Option<KvSource>,
}

/// Names one reservation of one desk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(super) u64);

/// Prompt tokens that a worker with so many leading blocks lacks, and the blocks that they take.
pub(super) fn missing(ask: &Ask<'_>, hit_blocks: u32) -> (u64, u64) {
    let hit_tokens = u64::from(hit_blocks) * u64::from(ask.block_tokens);
    let tokens = u64::from(ask.prompt_tokens).saturating_sub(hit_tokens).max(1);
    (tokens, tokens.div_ceil(u64::from(ask.block_tokens.max(1))))
}
