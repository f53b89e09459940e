//! Who may not have a request.
//!
//! The first six stand in every policy: [`Excluded`], [`Pinned`], [`Selected`], [`Revised`], [`Adapted`], [`Tainted`]. The others are asked for in the
//! configuration. What depends on labels alone is judged once for each set of labels, not for each worker.

use super::{Filter, Params, PolicyError, Question};
use crate::route::{fleet::Slot, wishes::Selector};

/// Workers that refused or failed this request already.
#[derive(Debug, Clone, Copy, Default)]
pub struct Excluded;

impl Filter for Excluded {
    fn name(&self) -> &'static str {
        "excluded"
    }

    fn prepare(&mut self, question: &Question<'_>) -> bool {
        !question.ask.exclude.is_empty() || question.ask.leaves.is_some()
    }

    fn keeps(&self, question: &Question<'_>, slot: Slot) -> bool {
        let barred = |worker| question.ask.exclude.contains(worker) || question.ask.leaves == Some(worker);
        question.fleet.life(slot).is_some_and(|(worker, _)| !barred(worker))
    }
}

/// All but the worker that the request names, when it names one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pinned {
    slot: Option<Slot>,
}

impl Filter for Pinned {
    fn name(&self) -> &'static str {
        "pinned"
    }

    fn prepare(&mut self, question: &Question<'_>) -> bool {
        let Some(worker) = question.ask.wishes.and_then(|wishes| wishes.worker.as_ref()) else { return false };
        self.slot = question.fleet.slot(worker);
        true
    }

    fn keeps(&self, _question: &Question<'_>, slot: Slot) -> bool {
        self.slot == Some(slot)
    }
}

/// Workers whose labels do not fit the request's own selector, when it brings one.
#[derive(Debug, Clone, Default)]
pub struct Selected {
    fits: Vec<bool>,
}

impl Filter for Selected {
    fn name(&self) -> &'static str {
        "selected"
    }

    fn prepare(&mut self, question: &Question<'_>) -> bool {
        let Some(text) = question.ask.wishes.map(|wishes| &wishes.select).filter(|text| !text.is_empty()) else {
            return false;
        };
        // One that cannot be read fits nobody: the gateway refuses it, other programs may not.
        let selector = Selector::parse(text);
        self.fits.clear();
        let fits = question.fleet.label_sets().map(|set| selector.as_ref().is_ok_and(|one| one.fits(set)));
        self.fits.extend(fits);
        true
    }

    fn keeps(&self, question: &Question<'_>, slot: Slot) -> bool {
        self.fits.get(question.fleet.label_set(slot)).copied().unwrap_or(false)
    }
}

/// Workers of another revision of the model than the request asks for: an answer that has begun goes on with the weights that
/// began it.
#[derive(Debug, Clone, Default)]
pub struct Revised {
    fits: Vec<bool>,
}

impl Filter for Revised {
    fn name(&self) -> &'static str {
        "revised"
    }

    fn prepare(&mut self, question: &Question<'_>) -> bool {
        let Some(wishes) = question.ask.wishes.filter(|wishes| wishes.revision.is_some()) else { return false };
        self.fits.clear();
        self.fits.extend(question.fleet.label_sets().map(|set| wishes.revised(set)));
        self.fits.contains(&false)
    }

    fn keeps(&self, question: &Question<'_>, slot: Slot) -> bool {
        self.fits.get(question.fleet.label_set(slot)).copied().unwrap_or(false)
    }
}

/// Workers that lack the LoRA adapter that the request asks for.
#[derive(Debug, Clone, Default)]
pub struct Adapted {
    fits: Vec<bool>,
}

