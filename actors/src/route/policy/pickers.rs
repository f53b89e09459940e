//! From costs to one worker.

use super::{Picker, Question, mix};
use crate::route::fleet::Slot;

/// The lowest cost; a draw among equals.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lowest;

impl Picker for Lowest {
    fn pick(&mut self, question: &Question<'_>, slots: &[Slot], costs: &[f64]) -> (Slot, usize) {
        let best = costs.iter().copied().min_by(f64::total_cmp).unwrap_or_default();
        pick_among(slots, costs, best, |at| mix(question.draw, at as u64))
    }
}

/// The lowest cost within a tolerance, and among those the one chosen longest ago: paced traffic without hits goes
/// round instead of always to the first worker.
///
/// Costs within `share` of the request's own prefill at the cheapest, or within `ms`, are equal: rates are learned, and
/// two equal machines learn slightly different ones. Load is counted exactly and gets no tolerance, or a loaded cluster
/// would take every hit for a tie.
#[derive(Debug, Clone, Copy)]
pub struct Fairest {
    /// 0 to 1, of the prefill at the cheapest.
    pub share: f64,
    /// Milliseconds.
    pub ms: f64,
}

impl Default for Fairest {
    fn default() -> Self {
        Self { share: 0.05, ms: 0.5 }
    }
}

impl Picker for Fairest {
    fn pick(&mut self, question: &Question<'_>, slots: &[Slot], costs: &[f64]) -> (Slot, usize) {
        let cheapest = (0..slots.len()).min_by(|a, b| costs[*a].total_cmp(&costs[*b]));
        let Some(cheapest) = cheapest else { return (0, 0) };
        let slot = slots[cheapest];
        let prefill = f64::from(question.missed_tokens(slot)) * question.fleet.rates[slot].prefill_ms_per_token;
        let limit = costs[cheapest] + self.ms.max(prefill * self.share);
        pick_among(slots, costs, limit, |slot| question.fleet.chosen[slot])
    }
}

/// Two drawn at random, the cheaper of them: what many deciders that know little of each other should do.
#[derive(Debug, Clone, Copy, Default)]
pub struct TwoDraws;

impl Picker for TwoDraws {
    fn pick(&mut self, question: &Question<'_>, slots: &[Slot], costs: &[f64]) -> (Slot, usize) {
        let count = slots.len().max(1) as u64;
        let one = (mix(question.draw, 1) % count) as usize;
        let step = 1 + mix(question.draw, 2) % (count - 1).max(1);
        let two = ((one as u64 + step) % count) as usize;
        let chosen = if costs[two] < costs[one] { two } else { one };
        (slots.get(chosen).copied().unwrap_or_default(), slots.len().min(2))
    }
}

fn pick_among(slots: &[Slot], costs: &[f64], limit: f64, rank: impl Fn(Slot) -> u64) -> (Slot, usize) {
    let near = || slots.iter().zip(costs).filter(|(_, cost)| **cost <= limit).map(|(slot, _)| *slot);
    (near().min_by_key(|slot| (rank(*slot), *slot)).unwrap_or_default(), near().count())
}
