//! Frames to bytes and back: `length u32 | kind u8 | stream u32 | rest`, big-endian, headers in MessagePack.
//!
//! Called by a link's reader and writer with whatever bytes there are. Pure: no sockets, no time.
//! Bounds: a frame over [`limits::FRAME_MAX`] or a header over [`limits::FRAME_HEADER_MAX`] is an error before
//! anything is allocated for it. Payloads above [`limits::COPY_BELOW`] are slices of the read buffer.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;

use super::{Frame, frame::StreamId, limits};

/// Why bytes are not a frame. The link they came from is beyond repair.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WireError {
    /// Longer than allowed, or too short to be a frame.
    #[error("a frame of {0} bytes")]
    Length(usize),
    /// No such kind.
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    /// The rest does not fit its kind.
    #[error("a malformed frame of kind {0}")]
    Malformed(u8),
}

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const OPEN: u8 = 2;
    pub(super) const ACCEPT: u8 = 3;
    pub(super) const REJECT: u8 = 4;
    pub(super) const DATA: u8 = 5;
    pub(super) const CREDIT: u8 = 6;
    pub(super) const CANCEL: u8 = 7;
    pub(super) const END: u8 = 8;
    pub(super) const FAIL: u8 = 9;
    pub(super) const PING: u8 = 10;
    pub(super) const PONG: u8 = 11;
    pub(super) const GOODBYE: u8 = 12;
}

/// Kind and stream id.
const FIXED: usize = 5;

/// Appends a frame to `out`.
pub fn encode(frame: &Frame, out: &mut BytesMut) {
    if let Some(payload) = encode_head(frame, out) {
        out.put(payload);
    }
}

/// Appends all of a frame but its payload, and returns that: it follows on the wire without a copy.
pub fn encode_head(frame: &Frame, out: &mut BytesMut) -> Option<Bytes> {
    let at = out.len();
    out.put_u32(0);
    let mut put = |kind, stream: StreamId| {
        out.put_u8(kind);
        out.put_u32(stream);
    };
    let mut payload = None;
    match frame {
        Frame::Hello(hello) => {
            put(kind::HELLO, 0);
            put_header(hello, out);
        }
        Frame::Open { stream, head, body } => {
            put(kind::OPEN, *stream);
            let header_at = out.len();
            out.put_u32(0);
            put_header(head, out);
            patch_length(out, header_at);
            payload = Some(body.clone());
        }
        Frame::Accept { stream, reply } => {
            put(kind::ACCEPT, *stream);
            payload = Some(reply.clone());
        }
        Frame::Reject { stream, fault } => {
            put(kind::REJECT, *stream);
            put_header(fault, out);
        }
        Frame::Data { stream, payload: data } => {
            put(kind::DATA, *stream);
            payload = Some(data.clone());
        }
        Frame::Credit { stream, frames } => {
            put(kind::CREDIT, *stream);
            out.put_u32(*frames);
        }
        Frame::Cancel { stream } => put(kind::CANCEL, *stream),
        Frame::End { stream } => put(kind::END, *stream),
        Frame::Fail { stream, why } => {
            put(kind::FAIL, *stream);
            put_header(why, out);
        }
        Frame::Ping(number) => {
            put(kind::PING, 0);
            out.put_u64(*number);
        }
        Frame::Pong(number) => {
            put(kind::PONG, 0);
            out.put_u64(*number);
        }
        Frame::Goodbye(why) => {
            put(kind::GOODBYE, 0);
            put_header(why, out);
        }
    }
    let payload_len = payload.as_ref().map_or(0, Bytes::len);
    let length = out.len() - at - 4 + payload_len;
    out[at..at + 4].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    payload.filter(|payload| !payload.is_empty())
}

fn put_header<T: Serialize>(header: &T, out: &mut BytesMut) {
    // Our header types have no values that MessagePack cannot hold and the buffer grows, so this cannot fail;
    // if it did, the receiver would refuse the short header.
    let written = rmp_serde::encode::write_named(&mut out.writer(), header);
    debug_assert!(written.is_ok(), "{written:?}");
}

fn patch_length(out: &mut BytesMut, at: usize) {
    let length = u32::try_from(out.len() - at - 4).unwrap_or(u32::MAX);
    out[at..at + 4].copy_from_slice(&length.to_be_bytes());
}

/// Turns bytes in any portions into frames.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: BytesMut,
}

impl Decoder {
    /// Where received bytes are appended. Always has room.
    pub fn buffer(&mut self) -> &mut BytesMut {
        if self.buffer.capacity() - self.buffer.len() < limits::WRITE_COALESCE {
            self.buffer.reserve(limits::READ_BUFFER);
        }
        &mut self.buffer
    }