impl Filter for Adapted {
    fn name(&self) -> &'static str {
        "adapted"
    }

    fn prepare(&mut self, question: &Question<'_>) -> bool {
        let Some(wishes) = question.ask.wishes.filter(|wishes| wishes.adapter.is_some()) else { return false };
        self.fits.clear();
        self.fits.extend(question.fleet.label_sets().map(|set| wishes.adapted(set)));
        self.fits.contains(&false)
    }

    fn keeps(&self, question: &Question<'_>, slot: Slot) -> bool {
        self.fits.get(question.fleet.label_set(slot)).copied().unwrap_or(false)
    }
}

/// Workers with a taint that the request does not tolerate: labels that begin with `taint.`.
#[derive(Debug, Clone, Default)]
pub struct Tainted {
    borne: Vec<bool>,
}

impl Filter for Tainted {
    fn name(&self) -> &'static str {
        "tainted"
    }

    fn prepare(&mut self, question: &Question<'_>) -> bool {
        if !question.fleet.tainted() {
            return false;
        }
        let wishes = question.ask.wishes.cloned().unwrap_or_default();
        self.borne.clear();
        self.borne.extend(question.fleet.label_sets().map(|set| wishes.tolerates(set)));
        self.borne.contains(&false)
    }

    fn keeps(&self, question: &Question<'_>, slot: Slot) -> bool {
        self.borne.get(question.fleet.label_set(slot)).copied().unwrap_or(false)
    }
}

/// `{ name = "labels", need = "gpu=h200,!spot" }`: workers whose labels do not fit the policy's selector.
#[derive(Debug, Clone)]
pub struct Needed {
    selector: Selector,
    prefer: bool,
    fits: Vec<bool>,
}

impl Needed {
    pub(super) fn make(params: &mut Params) -> Result<Self, PolicyError> {
        let need =
            params.text("need")?.ok_or_else(|| params.error("need", "is missing; write need = \"gpu,!spot\""))?;
        let selector = Selector::parse(&need).map_err(|reason| params.error("need", reason))?;
        Ok(Self { selector, prefer: params.truth("prefer")?, fits: Vec::new() })
    }
}

impl Filter for Needed {
    fn name(&self) -> &'static str {
        "labels"
    }

    fn prepare(&mut self, question: &Question<'_>) -> bool {
        self.fits.clear();
        self.fits.extend(question.fleet.label_sets().map(|set| self.selector.fits(set)));
        self.fits.contains(&false)
    }

    fn keeps(&self, question: &Question<'_>, slot: Slot) -> bool {
        self.fits.get(question.fleet.label_set(slot)).copied().unwrap_or(false)
    }

    fn yields(&self) -> bool {
        self.prefer
    }
}

/// `{ name = "topology", label = "zone", prefer = true }`: workers elsewhere than where the request came in, by a label that
/// both nodes carry. A request from a node without the label may go anywhere.
#[derive(Debug, Clone)]
pub struct Topology {
    label: String,
    prefer: bool,
    near: Vec<bool>,
}

impl Topology {
    pub(super) fn make(params: &mut Params) -> Result<Self, PolicyError> {
        let label = params.text("label")?.unwrap_or_else(|| "zone".to_owned());
        Ok(Self { label, prefer: params.truth("prefer")?, near: Vec::new() })
    }
}

impl Filter for Topology {
    fn name(&self) -> &'static str {
        "topology"
    }

    fn prepare(&mut self, question: &Question<'_>) -> bool {
        near(question, &self.label, &mut self.near)
    }

    fn keeps(&self, question: &Question<'_>, slot: Slot) -> bool {
        self.near.get(question.fleet.label_set(slot)).copied().unwrap_or(false)
    }

    fn yields(&self) -> bool {
        self.prefer
    }
}

/// For each set of labels, whether it is where the request came in. False when that is not known or everywhere.
pub(super) fn near(question: &Question<'_>, label: &str, near: &mut Vec<bool>) -> bool {
    let Some(here) = question.ask.origin.and_then(|labels| labels.get(label)) else { return false };
    near.clear();
    near.extend(question.fleet.label_sets().map(|set| set.get(label) == Some(here)));
    near.contains(&false)
}
