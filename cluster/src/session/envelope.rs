//! What one node says to another: the envelope of a question, its answer, and how ractor carries both.
//!
//! Called by the Sessions and Control actors. Pure. MessagePack throughout: bytes that do not decode become an error
//! reply, never a panic. Bounds: [`BODY_MAX`] for a body, both ways.

use ractor::{
    Message, RpcReplyPort,
    message::{BoxedDowncastErr, SerializedMessage},
};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use starling_ids::{Incarnation, NodeId};

use crate::stream::{Fault, FaultKind};

/// Longest body of a question or an answer in bytes.
pub const BODY_MAX: usize = 256 << 10;

/// A question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Envelope {
    /// Whom it is for; an earlier or later life refuses it.
    pub(super) to: (NodeId, Incarnation),
    /// Who asks.
    pub(super) from: (NodeId, Incarnation),
    /// The operation.
    pub(super) op: String,
    /// Time left for the answer, milliseconds.
    pub(super) deadline_ms: u64,
    /// What the operation takes.
    pub(super) body: ByteBuf,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// What the operation gives.
    Done(ByteBuf),
    /// Why it does not.
    Refused(Fault),
    /// Asked the wrong node. Only where several nodes live in one process.
    Misrouted,
}

/// The only message that a remote node can send here: an encoded [`Envelope`] and where its answer goes.
#[derive(Debug)]
pub(super) struct ControlMsg {
    pub(super) envelope: Vec<u8>,
    pub(super) reply: RpcReplyPort<Vec<u8>>,
}

impl Message for ControlMsg {
    fn serializable() -> bool {
        true
    }

    fn serialize(self) -> Result<SerializedMessage, BoxedDowncastErr> {
        let Self { envelope, reply } = self;
        Ok(SerializedMessage::Call { variant: String::new(), args: envelope, reply, metadata: None })
    }

    fn deserialize(message: SerializedMessage) -> Result<Self, BoxedDowncastErr> {
        match message {
            SerializedMessage::Call { args, reply, .. } => Ok(Self { envelope: args, reply }),
            SerializedMessage::Cast { .. } | SerializedMessage::CallReply(..) => Err(BoxedDowncastErr),
        }
    }
}

/// Encodes a question whose body is within [`BODY_MAX`].
pub(super) fn encode(envelope: &Envelope) -> Result<Vec<u8>, Fault> {
    within_limit(envelope.body.len(), FaultKind::Invalid)?;
    rmp_serde::to_vec(envelope).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
}

/// Reads a question.
pub(super) fn decode(bytes: &[u8]) -> Result<Envelope, Fault> {
    let envelope: Envelope = rmp_serde::from_slice(bytes)
        .map_err(|error| Fault::new(FaultKind::Invalid, format!("not an envelope: {error}")))?;
    within_limit(envelope.body.len(), FaultKind::Invalid)?;
    Ok(envelope)
}

/// Encodes an answer; one over the limit becomes a fault.
pub(super) fn encode_answer(answer: Answer) -> Vec<u8> {
    let answer = match answer {
        Answer::Done(body) => match within_limit(body.len(), FaultKind::Internal) {
            Ok(()) => Answer::Done(body),
            Err(fault) => Answer::Refused(fault),
        },
        other => other,
    };
    // An empty reply does not decode, so the asker sees a fault and not silence.
    rmp_serde::to_vec(&answer).unwrap_or_default()
}

/// Reads an answer.
pub(super) fn decode_answer(bytes: &[u8]) -> Result<Answer, Fault> {
    rmp_serde::from_slice(bytes).map_err(|error| Fault::new(FaultKind::Internal, format!("not an answer: {error}")))
}

fn within_limit(length: usize, kind: FaultKind) -> Result<(), Fault> {
    if length <= BODY_MAX {
        return Ok(());
    }
    Err(Fault::new(kind, format!("a body of {length} bytes is over the limit of {BODY_MAX}")))
}

/// The name of a session's end: `NAME.BOOT@NAME`. The boot tells two lives apart, and the part behind the `@` keeps
/// ractor_cluster from taking two nodes whose unused listeners chose the same port for one.
pub(super) fn session_name(node: &NodeId, incarnation: Incarnation) -> (String, String) {
    (format!("{node}.{incarnation}"), node.to_string())
}

/// Who is behind a session's name.
pub(super) fn parse_session_name(name: &str) -> Option<(NodeId, Incarnation)> {
    let (life, host) = name.split_once('@')?;
    let (node, boot) = life.rsplit_once('.')?;
    let node = NodeId::new(node).ok().filter(|node| node.as_str() == host)?;
    Some((node, Incarnation(boot.parse().ok()?)))
}

/// `bytes` in hexadecimal, for the cookie.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn life(name: &str, boot: u64) -> (NodeId, Incarnation) {
        (NodeId::new(name).expect("name"), Incarnation(boot))
    }

    fn envelope(length: usize) -> Envelope {
        let (to, from, op) = (life("a", 1), life("b", 2), "x/y".to_owned());
        Envelope { to, from, op, deadline_ms: 5, body: ByteBuf::from(vec![1; length]) }
    }

    #[test]
    fn questions_and_answers_come_back_within_the_limit() {
        let question = envelope(BODY_MAX);
        assert_eq!(decode(&encode(&question).expect("encodes")), Ok(question));
        assert_eq!(encode(&envelope(BODY_MAX + 1)).expect_err("too long").kind, FaultKind::Invalid);
        let long = encode_answer(Answer::Done(ByteBuf::from(vec![0; BODY_MAX + 1])));
        assert!(matches!(decode_answer(&long), Ok(Answer::Refused(fault)) if fault.kind == FaultKind::Internal));
    }

    #[test]
    fn session_names_hold_the_life() {
        for (name, boot) in [("w1", 1), ("gpu-07.rack_2", 12), ("1.2.3", 4)] {
            let (node, incarnation) = life(name, boot);
            let (left, right) = session_name(&node, incarnation);
            assert_eq!(parse_session_name(&format!("{left}@{right}")), Some((node, incarnation)));
        }
        for bad in ["", "w1", "w1@w1", "w1.x@w1", "w1.1@w2", "W.1@W"] {
            assert_eq!(parse_session_name(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn noise_is_a_fault_and_never_a_panic(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            let (_question, _answer) = (decode(&noise), decode_answer(&noise));
        }
    }
}
