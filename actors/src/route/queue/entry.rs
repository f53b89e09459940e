//! The words of a queue: what a request brings, what it holds while it waits, and why it is not let in.
//!
//! Made by the router shard and by [`super::Queue`]. Pure data.

use std::{sync::Arc, time::Duration};

use super::rooms::HeldBack;
use crate::route::desk::Hits;

/// What a request brings to the queue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claim {
    /// Whose; empty for nobody's in particular.
    pub tenant: Arc<str>,
    /// Its tenant's part beside others, 1 to 1,000.
    pub weight: u32,
    /// Its class; lower goes first.
    pub priority: i32,
    /// Prompt tokens to compute.
    pub miss_tokens: u64,
    /// How long that takes at the worker that would compute it, as far as it is known.
    pub prefill: Duration,
    /// Those and the answer's expected tokens: what a turn costs.
    pub cost_tokens: u64,
    /// When it has no use any more, on the queue's clock.
    pub deadline: Duration,
    /// It had begun and lost its worker: it goes before all classes and is always let in.
    pub begun: bool,
}

/// Names a waiting request; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(pub(super) u64);

/// A waiting request.
#[derive(Debug)]
pub struct Entry<T> {
    /// What it brought.
    pub claim: Claim,
    /// Since when.
    pub since: Duration,
    /// Why it waits.
    pub held_back: HeldBack,
    /// The caller's.
    pub payload: T,
    pub(super) key: u64,
    pub(super) parked: bool,
    /// What the caches held of its prompt when that was looked up last, and when that was.
    pub(super) seen: Option<(Duration, Hits)>,
}

/// Why a request is not let in, or not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Its tenant holds its part of the places already.
    TenantShare,
    /// All places are taken by others with as much right.
    Full,
    /// At the measured pace its turn would come too late.
    Hopeless,
    /// It had a place, and one with more right needed it.
    Displaced,
    /// It waited as long as anybody may.
    Waited,
    /// Its own deadline passed.
    Deadline,
}

impl Reason {
    /// A fixed word for labels.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::TenantShare => "tenant_share",
            Self::Full => "full",
            Self::Hopeless => "hopeless",
            Self::Displaced => "displaced",
            Self::Waited => "waited",
            Self::Deadline => "deadline",
        }
    }
}

/// A refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    /// When another try may do, from the measured pace.
    pub retry_after: Duration,
}

/// A place and whoever had to make way for it, or the refusal and what was offered.
pub type Offered<T> = Result<(Place, Option<Entry<T>>), (Refusal, T)>;
