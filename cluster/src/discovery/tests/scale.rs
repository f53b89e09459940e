//! The directory at 500 workers with 20 models each, and at 10,000 nodes: sizes, messages, and what a change costs.
//!
//! Prints what it measures; asserts bounds that do not depend on the machine. The long ones are run by hand:
//! `cargo test --release -p starling-cluster --lib discovery::scale -- --ignored --nocapture`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use starling_ids::Incarnation;

use super::pure::{Net, members, name, record};
use crate::{
    discovery::*,
    membership::{Rumour, place},
};

/// Bytes of user data in one gossip packet.
const PACKET: usize = 1_300;

#[test]
fn mem_18_a_record_of_20_models_has_a_vital_part_of_two_packets_and_small_changes_fit_one_packet_ten_times() {
    let own = OwnRecord::new(record(name(499), 1, 1, 20));
    let whole = rmp_serde::to_vec(&Patch::whole(&own.get(), 0)).expect("encodes").len();
    let vital = rmp_serde::to_vec(&Patch::vital(&own.get())).expect("encodes").len();
    let before = own.get();
    own.update(|record| record.instances[3].lifecycle = Lifecycle::Draining).expect("legal");
    let (now, delta) = own.news();
    let one = rmp_serde::to_vec(&Patch::whole(&now, before.version)).expect("encodes").len();
    let (node, incarnation, version) = (name(499), Incarnation(u64::MAX), now.version);
    let rumour = Rumour { node, incarnation, place: u32::MAX, version, delta, teller: None };
    let rumour = rmp_serde::to_vec(&rumour).expect("encodes").len();
    println!("20 instances: whole {whole} B, vital {vital} B, one changed instance {one} B, its rumour {rumour} B");
    assert!(vital < 2 * PACKET && vital * 3 < whole * 2, "{vital} of {whole}");
    assert!(one < 400 && rumour * 10 < PACKET, "{one}, {rumour}");
}

#[test]
fn mem_18_a_newcomer_among_40_workers_of_20_models_has_the_vital_parts_first() {
    newcomer(40, 20);
}

#[test]
#[ignore = "large: run by hand in release"]
fn mem_18_a_newcomer_among_500_workers_of_20_models() {
    newcomer(500, 20);
}

/// Everybody knows everybody but the last, who then joins.
fn newcomer(workers: usize, instances: usize) {
    let mut net = Net::new(workers + 1, instances, 11, 0.0);
    let all = members((0..workers).map(|at| (name(at), 1)));
    for at in 0..workers {
        net.engines[at].set_members(&all, Duration::ZERO);
        for other in 0..workers {
            net.know(at, other);
        }
    }
    (net.messages, net.bytes, net.largest) = (0, 0, 0);
    net.join(workers);
    let vital = net.until(Duration::from_secs(60), "vital parts", |net| {
        let core = net.engines[workers].core();
        (0..workers).all(|at| core.record(&name(at)).is_some())
    });
    let (messages, bytes) = (net.messages, net.bytes);
    println!("{workers} x {instances}: vital parts after {vital:?}: {messages} messages, {bytes} B");
    let rest = net.until(Duration::from_secs(60), "everything", Net::agreed);
    let busiest = net.served.values().max().copied().unwrap_or_default();
    println!(
        "{workers} x {instances}: all of it {rest:?} later: {} messages, {} B, the largest {} B, the busiest node sent {busiest} B",
        net.messages, net.bytes, net.largest
    );
    assert!(vital + rest < Duration::from_secs(10), "ready within ten seconds");
    assert!(net.largest <= PATCHES_BYTES_MAX + 8 * 1024, "one message of {} bytes", net.largest);
}

#[test]
#[ignore = "measures time: run by hand in release"]
fn what_a_change_costs_at_10_000_nodes() {
    let nodes = 10_000;
    let own = Arc::new(record(name(nodes), 1, 1, 0));
    let mut engine = DirectoryEngine::new(own, 1, Duration::ZERO);
    let all = members((0..nodes).map(|at| (name(at), 1)));
    let begin = Instant::now();
    engine.set_members(&all, Duration::ZERO);
    println!("10,000 members at once: {:?}", begin.elapsed());
    let mut core = DirectoryCore::new(Arc::new(record(name(nodes), 1, 1, 0)));
    core.set_members(&all);
    let begin = Instant::now();
    for at in 0..nodes {
        core.offer(Patch::whole(&record(name(at), 1, 1, 20), 0)).expect("news");
    }
    println!("10,000 records of 20 instances taken: {:?}", begin.elapsed());
    let begin = Instant::now();
    for _ in 0..100 {
        core.set_members(&all);
    }
    println!("a member list without a change: {:?}", begin.elapsed() / 100);
    let begin = Instant::now();
    let snapshots: Vec<Snapshot> = (0..100).map(|_| core.snapshot()).collect();
    println!("a snapshot: {:?}, at most every {COALESCE:?}", begin.elapsed() / 100);
    drop(snapshots);
    let changes = vec![SmallChange::Lifecycle(endpoint_hash(&super::pure::endpoint(3)), Lifecycle::Draining)];
    let begin = Instant::now();
    for version in 2..1_002 {
        let delta = Some(RecordDelta { since: 1, changes: changes.clone() });
        let (node, incarnation, place) = (name(77), Incarnation(1), place(all[&name(77)].address));
        let told = Rumour { node, incarnation, place, version, delta, teller: None };
        assert_eq!(core.hear(&told), Heard::Applied);
    }
    println!("a lifecycle change taken: {:?}", begin.elapsed() / 1_000);
    let ask = rmp_serde::to_vec(&Ask::Root(core.tally().root())).expect("encodes").len();
    let sums = rmp_serde::to_vec(&Told::Sums(core.tally().sums().to_vec())).expect("encodes").len();
    let (page, _) = core.tally().entries(&[7], None, ENTRIES_MAX);
    let page = rmp_serde::to_vec(&Told::Entries(page, false)).expect("encodes").len();
    println!("comparison: nothing new {ask} B, sums {sums} B, one differing bucket {page} B");
}
