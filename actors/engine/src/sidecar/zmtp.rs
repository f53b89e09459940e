//! ZMTP 3.0 with NULL security, as much of it as a subscriber and a dealer need. Pure.
//!
//! Called by `events`. A connection begins with a greeting and a READY command on both sides; then come messages of one or more
//! frames. Format: ZeroMQ RFC 23. Never: keeps more than one message. Bounds: [`MESSAGE_MAX`] bytes, [`FRAMES_MAX`] frames.

use starling_kv::adapt::PAYLOAD_MAX;

/// Bytes of one message, all frames together.
const MESSAGE_MAX: usize = PAYLOAD_MAX + 4_096;
/// Frames of one message.
const FRAMES_MAX: usize = 16;

const GREETING: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What this side is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Takes what is published.
    Sub,
    /// Asks and takes any number of answers.
    Dealer,
}

/// Not ZMTP, or more of it than is read here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ZmtpError {
    #[error("the other side does not speak ZMTP 3")]
    NotZmtp,
    #[error("the other side wants the security mechanism {0:?}; only NULL is spoken")]
    Mechanism(String),
    #[error("a message of more than {MESSAGE_MAX} bytes or {FRAMES_MAX} frames")]
    TooLong,
    #[error("the other side refused: {0}")]
    Refused(String),
}

/// What came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Item {
    /// The other side is ready.
    Ready,
    /// The other side asks for a sign of life, to be answered with these bytes.
    Ping(Vec<u8>),
    /// A message.
    Message(Vec<Vec<u8>>),
}

/// The first 64 bytes of a side.
pub(super) fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// The command that follows the greeting.
pub(super) fn ready(kind: Kind) -> Vec<u8> {
    let name: &[u8] = match kind {
        Kind::Sub => b"SUB",
        Kind::Dealer => b"DEALER",
    };
    let mut body = b"\x05READY".to_vec();
    property(&mut body, b"Socket-Type", name);
    if kind == Kind::Dealer {
        property(&mut body, b"Identity", b"");
    }
    frame(COMMAND, &body)
}

/// The message by which a subscriber asks for every topic that begins so.
pub(super) fn subscribe(topic: &[u8]) -> Vec<u8> {
    frame(0, &[b"\x01", topic].concat())
}

/// A message.
pub(super) fn message(frames: &[&[u8]]) -> Vec<u8> {
    let last = frames.len().saturating_sub(1);
    let one = |(at, body): (usize, &&[u8])| frame(if at < last { MORE } else { 0 }, body);
    frames.iter().enumerate().flat_map(one).collect()
}

fn property(body: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    // Both are constants of a few bytes.
    body.push(name.len() as u8);
    body.extend_from_slice(name);
    body.extend_from_slice(&(value.len() as u32).to_be_bytes());
    body.extend_from_slice(value);
}

fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = match u8::try_from(body.len()) {
        Ok(len) => vec![flags, len],
        Err(_) => {
            let mut head = vec![flags | LONG];
            head.extend_from_slice(&(body.len() as u64).to_be_bytes());
            head
        }
    };
    bytes.extend_from_slice(body);
    bytes
}

/// Cuts what a socket gives into items.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    bytes: Vec<u8>,
    at: usize,
    greeted: bool,
    frames: Vec<Vec<u8>>,
    len: usize,
}

impl Decoder {
    /// Takes bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        if self.at == self.bytes.len() {
            self.bytes.clear();
            self.at = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole item, if there is one.
    pub(super) fn next(&mut self) -> Result<Option<Item>, ZmtpError> {
        if !self.greeted && !self.greet()? {
            return Ok(None);
        }
        while let Some((flags, body)) = self.frame()? {
            if flags & COMMAND != 0 {
                if let Some(item) = command(&body)? {
                    return Ok(Some(item));
                }
                continue;
            }
            self.len += body.len();
            self.frames.push(body);
            if self.len > MESSAGE_MAX || self.frames.len() > FRAMES_MAX {
                return Err(ZmtpError::TooLong);
            }
            if flags & MORE == 0 {
                self.len = 0;
                return Ok(Some(Item::Message(std::mem::take(&mut self.frames))));
            }
        }
        Ok(None)
    }

    fn greet(&mut self) -> Result<bool, ZmtpError> {
        let rest = &self.bytes[self.at..];
        if rest.first().is_some_and(|first| *first != 0xff) || rest.get(10).is_some_and(|major| *major < 3) {
            return Err(ZmtpError::NotZmtp);
        }
        let Some(greeting) = rest.get(..GREETING) else { return Ok(false) };
        let mechanism: Vec<u8> = greeting[12..32].iter().copied().take_while(|byte| *byte != 0).collect();
        if mechanism != b"NULL" {
            return Err(ZmtpError::Mechanism(String::from_utf8_lossy(&mechanism).into_owned()));
        }
        self.at += GREETING;
        self.greeted = true;
        Ok(true)
    }

