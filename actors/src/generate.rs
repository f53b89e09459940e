//! The words about one request: what a gateway asks of the cluster and what comes back.
//!
//! These cross nodes as MessagePack. Fields are only ever appended, each with a default.

use serde::{Deserialize, Serialize};
use starling_engine::{FinishReason, ModelCard, SampledToken, SamplingParams, StopParams};
use starling_ids::{AttemptId, BlockHash, Incarnation, ModelId, RequestId, TokenId, WorkerId};
use starling_kv::hash::HashSeed;
use thiserror::Error;

use crate::route::{
    receipt::{Outcome, Receipt},
    wishes::Wishes,
};

/// One request after validation: token ids and numbers, no text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateSpec {
    /// The model, as served.
    pub model: ModelId,
    /// Token ids of the prompt.
    pub prompt: Vec<TokenId>,
    /// Independent answers, 1 to 16. Answer `i` samples with `sampling.seed + i`.
    pub choices: u32,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// When an answer ends.
    pub stop: StopParams,
    /// Log-probabilities, as [`starling_engine::SequenceRequest::logprobs`].
    pub logprobs: Option<u8>,
    /// Cache salt: requests of different salts never share blocks.
    pub cache_salt: Option<String>,
    /// The LoRA adapter to compute with; `None` for the model as it is. Requests of different adapters never share blocks.
    #[serde(default)]
    pub adapter: Option<String>,
    /// What each answer has said, when a request that broke on another worker goes on here; empty for a new one.
    #[serde(default)]
    pub so_far: Vec<SoFar>,
}

/// An answer whose worker was lost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoFar {
    /// Its tokens.
    pub tokens: Vec<TokenId>,
    /// It had ended; nothing more is wanted.
    pub ended: bool,
}

impl GenerateSpec {
    /// Seeds the hashes of its blocks, from the seed of the model's card.
    #[must_use]
    pub fn hash_seed(&self, card: HashSeed) -> HashSeed {
        card.scoped(self.adapter.as_deref(), self.cache_salt.as_deref())
    }

    /// What an answer has said, and whether more of it is wanted.
    #[must_use]
    pub fn begun(&self, choice: u32) -> (&[TokenId], bool) {
        match self.so_far.get(choice as usize) {
            Some(so_far) => (&so_far.tokens, !so_far.ended && so_far.tokens.len() < self.stop.tokens_max as usize),
            None => (&[], true),
        }
    }
}

/// The first body of a stream to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerRequest {
    /// What to compute.
    pub spec: GenerateSpec,
    /// Who is meant.
    pub worker: WorkerId,
    /// In which life; another one refuses.
    pub incarnation: Incarnation,
    /// Where its first KV blocks are to come from; the worker computes by itself when that fails.
    #[serde(default)]
    pub source: Option<KvSource>,
    /// It runs elsewhere already and shall go on here, with its blocks.
    #[serde(default)]
    pub moves: Option<Moves>,
    /// Its client goes along when it is asked to leave.
    #[serde(default)]
    pub may_move: bool,
}

/// Where a running request comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moves {
    /// Who computes it now.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Which attempt of the request it is there.
    pub attempt: AttemptId,
}

/// What a worker says of a request's way, between its frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WayNote {
    /// The worker asks its client to go on with another one. The answer goes on here until that one has taken over.
    Leave,
    /// Another one has taken over; nothing more comes from here.
    Moved,
    /// The worker has taken over; the answers that go on have said so many tokens.
    From(u32),
}

/// One message of a worker to the client of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// News of an answer.
    Frame(GenerateFrame),
    /// Of its way.
    Way(WayNote),
}

impl Said {
    /// Reads one.
    ///
    /// # Errors
    /// Bytes that are neither.
    pub fn read(bytes: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        // A frame is written as an array, a note as a word or a map.
        match bytes.first() {
            Some(0x90..=0x9f | 0xdc | 0xdd) => rmp_serde::from_slice(bytes).map(Self::Frame),
            _ => rmp_serde::from_slice(bytes).map(Self::Way),
        }
    }
}

/// Another worker that computes a prompt, or holds the beginning of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSource {
    /// Who.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// It computes the prompt and its first token; else it gives what it has.
    pub compute: bool,
    /// Leading blocks of the prompt that are expected from there.
    pub blocks: u32,
    /// Of those that it gives, the ones that it must read from its host's memory first.
    #[serde(default)]
    pub host: u32,
    /// Of those that it gives, the ones that it must read from its disk first.
    #[serde(default)]
    pub disk: u32,
    /// Milliseconds that this reading is expected to take, beside the transfer.
    #[serde(default)]
    pub reading_ms: u32,
}

/// What the worker says when it accepts a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// Who computes it.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Its number among the requests that this worker has taken; load reports say up to which number they go.
    #[serde(default)]
    pub number: u64,
}

/// One engine step's news about one answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateFrame {
    /// Which answer, from 0.
    pub choice: u32,
    /// New tokens, in order.
    pub tokens: Vec<SampledToken>,
    /// Prompt tokens taken from the cache, on the answer's first frame.
    pub cached_tokens: Option<u32>,
    /// Set on the answer's last frame. `Cancelled` and `Error` never travel as a finish: they are errors.
    pub finish: Option<FinishReason>,
}

