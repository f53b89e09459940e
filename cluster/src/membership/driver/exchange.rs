//! The exchange of states: two nodes tell each other over TCP what only one of them knows.
//!
//! Gossip tells each piece of news some times and then never again; who missed it, or joined later, learns it here. The one
//! that asks: [`Driver::exchange_open`], send it, [`Driver::exchange_next`] with the reply, send what that gives, and so
//! on until it gives nothing. The one that is asked keeps nothing: [`Driver::exchange_serve`].
//!
//! The members are divided into [`BUCKETS`] by name. The question holds a digest of each bucket, and the reply the members of
//! those that differ, so two nodes that agree exchange half a kilobyte; the next question brings what the other side
//! lacks. A down member is told only within a bucket that differs and never asked for, so that the memory of the dead
//! ends ([`sizing::REMEMBER_DOWN`]) instead of going round for ever.
//!
//! Pure. Bounds: [`EXCHANGE_MAX`] bytes a message, [`MEMBERS_MAX`] members in it unless one bucket holds more.

use std::{collections::HashMap, time::Duration};

use bytes::{Buf, BufMut};
use foca::{Codec, Member, PostcardCodec};
use rand::RngExt;

use super::{Driver, Effect, effects::peer, learn::PassOn};
use crate::{
    membership::{
        Identity,
        index::{BUCKETS, bucket},
        message::{is_sound, present},
        sizing,
    },
    security::Dropped,
};

/// Longest message of an exchange in bytes; it fits a session message.
pub const EXCHANGE_MAX: usize = 240 << 10;
/// Members in one message, of about 100 bytes at most.
const MEMBERS_MAX: usize = 2000;
/// After these times since the first member was known, and then for ever in the period of the size class: a mass join
/// is over only when those who came last are known.
const AFTER_JOIN: [Duration; 4] =
    [Duration::from_secs(5), Duration::from_secs(10), Duration::from_secs(15), Duration::from_secs(20)];
/// An exchange that brought this much (one in so many members, and three) is followed by another one within a second or two:
/// there is more that this node does not know.
const MUCH: (usize, usize) = (50, 3);
/// So often in a row at most.
const EAGER_MAX: u8 = 8;
const SOON: Duration = Duration::from_secs(1);

/// When this node asks for an exchange.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    next: Option<Duration>,
    joined: Duration,
    eager: u8,
}

impl Schedule {
    pub(super) fn next(&self) -> Option<Duration> {
        self.next
    }

    /// The first member makes a joiner of this node; without members there is nobody to ask.
    pub(super) fn members_are(&mut self, count: usize, now: Duration) {
        if count == 0 {
            *self = Self::default();
        } else if self.next.is_none() {
            *self = Self { next: Some(now), joined: now, eager: 0 };
        }
    }

    fn soon(&mut self, now: Duration) {
        if self.next.is_some() {
            self.next = Some(self.next.unwrap_or(now).min(now + SOON));
        }
    }
}

/// A question: which members the asker is and has, by digest, and what it brings.
struct Ask {
    from: Member<Identity>,
    /// Bucket, digest, size.
    offered: Vec<(u8, u32, u16)>,
    brings: Vec<Member<Identity>>,
}

/// A reply.
struct Reply {
    from: Member<Identity>,
    /// Buckets that differ and of which all members follow.
    answered: Vec<u8>,
    /// Buckets that differ too, for another question.
    later: Vec<u8>,
    members: Vec<Member<Identity>>,
}

impl Driver {
    /// The first question of an exchange.
    pub fn exchange_open(&mut self) -> Vec<u8> {
        let all: Vec<u8> = (0..=u8::MAX).take(BUCKETS).collect();
        self.ask(&all, Vec::new())
    }

    fn ask(&self, buckets: &[u8], brings: Vec<Member<Identity>>) -> Vec<u8> {
        let from = self.own_member();
        let offered = buckets.iter().map(|at| {
            let (digest, size) = self.index.bucket(usize::from(*at), &from);
            (*at, digest, u16::try_from(size).unwrap_or(u16::MAX))
        });
        Ask { offered: offered.collect(), brings, from }.encode()
    }

