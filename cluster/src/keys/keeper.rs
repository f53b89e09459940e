//! The Keys actor: brings this node's ring up to date, and says so when others refuse it.
//!
//! Parent: the root; no children; one task. Asks a member now and then; asks seeds while nobody is known; asks whoever
//! gossips under a key that this node does not hold, if that is a seed or was a member.
//! Bounds: one exchange at a time, [`AT_ONCE`] at start; [`ADDRESSES_MAX`] addresses are remembered. If it dies: it is
//! started again; rings are still exchanged when somebody else asks.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use rand::{RngExt, seq::IteratorRandom};
use starling_ids::NodeId;
use tokio::{sync::watch, task::JoinSet};

use super::exchange::{AddressError, Told, with_address, with_member};
use crate::{
    discovery::Snapshot,
    membership::Seeds,
    security::Keys,
    session::Caller,
    supervise::{ChildSpec, Handle, Restart, child},
};

/// Between two looks at who is there.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Between two exchanges with a member, on average.
const MEMBER_EVERY: Duration = Duration::from_secs(30);
/// Longest wait between exchanges with seeds while nobody is known.
const SEEDS_EVERY_MAX: Duration = Duration::from_secs(16);
/// Longest exchange with seeds at start.
const CATCH_UP_MAX: Duration = Duration::from_secs(1);
/// Seeds that are asked, and asked at one time at start.
const AT_ONCE: usize = 16;
/// Between two complaints about being refused.
const COMPLAIN_AGAIN: Duration = Duration::from_secs(60);
/// Addresses of members, past ones included.
const ADDRESSES_MAX: usize = 20_000;

/// What the keeper needs, for every start.
#[derive(Clone)]
pub(crate) struct KeeperArgs {
    pub(crate) node: NodeId,
    pub(crate) address: SocketAddr,
    pub(crate) keys: Keys,
    pub(crate) seeds: Seeds,
    pub(crate) caller: Caller,
    pub(crate) snapshots: watch::Receiver<Arc<Snapshot>>,
}

/// Asks seeds for a newer ring before this node gossips: with an old one it could read nothing. Ends with the first
/// answer, or when no seed answers in time.
pub(crate) async fn catch_up(keys: &Keys, seeds: &[SocketAddr], own: SocketAddr) {
    let others = seeds.iter().copied().filter(|seed| *seed != own).take(AT_ONCE);
    let asked: Vec<_> = others.map(|seed| async move { (seed, with_address(keys, seed).await) }).collect();
    let mut answers = futures::stream::iter(asked).buffer_unordered(AT_ONCE);
    let first = async {
        let mut refused = Refused::default();
        while let Some((seed, outcome)) = answers.next().await {
            if refused.note(keys, seed, &outcome) {
                return;
            }
        }
    };
    if tokio::time::timeout(CATCH_UP_MAX, first).await.is_err() {
        tracing::debug!("no seed has told about keys yet");
    }
}

/// When this node was told that its keys are not accepted.
#[derive(Default)]
struct Refused(Option<Instant>);

impl Refused {
    /// Whether there was an answer. A refusal is logged, once in a while.
    fn note(&mut self, keys: &Keys, from: SocketAddr, outcome: &Result<Told, AddressError>) -> bool {
        let error = match outcome {
            Ok(_) => {
                self.0 = None;
                return true;
            }
            Err(error) => error,
        };
        let lately = self.0.is_some_and(|when| when.elapsed() < COMPLAIN_AGAIN);
        if error.is_refusal() && !lately {
            self.0 = Some(Instant::now());
            tracing::error!(
                seed = %from,
                keys = %keys.ring(),
                "refused: the cluster there accepts none of this node's keys; copy the key file of a member here and start again"
            );
        } else {
            tracing::debug!(%from, %error, "no exchange of keys");
        }
        false
    }
}

/// How to start the actor.
pub(crate) fn keeper_child(args: KeeperArgs) -> ChildSpec {
    child("keys", "keys", Restart::Permanent, &Handle::new(), move || (Keeper, args.clone()))
}