/// What the router shard is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteRequest {
    /// The request, for the receipt.
    pub request: RequestId,
    /// The model.
    pub model: ModelId,
    /// Hashes of the prompt's full blocks, in order.
    pub hashes: Vec<BlockHash>,
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// Most tokens of the answer, all choices together.
    pub answer_tokens_max: u32,
    /// Workers that refused or failed this request already.
    pub exclude: Vec<WorkerId>,
    /// Those of them that failed rather than refused: broken, unreachable, silent.
    #[serde(default)]
    pub failed: Vec<WorkerId>,
    /// Independent answers; 0 is read as 1.
    #[serde(default)]
    pub choices: u32,
    /// What keeps requests together, when the client says so.
    #[serde(default)]
    pub session: Option<String>,
    /// The asker can wait for a worker with room: an accept with an empty body means that it does, and the reply comes as
    /// the stream's first frame that is not empty. Empty ones say that its place is kept.
    #[serde(default)]
    pub may_wait: bool,
    /// The answer has begun and its worker was lost: it goes before all others.
    #[serde(default)]
    pub begun: bool,
    /// Its tenant's part beside other tenants, 1 to 1,000; 0 is read as 1.
    #[serde(default)]
    pub weight: u32,
    /// What the client asks of the choice itself.
    #[serde(default)]
    pub wishes: Wishes,
    /// The worker that it runs at and is to leave; never chosen, though nothing is held against it. Fields are told apart by their
    /// place on the wire: new ones come last.
    #[serde(default)]
    pub leaves: Option<WorkerId>,
}

/// The `param` of a refusal as overloaded that is the tenant's own: others may still come in.
pub const TENANT: &str = "tenant";
/// Names the client's own wishes as what leaves nobody.
pub const WISHES: &str = "wishes";

/// What the holder of a reservation tells the shard over its stream, in this order; each may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum RouteNote {
    /// The worker took the request; it is its so-manieth.
    Admitted(u64),
    /// Its first token came.
    Prefilled,
    /// It ended well.
    Ended(Outcome),
    /// The worker failed it before its first token, in a way that is no fault of the request.
    Failed,
}

/// What the shard decided. The stream it came on is the reservation: while it is open, the shard counts the
/// request as running there; its end, cancel or break gives the reservation back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RouteReply {
    /// The worker.
    pub worker: WorkerId,
    /// Its life; the worker refuses another.
    pub incarnation: Incarnation,
    /// Prefix blocks expected in its cache.
    pub hit_blocks: u32,
    /// Where its first KV blocks are to come from.
    #[serde(default)]
    pub source: Option<KvSource>,
    /// How it was decided, when the request wishes to know.
    #[serde(default)]
    pub receipt: Option<Receipt>,
}

/// Adapters that could have been asked for: as many as a sentence bears.
fn others(known: &[String]) -> String {
    const NAMED: usize = 8;
    match known.len() {
        0 => "it has none".to_owned(),
        count => {
            let more = if count > NAMED { format!(" and {} more", count - NAMED) } else { String::new() };
            format!("it has {}{more}", known[..count.min(NAMED)].join(", "))
        }
    }
}

/// A model that can be asked for now: at least one worker serves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedModel {
    /// Card, as its workers publish it.
    pub card: ModelCard,
    /// Workers serving it, alive and reachable.
    pub workers: usize,
}

/// Why a request did not get its answer. Every kind has one HTTP status, in the gateway's table.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GenerateError {
    /// No worker serves this model.
    #[error("the model `{0}` does not exist or is not served now")]
    UnknownModel(ModelId),
    /// No worker of the model has this adapter.
    #[error("the model `{model}` has no adapter `{adapter}`; {}", others(.known))]
    UnknownAdapter {
        /// The model.
        model: ModelId,
        /// What was asked for.
        adapter: String,
        /// Adapters that it has, sorted.
        known: Vec<String>,
    },
    /// The request is wrong.
    #[error("{message}")]
    Invalid {
        /// What was wrong, what would be right.
        message: String,
        /// The field.
        param: Option<String>,
    },
    /// Prompt and answer do not fit the model's context.
    #[error("this model's context length is {context} tokens; the prompt has {prompt}")]
    ContextLength {
        /// Tokens in the prompt.
        prompt: usize,
        /// The context length.
        context: usize,
    },
    /// No room anywhere.
    #[error("all workers are busy")]
    Overloaded {
        /// When to try again.
        retry_after_ms: u64,
    },
    /// The tenant has used up its part of the queue or its budget; others have not.
    #[error("{reason}")]
    TenantLimit {
        /// Which part, and how large it is.
        reason: String,
        /// When to try again.
        retry_after_ms: u64,
    },
    /// No worker could be reached, or all that could be failed.
    #[error("no worker could take the request: {0}")]
    Unavailable(String),
    /// The worker died or its link broke after the first token.
    #[error("the worker {worker} was lost: {reason}")]
    WorkerLost {
        /// Who.
        worker: WorkerId,
        /// What was seen.
        reason: String,
    },
    /// The request's time is over.
    #[error("the request took longer than its deadline")]
    Deadline,
    /// A fault of ours.
    #[error("{0}")]
    Internal(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_and_notes_are_told_apart() {
        let token = SampledToken { id: 7, logprob: None, top: Vec::new() };
        for tokens in [Vec::new(), vec![token; 40]] {
            let frame = GenerateFrame { choice: 3, tokens, cached_tokens: Some(5), finish: None };
            let bytes = rmp_serde::to_vec(&frame).expect("encodes");
            assert_eq!(Said::read(&bytes).expect("reads"), Said::Frame(frame));
        }
        for note in [WayNote::Leave, WayNote::Moved, WayNote::From(0), WayNote::From(100_000)] {
            let bytes = rmp_serde::to_vec(&note).expect("encodes");
            assert_eq!(Said::read(&bytes).expect("reads"), Said::Way(note));
        }
        assert!(Said::read(&[]).is_err() && Said::read(&[0x94, 1]).is_err() && Said::read(&[0xc1]).is_err());
    }
}
