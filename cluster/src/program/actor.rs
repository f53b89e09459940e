//! Actors as programs write them: a value that handles requests one after the other, and a typed handle to it.
//!
//! No mailbox, no port and no actor library is in sight. [`Host`] is the supervised actor around the value: a restart
//! makes a new value. Parent: the supervisor `programs`. Bounds: [`WAITING_MAX`] requests in the mailbox.
//! If it dies: who waits for an answer is told that it is unavailable; its supervisor makes it anew.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use ractor::{ActorProcessingErr, ActorRef};
use serde::{Serialize, de::DeserializeOwned};
use starling_ids::NodeId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use super::{
    call::{CallInfo, current_call},
    monitor::{Life, Monitor, StopReason},
    owners::{Myself, as_actor},
};
use crate::{
    mesh::Mesh,
    stream::{Fault, FaultKind},
    supervise::Handle,
};

/// Requests that may wait for one actor.
const WAITING_MAX: usize = 1_024;
/// Longest wait of [`ActorHandle::ask`]; shorter when the current call's time is over earlier.
const ASK_MAX: Duration = Duration::from_secs(60);

/// Something that keeps state and handles requests one after the other.
pub trait Actor: Send + 'static {
    /// What it is asked.
    type Request: Serialize + DeserializeOwned + Send + Sync + 'static;
    /// What it answers.
    type Reply: Serialize + DeserializeOwned + Send + 'static;

    /// Runs once in each life, before the first request. A fault fails the start.
    fn started(&mut self) -> impl Future<Output = Result<(), Fault>> + Send {
        async { Ok(()) }
    }

    /// Answers one request. A fault is an answer; a panic ends this life, and the supervisor begins the next.
    fn handle(&mut self, request: Self::Request) -> impl Future<Output = Result<Self::Reply, Fault>> + Send;

    /// Runs when it is stopped in order, after its last request.
    fn stopped(&mut self) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// One request in the mailbox.
pub(super) struct Ask<A: Actor> {
    request: A::Request,
    /// None for a request without an answer.
    reply: Option<oneshot::Sender<Result<A::Reply, Fault>>>,
    call: Option<Arc<CallInfo>>,
    _waiting: OwnedSemaphorePermit,
}

impl<A: Actor> ractor::Message for Ask<A> {}

/// The supervised actor around a program's value.
pub(super) struct Host<A>(PhantomData<fn() -> A>);

impl<A> Host<A> {
    pub(super) fn new() -> Self {
        Self(PhantomData)
    }
}

/// Makes the value of each life.
pub(super) type Make<A> = Arc<dyn Fn() -> Result<A, Fault> + Send + Sync>;

/// What a life is begun with. The value is made inside of it: a panic there is this actor's, not its supervisor's.
pub(super) struct Begin<A> {
    pub(super) make: Make<A>,
    pub(super) life: Arc<watch::Sender<Life>>,
    pub(super) node: NodeId,
    pub(super) name: Arc<str>,
}

pub(super) struct Running<A> {
    actor: A,
    myself: Arc<Myself>,
    life: Lived,
}

/// Tells that a life is over, whatever ended it.
struct Lived {
    life: Arc<watch::Sender<Life>>,
    number: u64,
    orderly: bool,
}

impl Lived {
    fn begin(life: Arc<watch::Sender<Life>>) -> Self {
        let mut number = 0;
        life.send_modify(|life| {
            life.begun += 1;
            number = life.begun;
        });
        Self { life, number, orderly: false }
    }
}

impl Drop for Lived {
    fn drop(&mut self) {
        self.life.send_modify(|life| {
            life.running = false;
            life.over = self.number;
            life.failed = !self.orderly;
        });
    }
}

impl<A: Actor> ractor::Actor for Host<A> {
    type Msg = Ask<A>;
    type State = Running<A>;
    type Arguments = Begin<A>;

    async fn pre_start(
        &self,
        _myself: ActorRef<Ask<A>>,
        Begin { make, life, node, name }: Begin<A>,
    ) -> Result<Running<A>, ActorProcessingErr> {
        let life = Lived::begin(life);
        let myself = Arc::new(Myself { node, name, life: life.number });
        let actor = as_actor(myself.clone(), async {
            let mut actor = make()?;
            actor.started().await?;
            Ok::<A, Fault>(actor)
        });
        let actor = actor.await?;
        Ok(Running { actor, myself, life })
    }

    async fn handle(
        &self,
        _myself: ActorRef<Ask<A>>,
        message: Ask<A>,
        running: &mut Running<A>,
    ) -> Result<(), ActorProcessingErr> {
        let Ask { request, reply, call, _waiting } = message;
        if reply.as_ref().is_some_and(oneshot::Sender::is_closed) {
            return Ok(());
        }
        let work = as_actor(running.myself.clone(), running.actor.handle(request));
        let answer = match call {
            Some(call) => call.scope(work).await,
            None => work.await,
        };
        match (reply, answer) {
            (Some(reply), answer) => {
                if reply.send(answer).is_err() {
                    tracing::debug!("the asker no longer waits");
                }
            }
            (None, Err(fault)) => tracing::warn!(%fault, "a request without an asker failed"),
            (None, Ok(_)) => {}
        }
        Ok(())
    }

