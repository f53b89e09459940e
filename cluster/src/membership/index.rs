//! What is known of each member, found by name in constant time: which life, which state, whether news is news.
//!
//! Called by the driver before it lets foca see anything, because foca searches its list from the start for each
//! update. Keeps the digest by which two nodes see whether they agree. Pure. Bounds: one entry of
//! 16 bytes for each member that foca knows, down ones included.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use foca::{Member, State};
use starling_ids::Incarnation;

use super::{Identity, identity};

/// Into how many parts the members are divided, by name, for the exchange of states.
///
/// 64: an offer is then some hundred bytes, and one difference among 10,000 members costs about 160 members.
pub(super) const BUCKETS: usize = 64;
/// Generations are kept in 30 bits beside the state; a node would have to die and return 10^9 times in one life.
pub(super) const GENERATION_MAX: u32 = (1 << 30) - 1;

/// What is known of one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Known {
    incarnation: u64,
    /// Generation in the upper 30 bits, state in the lower two.
    packed: u32,
    /// How often it has refuted a suspicion in this generation.
    pub(super) swim: u16,
    /// A hash of its address, to notice two nodes of one name in one life.
    place: u16,
}

impl Known {
    fn new(member: &Member<Identity>) -> Self {
        let id = member.id();
        let state = match member.state() {
            State::Alive => 0,
            State::Suspect => 1,
            State::Down => 2,
        };
        let packed = id.generation.min(GENERATION_MAX) << 2 | state;
        Self { incarnation: id.incarnation.0, packed, swim: member.incarnation(), place: place(id) }
    }

    pub(super) fn incarnation(&self) -> Incarnation {
        Incarnation(self.incarnation)
    }

    pub(super) fn state(&self) -> State {
        match self.packed & 3 {
            0 => State::Alive,
            1 => State::Suspect,
            _ => State::Down,
        }
    }

    pub(super) fn is_active(&self) -> bool {
        self.packed & 3 != 2
    }

    fn life(&self) -> (u64, u32) {
        (self.incarnation, self.packed >> 2)
    }

    /// Whether `id` is the identity known, but for one address in 65,536.
    pub(super) fn is(&self, id: &Identity) -> bool {
        self.life() == life(id) && self.place == place(id)
    }

    /// What two nodes compare: also the place, or two that hold different processes for one name would never find out. A
    /// suspicion is refuted within seconds, so it makes no difference.
    fn digest(&self, key: u64) -> u64 {
        let (incarnation, generation) = self.life();
        mix(mix(mix(key, incarnation), u64::from(generation)), u64::from(self.swim) << 16 | u64::from(self.place))
    }

    fn print(&self, key: u64) -> u64 {
        mix(key, self.incarnation)
    }
}

/// What an update is against what is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It changes what is known.
    News,
    /// It is known already, or of an earlier life.
    Old,
    /// Another address claims the name in the same life: only the addresses decide.
    Contest,
}

/// All members that foca knows, but without their names and addresses.
#[derive(Debug)]
pub(super) struct Index {
    known: HashMap<u64, Known, BuildHasherDefault<Keyed>>,
    active: usize,
    buckets: [u64; BUCKETS],
    sizes: [u32; BUCKETS],
    print: u64,
}

impl Default for Index {
    fn default() -> Self {
        Self { known: HashMap::default(), active: 0, buckets: [0; BUCKETS], sizes: [0; BUCKETS], print: 0 }
    }
}

impl Index {
    pub(super) fn get(&self, key: u64) -> Option<Known> {
        self.known.get(&key).copied()
    }

    /// Whether this very identity is known and not down.
    pub(super) fn is_active(&self, id: &Identity) -> bool {
        self.get(id.key()).is_some_and(|known| known.is(id) && known.is_active())
    }

    /// How many are not down.
    pub(super) fn active(&self) -> usize {
        self.active
    }

    /// The order of preference of SWIM, and before it that of lives of one name.
    pub(super) fn judge(&self, update: &Member<Identity>) -> Verdict {
        let Some(known) = self.get(update.id().key()) else { return Verdict::News };
        let news = if known.is(update.id()) {
            let later = update.incarnation() > known.swim;
            match (known.state(), update.state()) {
                (State::Down, _) => false,
                (_, State::Down) => true,
                (State::Alive, State::Suspect) => update.incarnation() >= known.swim,
                _ => later,
            }
        } else if known.life() == life(update.id()) {
            return Verdict::Contest;
        } else {
            life(update.id()) > known.life()
        };
        if news { Verdict::News } else { Verdict::Old }
    }

    pub(super) fn set(&mut self, member: &Member<Identity>) {
        let (key, new) = (member.id().key(), Known::new(member));
        let old = self.known.insert(key, new);
        self.count(key, old, Some(new));
    }

    pub(super) fn remove(&mut self, key: u64) {
        let old = self.known.remove(&key);
        self.count(key, old, None);
    }

