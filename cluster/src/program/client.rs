//! Calls an endpoint: chooses an instance, sends, retries what was surely not begun.
//!
//! Called by programs through [`super::Endpoint::client`]. A retry goes to another instance, within the call's
//! deadline, the number of tries and the endpoint's [`super::budget::RetryBudget`]. Never: retries after the first
//! answer, or a request that was wrong.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};
use starling_ids::{AttemptId, EndpointName, Metric};
use tokio::time::Instant;

use super::{
    answers::{Answers, Duplex, from_receiver},
    call::outgoing,
    codec::{decode, encode},
    error::{CallError, DirectoryFault, RequestFault},
    halves::{Receiver, Sender},
    instances::{self, InstanceId, InstanceView},
    pick::{Candidate, Picker, callable},
    tries::{InFlight, Shared},
};
use crate::{
    discovery::Snapshot,
    mesh::Mesh,
    stream::{Advice, Context, Opened},
};

/// Time allowed for a call, unless set otherwise.
const DEADLINE: Duration = Duration::from_secs(30);
/// Tries of one call, unless set otherwise.
const TRIES: u32 = 3;

type Adjust = dyn Fn(&mut Context) + Send + Sync;

/// Calls the instances of one endpoint. Cheap to clone. All clients of one [`super::Endpoint`] value and its clones share
/// turns, counts and the retry budget.
pub struct Client<Req, Resp> {
    mesh: Mesh,
    endpoint: EndpointName,
    direct: Option<InstanceId>,
    picker: Picker,
    deadline: Duration,
    inactivity: Option<Duration>,
    tries: u32,
    idempotent: bool,
    adjust: Option<Arc<Adjust>>,
    shared: Arc<Shared>,
    _of: PhantomData<fn(Req) -> Resp>,
}

impl<Req, Resp> Clone for Client<Req, Resp> {
    fn clone(&self) -> Self {
        Self {
            mesh: self.mesh.clone(),
            endpoint: self.endpoint.clone(),
            direct: self.direct.clone(),
            picker: self.picker.clone(),
            deadline: self.deadline,
            inactivity: self.inactivity,
            tries: self.tries,
            idempotent: self.idempotent,
            adjust: self.adjust.clone(),
            shared: self.shared.clone(),
            _of: PhantomData,
        }
    }
}

impl<Req, Resp> std::fmt::Debug for Client<Req, Resp> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({}, {:?})", self.endpoint, self.picker)
    }
}

/// How calls are made.
impl<Req, Resp> Client<Req, Resp> {
    pub(super) fn new(mesh: &Mesh, endpoint: EndpointName, shared: Arc<Shared>) -> Self {
        Self {
            mesh: mesh.clone(),
            endpoint,
            direct: None,
            picker: Picker::default(),
            deadline: DEADLINE,
            inactivity: None,
            tries: TRIES,
            idempotent: false,
            adjust: None,
            shared,
            _of: PhantomData,
        }
    }

    /// This instance and no other. Never retried elsewhere.
    #[must_use]
    pub fn direct(mut self, instance: &InstanceId) -> Self {
        self.direct = Some(instance.clone());
        self
    }

    /// How an instance is chosen; round-robin unless set.
    #[must_use]
    pub fn pick(mut self, picker: Picker) -> Self {
        self.picker = picker;
        self
    }

    /// Chooses with a function of the candidates, sorted by node: an index, or `None` to refuse them all.
    #[must_use]
    pub fn pick_with(self, choose: impl Fn(&[Candidate]) -> Option<usize> + Send + Sync + 'static) -> Self {
        self.pick(Picker::Custom(Arc::new(choose)))
    }

    /// Time allowed for a whole call, its answers included; 30 s unless set. Inside a handler never more than what the
    /// handler's own asker allows.
    #[must_use]
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.deadline = limit;
        self
    }

    /// Longest silence between two answers of a stream; 30 s unless set.
    #[must_use]
    pub fn inactivity(mut self, limit: Duration) -> Self {
        self.inactivity = Some(limit);
        self
    }

    /// Tries of one call, the first included; 3 unless set.
    #[must_use]
    pub fn tries(mut self, tries: u32) -> Self {
        self.tries = tries.max(1);
        self
    }

    /// Requests may be done twice: those that an instance may have acted on are tried again too.
    #[must_use]
    pub fn idempotent(mut self) -> Self {
        self.idempotent = true;
        self
    }

    /// Changes the context of each call before it is sent: baggage, tenant, priority, trace. The time left can only be
    /// made shorter. Inside a handler the context is the one that the handler's call brought.
    #[must_use]
    pub fn context(mut self, adjust: impl Fn(&mut Context) + Send + Sync + 'static) -> Self {
        self.adjust = Some(Arc::new(adjust));
        self
    }

    /// Its instances as this node knows them, sorted by node.
    #[must_use]
    pub fn instances(&self) -> Vec<InstanceView> {
        instances::of(&self.mesh.current(), &self.endpoint)
    }

    /// Waits until at least `count` instances can be called; false when that is not so within `limit`.
    #[must_use = "it says whether the instances are there"]
    pub async fn wait_for(&self, count: usize, limit: Duration) -> bool {
        let mut snapshots = self.mesh.watch();
        let enough = |snapshot: &Arc<Snapshot>| callable(instances::of(snapshot, &self.endpoint).iter()).len() >= count;
        matches!(tokio::time::timeout(limit, snapshots.wait_for(enough)).await, Ok(Ok(_)))
    }

    fn outgoing(&self) -> Context {
        let mut context = outgoing(self.deadline);
        if let Some(adjust) = &self.adjust {
            let most = context.time_left;
            adjust(&mut context);
            context.time_left = context.time_left.min(most);
            context.subscription = false;
        }
        context
    }
}