    async fn post_stop(&self, _myself: ActorRef<Ask<A>>, running: &mut Running<A>) -> Result<(), ActorProcessingErr> {
        as_actor(running.myself.clone(), running.actor.stopped()).await;
        running.life.orderly = true;
        Ok(())
    }
}

/// The way to an actor of this node. Cheap to clone; survives the actor's restarts. Dropping it stops nothing.
pub struct ActorHandle<A: Actor> {
    pub(super) mesh: Mesh,
    pub(super) name: String,
    mailbox: Mailbox<A>,
}

impl<A: Actor> Clone for ActorHandle<A> {
    fn clone(&self) -> Self {
        Self { mesh: self.mesh.clone(), name: self.name.clone(), mailbox: self.mailbox.clone() }
    }
}

impl<A: Actor> std::fmt::Debug for ActorHandle<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ActorHandle({})", self.name)
    }
}

impl<A: Actor> ActorHandle<A> {
    pub(super) fn new(mesh: &Mesh, name: String, mailbox: Mailbox<A>) -> Self {
        Self { mesh: mesh.clone(), name, mailbox }
    }

    /// Its name, unique on this node.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Asks and waits for the answer. `Unavailable`: it is being restarted. `Internal`: it died on this request or with
    /// it in its mailbox. `Overloaded`: too many requests wait.
    pub async fn ask(&self, request: A::Request) -> Result<A::Reply, Fault> {
        self.mailbox.ask(request).await
    }

    /// Sends a request whose answer nobody waits for. `Ok` says that it is in the mailbox of a living actor.
    pub fn tell(&self, request: A::Request) -> Result<(), Fault> {
        self.mailbox.put(request, None)
    }

    /// Follows its life.
    #[must_use]
    pub fn monitor(&self) -> Monitor {
        Monitor::new(&self.mesh, self.mesh.node().clone(), self.mesh.incarnation(), self.name.clone())
    }

    /// Stops it in order: it answers what waits no more, but finishes the request it is at. False when it had been
    /// stopped before.
    pub async fn stop(&self) -> Result<bool, Fault> {
        self.mesh.programs().stop(&self.mesh, &self.name, StopReason::Asked).await
    }
}

/// The mailbox and its bound.
pub(super) struct Mailbox<A: Actor> {
    handle: Handle<Ask<A>>,
    waiting: Arc<Semaphore>,
}

impl<A: Actor> Clone for Mailbox<A> {
    fn clone(&self) -> Self {
        Self { handle: self.handle.clone(), waiting: self.waiting.clone() }
    }
}

impl<A: Actor> Mailbox<A> {
    pub(super) fn new() -> Self {
        Self { handle: Handle::new(), waiting: Arc::new(Semaphore::new(WAITING_MAX)) }
    }

    pub(super) fn handle(&self) -> &Handle<Ask<A>> {
        &self.handle
    }

    /// Takes a message that came from another node; waits while too many wait. The actor must run.
    pub(super) async fn take(&self, request: A::Request, call: Option<Arc<CallInfo>>) -> Result<(), Fault> {
        let ended = |_| Fault::new(FaultKind::Unavailable, "the mailbox is gone");
        let waiting = self.waiting.clone().acquire_owned().await.map_err(ended)?;
        self.handle.cast(Ask { request, reply: None, call, _waiting: waiting })?;
        Ok(())
    }

    fn put(&self, request: A::Request, reply: Option<oneshot::Sender<Result<A::Reply, Fault>>>) -> Result<(), Fault> {
        let full = |_| Fault::new(FaultKind::Overloaded, "too many requests wait for this actor").retry_after_ms(100);
        let waiting = self.waiting.clone().try_acquire_owned().map_err(full)?;
        self.handle.cast(Ask { request, reply, call: current_call(), _waiting: waiting })?;
        Ok(())
    }

    pub(super) async fn ask(&self, request: A::Request) -> Result<A::Reply, Fault> {
        let left = current_call().and_then(|call| call.time_left()).map_or(ASK_MAX, |left| left.min(ASK_MAX));
        let (reply, answer) = oneshot::channel();
        self.put(request, Some(reply))?;
        match tokio::time::timeout(left, answer).await {
            Ok(Ok(answer)) => answer,
            // It had the request, and may have acted on it.
            Ok(Err(_)) => Err(Fault::new(FaultKind::Internal, "the actor ended before it answered")),
            Err(_) => Err(Fault::new(FaultKind::DeadlineExceeded, "the actor gave no answer in time")),
        }
    }
}
