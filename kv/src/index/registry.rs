//! Which lane stands for which rank of which worker's life.
//!
//! Called by the index, which holds its lock for the length of one look-up here.

use std::collections::HashMap;

use starling_ids::{Incarnation, WorkerId};

use super::{IndexError, place::Holder, shard::LANES};

/// Whose a lane is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    pub(super) rank: u16,
    generation: u32,
}

/// One worker's life.
#[derive(Debug)]
struct Known {
    incarnation: Incarnation,
    ranks: Vec<(u16, Holder)>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Registry {
    by_id: HashMap<WorkerId, Known>,
    /// By lane.
    names: Vec<Option<Name>>,
    /// Lanes in use, by shard.
    pub(super) used: Vec<usize>,
}

impl Registry {
    pub(super) fn workers(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn ids(&self) -> Vec<WorkerId> {
        self.by_id.keys().cloned().collect()
    }

    pub(super) fn incarnation(&self, id: &WorkerId) -> Option<Incarnation> {
        self.by_id.get(id).map(|known| known.incarnation)
    }

    /// The lanes of a worker; none for an unknown one.
    pub(super) fn ranks(&self, id: &WorkerId) -> &[(u16, Holder)] {
        self.by_id.get(id).map_or(&[], |known| &known.ranks)
    }

    /// The lane of a rank, if it has one, once the life has been found to be the present one.
    pub(super) fn find(&self, id: &WorkerId, given: Incarnation, rank: u16) -> Result<Option<Holder>, IndexError> {
        let known = self.by_id.get(id).ok_or_else(|| IndexError::UnknownWorker(id.clone()))?;
        let current = known.incarnation;
        match given.cmp(&current) {
            std::cmp::Ordering::Equal => Ok(known.ranks.iter().find(|(of, _)| *of == rank).map(|(_, holder)| *holder)),
            std::cmp::Ordering::Less => Err(IndexError::StaleIncarnation { worker: id.clone(), given, current }),
            std::cmp::Ordering::Greater => Err(IndexError::NewIncarnation { worker: id.clone(), given, current }),
        }
    }

    pub(super) fn add(&mut self, id: WorkerId, incarnation: Incarnation) {
        self.by_id.insert(id, Known { incarnation, ranks: Vec::new() });
    }

    /// A rank of a known worker has this lane from now on.
    pub(super) fn name(&mut self, id: &WorkerId, rank: u16, holder: Holder) {
        let Some(known) = self.by_id.get_mut(id) else { return };
        if let Some(at) = known.ranks.iter().position(|(of, _)| *of == rank) {
            let (_, old) = known.ranks.swap_remove(at);
            self.names[old.lane as usize] = None;
            self.used[old.lane as usize / LANES] -= 1;
        }
        known.ranks.push((rank, holder));
        let lane = holder.lane as usize;
        if self.names.len() <= lane {
            self.names.resize(lane + 1, None);
        }
        if self.used.len() <= lane / LANES {
            self.used.resize(lane / LANES + 1, 0);
        }
        let name = Name { worker: id.clone(), incarnation: known.incarnation, rank, generation: holder.generation };
        self.names[lane] = Some(name);
        self.used[lane / LANES] += 1;
    }

    /// Forgets a worker; the lanes it had, none when it was unknown.
    pub(super) fn remove(&mut self, id: &WorkerId) -> Option<Vec<Holder>> {
        let known = self.by_id.remove(id)?;
        let lanes: Vec<Holder> = known.ranks.into_iter().map(|(_, holder)| holder).collect();
        for holder in &lanes {
            self.names[holder.lane as usize] = None;
            self.used[holder.lane as usize / LANES] -= 1;
        }
        Some(lanes)
    }

    /// Whose a lane is, while it is in that use.
    pub(super) fn who(&self, holder: Holder) -> Option<&Name> {
        self.names.get(holder.lane as usize)?.as_ref().filter(|name| name.generation == holder.generation)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let known = std::mem::size_of::<(WorkerId, Known)>() + std::mem::size_of::<(u16, Holder)>();
        self.by_id.capacity() * known + self.names.capacity() * std::mem::size_of::<Option<Name>>()
    }
}
