//! Which sessions there are, which are being made, and who waits for them.
//!
//! Called by the Sessions actor. Pure: `S` is a session, `W` somebody who waits; the time is an argument. Bounds:
//! [`PEERS_MAX`] peers, [`WAITERS_MAX`] waiters each.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use starling_ids::{Incarnation, NodeId};

/// One life of a node.
pub(super) type Life = (NodeId, Incarnation);

/// Peers with a session, or with one in the making.
const PEERS_MAX: usize = 4096;
/// Questions that wait for one session.
const WAITERS_MAX: usize = 256;
/// A session over which nothing was asked in either direction for this long is closed.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// For a dial: longer than connection and handshake may take, or a second dial would begin beside the first one.
const DIAL_MAX: Duration = Duration::from_secs(16);
/// From the end of a dial to a session that is ready.
const READY_MAX: Duration = Duration::from_secs(5);
/// A session to somebody who is not, or no longer, a member is closed after this long.
const STRANGER_MAX: Duration = Duration::from_secs(5);
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// What to do with a question.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<S, W> {
    /// Ask over this session.
    Ask(S, W),
    /// It waits; make a session.
    Dial,
    /// It waits for a session in the making.
    Wait,
    /// The last dial failed; not before this much later.
    NotNow(W, Duration),
    /// Too many wait.
    Full(W),
}

/// What a sweep found.
#[derive(Debug)]
pub(super) struct Swept<S, W> {
    /// To be closed.
    pub(super) close: Vec<S>,
    /// To be told that there will be no session.
    pub(super) fail: Vec<W>,
}

struct Peer<S, W> {
    /// Where it was when somebody last had a question for it.
    address: Option<SocketAddr>,
    session: Option<S>,
    waiters: Vec<W>,
    /// Until when the session in the making has to have come so far.
    making: Option<Instant>,
    failures: u32,
    not_before: Instant,
    used: Instant,
    member_at: Instant,
}

/// All peers of this node.
pub(super) struct Table<S, W> {
    peers: BTreeMap<Life, Peer<S, W>>,
}

impl<S: Clone, W> Table<S, W> {
    pub(super) fn new() -> Self {
        Self { peers: BTreeMap::new() }
    }

    /// `life` is at this address now. When it was at another one, that was another process of its name: nothing that was
    /// made with it counts. The session to it, to be closed.
    pub(super) fn found_at(&mut self, life: &Life, address: SocketAddr, now: Instant) -> Option<S> {
        if !self.peers.contains_key(life) && self.peers.len() >= PEERS_MAX {
            return None;
        }
        let peer = self.peer(life, now);
        let before = peer.address.replace(address);
        if before.is_none_or(|before| before == address) {
            return None;
        }
        peer.failures = 0;
        peer.not_before = now;
        peer.making = None;
        peer.session.take()
    }

    /// Somebody has a question for `life`.
    pub(super) fn want(&mut self, life: &Life, waiter: W, now: Instant) -> Next<S, W> {
        if !self.peers.contains_key(life) && self.peers.len() >= PEERS_MAX {
            return Next::Full(waiter);
        }
        let peer = self.peer(life, now);
        peer.used = now;
        if let Some(session) = &peer.session {
            return Next::Ask(session.clone(), waiter);
        }
        if peer.waiters.len() >= WAITERS_MAX {
            return Next::Full(waiter);
        }
        if peer.making.is_none() && now < peer.not_before {
            return Next::NotNow(waiter, peer.not_before - now);
        }
        peer.waiters.push(waiter);
        if peer.making.is_some() {
            return Next::Wait;
        }
        peer.making = Some(now + DIAL_MAX);
        Next::Dial
    }

    /// A session is ready, made from either side. The newest one counts; who waited gets it.
    pub(super) fn ready(&mut self, life: &Life, session: S, now: Instant) -> Vec<W> {
        let peer = self.peer(life, now);
        peer.session = Some(session);
        peer.making = None;
        peer.failures = 0;
        peer.not_before = now;
        peer.used = now;
        std::mem::take(&mut peer.waiters)
    }

