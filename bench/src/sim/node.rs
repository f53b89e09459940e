//! One simulated process: the product's driver, the clock it reads, its socket buffer and what it has sent.
//!
//! Called by the world. Pure. Bounds: [`SOCKET_BUFFER`] packets wait while it is stopped.

use std::{collections::BTreeMap, time::Duration};

use starling_cluster::membership::{Driver, Outranked};

use super::{
    Micros, SECOND,
    views::Life,
    world::{Call, Directory},
};

/// Packets that a kernel keeps for a process that does not read.
pub(super) const SOCKET_BUFFER: usize = 128;
/// What a node's clock shows when the run begins; clocks can be set back by less.
const EPOCH: Micros = 100_000 * SECOND;

/// A process, running or ended.
pub(super) struct Node {
    pub(super) name: usize,
    pub(super) life: Life,
    pub(super) address: usize,
    /// The group that the network knows it by.
    pub(super) side: usize,
    /// `None` once the process has ended.
    pub(super) driver: Option<Driver>,
    pub(super) frozen: bool,
    pub(super) inbox: Vec<(usize, Vec<u8>)>,
    /// Questions and answers over TCP that wait while it is stopped.
    pub(super) held: Vec<Call>,
    /// What its clock shows beyond the true time; may be negative.
    pub(super) clock: i64,
    /// It gets the processor at multiples of this only; 0: at once.
    pub(super) grid: Micros,
    /// When the tick in the queue that counts is due.
    pub(super) tick_at: Option<Micros>,
    /// Ticks in a row after which something was still due.
    pub(super) overdue: u32,
    /// Whether it is expected to be seen as it is: not stopped, cut off or slowed down on purpose.
    pub(super) sound: bool,
    pub(super) outranked: Option<Outranked>,
    /// The newest version heard of each name's record.
    pub(super) heard: BTreeMap<usize, u64>,
    pub(super) directory: Option<Box<Directory>>,
    pub(super) traffic: Traffic,
}

impl Node {
    pub(super) fn new(name: usize, life: Life, address: usize) -> Self {
        Self {
            name,
            life,
            address,
            side: 0,
            driver: None,
            frozen: false,
            inbox: Vec::new(),
            held: Vec::new(),
            clock: 0,
            grid: 0,
            tick_at: None,
            overdue: 0,
            sound: true,
            outranked: None,
            heard: BTreeMap::new(),
            directory: None,
            traffic: Traffic::default(),
        }
    }

    /// What its clock shows at `now`.
    pub(super) fn clock(&self, now: Micros) -> Duration {
        Duration::from_micros((EPOCH + now).saturating_add_signed(self.clock))
    }

    /// When its clock will show `time`, at `now` or later, and on its grid.
    pub(super) fn when(&self, time: Duration, now: Micros) -> Micros {
        let shown = u64::try_from(time.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX);
        let at = shown.saturating_add_signed(-self.clock).saturating_sub(EPOCH);
        self.on_grid(at.max(now))
    }

    /// When it gets the processor at `at` or later.
    pub(super) fn on_grid(&self, at: Micros) -> Micros {
        if self.grid == 0 { at } else { at.next_multiple_of(self.grid) }
    }

    /// Runs and answers.
    pub(super) fn live(&self) -> bool {
        self.driver.is_some() && !self.frozen && self.outranked.is_none()
    }
}

/// What a node has sent and received.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Traffic {
    /// Bytes of datagrams sent, seal included.
    pub(super) sent: u64,
    /// Bytes sent in TCP exchanges.
    pub(super) tcp: u64,
    pub(super) packets: u64,
    /// The second that the counters below are about.
    second: u64,
    packets_now: u64,
    bytes_now: u64,
    received_now: u64,
    received_before: u64,
    /// Most bytes sent within one second.
    pub(super) peak: u64,
}

/// Packets a second that a node may send without being asked anything.
const UNASKED_MAX: u64 = 600;
/// Packets it may send for each one that it receives.
const ANSWERS_MAX: u64 = 6;

impl Traffic {
    /// Counts a datagram; whether that is within bounds: a node answers, and never multiplies.
    pub(super) fn send(&mut self, bytes: usize, now: Micros) -> bool {
        self.roll(now);
        self.sent += bytes as u64;
        self.packets += 1;
        self.packets_now += 1;
        self.bytes_now += bytes as u64;
        self.peak = self.peak.max(self.bytes_now);
        self.packets_now <= UNASKED_MAX + ANSWERS_MAX * (self.received_now + self.received_before)
    }

    pub(super) fn receive(&mut self, now: Micros) {
        self.roll(now);
        self.received_now += 1;
    }

    fn roll(&mut self, now: Micros) {
        let second = now / SECOND;
        if second != self.second {
            self.received_before = if second == self.second + 1 { self.received_now } else { 0 };
            (self.second, self.packets_now, self.bytes_now, self.received_now) = (second, 0, 0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_jumps_is_read_and_waited_for_alike() {
        let mut node = Node::new(0, 1, 0);
        for clock in [0, 30 * SECOND as i64, -30 * SECOND as i64] {
            node.clock = clock;
            let shows = node.clock(40 * SECOND);
            assert_eq!(node.when(shows + Duration::from_millis(100), 40 * SECOND), 40 * SECOND + 100_000);
            assert_eq!(node.when(shows - Duration::from_millis(100), 40 * SECOND), 40 * SECOND);
        }
        node.grid = 300_000;
        assert_eq!(node.on_grid(1), 300_000);
    }

    #[test]
    fn a_node_that_multiplies_packets_is_noticed() {
        let mut traffic = Traffic::default();
        traffic.receive(1);
        let allowed = (0..1_000).take_while(|_| traffic.send(100, 2)).count() as u64;
        assert_eq!(allowed, UNASKED_MAX + ANSWERS_MAX);
        assert!(traffic.send(100, SECOND));
        assert_eq!(traffic.peak, (allowed + 1) * 100);
    }
}
