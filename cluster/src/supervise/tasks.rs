//! Tasks that an actor owns: they end when its state is dropped, whatever killed it.
//!
//! [`TaskOwner`] lies in the actor's state; [`Tasks`] are the handles that others may start tasks through.
//! Never detached: a task is in exactly one set. Bounds: `max` living tasks, beyond which a start is refused.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::JoinSet;

/// The owner of a set of tasks. Dropping it aborts them all and closes the set.
#[derive(Debug)]
pub struct TaskOwner {
    tasks: Tasks,
}

/// A handle to start tasks in a set that somebody else owns.
#[derive(Debug, Clone)]
pub struct Tasks {
    set: Arc<Mutex<Option<JoinSet<()>>>>,
    max: usize,
}

impl TaskOwner {
    /// A new set for at most `max` living tasks.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self::open(&Tasks::closed(max))
    }

    /// A handle to start tasks with.
    #[must_use]
    pub fn tasks(&self) -> Tasks {
        self.tasks.clone()
    }

    /// Opens the set behind `tasks`. What an earlier owner left there is aborted.
    #[must_use]
    pub fn open(tasks: &Tasks) -> Self {
        let earlier = tasks.lock().replace(JoinSet::new());
        drop(earlier);
        Self { tasks: tasks.clone() }
    }
}

impl Drop for TaskOwner {
    fn drop(&mut self) {
        let set = self.tasks.lock().take();
        // Dropped outside the lock: an aborted task may hold a handle to this very set.
        drop(set);
    }
}

impl Tasks {
    /// A set for at most `max` living tasks, closed until somebody owns it.
    #[must_use]
    pub fn closed(max: usize) -> Self {
        Self { set: Arc::new(Mutex::new(None)), max }
    }

    /// Starts a task; false (and the future is dropped) when the owner is gone or the set is full.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> bool {
        let mut guard = self.lock();
        let Some(set) = guard.as_mut() else { return false };
        while let Some(ended) = set.try_join_next() {
            if let Err(error) = ended
                && error.is_panic()
            {
                tracing::error!(%error, "a task panicked");
            }
        }
        if set.len() >= self.max {
            return false;
        }
        set.spawn(task);
        true
    }

    /// Living tasks, and ended ones not yet cleared away.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().as_ref().map_or(0, JoinSet::len)
    }

    /// Whether a start would be refused now.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.lock().as_ref().is_none_or(|set| set.len() >= self.max)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Option<JoinSet<()>>> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
