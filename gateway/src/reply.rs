//! A reply as one document, whose ticket is kept until the body is gone.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use hyper::{
    StatusCode,
    body::{Frame, SizeHint},
    header::{CONTENT_TYPE, HeaderValue},
};

use crate::{admission::Ticket, error::Fault, metrics::Outcome};

/// A document and the ticket of its request.
struct TicketBody {
    document: Option<Bytes>,
    _ticket: Ticket,
}

/// A good reply.
pub(crate) fn document(bytes: Bytes, mut ticket: Ticket) -> Response {
    ticket.settle(Outcome::Ok);
    with_ticket(StatusCode::OK, bytes, ticket)
}

/// The reply to a fault.
pub(crate) fn refuse(fault: &Fault, mut ticket: Ticket) -> Response {
    let answer = fault.answer();
    // Overload and shutdown are news once, not once a request; the counters have them.
    if answer.status.is_server_error() && answer.retry_after.is_none() {
        tracing::warn!(code = answer.code, message = %answer.message, "a request failed");
    }
    ticket.settle(Outcome::of(answer.status.as_u16()));
    answer.response()
}

fn with_ticket(status: StatusCode, bytes: Bytes, ticket: Ticket) -> Response {
    let mut response = Response::new(Body::new(TicketBody { document: Some(bytes), _ticket: ticket }));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

impl hyper::body::Body for TicketBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.document.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.document.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.document.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}
