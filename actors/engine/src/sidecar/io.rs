//! The thread that has the sockets: a small runtime with a task a call, one for health and one for events.
//!
//! Owned by the engine; dropping [`Io`] ends the thread, its tasks and their connections. Tasks wait when [`NEWS_MAX`] pieces of
//! news are unread, and servers with them. Bounds: [`LAUNCHES_MAX`] calls on their way to it; the engine's limit on sequences.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use starling_kv::{events::KvEvent, hash::HashSeed};
use tokio::{
    sync::{Notify, mpsc, oneshot},
    task::JoinSet,
};

use super::{
    Dialect, ServerOptions, call,
    dialect::{Call, Chunk, Reader},
    events,
    gauges::ServerLoad,
    health,
    http::Server,
    words::Words,
};
use crate::contract::{SequenceId, Waker};

/// News that nobody has read.
const NEWS_MAX: usize = 4_096;
/// Calls that have not been begun.
const LAUNCHES_MAX: usize = 1_024;

/// What a server says of itself when it comes up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// What it calls its model.
    pub(super) model: Option<String>,
    /// Longest prompt plus answer, tokens.
    pub(super) context: Option<u32>,
}

/// What happened.
pub(super) enum News {
    /// To a sequence.
    Chunk(SequenceId, Chunk),
    /// The server can be asked.
    Up(Facts),
    /// It cannot, and why.
    Away(String),
    /// How busy it is.
    Load(ServerLoad),
    /// What it stores, in our names.
    Blocks(Vec<KvEvent>),
}

/// A call to begin.
pub(super) struct Launch {
    pub(super) id: SequenceId,
    pub(super) call: Call,
    pub(super) reader: Box<dyn Reader>,
    /// Ends it.
    pub(super) given_up: oneshot::Receiver<()>,
}

/// What every task knows.
pub(super) struct Shared {
    pub(super) dialect: Dialect,
    pub(super) server: Arc<Server>,
    pub(super) words: Arc<Words>,
    /// The model's own seed and tokens a block.
    pub(super) naming: (HashSeed, usize),
    pub(super) options: ServerOptions,
    /// A call failed: is the server still there?
    pub(super) doubt: Notify,
}

/// Wakes the engine's thread once for any number of news.
#[derive(Default)]
struct Bell {
    rung: AtomicBool,
    wake: OnceLock<Waker>,
}

/// Where tasks put their news.
#[derive(Clone)]
pub(super) struct Outlet {
    news: mpsc::Sender<News>,
    bell: Arc<Bell>,
}

impl Outlet {
    /// Waits while too many are unread; an engine that is gone needs none.
    pub(super) async fn send(&self, news: News) {
        if self.news.send(news).await.is_ok() && !self.bell.rung.swap(true, Ordering::SeqCst) {
            self.bell.wake.get().inspect(|wake| wake());
        }
    }
}

/// The thread, as the engine holds it.
pub(super) struct Io {
    launches: Option<mpsc::Sender<Launch>>,
    news: mpsc::Receiver<News>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Io {
    /// Starts it.
    pub(super) fn start(shared: Shared) -> std::io::Result<Self> {
        let (launches, inbox) = mpsc::channel(LAUNCHES_MAX);
        let (sender, news) = mpsc::channel(NEWS_MAX);
        let bell = Arc::<Bell>::default();
        let outlet = Outlet { news: sender, bell: bell.clone() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let work = move || {
            runtime.block_on(serve(Arc::new(shared), inbox, outlet));
            // Ends every task, and with it its connection.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("sidecar".to_owned()).spawn(work)?;
        Ok(Self { launches: Some(launches), news, bell, thread: Some(thread) })
    }

    /// What to ring when there is news.
    pub(super) fn wake_by(&self, wake: Waker) {
        // Told once; news that came before are read in the first step.
        drop(self.bell.wake.set(wake));
    }

    /// Begins a call; gives it back when the thread has no room for it now.
    pub(super) fn launch(&self, launch: Launch) -> Result<(), Box<Launch>> {
        let Some(launches) = &self.launches else { return Err(Box::new(launch)) };
        launches.try_send(launch).map_err(|error| Box::new(error.into_inner()))
    }

    /// All news so far; whoever comes later rings again.
    pub(super) fn news(&mut self) -> Vec<News> {
        self.bell.rung.store(false, Ordering::SeqCst);
        let mut news = Vec::new();
        while news.len() < NEWS_MAX
            && let Ok(one) = self.news.try_recv()
        {
            news.push(one);
        }
        news
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        drop(self.launches.take());
        // A task that waits for room goes on and sees that nobody reads.
        self.news.close();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of an engine's sockets panicked");
        }
    }
}

async fn serve(shared: Arc<Shared>, mut launches: mpsc::Receiver<Launch>, outlet: Outlet) {
    let (mut lasting, mut calls) = (JoinSet::new(), JoinSet::new());
    lasting.spawn(health::watch(shared.clone(), outlet.clone()));
    lasting.spawn(events::listen(shared.clone(), outlet.clone()));
    loop {
        let launched = tokio::select! {
            launched = launches.recv() => launched,
            // Each tells its own end.
            Some(_) = calls.join_next() => continue,
        };
        let Some(mut launch) = launched else { return };
        let (shared, outlet) = (shared.clone(), outlet.clone());
        let given_up = std::mem::replace(&mut launch.given_up, oneshot::channel().1);
        // Dropped when it is given up, and its connection with it.
        calls.spawn(async move {
            tokio::select! {
                biased;
                _ = given_up => {}
                () = call::run(&shared, launch, &outlet) => {}
            }
        });
    }
}