    /// A dial has ended well: what follows is soon over.
    pub(super) fn dialled(&mut self, life: &Life, now: Instant) {
        if let Some(peer) = self.peers.get_mut(life).filter(|peer| peer.making.is_some()) {
            peer.making = Some(now + READY_MAX);
        }
    }

    /// A dial failed, or what came of it never became ready. `jitter` is 0 to 1.
    pub(super) fn failed(&mut self, life: &Life, now: Instant, jitter: f64) -> Vec<W> {
        let Some(peer) = self.peers.get_mut(life).filter(|peer| peer.session.is_none()) else { return Vec::new() };
        let backoff = BACKOFF_FIRST.saturating_mul(1 << peer.failures.min(10)).min(BACKOFF_MAX);
        peer.not_before = now + backoff.mul_f64(0.5 + jitter / 2.0);
        peer.failures = peer.failures.saturating_add(1);
        peer.making = None;
        std::mem::take(&mut peer.waiters)
    }

    /// The session that `is` recognises ended.
    pub(super) fn closed_where(&mut self, is: impl Fn(&S) -> bool) {
        for peer in self.peers.values_mut().filter(|peer| peer.session.as_ref().is_some_and(&is)) {
            peer.session = None;
        }
    }

    /// The other side asked something.
    pub(super) fn touched(&mut self, life: &Life, now: Instant) {
        if let Some(peer) = self.peers.get_mut(life) {
            peer.used = now;
        }
    }

    /// Gives up what took too long, what is idle, and what belongs to nobody any more.
    pub(super) fn sweep(&mut self, is_member: impl Fn(&Life) -> bool, now: Instant, jitter: f64) -> Swept<S, W> {
        let mut swept = Swept { close: Vec::new(), fail: Vec::new() };
        let overdue = |peer: &Peer<S, W>| peer.making.is_some_and(|until| now > until);
        let late: Vec<Life> =
            self.peers.iter().filter(|(_, peer)| overdue(peer)).map(|(life, _)| life.clone()).collect();
        for life in late {
            swept.fail.extend(self.failed(&life, now, jitter));
        }
        self.peers.retain(|life, peer| {
            if is_member(life) {
                peer.member_at = now;
            }
            let stranger = now - peer.member_at > STRANGER_MAX;
            if !stranger && (now - peer.used <= IDLE_MAX || peer.making.is_some()) {
                return true;
            }
            swept.close.extend(peer.session.take());
            swept.fail.append(&mut peer.waiters);
            false
        });
        swept
    }

    /// Sessions that are ready.
    pub(super) fn open(&self) -> impl Iterator<Item = &Life> {
        self.peers.iter().filter(|(_, peer)| peer.session.is_some()).map(|(life, _)| life)
    }

