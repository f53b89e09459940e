//! Blocks on their way back to a pool from other threads: the only thing of a pool that threads share.
//!
//! Filled by the guards of lent and reserved blocks, wherever they are dropped; emptied by the one thread that owns the pool.
//! Never: waits for more than a push of somebody else, loses a block, or gives one back twice. Bounds: at most as many blocks
//! as were lent or reserved. Its lock and flag come from [`super::sync`], so that a test can run every interleaving of them.

use super::{
    BlockSlot,
    sync::{AtomicBool, Mutex, MutexGuard, Ordering, PoisonError},
};

/// See the module.
#[derive(Debug)]
pub struct ReturnBin {
    given: Mutex<Vec<BlockSlot>>,
    /// Something may lie in it. Set after that, so whoever sees it sees the blocks.
    any: AtomicBool,
}

impl Default for ReturnBin {
    fn default() -> Self {
        Self { given: Mutex::new(Vec::new()), any: AtomicBool::new(false) }
    }
}

impl ReturnBin {
    /// Gives blocks back at the owner's next look, and then wakes it: one that looks after this `wake` finds them.
    pub fn push(&self, slots: &[BlockSlot], wake: impl FnOnce()) {
        if slots.is_empty() {
            return;
        }
        self.lock().extend_from_slice(slots);
        // Read and written as one, as by the taker: none of them falls between a taker's look and its reset.
        self.any.swap(true, Ordering::Release);
        wake();
    }

    /// All since the last call, each block once for each time that it was given. Cheap when there are none.
    #[must_use]
    pub fn take(&self) -> Vec<BlockSlot> {
        if self.any.swap(false, Ordering::Acquire) { std::mem::take(&mut *self.lock()) } else { Vec::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<BlockSlot>> {
        // A push that panicked has put its blocks in or not: the others are as good as before.
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
