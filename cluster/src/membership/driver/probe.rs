//! The probe that foca runs, watched: repeated while unanswered, and a failed one judged here instead of by foca.
//!
//! foca probes one member in each period, through others after [`sizing::PROBE_RTT`], and would tell the whole cluster of
//! its suspicion when all that fails: at 20 % loss this fills every packet. So the driver repeats the ping,
//! and if there is still no answer it tells foca that all is well and checks the member itself. Pure.

use std::time::Duration;

use foca::{Header, Member, Message, State};

use super::Driver;
use crate::membership::{Identity, message};

/// When an unanswered ping is sent again, counted from the first. The first time comes before foca asks others to ask, and
/// saves that when one packet was lost.
const AGAIN: [Duration; 3] = [Duration::from_millis(75), Duration::from_millis(150), Duration::from_millis(225)];
/// Then the member is checked. Others have been asked by foca half of this time ago.
pub(super) const FAILED: Duration = Duration::from_millis(300);

/// The member that foca probes now.
#[derive(Debug)]
pub(super) struct Probe {
    id: Identity,
    number: u8,
    begun: Duration,
    tries: usize,
    over: bool,
}

impl Driver {
    /// foca may have begun another probe.
    pub(super) fn adopt_probe(&mut self) {
        if let Some((id, number)) = self.outbox.probe.take() {
            self.probe = Some(Probe { id, number, begun: self.now, tries: 0, over: false });
        }
    }

    pub(super) fn next_probe_step(&self) -> Option<Duration> {
        let probe = self.probe.as_ref().filter(|probe| !probe.over)?;
        Some(probe.begun + AGAIN.get(probe.tries).copied().unwrap_or(FAILED))
    }

    pub(super) fn watch_probe(&mut self) {
        while self.next_probe_step().is_some_and(|at| at <= self.now) {
            let Some(probe) = &mut self.probe else { return };
            if probe.tries < AGAIN.len() {
                probe.tries += 1;
                let (id, number) = (probe.id.clone(), probe.number);
                self.ping(&id, number, None);
            } else {
                self.fail_probe();
            }
        }
    }

    /// The period is over: foca must find its probe answered.
    pub(super) fn conclude_probe(&mut self) {
        if self.probe.as_ref().is_some_and(|probe| !probe.over) {
            self.fail_probe();
        }
        self.probe = None;
    }

    fn fail_probe(&mut self) {
        let Some(probe) = &mut self.probe else { return };
        probe.over = true;
        let (id, number, begun) = (probe.id.clone(), probe.number, probe.begun);
        let Some(known) = self.index.get(id.key()).filter(|known| known.is(&id) && known.is_active()) else { return };
        self.lifeline.probe_failed();
        self.begin_check(id.clone(), begun);
        let own = self.foca.identity().clone();
        let answer = Header { src: id, src_incarnation: known.swim, dst: own, message: Message::Ack(number) };
        if let Some(packet) = message::packet(&answer, None) {
            let outcome = self.foca.handle_data(&packet, &mut self.outbox);
            Self::note("probe", outcome);
        }
    }

    /// A member has answered this node, by whatever way.
    pub(super) fn answered(&mut self, id: &Identity) {
        self.lifeline.answer(id.key(), self.now);
        if let Some(probe) = self.probe.as_mut().filter(|probe| probe.id == *id && !probe.over) {
            probe.over = true;
            self.lifeline.probe_succeeded();
        }
        self.checks.answered(id);
        // It lives and may not know that it is suspected: it is told, and refutes.
        let known = self.index.get(id.key()).filter(|known| known.is(id));
        if let Some(known) = known.filter(|known| known.state() == State::Suspect) {
            self.ping(id, 0, Some(Member::new(id.clone(), known.swim, State::Suspect)));
        }
    }

    /// A ping of the driver's own: foca at the other end answers it like any other, and hears the update first.
    pub(super) fn ping(&mut self, to: &Identity, number: u8, update: Option<Member<Identity>>) {
        let src = self.foca.identity().clone();
        let header =
            Header { src, src_incarnation: self.outbox.own_swim, dst: to.clone(), message: Message::Ping(number) };
        match message::packet(&header, update.as_ref()) {
            Some(packet) => self.outbox.send(to.address(), message::swim(&packet)),
            None => tracing::error!("a ping does not encode"),
        }
    }
}
