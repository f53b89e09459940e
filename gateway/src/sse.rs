//! A reply as server-sent events.
//!
//! Whatever frames are there go out in one write; nothing waits for more. A stream ends with `[DONE]`, or with one
//! error event; the HTTP body is well formed in both cases. Silence is broken by comments.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, response::Response};
use bytes::{Bytes, BytesMut};
use hyper::{
    body::Frame,
    header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue},
};
use tokio::time::{Instant, Sleep};

use starling_actors::route::receipt::CANDIDATES_MAX;

use crate::{
    context::buffer, error::Fault, manner::RECEIPT, metrics::Outcome, openai::response::ReplyWriter, run::Run,
    text::Piece,
};

/// A write is closed at this size; what is left goes into the next.
const WRITE_BYTES_MAX: usize = 32 * 1024;

/// The body of a streamed reply. Its drop cancels the work and gives the permit back.
pub(crate) struct SseBody {
    run: Run,
    writer: ReplyWriter,
    include_usage: bool,
    piece: Piece,
    buffer: BytesMut,
    keep_alive: Duration,
    silence: Pin<Box<Sleep>>,
    last_write: Instant,
    ended: bool,
}

/// How a stream is written.
pub(crate) struct SseOptions {
    pub(crate) include_usage: bool,
    pub(crate) keep_alive: Duration,
    /// Texts shown before each answer, by choice; empty for none.
    pub(crate) echo: Vec<String>,
}

/// The response of a stream whose prompts have been accepted.
pub(crate) fn respond(run: Run, writer: ReplyWriter, options: SseOptions) -> Response {
    let now = Instant::now();
    let mut body = SseBody {
        run,
        writer,
        include_usage: options.include_usage,
        piece: Piece::default(),
        buffer: buffer(),
        keep_alive: options.keep_alive,
        silence: Box::pin(tokio::time::sleep_until(now + options.keep_alive)),
        last_write: now,
        ended: false,
    };
    for (choice, text) in options.echo.into_iter().enumerate() {
        let piece = Piece { text, ..Piece::default() };
        body.writer.piece(&mut body.buffer, choice as u32, &piece);
    }
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Tells nginx not to collect events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl SseBody {
    /// Fills the buffer with all that is there now. True when the stream is over.
    fn fill(&mut self, cx: &mut Context<'_>) -> bool {
        while self.buffer.len() < WRITE_BYTES_MAX {
            match self.run.poll_piece(cx, &mut self.piece) {
                Poll::Pending => return false,
                Poll::Ready(Ok(Some(choice))) => self.writer.piece(&mut self.buffer, choice, &self.piece),
                Poll::Ready(Ok(None)) => {
                    self.end();
                    return true;
                }
                Poll::Ready(Err(fault)) => {
                    self.fail(&fault);
                    return true;
                }
            }
        }
        false
    }

    fn end(&mut self) {
        if self.include_usage {
            self.writer.usage_event(&mut self.buffer, &self.run.usage());
        }
        self.receipt();
        self.buffer.extend_from_slice(b"data: [DONE]\n\n");
        self.run.settle(Outcome::Ok);
    }

    /// How the request was routed, as a comment, which every client of events skips.
    fn receipt(&mut self) {
        if let Some(line) = self.run.receipts(CANDIDATES_MAX) {
            for part in [": ", RECEIPT, " ", &line, "\n\n"] {
                self.buffer.extend_from_slice(part.as_bytes());
            }
        }
    }

    fn fail(&mut self, fault: &Fault) {
        let answer = fault.answer();
        tracing::warn!(code = answer.code, message = %answer.message, "a stream ended with an error");
        self.receipt();
        self.buffer.extend_from_slice(b"data: ");
        answer.write(&mut self.buffer);
        self.buffer.extend_from_slice(b"\n\n");
        self.run.settle(Outcome::of(answer.status.as_u16()));
    }

    /// A comment when nothing was written for too long.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.silence.as_mut().poll(cx).is_ready() {
            let due = self.last_write + self.keep_alive;
            let now = Instant::now();
            if due <= now {
                self.silence.as_mut().reset(now + self.keep_alive);
                self.buffer.extend_from_slice(b": keep-alive\n\n");
                return Poll::Ready(());
            }
            // Writes do not move the timer, they only make it come round again.
            self.silence.as_mut().reset(due);
        }
        Poll::Pending
    }
}

impl hyper::body::Body for SseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        this.ended = this.fill(cx);
        if this.buffer.is_empty() && this.poll_silence(cx).is_pending() {
            return Poll::Pending;
        }
        this.last_write = Instant::now();
        Poll::Ready(Some(Ok(Frame::data(this.buffer.split().freeze()))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}
