//! One desk a model, kept in step with the directory and with what the workers tell.
//!
//! Called by the router shard under its lock. Never: I/O, a clock. Bounds: one desk per model that has workers; one that
//! lost its last worker keeps its receipts until the model is forgotten by the directory.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use starling_ids::{Incarnation, ModelId, RequestId, WorkerId};

use super::{
    catalog::{Catalog, CatalogWorker},
    desk::{Desk, Ticket},
    fleet::{Heard, Places, Standing},
    policy::{PolicyConfig, PolicyError},
    queue::rooms::Rooms,
    rebalance::Shift,
    receipt::Receipt,
};
use crate::report::LoadReport;

/// See the module.
#[derive(Debug)]
pub struct Desks {
    policy: PolicyConfig,
    seed: u64,
    rooms: Option<Rooms>,
    desks: HashMap<ModelId, Desk>,
    model_of: HashMap<WorkerId, ModelId>,
    suspects: HashSet<WorkerId>,
    read: Option<Arc<Catalog>>,
}

impl Desks {
    /// Without a model. Two of different seeds break first ties differently.
    ///
    /// # Errors
    /// When the policy cannot be composed.
    pub fn new(policy: PolicyConfig, seed: u64) -> Result<Self, PolicyError> {
        policy.build()?;
        let (desks, model_of, suspects) = (HashMap::new(), HashMap::new(), HashSet::new());
        Ok(Self { policy, seed, rooms: None, desks, model_of, suspects, read: None })
    }

    /// Desks made from now on decide nothing while every worker of theirs is taken by these bounds.
    #[must_use]
    pub fn with_rooms(mut self, rooms: Rooms) -> Self {
        self.rooms = Some(rooms);
        self
    }

    /// The desk of a model.
    pub fn desk(&mut self, model: &ModelId) -> Option<&mut Desk> {
        self.desks.get_mut(model)
    }

    /// Running requests that should go on at another worker now: one of each model at most.
    pub fn rebalance(&mut self, now: Duration) -> Vec<(ModelId, Ticket, Shift)> {
        let one = |(model, desk): (&ModelId, &mut Desk)| {
            desk.rebalance(now).map(|(ticket, shift)| (model.clone(), ticket, shift))
        };
        self.desks.iter_mut().filter_map(one).collect()
    }

    /// Reservations held.
    #[must_use]
    pub fn reservations(&self) -> usize {
        self.desks.values().map(Desk::reservations).sum()
    }

    /// Workers whose breaker is not closed.
    #[must_use]
    pub fn cut_off(&self, now: Duration) -> usize {
        self.desks.values().map(|desk| desk.cut_off(now).count()).sum()
    }

    /// The last decisions about a request.
    #[must_use]
    pub fn explain(&self, request: RequestId) -> Vec<Receipt> {
        self.desks.values().flat_map(|desk| desk.explain(request)).collect()
    }

    /// The newest `count` decisions of all models, newest first, each with its chosen candidate alone.
    #[must_use]
    pub fn newest(&self, count: usize) -> Vec<(ModelId, Receipt)> {
        let of = |(model, desk): (&ModelId, &Desk)| desk.newest().take(count).map(|one| (model.clone(), one)).collect();
        let mut all: Vec<(ModelId, Receipt)> = self.desks.iter().flat_map::<Vec<_>, _>(of).collect();
        all.sort_by_key(|(_, receipt)| std::cmp::Reverse(receipt.at));
        all.truncate(count);
        all
    }

    /// Takes over the directory, if it changed.
    pub fn sync(&mut self, catalog: &Arc<Catalog>) {
        if self.read.as_ref().is_some_and(|read| Arc::ptr_eq(read, catalog)) {
            return;
        }
        self.read = Some(catalog.clone());
        self.suspects = catalog.workers().filter(|(_, worker)| worker.suspect).map(|(_, w)| w.id.clone()).collect();
        self.dismiss(catalog);
        for (model, served) in &catalog.models {
            let desk = match self.desks.get_mut(model) {
                Some(desk) => desk,
                None => {
                    // Composed once before, so it can be composed.
                    let Ok(policy) = self.policy.build() else { continue };
                    let mut desk = Desk::new(policy, self.seed);
                    if let Some(rooms) = self.rooms {
                        desk = desk.with_rooms(rooms);
                    }
                    self.desks.entry(model.clone()).or_insert(desk)
                }
            };
            for worker in &served.workers {
                let known = desk.fleet().slot(&worker.id).map(|slot| desk.fleet().standing[slot]);
                let standing = match (worker.suspect, known) {
                    (true, _) => Standing::Doubtful,
                    (false, Some(Standing::Doubtful)) => Standing::Doubtful,
                    (false, _) => Standing::Sound,
                };
                desk.seat(&worker.id, worker.incarnation, places(worker), standing);
                desk.set_labels(&worker.id, &worker.labels);
                self.model_of.insert(worker.id.clone(), model.clone());
            }
        }
    }

    /// Takes a worker's account.
    pub fn hear(&mut self, worker: &WorkerId, incarnation: Incarnation, at: Duration, report: &LoadReport) {
        let Some(desk) = self.model_of.get(worker).and_then(|model| self.desks.get_mut(model)) else { return };
        let heard = Heard {
            at,
            running: report.load.running,
            waiting: report.load.waiting,
            prefill_tokens: report.load.prefill_tokens,
            blocks_pinned: report.load.blocks_pinned,
            admitted: report.admitted,
            rates: report.rates,
            link: report.link,
            tiers: report.tiers,
        };
        desk.hear(worker, incarnation, heard);
    }

    /// Takes over whether a worker is heard and works.
    pub fn judge(&mut self, worker: &WorkerId, sound: bool) {
        let suspect = self.suspects.contains(worker);
        let standing = if sound && !suspect { Standing::Sound } else { Standing::Doubtful };
        if let Some(desk) = self.model_of.get(worker).and_then(|model| self.desks.get_mut(model)) {
            desk.set_standing(worker, standing);
        }
    }

    /// Takes out who is not in the directory any more, or serves another model.
    fn dismiss(&mut self, catalog: &Catalog) {
        let serves: HashMap<&WorkerId, &ModelId> = catalog
            .models
            .iter()
            .flat_map(|(model, served)| served.workers.iter().map(move |w| (&w.id, model)))
            .collect();
        let desks = &mut self.desks;
        self.model_of.retain(|worker, model| {
            let stays = serves.get(worker).is_some_and(|serving| *serving == model);
            if !stays && let Some(desk) = desks.get_mut(model) {
                desk.vacate(worker);
            }
            stays
        });
        self.desks.retain(|model, _| catalog.announced.contains(model) || catalog.models.contains_key(model));
    }
}

fn places(worker: &CatalogWorker) -> Places {
    Places {
        sequences: worker.limits.sequences_max,
        waiting: worker.limits.waiting_max,
        step_tokens: worker.limits.batch_tokens_max,
        blocks: worker.limits.kv_blocks,
        role: worker.role,
    }
}
