use std::collections::{BTreeMap, HashSet, VecDeque};

use proptest::prelude::*;
use starling_ids::{AttemptId, Incarnation, NodeId, RequestId, WorkerId};
use starling_kv::layout::{KvDtype, KvLayout, KvOrder};

use super::{
    holder::{Asked, Holder, HolderEffect, Refusal, Word},
    taker::{Piece, Taker, TakerEffect, Wanted},
    *,
};

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
fn xfr_09_other_layouts_are_refused_by_name() {
    let mut holder = Holder::new(party("p", 1), LAYOUT, limits());
    for (layout, bytes) in [(8, 100), (7, 200), (0, 0)] {
        let error = holder.open(ms(0), Asked { layout, block_bytes: bytes, ..asked(1, 1, 1) }).expect_err("refused");
        assert!(matches!(error, Refusal::Layout { .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("{bytes} there")), "{error}");
    }
    let stale = Asked { holder: party("p", 2), ..asked(1, 1, 1) };
    assert!(matches!(holder.open(ms(0), stale), Err(Refusal::Stale { .. })));
    assert_eq!(holder.open_tickets(), 0);
}

#[test]
fn xfr_09_what_differs_between_two_layouts_is_said() {
    let (dtype, order) = (KvDtype::F16, KvOrder::LayerKvTokenHeadDim);
    let ours = KvLayout { layers: 2, kv_heads: 4, head_dim: 8, dtype, block_tokens: 16, order, tp_rank: 0, tp_size: 1 };
    let mut holder = Holder::new(party("p", 1), LAYOUT, limits()).shaped(Some(ours), 5);
    let mut refused = |shape| {
        let other = Asked { layout: 8, shape, ..asked(1, 1, 1) };
        holder.open(ms(0), other).expect_err("refused").to_string()
    };
    let cases = [
        (KvLayout { block_tokens: 32, ..ours }, "there: block_tokens 16 here, 32 there (these could be converted)"),
        (KvLayout { dtype: KvDtype::Bf16, ..ours }, "there: dtype F16 here, Bf16 there"),
        (KvLayout { layers: 3, block_tokens: 32, ..ours }, "there: layers 2 here, 3 there"),
        (
            KvLayout { kv_heads: 2, tp_size: 2, ..ours },
            "kv_heads 4 here, 2 there; tp_size 1 here, 2 there (these could be",
        ),
        (ours, "there: one shape, filled differently"),
    ];
    for (theirs, reason) in cases {
        let said = refused(Some(theirs));
        assert!(said.contains(reason), "{said}");
    }
    assert!(refused(None).ends_with("with 100 there"));
    let order = KvOrder::LayerHeadKeysTransposed;
    assert!(
        refused(Some(KvLayout { order, ..ours })).contains("(these could be converted)"),
        "its numbers are unknown"
    );
}

#[test]
fn xfr_09_another_order_of_the_same_numbers_is_taken_by_whoever_can_convert_it() {
    let (dtype, order) = (KvDtype::F16, KvOrder::LayerKvTokenHeadDim);
    let ours = KvLayout { layers: 2, kv_heads: 4, head_dim: 8, dtype, block_tokens: 16, order, tp_rank: 0, tp_size: 1 };
    let theirs = KvLayout { order: KvOrder::LayerHeadKeysTransposed, ..ours };
    let opens = |numbers, asked: Asked| {
        Holder::new(party("p", 1), LAYOUT, limits()).shaped(Some(ours), numbers).open(ms(0), asked).is_ok()
    };
    let other = Asked { layout: 8, shape: Some(theirs), numbers: 5, ..asked(1, 1, 1) };
    assert!(opens(5, other.clone()));
    assert!(!opens(6, other.clone()) && !opens(0, Asked { numbers: 0, ..other.clone() }), "other numbers, or unknown");
    assert!(!opens(5, Asked { block_bytes: 200, ..other.clone() }));
    assert!(!opens(5, Asked { shape: Some(KvLayout { block_tokens: 32, ..theirs }), ..other.clone() }));
    assert!(!opens(5, Asked { shape: Some(KvLayout { tp_size: 2, ..theirs }), ..other.clone() }));
    assert!(!opens(5, Asked { shape: None, ..other }));
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

/// Both sides with a network between them that loses, repeats and reorders.
struct World {
    now: Duration,
    holder: Option<Holder>,
    holder_life: u64,
    taker: Taker,
    /// Pins that the holder's pool counts, by ticket; empty in a new life.
    pins: BTreeMap<HolderTicket, usize>,
    /// Room that the taker's pool counts.
    room: HashSet<BlockSlot>,
    free: Vec<BlockSlot>,
    to_holder: VecDeque<Message>,
    to_taker: VecDeque<Answer>,
    flights: Vec<(TakerTicket, Vec<Piece>)>,
    next_request: u128,
    attempts: BTreeMap<u128, u32>,
}

#[derive(Debug, Clone)]
enum Message {
    Ask(Asked),
    Say(HolderTicket, AttemptId, Word),
}

#[derive(Debug, Clone)]
enum Answer {
    Accepted(TakerTicket, HolderTicket),
    Granted(TakerTicket, HolderTicket, Vec<Granted>),
    Over(TakerTicket),
}

#[derive(Debug, Clone)]
enum Deed {
    Want { blocks: u32, again: bool },
    ToHolder { at: usize, lose: bool, twice: bool },
    ToTaker { at: usize, lose: bool, twice: bool },
    Pin { ticket: u64, count: u32 },
    Fly,
    Land { at: usize, result: u8 },
    End { ticket: u64 },
    HolderDies,
    PeerGone,
    Pass { ms: u64 },
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let any_at = 0usize..8;
    let deed = prop_oneof![
        3 => (1u32..6, any::<bool>()).prop_map(|(blocks, again)| Deed::Want { blocks, again }),
        6 => (any_at.clone(), prop::bool::weighted(0.1), prop::bool::weighted(0.1))
            .prop_map(|(at, lose, twice)| Deed::ToHolder { at, lose, twice }),
        6 => (any_at.clone(), prop::bool::weighted(0.1), prop::bool::weighted(0.1))
            .prop_map(|(at, lose, twice)| Deed::ToTaker { at, lose, twice }),
        4 => (1u64..20, 1u32..4).prop_map(|(ticket, count)| Deed::Pin { ticket, count }),
        4 => Just(Deed::Fly),
        4 => (any_at, 0u8..6).prop_map(|(at, result)| Deed::Land { at, result }),
        1 => (1u64..20).prop_map(|ticket| Deed::End { ticket }),
        1 => Just(Deed::HolderDies),
        1 => Just(Deed::PeerGone),
        3 => prop_oneof![1u64..200, Just(5_000u64)].prop_map(|ms| Deed::Pass { ms }),
    ];
    prop::collection::vec(deed, 1..120)
}

impl World {
    fn new() -> Self {
        Self {
            now: ms(0),
            holder: Some(Holder::new(party("p", 1), LAYOUT, limits())),
            holder_life: 1,
            taker: Taker::new(limits()),
            pins: BTreeMap::new(),
            room: HashSet::new(),
            free: (0..64).map(BlockSlot).collect(),
            to_holder: VecDeque::new(),
            to_taker: VecDeque::new(),
            flights: Vec::new(),
            next_request: 0,
            attempts: BTreeMap::new(),
        }
    }

    fn held(&mut self, effects: Vec<HolderEffect>) {
        for effect in effects {
            match effect {
                HolderEffect::Release { ticket, slots } => {
                    let pins = self.pins.get_mut(&ticket).expect("pins of a ticket that has some");
                    *pins = pins.checked_sub(slots.len()).expect("never more pins back than were taken");
                }
                HolderEffect::Ended { taker, .. } => self.to_taker.push_back(Answer::Over(taker)),
            }
        }
    }

    fn took(&mut self, effects: Vec<TakerEffect>, theirs: Option<HolderTicket>) {
        for effect in effects {
            match effect {
                TakerEffect::Renew { .. } | TakerEffect::Ended { .. } => {
                    if let Some(theirs) = theirs {
                        self.to_holder.push_back(Message::Say(theirs, AttemptId(1), Word::Renew));
                    }
                }
                TakerEffect::Settled { ticket, ready, spare, end } => {
                    assert!(!self.flights.iter().any(|(flying, _)| *flying == ticket), "{ticket:?} is under way");
                    assert!(end != End::Complete || ready.iter().map(|(at, _)| *at).eq(0..ready.len() as u32));
                    for slot in ready.into_iter().map(|(_, slot)| slot).chain(spare) {
                        assert!(self.room.remove(&slot), "room is given back once");
                        self.free.push(slot);
                    }
                }
            }
        }
    }

    fn act(&mut self, deed: Deed) {
        match deed {
            Deed::Want { blocks, again } => self.want(blocks, again),
            Deed::ToHolder { at, lose, twice } => {
                if let Some(message) = take(&mut self.to_holder, at, lose, twice) {
                    self.hear_holder(message);
                }
            }
            Deed::ToTaker { at, lose, twice } => {
                if let Some(answer) = take(&mut self.to_taker, at, lose, twice) {
                    self.hear_taker(answer);
                }
            }
            Deed::Pin { ticket, count } => self.pin(HolderTicket(ticket), count),
            Deed::Fly => {
                let holder = party("p", self.holder_life);
                if let Some((ticket, _, pieces)) = self.taker.next(&holder) {
                    assert!(pieces.iter().all(|piece| self.room.contains(&piece.to)), "written room is reserved");
                    self.flights.push((ticket, pieces));
                }
                assert!(self.flights.len() <= 2 * self.holder_life as usize);
            }
            Deed::Land { at, result } => self.land(at, result),
            Deed::End { ticket } => {
                let effects = self.taker.end(TakerTicket(ticket), End::Aborted);
                self.took(effects, Some(HolderTicket(ticket)));
            }
            Deed::HolderDies => {
                self.holder_life += 1;
                self.pins.clear();
                self.holder = Some(Holder::new(party("p", self.holder_life), LAYOUT, limits()));
            }
            Deed::PeerGone => {
                let effects = self.taker.gone(&party("p", self.holder_life.saturating_sub(1).max(1)));
                self.took(effects, None);
                let effects = self.holder.as_mut().map(|holder| holder.gone(&party("d", 1))).unwrap_or_default();
                self.held(effects);
            }
            Deed::Pass { ms: passed } => {
                self.now += ms(passed);
                self.tick();
            }
        }
    }

    fn want(&mut self, blocks: u32, again: bool) {
        if self.free.len() < blocks as usize {
            return;
        }
        if !again || self.next_request == 0 {
            self.next_request += 1;
        }
        let request = self.next_request;
        let attempt = self.attempts.entry(request).or_insert(0);
        *attempt += 1;
        let room = self.free.split_off(self.free.len() - blocks as usize);
        self.room.extend(room.iter().copied());
        let holder = party("p", self.holder_life);
        let wanted = Wanted {
            request: RequestId(request),
            attempt: AttemptId(*attempt),
            holder: holder.clone(),
            first: 0,
            room,
            block_bytes: LAYOUT.1,
        };
        let ticket = self.taker.want(self.now, wanted);
        let ask = Asked { holder, attempt: AttemptId(*attempt), ..asked(request, 1, ticket.0) };
        self.to_holder.push_back(Message::Ask(ask));
    }

    fn hear_holder(&mut self, message: Message) {
        let Some(holder) = self.holder.as_mut() else { return };
        match message {
            Message::Ask(ask) => {
                let theirs = ask.ticket;
                match holder.open(self.now, ask) {
                    Ok((ticket, effects)) => {
                        self.to_taker.push_back(Answer::Accepted(theirs, ticket));
                        self.held(effects);
                    }
                    Err(_) => self.to_taker.push_back(Answer::Over(theirs)),
                }
            }
            Message::Say(ticket, attempt, word) => {
                if let Ok(effects) = holder.said(self.now, (ticket, attempt), word) {
                    self.held(effects);
                }
            }
        }
    }

    fn hear_taker(&mut self, answer: Answer) {
        match answer {
            // A message about a ticket that is over says nothing new.
            Answer::Accepted(ticket, theirs) => {
                self.taker.accepted(self.now, ticket, theirs).ok();
            }
            Answer::Granted(ticket, theirs, blocks) => {
                self.taker.granted(self.now, (ticket, theirs), &blocks).ok();
            }
            Answer::Over(ticket) => {
                let effects = self.taker.end(ticket, End::PeerGone);
                self.took(effects, None);
            }
        }
    }

    fn pin(&mut self, ticket: HolderTicket, count: u32) {
        let Some(holder) = self.holder.as_mut() else { return };
        let pins = self.pins.entry(ticket).or_default();
        let from = *pins as u32;
        *pins += count as usize;
        let slots: Vec<BlockSlot> = (from..from + count).map(|at| BlockSlot(1_000 + at)).collect();
        let effects = holder.pinned(ticket, &slots);
        if effects.is_empty() {
            self.to_taker.push_back(Answer::Granted(TakerTicket(ticket.0), ticket, granted(from..from + count)));
        }
        self.held(effects);
    }

    fn land(&mut self, at: usize, result: u8) {
        if self.flights.is_empty() {
            return;
        }
        let (ticket, pieces) = self.flights.remove(at % self.flights.len());
        let result = match result {
            0 => Err(End::Corrupt),
            1 => Err(End::Broken),
            _ => Ok(()),
        };
        let effects = self.taker.landed(self.now, ticket, (&pieces, result));
        self.took(effects, None);
        if self.taker.progress(ticket).is_some_and(|(_, all)| all) {
            let effects = self.taker.end(ticket, End::Complete);
            self.took(effects, None);
        }
    }

    fn tick(&mut self) {
        let effects = self.taker.tick(self.now);
        self.took(effects, None);
        let effects = self.holder.as_mut().map(|holder| holder.tick(self.now)).unwrap_or_default();
        self.held(effects);
    }
}

/// Takes a message out of the network, in any order; or loses it, or leaves a copy.
fn take<T: Clone>(queue: &mut VecDeque<T>, at: usize, lose: bool, twice: bool) -> Option<T> {
    if queue.is_empty() {
        return None;
    }
    let at = at % queue.len();
    let message = queue.remove(at)?;
    if twice {
        queue.push_back(message.clone());
    }
    (!lose).then_some(message)
}

proptest! {
    /// Whatever is lost, repeated or late and whoever dies: one lease later both pools and all tickets are at their start.
    #[test]
    fn everything_comes_back_within_the_lease(deeds in deeds()) {
        let mut world = World::new();
        for deed in deeds {
            world.act(deed);
            let pins: usize = world.pins.values().sum();
            prop_assert_eq!(world.holder.as_ref().map_or(0, Holder::pins), pins);
            prop_assert_eq!(world.taker.room(), world.room.len());
            prop_assert_eq!(world.free.len() + world.room.len(), 64);
        }
        world.now += limits().lease;
        world.tick();
        // A transport's own deadline brings back what is under way.
        while !world.flights.is_empty() {
            world.land(0, 1);
        }
        prop_assert_eq!(world.holder.as_ref().map_or((0, 0), |h| (h.open_tickets(), h.pins())), (0, 0));
        prop_assert_eq!((world.taker.open_tickets(), world.taker.room(), world.free.len()), (0, 0, 64));
        prop_assert_eq!(world.pins.values().sum::<usize>(), 0);
    }
}
