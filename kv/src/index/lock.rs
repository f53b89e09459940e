//! A lock for sections of microseconds: readers spin before they sleep, and a writer lets waiting readers in between its sections.
//!
//! Called by the index around each shard. Never: held over more than one quantum of an event.

use std::sync::{
    PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
    atomic::{AtomicU32, Ordering},
};

/// Tries before a reader sleeps: some 30 µs, several sections long. To be woken takes longer than that.
const SPINS: usize = 2_000;
/// Tries before a writer sleeps: the longest look-ups take that long. A writer that sleeps keeps all readers out until it is
/// awake, and the reader that wakes it pays for the call.
const TRIES: usize = 2_000;
/// Looks that a writer takes for readers that wait: long enough for those that spin, not for one that sleeps.
const LOOKS: usize = 100;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct ShortLock<T> {
    waiting: AtomicU32,
    inner: RwLock<T>,
}

impl<T> ShortLock<T> {
    pub(super) fn read(&self) -> RwLockReadGuard<'_, T> {
        if let Some(guard) = self.try_read() {
            return guard;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut spun = None;
        for _ in 0..SPINS {
            std::hint::spin_loop();
            spun = self.try_read();
            if spun.is_some() {
                break;
            }
        }
        let guard = spun.unwrap_or_else(|| self.inner.read().unwrap_or_else(PoisonError::into_inner));
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Without waiting: none while somebody writes.
    pub(super) fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        match self.inner.try_read() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, T> {
        for _ in 0..TRIES {
            match self.inner.try_write() {
                Ok(guard) => return guard,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether readers wait: a writer that holds the lock asks now and then.
    pub(super) fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// A writer that is about to lock again leaves waiting readers a moment to get in.
    pub(super) fn let_readers_in(&self) {
        for _ in 0..LOOKS {
            if !self.is_wanted() {
                return;
            }
            std::hint::spin_loop();
        }
    }
}
