//! To whom the driver announces itself without being asked: seeds that are no members, and members that are down.
//!
//! Called by each tick of the driver. Pure. Bounds: [`DOWN_AT_ONCE`] down members a round; every seed.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use rand::RngExt;

use super::Driver;
use crate::membership::{Identity, message::present};

/// Period of both announcements while this node knows nobody.
pub(super) const ALONE: Duration = Duration::from_secs(1);
/// Period of both in company. A seed that came back under another name does not know whom to ask: it is
/// found by this.
const IN_COMPANY: Duration = Duration::from_secs(5);
const DOWN_AT_ONCE: usize = 3;

impl Driver {
    pub(super) fn announce_when_due(&mut self) {
        let period = if self.index.active() == 0 { ALONE } else { IN_COMPANY };
        if self.now >= self.next_seeds {
            self.next_seeds = self.now + period;
            for seed in self.seeds_without_a_member() {
                self.announce(Identity::whoever(seed));
            }
        }
        if self.now >= self.next_down {
            self.next_down = self.now + period;
            for member in self.some_down() {
                self.announce(member);
            }
        }
    }

    /// Behind the address of a member stands that member: it needs no announcement.
    fn seeds_without_a_member(&self) -> Vec<SocketAddr> {
        let mut seeds: BTreeSet<SocketAddr> = self.seeds.iter().copied().collect();
        if !seeds.is_empty() {
            self.foca.iter_members().for_each(|member| {
                seeds.remove(&member.id().address());
            });
        }
        seeds.into_iter().collect()
    }

    fn announce(&mut self, to: Identity) {
        let outcome = self.foca.announce(to, &mut self.outbox);
        Self::note("announcement", outcome);
    }

    /// A few members that are down, drawn anew each time.
    fn some_down(&mut self) -> Vec<Identity> {
        let mut down: Vec<Identity> = self
            .foca
            .iter_membership_state()
            .filter(|member| !present(member.state()))
            .map(|member| member.id().clone())
            .collect();
        while down.len() > DOWN_AT_ONCE {
            down.swap_remove(self.rng.random_range(0..down.len()));
        }
        down
    }
}
