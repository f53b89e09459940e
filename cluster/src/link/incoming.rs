//! What each frame from the other side does to the streams of a link.
//!
//! Called by the reader for every frame, in order. Never waits; nothing that a peer sends makes a queue grow
//! past its bound: that is a [`Violation`], and ends the link.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::{
    halves,
    mux::{Deadline, Entry, Mux, OpenError, Stage},
};
use crate::{
    stream::{Acceptor, Context, Fault, FaultKind, Incoming, Opened, StreamError, StreamRx, StreamTx, channel::Item},
    wire::{Closing, FailWhy, Frame, OpenHead, StreamId, limits},
};

/// The other side broke the rules; the link cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("protocol violation: {0}")]
pub(crate) struct Violation(pub(crate) &'static str);

impl Mux {
    /// Takes one frame from the other side. `Some` when it was the last.
    pub(crate) fn take(self: &Arc<Self>, frame: Frame) -> Result<Option<Closing>, Violation> {
        match frame {
            Frame::Hello(_) => return Err(Violation("a second hello")),
            Frame::Open { stream, head, body } => self.asked(stream, head, body)?,
            Frame::Accept { stream, reply } => self.accepted(stream, reply)?,
            Frame::Reject { stream, fault } => self.rejected(stream, fault),
            Frame::Data { stream, payload } => self.data(stream, payload)?,
            Frame::Credit { stream, frames } => {
                let lane = self.table().streams.get(&stream).and_then(|entry| entry.lane.clone());
                lane.inspect(|lane| lane.grant(frames as usize));
            }
            Frame::Cancel { stream } => self.cancelled(stream),
            Frame::End { stream } => self.inbound_over(stream, Item::End),
            Frame::Fail { stream, why: FailWhy::Fault(fault) } => self.inbound_over(stream, Item::Fail(fault)),
            Frame::Fail { stream, why: FailWhy::Dropped(why) } => self.inbound_over(stream, Item::Broken(why.into())),
            Frame::Ping(number) => self.send_control(Frame::Pong(number), 0),
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
                table.streams.insert(stream, Entry { stage: Stage::Asked, inbound: None, lane: None });
            }
            full
        };
        if full || self.handlers.is_full() {
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
        let (tx, rx, entry) = halves::make(self, stream, context, deadline);
        let taken = {
            let mut table = self.table();
            match table.streams.get_mut(&stream) {
                Some(asked) if matches!(asked.stage, Stage::Asked) => {
                    *asked = Entry { stage: Stage::Open, inbound: Some(entry.inbound), lane: Some(entry.lane) };
                    true
                }
                _ => false,
            }
        };
        if !taken {
            // The opener has gone: the halves say nothing to anybody.
            halves::discard(tx, rx);
            return None;
        }
        self.send_control(Frame::Accept { stream, reply }, 0);
        Some((tx, rx))
    }

    fn refuse(&self, stream: StreamId, fault: Fault) {
        self.remove(stream);
        self.send_control(Frame::Reject { stream, fault }, 0);
    }

    fn accepted(self: &Arc<Self>, stream: StreamId, reply: Bytes) -> Result<(), Violation> {
        let (answer, opened) = {
            let mut table = self.table();
            // Unknown: this side has withdrawn the question already and said so.
            let Some(entry) = table.streams.get_mut(&stream) else { return Ok(()) };
            let Stage::Asking(answer, context, deadline) = std::mem::replace(&mut entry.stage, Stage::Open) else {
                return Err(Violation("an accept of a stream that was not asked for"));
            };
            let (tx, rx, made) = halves::make(self, stream, &context, deadline);
            entry.inbound = Some(made.inbound);
            entry.lane = Some(made.lane);
            (answer, Opened { reply, tx, rx: rx.with_default_inactivity(&context) })
        };
        // An opener that has just gone drops the halves, and they cancel the stream (outside of the lock).
        answer.send(Ok(opened)).ok();
        Ok(())
    }

    fn rejected(&self, stream: StreamId, fault: Fault) {
        if let Some(Entry { stage: Stage::Asking(answer, ..), .. }) = self.remove(stream) {
            answer.send(Err(OpenError::Stream(StreamError::Rejected(fault)))).ok();
        }
    }

    fn data(&self, stream: StreamId, payload: Bytes) -> Result<(), Violation> {
        let table = self.table();
        let Some(inbound) = table.streams.get(&stream).and_then(|entry| entry.inbound.as_ref()) else {
            return Ok(());
        };
        match inbound.try_send(Item::Data(payload)) {
            Err(mpsc::error::TrySendError::Full(_)) => Err(Violation("more data than credits")),
            // A reader that has gone has sent its cancel.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
        }
    }

    fn cancelled(&self, stream: StreamId) {
        let lane = {
            let mut table = self.table();
            match table.streams.get(&stream) {
                Some(Entry { stage: Stage::Asked, .. }) => {
                    table.streams.remove(&stream);
                    table.note_empty(&self.control);
                    return;
                }
                Some(entry) => entry.lane.clone(),
                None => None,
            }
        };
        lane.inspect(|lane| lane.stop(StreamError::Cancelled));
    }

    /// The other side's direction is over.
    fn inbound_over(&self, stream: StreamId, last: Item) {
        let mut table = self.table();
        let Some(entry) = table.streams.get_mut(&stream) else { return };
        if let Some(inbound) = entry.inbound.take() {
            // Never full: credits leave room for this one. Closed: the reader needs nothing more.
            inbound.try_send(last).ok();
        }
        table.drop_if_over(stream, &self.control);
    }
}