    /// Answers a question of another node's exchange, and learns what it brings.
    pub fn exchange_serve(&mut self, ask: &[u8], now: Duration) -> Result<Vec<u8>, Dropped> {
        self.observe(now);
        let ask = Ask::decode(ask).ok_or(Dropped::Malformed)?;
        let teller = ask.from.id().key();
        self.learn(vec![ask.from], PassOn::Yes);
        self.believe(&ask.brings);
        let brings = self.question_deaths(teller, ask.brings);
        self.learn(brings, PassOn::IfFew);
        let own = self.own_member();
        let (mut answered, mut later, mut planned) = (Vec::new(), Vec::new(), 0);
        for (at, digest, theirs) in ask.offered {
            let (mine, size) = self.index.bucket(usize::from(at), &own);
            if mine == digest {
                continue;
            }
            planned += size.max(usize::from(theirs));
            if answered.is_empty() || planned <= MEMBERS_MAX { answered.push(at) } else { later.push(at) }
        }
        let members = self.members_of(&answered);
        self.settle();
        Ok(Reply { from: own, answered, later, members }.encode())
    }

    /// Takes a reply; what to ask next, if anything.
    pub fn exchange_next(&mut self, reply: &[u8], now: Duration) -> Result<Option<Vec<u8>>, Dropped> {
        self.observe(now);
        let Reply { from, answered, later, members } = Reply::decode(reply).ok_or(Dropped::Malformed)?;
        let told: HashMap<u64, Member<Identity>> = members.iter().map(|m| (m.id().key(), m.clone())).collect();
        self.lifeline.answer(from.id().key(), self.now);
        let from_key = from.id().key();
        self.learn(vec![from], PassOn::IfFew);
        // A joiner learns what the others know already.
        let joining = self.now < self.exchange.joined + AFTER_JOIN[AFTER_JOIN.len() - 1];
        let pass_on = if joining { PassOn::No } else { PassOn::IfFew };
        self.believe(&members);
        let members = self.question_deaths(from_key, members);
        let news = self.learn(members, pass_on);
        self.follow_up(news);
        let brings = self.members_of(&answered).into_iter().filter(|mine| mine.id().key() != from_key);
        let brings: Vec<_> = brings
            .filter(|mine| told.get(&mine.id().key()).map_or(present(mine.state()), |theirs| mine != theirs))
            .collect();
        self.settle();
        let more = !brings.is_empty() || !later.is_empty();
        Ok(more.then(|| self.ask(&later, brings)))
    }

    /// An exchange that [`Effect::Exchange`] asked for came to nothing: another one follows soon.
    pub fn exchange_failed(&mut self, now: Duration) {
        self.observe(now);
        if self.exchange.eager < EAGER_MAX {
            self.exchange.eager += 1;
            self.exchange.soon(self.now);
        }
        self.settle();
    }

    /// Who was thought dead may have missed much.
    pub(super) fn exchange_soon(&mut self) {
        self.exchange.soon(self.now);
    }

    fn follow_up(&mut self, news: usize) {
        if news < self.index.active() / MUCH.0 + MUCH.1 {
            self.exchange.eager = 0;
        } else if self.exchange.eager < EAGER_MAX {
            self.exchange.eager += 1;
            // Jitter, so that nodes that started together do not ask together.
            let wait = SOON.mul_f64(self.rng.random_range(0.5..1.5));
            let at = self.now + wait;
            self.exchange.next = self.exchange.next.map(|next| next.min(at));
        }
    }

    pub(super) fn exchange_when_due(&mut self) {
        if self.exchange.next.is_none_or(|at| at > self.now) {
            return;
        }
        let joined = self.exchange.joined;
        let next = AFTER_JOIN.iter().map(|after| joined + *after).find(|at| *at > self.now);
        // Jitter, as above.
        self.exchange.next = Some(match next {
            Some(at) => at + SOON.mul_f64(self.rng.random_range(0.0..1.0)),
            None => self.now + sizing::settings(self.class).exchange.mul_f64(self.rng.random_range(0.7..1.3)),
        });
        if let Some(id) = self.some_members(1).pop() {
            self.effects.extend(peer(&id).map(Effect::Exchange));
        }
    }

