//! What membership does over TCP: visits members that gossip cannot reach, and exchanges states with others.
//!
//! Run as tasks of the Membership actor; asks the gossip thread for what to say and tells it what came back. Bounds:
//! [`VISIT_TIME`] for a visit; [`STEP_WAIT`] for each question of an exchange, [`STEPS_MAX`] questions. If
//! a task dies, the driver goes on without its answer.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::{
    driver::{Peer, Proof, VERIFY_MAX},
    thread::Command,
};
use crate::{
    security::{Alpn, Tls, TlsError},
    session::Caller,
    stream::{Fault, FaultKind},
};

/// The operation that answers one question of an exchange of states.
pub const OP_EXCHANGE: &str = "membership/exchange";
/// A little less than the driver waits, so that the answer is not late.
const VISIT_TIME: Duration = Duration::from_millis(VERIFY_MAX.as_millis() as u64 - 100);
/// Longest wait for the answer to one question: a few hundred kilobytes and a new session.
const STEP_WAIT: Duration = Duration::from_secs(3);
/// Questions in one exchange: each settles at least one of 64 buckets.
const STEPS_MAX: usize = 80;
/// Longest wait for the gossip thread.
const THREAD_WAIT: Duration = Duration::from_secs(1);

/// Finds out over TCP whether a member lives.
pub type Visit = Arc<dyn Fn(Peer) -> BoxFuture<'static, Proof> + Send + Sync>;

/// A visit by a TLS handshake: it ends well only if a process with the cluster key answers under the member's name, and
/// answers now. Nothing is said after it.
#[must_use]
pub fn visit_by_tls(tls: Tls) -> Visit {
    Arc::new(move |peer| {
        let tls = tls.clone();
        Box::pin(async move {
            let handshake = tls.connect(peer.address, Some(&peer.node), Alpn::Link, VISIT_TIME);
            match timeout(VISIT_TIME, handshake).await {
                Ok(Ok(_connection)) => Proof::Alive,
                Ok(Err(TlsError::Connect(_, error))) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    Proof::Refused
                }
                Ok(Err(error)) => {
                    tracing::debug!(node = %peer.node, %error, "a visit was in vain");
                    Proof::Silent
                }
                Err(_) => Proof::Silent,
            }
        })
    })
}

/// Visits `peer` and tells the thread.
pub(super) async fn visit(visit: Visit, peer: Peer, commands: mpsc::Sender<Command>) {
    let proof = visit(peer.clone()).await;
    tell(&commands, Command::Verified(peer, proof)).await;
}

/// Exchanges states with `peer`.
pub(super) async fn exchange(caller: Caller, peer: Peer, commands: mpsc::Sender<Command>) {
    let node = peer.node.clone();
    if let Err(fault) = talk(caller, peer, &commands).await {
        tracing::debug!(peer = %node, %fault, "no exchange of member lists; another one follows");
        tell(&commands, Command::ExchangeFailed).await;
    }
}

async fn talk(caller: Caller, peer: Peer, commands: &mpsc::Sender<Command>) -> Result<(), Fault> {
    let mut question = Some(consult(commands, Command::ExchangeOpen).await?);
    for _ in 0..STEPS_MAX {
        let Some(asked) = question else { return Ok(()) };
        let reply = caller(peer.node.clone(), OP_EXCHANGE, Bytes::from(asked), STEP_WAIT).await?;
        question = consult(commands, |answer| Command::ExchangeNext(reply, answer)).await?;
    }
    Err(Fault::new(FaultKind::Internal, "an exchange of member lists does not end"))
}

/// Answers [`OP_EXCHANGE`].
pub(super) async fn serve(commands: mpsc::Sender<Command>, question: Bytes) -> Result<Bytes, Fault> {
    let reply: Option<Vec<u8>> = consult(&commands, |answer| Command::ExchangeServe(question, answer)).await?;
    let reply = reply.ok_or_else(|| Fault::new(FaultKind::Invalid, "not a question about members"))?;
    Ok(reply.into())
}

async fn consult<T>(
    commands: &mpsc::Sender<Command>,
    command: impl FnOnce(oneshot::Sender<T>) -> Command,
) -> Result<T, Fault> {
    let unavailable = || Fault::new(FaultKind::Unavailable, "the gossip thread gives no answer");
    let (answer, answered) = oneshot::channel();
    let asked = timeout(THREAD_WAIT, commands.send(command(answer))).await;
    asked.map_err(|_| unavailable())?.map_err(|_| unavailable())?;
    timeout(THREAD_WAIT, answered).await.map_err(|_| unavailable())?.map_err(|_| unavailable())
}

async fn tell(commands: &mpsc::Sender<Command>, command: Command) {
    if !matches!(timeout(THREAD_WAIT, commands.send(command)).await, Ok(Ok(()))) {
        tracing::debug!("the gossip thread takes no commands");
    }
}