    /// The next whole frame, `None` when more bytes are needed.
    pub fn decode(&mut self) -> Result<Option<Frame>, WireError> {
        let Some(prefix) = self.buffer.first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_be_bytes(*prefix) as usize;
        if !(FIXED..=limits::FRAME_MAX).contains(&length) {
            return Err(WireError::Length(length));
        }
        if self.buffer.len() < 4 + length {
            return Ok(None);
        }
        self.buffer.advance(4);
        let mut rest = self.buffer.split_to(length);
        let (kind, stream) = (rest.get_u8(), rest.get_u32());
        parse(kind, stream, rest).map(Some)
    }
}

fn parse(kind: u8, stream: StreamId, mut rest: BytesMut) -> Result<Frame, WireError> {
    let malformed = WireError::Malformed(kind);
    let frame = match kind {
        kind::HELLO => Frame::Hello(header(kind, &rest)?),
        kind::OPEN => {
            let length = rest.try_get_u32().map_err(|_| malformed.clone())? as usize;
            if length > rest.len() {
                return Err(malformed);
            }
            let head = header(kind, &rest.split_to(length))?;
            Frame::Open { stream, head, body: payload(kind, rest)? }
        }
        kind::ACCEPT => Frame::Accept { stream, reply: payload(kind, rest)? },
        kind::REJECT => Frame::Reject { stream, fault: header(kind, &rest)? },
        kind::DATA => Frame::Data { stream, payload: payload(kind, rest)? },
        kind::CREDIT => {
            let frames = rest.try_get_u32().map_err(|_| malformed.clone())?;
            empty(kind, &rest)?;
            Frame::Credit { stream, frames }
        }
        kind::CANCEL => empty(kind, &rest).map(|()| Frame::Cancel { stream })?,
        kind::END => empty(kind, &rest).map(|()| Frame::End { stream })?,
        kind::FAIL => Frame::Fail { stream, why: header(kind, &rest)? },
        kind::PING | kind::PONG => {
            let number = rest.try_get_u64().map_err(|_| malformed)?;
            empty(kind, &rest)?;
            if kind == kind::PING { Frame::Ping(number) } else { Frame::Pong(number) }
        }
        kind::GOODBYE => Frame::Goodbye(header(kind, &rest)?),
        unknown => return Err(WireError::Kind(unknown)),
    };
    Ok(frame)
}

fn header<T: DeserializeOwned>(kind: u8, bytes: &[u8]) -> Result<T, WireError> {
    if bytes.len() > limits::FRAME_HEADER_MAX {
        return Err(WireError::Malformed(kind));
    }
    let mut reader = rmp_serde::Deserializer::new(bytes);
    let parsed = T::deserialize(&mut reader).map_err(|_| WireError::Malformed(kind))?;
    if reader.get_ref().is_empty() { Ok(parsed) } else { Err(WireError::Malformed(kind)) }
}

fn payload(kind: u8, bytes: BytesMut) -> Result<Bytes, WireError> {
    match bytes.len() {
        0 => Ok(Bytes::new()),
        small if small <= limits::COPY_BELOW => Ok(Bytes::copy_from_slice(&bytes)),
        large if large > limits::FRAME_PAYLOAD_MAX => Err(WireError::Malformed(kind)),
        _ => Ok(bytes.freeze()),
    }
}

