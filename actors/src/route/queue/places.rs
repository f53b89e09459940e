//! Whether there is a place for one more, and who has to make way for it.
//!
//! Called by [`super::Queue`] for each request that comes. Free places are for all; when there is none, the last of the lowest class
//! makes way for a higher one, and the last of the tenant that holds most, by its weight, for one that holds less. Pure.

use std::{collections::BTreeMap, sync::Arc};

use super::{Claim, Place, Queue, Reason};

/// What one tenant holds in all classes.
#[derive(Debug, Default)]
pub(super) struct Holding {
    /// Places by class.
    classes: BTreeMap<i32, usize>,
    pub(super) places: usize,
    weight: u32,
}

impl Holding {
    /// Places for its weight; the largest has least right to more.
    fn size(&self) -> u64 {
        self.places as u64 * 1_000 / u64::from(self.weight.max(1))
    }
}

impl<T> Queue<T> {
    /// Whether there is a place: free, or another's that has less right to it.
    pub(super) fn make_way(&self, claim: &Claim) -> Result<Option<Place>, Reason> {
        if claim.begun {
            return Ok(None);
        }
        let own = self.tenants.get(&claim.tenant);
        let mine = own.map_or(0, |holding| holding.places);
        if !claim.tenant.is_empty() && mine >= self.config.tenant_places {
            return Err(Reason::TenantShare);
        }
        if self.entries.len() < self.config.places {
            return Ok(None);
        }
        if let Some((class, lane)) = self.lanes.last_key_value()
            && *class > claim.priority
        {
            return lane.last().map(Some).ok_or(Reason::Full);
        }
        let Some((size, largest)) = self.sizes.last() else { return Err(Reason::Full) };
        let grown = (mine as u64 + 1) * 1_000 / u64::from(claim.weight.max(1));
        if *largest != claim.tenant && *size > grown {
            return self.last_of(largest, claim.priority).map(Some).ok_or(Reason::Full);
        }
        Err(if self.tenants.len() > 1 && *largest == claim.tenant { Reason::TenantShare } else { Reason::Full })
    }

    /// The last of a tenant in its lowest class, if that class is not above `priority`.
    fn last_of(&self, tenant: &Arc<str>, priority: i32) -> Option<Place> {
        let class = *self.tenants.get(tenant)?.classes.last_key_value()?.0;
        if class < priority {
            return None;
        }
        self.lanes.get(&class)?.last_of(tenant)
    }

    /// Keeps what each tenant holds. Those that had begun are not counted: they were let in before.
    pub(super) fn count(&mut self, claim: &Claim, comes: bool) {
        if claim.begun {
            return;
        }
        let holding = self.tenants.entry(claim.tenant.clone()).or_default();
        self.sizes.remove(&(holding.size(), claim.tenant.clone()));
        holding.weight = claim.weight;
        let of_class = holding.classes.entry(claim.priority).or_default();
        if comes {
            (*of_class, holding.places) = (*of_class + 1, holding.places + 1);
        } else {
            (*of_class, holding.places) = (of_class.saturating_sub(1), holding.places.saturating_sub(1));
        }
        if *of_class == 0 {
            holding.classes.remove(&claim.priority);
        }
        if holding.places == 0 {
            self.tenants.remove(&claim.tenant);
        } else {
            let size = holding.size();
            self.sizes.insert((size, claim.tenant.clone()));
        }
    }
}
