//! The tiers on real files and on files with faults.

use std::{
    collections::HashMap,
    fs, io,
    path::Path,
    sync::{Condvar, Mutex},
    time::{Duration, Instant},
};

use super::*;
use crate::{events::KvEvent, hash::block_hash};

mod reader;

const BLOCK: usize = 4;
const BYTES: usize = 5_000;
const SHAPE: TierShape = TierShape { block_bytes: BYTES, block_tokens: BLOCK, layout_digest: 7, seed: HashSeed(1) };
/// Bytes of a place on disk.
const PLACE: u64 = 8_192;
const WITHIN: Duration = Duration::from_secs(20);

fn tokens(n: u32) -> Vec<TokenId> {
    (0..BLOCK as u32).map(|at| n * 10 + at).collect()
}

fn content(n: u32) -> Vec<u8> {
    (0..BYTES).map(|at| (at as u32).wrapping_mul(n + 3).wrapping_add(at as u32 >> 8) as u8).collect()
}

/// The first `count` blocks of one chain.
fn chain(from: u32, count: u32) -> Vec<BlockHash> {
    let mut hashes: Vec<BlockHash> = Vec::new();
    for n in from..from + count {
        hashes.push(block_hash(SHAPE.seed, hashes.last().copied(), &tokens(n)));
    }
    hashes
}

fn block(from: u32, index: u32) -> TierBlock {
    let hashes = chain(from, index + 1);
    let parent = index.checked_sub(1).map(|before| hashes[before as usize]);
    let n = from + index;
    TierBlock { hash: hashes[index as usize], parent, tokens: tokens(n).into(), bytes: content(n).into() }
}

fn options(folder: &Path, host_blocks: u64, disk_blocks: u64) -> TierOptions {
    let disk =
        (disk_blocks > 0).then(|| DiskOptions { folder: folder.to_owned(), bytes: disk_blocks * PLACE, file: None });
    TierOptions { host_bytes: host_blocks * (BYTES + 4 * BLOCK) as u64, disk }
}

fn open(options: &TierOptions) -> Tiers {
    Tiers::open(options, SHAPE).expect("opens").expect("there is a tier")
}

fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let began = Instant::now();
    while !reached() {
        assert!(began.elapsed() < WITHIN, "{what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// Hands a whole chain down, leaves first, as a pool evicts it.
fn put(tiers: &Tiers, from: u32, count: u32) {
    for index in (0..count).rev() {
        let block = block(from, index);
        if tiers.wants(block.hash) {
            tiers.offer(block);
        }
    }
}

fn settle(tiers: &Tiers) {
    until("all is written", || tiers.stats().leaving == 0 && tiers.stats().reading == 0);
    tiers.check().expect("whole");
}

/// Fetches a chain and waits for all of it; `None` for blocks that came to nothing.
fn fetch(tiers: &Tiers, ticket: u64, chain: &[BlockHash]) -> Vec<Option<Arc<TierBlock>>> {
    tiers.fetch(Ticket(ticket), chain);
    let mut found: HashMap<usize, Option<Arc<TierBlock>>> = HashMap::new();
    until("every block arrives or fails", || {
        let arrived = tiers.arrived(Duration::from_millis(20)).into_iter();
        found.extend(arrived.filter(|arrival| arrival.ticket == Ticket(ticket)).map(|a| (a.index, a.block)));
        found.len() == chain.len()
    });
    (0..chain.len()).map(|index| found.remove(&index).expect("arrived")).collect()
}

fn assert_whole(found: &[Option<Arc<TierBlock>>], from: u32) {
    for (index, found) in found.iter().enumerate() {
        let right = block(from, index as u32);
        assert_eq!(found.as_deref(), Some(&right), "block {index}");
    }
}

#[test]
fn the_host_gives_to_the_disk_and_both_give_back() {
    let folder = tempfile::tempdir().expect("folder");
    let tiers = open(&options(folder.path(), 2, 8));
    put(&tiers, 0, 6);
    settle(&tiers);
    let stats = tiers.stats();
    assert_eq!((stats.host.blocks, stats.disk.blocks, stats.host.evicted), (2, 4, 4));
    let hashes = chain(0, 6);
    assert_eq!(tiers.worth(&hashes).map(|worth| worth.blocks), Some(6));
    assert_whole(&fetch(&tiers, 1, &hashes), 0);
    settle(&tiers);
    assert!(tiers.stats().disk.bytes_per_second > 0.0);
    let mut told: HashMap<Tier, Vec<BlockHash>> = HashMap::new();
    for event in tiers.take_events() {
        match event {
            KvEvent::StoredBelow { tier, blocks, .. } => told.entry(tier).or_default().extend(blocks),
            KvEvent::RemovedBelow { tier, blocks } => {
                told.entry(tier).or_default().retain(|hash| !blocks.contains(hash));
            }
            other => panic!("{other:?}"),
        }
    }
    for (tier, held) in tiers.inventory() {
        let mut held: Vec<BlockHash> = held.into_iter().map(|(_, hash)| hash).collect();
        let told = told.get_mut(&tier).expect("told");
        held.sort_unstable();
        told.sort_unstable();
        assert_eq!(&held, told, "{tier:?}");
    }
}

#[test]
fn a_disk_survives_its_process_and_keeps_its_bound() {
    let folder = tempfile::tempdir().expect("folder");
    let tiers = open(&options(folder.path(), 3, 8));
    put(&tiers, 0, 6);
    tiers.close(WITHIN);
    let tiers = open(&options(folder.path(), 0, 8));
    let held: usize = tiers.inventory().iter().map(|(_, held)| held.len()).sum();
    assert_eq!(held, 6, "what lay in the host's memory was written at the end");
    assert_whole(&fetch(&tiers, 1, &chain(0, 6)), 0);
    put(&tiers, 100, 6);
    settle(&tiers);
    assert_eq!((tiers.stats().disk.blocks, tiers.stats().disk.evicted), (8, 4));
    assert!(fs::metadata(folder.path().join("blocks")).expect("file").len() <= 8 * PLACE);
    assert_whole(&fetch(&tiers, 2, &chain(100, 6)), 100);
    drop(tiers);
    let tiers = open(&options(folder.path(), 0, 2));
    assert_eq!(tiers.stats().disk.blocks, 2, "a smaller one keeps what lies in its places");
    assert!(fs::metadata(folder.path().join("blocks")).expect("file").len() <= 2 * PLACE);
    tiers.clear();
    drop(tiers);
    assert_eq!(open(&options(folder.path(), 0, 2)).stats().disk.blocks, 0, "cleared for good");
}

#[test]
fn one_folder_has_one_owner_and_one_shape() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = options(folder.path(), 0, 4);
    let tiers = open(&settings);
    put(&tiers, 0, 2);
    settle(&tiers);
    assert!(matches!(Tiers::open(&settings, SHAPE), Err(DiskError::InUse(_))));
    drop(tiers);
    let small = options(folder.path(), 0, 0);
    let small =
        TierOptions { disk: Some(DiskOptions { folder: folder.path().into(), bytes: 100, file: None }), ..small };
    assert!(matches!(Tiers::open(&small, SHAPE), Err(DiskError::TooSmall { place_bytes: 8_192, .. })));
    let other = TierShape { layout_digest: 8, ..SHAPE };
    let tiers = Tiers::open(&settings, other).expect("opens").expect("there");
    assert_eq!(tiers.stats().disk.blocks, 0, "another layout's blocks are given up");
    assert!(Tiers::open(&TierOptions::default(), SHAPE).expect("nothing to open").is_none());
}

#[test]
fn a_busy_block_stays_and_one_off_blocks_do_not_push_it_out() {
    let folder = tempfile::tempdir().expect("folder");
    let tiers = open(&options(folder.path(), 0, 4));
    let hot = chain(0, 2);
    (0..5).for_each(|_| tiers.note(&hot));
    put(&tiers, 0, 2);
    settle(&tiers);
    for from in (100..200).step_by(10) {
        put(&tiers, from, 2);
        settle(&tiers);
    }
    assert_whole(&fetch(&tiers, 1, &hot), 0);
    assert!(tiers.stats().disk.refused > 0);
}

#[test]
fn xfr_10_a_torn_index_and_changed_bytes_are_misses() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = options(folder.path(), 0, 8);
    let tiers = open(&settings);
    put(&tiers, 0, 4);
    tiers.close(WITHIN);
    let (index, blocks) = (folder.path().join("index"), folder.path().join("blocks"));
    // The index torn in its last line: the first block of the chain was written last.
    let bytes = fs::read(&index).expect("index");
    fs::write(&index, &bytes[..bytes.len() - 10]).expect("torn");
    // One byte of the second place flipped: block 2 of the chain.
    let mut content = fs::read(&blocks).expect("blocks");
    content[PLACE as usize + 300] ^= 1;
    fs::write(&blocks, &content).expect("changed");
    let tiers = open(&settings);
    assert_eq!(tiers.stats().disk.blocks, 3);
    let found = fetch(&tiers, 1, &chain(0, 4));
    let whole: Vec<bool> = found.iter().map(Option::is_some).collect();
    assert_eq!(whole, [false, true, false, true]);
    assert_eq!((tiers.stats().disk.corrupt, tiers.stats().disk.unreadable), (1, 0));
    assert_eq!(tiers.stats().disk.blocks, 2, "what cannot be trusted is forgotten");
    drop(tiers);
    // Truncated in the middle of a place.
    fs::write(&blocks, &content[..PLACE as usize / 2]).expect("truncated");
    let tiers = open(&settings);
    assert!(fetch(&tiers, 1, &chain(0, 4)).iter().all(Option::is_none));
    assert_eq!((tiers.stats().disk.unreadable, tiers.stats().disk.blocks), (2, 0));
    put(&tiers, 0, 4);
    settle(&tiers);
    assert_whole(&fetch(&tiers, 2, &chain(0, 4)), 0);
}

