//! What waits for the writer of one link: already encoded, control ahead of data.
//!
//! Filled by everybody who sends on the link, under one short lock in which the frame is copied; emptied by
//! [`super::io`], a batch at a time, while the next one fills up. A payload of [`LARGE`] or more is not copied but kept
//! beside. The writer is woken only when it sleeps; while it lets frames gather, only by the one that makes
//! them enough. Bounds: data by the room its senders reserved (see
//! [`super::mux`]), control by [`limits::LINK_CONTROL_BYTES`]. After a goodbye nothing is taken any more.

use std::{
    collections::VecDeque,
    io::IoSlice,
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use bytes::{Bytes, BytesMut};

use crate::wire::{Closing, Frame, StreamId, encode_data_head, encode_head, limits};

/// Payloads from this size on are not copied next to others.
const LARGE: usize = 8 << 10;
/// What small frames may still fill once replies are refused.
const CONTROL_SLACK: usize = 1 << 20;
/// Buffers that are used again.
const SPARES: usize = 2;

pub(super) struct Outgoing {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    control: Pile,
    data: Pile,
    /// Bytes of control frames that wait or are being written, reserved ones not counted.
    control_bytes: usize,
    goodbye: Option<Closing>,
    /// Nothing is taken any more.
    closed: bool,
    overrun: bool,
    waker: Option<Waker>,
    /// The writer lets this many frames gather.
    gathers: usize,
    /// Queued since the writer took what there was.
    frames: usize,
    spares: Vec<BytesMut>,
}

/// Frames in order, as the bytes that they are on the wire.
#[derive(Default)]
struct Pile {
    full: VecDeque<Piece>,
    open: BytesMut,
    /// Reserved for what is in `open`.
    room: usize,
}

struct Piece {
    bytes: Content,
    room: usize,
}

enum Content {
    /// Whole frames, the last one perhaps without its payload.
    Frames(BytesMut),
    /// The payload of the frame before.
    Payload(Bytes),
}

impl Content {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Frames(bytes) => bytes,
            Self::Payload(bytes) => bytes,
        }
    }
}

/// What the writer takes at one time. Its allocation is used again.
#[derive(Default)]
pub(super) struct Batch {
    pieces: Vec<Piece>,
    bytes: usize,
    /// Of [`State::control_bytes`].
    control: usize,
    /// Queued since the batch before.
    pub(super) frames: usize,
    /// Nothing follows.
    pub(super) last: bool,
}

impl Batch {
    /// The bytes from `from` on, in at most as many slices as `slices` holds.
    pub(super) fn slices<'a>(&'a self, mut from: usize, slices: &mut Vec<IoSlice<'a>>) {
        slices.clear();
        for piece in &self.pieces {
            let bytes = piece.bytes.as_slice();
            if from < bytes.len() && slices.len() < slices.capacity() {
                slices.push(IoSlice::new(&bytes[from..]));
            }
            from = from.saturating_sub(bytes.len());
        }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }
}

impl Outgoing {
    pub(super) fn new() -> Self {
        Self { state: Mutex::default() }
    }

    /// Queues one frame of a stream, whose sender has reserved `room`.
    pub(super) fn data(&self, stream: StreamId, payload: Bytes, room: usize) {
        let mut state = self.lock();
        if state.takes_none() {
            return;
        }
        encode_data_head(stream, payload.len(), &mut state.data.open);
        state.data.payload(payload, room);
        state.wake();
    }

    /// Queues a frame behind all data.
    pub(super) fn behind_data(&self, frame: &Frame) {
        let mut state = self.lock();
        if !state.takes_none() {
            state.data.frame(frame, 0);
            state.wake();
        }
    }

    /// Queues a control frame, of which `room` bytes are reserved, unless too many wait.
    #[must_use]
    pub(super) fn try_control(&self, frame: &Frame, room: usize) -> bool {
        let mut state = self.lock();
        if state.takes_none() {
            return true;
        }
        let payload = match frame {
            Frame::Accept { reply, .. } => reply.len(),
            _ => 0,
        };
        if state.control_bytes + payload > limits::LINK_CONTROL_BYTES - CONTROL_SLACK {
            return false;
        }
        let bytes = state.control.frame(frame, room);
        state.control_bytes += bytes - room;
        state.wake();
        true
    }

    /// Queues a small control frame. When there is no room even for that, the link is overrun.
    pub(super) fn control(&self, frame: &Frame) {
        let mut state = self.lock();
        if state.takes_none() {
            return;
        }
        if state.control_bytes > limits::LINK_CONTROL_BYTES - limits::FRAME_HEADER_MAX {
            state.overrun = true;
            return;
        }
        state.control_bytes += state.control.frame(frame, 0);
        state.wake();
    }