    fn count(&mut self, key: u64, old: Option<Known>, new: Option<Known>) {
        let bucket = bucket(key);
        if let Some(old) = old.filter(Known::is_active) {
            self.active -= 1;
            self.sizes[bucket] -= 1;
            self.buckets[bucket] = self.buckets[bucket].wrapping_sub(old.digest(key));
            self.print = self.print.wrapping_sub(old.print(key));
        }
        if let Some(new) = new.filter(Known::is_active) {
            self.active += 1;
            self.sizes[bucket] += 1;
            self.buckets[bucket] = self.buckets[bucket].wrapping_add(new.digest(key));
            self.print = self.print.wrapping_add(new.print(key));
        }
    }

    /// Digest and size of one bucket, with `own` among its members.
    pub(super) fn bucket(&self, at: usize, own: &Member<Identity>) -> (u32, usize) {
        let key = own.id().key();
        let (mut digest, mut size) = (self.buckets[at], self.sizes[at] as usize);
        if bucket(key) == at {
            digest = digest.wrapping_add(Known::new(own).digest(key));
            size += 1;
        }
        // 32 bits: a difference goes unseen once in 4 * 10^9 exchanges, and the next one sees it.
        ((digest >> 32) as u32, size)
    }

    /// A number that nodes share when they know the same members in the same lives, `own` among them.
    pub(super) fn fingerprint(&self, own: &Identity) -> u64 {
        self.print.wrapping_add(mix(own.key(), own.incarnation.0))
    }
}

/// The part that a name belongs to.
pub(super) fn bucket(key: u64) -> usize {
    (key >> 32) as usize % BUCKETS
}

fn life(id: &Identity) -> (u64, u32) {
    (id.incarnation.0, id.generation.min(GENERATION_MAX))
}

fn place(id: &Identity) -> u16 {
    identity::place(id.address()) as u16
}

/// Mixes two numbers so that sums of results tell sets apart (the finalizer of SplitMix64).
fn mix(one: u64, two: u64) -> u64 {
    let mut mixed = one.rotate_left(23).wrapping_add(two).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Keys are hashes already.
#[derive(Debug, Default)]
pub(super) struct Keyed(u64);

impl Hasher for Keyed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;
    use starling_ids::NodeId;

    use super::*;

    fn id(name: u8, port: u16, boot: u64, generation: u32) -> Identity {
        let node = NodeId::new(&format!("n{name}")).expect("name");
        Identity::new(node, SocketAddr::from(([10, 0, 0, 1], port)), Incarnation(boot)).in_generation(generation)
    }

    fn state(number: u8) -> State {
        [State::Alive, State::Suspect, State::Down][usize::from(number % 3)]
    }

    #[test]
    fn an_entry_is_small() {
        assert_eq!(size_of::<Known>(), 16);
    }

    #[test]
    fn two_nodes_that_know_each_other_have_one_digest() {
        let (a, b) = (Member::alive(id(1, 1, 1, 0)), Member::alive(id(2, 2, 1, 0)));
        let (mut of_a, mut of_b) = (Index::default(), Index::default());
        of_a.set(&b);
        of_b.set(&a);
        for at in 0..BUCKETS {
            assert_eq!(of_a.bucket(at, &a), of_b.bucket(at, &b));
        }
        assert_eq!(of_a.fingerprint(a.id()), of_b.fingerprint(b.id()));
        of_b.set(&Member::new(a.id().clone(), 1, State::Alive));
        assert!((0..BUCKETS).any(|at| of_a.bucket(at, &a) != of_b.bucket(at, &b)), "a refutation is a difference");
    }

    proptest! {
        /// What the index calls news is what foca takes, and the digest is that of the set, whatever the order.
        #[test]
        fn the_index_agrees_with_foca_and_forgets_nothing(
            updates in proptest::collection::vec((0..4u8, 1..3u16, 0..2u64, 0..2u32, 0..3u16, 0..3u8), 1..60),
        ) {
            let own = id(9, 9, 0, 0);
            let config = crate::membership::sizing::config(0);
            let rng = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(1);
            let mut foca = foca::Foca::new(own.clone(), config, rng, foca::PostcardCodec);
            let mut index = Index::default();
            for (name, port, boot, generation, swim, number) in updates {
                let update = Member::new(id(name, port, boot, generation), swim, state(number));
                let held = foca.iter_membership_state().find(|m| m.id().key() == update.id().key()).cloned();
                let news = match index.judge(&update) {
                    Verdict::News => true,
                    Verdict::Old => false,
                    Verdict::Contest => held.as_ref().is_some_and(|held| update.id().beats(held.id())),
                };
                foca.apply_many(std::iter::once(update.clone()), false, foca::AccumulatingRuntime::new()).expect("applies");
                let holds = foca.iter_membership_state().find(|m| m.id().key() == update.id().key()).cloned();
                prop_assert_eq!(news, held != holds, "{:?} on {:?}", update, held);
                if news {
                    index.set(&update);
                }
            }
            let mut fresh = Index::default();
            foca.iter_membership_state().for_each(|member| fresh.set(member));
            prop_assert_eq!(index.buckets, fresh.buckets);
            prop_assert_eq!((index.print, index.active()), (fresh.print, foca.num_members()));
        }
    }
}
