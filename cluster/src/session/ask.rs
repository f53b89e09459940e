//! One question over one session: find the other side's Control actor, ask, read the answer.
//!
//! Run as a task of the Sessions actor. Bounds: the question's deadline, always.

use std::time::Duration;

use bytes::Bytes;
use ractor::{ActorCell, ActorId, ActorRef, rpc::CallResult};
use ractor_cluster::NodeSessionMessage;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout_at},
};

use super::{
    envelope::{Answer, ControlMsg, Envelope, decode_answer, encode},
    table::Life,
};
use crate::stream::{Fault, FaultKind};

/// ractor reports its own timeout like a lost peer; ours comes first, so the two stay apart.
const GRACE: Duration = Duration::from_millis(500);
/// While the other side's Control actor is being restarted.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A question and where its answer goes. Dropping it tells the asker that there will be none.
pub(crate) struct Question {
    pub(super) to: Life,
    pub(super) from: Life,
    pub(super) op: String,
    pub(super) body: Bytes,
    pub(super) deadline: Instant,
    pub(super) answer: oneshot::Sender<Result<Bytes, Fault>>,
}

/// Answers with a fault of this side.
pub(super) fn refuse(question: Question, fault: Fault) {
    answer(question.answer, Err(fault));
}

/// Asks, and answers within the deadline.
pub(super) async fn ask(session: ActorRef<NodeSessionMessage>, question: Question) {
    let Question { to, from, op, body, deadline, answer: port } = question;
    let late = || Fault::new(FaultKind::DeadlineExceeded, format!("{} gave no answer to {op} in time", to.0));
    let left = deadline.saturating_duration_since(Instant::now());
    let deadline_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    let envelope = Envelope {
        to: to.clone(),
        from,
        op: op.clone(),
        deadline_ms,
        body: serde_bytes::ByteBuf::from(Vec::from(body)),
    };
    let outcome = match encode(&envelope) {
        Ok(bytes) => match timeout_at(deadline, ask_control(&session, &bytes, left + GRACE)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(late()),
        },
        Err(fault) => Err(fault),
    };
    answer(port, outcome);
}

/// The session's remote actors are the Control actors of the other process: one, unless it is home to several nodes.
async fn ask_control(session: &ActorRef<NodeSessionMessage>, envelope: &[u8], limit: Duration) -> Result<Bytes, Fault> {
    let mut asked: Vec<ActorId> = Vec::new();
    loop {
        let remote = |cell: &ActorCell| matches!(cell.get_id(), ActorId::Remote { .. });
        let children = session.get_children().into_iter().filter(remote);
        let mut broke = false;
        for control in children.filter(|cell| !asked.contains(&cell.get_id())).collect::<Vec<_>>() {
            asked.push(control.get_id());
            match ask_one(&ActorRef::from(control), envelope.to_vec(), limit).await {
                Ok(Answer::Done(body)) => return Ok(Bytes::from(body.into_vec())),
                Ok(Answer::Refused(fault)) => return Err(fault),
                Ok(Answer::Misrouted) => {}
                // It may have been the right one, and may have acted: only those that were there beside it are asked.
                Err(_) => broke = true,
            }
        }
        if broke {
            return Err(lost());
        }
        if session.get_status() >= ractor::ActorStatus::Stopping {
            return Err(lost());
        }
        sleep(LOOK_AGAIN).await;
    }
}

async fn ask_one(control: &ActorRef<ControlMsg>, envelope: Vec<u8>, limit: Duration) -> Result<Answer, Fault> {
    match control.call(|reply| ControlMsg { envelope, reply }, Some(limit)).await {
        Ok(CallResult::Success(bytes)) => decode_answer(&bytes),
        Ok(CallResult::Timeout | CallResult::SenderError) | Err(_) => Err(lost()),
    }
}

fn lost() -> Fault {
    Fault::new(FaultKind::Unavailable, "the session broke before the answer")
}

fn answer(port: oneshot::Sender<Result<Bytes, Fault>>, outcome: Result<Bytes, Fault>) {
    if port.send(outcome).is_err() {
        tracing::debug!("the asker no longer waits");
    }
}