/// A file whose faults are switched on and off.
#[derive(Debug)]
struct Faulty {
    pages: Mutex<Vec<u8>>,
    mode: Mutex<Mode>,
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Works,
    /// Nothing can be read.
    Unreadable,
    /// Nothing can be written.
    Full,
    /// Reads and writes take as long as this lasts.
    Hangs,
}

impl Faulty {
    fn new() -> Arc<Self> {
        Arc::new(Self { pages: Mutex::default(), mode: Mutex::new(Mode::Works), changed: Condvar::new() })
    }

    fn set(&self, mode: Mode) {
        *self.mode.lock().expect("lock") = mode;
        self.changed.notify_all();
    }

    fn pass(&self) -> Mode {
        let hangs = |mode: &mut Mode| *mode == Mode::Hangs;
        *self.changed.wait_while(self.mode.lock().expect("lock"), hangs).expect("lock")
    }
}

impl BlockFile for Faulty {
    fn load_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        if self.pass() == Mode::Unreadable {
            return Err(io::Error::other("unreadable"));
        }
        assert!(buffer.as_ptr().align_offset(PAGE) == 0 && buffer.len().is_multiple_of(PAGE), "aligned");
        let pages = self.pages.lock().expect("lock");
        let from = pages.get(at as usize..at as usize + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(from);
        Ok(())
    }

    fn store_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        if self.pass() == Mode::Full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        assert!(bytes.as_ptr().align_offset(PAGE) == 0 && bytes.len().is_multiple_of(PAGE), "aligned");
        let mut pages = self.pages.lock().expect("lock");
        let end = at as usize + bytes.len();
        let len = pages.len().max(end);
        pages.resize(len, 0);
        pages[at as usize..end].copy_from_slice(bytes);
        Ok(())
    }
}

