//! What each frame from the other side does to the streams of a link.
//!
//! Called by the reader with all that has arrived, in order. Data and credits, which nearly all frames are, are taken
//! many at a time under one lock. Never waits; nothing that a peer sends makes a queue grow past its bound: that is a
//! [`Violation`], and ends the link.

use std::sync::Arc;

use bytes::Bytes;

use super::{
    halves,
    mux::{Mux, OpenError},
    table::{Deadline, Entry, Stage, Table},
};
use crate::{
    stream::{Acceptor, Context, Fault, FaultKind, Incoming, Opened, StreamError, StreamRx, StreamTx, inbox::Last},
    wire::{Closing, Decoder, FailWhy, Frame, OpenHead, StreamId, WireError, limits},
};

/// Frames that are taken under one lock before others may have it.
const RUN: usize = 256;

/// The other side broke the rules; the link cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("protocol violation: {0}")]
pub(crate) struct Violation(pub(crate) &'static str);

/// Why a link ends because of what its other side sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Misuse {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Violation(#[from] Violation),
}

impl Mux {
    /// Takes all whole frames that have arrived. `Some` when one of them was the last.
    pub(crate) fn take_all(self: &Arc<Self>, decoder: &mut Decoder) -> Result<Option<Closing>, Misuse> {
        while let Some(frame) = self.take_run(decoder)? {
            if let Some(why) = self.take(frame)? {
                return Ok(Some(why));
            }
            if self.out.is_overrun() {
                return Err(Violation("more questions than it takes answers to").into());
            }
        }
        Ok(None)
    }

    /// Takes data and credits up to the first frame that is neither.
    fn take_run(&self, decoder: &mut Decoder) -> Result<Option<Frame>, Misuse> {
        let mut table = self.table();
        let mut left = RUN;
        while let Some(frame) = decoder.decode()? {
            match frame {
                Frame::Data { stream, payload } => {
                    if table.deliver(stream, payload)? {
                        self.cut_largest(&mut table);
                    }
                }
                Frame::Credit { stream, amount } => table.credit(stream, amount),
                other => return Ok(Some(other)),
            }
            left -= 1;
            if left == 0 {
                drop(table);
                table = self.table();
                left = RUN;
            }
        }
        Ok(None)
    }

    /// Too much lies unread: those who hold the most lose it, and their streams.
    pub(super) fn cut_largest(&self, table: &mut Table) {
        for stream in table.largest_unread() {
            let Some(inbox) = table.streams.get_mut(&stream).and_then(|entry| entry.inbox.take()) else { continue };
            tracing::warn!(peer = %self.peer, stream, "a stream is cut: its reader is too slow");
            let why = "too much lies unread on this link, and most of it in this stream";
            inbox.cut(Last::Fail(Fault::new(FaultKind::Overloaded, why)));
            self.out.control(&Frame::Cancel { stream });
            table.drop_if_over(stream, &self.out);
        }
    }

    /// Takes one frame from the other side. `Some` when it was the last.
    fn take(self: &Arc<Self>, frame: Frame) -> Result<Option<Closing>, Violation> {
        match frame {
            Frame::Hello(_) => return Err(Violation("a second hello")),
            Frame::Open { stream, head, body } => self.asked(stream, *head, body)?,
            Frame::Accept { stream, reply } => self.accepted(stream, reply)?,
            Frame::Reject { stream, fault } => self.rejected(stream, *fault)?,
            // Taken in runs.
            Frame::Data { .. } | Frame::Credit { .. } => {}
            Frame::Cancel { stream } => self.cancelled(stream),
            Frame::End { stream } => self.inbound_over(stream, Last::End),
            Frame::Fail { stream, why } => {
                let last = match *why {
                    FailWhy::Fault(fault) => Last::Fail(fault),
                    FailWhy::Dropped(why) => Last::Broken(why.into()),
                };
                self.inbound_over(stream, last);
            }
            Frame::Ping(number) => self.out.control(&Frame::Pong(number)),
            Frame::Pong(_) => {}
            Frame::Goodbye(why) => return Ok(Some(why)),
        }
        Ok(None)
    }

    fn asked(self: &Arc<Self>, stream: StreamId, head: OpenHead, body: Bytes) -> Result<(), Violation> {
        let theirs = stream.is_multiple_of(2) == self.dialled && stream != 0;
        let full = {
            let mut table = self.table();
            if !theirs || table.streams.contains_key(&stream) {
                return Err(Violation("an open under an id that is not free to its opener"));
            }
            if table.ended.is_some() {
                return Ok(());
            }
            let full = table.streams.len() >= limits::STREAMS_PER_LINK_MAX;
            if !full {
                table.streams.insert(stream, Entry::new(Stage::Asked));
            }
            full
        };
        if full {
            // Not in the table: its end is nobody's.
            let fault = Fault::new(FaultKind::Overloaded, "too many streams on this link");
            self.out.control(&Frame::Reject { stream, fault: Box::new(fault) });
            return Ok(());
        }
        if self.handlers.is_full() {
            self.refuse(stream, Fault::new(FaultKind::Overloaded, "too many streams on this node"));
            return Ok(());
        }
        let Some(handler) = self.endpoints.get(&head.endpoint) else {
            self.refuse(stream, self.endpoints.not_found(&head.endpoint));
            return Ok(());
        };
        let (mux, context, deadline) = (self.clone(), head.context.clone(), head.context.deadline());
        let acceptor = Acceptor::new(move |verdict| mux.answer(stream, &context, deadline, verdict));
        let incoming = Incoming { peer: self.peer.clone(), context: head.context, body, acceptor };
        // A set that closed just now drops the task, and with it the acceptor rejects.
        let _started = self.handlers.spawn(async move { handler.open(incoming).await });
        Ok(())
    }

