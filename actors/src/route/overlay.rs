//! What workers will hold before their events say so: the prompts of requests that were given to them and still run.
//!
//! Siblings arrive together (one conversation's branches, one document asked about many times), and the second comes before
//! the first has told of a block. Kept by [`super::desk`] from a reservation to its release: until then the blocks are being
//! computed or pinned. A worker computes prompts one after the other, but for those that end and begin in one step: the last
//! step of a prompt that is not computed yet is not promised. Nor are blocks that come from elsewhere: nobody waits for those.
//! Read at a decision, and only beside what the prefix index says.
//! Pure. Bounds: the newest [`SIBLINGS_MAX`] of those that begin alike, [`ROOTS_MAX`] beginnings; the rest is left to the events.

use std::collections::{HashMap, VecDeque};

use starling_ids::BlockHash;

use super::{desk::Ticket, fleet::Slot};

/// Requests remembered that begin with the same block.
pub(super) const SIBLINGS_MAX: usize = 32;
/// First blocks remembered.
pub(super) const ROOTS_MAX: usize = 8_192;

#[derive(Debug)]
struct Expected {
    ticket: Ticket,
    slot: Slot,
    chain: Box<[BlockHash]>,
    /// Its first token came: all of it is there.
    computed: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    roots: HashMap<BlockHash, VecDeque<Expected>>,
    /// Where a ticket's entry is, unless it made way.
    root_of: HashMap<Ticket, BlockHash>,
}

impl Overlay {
    /// A worker was given a prompt.
    pub(super) fn expect(&mut self, ticket: Ticket, slot: Slot, chain: &[BlockHash]) {
        let Some(root) = chain.first().copied() else { return };
        if self.roots.len() >= ROOTS_MAX && !self.roots.contains_key(&root) {
            return;
        }
        let siblings = self.roots.entry(root).or_default();
        if siblings.len() == SIBLINGS_MAX
            && let Some(oldest) = siblings.pop_front()
        {
            self.root_of.remove(&oldest.ticket);
        }
        siblings.push_back(Expected { ticket, slot, chain: chain.into(), computed: false });
        self.root_of.insert(ticket, root);
    }

    /// All of a prompt is computed.
    pub(super) fn computed(&mut self, ticket: Ticket) {
        let siblings = self.root_of.get(&ticket).and_then(|root| self.roots.get_mut(root));
        if let Some(expected) = siblings.and_then(|all| all.iter_mut().find(|expected| expected.ticket == ticket)) {
            expected.computed = true;
        }
    }

    /// Its reservation is over.
    pub(super) fn forget(&mut self, ticket: Ticket) {
        let Some(root) = self.root_of.remove(&ticket) else { return };
        if let Some(siblings) = self.roots.get_mut(&root) {
            siblings.retain(|expected| expected.ticket != ticket);
            if siblings.is_empty() {
                self.roots.remove(&root);
            }
        }
    }

