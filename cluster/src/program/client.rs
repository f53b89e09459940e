//! Calls an endpoint: chooses an instance, sends, retries what was surely not begun.
//!
//! Called by programs through [`super::Endpoint::client`]. A retry goes to another instance, within the call's
//! deadline, the number of tries and the client's [`RetryBudget`]. Never: retries after the first answer.
//! Bounds: one count an instance with open requests.

use std::{
    collections::HashMap,
    marker::PhantomData,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};
use starling_ids::{AttemptId, EndpointName, Metric};
use tokio::time::Instant;

use super::{
    answers::{Answers, Duplex, from_receiver},
    budget::RetryBudget,
    call::outgoing,
    codec::{decode, encode},
    error::{Advice, CallError, DirectoryFault, RequestFault},
    halves::{Receiver, Sender},
    instances::{self, InstanceId, InstanceView},
    pick::{Candidate, Picker, callable},
};
use crate::{
    discovery::Snapshot,
    mesh::Mesh,
    stream::{Context, Opened},
};

/// Time allowed for a call, unless set otherwise.
const DEADLINE: Duration = Duration::from_secs(30);
/// Tries of one call, unless set otherwise.
const TRIES: u32 = 3;

/// Open requests of one client and its clones, by instance.
#[derive(Debug, Default)]
struct Counts(Mutex<HashMap<InstanceId, usize>>);

impl Counts {
    fn change<T>(&self, change: impl FnOnce(&mut HashMap<InstanceId, usize>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// One open request; counted until it is dropped.
#[derive(Debug)]
pub(super) struct InFlight {
    counts: Arc<Counts>,
    instance: InstanceId,
}

impl InFlight {
    fn new(counts: &Arc<Counts>, instance: &InstanceId) -> Self {
        counts.change(|counts| *counts.entry(instance.clone()).or_insert(0) += 1);
        Self { counts: counts.clone(), instance: instance.clone() }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.counts.change(|counts| {
            if let Some(open) = counts.get_mut(&self.instance) {
                *open = open.saturating_sub(1);
                if *open == 0 {
                    counts.remove(&self.instance);
                }
            }
        });
    }
}

/// What the clones of a client share.
#[derive(Debug, Default)]
struct Shared {
    counts: Arc<Counts>,
    budget: RetryBudget,
    turn: AtomicUsize,
    known: Mutex<Option<Known>>,
}

/// The instances in one snapshot of the directory, so that they are not put together for each call.
#[derive(Debug, Clone)]
struct Known {
    snapshot: Arc<Snapshot>,
    instances: Arc<[Arc<InstanceView>]>,
}

/// Calls the instances of one endpoint. Cheap to clone; clones share turns, counts and the retry budget.
pub struct Client<Req, Resp> {
    mesh: Mesh,
    endpoint: EndpointName,
    direct: Option<InstanceId>,
    picker: Picker,
    deadline: Duration,
    inactivity: Option<Duration>,
    tries: u32,
    idempotent: bool,
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
    pub(super) fn new(mesh: &Mesh, endpoint: EndpointName) -> Self {
        Self {
            mesh: mesh.clone(),
            endpoint,
            direct: None,
            picker: Picker::default(),
            deadline: DEADLINE,
            inactivity: None,
            tries: TRIES,
            idempotent: false,
            shared: Arc::default(),
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

    /// Requests may be done twice: those whose answer was lost on the way are tried again too.
    #[must_use]
    pub fn idempotent(mut self) -> Self {
        self.idempotent = true;
        self
    }

    /// Its instances as this node knows them, sorted by node.
    #[must_use]
    pub fn instances(&self) -> Vec<InstanceView> {
        instances::of(&self.mesh.current(), &self.endpoint)
    }

    /// Waits until at least `count` instances can be called; false when that is not so within `limit`.
    pub async fn wait_for(&self, count: usize, limit: Duration) -> bool {
        let mut snapshots = self.mesh.watch();
        let enough = |snapshot: &Arc<Snapshot>| callable(instances::of(snapshot, &self.endpoint).iter()).len() >= count;
        matches!(tokio::time::timeout(limit, snapshots.wait_for(enough)).await, Ok(Ok(_)))
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

    /// One request, answers as they come.
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

    /// Both ways at once.
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
        let context = outgoing(self.deadline);
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
            let context = Context { attempt: AttemptId(attempt), time_left, ..context.clone() };
            let in_flight = InFlight::new(&self.shared.counts, &instance);
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
        match error.advice() {
            Advice::Elsewhere => true,
            Advice::IfIdempotent => self.idempotent,
            Advice::Later(_) | Advice::Never => false,
        }
    }

    fn known(&self) -> Arc<[Arc<InstanceView>]> {
        let snapshot = self.mesh.current();
        let mut known = self.shared.known.lock().unwrap_or_else(PoisonError::into_inner);
        match known.as_ref() {
            Some(known) if Arc::ptr_eq(&known.snapshot, &snapshot) => known.instances.clone(),
            _ => {
                let instances: Arc<[_]> = instances::of(&snapshot, &self.endpoint).into_iter().map(Arc::new).collect();
                *known = Some(Known { snapshot, instances: instances.clone() });
                instances
            }
        }
    }

    fn choose(&self, tried: &[InstanceId]) -> Result<InstanceId, DirectoryFault> {
        if let Some(direct) = &self.direct {
            let again = DirectoryFault::NoneServing { endpoint: direct.endpoint.clone(), listed: 1 };
            return if tried.is_empty() { Ok(direct.clone()) } else { Err(again) };
        }
        let known = self.known();
        let listed = known.len();
        if listed == 0 {
            return Err(DirectoryFault::Unknown(self.endpoint.clone()));
        }
        let untried = known.iter().filter(|view| !tried.contains(&view.id)).cloned();
        let candidates: Vec<Candidate> = self.shared.counts.change(|counts| {
            let open = |id: &InstanceId| counts.get(id).copied().unwrap_or(0);
            let candidate = |instance: Arc<InstanceView>| Candidate { in_flight: open(&instance.id), instance };
            callable(untried).into_iter().map(candidate).collect()
        });
        let turn = self.shared.turn.fetch_add(1, Ordering::Relaxed);
        match self.picker.pick(&candidates, turn, rand::random()) {
            Some(at) => Ok(candidates[at].instance.id.clone()),
            None => Err(DirectoryFault::NoneServing { endpoint: self.endpoint.clone(), listed }),
        }
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
