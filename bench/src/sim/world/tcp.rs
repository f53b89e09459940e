//! TCP between nodes, as far as membership and directory need it: full-state exchanges, looks at a member that is suspected,
//! and what one directory asks another.
//!
//! Called by the world when a driver asks for either. Pure. A connection takes a round trip for TCP and one for TLS; each
//! message travels like a datagram, but is sent again when lost (see `Network::segment`). A stopped process accepts and does not
//! answer; nobody at the address refuses at once, or, when whole machines die, is not heard of. What the answers
//! do is left to the driver. Bounds: [`HELD_MAX`] calls wait at a stopped process.

use std::net::SocketAddr;

use starling_cluster::{
    discovery::{Ask, Told},
    membership::{EXCHANGE_MAX, Look, Peer, Proof, VERIFY_MAX},
};

use super::{Event, World, directory::unanswered, index};
use crate::sim::{Micros, SECOND, views::Life};

/// How long an exchange may take, in all.
const EXCHANGE_PATIENCE: Micros = 5 * SECOND;
const VERIFY_PATIENCE: Micros = VERIFY_MAX.as_micros() as Micros;
/// Calls that wait for a stopped process.
const HELD_MAX: usize = 64;
/// Bytes around each message: its frame and the TLS record.
const AROUND: usize = 64;

/// One side of a conversation has something to do.
pub(in crate::sim) enum Call {
    /// A question arrives at the one that is asked.
    Ask(Line, Question),
    /// An answer arrives at the one who asked.
    Answer(Line, Answer),
}

/// Who talks to whom, and until when.
#[derive(Clone)]
pub(in crate::sim) struct Line {
    asker: usize,
    life: Life,
    peer: Peer,
    deadline: Micros,
}

pub(in crate::sim) enum Question {
    Exchange(Vec<u8>),
    Verify(Look),
    /// With the ticket under which the directory asks.
    Directory(u64, Ask),
}

pub(in crate::sim) enum Answer {
    Exchanged(Vec<u8>),
    ExchangeFailed,
    Verified(Proof),
    /// Somebody listens where it was knocked, or the host is silent: neither tells anything.
    Knocked,
    Directory(u64, Option<Told>),
}

impl Answer {
    /// What the asker takes it for when it does not arrive.
    fn lost(self) -> Self {
        match self {
            Self::Exchanged(_) | Self::ExchangeFailed => Self::ExchangeFailed,
            Self::Verified(_) => Self::Verified(Proof::Silent),
            Self::Knocked => Self::Knocked,
            Self::Directory(ticket, _) => unanswered(ticket),
        }
    }
}

impl World {
    pub(super) fn open_exchange(&mut self, slot: usize, peer: Peer) {
        self.exchanges += 1;
        let Some(driver) = self.nodes[slot].driver.as_mut() else { return };
        let ask = driver.exchange_open();
        let line = self.line(slot, peer, EXCHANGE_PATIENCE);
        self.connect(line, Question::Exchange(ask));
    }

    pub(super) fn verify(&mut self, slot: usize, peer: Peer, look: Look) {
        self.looks += 1;
        let line = self.line(slot, peer, VERIFY_PATIENCE);
        self.connect(line, Question::Verify(look));
    }

    pub(super) fn line(&self, asker: usize, peer: Peer, patience: Micros) -> Line {
        Line { asker, life: self.nodes[asker].life, peer, deadline: self.now + patience }
    }

    /// Two round trips to open, then half of one for the question.
    pub(super) fn connect(&mut self, line: Line, question: Question) {
        let Some(travel) = self.trips(&line, 2, self.now) else {
            self.give_up(line, &question);
            return;
        };
        if self.server(&line.peer.address).is_none() {
            self.refuse(line, &question, travel);
            return;
        }
        let rest = self.trips(&line, 2, self.now + travel);
        match rest.and_then(|rest| Some(rest + self.trip(&line, true, self.now + travel + rest)?)) {
            Some(rest) => self.ask_at(self.now + travel + rest, line, question),
            None => self.give_up(line, &question),
        }
    }

    fn ask_at(&mut self, at: Micros, line: Line, question: Question) {
        match &question {
            Question::Exchange(ask) => self.count(line.asker, ask.len()),
            Question::Directory(_, ask) => self.count(line.asker, encoded_len(ask)),
            Question::Verify(_) => {}
        }
        self.queue.add(at, Event::Call(Call::Ask(line, question)));
    }

    fn answer_at(&mut self, at: Micros, line: Line, answer: Answer) {
        self.queue.add(at, Event::Call(Call::Answer(line, answer)));
    }

    /// No answer comes before the asker's patience ends.
    fn give_up(&mut self, line: Line, question: &Question) {
        let answer = match question {
            Question::Exchange(_) => Answer::ExchangeFailed,
            Question::Verify(Look::Knock) => Answer::Knocked,
            Question::Verify(Look::Visit) => Answer::Verified(Proof::Silent),
            Question::Directory(ticket, _) => unanswered(*ticket),
        };
        self.answer_at(line.deadline, line, answer);
    }

    /// Nobody listens there: the kernel says so, unless it is gone as well.
    fn refuse(&mut self, line: Line, question: &Question, travel: Micros) {
        if self.setup.machines_die {
            self.give_up(line, question);
            return;
        }
        let answer = match question {
            Question::Exchange(_) => Answer::ExchangeFailed,
            Question::Verify(_) => Answer::Verified(Proof::Refused),
            Question::Directory(ticket, _) => unanswered(*ticket),
        };
        self.answer_at(self.now + travel, line, answer);
    }

