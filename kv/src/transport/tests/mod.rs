//! Shell: Every transport through one suite: with a peer in this process for `mem`, in another one for the rest.

mod grants;
mod peer;
mod wire;

use std::{
    sync::Arc,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use rustix::process::Signal;

use self::peer::{Peer, REGION_BYTES, Way, fabric, fabric_for, pattern, token};
use super::*;

const PAGE: usize = 16 << 10;
const PAGES: usize = REGION_BYTES / PAGE;
const LONG: u64 = 600_000;

/// Page `i` of the batch goes to place `i` here and is at a scattered place there.
fn scattered(count: usize) -> Vec<Page> {
    let place = |i: usize| ((i * 181 + 7) % PAGES * PAGE) as u64;
    (0..count).map(|i| Page { local: (i * PAGE) as u64, remote: place(i), len: PAGE as u32 }).collect()
}

fn sums(bytes: &[u8], pages: &[Page], offset: impl Fn(&Page) -> u64) -> Vec<u64> {
    let at = |page: &Page| offset(page) as usize..offset(page) as usize + page.len as usize;
    pages.iter().map(|page| page_sum(&bytes[at(page)])).collect()
}

/// A batch that takes long enough to be disturbed: pages over and over, several GiB.
fn endless(local: &Region, descriptor: &Descriptor, direction: Direction, grant: GrantToken) -> Batch {
    let page = Page { local: 0, remote: 0, len: REGION_BYTES as u32 / 2 };
    Batch::new(direction, local, descriptor.region, vec![page; 4_000], grant).within(Duration::from_secs(60))
}

struct Bench {
    way: Way,
    fabric: Fabric,
    peer: Peer,
    session: Session,
    local: Region,
}

impl Bench {
    /// `None` where this machine has no such transport.
    fn new(way: Way) -> Option<Self> {
        let fabric = fabric_for(1, way)?;
        let peer = Peer::start(way);
        let session = fabric.connect(&peer.descriptor, way.kind).expect("a session");
        let local = Region::shared("local", REGION_BYTES).expect("memory");
        Some(Self { way, fabric, peer, session, local })
    }

    fn batch(&self, direction: Direction, pages: Vec<Page>, grant: u8) -> Batch {
        let batch = Batch::new(direction, &self.local, self.peer.descriptor.region, pages, token(grant));
        batch.within(Duration::from_secs(20))
    }

    /// What a healthy session does.
    fn pulls(&mut self) {
        let pages = scattered(40);
        let there = pattern(7, REGION_BYTES);
        let want = Checksums::Pages(sums(&there, &pages, |page| page.remote));
        let outcome = self.session.post(self.batch(Direction::Pull, pages, 1).with_checksums(want)).wait();
        assert_eq!(outcome.map(|done| done.bytes), Ok(40 * PAGE as u64));
    }
}

fn round_trip(way: Way) {
    let Some(mut bench) = Bench::new(way) else { return };
    bench.peer.grant("pull", 1, 0..REGION_BYTES, LONG);
    bench.peer.grant("push", 2, 0..REGION_BYTES, LONG);
    let there = pattern(7, REGION_BYTES);
    let pages = scattered(PAGES);
    let promised =
        Checksums::Groups { pages: 30, sums: sums(&there, &pages, |page| page.remote).chunks(30).map(fold).collect() };
    let outcome = bench.session.post(bench.batch(Direction::Pull, pages.clone(), 1).with_checksums(promised)).wait();
    assert_eq!(outcome.map(|done| done.bytes), Ok(REGION_BYTES as u64));
    let mut here = vec![0; REGION_BYTES];
    bench.local.read(0, &mut here).expect("in bounds");
    assert!(pages.iter().all(|page| {
        let (at, from) = (page.local as usize, page.remote as usize);
        here[at..at + PAGE] == there[from..from + PAGE]
    }));
    assert!(bench.session.bandwidth().is_some_and(|bytes| bytes > 1e6));

    // Odd offsets and lengths, and one page that is larger than a segment.
    let new = pattern(8, REGION_BYTES);
    bench.local.write(0, &new).expect("in bounds");
    let pages = vec![
        Page { local: 3, remote: 5, len: 1 },
        Page { local: 100, remote: 1_001, len: 777 },
        Page { local: 5_000, remote: 5_000, len: 3_000_001 },
        Page { local: 4_000_000, remote: 4_000_000, len: 250 },
    ];
    let promised = Checksums::Pages(sums(&new, &pages, |page| page.local));
    let outcome = bench.session.post(bench.batch(Direction::Push, pages.clone(), 2).with_checksums(promised)).wait();
    assert_eq!(outcome.map(|done| done.bytes), Ok(3_001_029));
    for page in pages {
        let sum = bench.peer.order(&format!("sum {} {}", page.remote, page.len));
        let at = page.local as usize;
        assert_eq!(sum, page_sum(&new[at..at + page.len as usize]).to_string());
    }
    bench.peer.unused(&[1, 2]);
    assert_eq!(bench.fabric.kinds().iter().filter(|have| **have == way.kind).count(), 1);
}

fn refusals(way: Way) {
    let Some(mut bench) = Bench::new(way) else { return };
    bench.peer.grant("pull", 1, 0..REGION_BYTES, LONG);
    bench.peer.grant("pull", 3, PAGE..4 * PAGE, LONG);
    bench.peer.grant("pull", 4, 0..REGION_BYTES, 0);
    let page = |remote: u64, len: u32| Page { local: 0, remote, len };
    let whole = PAGE as u32;
    let cases = [
        (
            3,
            Direction::Pull,
            vec![page(PAGE as u64, whole), page(PAGE as u64 - 1, whole)],
            Refusal::NotGranted { page: 1 },
        ),
        (3, Direction::Pull, vec![page(3 * PAGE as u64, whole + 1)], Refusal::NotGranted { page: 0 }),
        (1, Direction::Pull, vec![page(REGION_BYTES as u64, 1)], Refusal::NotGranted { page: 0 }),
        (1, Direction::Pull, vec![page(u64::MAX - 3, 8)], Refusal::NotGranted { page: 0 }),
        (4, Direction::Pull, vec![page(0, 1)], Refusal::Expired),
        (1, Direction::Push, vec![page(0, 1)], Refusal::WrongDirection),
        (9, Direction::Pull, vec![page(0, 1)], Refusal::UnknownGrant),
    ];
    for (grant, direction, pages, refusal) in cases {
        let outcome = bench.session.post(bench.batch(direction, pages, grant)).wait();
        assert_eq!(outcome, Err(TransferError::Refused(refusal)), "{refusal}");
        bench.pulls();
    }
    let outside = vec![page(0, 1), Page { local: REGION_BYTES as u64, remote: 0, len: 1 }];
    let outcome = bench.session.post(bench.batch(Direction::Pull, outside, 1)).wait();
    assert_eq!(outcome, Err(TransferError::OutOfBounds { page: 1 }));
    bench.peer.unused(&[3]);
    assert_eq!(bench.peer.order("revoke 3"), "0");
    let outcome = bench.session.post(bench.batch(Direction::Pull, vec![page(PAGE as u64, 1)], 3)).wait();
    assert_eq!(outcome, Err(TransferError::Refused(Refusal::UnknownGrant)));
}

fn flipped(way: Way) {
    let Some(mut bench) = Bench::new(way) else { return };
    bench.peer.grant("pull", 1, 0..REGION_BYTES, LONG);
    bench.peer.grant("push", 2, 0..REGION_BYTES, LONG);
    let pages = scattered(100);
    let there = pattern(7, REGION_BYTES);
    let mut wrong = sums(&there, &pages, |page| page.remote);
    wrong[61] ^= 1 << 40;
    let groups = Checksums::Groups { pages: 30, sums: wrong.chunks(30).map(fold).collect() };
    for (promised, page) in [(Checksums::Pages(wrong), 61), (groups, 60)] {
        let transfer = bench.session.post(bench.batch(Direction::Pull, pages.clone(), 1).with_checksums(promised));
        assert_eq!(transfer.wait(), Err(TransferError::Checksum { page }));
        bench.pulls();
    }
    let mut promised = sums(&vec![0; REGION_BYTES], &pages, |page| page.local);
    bench.local.write(0, &vec![0; REGION_BYTES]).expect("in bounds");
    promised[3] ^= 1;
    let batch = bench.batch(Direction::Push, pages, 2).with_checksums(Checksums::Pages(promised));
    assert_eq!(bench.session.post(batch).wait(), Err(TransferError::Checksum { page: 3 }));
    bench.peer.unused(&[1, 2]);
}

/// Waits until the transfer runs.
fn running(transfer: &Transfer) {
    let give_up = Instant::now() + Duration::from_secs(20);
    while transfer.pages_done() == 0 && transfer.outcome().is_none() {
        assert!(Instant::now() < give_up, "nothing moves");
        std::thread::yield_now();
    }
}

fn killed(way: Way, direction: Direction) {
    let Some(mut bench) = Bench::new(way) else { return };
    let (word, grant) = if direction == Direction::Pull { ("pull", 1) } else { ("push", 2) };
    bench.peer.grant(word, grant, 0..REGION_BYTES, LONG);
    let transfer = bench.session.post(endless(&bench.local, &bench.peer.descriptor, direction, token(grant)));
    if direction == Direction::Pull {
        running(&transfer);
    } else {
        while bench.peer.order(&format!("uses {grant}")) == "0" {}
    }
    bench.peer.signal(Signal::KILL);
    assert_eq!(transfer.wait(), Err(TransferError::PeerGone));
    let after = bench.session.post(bench.batch(Direction::Pull, scattered(1), 1)).wait();
    assert!(matches!(after, Err(TransferError::PeerGone | TransferError::Unreachable(_))), "{after:?}");
    // A peer that comes back has another host id, another region and other grants.
    bench.peer = Peer::start(bench.way);
    bench.session = bench.fabric.connect(&bench.peer.descriptor, way.kind).expect("a session");
    bench.peer.grant("pull", 1, 0..REGION_BYTES, LONG);
    bench.pulls();
}

/// The other side of it: whoever takes may die in the middle, and the owner serves on.
fn outlasted(way: Way) {
    let Some(mut bench) = Bench::new(way) else { return };
    bench.peer.grant("pull", 1, 0..REGION_BYTES, LONG);
    for _ in 0..3 {
        peer::kill_a_taker(way, &bench.peer.descriptor);
        bench.pulls();
    }
    bench.peer.unused(&[1]);
}

fn frozen(way: Way) {
    let Some(mut bench) = Bench::new(way) else { return };
    bench.peer.grant("pull", 1, 0..REGION_BYTES, LONG);
    bench.pulls();
    bench.peer.freeze();
    let batch = bench.batch(Direction::Pull, scattered(PAGES), 1).within(Duration::from_millis(200));
    assert_eq!(bench.session.post(batch).wait(), Err(TransferError::Timeout));
    bench.peer.signal(Signal::CONT);
    bench.pulls();
}

fn cancelled(way: Way) {
    let Some(mut bench) = Bench::new(way) else { return };
    bench.peer.grant("pull", 1, 0..REGION_BYTES, LONG);
    bench.peer.grant("push", 2, 0..REGION_BYTES, LONG);
    for (direction, grant) in [(Direction::Pull, 1), (Direction::Push, 2)] {
        bench.local.write(0, &pattern(7, REGION_BYTES)).expect("in bounds");
        let held = Arc::new(());
        let batch = endless(&bench.local, &bench.peer.descriptor, direction, token(grant)).holding(Arc::clone(&held));
        let transfer = bench.session.post(batch);
        if direction == Direction::Pull {
            running(&transfer);
        }
        transfer.cancel();
        assert_eq!(transfer.wait(), Err(TransferError::Cancelled));
        assert_eq!(Arc::strong_count(&held), 1, "the pages are quiet, so the hold is gone");
        bench.peer.grant("pull", 100 + grant, 0..PAGE, LONG);
        bench.pulls();
    }
    // Dropping is cancelling; the hold says when the pages are quiet.
    struct Count(Arc<AtomicUsize>);
    impl Drop for Count {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let quiet = Arc::new(AtomicUsize::new(0));
    let batch = endless(&bench.local, &bench.peer.descriptor, Direction::Pull, token(1));
    drop(bench.session.post(batch.holding(Count(Arc::clone(&quiet)))));
    bench.pulls();
    assert_eq!(quiet.load(Ordering::SeqCst), 1);
    bench.peer.unused(&[1, 2]);
}

/// XFR-03: a lease that ends while the transfer runs.
fn outlived(way: Way, direction: Direction) {
    let Some(mut bench) = Bench::new(way) else { return };
    let word = if direction == Direction::Pull { "pull" } else { "push" };
    bench.peer.grant("pull", 1, 0..REGION_BYTES, LONG);
    bench.peer.grant(word, 5, 0..REGION_BYTES, 150);
    bench.local.write(0, &pattern(7, REGION_BYTES)).expect("in bounds");
    // Some hundred milliseconds at 100 GB/s.
    let transfer = bench.session.post(endless(&bench.local, &bench.peer.descriptor, direction, token(5)));
    assert_eq!(transfer.wait(), Err(TransferError::Refused(Refusal::Expired)));
    bench.pulls();
}

macro_rules! suite {
    ($($name:ident = $kind:ident, $one_sided:literal);*) => {$(
        mod $name {
            use super::*;
            const WAY: Way = Way { kind: TransportKind::$kind, lanes: None, one_sided: $one_sided };

            #[test]
            fn pages_go_both_ways() {
                round_trip(WAY);
            }

            #[test]
            fn what_was_not_granted_is_refused() {
                refusals(WAY);
            }

            #[test]
            fn a_flipped_bit_is_seen() {
                flipped(WAY);
            }

            #[test]
            fn xfr_02_a_peer_killed_on_the_way_is_gone_and_its_successor_serves() {
                killed(WAY, Direction::Pull);
                killed(WAY, Direction::Push);
            }

            #[test]
            fn xfr_02_a_taker_killed_on_the_way_leaves_its_owner_serving() {
                outlasted(WAY);
            }

            #[test]
            fn xfr_15_a_frozen_peer_is_a_timeout_and_no_success() {
                frozen(WAY);
            }

            #[test]
            fn xfr_15_a_cancelled_transfer_is_no_success_and_leaves_the_session_whole() {
                cancelled(WAY);
            }

            #[test]
            fn xfr_03_a_transfer_that_outlives_its_lease_is_expired() {
                outlived(WAY, Direction::Pull);
                outlived(WAY, Direction::Push);
            }
        }
    )*};
}

suite!(tcp = Tcp, false; shm = Shm, false; ucx = Ucx, false; ucx_one_sided = Ucx, true);

/// Lanes over TCP are off (a peer's reset ends UCX's process), but between healthy peers they work.
#[test]
fn ucx_over_tcp_moves_pages_both_ways() {
    for one_sided in [false, true] {
        round_trip(Way { kind: TransportKind::Ucx, lanes: Some("tcp"), one_sided });
    }
}

/// Two hosts of this process.
fn pair() -> (Fabric, Fabric, Region, Descriptor) {
    let (ours, theirs) = (fabric(31), fabric(32));
    let remote = Region::private(REGION_BYTES).expect("memory");
    remote.write(0, &pattern(7, REGION_BYTES)).expect("in bounds");
    let id = theirs.register(&remote).expect("registered");
    let expires = Instant::now() + Duration::from_millis(LONG);
    for (direction, number) in [(Direction::Pull, 1), (Direction::Push, 2)] {
        let ranges = std::iter::once(0..REGION_BYTES as u64).collect();
        theirs.grants().issue(Grant { token: token(number), direction, region: id, ranges, expires }).expect("issued");
    }
    let descriptor = theirs.describe(id, 9).expect("described");
    (ours, theirs, remote, descriptor)
}

#[test]
fn mem_moves_pages_within_a_process_and_sees_the_owner_end() {
    let (ours, theirs, remote, descriptor) = pair();
    let session = ours.choose(&descriptor).expect("a session");
    assert_eq!(session.kind(), TransportKind::Mem);
    let local = Region::private(REGION_BYTES).expect("memory");
    let pages = scattered(PAGES);
    let promised = Checksums::Pages(sums(&pattern(7, REGION_BYTES), &pages, |page| page.remote));
    let batch = Batch::new(Direction::Pull, &local, descriptor.region, pages.clone(), token(1));
    assert!(session.post(batch.with_checksums(promised.clone())).wait().is_ok());
    let back: Vec<Page> = pages.iter().map(|page| Page { remote: page.local, ..*page }).collect();
    let batch = Batch::new(Direction::Push, &local, descriptor.region, back, token(2));
    assert!(session.post(batch.with_checksums(promised)).wait().is_ok());
    let (mut a, mut b) = (vec![0; REGION_BYTES], vec![0; REGION_BYTES]);
    assert!(local.read(0, &mut a).is_some() && remote.read(0, &mut b).is_some());
    assert!(a == b);
    let refused = session.post(Batch::new(Direction::Push, &local, descriptor.region, pages.clone(), token(1))).wait();
    assert_eq!(refused, Err(TransferError::Refused(Refusal::WrongDirection)));
    let transfer = session.post(endless(&local, &descriptor, Direction::Pull, token(1)));
    running(&transfer);
    drop(theirs);
    assert_eq!(transfer.wait(), Err(TransferError::PeerGone));
    let after = session.post(Batch::new(Direction::Pull, &local, descriptor.region, pages, token(1))).wait();
    assert_eq!(after, Err(TransferError::PeerGone));
}

#[test]
fn a_private_region_is_offered_without_shm_and_a_shared_one_with_it() {
    let (_ours, theirs, _, descriptor) = pair();
    assert_eq!(descriptor.address(TransportKind::Shm), None);
    let shared = theirs.register(&Region::shared("s", 4096).expect("memory")).expect("registered");
    let shared = theirs.describe(shared, 0).expect("described");
    assert!(shared.address(TransportKind::Shm).is_some());
    let text = serde_json::to_string(&shared).expect("json");
    assert_eq!(serde_json::from_str::<Descriptor>(&text).expect("back"), shared);
    assert!(!format!("{shared:?}").contains("255, 255"), "a token is never shown");
}

#[test]
fn the_best_way_is_chosen_and_another_machine_gets_tcp() {
    let (fabric, peer) = (fabric(41), Peer::start(Way { kind: TransportKind::Shm, lanes: None, one_sided: false }));
    let near = fabric.choose(&peer.descriptor).expect("a session");
    assert_eq!(near.kind(), TransportKind::Shm);
    assert!(near.bandwidth().is_some(), "the probe measured it");
    let machine = "another boot".to_owned();
    let far = Descriptor { machine, ..peer.descriptor.clone() };
    let far =
        Descriptor { offers: far.offers.iter().filter(|o| o.kind != TransportKind::Ucx).cloned().collect(), ..far };
    assert_eq!(fabric.choose(&far).expect("a session").kind(), TransportKind::Tcp);
    let other = Descriptor { version: VERSION + 1, ..peer.descriptor.clone() };
    let refused = fabric.choose(&other).expect_err("another version");
    assert_eq!(refused, TransferError::Refused(Refusal::Version));
}

#[test]
fn a_consumer_sees_its_pages_before_the_end_and_a_full_queue_is_busy() {
    use std::{future::Future, task};
    let (ours, _theirs, _, descriptor) = pair();
    let session = ours.connect(&descriptor, TransportKind::Mem).expect("a session");
    let local = Region::private(REGION_BYTES).expect("memory");
    let transfer = session.post(endless(&local, &descriptor, Direction::Pull, token(1)));
    struct Unpark(std::thread::Thread);
    impl task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = task::Context::from_waker(&waker);
    let mut reached = Box::pin(transfer.reached(20));
    let pages = loop {
        match reached.as_mut().poll(&mut context) {
            task::Poll::Ready(pages) => break pages,
            task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(20)),
        }
    };
    drop(reached);
    assert!((20..4_000).contains(&pages) && transfer.outcome().is_none());
    let one = || Batch::new(Direction::Pull, &local, descriptor.region, scattered(1), token(1));
    let waiting: Vec<Transfer> = (0..QUEUE).map(|_| session.post(one())).collect();
    assert_eq!(session.post(one()).wait(), Err(TransferError::Refused(Refusal::Busy)));
    drop(session);
    assert_eq!(transfer.wait(), Err(TransferError::Cancelled));
    for late in waiting {
        assert_eq!(late.wait(), Err(TransferError::Cancelled));
    }
}
