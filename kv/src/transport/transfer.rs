//! Shell: one transfer, as its owner sees it: awaited, watched, cancelled.
//!
//! Called by the transfer agent; written by the session's thread. It needs no particular runtime: wakers for `await`, a
//! condition variable for threads. Never: resolves while anything may still touch the batch's pages.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use super::{
    error::TransferError,
    wait::{Kick, watch},
};

/// A transfer that succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// Bytes moved.
    pub bytes: u64,
    /// From the start of the work, without the time in the session's queue.
    pub took: Duration,
}

#[derive(Debug, Default)]
struct State {
    outcome: Option<Result<Done, TransferError>>,
    /// Who waits for how many pages.
    watchers: Vec<(usize, Waker)>,
}

/// What both sides of a transfer share.
#[derive(Debug)]
pub(crate) struct Progress {
    pages: AtomicUsize,
    cancelled: AtomicBool,
    kick: Arc<Kick>,
    until: Instant,
    state: Mutex<State>,
    /// There is an outcome.
    over: AtomicBool,
    ended: Condvar,
}

impl Progress {
    /// A transfer that must end at `until`; `kick` wakes the thread that works on it.
    pub(crate) fn new(kick: Arc<Kick>, until: Instant) -> Arc<Self> {
        let (pages, cancelled) = (AtomicUsize::new(0), AtomicBool::new(false));
        let (state, over, ended) = (Mutex::default(), AtomicBool::new(false), Condvar::new());
        Arc::new(Self { pages, cancelled, kick, until, state, over, ended })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops it: the cause, once there is one.
    pub(crate) fn halted(&self) -> Result<(), TransferError> {
        if self.cancelled.load(Ordering::Acquire) {
            return Err(TransferError::Cancelled);
        }
        if Instant::now() >= self.until { Err(TransferError::Timeout) } else { Ok(()) }
    }

    /// The first `pages` pages of the batch have arrived and are good.
    pub(crate) fn advance(&self, pages: usize) {
        self.pages.store(pages, Ordering::Release);
        let mut state = self.state();
        let mut at = 0;
        while at < state.watchers.len() {
            if state.watchers[at].0 <= pages { state.watchers.swap_remove(at).1.wake() } else { at += 1 }
        }
    }

    /// It is over.
    pub(crate) fn end(&self, outcome: Result<Done, TransferError>) {
        let mut state = self.state();
        if state.outcome.is_some() {
            return;
        }
        state.outcome = Some(outcome);
        let watchers = std::mem::take(&mut state.watchers);
        drop(state);
        self.over.store(true, Ordering::Release);
        self.ended.notify_all();
        watchers.into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// Stops it from its owner's side.
    pub(crate) fn give_up(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.kick.now();
    }
}

/// A transfer that was posted. Dropping it cancels it; the batch's hold outlives that until its pages are quiet.
#[derive(Debug)]
#[must_use = "a dropped transfer is cancelled"]
pub struct Transfer {
    progress: Arc<Progress>,
}

impl Transfer {
    pub(crate) fn of(progress: Arc<Progress>) -> Self {
        Self { progress }
    }

    /// Pages of the batch, from its first on, whose bytes have arrived and were compared with their checksums (pull), or
    /// were written (push).
    #[must_use]
    pub fn pages_done(&self) -> usize {
        self.progress.pages.load(Ordering::Acquire)
    }

    /// Waits until the first `pages` pages are done or the transfer has ended: for a consumer that acts layer by layer.
    /// Returns the pages done.
    pub async fn reached(&self, pages: usize) -> usize {
        Reached { progress: &self.progress, pages }.await
    }

    /// Asks it to stop. It then resolves to `Cancelled`, unless it was done already.
    pub fn cancel(&self) {
        self.progress.give_up();
    }

    /// Its outcome, if it has ended.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<Done, TransferError>> {
        self.progress.state().outcome.clone()
    }

    /// Blocks this thread until it has ended. A batch's own deadline bounds the wait.
    pub fn wait(self) -> Result<Done, TransferError> {
        // A small one is over before a thread would have gone to sleep.
        watch(|| self.progress.over.load(Ordering::Acquire).then_some(()));
        let mut state = self.progress.state();
        loop {
            if let Some(outcome) = state.outcome.clone() {
                return outcome;
            }
            state = self.progress.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn poll_pages(progress: &Progress, pages: usize, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = progress.state();
        if state.outcome.is_some() || progress.pages.load(Ordering::Acquire) >= pages {
            return Poll::Ready(());
        }
        match state.watchers.iter_mut().find(|(wanted, waker)| *wanted == pages && waker.will_wake(cx.waker())) {
            Some(_) => {}
            None => state.watchers.push((pages, cx.waker().clone())),
        }
        Poll::Pending
    }
}

impl Future for Transfer {
    type Output = Result<Done, TransferError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match Self::poll_pages(&self.progress, usize::MAX, cx) {
            Poll::Ready(()) => Poll::Ready(self.outcome().unwrap_or(Err(TransferError::Cancelled))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.progress.state().outcome.is_none() {
            self.progress.give_up();
        }
    }
}

struct Reached<'a> {
    progress: &'a Arc<Progress>,
    pages: usize,
}

impl Future for Reached<'_> {
    type Output = usize;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<usize> {
        Transfer::poll_pages(self.progress, self.pages, cx).map(|()| self.progress.pages.load(Ordering::Acquire))
    }
}

impl super::wait::Bounds for Progress {
    fn kick(&self) -> &Kick {
        &self.kick
    }

    fn until(&self) -> Option<Instant> {
        Some(self.until)
    }

    fn halted(&self) -> Result<(), TransferError> {
        Self::halted(self)
    }

    /// The other side works on what it was asked.
    fn soon(&self) -> bool {
        true
    }
}