fn faulty(folder: &Path) -> (Tiers, Arc<Faulty>) {
    let file = Faulty::new();
    let disk = DiskOptions { folder: folder.to_owned(), bytes: 64 * PLACE, file: Some(file.clone()) };
    (open(&TierOptions { host_bytes: 0, disk: Some(disk) }), file)
}

#[test]
fn xfr_10_a_disk_that_fails_to_read_is_a_miss() {
    let folder = tempfile::tempdir().expect("folder");
    let (tiers, file) = faulty(folder.path());
    put(&tiers, 0, 3);
    settle(&tiers);
    file.set(Mode::Unreadable);
    assert!(fetch(&tiers, 1, &chain(0, 3)).iter().all(Option::is_none));
    settle(&tiers);
    assert_eq!((tiers.stats().disk.unreadable, tiers.stats().disk.blocks), (3, 0));
}

#[test]
fn a_full_disk_costs_cache_and_nothing_else() {
    let folder = tempfile::tempdir().expect("folder");
    let (tiers, file) = faulty(folder.path());
    file.set(Mode::Full);
    put(&tiers, 0, 1);
    until("the write failed", || tiers.stats().disk.unwritten == 1);
    assert!(!tiers.wants(block(50, 0).hash), "no write is tried for a while");
    settle(&tiers);
    assert_eq!((tiers.stats().disk.blocks, tiers.stats().disk.dropped), (0, 1));
    assert_eq!(tiers.worth(&chain(0, 1)), None);
}

#[test]
fn xfr_13_a_disk_that_hangs_holds_nobody_up() {
    let folder = tempfile::tempdir().expect("folder");
    let (tiers, file) = faulty(folder.path());
    put(&tiers, 0, 8);
    settle(&tiers);
    let hashes = chain(0, 8);
    (0..5).for_each(|_| tiers.note(&hashes));
    file.set(Mode::Hangs);
    assert!(tiers.worth(&hashes).is_some());
    tiers.fetch(Ticket(1), &hashes);
    until("readers hang", || tiers.stats().reading == 8);
    assert!(tiers.arrived(Duration::from_millis(1)).is_empty());
    // The caller's deadline passes: what was not begun is given up at once, what hangs is nobody's.
    tiers.forget(Ticket(1), true, &[]);
    until("the queue is empty", || tiers.stats().reading <= 4);
    // Writes queue up to their bound, and the rest is lost.
    for from in 0..10_000 {
        put(&tiers, 1_000 + from, 1);
        if tiers.stats().disk.dropped > 0 {
            break;
        }
    }
    assert!(tiers.stats().disk.dropped > 0);
    assert!(tiers.stats().leaving as usize <= LEAVING_BYTES / BYTES + 1);
    // Long stuck: nobody is sent there.
    until("the wait shows", || tiers.worth(&hashes).is_none());
    until("it is counted as that", || tiers.worth(&hashes).is_none() && tiers.stats().stalled >= 8);
    assert!(tiers.stats().disk_wait_ms > 1_000.0, "routers are told");
    file.set(Mode::Works);
    until("it goes on", || tiers.stats().reading == 0);
    assert_eq!(tiers.stats().late, 1);
    assert_whole(&fetch(&tiers, 2, &hashes[..1]), 0);
    until("all is written", || tiers.stats().leaving == 0);
    tiers.check().expect("whole");
    file.set(Mode::Hangs);
    tiers.fetch(Ticket(3), &hashes);
    until("readers hang", || tiers.stats().reading > 0);
    // Neither the end of the store nor its drop waits for the disk.
    tiers.close(Duration::from_millis(50));
    file.set(Mode::Works);
}

#[test]
fn an_index_that_only_grows_is_written_anew() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = options(folder.path(), 0, 2);
    let tiers = open(&settings);
    for round in 0..1_100 {
        put(&tiers, round * 10, 2);
        settle(&tiers);
    }
    tiers.close(WITHIN);
    let lines = fs::metadata(folder.path().join("index")).expect("index").len() / 64;
    assert!(lines < 4_200, "{lines} lines for 2 blocks");
    assert_eq!(open(&settings).stats().disk.blocks, 2);
}