/// The calls.
impl<Req, Resp> Client<Req, Resp>
where
    Req: Serialize,
    Resp: DeserializeOwned + Send + 'static,
{
    /// One request, one answer.
    pub async fn unary(&self, request: &Req) -> Result<Resp, CallError> {
        let body = encode(request)?;
        self.with_tries(body, |opened, in_flight| async move {
            let answer = only_answer(opened).await;
            drop(in_flight);
            answer
        })
        .await
    }

    /// One request, answers as they come. Resolves when an instance has taken the request.
    pub async fn stream(&self, request: &Req) -> Result<Answers<Resp>, CallError> {
        let body = encode(request)?;
        let inactivity = self.inactivity;
        self.with_tries(body, |opened: Opened, in_flight| async move {
            let Opened { reply, tx, mut rx } = opened;
            tx.end();
            if !reply.is_empty() {
                // A unary endpoint: a stream of one.
                return decode(&reply).map(Answers::once).map_err(CallError::from);
            }
            if inactivity.is_some() {
                rx.set_inactivity(inactivity);
            }
            Ok(from_receiver(Receiver::new(rx), in_flight))
        })
        .await
    }

    /// Both ways at once. Resolves when an instance has taken the call.
    pub async fn duplex(&self) -> Result<Duplex<Req, Resp>, CallError> {
        let inactivity = self.inactivity;
        self.with_tries(Bytes::new(), |opened: Opened, in_flight: InFlight| async move {
            let Opened { tx, mut rx, .. } = opened;
            if inactivity.is_some() {
                rx.set_inactivity(inactivity);
            }
            let instance = in_flight.instance.clone();
            Ok(Duplex::new(instance, Sender::new(tx), Receiver::new(rx), in_flight))
        })
        .await
    }

    /// Opens at one instance after the other until `finish` has what it wants, or the advice is against it.
    async fn with_tries<T, F, Fut>(&self, body: Bytes, finish: F) -> Result<T, CallError>
    where
        F: Fn(Opened, InFlight) -> Fut,
        Fut: Future<Output = Result<T, CallError>>,
    {
        let context = self.outgoing();
        let deadline = Instant::now().checked_add(context.time_left);
        let (mut tried, mut last) = (Vec::new(), None);
        for attempt in 0..self.tries {
            let instance = match self.choose(&tried) {
                Ok(instance) => instance,
                Err(fault) => return Err(last.unwrap_or(fault.into())),
            };
            if attempt > 0 {
                if !self.shared.budget.spend() {
                    break;
                }
                metrics::counter!(Metric::ProgramRetries.name()).increment(1);
            }
            let time_left = deadline.map_or(context.time_left, |at| at.saturating_duration_since(Instant::now()));
            let number = AttemptId(context.attempt.0.saturating_add(attempt));
            let context = Context { attempt: number, time_left, ..context.clone() };
            let in_flight = self.shared.in_flight(&instance);
            let InstanceId { node, incarnation, endpoint } = &instance;
            let outcome = match self.mesh.open(node, *incarnation, endpoint, context, body.clone()).await {
                Ok(opened) => finish(opened, in_flight).await,
                Err(error) => Err(error.into()),
            };
            match outcome {
                Ok(answer) => {
                    self.shared.budget.earned();
                    return Ok(answer);
                }
                Err(error) if self.worth_another_try(&error) => last = Some(error),
                Err(error) => return Err(error),
            }
            tried.push(instance);
        }
        Err(last.unwrap_or(RequestFault::Cancelled.into()))
    }

    fn worth_another_try(&self, error: &CallError) -> bool {
        let now = matches!(error.advice(), Advice::RetryElsewhere | Advice::RetrySame);
        now && (self.idempotent || !error.may_have_acted())
    }

    fn choose(&self, tried: &[InstanceId]) -> Result<InstanceId, DirectoryFault> {
        let Some(direct) = &self.direct else {
            return self.shared.choose(&self.mesh.current(), &self.endpoint, &self.picker, tried);
        };
        let again = DirectoryFault::NoneServing { endpoint: direct.endpoint.clone(), listed: 1 };
        if tried.is_empty() { Ok(direct.clone()) } else { Err(again) }
    }
}

/// The one answer: in the accept, or as the one frame of the stream.
async fn only_answer<Resp: DeserializeOwned>(opened: Opened) -> Result<Resp, CallError> {
    let Opened { reply, tx, mut rx } = opened;
    tx.end();
    if !reply.is_empty() {
        return Ok(decode(&reply)?);
    }
    // A slow answer is not a silent stream: the deadline and the link's own pings bound the wait.
    rx.set_inactivity(None);
    let frame = match rx.recv().await {
        Some(frame) => frame?,
        None => return Err(RequestFault::Decode("the answer has no value".to_owned()).into()),
    };
    match rx.recv().await {
        None => Ok(decode(&frame)?),
        Some(Ok(_)) => Err(RequestFault::Decode("the answer has more than one value; use `stream`".to_owned()).into()),
        Some(Err(error)) => Err(error.into()),
    }
}
