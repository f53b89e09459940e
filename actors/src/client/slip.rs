//! Receipts of one request on their way to whoever asked for them.
//!
//! Made by the asker, filled in by the request's stream: one receipt for each worker that took it, the last with what came of
//! it. Bounds: one receipt for each worker that a request may be given.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::route::receipt::{Outcome, Receipt};

/// See the module. Clones share what is in it.
#[derive(Debug, Clone, Default)]
pub struct Slip(Arc<Mutex<Vec<Receipt>>>);

impl Slip {
    /// What is known so far, in the order of the decisions. Empty when no router shard could be asked.
    #[must_use]
    pub fn receipts(&self) -> Vec<Receipt> {
        self.lock().clone()
    }

    /// Writes a decision down.
    pub fn push(&self, receipt: Receipt) {
        self.lock().push(receipt);
    }

    /// Adds what came of the last one.
    pub fn ended(&self, outcome: Outcome) {
        if let Some(last) = self.lock().last_mut() {
            last.outcome = Some(outcome);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Receipt>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