    fn answer(
        self: &Arc<Self>,
        stream: StreamId,
        context: &Context,
        deadline: Deadline,
        verdict: Result<Bytes, Fault>,
    ) -> Option<(StreamTx, StreamRx)> {
        let reply = match verdict {
            Ok(reply) if reply.len() <= self.payload_max => reply,
            Ok(_) => {
                self.refuse(stream, Fault::new(FaultKind::Internal, "the reply is over the frame limit"));
                return None;
            }
            Err(fault) => {
                self.refuse(stream, fault);
                return None;
            }
        };
        let (tx, rx, made) = halves::make(self, stream, context, deadline);
        let mut said = true;
        let taken = {
            let mut table = self.table();
            match table.streams.get_mut(&stream) {
                Some(asked) if matches!(asked.stage, Stage::Asked) => {
                    // Under the lock, so that nothing of this stream can be queued before its accept.
                    said = self.out.try_control(&Frame::Accept { stream, reply }, 0);
                    if said {
                        *asked = Entry { stage: Stage::Open, inbox: Some(made.inbox), lane: Some(made.lane) };
                    }
                    said
                }
                _ => false,
            }
        };
        if taken {
            return Some((tx, rx));
        }
        // The opener has gone, or is refused: what the halves say is about an id that it has given up.
        halves::discard(tx, rx);
        if !said {
            self.refuse(stream, Fault::new(FaultKind::Overloaded, "too many answers wait for this link"));
        }
        None
    }

    fn refuse(&self, stream: StreamId, fault: Fault) {
        // An opener that has withdrawn is told nothing: it has forgotten the stream.
        if self.remove(stream).is_some() {
            self.out.control(&Frame::Reject { stream, fault: Box::new(fault) });
        }
    }

    fn accepted(self: &Arc<Self>, stream: StreamId, reply: Bytes) -> Result<(), Violation> {
        let (answer, opened) = {
            let mut table = self.table();
            // Unknown: this side has withdrawn the question already and said so.
            let Some(entry) = table.streams.get_mut(&stream) else { return Ok(()) };
            if !matches!(entry.stage, Stage::Asking(_)) {
                return Err(Violation("an accept of a stream that was not asked for"));
            }
            let Stage::Asking(asking) = std::mem::replace(&mut entry.stage, Stage::Open) else { return Ok(()) };
            let (tx, rx, made) = halves::make(self, stream, &asking.context, asking.deadline);
            entry.inbox = Some(made.inbox);
            entry.lane = Some(made.lane);
            (asking.answer, Opened { reply, tx, rx: rx.with_default_inactivity(&asking.context) })
        };
        // An opener that has just gone drops the halves, and they cancel the stream (outside of the lock).
        answer.send(Ok(opened)).ok();
        Ok(())
    }

    fn rejected(&self, stream: StreamId, fault: Fault) -> Result<(), Violation> {
        let asking = {
            let mut table = self.table();
            // Unknown: this side has withdrawn the question already.
            let Some(entry) = table.streams.get(&stream) else { return Ok(()) };
            if !matches!(entry.stage, Stage::Asking(_)) {
                return Err(Violation("a reject of a stream that was not asked for"));
            }
            let entry = table.streams.remove(&stream);
            table.note_empty(&self.out);
            entry
        };
        if let Some(Entry { stage: Stage::Asking(asking), .. }) = asking {
            asking.answer.send(Err(OpenError::Stream(StreamError::Rejected(fault)))).ok();
        }
        Ok(())
    }

    fn cancelled(&self, stream: StreamId) {
        let lane = {
            let mut table = self.table();
            match table.streams.get(&stream) {
                Some(Entry { stage: Stage::Asked, .. }) => {
                    table.streams.remove(&stream);
                    table.note_empty(&self.out);
                    return;
                }
                Some(entry) => entry.lane.clone(),
                None => None,
            }
        };
        lane.inspect(|lane| lane.stop(StreamError::Cancelled));
    }

    /// The other side's direction is over.
    fn inbound_over(&self, stream: StreamId, last: Last) {
        let mut table = self.table();
        let Some(entry) = table.streams.get_mut(&stream) else { return };
        if let Some(inbox) = entry.inbox.take() {
            inbox.finish(last);
        }
        table.drop_if_over(stream, &self.out);
    }
}
