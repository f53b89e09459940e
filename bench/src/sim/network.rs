//! What happens to a packet between two nodes: lost, cut off, or delivered, and after how long.
//!
//! Called by the world for each datagram and each trip of a virtual TCP exchange. Pure: randomness is one seeded generator
//! that the world passes in. Bounds: [`SIDES`] groups of nodes, which can be cut off from each other in each direction.

use rand::{RngExt, rngs::StdRng};

use super::{MS, Micros};

/// Groups that a node can belong to. Nodes start in group 0.
pub(super) const SIDES: usize = 8;

/// How long a packet travels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Delay {
    /// Least.
    pub least: Micros,
    /// Most, for packets that meet no queue; all times between are equally likely.
    pub most: Micros,
    /// Share of the packets that meet a queue.
    pub tail_share: f64,
    /// Most that a queue adds.
    pub tail: Micros,
}

impl Default for Delay {
    /// A data centre: 0.2 to 0.8 ms, and one packet in a hundred up to 20 ms.
    fn default() -> Self {
        Self { least: 200, most: 800, tail_share: 0.01, tail: 20 * MS }
    }
}

impl Delay {
    fn draw(&self, rng: &mut StdRng) -> Micros {
        let base = rng.random_range(self.least..=self.most.max(self.least));
        if self.tail_share > 0.0 && rng.random::<f64>() < self.tail_share {
            return base + rng.random_range(0..=self.tail);
        }
        base
    }
}

/// The network between all nodes.
#[derive(Debug)]
pub struct Network {
    /// Share of the packets lost, 0 to 1.
    pub loss: f64,
    /// How long the others travel.
    pub delay: Delay,
    cut: [[bool; SIDES]; SIDES],
}

impl Network {
    pub(super) fn new(loss: f64, delay: Delay) -> Self {
        Self { loss, delay, cut: [[false; SIDES]; SIDES] }
    }

    /// From now on nothing sent by group `from` arrives at group `to`.
    pub fn cut(&mut self, from: usize, to: usize) {
        self.cut[from % SIDES][to % SIDES] = true;
    }

    /// Neither side hears the other.
    pub fn split(&mut self, one: usize, other: usize) {
        self.cut(one, other);
        self.cut(other, one);
    }

    /// All cuts are mended.
    pub fn heal(&mut self) {
        self.cut = [[false; SIDES]; SIDES];
    }

    /// Whether packets from group `from` arrive at group `to` at all.
    #[must_use]
    pub fn open(&self, from: usize, to: usize) -> bool {
        !self.cut[from % SIDES][to % SIDES]
    }

    /// Whether anything is cut.
    #[must_use]
    pub fn whole(&self) -> bool {
        self.cut.iter().flatten().all(|cut| !cut)
    }

    /// How long a datagram travels; `None` when it is lost.
    pub(super) fn datagram(&self, from: usize, to: usize, rng: &mut StdRng) -> Option<Micros> {
        // Drawn also for packets that are cut off, so that a cut changes nothing about the fate of the others.
        let lost = self.loss > 0.0 && rng.random::<f64>() < self.loss;
        let travel = self.delay.draw(rng);
        (!lost && self.open(from, to)).then_some(travel)
    }

    /// How long one trip within a TCP connection takes: what is lost is sent again after 200 ms, 400 ms and so on.
    /// `None` when that takes longer than `patience`, as it does across a cut.
    pub(super) fn segment(&self, from: usize, to: usize, patience: Micros, rng: &mut StdRng) -> Option<Micros> {
        let (mut waited, mut pause) = (0, 200 * MS);
        loop {
            if let Some(travel) = self.datagram(from, to, rng) {
                return (waited + travel <= patience).then_some(waited + travel);
            }
            waited += pause;
            pause *= 2;
            if waited > patience {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn cuts_have_a_direction_and_heal() {
        let mut network = Network::new(0.0, Delay::default());
        let mut rng = StdRng::seed_from_u64(1);
        network.cut(1, 0);
        assert_eq!(network.datagram(1, 0, &mut rng), None);
        assert!(network.datagram(0, 1, &mut rng).is_some_and(|travel| travel <= 21 * MS));
        assert_eq!(network.segment(1, 0, 10_000 * MS, &mut rng), None);
        network.heal();
        assert!(network.whole() && network.datagram(1, 0, &mut rng).is_some());
    }

    #[test]
    fn loss_is_what_was_asked_for_and_slows_tcp_only() {
        let network = Network::new(0.2, Delay::default());
        let mut rng = StdRng::seed_from_u64(2);
        let arrived = (0..10_000).filter(|_| network.datagram(0, 0, &mut rng).is_some()).count();
        assert!((7_800..8_200).contains(&arrived), "{arrived}");
        let trips: Vec<Micros> = (0..1_000).filter_map(|_| network.segment(0, 0, 60_000 * MS, &mut rng)).collect();
        assert_eq!(trips.len(), 1_000);
        assert!(trips.iter().filter(|trip| **trip > 200 * MS).count() > 100);
    }
}
