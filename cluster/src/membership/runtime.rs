//! Where foca puts what it wants done: packets, timers, changes.
//!
//! Called by foca during a call of the driver, emptied by the driver after it. Pure. Bounds: what one call yields;
//! timers are one of each kind and one for each down member.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use foca::{Codec, Header, Message, Notification, PostcardCodec, Runtime, Timer};
use starling_ids::NodeId;

use super::{Identity, message, news::News};

/// Collected during one call.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) now: Duration,
    pub(super) sends: Vec<(SocketAddr, Vec<u8>)>,
    pub(super) timers: Timers,
    pub(super) members_changed: bool,
    /// Names of those who came or went.
    pub(super) changed: Vec<NodeId>,
    pub(super) rejoined: bool,
    /// News about members; goes with each packet that can carry it.
    pub(super) news: News,
    /// How often this node has refuted a suspicion in its generation, as its packets say.
    pub(super) own_swim: u16,
    /// Whom foca has begun to probe, and under which number.
    pub(super) probe: Option<(Identity, u8)>,
    /// Whom foca wants to be down after a while. The driver judges that itself.
    pub(super) suspects: Vec<Identity>,
}

impl Outbox {
    pub(super) fn send(&mut self, to: SocketAddr, payload: Vec<u8>) {
        self.sends.push((to, payload));
    }

    /// A packet of foca, with news.
    fn send_swim(&mut self, to: &Identity, packet: &[u8]) {
        let mut rest = packet;
        let header: Header<Identity> = match PostcardCodec.decode_header(&mut rest) {
            Ok(header) => header,
            Err(error) => return tracing::error!(%error, "a packet of this node does not decode"),
        };
        self.own_swim = header.src_incarnation;
        if let Message::Ping(number) = header.message {
            self.probe = Some((header.dst, number));
        }
        let payload = if message::carries_updates(&header.message) {
            let news = &mut self.news;
            message::swim_with(packet, packet.len() - rest.len(), |room, out| news.fill(room, out))
        } else {
            message::swim(packet)
        };
        self.send(to.address(), payload);
    }
}

impl Runtime<Identity> for Outbox {
    fn notify(&mut self, notification: Notification<'_, Identity>) {
        match notification {
            Notification::MemberUp(id) | Notification::MemberDown(id) | Notification::Rename(_, id) => {
                self.members_changed = true;
                self.changed.extend(id.node.clone());
            }
            Notification::Rejoin(_) => self.rejoined = true,
            Notification::Active | Notification::Idle | Notification::Defunct => {}
        }
    }

    fn send_to(&mut self, to: Identity, data: &[u8]) {
        self.send_swim(&to, data);
    }

    fn submit_after(&mut self, event: Timer<Identity>, after: Duration) {
        match event {
            Timer::ChangeSuspectToDown { member_id, .. } => self.suspects.push(member_id),
            event => self.timers.add(self.now + after, event),
        }
    }
}

/// Timers by the time they are due. Of those due at once, a probe's second stage comes before the next probe.
#[derive(Debug, Default)]
pub(super) struct Timers {
    due: BTreeMap<(Duration, bool, u64), Timer<Identity>>,
    added: u64,
}

impl Timers {
    fn add(&mut self, at: Duration, timer: Timer<Identity>) {
        let later_stage = !matches!(timer, Timer::SendIndirectProbe { .. });
        self.added += 1;
        self.due.insert((at, later_stage, self.added), timer);
    }

    /// When the first one is due.
    pub(super) fn next(&self) -> Option<Duration> {
        self.due.first_key_value().map(|((at, ..), _)| *at)
    }

    pub(super) fn pop_due(&mut self, now: Duration) -> Option<Timer<Identity>> {
        if self.next()? > now {
            return None;
        }
        self.due.pop_first().map(|(_, timer)| timer)
    }

    /// Moves all timers by the length of a pause.
    pub(super) fn postpone(&mut self, by: Duration) {
        let due = std::mem::take(&mut self.due);
        self.due = due.into_iter().map(|((at, stage, order), timer)| ((at + by, stage, order), timer)).collect();
    }
}
