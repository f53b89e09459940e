//! Which news about members goes into the next packet, and when each has been told often enough.
//!
//! Called by the driver for each packet that foca sends. foca has such a queue too, but it looks through all of it for
//! each packet and cannot tell a death from a join. Pure. Bounds: [`NEWS_MAX`] items; the one told most often
//! makes way. Deaths, suspicions and refutations go before joins.

use std::collections::{HashMap, VecDeque};

use foca::{Codec, Member, PostcardCodec, State};

use super::Identity;

/// Items that wait. A mass join of more than this is left to the exchange of states.
const NEWS_MAX: usize = 4096;
/// Items in a row that do not fit before a packet counts as full: lengths differ by the length of names.
const MISSES_MAX: usize = 3;

#[derive(Debug)]
struct Item {
    bytes: Box<[u8]>,
    /// That somebody is down or suspected.
    accuses: bool,
    limit: u8,
    stamp: u32,
}

/// News of one urgency, by how often it was told: what was told least goes first.
#[derive(Debug, Default)]
struct Lane {
    by_told: Vec<VecDeque<(u64, u32)>>,
}

/// What is still to be told.
#[derive(Debug, Default)]
pub(super) struct News {
    items: HashMap<u64, Item>,
    urgent: Lane,
    joins: Lane,
    stamp: u32,
}

impl News {
    /// How many items wait.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// Tells this `limit` times; it takes the place of older news about the same name.
    pub(super) fn add(&mut self, member: &Member<Identity>, limit: u8) {
        let mut bytes = Vec::with_capacity(48);
        if let Err(error) = PostcardCodec.encode_member(member, &mut bytes) {
            tracing::error!(%error, "news about a member does not encode");
            return;
        }
        self.make_room();
        self.stamp = self.stamp.wrapping_add(1);
        let (key, stamp) = (member.id().key(), self.stamp);
        let urgent = member.state() != State::Alive || member.incarnation() > 0;
        let accuses = member.state() != State::Alive;
        self.items.insert(key, Item { bytes: bytes.into(), accuses, limit, stamp });
        let lane = if urgent { &mut self.urgent } else { &mut self.joins };
        lane.push(0, (key, stamp));
    }

    /// Forgets what waits about a name.
    pub(super) fn remove(&mut self, key: u64) {
        self.items.remove(&key);
    }

    /// Forgets who is said to be down or suspected.
    pub(super) fn forget_accusations(&mut self) {
        self.items.retain(|_, item| !item.accuses);
    }

    fn make_room(&mut self) {
        while self.items.len() >= NEWS_MAX {
            let Some((key, stamp)) = self.joins.pop_most_told().or_else(|| self.urgent.pop_most_told()) else {
                self.items.clear();
                return;
            };
            if self.items.get(&key).is_some_and(|item| item.stamp == stamp) {
                self.items.remove(&key);
            }
        }
    }

    /// Appends encoded updates to `out`, at most `room` bytes of them; how many.
    pub(super) fn fill(&mut self, room: usize, out: &mut Vec<u8>) -> u16 {
        if self.items.is_empty() {
            return 0;
        }
        let end = out.len() + room;
        let mut count = self.urgent.fill(&mut self.items, end, out);
        count = count.saturating_add(self.joins.fill(&mut self.items, end, out));
        count
    }
}

impl Lane {
    fn push(&mut self, told: usize, entry: (u64, u32)) {
        while self.by_told.len() <= told {
            self.by_told.push(VecDeque::new());
        }
        self.by_told[told].push_back(entry);
    }

    fn pop_most_told(&mut self) -> Option<(u64, u32)> {
        self.by_told.iter_mut().rev().find_map(VecDeque::pop_front)
    }

    fn fill(&mut self, items: &mut HashMap<u64, Item>, end: usize, out: &mut Vec<u8>) -> u16 {
        let (mut count, mut misses) = (0, 0);
        let mut again: Vec<(usize, (u64, u32))> = Vec::new();
        'full: for told in 0..self.by_told.len() {
            for _ in 0..self.by_told[told].len() {
                let Some((key, stamp)) = self.by_told[told].pop_front() else { break };
                let Some(item) = items.get(&key).filter(|item| item.stamp == stamp) else { continue };
                if out.len() + item.bytes.len() > end {
                    self.by_told[told].push_front((key, stamp));
                    misses += 1;
                    if misses == MISSES_MAX {
                        break 'full;
                    }
                    // The next ones of this kind are younger, not shorter: look at the next kind.
                    break;
                }
                out.extend_from_slice(&item.bytes);
                count += 1;
                if told + 1 < usize::from(item.limit) {
                    again.push((told + 1, (key, stamp)));
                } else {
                    items.remove(&key);
                }
            }
        }
        for (told, entry) in again {
            self.push(told, entry);
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use starling_ids::{Incarnation, NodeId};

    use super::*;

    fn id(name: &str) -> Identity {
        Identity::new(NodeId::new(name).expect("name"), SocketAddr::from(([10, 0, 0, 1], 7)), Incarnation(1))
    }

    fn read(count: u16, mut bytes: &[u8]) -> Vec<Member<Identity>> {
        let read = (0..count).map(|_| PostcardCodec.decode_member(&mut bytes).expect("decodes")).collect();
        assert!(bytes.is_empty());
        read
    }

    #[test]
    fn each_is_told_as_often_as_said_deaths_first_and_never_twice_in_one_packet() {
        let mut news = News::default();
        for at in 0..100 {
            news.add(&Member::alive(id(&format!("joined-{at}"))), 2);
        }
        news.add(&Member::down(id("dead")), 3);
        let (mut told, mut packets) = (HashMap::new(), 0);
        while news.len() > 0 {
            let mut out = Vec::new();
            let count = news.fill(400, &mut out);
            assert!(out.len() <= 400);
            let members = read(count, &out);
            if packets < 3 {
                assert_eq!(members[0], Member::down(id("dead")));
            }
            let names: std::collections::BTreeSet<u64> = members.iter().map(|member| member.id().key()).collect();
            assert_eq!(names.len(), members.len(), "nothing twice in one packet");
            for member in members {
                *told.entry(member.id().key()).or_insert(0) += 1;
            }
            packets += 1;
        }
        assert_eq!(told.remove(&id("dead").key()), Some(3));
        assert!(told.len() == 100 && told.values().all(|times| *times == 2));
    }

    #[test]
    fn later_news_takes_the_place_of_earlier_and_the_queue_is_bounded() {
        let mut news = News::default();
        news.add(&Member::alive(id("w")), 5);
        news.add(&Member::down(id("w")), 5);
        let mut out = Vec::new();
        let count = news.fill(1000, &mut out);
        assert_eq!(read(count, &out), [Member::down(id("w"))]);
        news.add(&Member::alive(id("v")), 5);
        news.forget_accusations();
        let mut out = Vec::new();
        let count = news.fill(1000, &mut out);
        assert_eq!(read(count, &out), [Member::alive(id("v"))]);
        for at in 0..NEWS_MAX + 500 {
            news.add(&Member::alive(id(&format!("n{at}"))), 5);
        }
        assert_eq!(news.len(), NEWS_MAX);
    }
}
