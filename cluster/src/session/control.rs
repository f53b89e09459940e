//! The Control actor: the only actor of a node that other nodes can see. Answers operations.
//!
//! Owns: the tasks that answer, at most [`ANSWERS_MAX`]. Parent: the node's root. Children: none. Bound: beyond the
//! running answers a question is refused as overloaded, at once. If it dies: the questions under way are
//! answered by nobody and time out at their asker; the new one is announced to all sessions by itself.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use serde_bytes::ByteBuf;
use starling_ids::{Incarnation, Metric, NodeId};

use super::{
    SessionsHandle,
    envelope::{Answer, ControlMsg, Envelope, decode, encode_answer},
};
use crate::{
    stream::{Fault, FaultKind},
    supervise::{ChildSpec, Handle, Restart, TaskOwner, child},
};

/// Answers under way at one time.
const ANSWERS_MAX: usize = 1024;
/// No answer takes longer, whatever the asker allows.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// How to start the Control actor of a node.
#[must_use]
pub fn control_child(sessions: &SessionsHandle) -> ChildSpec {
    let handle: Handle<ControlMsg> = Handle::new();
    let sessions = sessions.clone();
    child("control", "control", Restart::Permanent, &handle, move || (Control, sessions.clone()))
}

struct Control;

struct State {
    sessions: SessionsHandle,
    tasks: TaskOwner,
}

impl Actor for Control {
    type Msg = ControlMsg;
    type State = State;
    type Arguments = SessionsHandle;

    async fn pre_start(
        &self,
        _myself: ActorRef<ControlMsg>,
        sessions: SessionsHandle,
    ) -> Result<State, ActorProcessingErr> {
        Ok(State { sessions, tasks: TaskOwner::new(ANSWERS_MAX) })
    }

    async fn handle(
        &self,
        _myself: ActorRef<ControlMsg>,
        message: ControlMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let ControlMsg { envelope, reply } = message;
        match decode(&envelope).and_then(|envelope| state.admit(envelope)) {
            Ok(Some(envelope)) => state.answer(envelope, reply),
            Ok(None) => send(reply, Answer::Misrouted),
            Err(fault) => send(reply, Answer::Refused(fault)),
        }
        Ok(())
    }
}

impl State {
    /// `None`: it is for another node. A fault: it is for another life of this one.
    fn admit(&self, envelope: Envelope) -> Result<Option<Envelope>, Fault> {
        let (node, current) = self.sessions.me();
        let (to, wanted) = &envelope.to;
        if to != node {
            return Ok(None);
        }
        if *wanted != current {
            metrics::counter!(Metric::StaleRefused.name(), "what" => "question").increment(1);
            return Err(stale(node, *wanted, current));
        }
        Ok(Some(envelope))
    }

    fn answer(&self, envelope: Envelope, reply: RpcReplyPort<Vec<u8>>) {
        let Envelope { from, op, deadline_ms, body, .. } = envelope;
        self.sessions.touched(&from);
        let limit = Duration::from_millis(deadline_ms).min(ANSWER_TIME_MAX);
        let answer = self.sessions.ops().answer(from.0, &op, Bytes::from(body.into_vec()));
        // The port travels in a slot, so that a refused task leaves it here.
        let port = Arc::new(std::sync::Mutex::new(Some(reply)));
        let taken = port.clone();
        let started = self.tasks.tasks().spawn(async move {
            let outcome = tokio::time::timeout(limit, answer).await;
            let answer = match outcome {
                Ok(Ok(body)) => Answer::Done(ByteBuf::from(Vec::from(body))),
                Ok(Err(fault)) => Answer::Refused(fault),
                Err(_) => Answer::Refused(Fault::new(FaultKind::DeadlineExceeded, format!("{op} took too long"))),
            };
            if let Some(reply) = take(&taken) {
                send(reply, answer);
            }
        });
        if !started && let Some(reply) = take(&port) {
            let fault = Fault::new(FaultKind::Overloaded, "too many questions under way").retry_after_ms(100);
            send(reply, Answer::Refused(fault));
        }
    }
}

fn take(port: &std::sync::Mutex<Option<RpcReplyPort<Vec<u8>>>>) -> Option<RpcReplyPort<Vec<u8>>> {
    port.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
}

fn stale(node: &NodeId, wanted: Incarnation, current: Incarnation) -> Fault {
    let message = format!("node {node} is in incarnation {current}, the question was for {wanted}");
    Fault::new(FaultKind::StaleIncarnation, message)
}

fn send(reply: RpcReplyPort<Vec<u8>>, answer: Answer) {
    if reply.send(encode_answer(answer)).is_err() {
        tracing::debug!("the asker no longer waits");
    }
}
