//! What membership does over TCP: visits members that gossip cannot reach, and exchanges states with others.
//!
//! Run as tasks of the Membership actor; asks the gossip thread for what to say and tells it what came back. Bounds:
//! [`STEP_WAIT`] for each question of an exchange, [`STEPS_MAX`] questions; of visits see [`super::visits`]. If
//! a task dies, the driver goes on without its answer.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::{
    driver::{Look, Peer},
    thread::Command,
    visits::Visit,
};
use crate::{
    session::Caller,
    stream::{Fault, FaultKind},
};

/// The operation that answers one question of an exchange of states.
pub const OP_EXCHANGE: &str = "membership/exchange";
/// Longest wait for the answer to one question: a few hundred kilobytes and a new session.
const STEP_WAIT: Duration = Duration::from_secs(3);
/// Questions in one exchange: each settles at least one of 64 buckets.
const STEPS_MAX: usize = 80;
/// Longest wait for the gossip thread.
const THREAD_WAIT: Duration = Duration::from_secs(1);

/// Looks for `peer` and tells the thread what it has found.
pub(super) async fn visit(visit: Visit, peer: Peer, look: Look, commands: mpsc::Sender<Command>) {
    if let Some(proof) = visit(peer.clone(), look).await {
        tell(&commands, Command::Verified(peer, proof)).await;
    }
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
        let reply = caller(peer.node.clone(), OP_EXCHANGE, addressed(peer.address, &asked), STEP_WAIT).await?;
        question = consult(commands, |answer| Command::ExchangeNext(reply, answer)).await?;
    }
    Err(Fault::new(FaultKind::Internal, "an exchange of member lists does not end"))
}

/// A question with the address of the node it is for: whoever answers at another one, under the same name, must not
/// take it for a question of its own cluster.
pub(super) fn addressed(address: SocketAddr, question: &[u8]) -> Bytes {
    let address = address.to_string();
    let mut body = Vec::with_capacity(1 + address.len() + question.len());
    // An address as text has at most 60 bytes.
    body.push(u8::try_from(address.len()).unwrap_or(u8::MAX));
    body.extend_from_slice(address.as_bytes());
    body.extend_from_slice(question);
    body.into()
}

pub(super) fn for_address(own: SocketAddr, body: &Bytes) -> Option<Bytes> {
    let (length, rest) = body.split_first()?;
    let (address, question) = rest.split_at_checked(usize::from(*length))?;
    let mine = std::str::from_utf8(address).ok()?.parse() == Ok(own);
    mine.then(|| body.slice_ref(question))
}

/// Answers [`OP_EXCHANGE`] as the node at `own`.
pub(super) async fn serve(commands: mpsc::Sender<Command>, own: SocketAddr, body: Bytes) -> Result<Bytes, Fault> {
    let question = for_address(own, &body).ok_or_else(|| {
        Fault::new(FaultKind::NotFound, format!("this is the node at {own}, and another one was asked"))
    })?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_for_another_address_is_not_answered() {
        let [own, other]: [SocketAddr; 2] = ["10.0.0.1:7", "[fe80::1]:7"].map(|text| text.parse().expect("address"));
        let question = Bytes::from_static(b"who is here");
        assert_eq!(for_address(own, &addressed(own, &question)), Some(question.clone()));
        assert_eq!(for_address(other, &addressed(other, &question)), Some(question.clone()));
        assert_eq!(for_address(own, &addressed(other, &question)), None);
        for bad in [&b""[..], b"\xff10.0.0.1:7", b"\x03abc"] {
            assert_eq!(for_address(own, &Bytes::from_static(bad)), None);
        }
    }
}
