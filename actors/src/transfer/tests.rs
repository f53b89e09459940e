//! Tickets on both sides, event by event.

use starling_ids::{AttemptId, Incarnation, NodeId, RequestId, WorkerId};

use super::{
    holder::{Asked, Holder, HolderEffect, Refusal, Word},
    taker::{Piece, Taker, TakerEffect, Wanted},
    *,
};

mod layouts;
mod world;

const LAYOUT: (u64, u64) = (7, 100);

fn party(name: &str, life: u64) -> Party {
    let worker = WorkerId { node: NodeId::new(name).expect("name"), index: 0 };
    Party { worker, incarnation: Incarnation(life) }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn limits() -> Limits {
    Limits { lease: ms(500), tickets: 8, tickets_per_peer: 4, flights_per_peer: 2, quantum: 300 }
}

fn asked(request: u128, attempt: u32, ticket: u64) -> Asked {
    Asked {
        taker: party("d", 1),
        ticket: TakerTicket(ticket),
        holder: party("p", 1),
        request: RequestId(request),
        attempt: AttemptId(attempt),
        layout: LAYOUT.0,
        block_bytes: LAYOUT.1,
        choice: 0,
        shape: None,
        numbers: 0,
    }
}

fn wanted(request: u128, blocks: u32) -> Wanted {
    Wanted {
        request: RequestId(request),
        attempt: AttemptId(1),
        holder: party("p", 1),
        first: 0,
        room: (0..blocks).map(BlockSlot).collect(),
        block_bytes: LAYOUT.1,
    }
}

fn granted(indices: std::ops::Range<u32>) -> Vec<Granted> {
    indices.map(|index| Granted { index, slot: BlockSlot(100 + index), checksum: 0, wave: 0 }).collect()
}

fn released(effects: &[HolderEffect]) -> usize {
    let count = |effect: &HolderEffect| match effect {
        HolderEffect::Release { slots, .. } => slots.len(),
        HolderEffect::Ended { .. } => 0,
    };
    effects.iter().map(count).sum()
}

#[test]
fn xfr_03_a_lease_that_ran_out_is_expired_and_an_old_attempt_is_refused_by_its_id() {
    let mut holder = Holder::new(party("p", 1), LAYOUT, limits());
    let (first, _) = holder.open(ms(0), asked(1, 1, 1)).expect("open");
    holder.pinned(first, &[BlockSlot(3), BlockSlot(4)]);
    let (second, effects) = holder.open(ms(10), asked(1, 2, 2)).expect("a later attempt");
    assert_eq!(released(&effects), 2, "{effects:?}");
    // The end of the first attempt comes late: by either id it changes nothing of the second.
    assert_eq!(holder.said(ms(20), (first, AttemptId(1)), Word::Complete), Err(NotOpen));
    assert_eq!(holder.said(ms(20), (second, AttemptId(1)), Word::Complete), Err(NotOpen));
    assert_eq!(holder.open(ms(20), asked(1, 1, 3)), Err(Refusal::OldAttempt { newest: AttemptId(2) }));
    assert_eq!(holder.open_tickets(), 1);
    // A transfer of 2 s under a lease of 500 ms that nobody renews.
    let mut taker = Taker::new(limits());
    let ticket = taker.want(ms(0), wanted(1, 2));
    taker.accepted(ms(0), ticket, second).expect("open");
    taker.granted(ms(10), (ticket, second), &granted(0..2)).expect("granted");
    let (_, _, pieces) = taker.next(&party("p", 1)).expect("a transfer");
    let effects = taker.tick(ms(600));
    assert_eq!(effects, [TakerEffect::Ended { ticket, end: End::Expired }], "its room waits for the transport");
    let effects = taker.landed(ms(2_000), ticket, (&pieces, Ok(())));
    let [TakerEffect::Settled { end: End::Expired, ready, spare, .. }] = &effects[..] else { panic!("{effects:?}") };
    assert!(ready.is_empty() && spare.len() == 2, "what came late is not used");
    assert_eq!(released(&holder.tick(ms(600))) + holder.pins() + holder.open_tickets(), 0);
}

#[test]
fn xfr_05_a_taker_that_pauses_is_told_and_renewals_extend_the_lease() {
    let mut holder = Holder::new(party("p", 1), LAYOUT, limits());
    let (ticket, _) = holder.open(ms(0), asked(1, 1, 1)).expect("open");
    holder.pinned(ticket, &[BlockSlot(1)]);
    for at in 1..20 {
        let renewed = holder.said(ms(at * 300), (ticket, AttemptId(1)), Word::Renew);
        assert_eq!(renewed, Ok(Vec::new()), "at {}", at * 300);
        assert_eq!(holder.tick(ms(at * 300 + 200)), Vec::new());
    }
    // A pause of two leases.
    let effects = holder.tick(ms(19 * 300 + 1_000));
    assert!(matches!(effects[0], HolderEffect::Ended { taker: TakerTicket(1), end: End::Expired, .. }), "{effects:?}");
    assert_eq!(released(&effects), 1);
    assert_eq!(holder.said(ms(7_000), (ticket, AttemptId(1)), Word::Renew), Err(NotOpen), "it hears that it is over");
}

#[test]
fn xfr_06_room_of_a_given_up_pull_is_back_within_the_lease_whatever_the_other_side_does() {
    let mut taker = Taker::new(limits());
    for round in 0..100u64 {
        let at = ms(round * 1_000);
        let ticket = taker.want(at, wanted(u128::from(round), 4));
        if round % 3 > 0 {
            taker.accepted(at, ticket, HolderTicket(round)).expect("open");
        }
        if round % 3 > 1 {
            taker.granted(at, (ticket, HolderTicket(round)), &granted(0..4)).expect("granted");
        }
        // Given up, or the other side dies without a word.
        let effects = if round % 2 == 0 { taker.end(ticket, End::Aborted) } else { taker.tick(at + ms(500)) };
        assert!(matches!(effects.last(), Some(TakerEffect::Settled { spare, .. }) if spare.len() == 4), "{effects:?}");
        assert_eq!((taker.open_tickets(), taker.room()), (0, 0));
    }
}

#[test]
fn xfr_08_each_side_names_a_ticket_by_its_own_id() {
    // The ids differ on purpose; handing one where the other is meant does not compile.
    let mut holder = Holder::new(party("p", 1), LAYOUT, limits());
    let (first, _) = holder.open(ms(0), asked(1, 1, 70)).expect("open");
    let (second, _) = holder.open(ms(0), asked(2, 1, 71)).expect("open");
    holder.pinned(second, &[BlockSlot(9)]);
    let effects = holder.said(ms(1), (second, AttemptId(1)), Word::Complete).expect("open");
    let ended = HolderEffect::Ended { ticket: second, taker: TakerTicket(71), end: End::Complete };
    assert_eq!(effects[0], ended);
    assert_eq!(released(&effects), 1);
    assert_eq!((holder.open_tickets(), holder.pins()), (1, 0));
    assert!(first != second);
}

#[test]
fn tickets_and_transfers_of_one_peer_are_bounded_and_take_turns() {
    let mut holder = Holder::new(party("p", 1), LAYOUT, limits());
    for request in 0..4 {
        holder.open(ms(0), asked(request, 1, 1)).expect("open");
    }
    assert_eq!(holder.open(ms(0), asked(9, 1, 1)), Err(Refusal::Busy { limit: 4 }));
    let mut taker = Taker::new(limits());
    let (long, short) = (taker.want(ms(0), wanted(1, 20)), taker.want(ms(0), wanted(2, 2)));
    for (ticket, blocks) in [(long, 0..20), (short, 0..2)] {
        taker.accepted(ms(0), ticket, HolderTicket(ticket.0)).expect("open");
        taker.granted(ms(0), (ticket, HolderTicket(ticket.0)), &granted(blocks)).expect("granted");
    }
    let peer = party("p", 1);
    let (first, _, pieces) = taker.next(&peer).expect("a transfer");
    assert_eq!((first, pieces.len()), (long, 3));
    let (second, _, _) = taker.next(&peer).expect("another one");
    assert_eq!(second, short);
    assert_eq!(taker.next(&peer), None, "two are under way");
    taker.landed(ms(1), long, (&pieces, Ok(())));
    assert!(taker.next(&peer).is_some());
}
