//! What a gossip datagram says once it is opened: SWIM, or one of a few words about names.
//!
//! Called by the driver and the claim of a name at start. Pure: bytes in, bytes out, malformed is an error.

use foca::{Codec, Header, Member, Message, PostcardCodec, State};
use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, NodeId};

use super::{Identity, index::GENERATION_MAX, sizing::PACKET_MAX};
use crate::{discovery::RecordDelta, security::Dropped};

const SWIM: u8 = 0;
const WORD: u8 = 1;

/// Words about names that SWIM has none for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Word {
    /// Who holds this name, as far as you know? Asked before a node joins.
    WhoIs(NodeId),
    /// The holder of a name, and whether it is down. `None`: never heard of it.
    Holder(NodeId, Option<(Identity, bool)>),
    /// You speak under a name that another life or another node holds; `true`: that one is down.
    Outranked(Identity, bool),
    /// The sender leaves in good order.
    Leaving(Identity),
    /// This process has tried to speak under your name, and does so no more.
    Rival(Identity),
}

/// News that a node's record has changed. Travels with SWIM packets; what is lost, anti-entropy finds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rumour {
    /// Whose record.
    pub node: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
    /// At which address, as [`super::place`] numbers it: two processes may claim one name in one life.
    pub place: u32,
    /// The version it now has.
    pub version: u64,
    /// The change itself, where it is small.
    #[serde(default)]
    pub delta: Option<RecordDelta>,
    /// Whose packet brought it; does not travel.
    #[serde(skip)]
    pub teller: Option<NodeId>,
}

/// An opened datagram.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opened<'a> {
    /// For foca, checked to be well formed and about named members only.
    Swim {
        /// Who sent it to whom.
        header: Header<Identity>,
        /// What it says about members.
        updates: Vec<Member<Identity>>,
        /// The encoded header.
        head: &'a [u8],
        /// What follows the updates: rumours.
        tail: &'a [u8],
    },
    /// About names.
    Word(Word),
}

/// Marks a packet of foca.
#[must_use]
pub(super) fn swim(packet: &[u8]) -> Vec<u8> {
    let mut payload = Vec::with_capacity(packet.len() + 1);
    payload.push(SWIM);
    payload.extend_from_slice(packet);
    payload
}

/// Encodes a word.
pub(super) fn word(word: &Word) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let mut payload = vec![WORD];
    rmp_serde::encode::write(&mut payload, word)?;
    Ok(payload)
}

/// Reads a payload, to its last byte.
pub(super) fn open(payload: &[u8]) -> Result<Opened<'_>, Dropped> {
    match payload.split_first() {
        Some((&SWIM, packet)) => open_swim(packet),
        Some((&WORD, rest)) => rmp_serde::from_slice(rest).map(Opened::Word).map_err(|_| Dropped::Malformed),
        _ => Err(Dropped::Malformed),
    }
}

fn open_swim(packet: &[u8]) -> Result<Opened<'_>, Dropped> {
    let mut rest = packet;
    let header: Header<Identity> = PostcardCodec.decode_header(&mut rest).map_err(|_| Dropped::Malformed)?;
    let head = &packet[..packet.len() - rest.len()];
    let mut sound = is_sound(&header.src);
    if let Message::PingReq { target: other, .. }
    | Message::IndirectPing { origin: other, .. }
    | Message::IndirectAck { target: other, .. }
    | Message::ForwardedAck { origin: other, .. } = &header.message
    {
        sound &= is_sound(other);
    }
    let mut updates = Vec::new();
    if let Some((count, members)) = rest.split_first_chunk::<2>()
        && header.message != Message::Broadcast
    {
        rest = members;
        for _ in 0..u16::from_be_bytes(*count) {
            let member: Member<Identity> = PostcardCodec.decode_member(&mut rest).map_err(|_| Dropped::Malformed)?;
            sound &= is_sound(member.id());
            updates.push(member);
        }
    }
    if sound { Ok(Opened::Swim { header, updates, head, tail: rest }) } else { Err(Dropped::Malformed) }
}

/// An identity without a name equals every other one; inside a member list it would take over a stranger.
pub(super) fn is_sound(id: &Identity) -> bool {
    id.node.is_some() && id.generation <= GENERATION_MAX
}

/// Whether packets of this kind carry updates.
pub(super) fn carries_updates(message: &Message<Identity>) -> bool {
    !matches!(message, Message::Announce | Message::TurnUndead | Message::Broadcast)
}

