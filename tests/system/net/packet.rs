//! What the network must know of an IPv4 packet, and address translation. Pure.

use std::net::{Ipv4Addr, SocketAddrV4};

const UDP: u8 = 17;
const TCP: u8 = 6;

/// The ends and the kind of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) from: Ipv4Addr,
    pub(crate) to: Ipv4Addr,
    /// Length of the payload of a UDP datagram that came in one packet.
    pub(crate) datagram: Option<usize>,
    /// A piece of a larger packet.
    pub(crate) fragment: bool,
    header: usize,
    protocol: u8,
}

/// Reads a packet; `None` when it is not a whole IPv4 packet.
pub(crate) fn head(packet: &[u8]) -> Option<Head> {
    let first = *packet.first()?;
    let header = usize::from(first & 15) * 4;
    if first >> 4 != 4 || header < 20 || packet.len() < header {
        return None;
    }
    let address = |at: usize| Ipv4Addr::new(packet[at], packet[at + 1], packet[at + 2], packet[at + 3]);
    let fragment = word(packet, 6) & 0x3fff != 0;
    let protocol = packet[9];
    let datagram = (protocol == UDP && !fragment).then(|| packet.len().saturating_sub(header + 8));
    Some(Head { from: address(12), to: address(16), datagram, fragment, header, protocol })
}

/// One inner machine behind an outer address. One port is translated to another; the others keep their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nat {
    pub(crate) inner: SocketAddrV4,
    pub(crate) outer: SocketAddrV4,
}

impl Nat {
    /// A packet of the inner machine leaves under the outer address.
    pub(crate) fn leave(&self, packet: &mut [u8]) -> bool {
        rewrite(packet, 12, 0, self.inner, self.outer)
    }

    /// A packet to the outer address goes to the inner machine.
    pub(crate) fn enter(&self, packet: &mut [u8]) -> bool {
        rewrite(packet, 16, 2, self.outer, self.inner)
    }
}

/// Replaces the address at `at` of the header and the port at `port` behind it, and mends the checksums.
fn rewrite(packet: &mut [u8], at: usize, port: usize, from: SocketAddrV4, to: SocketAddrV4) -> bool {
    let Some(head) = head(packet) else { return false };
    if packet[at..at + 4] != from.ip().octets() || head.fragment {
        return false;
    }
    let sum = match head.protocol {
        TCP => head.header + 16,
        UDP => head.header + 6,
        _ => return false,
    };
    if packet.len() < sum + 2 {
        return false;
    }
    let port = head.header + port;
    let mut changes = [(at, 0), (at + 2, 0), (port, word(packet, port))];
    for (n, change) in changes.iter_mut().take(2).enumerate() {
        change.1 = u16::from_be_bytes([to.ip().octets()[2 * n], to.ip().octets()[2 * n + 1]]);
    }
    if changes[2].1 == from.port() {
        changes[2].1 = to.port();
    }
    for (place, new) in changes {
        let old = word(packet, place);
        // A UDP checksum of zero says that there is none.
        if head.protocol == TCP || word(packet, sum) != 0 {
            put(packet, sum, mended(word(packet, sum), old, new));
        }
        if place < head.header {
            put(packet, 10, mended(word(packet, 10), old, new));
        }
        put(packet, place, new);
    }
    true
}

fn word(packet: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([packet[at], packet[at + 1]])
}

fn put(packet: &mut [u8], at: usize, value: u16) {
    packet[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// The one's-complement checksum after one word has changed (RFC 1624).
fn mended(sum: u16, old: u16, new: u16) -> u16 {
    let mut total = u32::from(!sum) + u32::from(!old) + u32::from(new);
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    !u16::try_from(total).unwrap_or(0)
}

mod tests {
    use super::*;

    fn sum(words: impl Iterator<Item = u16>) -> u16 {
        let mut total: u32 = words.map(u32::from).sum();
        while total > 0xffff {
            total = (total & 0xffff) + (total >> 16);
        }
        !(total as u16)
    }

    fn words(bytes: &[u8]) -> impl Iterator<Item = u16> + '_ {
        bytes.chunks(2).map(|pair| u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]))
    }

    /// The checksum over pseudo header and datagram, zero when the one in the packet is right.
    fn off(packet: &[u8]) -> (u16, u16) {
        let pseudo = words(&packet[12..20]).chain([u16::from(packet[9]), (packet.len() - 20) as u16]);
        (sum(words(&packet[..20])), sum(pseudo.chain(words(&packet[20..]))))
    }

    fn datagram(from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) -> Vec<u8> {
        let length = (28 + payload.len()) as u16;
        let mut packet = vec![0x45, 0];
        packet.extend(length.to_be_bytes());
        packet.extend([0, 0, 0x40, 0, 64, UDP, 0, 0]);
        packet.extend(from.ip().octets());
        packet.extend(to.ip().octets());
        packet.extend(from.port().to_be_bytes());
        packet.extend(to.port().to_be_bytes());
        packet.extend((length - 20).to_be_bytes());
        packet.extend([0, 0]);
        packet.extend(payload);
        let (ip, udp) = off(&packet);
        put(&mut packet, 10, ip);
        put(&mut packet, 26, udp);
        packet
    }

    fn at(text: &str) -> SocketAddrV4 {
        text.parse().unwrap()
    }

    #[test]
    fn a_translated_packet_has_right_checksums_and_comes_back_the_same_way() {
        let nat = Nat { inner: at("10.1.0.5:7500"), outer: at("10.1.0.99:7400") };
        let mut packet = datagram(at("10.1.0.5:7500"), at("10.1.0.1:7400"), b"odd sized");
        assert_eq!(off(&packet), (0, 0));
        assert!(nat.leave(&mut packet));
        assert_eq!(packet, datagram(at("10.1.0.99:7400"), at("10.1.0.1:7400"), b"odd sized"));
        let mut answer = datagram(at("10.1.0.1:7400"), at("10.1.0.99:7400"), b"answer");
        assert!(nat.enter(&mut answer) && !nat.leave(&mut answer));
        assert_eq!(answer, datagram(at("10.1.0.1:7400"), at("10.1.0.5:7500"), b"answer"));
    }

    #[test]
    fn only_whole_datagrams_have_a_length_and_other_packets_are_left_alone() {
        let packet = datagram(at("10.1.0.5:1"), at("10.1.0.1:2"), &[7; 100]);
        assert_eq!(head(&packet).unwrap().datagram, Some(100));
        let mut piece = packet.clone();
        piece[6] = 0x20;
        let read = head(&piece).unwrap();
        assert!(read.fragment && read.datagram.is_none());
        assert_eq!(head(&[0x60; 40]), None);
        assert_eq!(head(&packet[..12]), None);
    }
}
