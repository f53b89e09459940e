//! The list of all actors of a node, as `starling actors` shows it, and the injection of a panic into one.
//!
//! Written by supervisors; read by control operations. Never holds an actor alive: an entry leaves with its
//! child. Bounds: one row an actor.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use serde::{Deserialize, Serialize};

/// Where an actor is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ActorState {
    /// Started for the first time, not running yet.
    Starting,
    /// Takes messages.
    Running,
    /// Died; waits for its restart.
    Restarting,
    /// Asked to stop.
    Stopping,
    /// Ended and not to be restarted.
    Stopped,
}

impl ActorState {
    const ALL: [Self; 5] = [Self::Starting, Self::Running, Self::Restarting, Self::Stopping, Self::Stopped];

    /// A fixed word for tables.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Restarting => "restarting",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
        }
    }
}

/// What is counted about one actor, over all its restarts.
#[derive(Debug, Default)]
pub struct ActorStats {
    path: OnceLock<Arc<str>>,
    owner: OnceLock<Arc<str>>,
    depth: AtomicI64,
    restarts: AtomicU64,
    state: AtomicU8,
    started: Mutex<Option<Instant>>,
    panic_next: AtomicBool,
}

impl ActorStats {
    /// Its path in the tree, `links/gpu-1` say; empty before it was added to a supervisor.
    pub fn path(&self) -> Arc<str> {
        self.path.get().cloned().unwrap_or_else(|| Arc::from(""))
    }

    /// Messages sent through its handle and not handled yet.
    pub fn mailbox_depth(&self) -> u64 {
        u64::try_from(self.depth.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// How often it was started again.
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    /// Where it is in its life.
    pub fn state(&self) -> ActorState {
        ActorState::ALL.get(usize::from(self.state.load(Ordering::Relaxed))).copied().unwrap_or(ActorState::Stopped)
    }

    /// Time since its last start.
    pub fn uptime(&self) -> Duration {
        lock(&self.started).map_or(Duration::ZERO, |at| at.elapsed())
    }

    pub(crate) fn set_path(&self, path: &str) {
        // A handle may be given to a second child specification only by mistake; the first path stays.
        self.path.get_or_init(|| Arc::from(path));
    }

    /// Who it ends with besides its supervisor.
    pub(crate) fn set_owner(&self, owner: &str) {
        self.owner.get_or_init(|| Arc::from(owner));
    }

    pub(crate) fn sent(&self) {
        self.depth.fetch_add(1, Ordering::Relaxed);
    }

    /// A message left the mailbox. Those an actor sends to itself were never counted in, so zero is the floor.
    pub(crate) fn taken(&self) {
        let down = |depth: i64| (depth > 0).then_some(depth - 1);
        self.depth.fetch_update(Ordering::Relaxed, Ordering::Relaxed, down).ok();
    }

    /// A new life begins: the old mailbox is gone with what was in it.
    pub(crate) fn born(&self) {
        self.depth.store(0, Ordering::Relaxed);
        self.panic_next.store(false, Ordering::Relaxed);
        *lock(&self.started) = Some(Instant::now());
    }

    pub(crate) fn restarted(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn set_state(&self, state: ActorState) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    /// Panics once if a panic was asked for. Runs inside the actor, before it handles anything.
    pub(crate) fn panic_if_asked(&self) {
        assert!(!self.panic_next.swap(false, Ordering::Relaxed), "panic injected into {}", self.path());
    }
}

/// One actor in a snapshot of the book.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActorRow {
    /// Path in the tree.
    pub path: String,
    /// What it is: `link`, `worker`, `supervisor`.
    pub kind: String,
    /// Where in its life.
    pub state: ActorState,
    /// Restarts since the node started.
    pub restarts: u64,
    /// Messages waiting.
    pub mailbox_depth: u64,
    /// Time since its last start.
    pub uptime: Duration,
    /// Who started it from elsewhere and takes it along: a node, or a node and the path of an actor there.
    #[serde(default)]
    pub owner: Option<String>,
}

struct Entry {
    kind: &'static str,
    stats: Arc<ActorStats>,
    cell: Option<ActorCell>,
}

/// All actors of this node. Cheap to clone.
#[derive(Clone, Default)]
pub struct ActorBook {
    entries: Arc<Mutex<BTreeMap<String, Entry>>>,
}

impl std::fmt::Debug for ActorBook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ActorBook")
    }
}

impl ActorBook {
    /// All actors, sorted by path.
    #[must_use]
    pub fn snapshot(&self) -> Vec<ActorRow> {
        let row = |(path, entry): (&String, &Entry)| ActorRow {
            path: path.clone(),
            kind: entry.kind.to_owned(),
            state: entry.stats.state(),
            restarts: entry.stats.restarts(),
            mailbox_depth: entry.stats.mailbox_depth(),
            uptime: entry.stats.uptime(),
            owner: entry.stats.owner.get().map(ToString::to_string),
        };
        self.lock().iter().map(row).collect()
    }

    /// Makes the actor at `path` panic inside its own handler before it handles its next message, and wakes
    /// it. False when there is no such actor or it is not running.
    pub async fn inject_panic(&self, path: &str) -> bool {
        let target = self.lock().get(path).and_then(|entry| Some((entry.stats.clone(), entry.cell.clone()?)));
        let Some((stats, cell)) = target else { return false };
        stats.panic_next.store(true, Ordering::Relaxed);
        // A short-lived child is the wake-up: its start reaches the target's handler whatever its message type.
        match Poke::spawn_linked(None, Poke, (), cell).await {
            Ok((poke, _ended)) => {
                poke.stop(None);
                true
            }
            Err(_) => false,
        }
    }

    pub(crate) fn put(&self, path: &str, kind: &'static str, stats: Arc<ActorStats>, cell: Option<ActorCell>) {
        self.lock().insert(path.to_owned(), Entry { kind, stats, cell });
    }

    pub(crate) fn remove(&self, path: &str) {
        self.lock().remove(path);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        lock(&self.entries)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lives only to make its parent look at its events.
struct Poke;

struct PokeMsg;

impl ractor::Message for PokeMsg {}

impl Actor for Poke {
    type Msg = PokeMsg;
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _myself: ActorRef<PokeMsg>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}