    /// Who will hold leading blocks of a chain, and how many; a worker may come more than once. `step` tells how many blocks it
    /// computes at once.
    pub(super) fn find(&self, chain: &[BlockHash], step: impl Fn(Slot) -> usize, mut found: impl FnMut(Slot, u32)) {
        let Some(siblings) = chain.first().and_then(|root| self.roots.get(root)) else { return };
        for expected in siblings {
            let mut depth = common(&expected.chain, chain);
            if !expected.computed {
                depth = depth.min(expected.chain.len().saturating_sub(step(expected.slot)));
            }
            found(expected.slot, u32::try_from(depth).unwrap_or(u32::MAX));
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.root_of.len()
    }
}

/// Leading blocks that two chains share. A block's hash stands for all before it, so the first difference is found by halving.
fn common(one: &[BlockHash], other: &[BlockHash]) -> usize {
    let (mut same, mut different) = (0, one.len().min(other.len()) + 1);
    while same + 1 < different {
        let middle = same.midpoint(different);
        if one[middle - 1] == other[middle - 1] {
            same = middle;
        } else {
            different = middle;
        }
    }
    same
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use starling_ids::{Incarnation, NodeId, WorkerId};

    use super::*;
    use crate::route::{
        desk::{Ask, Desk},
        fleet::{Heard, Places, Standing},
        policy::PolicyConfig,
        split::KvLink,
    };

    fn found(overlay: &Overlay, chain: &[BlockHash]) -> Vec<(Slot, u32)> {
        let mut all = Vec::new();
        overlay.find(chain, |_| 4, |slot, depth| all.push((slot, depth)));
        all
    }

    #[test]
    fn a_sibling_is_known_from_its_reservation_to_its_end() {
        let mut overlay = Overlay::default();
        let chain: Vec<BlockHash> = (1..10).map(BlockHash).collect();
        let branch: Vec<BlockHash> = (1..6).chain(20..30).map(BlockHash).collect();
        overlay.expect(Ticket(1), 3, &chain);
        assert_eq!(found(&overlay, &branch), [(3, 5)]);
        assert_eq!(found(&overlay, &branch[..2]), [(3, 2)]);
        assert_eq!(found(&overlay, &chain), [(3, 5)], "its last step is its own");
        overlay.computed(Ticket(1));
        overlay.computed(Ticket(5));
        assert_eq!(found(&overlay, &chain), [(3, 9)]);
        assert!(found(&overlay, &chain[1..]).is_empty() && found(&overlay, &[]).is_empty());
        overlay.expect(Ticket(2), 1, &[]);
        overlay.forget(Ticket(1));
        overlay.forget(Ticket(1));
        assert!(found(&overlay, &chain).is_empty() && overlay.len() == 0);
    }

    #[test]
    fn the_oldest_of_many_siblings_make_way() {
        let mut overlay = Overlay::default();
        let chain = [BlockHash(7), BlockHash(8)];
        (0..100).for_each(|at| overlay.expect(Ticket(at), at as usize, &chain));
        assert_eq!((overlay.len(), found(&overlay, &chain).len()), (SIBLINGS_MAX, SIBLINGS_MAX));
        (0..100).for_each(|at| overlay.forget(Ticket(at)));
        assert!(overlay.roots.is_empty() && overlay.len() == 0);
    }

    /// A desk of the default policy with two equal workers that can give each other blocks.
    fn desk() -> Desk {
        let policy = PolicyConfig::default().build().expect("composed");
        let mut desk = Desk::new(policy, 1);
        let link = KvLink { block_bytes: 1_000, bytes_per_ms: 1e6 };
        for index in 0..2 {
            let places = Places { sequences: 16, waiting: 64, step_tokens: 512, blocks: 10_000, ..Places::default() };
            desk.seat(&worker(index), Incarnation(1), places, Standing::Sound);
            desk.hear(&worker(index), Incarnation(1), Heard { link, ..Heard::default() });
        }
        desk
    }

    fn worker(index: u16) -> WorkerId {
        WorkerId { node: NodeId::new("n").expect("name"), index }
    }

    #[test]
    fn siblings_count_on_what_runs_and_nothing_is_pulled_from_there() {
        let mut desk = desk();
        let chain: Vec<BlockHash> = (1..200).map(BlockHash).collect();
        let ask = Ask { prompt_tokens: 3_200, hashes: &chain, ..Ask::default() };
        let first = desk.decide(&ask, &[], Duration::ZERO).expect("somebody");
        let other = [worker(1 - first.worker.index)];
        // All but a step of 512 tokens; all, when the first token has come.
        let second = desk.decide(&Ask { exclude: &other, ..ask }, &[], Duration::ZERO).expect("somebody");
        assert_eq!((&second.worker, second.hit_blocks), (&first.worker, 199 - 32));
        desk.prefilled(first.ticket);
        let third = desk.decide(&Ask { exclude: &other, ..ask }, &[], Duration::ZERO).expect("somebody");
        assert_eq!((&third.worker, third.hit_blocks), (&first.worker, 199));
        // Blocks that no event has told of are not sent for.
        let excluded = [first.worker.clone()];
        let elsewhere = desk.decide(&Ask { exclude: &excluded, ..ask }, &[], Duration::ZERO).expect("somebody");
        assert_eq!((elsewhere.hit_blocks, elsewhere.source), (0, None));
        for decision in [first.ticket, second.ticket, third.ticket, elsewhere.ticket] {
            assert!(desk.release(decision));
        }
        let later = desk.decide(&ask, &[], Duration::ZERO).expect("somebody");
        assert_eq!(later.hit_blocks, 0, "events say the rest");
        // A worker that leaves takes what was expected of it along.
        desk.vacate(&later.worker);
        let last = desk.decide(&ask, &[], Duration::ZERO).expect("somebody");
        assert_eq!((last.hit_blocks, last.worker == later.worker), (0, false));
    }

    proptest! {
        #[test]
        fn the_common_beginning_is_found(shared in 0usize..50, one in 0usize..20, other in 0usize..20) {
            let chain = |own: u128, len: usize| -> Vec<BlockHash> {
                (0..shared as u128).chain((0..len as u128).map(|at| own + at)).map(BlockHash).collect()
            };
            prop_assert_eq!(common(&chain(1_000, one), &chain(2_000, other)), shared);
        }
    }
}