/// The packet as foca is shown it: without the updates, which the driver has judged already.
pub(super) fn without_updates(head: &[u8], tail: &[u8], message: &Message<Identity>) -> Vec<u8> {
    let mut packet = Vec::with_capacity(head.len() + 2 + tail.len());
    packet.extend_from_slice(head);
    if carries_updates(message) {
        packet.extend_from_slice(&[0, 0]);
    }
    packet.extend_from_slice(tail);
    packet
}

/// Marks a packet of foca, `head` bytes of header and then the rest, and lets `more` append updates to it: the room
/// that is left and where to put them, giving back their number.
pub(super) fn swim_with(packet: &[u8], head: usize, more: impl FnOnce(usize, &mut Vec<u8>) -> u16) -> Vec<u8> {
    let mut payload = Vec::with_capacity(PACKET_MAX + 1);
    payload.push(SWIM);
    let (header, rest) = packet.split_at(head.min(packet.len()));
    payload.extend_from_slice(header);
    let Some((count, rest)) = rest.split_first_chunk::<2>() else {
        payload.extend_from_slice(rest);
        return payload;
    };
    let tally = payload.len();
    payload.extend_from_slice(count);
    let added = more(PACKET_MAX.saturating_sub(packet.len()), &mut payload);
    let count = u16::from_be_bytes(*count).saturating_add(added);
    payload[tally..tally + 2].copy_from_slice(&count.to_be_bytes());
    payload.extend_from_slice(rest);
    payload
}

/// A packet of the driver's own, with one update or none.
pub(super) fn packet(header: &Header<Identity>, update: Option<&Member<Identity>>) -> Option<Vec<u8>> {
    let mut packet = Vec::with_capacity(160);
    PostcardCodec.encode_header(header, &mut packet).ok()?;
    packet.extend_from_slice(&u16::from(update.is_some()).to_be_bytes());
    if let Some(update) = update {
        PostcardCodec.encode_member(update, &mut packet).ok()?;
    }
    Some(packet)
}

/// Whether foca counts this state as present.
#[must_use]
pub(super) fn present(state: State) -> bool {
    state != State::Down
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use super::*;

    fn id(name: &str) -> Identity {
        Identity::new(NodeId::new(name).expect("name"), SocketAddr::from(([127, 0, 0, 1], 1)), Incarnation(1))
    }

    fn gossip(src: Identity, updates: &[Member<Identity>]) -> Vec<u8> {
        let header = Header { src, src_incarnation: 0, dst: id("b"), message: Message::Gossip };
        let mut packet = Vec::new();
        PostcardCodec.encode_header(&header, &mut packet).expect("encodes");
        packet.extend_from_slice(&u16::try_from(updates.len()).expect("few").to_be_bytes());
        for update in updates {
            PostcardCodec.encode_member(update, &mut packet).expect("encodes");
        }
        swim(&packet)
    }

    #[test]
    fn swim_and_words_come_back() {
        let payload = gossip(id("a"), &[Member::alive(id("c"))]);
        let Ok(Opened::Swim { header, updates, head, tail }) = open(&payload) else { panic!("opens") };
        let shown = swim(&without_updates(head, tail, &header.message));
        assert_eq!(
            open(&shown).map(|opened| matches!(opened, Opened::Swim { updates, .. } if updates.is_empty())),
            Ok(true)
        );
        let again = swim_with(&shown[1..], head.len(), |_room, out| {
            PostcardCodec.encode_member(&Member::alive(id("c")), out).expect("encodes");
            1
        });
        assert_eq!(again, payload);
        assert_eq!((header.src, updates), (id("a"), vec![Member::alive(id("c"))]));
        for said in [Word::WhoIs(NodeId::new("a").expect("name")), Word::Outranked(id("a"), true)] {
            assert_eq!(open(&word(&said).expect("encodes")), Ok(Opened::Word(said)));
        }
    }

    #[test]
    fn an_identity_without_a_name_is_nobodys_member() {
        let nobody = Identity::whoever(SocketAddr::from(([127, 0, 0, 1], 1)));
        assert_eq!(open(&gossip(nobody.clone(), &[])), Err(Dropped::Malformed));
        assert_eq!(open(&gossip(id("a"), &[Member::down(nobody)])), Err(Dropped::Malformed));
    }

    proptest! {
        #[test]
        fn noise_is_never_a_panic(noise in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _outcome = open(&noise);
        }
    }
}