    /// Flags and body of the next frame, if it is whole.
    fn frame(&mut self) -> Result<Option<(u8, Vec<u8>)>, ZmtpError> {
        let rest = &self.bytes[self.at..];
        let Some(flags) = rest.first().copied() else { return Ok(None) };
        let head = if flags & LONG == 0 { 2 } else { 9 };
        let Some(size) = rest.get(1..head) else { return Ok(None) };
        let size = size.iter().fold(0u64, |size, byte| size << 8 | u64::from(*byte));
        let size = usize::try_from(size).ok().filter(|size| *size <= MESSAGE_MAX).ok_or(ZmtpError::TooLong)?;
        let Some(body) = rest.get(head..head + size) else { return Ok(None) };
        let body = body.to_vec();
        self.at += head + size;
        Ok(Some((flags, body)))
    }
}

fn command(body: &[u8]) -> Result<Option<Item>, ZmtpError> {
    let len = usize::from(body.first().copied().unwrap_or(0));
    let name = body.get(1..1 + len).unwrap_or_default();
    let rest = body.get(1 + len..).unwrap_or_default();
    match name {
        b"READY" => Ok(Some(Item::Ready)),
        b"ERROR" => Err(ZmtpError::Refused(String::from_utf8_lossy(rest.get(1..).unwrap_or_default()).into_owned())),
        b"PING" => {
            let context = rest.get(2..).unwrap_or_default();
            Ok(Some(Item::Ping(frame(COMMAND, &[b"\x04PONG", context].concat()))))
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn items(parts: &[&[u8]]) -> Result<Vec<Item>, ZmtpError> {
        let (mut decoder, mut items) = (Decoder::default(), Vec::new());
        for part in parts {
            decoder.push(part);
            while let Some(item) = decoder.next()? {
                items.push(item);
            }
        }
        Ok(items)
    }

    #[test]
    fn a_greeting_is_as_the_rfc_has_it() {
        let bytes = greeting();
        assert_eq!(bytes[..12], [0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0]);
        assert_eq!(&bytes[12..17], b"NULL\0");
        assert_eq!(ready(Kind::Sub), b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB");
        assert_eq!(subscribe(b"kv"), b"\0\x03\x01kv");
        assert_eq!(message(&[b"", b"ab"]), b"\x01\x00\x00\x02ab");
    }

    #[test]
    fn what_is_not_zmtp_is_refused() {
        assert_eq!(items(&[b"HTTP/1.1 400"]), Err(ZmtpError::NotZmtp));
        let mut old = greeting();
        old[10] = 1;
        assert_eq!(items(&[&old]), Err(ZmtpError::NotZmtp));
        let mut curve = greeting();
        curve[12..17].copy_from_slice(b"CURVE");
        assert_eq!(items(&[&curve]), Err(ZmtpError::Mechanism("CURVE".to_owned())));
        let error = frame(COMMAND, b"\x05ERROR\x03bad");
        assert_eq!(items(&[&greeting(), &error]), Err(ZmtpError::Refused("bad".to_owned())));
        let long = [&greeting()[..], &[LONG], &u64::MAX.to_be_bytes()].concat();
        assert_eq!(items(&[&long]), Err(ZmtpError::TooLong));
        let many = [&greeting()[..], &message(&[b"".as_slice(); FRAMES_MAX + 1])].concat();
        assert_eq!(items(&[&many]), Err(ZmtpError::TooLong));
    }

    #[test]
    fn a_ping_is_answered_with_its_context() {
        let ping = frame(COMMAND, b"\x04PING\0\x0axyz");
        assert_eq!(items(&[&greeting(), &ping]), Ok(vec![Item::Ping(frame(COMMAND, b"\x04PONGxyz"))]));
    }

    proptest! {
        #[test]
        fn it_does_not_matter_where_the_stream_is_cut(
            messages in proptest::collection::vec(
                proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 1..4), 0..5),
            cuts in proptest::collection::vec(1usize..90, 0..60)
        ) {
            let mut stream = [&greeting()[..], &ready(Kind::Dealer)].concat();
            for frames in &messages {
                let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
                stream.extend(message(&frames));
            }
            let (mut rest, mut parts) = (&stream[..], Vec::new());
            for cut in cuts {
                let (part, left) = rest.split_at(cut.min(rest.len()));
                parts.push(part);
                rest = left;
            }
            parts.push(rest);
            let mut wanted = vec![Item::Ready];
            wanted.extend(messages.into_iter().map(Item::Message));
            prop_assert_eq!(items(&parts), Ok(wanted));
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            drop(items(&[&bytes]));
            drop(items(&[&greeting(), &bytes]));
        }
    }
}