    fn peer(&mut self, life: &Life, now: Instant) -> &mut Peer<S, W> {
        self.peers.entry(life.clone()).or_insert_with(|| Peer {
            address: None,
            session: None,
            waiters: Vec::new(),
            making: None,
            failures: 0,
            not_before: now,
            used: now,
            member_at: now,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(boot: u64) -> Life {
        (NodeId::new("w").expect("name"), Incarnation(boot))
    }

    #[test]
    fn one_dial_serves_all_who_wait() {
        let (mut table, now) = (Table::<u8, u8>::new(), Instant::now());
        assert_eq!(table.want(&life(1), 1, now), Next::Dial);
        assert_eq!(table.want(&life(1), 2, now), Next::Wait);
        assert_eq!(table.ready(&life(1), 9, now), [1, 2]);
        assert_eq!(table.want(&life(1), 3, now), Next::Ask(9, 3));
        assert_eq!(table.open().count(), 1);
        table.closed_where(|session| *session == 9);
        assert_eq!(table.want(&life(1), 4, now), Next::Dial);
    }

    #[test]
    fn mem_07_a_life_at_another_address_is_another_process() {
        let (mut table, now) = (Table::<u8, u8>::new(), Instant::now());
        let [one, other]: [SocketAddr; 2] = [([10, 0, 0, 1], 7).into(), ([10, 0, 0, 2], 7).into()];
        assert_eq!(table.want(&life(1), 1, now), Next::Dial);
        assert_eq!(table.found_at(&life(1), one, now), None);
        assert_eq!(table.failed(&life(1), now, 1.0), [1]);
        assert!(matches!(table.want(&life(1), 2, now), Next::NotNow(..)));
        assert_eq!(table.found_at(&life(1), other, now), None);
        assert_eq!(table.want(&life(1), 3, now), Next::Dial, "the failures were another one's");
        assert_eq!(table.ready(&life(1), 9, now), [3]);
        assert_eq!(table.found_at(&life(1), other, now), None);
        assert_eq!(table.found_at(&life(1), one, now), Some(9));
    }

    #[test]
    fn failures_back_off_and_a_session_from_the_other_side_ends_the_wait() {
        let (mut table, mut now) = (Table::<u8, u8>::new(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..12 {
            assert_eq!(table.want(&life(1), 1, now), Next::Dial);
            assert_eq!(table.failed(&life(1), now, 1.0), [1]);
            let Next::NotNow(1, wait) = table.want(&life(1), 1, now) else { panic!("backs off") };
            waits.push(wait);
            now += wait;
        }
        assert_eq!((waits[0], waits[1], waits[11]), (BACKOFF_FIRST, 2 * BACKOFF_FIRST, BACKOFF_MAX));
        assert_eq!(table.failed(&life(1), now, 0.0), [0u8; 0]);
        assert!(table.ready(&life(1), 7, now).is_empty());
        assert_eq!(table.want(&life(1), 1, now), Next::Ask(7, 1));
    }

    #[test]
    fn idle_foreign_and_stuck_sessions_are_swept() {
        let (mut table, start) = (Table::<u8, u8>::new(), Instant::now());
        assert!(table.ready(&life(1), 1, start).is_empty());
        assert!(table.ready(&life(2), 2, start).is_empty());
        assert_eq!(table.want(&life(3), 33, start), Next::Dial);
        let members = |life: &Life| life.1 != Incarnation(2);
        assert!(table.sweep(members, start + STRANGER_MAX, 0.0).close.is_empty());
        let swept = table.sweep(members, start + STRANGER_MAX + Duration::from_millis(1), 0.0);
        assert_eq!((swept.close, swept.fail), (vec![2], Vec::new()), "no member any more");
        let swept = table.sweep(|_: &Life| true, start + DIAL_MAX + Duration::from_millis(1), 0.0);
        assert_eq!((swept.close, swept.fail), (Vec::new(), vec![33]), "never became ready");
        table.touched(&life(1), start + Duration::from_secs(30));
        assert!(table.sweep(members, start + Duration::from_secs(70), 0.0).close.is_empty());
        assert_eq!(table.sweep(members, start + Duration::from_secs(95), 0.0).close, [1]);
        assert_eq!(table.open().count(), 0);
    }

    #[test]
    fn waiters_and_peers_are_bounded() {
        let (mut table, now) = (Table::<u8, usize>::new(), Instant::now());
        for waiter in 0..WAITERS_MAX {
            assert!(matches!(table.want(&life(1), waiter, now), Next::Dial | Next::Wait));
        }
        assert_eq!(table.want(&life(1), 7, now), Next::Full(7));
        for boot in 2..=PEERS_MAX as u64 {
            assert_eq!(table.want(&life(boot), 0, now), Next::Dial);
        }
        assert_eq!(table.want(&life(9_999_999), 5, now), Next::Full(5));
    }
}