fn empty(kind: u8, bytes: &[u8]) -> Result<(), WireError> {
    if bytes.is_empty() { Ok(()) } else { Err(WireError::Malformed(kind)) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use starling_ids::{EndpointName, Incarnation, NodeId, RequestId};

    use super::*;
    use crate::{
        stream::{Context, Fault, FaultKind},
        wire::{Closing, FailWhy, Hello, OpenHead, Party},
    };

    fn fault() -> impl Strategy<Value = Fault> {
        (".{0,40}", proptest::option::of(any::<u64>()), proptest::option::of(".{0,9}")).prop_map(
            |(message, retry_after_ms, param)| Fault {
                param,
                retry_after_ms,
                ..Fault::new(FaultKind::Invalid, message)
            },
        )
    }

    fn context() -> impl Strategy<Value = Context> {
        (any::<u128>(), any::<u64>(), ".{0,20}", any::<i32>(), any::<bool>()).prop_map(
            |(request, seconds, tenant, priority, subscription)| Context {
                tenant,
                priority,
                subscription,
                trace_parent: subscription.then(|| "00-ab-cd-01".to_owned()),
                ..Context::new(RequestId(request), Duration::from_secs(seconds))
            },
        )
    }

    fn bytes() -> impl Strategy<Value = Bytes> {
        prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..50).prop_map(Bytes::from),
            (limits::COPY_BELOW - 2..limits::COPY_BELOW + 3).prop_map(|len| Bytes::from(vec![len as u8; len])),
        ]
    }

    fn frame() -> impl Strategy<Value = Frame> {
        let node = NodeId::new("node-7").unwrap();
        let hello = Hello {
            wanted: Some((node.clone(), Incarnation(u64::MAX))),
            ..Hello::new(Party::Node, node, Incarnation(3), "starling 1".into())
        };
        let endpoint = EndpointName::new("a/b/c").unwrap();
        prop_oneof![
            Just(Frame::Hello(hello)),
            (any::<u32>(), context(), bytes()).prop_map(move |(stream, context, body)| Frame::Open {
                stream,
                head: OpenHead { endpoint: endpoint.clone(), context },
                body
            }),
            (any::<u32>(), bytes()).prop_map(|(stream, reply)| Frame::Accept { stream, reply }),
            (any::<u32>(), fault()).prop_map(|(stream, fault)| Frame::Reject { stream, fault }),
            (any::<u32>(), bytes()).prop_map(|(stream, payload)| Frame::Data { stream, payload }),
            (any::<u32>(), any::<u32>()).prop_map(|(stream, frames)| Frame::Credit { stream, frames }),
            any::<u32>().prop_map(|stream| Frame::Cancel { stream }),
            any::<u32>().prop_map(|stream| Frame::End { stream }),
            (any::<u32>(), fault()).prop_map(|(stream, fault)| Frame::Fail { stream, why: FailWhy::Fault(fault) }),
            (any::<u32>(), ".{0,9}").prop_map(|(stream, why)| Frame::Fail { stream, why: FailWhy::Dropped(why) }),
            any::<u64>().prop_map(Frame::Ping),
            any::<u64>().prop_map(Frame::Pong),
            any::<u64>().prop_map(|n| Frame::Goodbye(Closing::Stale { current: Incarnation(n) })),
        ]
    }

    proptest! {
        #[test]
        fn frames_come_back_whatever_the_portions(
            frames in proptest::collection::vec(frame(), 1..8),
            cuts in proptest::collection::vec(1usize..300, 1..40),
        ) {
            let mut wire = BytesMut::new();
            frames.iter().for_each(|frame| encode(frame, &mut wire));
            let mut decoder = Decoder::default();
            let (mut got, mut cuts) = (Vec::new(), cuts.iter().cycle());
            while !wire.is_empty() {
                let portion = wire.split_to((*cuts.next().unwrap()).min(wire.len()));
                decoder.buffer().extend_from_slice(&portion);
                while let Some(frame) = decoder.decode().unwrap() {
                    got.push(frame);
                }
            }
            prop_assert_eq!(got, frames);
            prop_assert!(decoder.buffer.is_empty());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut decoder = Decoder::default();
            decoder.buffer().extend_from_slice(&bytes);
            while let Ok(Some(_)) = decoder.decode() {}
        }

        #[test]
        fn arbitrary_rests_of_every_kind_never_panic(
            kind in 0u8..20,
            rest in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut decoder = Decoder::default();
            decoder.buffer().put_u32((FIXED + rest.len()) as u32);
            decoder.buffer().put_u8(kind);
            decoder.buffer().put_u32(1);
            decoder.buffer().extend_from_slice(&rest);
            let _frame_or_error = decoder.decode();
        }
    }

    #[test]
    fn impossible_lengths_are_refused_before_they_are_awaited() {
        for length in [0, FIXED - 1, limits::FRAME_MAX + 1, u32::MAX as usize] {
            let mut decoder = Decoder::default();
            decoder.buffer().put_u32(length as u32);
            assert_eq!(decoder.decode(), Err(WireError::Length(length)));
        }
    }

    #[test]
    fn large_payloads_are_slices_and_small_ones_are_not() {
        let (small, large) = (vec![1; limits::COPY_BELOW], vec![2; limits::COPY_BELOW + 1]);
        let mut decoder = Decoder::default();
        for payload in [&small, &large] {
            encode(&Frame::Data { stream: 1, payload: payload.clone().into() }, decoder.buffer());
        }
        let range = decoder.buffer.as_ptr_range();
        let mut inside = || match decoder.decode().unwrap().unwrap() {
            Frame::Data { payload, .. } => range.contains(&payload.as_ptr()),
            other => panic!("{other:?}"),
        };
        assert!(!inside());
        assert!(inside());
    }
}
