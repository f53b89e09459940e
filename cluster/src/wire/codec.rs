//! Frames to bytes and back: `length u32 | kind u8 | stream u32 | rest`, big-endian, headers in MessagePack.
//!
//! Called by a link's reader with whatever bytes there are, and by whoever queues a frame for its writer. Pure: no
//! sockets, no time.
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

/// Bytes before the payload of a data frame.
const DATA_HEAD: usize = 4 + FIXED;

/// Appends the head of a data frame whose payload of `len` bytes follows on the wire.
pub fn encode_data_head(stream: StreamId, len: usize, out: &mut BytesMut) {
    let mut head = [0; DATA_HEAD];
    head[..4].copy_from_slice(&u32::try_from(FIXED + len).unwrap_or(u32::MAX).to_be_bytes());
    head[4] = kind::DATA;
    head[5..].copy_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(&head);
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
        Frame::Credit { stream, amount } => {
            put(kind::CREDIT, *stream);
            out.put_u32(*amount);
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
        if length <= FIXED + limits::COPY_BELOW
            && let Some(data) = small_data(&self.buffer[4..4 + length])
        {
            self.buffer.advance(4 + length);
            return Ok(Some(data));
        }
        self.buffer.advance(4);
        let mut rest = self.buffer.split_to(length);
        let (kind, stream) = (rest.get_u8(), rest.get_u32());
        parse(kind, stream, rest).map(Some)
    }
}

/// A token's frame, which nearly all are: its payload is copied out of the buffer and nothing else is touched.
fn small_data(frame: &[u8]) -> Option<Frame> {
    let (head, payload) = frame.split_first_chunk::<FIXED>()?;
    let [kind::DATA, stream @ ..] = *head else { return None };
    Some(Frame::Data { stream: u32::from_be_bytes(stream), payload: Bytes::copy_from_slice(payload) })
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
            let amount = rest.try_get_u32().map_err(|_| malformed.clone())?;
            empty(kind, &rest)?;
            Frame::Credit { stream, amount }
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
mod tests;
