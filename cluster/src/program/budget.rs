//! How many retries a client may make: a share of its successes, so that trouble is not multiplied. Pure.
//!
//! Called by clients before each retry. Bounds: [`RETRIES_SAVED`] retries in a row.

use std::sync::atomic::{AtomicU32, Ordering};

/// Retries that can be saved up, and that a new client may make.
const RETRIES_SAVED: u32 = 10;
/// Ten successes pay for one retry.
const PER_RETRY: u32 = 10;

/// Shared by the clones of one client.
#[derive(Debug)]
pub(super) struct RetryBudget {
    tokens: AtomicU32,
}

impl Default for RetryBudget {
    fn default() -> Self {
        Self { tokens: AtomicU32::new(RETRIES_SAVED * PER_RETRY) }
    }
}

impl RetryBudget {
    /// A call got its answer.
    pub(super) fn earned(&self) {
        let more = |tokens: u32| (tokens < RETRIES_SAVED * PER_RETRY).then_some(tokens + 1);
        // Full already: nothing to add.
        self.tokens.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok();
    }

    /// Pays for one retry; false when it cannot be afforded.
    pub(super) fn spend(&self) -> bool {
        let less = |tokens: u32| tokens.checked_sub(PER_RETRY);
        self.tokens.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_a_tenth_of_the_successes_once_the_savings_are_gone() {
        let budget = RetryBudget::default();
        assert_eq!((0..100).filter(|_| budget.spend()).count(), 10);
        (0..55).for_each(|_| budget.earned());
        assert_eq!((0..100).filter(|_| budget.spend()).count(), 5);
        (0..10_000).for_each(|_| budget.earned());
        assert_eq!((0..100).filter(|_| budget.spend()).count(), 10);
    }
}
