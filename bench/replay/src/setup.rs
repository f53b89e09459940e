//! What is simulated: the machines, the wires, the faults.
//!
//! Called by whoever runs a [`super::cluster::Cluster`]. Data alone.

use std::time::Duration;

use starling_actors::route::{
    policy::{PolicyConfig, PolicyName},
    queue::QueueConfig,
};
use starling_engine::simulated::Timing;

/// Tokens per block.
pub const BLOCK: u32 = 16;

/// What is simulated.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Engines, at least 1.
    pub workers: usize,
    /// Gateways, each with a router beside it, at least 1. A load balancer gives each request to any of them.
    pub gateways: usize,
    /// How workers are chosen.
    pub policy: PolicyConfig,
    /// Each gateway decides by itself, as routers do elsewhere; otherwise one shard decides for all.
    pub decide_apart: bool,
    /// Where requests wait while every worker is taken, if one shard decides. Without it each goes to a worker's own queue at once.
    pub queue: Option<QueueConfig>,
    /// KV blocks of [`BLOCK`] tokens in each engine.
    pub blocks: u32,
    /// Sequences in a batch.
    pub sequences: u32,
    /// Tokens in a step.
    pub step_tokens: u32,
    /// How long steps take.
    pub timing: Timing,
    /// From one node to another.
    pub wire: Duration,
    /// News of a dead router reaches the gateways one after the other within this.
    pub gossip: Duration,
    /// Draws.
    pub seed: u64,
    /// At most this many requests at once; the next comes when one ends. None: they come when the traffic says.
    pub concurrency: Option<usize>,
    /// What goes wrong.
    pub faults: Faults,
}

/// What goes wrong, and when.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Faults {
    /// The process of the router that owns the shard dies at that time. It is not replaced; the next in rank takes over.
    pub kill_owner: Option<Duration>,
    /// A gateway that does not own the shard stands still: since when, for how long.
    pub freeze_gateway: Option<(Duration, Duration)>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            workers: 8,
            gateways: 1,
            policy: PolicyConfig::default(),
            decide_apart: false,
            queue: Some(patient()),
            blocks: 65_536,
            sequences: 256,
            step_tokens: 8_192,
            timing: Timing::published(),
            wire: Duration::from_micros(200),
            gossip: Duration::from_millis(200),
            seed: 1,
            concurrency: None,
            faults: Faults::default(),
        }
    }
}

impl Setup {
    /// The same with another policy. Only Starling's own asks one shard; the others decide in each gateway.
    #[must_use]
    pub fn with_policy(&self, name: PolicyName) -> Self {
        let decide_apart = name != PolicyName::Starling;
        let queue = self.queue.clone().filter(|_| !decide_apart);
        Self { policy: PolicyConfig::named(name), decide_apart, queue, ..self.clone() }
    }
}

/// The product's queue, but nobody is refused: policies are compared by the time of all requests.
fn patient() -> QueueConfig {
    let (places, wait_ms_max) = (usize::MAX, 1_000_000_000);
    QueueConfig { places, tenant_places: places, wait_ms_max, ..QueueConfig::default() }
}
