//! Policies that look at no cache: in turn, at random, to the least loaded.

use super::{Picker, Question, Scorer, mix};
use crate::route::fleet::Slot;

/// Requests on a worker, relative to the places in its batch where those are known to differ.
#[derive(Debug, Clone, Copy, Default)]
pub struct LeastLoaded;

impl Scorer for LeastLoaded {
    fn name(&self) -> &'static str {
        "load"
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        f64::from(question.fleet.in_flight(slot))
    }
}

/// The next one in turn.
#[derive(Debug, Clone, Copy, Default)]
pub struct Turns;

impl Picker for Turns {
    fn pick(&mut self, question: &Question<'_>, slots: &[Slot], _costs: &[f64]) -> (Slot, usize) {
        // The one chosen longest ago is the next in turn also when workers come and go.
        let oldest = slots.iter().min_by_key(|slot| (question.fleet.chosen[**slot], **slot));
        (oldest.copied().unwrap_or_default(), slots.len())
    }
}

/// Any one.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnyOf;

impl Picker for AnyOf {
    fn pick(&mut self, question: &Question<'_>, slots: &[Slot], _costs: &[f64]) -> (Slot, usize) {
        let at = mix(question.draw, 1) % slots.len().max(1) as u64;
        (slots.get(at as usize).copied().unwrap_or_default(), slots.len())
    }
}
