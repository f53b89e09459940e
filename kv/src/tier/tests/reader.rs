//! Blocks of the tiers read beside the engine.

use super::*;

const LIMIT: Duration = Duration::from_secs(20);

/// Reads to the end; where each block was.
fn read(reading: &mut Reading, from: u32) -> Vec<Tier> {
    let mut tiers = Vec::new();
    while let Some((tier, found)) = reading.next_block() {
        assert_eq!(*found, block(from, tiers.len() as u32));
        tiers.push(tier);
    }
    tiers
}

#[test]
fn others_read_what_lies_on_both_tiers_while_the_engine_fetches_too() {
    let folder = tempfile::tempdir().expect("folder");
    let tiers = open(&options(folder.path(), 4, 60));
    put(&tiers, 0, 40);
    settle(&tiers);
    let reader = tiers.reader();
    assert!(reader.read(&chain(500, 3), LIMIT).is_none(), "nobody has it");
    let mut hashes = chain(0, 40);
    hashes.extend(chain(700, 2));
    let mut reading = reader.read(&hashes, LIMIT).expect("it lies below");
    assert_eq!(reading.blocks(), 40);
    // Tickets of the engine, of the same numbers, go their own way.
    let other = std::thread::spawn(move || (read(&mut reading, 0), reading));
    assert_whole(&fetch(&tiers, 1, &chain(0, 40)), 0);
    let (from, reading) = other.join().expect("read");
    assert_eq!((from.len(), reading.blocks()), (40, 40));
    let host = from.iter().filter(|tier| **tier == Tier::Host).count();
    assert!((1..=4).contains(&host), "the last ones that left: {from:?}");
    let before = tiers.stats();
    drop(reading);
    let stats = tiers.stats();
    assert_eq!((stats.fetched - before.fetched, stats.host.fetched - before.host.fetched), (40, host as u64));
    // One that is dropped half way leaves no place pinned.
    let mut half = reader.read(&hashes, LIMIT).expect("it lies below");
    assert!(half.next_block().is_some());
    drop(half);
    settle(&tiers);
    drop(tiers);
    assert!(reader.read(&hashes, LIMIT).is_none(), "the engine has ended");
}

#[test]
fn xfr_10_what_others_read_ends_at_a_block_that_cannot_be_read() {
    let folder = tempfile::tempdir().expect("folder");
    let (tiers, file) = faulty(folder.path());
    put(&tiers, 0, 12);
    settle(&tiers);
    let mut reading = tiers.reader().read(&chain(0, 12), LIMIT).expect("it lies below");
    assert!(reading.next_block().is_some());
    until("what is read ahead is here", || tiers.stats().reading == 0);
    file.set(Mode::Unreadable);
    let came = 1 + read_from(&mut reading, 1);
    assert!((8..12).contains(&came), "{came}: only what was read before");
    drop(reading);
    settle(&tiers);
    assert!(tiers.stats().disk.unreadable > 0);
    // One byte of a block is changed while nobody looks.
    file.set(Mode::Works);
    let left = tiers.reader().read(&chain(0, 12), LIMIT).expect("the beginning is there").blocks();
    assert_eq!(left as u32, came, "what could not be read is forgotten");
    file.pages.lock().expect("lock").iter_mut().for_each(|byte| *byte ^= 1);
    assert!(tiers.reader().read(&chain(0, 12), LIMIT).expect("listed").next_block().is_none());
    settle(&tiers);
    assert!(tiers.stats().disk.corrupt > 0);
}

fn read_from(reading: &mut Reading, first: u32) -> u32 {
    let mut at = first;
    while let Some((_, found)) = reading.next_block() {
        assert_eq!(*found, block(0, at));
        at += 1;
    }
    at - first
}

#[test]
fn xfr_13_a_disk_that_hangs_is_read_for_others_no_longer_than_they_wait() {
    let folder = tempfile::tempdir().expect("folder");
    let (tiers, file) = faulty(folder.path());
    put(&tiers, 0, 8);
    settle(&tiers);
    file.set(Mode::Hangs);
    let mut reading = tiers.reader().read(&chain(0, 8), Duration::from_millis(50)).expect("nobody knows yet");
    assert!(!reading.is_here() && reading.next_block().is_none());
    drop(reading);
    until("the queue is empty", || tiers.stats().reading <= 4);
    until("nobody is sent there any more", || tiers.reader().read(&chain(0, 8), LIMIT).is_none());
    assert!(tiers.stats().stalled >= 8);
    file.set(Mode::Works);
    until("it goes on", || tiers.stats().reading == 0);
    assert_eq!(read(&mut tiers.reader().read(&chain(0, 8), LIMIT).expect("there"), 0).len(), 8);
    settle(&tiers);
}
