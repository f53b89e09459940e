//! A call both ways before it is taken: its handler looks at it, then accepts it or returns a fault.
//!
//! Handed to handlers of [`super::Endpoint::serve_opening`]. Until it is accepted no data flows and the asker waits for
//! the verdict, at most 30 s and never past its deadline. Bounds: none of its own.

use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::oneshot;

use super::halves::{Receiver, Sender};
use crate::stream::{Acceptor, Fault, FaultKind, StreamTx};

/// A call that wants in. Returning a fault instead of accepting refuses it with that fault.
#[derive(Debug)]
pub struct Opening<Req, Resp> {
    door: Verdict,
    _of: PhantomData<fn(Req) -> Resp>,
}

/// What became of a call, shared by its handler and by whoever concludes it.
#[derive(Debug, Clone)]
pub(super) struct Verdict(Arc<Mutex<Stage>>);

#[derive(Debug)]
enum Stage {
    Asked(Acceptor),
    /// Accepted; the sending half comes back when the handler is done with it.
    Taken(oneshot::Receiver<StreamTx>),
    Over,
}

impl<Req: DeserializeOwned, Resp: Serialize> Opening<Req, Resp> {
    pub(super) fn new(acceptor: Acceptor) -> (Self, Verdict) {
        let door = Verdict(Arc::new(Mutex::new(Stage::Asked(acceptor))));
        (Self { door: door.clone(), _of: PhantomData }, door)
    }

    /// Takes the call. Fails when its asker waits no more.
    pub fn accept(self) -> Result<(Receiver<Req>, Sender<Resp>), Fault> {
        let left = || Fault::new(FaultKind::Unavailable, "the asker has left");
        let mut stage = self.door.lock();
        let Stage::Asked(acceptor) = std::mem::replace(&mut *stage, Stage::Over) else { return Err(left()) };
        let (tx, rx) = acceptor.accept(Bytes::new()).ok_or_else(left)?;
        let (sender, back) = Sender::on_loan(tx);
        *stage = Stage::Taken(back);
        Ok((Receiver::new(rx), sender))
    }
}

impl Verdict {
    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handler is done: its outcome refuses the call, or ends the answers.
    pub(super) async fn conclude(self, outcome: Result<(), Fault>) {
        let stage = std::mem::replace(&mut *self.lock(), Stage::Over);
        let tx = match stage {
            Stage::Asked(acceptor) => match outcome {
                Err(fault) => return acceptor.reject(fault),
                // Taken, with nothing to say.
                Ok(()) => acceptor.accept(Bytes::new()).map(|(tx, _rx)| tx),
            },
            // Not there: the handler ended the direction itself, or handed its sender to another task.
            Stage::Taken(back) => back.await.ok(),
            Stage::Over => None,
        };
        match (tx, outcome) {
            (Some(tx), Ok(())) => tx.end(),
            (Some(tx), Err(fault)) => tx.fail(fault),
            (None, _) => {}
        }
    }
}
