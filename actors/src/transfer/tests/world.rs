//! Both sides and a network between them that loses, repeats and reorders: whatever happens, everything comes back.

use std::collections::{BTreeMap, HashSet, VecDeque};

use proptest::prelude::*;

use super::*;

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