    pub(super) fn call(&mut self, call: Call) {
        let slot = match &call {
            Call::Ask(line, _) => self.server(&line.peer.address),
            Call::Answer(line, _) => Some(line.asker).filter(|slot| self.nodes[*slot].life == line.life),
        };
        let Some(slot) = slot.filter(|slot| self.nodes[*slot].driver.is_some()) else {
            if let Call::Ask(line, question) = call {
                self.refuse(line, &question, 0);
            }
            return;
        };
        let node = &mut self.nodes[slot];
        let at = node.on_grid(self.now);
        if node.frozen {
            self.hold(slot, call);
        } else if at > self.now {
            self.queue.add(at, Event::Call(call));
        } else {
            match call {
                Call::Ask(line, question) => self.asked(slot, line, question),
                Call::Answer(line, answer) => self.answered(slot, line, answer),
            }
        }
    }

    /// What arrives at a stopped process waits for it; whoever asked does not.
    fn hold(&mut self, slot: usize, call: Call) {
        if let Call::Ask(line, question) = &call {
            self.give_up(line.clone(), question);
        }
        let held = &mut self.nodes[slot].held;
        if held.len() < HELD_MAX {
            held.push(call);
        }
    }

    fn asked(&mut self, slot: usize, line: Line, question: Question) {
        let answer = match question {
            Question::Verify(Look::Knock) => Answer::Knocked,
            Question::Verify(Look::Visit) => {
                let node = &self.nodes[slot];
                let same =
                    self.name_of(&line.peer.node) == Some(node.name) && line.peer.incarnation.0 == u64::from(node.life);
                Answer::Verified(if same { Proof::Alive } else { Proof::Refused })
            }
            Question::Exchange(ask) => {
                let mut reply = None;
                self.tell(slot, |driver, now| reply = driver.exchange_serve(&ask, now).ok());
                let Some(reply) = reply else {
                    self.invariants.breach(self.now, || format!("node {slot} cannot read an exchange"));
                    return;
                };
                self.count(slot, reply.len());
                Answer::Exchanged(reply)
            }
            Question::Directory(ticket, ask) => {
                let asker = self.names[self.nodes[line.asker].name].clone();
                let told = self.direct_ask(slot, &asker, &ask);
                self.count(slot, told.as_ref().map_or(0, encoded_len));
                Answer::Directory(ticket, told)
            }
        };
        match self.trip(&line, false, self.now) {
            Some(travel) => self.answer_at(self.now + travel, line, answer),
            None => self.answer_at(line.deadline, line, answer.lost()),
        }
    }

    fn answered(&mut self, slot: usize, line: Line, answer: Answer) {
        match answer {
            // It was given up already.
            Answer::Exchanged(_) if self.now > line.deadline => {}
            Answer::Exchanged(reply) => {
                let mut next = Ok(None);
                self.tell(slot, |driver, now| next = driver.exchange_next(&reply, now));
                match next {
                    Ok(None) => {}
                    Ok(Some(ask)) => match self.trip(&line, true, self.now) {
                        Some(travel) => self.ask_at(self.now + travel, line, Question::Exchange(ask)),
                        None => self.give_up(line, &Question::Exchange(ask)),
                    },
                    Err(dropped) => self
                        .invariants
                        .breach(self.now, || format!("node {slot} cannot read the answer in an exchange: {dropped:?}")),
                }
            }
            Answer::Directory(ticket, told) => self.direct_told(slot, ticket, told),
            Answer::ExchangeFailed => self.tell(slot, |driver, now| driver.exchange_failed(now)),
            Answer::Knocked => {}
            Answer::Verified(proof) => {
                let Peer { node, incarnation, .. } = line.peer;
                self.tell(slot, |driver, now| driver.verified(&node, incarnation, proof, now));
            }
        }
    }

    fn count(&mut self, slot: usize, bytes: usize) {
        if bytes > EXCHANGE_MAX {
            self.invariants
                .breach(self.now, || format!("node {slot} sends {bytes} bytes in one message of an exchange"));
        }
        self.nodes[slot].traffic.tcp += (bytes + AROUND) as u64;
    }

    fn server(&self, address: &SocketAddr) -> Option<usize> {
        index(*address).and_then(|at| self.listener(at))
    }

    /// Time for `count` trips, there and back in turn, begun at `now`.
    fn trips(&mut self, line: &Line, count: usize, now: Micros) -> Option<Micros> {
        let mut travel = 0;
        for trip in 0..count {
            travel += self.trip(line, trip % 2 == 0, now + travel)?;
        }
        Some(travel)
    }

    fn trip(&mut self, line: &Line, there: bool, now: Micros) -> Option<Micros> {
        let asker = self.nodes[line.asker].side;
        let asked = self.server(&line.peer.address).map_or(0, |slot| self.nodes[slot].side);
        let (from, to) = if there { (asker, asked) } else { (asked, asker) };
        let patience = line.deadline.checked_sub(now)?;
        self.network.segment(from, to, patience, &mut self.rng)
    }
}

/// Bytes of a message in MessagePack, as sessions carry it.
fn encoded_len<T: serde::Serialize>(message: &T) -> usize {
    rmp_serde::to_vec(message).map_or(0, |bytes| bytes.len())
}