    /// The other side asks for more and more and takes none of the answers.
    pub(super) fn is_overrun(&self) -> bool {
        self.lock().overrun
    }

    /// Says goodbye behind everything that waits; takes nothing more.
    pub(super) fn goodbye(&self, why: Closing) {
        let mut state = self.lock();
        state.goodbye.get_or_insert(why);
        state.wake();
    }

    /// Drops what waits; takes nothing more.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let dropped = (std::mem::take(&mut state.control), std::mem::take(&mut state.data));
        drop(state);
        drop(dropped);
    }

    /// Ready when there is something to write.
    pub(super) fn poll_ready(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        let idle = state.control.is_empty() && state.data.is_empty() && (state.goodbye.is_none() || state.closed);
        if !idle {
            return Poll::Ready(());
        }
        state.wakes(cx);
        Poll::Pending
    }

    /// The writer is woken when so many frames wait, or so much that it fills a write.
    pub(super) fn gather(&self, frames: usize, cx: &Context<'_>) {
        let mut state = self.lock();
        state.gathers = frames;
        state.wakes(cx);
    }

    /// Takes all control and then data, about [`limits::WRITE_COALESCE`] bytes; a goodbye when there is neither.
    pub(super) fn take(&self, batch: &mut Batch) {
        let mut state = self.lock();
        (state.waker, state.gathers) = (None, 0);
        batch.frames = std::mem::take(&mut state.frames);
        let State { control, data, spares, goodbye, .. } = &mut *state;
        if control.take(batch, spares) {
            batch.control = batch.bytes - batch.room();
            data.take(batch, spares);
        } else {
            batch.control = batch.bytes - batch.room();
        }
        if let (true, Some(why)) = (control.is_empty() && data.is_empty(), goodbye.clone()) {
            let mut bytes = BytesMut::new();
            encode_head(&Frame::Goodbye(why), &mut bytes);
            batch.push(Piece { bytes: Content::Frames(bytes), room: 0 });
            batch.last = true;
        }
    }

    /// A batch has been written: how many reserved bytes are free again.
    pub(super) fn written(&self, batch: &mut Batch) -> usize {
        let mut state = self.lock();
        let room = batch.room();
        state.control_bytes -= batch.control;
        for piece in batch.pieces.drain(..) {
            if let Content::Frames(mut bytes) = piece.bytes
                && state.spares.len() < SPARES
                && bytes.capacity() <= 2 * limits::WRITE_COALESCE
            {
                bytes.clear();
                state.spares.push(bytes);
            }
        }
        (batch.bytes, batch.control) = (0, 0);
        room
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn takes_none(&self) -> bool {
        self.closed || self.goodbye.is_some()
    }

    /// The writer sleeps.
    fn wakes(&mut self, cx: &Context<'_>) {
        match &mut self.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
    }

    /// A frame was queued.
    fn wake(&mut self) {
        self.frames += 1;
        let enough = self.frames >= self.gathers || !self.data.full.is_empty();
        if enough && let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl Pile {
    fn is_empty(&self) -> bool {
        self.full.is_empty() && self.open.is_empty()
    }

    /// Appends a frame; how many bytes it is.
    fn frame(&mut self, frame: &Frame, room: usize) -> usize {
        let before = self.open.len();
        let payload = encode_head(frame, &mut self.open);
        let head = self.open.len() - before;
        let payload = payload.unwrap_or_default();
        let len = head + payload.len();
        self.payload(payload, room);
        len
    }

    /// Appends the payload of the frame whose head was appended last.
    fn payload(&mut self, payload: Bytes, room: usize) {
        if payload.len() < LARGE {
            self.open.extend_from_slice(&payload);
            self.room += room;
            if self.open.len() >= limits::WRITE_COALESCE {
                self.seal();
            }
        } else {
            self.seal();
            self.full.push_back(Piece { bytes: Content::Payload(payload), room });
        }
    }

    fn seal(&mut self) {
        let piece =
            Piece { bytes: Content::Frames(std::mem::take(&mut self.open)), room: std::mem::take(&mut self.room) };
        self.full.push_back(piece);
    }

    /// Moves pieces to the batch until it is full; whether all were moved. Never parts a payload from its head.
    fn take(&mut self, batch: &mut Batch, spares: &mut Vec<BytesMut>) -> bool {
        while let Some(next) = self.full.front() {
            if batch.bytes >= limits::WRITE_COALESCE && matches!(next.bytes, Content::Frames(_)) {
                return false;
            }
            if let Some(piece) = self.full.pop_front() {
                batch.push(piece);
            }
        }
        if batch.bytes >= limits::WRITE_COALESCE && !self.open.is_empty() {
            return false;
        }
        if !self.open.is_empty() {
            let next = spares.pop().unwrap_or_default();
            let bytes = Content::Frames(std::mem::replace(&mut self.open, next));
            batch.push(Piece { bytes, room: std::mem::take(&mut self.room) });
        }
        true
    }
}

impl Batch {
    fn push(&mut self, piece: Piece) {
        self.bytes += piece.bytes.as_slice().len();
        self.pieces.push(piece);
    }

    fn room(&self) -> usize {
        self.pieces.iter().map(|piece| piece.room).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Decoder;

    /// Everything that is written, frame by frame, in batches.
    fn batches(out: &Outgoing) -> Vec<Vec<Frame>> {
        let (mut batch, mut seen) = (Batch::default(), Vec::new());
        while out.poll_ready(&Context::from_waker(Waker::noop())).is_ready() && !batch.last {
            out.take(&mut batch);
            let mut decoder = Decoder::default();
            let mut at = 0;
            while at < batch.len() {
                let mut slices = Vec::with_capacity(2);
                batch.slices(at, &mut slices);
                for slice in &slices {
                    decoder.buffer().extend_from_slice(slice);
                    at += slice.len();
                }
            }
            let mut frames = Vec::new();
            while let Some(frame) = decoder.decode().unwrap() {
                frames.push(frame);
            }
            seen.push(frames);
            out.written(&mut batch);
        }
        seen
    }

    fn data(stream: StreamId, len: usize) -> Frame {
        Frame::Data { stream, payload: Bytes::from(vec![1; len]) }
    }

    fn push(out: &Outgoing, frame: Frame) {
        match frame {
            Frame::Data { stream, payload } => {
                let room = payload.len();
                out.data(stream, payload, room);
            }
            other => out.control(&other),
        }
    }

    #[test]
    fn control_overtakes_data_and_all_come_whole_and_in_order() {
        let out = Outgoing::new();
        let large = data(1, 3 * limits::WRITE_COALESCE);
        for frame in
            [data(1, 3), large.clone(), data(1, LARGE), data(2, 0), Frame::Ping(1), Frame::Cancel { stream: 9 }]
        {
            push(&out, frame);
        }
        out.behind_data(&Frame::End { stream: 2 });
        let seen = batches(&out);
        assert_eq!(seen[0], [Frame::Ping(1), Frame::Cancel { stream: 9 }, data(1, 3), large]);
        let rest: Vec<Frame> = seen[1..].concat();
        assert_eq!(rest, [data(1, LARGE), data(2, 0), Frame::End { stream: 2 }]);
    }

    #[test]
    fn control_that_comes_while_much_data_waits_is_in_the_next_batch() {
        let out = Outgoing::new();
        for _ in 0..100 {
            push(&out, data(1, 4000));
        }
        let mut batch = Batch::default();
        out.take(&mut batch);
        assert!(batch.len() < 2 * limits::WRITE_COALESCE);
        let room = out.written(&mut batch);
        assert!((60_000..80_000).contains(&room), "{room}");
        push(&out, Frame::Ping(7));
        assert_eq!(batches(&out)[0][0], Frame::Ping(7));
    }

    #[test]
    fn a_goodbye_comes_behind_everything_and_nothing_follows() {
        let out = Outgoing::new();
        push(&out, data(1, 3));
        out.goodbye(Closing::Idle);
        push(&out, Frame::Ping(1));
        push(&out, data(1, 3));
        assert_eq!(batches(&out).concat(), [data(1, 3), Frame::Goodbye(Closing::Idle)]);
    }

    #[test]
    fn control_that_nobody_takes_is_bounded() {
        let out = Outgoing::new();
        let reply = Bytes::from(vec![0; 1 << 20]);
        let accept = |stream| Frame::Accept { stream, reply: reply.clone() };
        let taken = (0..100).take_while(|stream| out.try_control(&accept(*stream), 0)).count();
        assert!((20..32).contains(&taken), "{taken}");
        for n in 0..1_000_000 {
            out.control(&Frame::Pong(n));
        }
        assert!(out.is_overrun());
        assert!(out.lock().control_bytes <= limits::LINK_CONTROL_BYTES);
        batches(&out);
        assert_eq!(out.lock().control_bytes, 0);
    }
}
