//! Small parts: what is loaded, what is missing, what is far; in turn, at random.

use super::{Params, Picker, PolicyError, Question, Scorer, filters, mix};
use crate::route::fleet::Slot;

/// `load`: sequences on a worker.
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

/// `prefix`: the share of the prompt that a worker would have to compute, 0 to 1.
#[derive(Debug, Clone, Copy, Default)]
pub struct Missing;

impl Scorer for Missing {
    fn name(&self) -> &'static str {
        "prefix"
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        f64::from(question.missed_tokens(slot)) / f64::from(question.ask.prompt_tokens.max(1))
    }
}

/// `fill`: sequences on a worker for each place in its batch; 1 is full. 0 where the places are not known.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fill;

impl Scorer for Fill {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        match question.fleet.places[slot].sequences {
            0 => 0.0,
            places => f64::from(question.fleet.in_flight(slot)) / f64::from(places),
        }
    }
}

/// `kv`: the share of a worker's KV blocks that live requests hold, 0 to 1. 0 where the blocks are not known.
#[derive(Debug, Clone, Copy, Default)]
pub struct KvUse;

impl Scorer for KvUse {
    fn name(&self) -> &'static str {
        "kv"
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        match question.fleet.places[slot].blocks {
            0 => 0.0,
            blocks => question.fleet.blocks(slot) as f64 / f64::from(blocks),
        }
    }
}

/// `topology`: 1 on a worker elsewhere than where the request came in, 0 near it. Its weight is what the way costs.
#[derive(Debug, Clone)]
pub struct Far {
    label: String,
    near: Vec<bool>,
}

impl Far {
    pub(super) fn make(params: &mut Params) -> Result<Self, PolicyError> {
        let label = params.text("label")?.unwrap_or_else(|| "zone".to_owned());
        Ok(Self { label, near: Vec::new() })
    }
}

impl Scorer for Far {
    fn name(&self) -> &'static str {
        "topology"
    }

    fn prepare(&mut self, question: &Question<'_>) {
        if !filters::near(question, &self.label, &mut self.near) {
            self.near.clear();
        }
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        let near = self.near.get(question.fleet.label_set(slot)).copied().unwrap_or(true);
        if near { 0.0 } else { 1.0 }
    }
}

/// `turns`: the next one in turn.
#[derive(Debug, Clone, Copy, Default)]
pub struct Turns;

impl Picker for Turns {
    fn pick(&mut self, question: &Question<'_>, slots: &[Slot], _costs: &[f64]) -> (Slot, usize) {
        // The one chosen longest ago is the next in turn also when workers come and go.
        let oldest = slots.iter().min_by_key(|slot| (question.fleet.chosen[**slot], **slot));
        (oldest.copied().unwrap_or_default(), slots.len())
    }
}

/// `any`: any one.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnyOf;

impl Picker for AnyOf {
    fn pick(&mut self, question: &Question<'_>, slots: &[Slot], _costs: &[f64]) -> (Slot, usize) {
        let at = mix(question.draw, 1) % slots.len().max(1) as u64;
        (slots.get(at as usize).copied().unwrap_or_default(), slots.len())
    }
}
