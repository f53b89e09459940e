//! Who may not have a request.

use super::{Filter, Question};
use crate::route::fleet::Slot;

/// Workers that refused or failed this request already.
#[derive(Debug, Clone, Copy, Default)]
pub struct Excluded;

impl Filter for Excluded {
    fn name(&self) -> &'static str {
        "excluded"
    }

    fn keeps(&self, question: &Question<'_>, slot: Slot) -> bool {
        let exclude = question.ask.exclude;
        exclude.is_empty() || question.fleet.life(slot).is_some_and(|(worker, _)| !exclude.contains(worker))
    }
}
