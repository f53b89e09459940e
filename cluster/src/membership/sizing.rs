//! How fast gossip probes, suspects and spreads, by the size of the cluster.
//!
//! Called by the driver at start and whenever the cluster leaves its size class. Pure: one table.

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
/// Largest foca packet: a datagram less the seal and the byte that tells messages apart.
pub(super) const PACKET_MAX: usize = DATAGRAM_MAX - SEAL_OVERHEAD - 1;
/// Down members are remembered this long, so that late news about them is known to be late.
pub(super) const REMEMBER_DOWN: Duration = Duration::from_secs(24 * 3600);

/// Upper bound of a size class, time from suspicion to down, how often each member passes news on.
const CLASSES: [(usize, Duration, u8); 4] = [
    (50, Duration::from_secs(2), 12),
    (200, Duration::from_secs(3), 16),
    (1000, Duration::from_secs(6), 20),
    (usize::MAX, Duration::from_secs(8), 24),
];

/// The class of a cluster of `members`, this node included.
#[must_use]
pub(super) fn class(members: usize) -> usize {
    CLASSES.iter().position(|(bound, ..)| members <= *bound).unwrap_or(CLASSES.len() - 1)
}

/// The settings of a class.
#[must_use]
pub(super) fn config(class: usize) -> Config {
    let (_, suspect_to_down_after, transmissions) = CLASSES[class.min(CLASSES.len() - 1)];
    Config {
        probe_period: PROBE_PERIOD,
        probe_rtt: PROBE_RTT,
        num_indirect_probes: at_least_one(3),
        max_transmissions: NonZeroU8::new(transmissions).unwrap_or(NonZeroU8::MIN),
        suspect_to_down_after,
        remove_down_after: Some(REMEMBER_DOWN),
        max_packet_size: at_least_one(PACKET_MAX),
        notify_down_members: true,
        periodic_announce: Some(PeriodicParams { frequency: Duration::from_secs(30), num_members: at_least_one(1) }),
        // The driver announces to down members itself: foca stops doing so when a node is all alone.
        periodic_announce_to_down_members: None,
        periodic_gossip: Some(PeriodicParams { frequency: Duration::from_millis(200), num_members: at_least_one(3) }),
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
        assert_eq!((class(1), class(50), class(51), class(100_000)), (0, 0, 1, 3));
        for class in 0..CLASSES.len() - 1 {
            let (one, next) = (config(class), config(class + 1));
            assert!(one.suspect_to_down_after < next.suspect_to_down_after);
            assert_eq!((one.probe_period, one.probe_rtt), (next.probe_period, next.probe_rtt));
            assert!(one.suspect_to_down_after > 2 * one.probe_period, "a suspect has time to refute");
        }
    }
}
