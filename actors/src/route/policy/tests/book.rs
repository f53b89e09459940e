//! What is reserved is counted once and comes back once.

use super::*;

#[test]
fn cnt_03_what_is_reserved_comes_back_once_whatever_happens_to_its_worker() {
    let mut bench = Bench::new(PolicyName::Starling, 2);
    let decisions: Vec<_> = (0..6).map(|kind| bench.decide(&hashes(kind, 4), &[], None)).collect();
    let places = Places { sequences: 8, ..Places::default() };
    // A new life begins with nothing; late ends of the earlier one change nothing there.
    bench.desk.seat(&worker(0), Incarnation(2), places, Standing::Sound);
    let slot = bench.desk.fleet().slot(&worker(0)).expect("seated");
    assert_eq!((bench.desk.fleet().requests[slot], bench.desk.fleet().unreported_tokens[slot]), (0, 0));
    for decision in &decisions {
        let of_old_life = decision.worker == worker(0);
        bench.desk.confirm(decision.ticket, 1);
        bench.desk.ended(decision.ticket, Outcome::default());
        assert_eq!(bench.desk.release(decision.ticket), !of_old_life);
        assert!(!bench.desk.release(decision.ticket), "once");
    }
    assert_eq!(bench.desk.reservations(), 0);
    let fleet = bench.desk.fleet();
    for (_, slot) in fleet.workers() {
        assert_eq!((fleet.requests[slot], fleet.sequences[slot], fleet.unreported[slot]), (0, 0, 0));
        assert_eq!((fleet.unreported_tokens[slot], fleet.unreported_blocks[slot]), (0, 0));
    }
}

#[test]
fn a_reservation_is_counted_once_beside_the_workers_own_account() {
    let mut bench = Bench::new(PolicyName::LeastLoaded, 1);
    let slot = bench.desk.fleet().slot(&worker(0)).expect("seated");
    let (one, two) = (bench.decide(&hashes(1, 4), &[], None), bench.decide(&hashes(2, 4), &[], None));
    assert_eq!(bench.desk.fleet().queued_tokens(slot), 128);
    // The account comes before the confirmation of what it covers.
    let heard = Heard { at: bench.now, running: 1, prefill_tokens: 64, admitted: 1, ..Heard::default() };
    bench.desk.hear(&worker(0), Incarnation(1), heard);
    bench.desk.confirm(one.ticket, 1);
    bench.desk.confirm(two.ticket, 2);
    assert_eq!((bench.desk.fleet().in_flight(slot), bench.desk.fleet().queued_tokens(slot)), (2, 128));
    bench.desk.hear(&worker(0), Incarnation(1), Heard { running: 2, prefill_tokens: 128, admitted: 2, ..heard });
    assert_eq!((bench.desk.fleet().in_flight(slot), bench.desk.fleet().queued_tokens(slot)), (2, 128));
    assert!(bench.desk.release(one.ticket) && bench.desk.release(two.ticket));
    bench.desk.hear(&worker(0), Incarnation(1), Heard { admitted: 2, at: bench.now, ..Heard::default() });
    assert_eq!((bench.desk.fleet().in_flight(slot), bench.desk.fleet().queued_tokens(slot)), (0, 0));
}
