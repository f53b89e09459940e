//! How fast gossip probes, suspects and spreads, by the size of the cluster.
//!
//! Called by the driver at start and whenever the cluster leaves its size class. Pure: one table, for 3 to 10,000 nodes
//! and more.

use std::{
    num::{NonZeroU8, NonZeroUsize},
    time::Duration,
};

use foca::{Config, PeriodicParams};

use crate::security::{DATAGRAM_MAX, SEAL_OVERHEAD};

/// One probe of one member in each period. The same at every size, because foca cannot change it while it runs.
pub(super) const PROBE_PERIOD: Duration = Duration::from_millis(500);
/// A member that has not answered for this long is probed through others.
pub(super) const PROBE_RTT: Duration = Duration::from_millis(150);
/// Largest packet: a datagram less the seal and the byte that tells messages apart.
pub(super) const PACKET_MAX: usize = DATAGRAM_MAX - SEAL_OVERHEAD - 1;
/// What foca may fill of it, with rumours about records. The rest is for news about members.
const FOCA_PACKET_MAX: usize = PACKET_MAX * 2 / 3;
/// Down members are remembered this long, so that late news about them is known to be late.
pub(super) const REMEMBER_DOWN: Duration = Duration::from_secs(24 * 3600);
/// A cluster leaves its class downwards only below this share of the class's lower bound, so that a size at the bound
/// does not flap.
const HYSTERESIS: (usize, usize) = (4, 5);

/// What depends on the size of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Class {
    /// The largest cluster of this class.
    upto: usize,
    /// From the first unanswered probe of a member to its death. A member has this long to answer at all, by any way;
    /// a process that stands still for less is not declared down.
    pub(super) suspicion: Duration,
    /// How often each node passes on a death, a suspicion or a refutation. About 4 log10(n), as in SWIM with some
    /// more for lost packets.
    pub(super) tell: u8,
    /// How often each node passes on a join: less in large clusters, where many join at once and the exchange of
    /// states finds what was missed.
    pub(super) tell_joins: u8,
    /// Between two rounds of gossip while there is news. What is told is bounded by the numbers above, so a
    /// faster round costs packets and not bytes; only the speed differs.
    pub(super) gossip: Duration,
    /// Between two exchanges of states, on average. What gossip missed is missed by a handful of nodes in thousands:
    /// of 10,000 that joined within 100 s, three each missed one newcomer. This bounds how long they go on missing it.
    pub(super) exchange: Duration,
    /// Between two announcements to a random member, for clusters that lost sight of each other.
    announce: Duration,
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const CLASSES: [Class; 4] = [
    Class {
        upto: 50,
        suspicion: ms(2000),
        tell: 12,
        tell_joins: 12,
        gossip: ms(50),
        exchange: ms(30_000),
        announce: ms(30_000),
    },
    Class {
        upto: 200,
        suspicion: ms(2000),
        tell: 16,
        tell_joins: 12,
        gossip: ms(100),
        exchange: ms(30_000),
        announce: ms(30_000),
    },
    Class {
        upto: 2000,
        suspicion: ms(4000),
        tell: 20,
        tell_joins: 10,
        gossip: ms(200),
        exchange: ms(45_000),
        announce: ms(60_000),
    },
    Class {
        upto: usize::MAX,
        suspicion: ms(6000),
        tell: 24,
        tell_joins: 6,
        gossip: ms(200),
        exchange: ms(45_000),
        announce: ms(120_000),
    },
];

/// The class of a cluster of `members`, this node included, that was in class `now`.
#[must_use]
pub(super) fn class(members: usize, now: usize) -> usize {
    let of = |members: usize| CLASSES.iter().position(|class| members <= class.upto).unwrap_or(CLASSES.len() - 1);
    let (up, down) = (of(members), of(members.saturating_mul(HYSTERESIS.1) / HYSTERESIS.0));
    if up > now { up } else { down.min(now) }
}

/// The settings of a class.
#[must_use]
pub(super) fn settings(class: usize) -> &'static Class {
    &CLASSES[class.min(CLASSES.len() - 1)]
}

/// The settings of a class for foca.
#[must_use]
pub(super) fn config(class: usize) -> Config {
    let Class { tell, suspicion, announce, .. } = *settings(class);
    Config {
        probe_period: PROBE_PERIOD,
        probe_rtt: PROBE_RTT,
        num_indirect_probes: at_least_one(3),
        max_transmissions: NonZeroU8::new(tell).unwrap_or(NonZeroU8::MIN),
        suspect_to_down_after: suspicion,
        remove_down_after: Some(REMEMBER_DOWN),
        max_packet_size: at_least_one(FOCA_PACKET_MAX),
        notify_down_members: true,
        periodic_announce: Some(PeriodicParams { frequency: announce, num_members: at_least_one(1) }),
        // The driver announces to down members itself: foca stops doing so when a node is all alone.
        periodic_announce_to_down_members: None,
        // The driver holds the news about members, so it decides when there is something to say.
        periodic_gossip: None,
    }
}

fn at_least_one(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_clusters_suspect_longer_and_never_probe_differently() {
        assert_eq!((class(1, 0), class(50, 0), class(51, 0), class(100_000, 0)), (0, 0, 1, 3));
        for class in 0..CLASSES.len() - 1 {
            let (one, next) = (config(class), config(class + 1));
            assert!(one.suspect_to_down_after <= next.suspect_to_down_after);
            assert_eq!((one.probe_period, one.probe_rtt), (next.probe_period, next.probe_rtt));
            assert!(one.suspect_to_down_after > 2 * one.probe_period, "a suspect has time to refute");
        }
    }

    #[test]
    fn a_size_at_the_bound_does_not_flap() {
        let mut now = class(51, 0);
        for members in [50, 51, 49, 41, 51] {
            now = class(members, now);
            assert_eq!(now, 1, "{members}");
        }
        assert_eq!((class(39, now), class(3, 3), class(201, 1), class(199, 2)), (0, 0, 2, 2));
    }
}