struct Keeper;

/// It has no messages; its task does the work.
struct KeeperMsg;

impl ractor::Message for KeeperMsg {}

impl Actor for Keeper {
    type Msg = KeeperMsg;
    type State = JoinSet<()>;
    type Arguments = KeeperArgs;

    async fn pre_start(
        &self,
        _myself: ActorRef<KeeperMsg>,
        args: KeeperArgs,
    ) -> Result<JoinSet<()>, ActorProcessingErr> {
        let mut tasks = JoinSet::new();
        tasks.spawn(Rounds::new(args).run());
        Ok(tasks)
    }
}

struct Rounds {
    args: KeeperArgs,
    /// Where members are, and were.
    addresses: BTreeSet<SocketAddr>,
    refused: Refused,
    next_member: Instant,
    next_seeds: Instant,
    seeds_wait: Duration,
}

impl Rounds {
    fn new(args: KeeperArgs) -> Self {
        let now = Instant::now();
        Self {
            args,
            addresses: BTreeSet::new(),
            refused: Refused::default(),
            next_member: now + MEMBER_EVERY.mul_f64(rand::random()),
            next_seeds: now + LOOK_EVERY,
            seeds_wait: LOOK_EVERY,
        }
    }

    async fn run(mut self) {
        let mut strangers = self.args.keys.strangers();
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => self.look().await,
                // The keys live as long as this task.
                Ok(()) = strangers.changed() => {
                    let from = *strangers.borrow_and_update();
                    if let Some(from) = from {
                        self.stranger(from).await;
                    }
                }
            }
        }
    }

    async fn look(&mut self) {
        let snapshot = self.args.snapshots.borrow().clone();
        self.remember(&snapshot);
        let now = Instant::now();
        let other = snapshot.nodes.iter().map(|view| &view.record.node).filter(|node| **node != self.args.node);
        let other = other.choose(&mut rand::rng());
        match other {
            Some(other) if now >= self.next_member => {
                self.next_member = now + MEMBER_EVERY.mul_f64(rand::rng().random_range(0.5..1.5));
                if let Err(fault) = with_member(&self.args.keys, &self.args.caller, other, false).await {
                    tracing::debug!(%other, %fault, "no exchange of keys");
                }
            }
            Some(_) => self.seeds_wait = LOOK_EVERY,
            None if now >= self.next_seeds && !self.args.seeds.is_empty() => {
                self.next_seeds = now + self.seeds_wait;
                self.seeds_wait = (self.seeds_wait * 2).min(SEEDS_EVERY_MAX);
                self.ask_seeds().await;
            }
            None => {}
        }
    }

    /// Alone although there are seeds: they may have a newer ring, or an older one.
    async fn ask_seeds(&mut self) {
        let found = self.args.seeds.resolve().await;
        let others = found.into_iter().filter(|seed| *seed != self.args.address);
        let chosen = others.sample(&mut rand::rng(), AT_ONCE);
        for seed in chosen {
            let outcome = with_address(&self.args.keys, seed).await;
            if self.refused.note(&self.args.keys, seed, &outcome) {
                return;
            }
        }
    }

    /// Only known addresses are asked: anybody can make a packet that seems to come from anywhere.
    async fn stranger(&mut self, from: SocketAddr) {
        let snapshot = self.args.snapshots.borrow().clone();
        self.remember(&snapshot);
        let known = self.addresses.contains(&from) || self.args.seeds.resolve().await.contains(&from);
        if known {
            let outcome = with_address(&self.args.keys, from).await;
            self.refused.note(&self.args.keys, from, &outcome);
        }
        // However many packets come, one is looked at in a while.
        tokio::time::sleep(LOOK_EVERY / 4).await;
    }

    fn remember(&mut self, snapshot: &Snapshot) {
        if self.addresses.len() < ADDRESSES_MAX {
            self.addresses.extend(snapshot.nodes.iter().map(|view| view.record.address));
        }
    }
}
