//! From costs to one worker.

use super::{Params, Picker, PolicyError, Question, mix};
use crate::route::fleet::Slot;

/// Costs that are looked at together.
pub(super) const FEW: usize = 16;

/// The lowest cost; a draw among equals.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lowest;

impl Picker for Lowest {
    fn pick(&mut self, question: &Question<'_>, slots: &[Slot], costs: &[f64]) -> (Slot, usize) {
        let best = lowest(costs).map_or(f64::MAX, |at| costs[at]);
        pick_among(slots, costs, best, |at| mix(question.draw, at as u64))
    }
}

/// The lowest cost within a tolerance, and among those the one that was given the least work of late: paced traffic without hits
/// goes round instead of always to the first worker, and one that has long conversations gets fewer new ones.
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
        let Some(cheapest) = lowest(costs) else { return (slots.first().copied().unwrap_or_default(), slots.len()) };
        let slot = slots[cheapest];
        let prefill = f64::from(question.missed_tokens(slot)) * question.fleet.rates[slot].prefill_ms_per_token;
        let limit = costs[cheapest] + self.ms.max(prefill * self.share);
        pick_among(slots, costs, limit, |slot| question.fleet.given(slot))
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

/// The index of the lowest cost, the first of several. A cost that is no number is not looked at; `None` when none is one.
pub(super) fn lowest(costs: &[f64]) -> Option<usize> {
    // First the value, several at a time, then its place.
    let least = |a: f64, b: &f64| if *b < a { *b } else { a };
    let mut lanes = [f64::INFINITY; 8];
    let (eights, rest) = costs.as_chunks::<8>();
    for eight in eights {
        for (lane, cost) in lanes.iter_mut().zip(eight) {
            *lane = least(*lane, cost);
        }
    }
    let low = lanes.iter().chain(rest).fold(f64::INFINITY, least);
    let there = |costs: &[f64]| costs.iter().filter(|cost| **cost <= low).count() > 0;
    let at = costs.chunks(FEW).position(there)? * FEW;
    costs[at..].iter().position(|cost| *cost <= low).map(|more| at + more)
}

/// The one of lowest rank among those whose cost is within the limit, and how many those are.
pub(super) fn pick_among<R: Ord>(slots: &[Slot], costs: &[f64], limit: f64, rank: impl Fn(Slot) -> R) -> (Slot, usize) {
    let mut best: Option<(R, Slot)> = None;
    let mut count = 0;
    for (slots, costs) in slots.chunks(FEW).zip(costs.chunks(FEW)) {
        // Hardly any are near: most are passed over together.
        if costs.iter().filter(|cost| **cost <= limit).count() == 0 {
            continue;
        }
        for (slot, _) in slots.iter().zip(costs).filter(|(_, cost)| **cost <= limit) {
            let one = (rank(*slot), *slot);
            count += 1;
            if best.as_ref().is_none_or(|best| one < *best) {
                best = Some(one);
            }
        }
    }
    best.map_or_else(|| (slots.first().copied().unwrap_or_default(), slots.len()), |(_, slot)| (slot, count))
}

/// `{ name = "softmin", temperature = 0.1 }`: drawn, cheaper ones more often: each with a probability that falls by a factor of
/// e with every `temperature` of the way from the lowest cost to the highest. At 0 it is [`Lowest`].
#[derive(Debug, Clone, Copy)]
pub struct Softmin {
    temperature: f64,
}

impl Softmin {
    pub(super) fn make(params: &mut Params) -> Result<Self, PolicyError> {
        Ok(Self { temperature: params.number("temperature", 0.0..=100.0, 0.1)? })
    }
}

impl Picker for Softmin {
    fn pick(&mut self, question: &Question<'_>, slots: &[Slot], costs: &[f64]) -> (Slot, usize) {
        let bounds = |(low, high): (f64, f64), cost: &f64| (low.min(*cost), high.max(*cost));
        let (low, high) = costs.iter().fold((f64::INFINITY, f64::NEG_INFINITY), bounds);
        let scale = (high - low) * self.temperature;
        if scale.is_nan() || scale <= 0.0 {
            return Lowest.pick(question, slots, costs);
        }
        let weight = |cost: &f64| ((low - cost) / scale).exp();
        let total: f64 = costs.iter().map(weight).sum();
        let mut left = (mix(question.draw, 3) >> 11) as f64 / (1u64 << 53) as f64 * total;
        let drawn = costs.iter().position(|cost| {
            left -= weight(cost);
            left < 0.0
        });
        // Sums of floats may end a hair short: then it is the last one.
        let slot = drawn.or(slots.len().checked_sub(1)).and_then(|at| slots.get(at));
        (slot.copied().unwrap_or_default(), slots.len())
    }
}
