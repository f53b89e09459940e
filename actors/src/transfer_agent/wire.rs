//! The words of two transfer agents about one ticket. They travel on one stream between the two workers, authenticated by
//! its link; the bytes of blocks do not.
//!
//! These cross nodes as MessagePack. Fields are only ever appended, each with a default.

use serde::{Deserialize, Serialize};
use starling_ids::{AttemptId, TokenId};
use starling_kv::{
    layout::KvLayout,
    transport::{Descriptor, GrantToken},
};

use crate::{
    generate::{GenerateFrame, GenerateSpec},
    transfer::{Granted, HolderTicket, holder::Asked, holder::Word},
};

/// The first body of a stream to a worker's KV endpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct KvAsk {
    /// The ticket.
    pub(crate) asked: Asked,
    /// The request, whole: the blocks are those of its prompt.
    pub(crate) spec: GenerateSpec,
    /// Compute the prompt and its first token; else give what is there.
    pub(crate) compute: bool,
    /// Leading blocks that are wanted.
    pub(crate) blocks: u32,
    /// Priority of the request.
    pub(crate) priority: i32,
    /// It runs at the holder, as this attempt, and shall go on at the taker.
    #[serde(default)]
    pub(crate) live: Option<AttemptId>,
    /// Leading blocks that the taker has.
    #[serde(default)]
    pub(crate) first: u32,
    /// What is computed for the taker is handed over to it with the first token, the last block filled in part.
    #[serde(default)]
    pub(crate) whole: bool,
}

/// What the holder accepts with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KvOpened {
    /// Its name for the ticket.
    pub(crate) ticket: HolderTicket,
    /// How to reach its memory.
    pub(crate) memory: Descriptor,
    /// How its blocks are laid out, as far as its engine says.
    #[serde(default)]
    pub(crate) shape: Option<KvLayout>,
}

/// What the holder says on an open ticket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Told {
    /// Blocks that may be pulled under a grant.
    Blocks(GrantToken, Vec<Granted>),
    /// The first token, and whatever else its engine said.
    Frame(GenerateFrame),
    /// No more blocks will come; of a live request, none that were full when the ticket was opened.
    Sealed,
    /// It still works.
    Alive,
    /// A live request has ended at the holder: all its tokens, and how many of them lie in its blocks; `ran_on_us` after the
    /// holder heard that it was to be cut, its last step ended (before that, when negative), and it was `left_us` ago when
    /// this was said.
    Last {
        tokens: Vec<TokenId>,
        computed: u32,
        #[serde(default)]
        ran_on_us: Option<i64>,
        #[serde(default)]
        left_us: u64,
    },
    /// This answer of a live request ended at the holder by itself; others go on.
    Over,
}

/// What the taker says on an open ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Say {
    /// The holder's name for the ticket.
    pub(crate) ticket: HolderTicket,
    /// The attempt.
    pub(crate) attempt: AttemptId,
    /// What.
    pub(crate) word: Word,
}