    /// All members of these buckets but this node: first those that are present, then as many of the others as there is room for.
    fn members_of(&self, buckets: &[u8]) -> Vec<Member<Identity>> {
        if buckets.is_empty() {
            return Vec::new();
        }
        let mut wanted = [false; BUCKETS];
        buckets.iter().for_each(|at| wanted[usize::from(*at) % BUCKETS] = true);
        let of_them = self.foca.iter_membership_state().filter(|member| wanted[bucket(member.id().key())]);
        // What this node decided while it was cut off is nobody's business.
        let of_them = of_them.filter(|member| !self.unshared.contains(&member.id().key()));
        let (mut present_ones, down): (Vec<_>, Vec<_>) = of_them.cloned().partition(|member| present(member.state()));
        let room = MEMBERS_MAX.saturating_sub(present_ones.len());
        present_ones.extend(down.into_iter().take(room));
        present_ones
    }
}

impl Ask {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(512);
        put_members(&mut out, std::slice::from_ref(&self.from));
        out.put_u8(u8::try_from(self.offered.len()).unwrap_or(u8::MAX));
        for (at, digest, size) in self.offered.iter().take(usize::from(u8::MAX)) {
            out.put_u8(*at);
            out.put_u32(*digest);
            out.put_u16(*size);
        }
        put_members(&mut out, &self.brings);
        out
    }

    fn decode(mut bytes: &[u8]) -> Option<Self> {
        if bytes.len() > EXCHANGE_MAX {
            return None;
        }
        let from = get_members(&mut bytes)?.pop()?;
        let mut offered = Vec::new();
        for _ in 0..bytes.try_get_u8().ok()? {
            let at = bytes.try_get_u8().ok()?;
            offered.push((at, bytes.try_get_u32().ok()?, bytes.try_get_u16().ok()?));
        }
        let brings = get_members(&mut bytes)?;
        let sound = bytes.is_empty() && offered.iter().all(|(at, ..)| usize::from(*at) < BUCKETS);
        sound.then_some(Self { from, offered, brings })
    }
}

impl Reply {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        put_members(&mut out, std::slice::from_ref(&self.from));
        for list in [&self.answered, &self.later] {
            out.put_u8(u8::try_from(list.len()).unwrap_or(u8::MAX));
            out.extend(list.iter().take(usize::from(u8::MAX)));
        }
        put_members(&mut out, &self.members);
        out
    }

    fn decode(mut bytes: &[u8]) -> Option<Self> {
        if bytes.len() > EXCHANGE_MAX {
            return None;
        }
        let from = get_members(&mut bytes)?.pop()?;
        let answered = get_buckets(&mut bytes)?;
        let later = get_buckets(&mut bytes)?;
        let members = get_members(&mut bytes)?;
        bytes.is_empty().then_some(Self { from, answered, later, members })
    }
}

fn get_buckets(bytes: &mut &[u8]) -> Option<Vec<u8>> {
    let count = usize::from(bytes.try_get_u8().ok()?);
    let list = bytes.get(..count)?.to_vec();
    bytes.advance(count);
    list.iter().all(|at| usize::from(*at) < BUCKETS).then_some(list)
}

/// Writes members until the message is full.
fn put_members(out: &mut Vec<u8>, members: &[Member<Identity>]) {
    let tally = out.len();
    out.put_u16(0);
    let mut count: u16 = 0;
    for member in members {
        let before = out.len();
        let encoded = PostcardCodec.encode_member(member, &mut *out).is_ok();
        if !encoded || out.len() > EXCHANGE_MAX || count == u16::MAX {
            out.truncate(before);
            break;
        }
        count += 1;
    }
    out[tally..tally + 2].copy_from_slice(&count.to_be_bytes());
}

fn get_members(bytes: &mut &[u8]) -> Option<Vec<Member<Identity>>> {
    let count = bytes.try_get_u16().ok()?;
    let mut members = Vec::with_capacity(usize::from(count).min(bytes.len() / 16));
    for _ in 0..count {
        let member: Member<Identity> = PostcardCodec.decode_member(&mut *bytes).ok()?;
        if !is_sound(member.id()) {
            return None;
        }
        members.push(member);
    }
    Some(members)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn noise_is_never_a_panic(noise in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ask = Ask::decode(&noise);
            let _reply = Reply::decode(&noise);
        }
    }
}
