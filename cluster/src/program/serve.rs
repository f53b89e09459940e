//! Serving an endpoint: registration as an instance, its lifecycle, and the guard that takes it back.
//!
//! Called through [`Endpoint`]. The instance is in the directory while the guard lives. Bounds:
//! [`super::endpoint::IN_FLIGHT_MAX`] requests at a time unless set otherwise.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::Stream;
use serde::{Serialize, de::DeserializeOwned};
use starling_ids::{EndpointName, NameError};
use thiserror::Error;

use super::{
    endpoint::Endpoint,
    gate::Gate,
    halves::{Receiver, Sender},
    handlers::{self, Run},
    instances::InstanceId,
    opening::Opening,
    pipeline::Service,
};
use crate::{
    discovery::{Instance, InstanceKind, Lifecycle, PublishError},
    mesh::Mesh,
    stream::{Fault, FaultKind},
    supervise::{Handle, Unavailable},
};

/// Why an endpoint is not served.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ServeError {
    /// This node serves it already.
    #[error("this node serves {0} already")]
    Taken(EndpointName),
    /// The name cannot be one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The node is leaving the cluster.
    #[error("this node is leaving the cluster")]
    Leaving,
    /// The node's record cannot take it.
    #[error(transparent)]
    Record(#[from] PublishError),
}

impl<Req, Resp> Endpoint<Req, Resp>
where
    Req: Serialize + DeserializeOwned + Send + 'static,
    Resp: Serialize + DeserializeOwned + Send + 'static,
{
    /// Answers each request with one value. A fault is told to the asker; a panic ends that one request.
    pub fn serve<F, Fut>(&self, handler: F) -> Result<ServedEndpoint, ServeError>
    where
        F: Fn(Req) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Resp, Fault>> + Send + 'static,
    {
        self.register(handlers::unary(handler))
    }

    /// Answers each request with a stream of values; [`super::emit`] writes one like a loop. The future decides
    /// whether the request is taken; a fault in the stream ends it with that fault.
    pub fn serve_stream<F, Fut, S>(&self, handler: F) -> Result<ServedEndpoint, ServeError>
    where
        F: Fn(Req) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<S, Fault>> + Send + 'static,
        S: Stream<Item = Result<Resp, Fault>> + Send + 'static,
    {
        self.register(handlers::streaming(handler))
    }

    /// Answers both ways: requests come as they are sent, answers go out as they are ready. Every call is taken; with
    /// [`Self::serve_opening`] the handler decides.
    pub fn serve_duplex<F, Fut>(&self, handler: F) -> Result<ServedEndpoint, ServeError>
    where
        F: Fn(Receiver<Req>, Sender<Resp>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Fault>> + Send + 'static,
    {
        let handler = Arc::new(handler);
        self.serve_opening(move |opening: Opening<Req, Resp>| {
            let handler = handler.clone();
            async move {
                let (requests, answers) = opening.accept()?;
                handler(requests, answers).await
            }
        })
    }

    /// The same with a handler that takes the call itself: a fault that it returns before [`Opening::accept`] refuses
    /// the call before any data, and another instance is asked where the fault's kind allows it.
    pub fn serve_opening<F, Fut>(&self, handler: F) -> Result<ServedEndpoint, ServeError>
    where
        F: Fn(Opening<Req, Resp>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Fault>> + Send + 'static,
    {
        self.register(handlers::duplex(handler))
    }

    /// Hands each request to an actor of this program's own message type: `wrap` makes the message, whose port takes
    /// the answer. An actor that is down is told to the asker as unavailable; one that dropped the question as internal,
    /// and no answer within `limit` as an exceeded deadline: it may have acted on the request.
    pub fn serve_actor<M, W>(&self, actor: &Handle<M>, limit: Duration, wrap: W) -> Result<ServedEndpoint, ServeError>
    where
        M: ractor::Message,
        W: Fn(Req, ractor::RpcReplyPort<Result<Resp, Fault>>) -> M + Send + Sync + 'static,
    {
        let (actor, wrap) = (actor.clone(), Arc::new(wrap));
        self.serve(move |request: Req| {
            let (actor, wrap) = (actor.clone(), wrap.clone());
            async move { actor.call(move |port| wrap(request, port), limit).await.map_err(unanswered)? }
        })
    }

    /// Answers with a [`Service`]: a pipeline, or a client of another endpoint.
    pub fn serve_service<S>(&self, service: S) -> Result<ServedEndpoint, ServeError>
    where
        S: Service<Request = Req, Response = Resp>,
    {
        let service = Arc::new(service);
        self.serve_stream(move |request| {
            let service = service.clone();
            async move {
                use futures::StreamExt;
                let answers = service.call(request).await.map_err(Fault::from)?;
                Ok(answers.map(|answer| answer.map_err(Fault::from)))
            }
        })
    }

    fn register(&self, run: Arc<Run>) -> Result<ServedEndpoint, ServeError> {
        self.mesh.programs().check_staying().map_err(|_| ServeError::Leaving)?;
        let gate = Gate::new(self.in_flight_max);
        let door = self.mesh.programs().door(&self.mesh, gate.clone(), run);
        let taken = self.mesh.endpoints().claim(self.name.clone(), Arc::new(door));
        if !taken {
            return Err(ServeError::Taken(self.name.clone()));
        }
        // From here on the guard undoes it.
        let served = ServedEndpoint { mesh: self.mesh.clone(), name: self.name.clone(), gate, registered: true };
        served.publish(self.labels.clone())?;
        Ok(served)
    }
}

/// What the asker of an actor is told: apart whether the question may have been acted on.
fn unanswered(error: Unavailable) -> Fault {
    let kind = match &error {
        Unavailable::NotRunning(_) => FaultKind::Unavailable,
        Unavailable::Timeout { .. } => FaultKind::DeadlineExceeded,
        Unavailable::Dropped(_) => FaultKind::Internal,
    };
    Fault::new(kind, error.to_string())
}

/// An endpoint that is served. Dropping it unregisters the endpoint; requests under way go on.
#[derive(Debug)]
#[must_use = "dropping it unregisters the endpoint"]
pub struct ServedEndpoint {
    mesh: Mesh,
    name: EndpointName,
    gate: Arc<Gate>,
    registered: bool,
}

impl ServedEndpoint {
    /// Which instance this is.
    #[must_use]
    pub fn id(&self) -> InstanceId {
        let (node, incarnation) = (self.mesh.node().clone(), self.mesh.incarnation());
        InstanceId { endpoint: self.name.clone(), node, incarnation }
    }

    /// Requests under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.gate.inside()
    }

    /// Tells the cluster where in its life the instance is. Only [`Lifecycle::Serving`] is called.
    pub fn set_lifecycle(&self, lifecycle: Lifecycle) -> Result<(), PublishError> {
        self.change(|instance| instance.lifecycle = lifecycle)
    }

    /// Sets a label that callers and pickers see.
    pub fn set_label(&self, key: impl Into<String>, value: impl Into<String>) -> Result<(), PublishError> {
        self.change(|instance| {
            instance.labels.insert(key.into(), value.into());
        })
    }

    /// Takes nothing new, waits for what is under way, then unregisters. Bound it with a timeout: dropping the wait
    /// unregisters at once.
    pub async fn drain(self) {
        self.gate.close();
        if let Err(error) = self.set_lifecycle(Lifecycle::Draining) {
            tracing::debug!(%error, "the drain was not announced; askers are refused one by one");
        }
        self.gate.empty().await;
    }

    /// Serves for the life of the node, without a guard.
    pub fn detach(mut self) {
        self.registered = false;
    }

    fn publish(&self, labels: BTreeMap<String, String>) -> Result<(), PublishError> {
        self.mesh.publish(|record| {
            record.instances.retain(|instance| instance.endpoint != self.name);
            let instance = Instance::new(self.name.clone(), InstanceKind::Service, Lifecycle::Serving);
            record.instances.push(Instance { labels, ..instance });
        })
    }

    fn change(&self, change: impl FnOnce(&mut Instance)) -> Result<(), PublishError> {
        change_instance(&self.mesh, &self.name, change)
    }
}

/// Changes this node's instance of an endpoint, if there is one.
pub(super) fn change_instance(
    mesh: &Mesh,
    endpoint: &EndpointName,
    change: impl FnOnce(&mut Instance),
) -> Result<(), PublishError> {
    mesh.publish(|record| {
        if let Some(instance) = record.instances.iter_mut().find(|instance| instance.endpoint == *endpoint) {
            change(instance);
        }
    })
}

impl Drop for ServedEndpoint {
    fn drop(&mut self) {
        if !self.registered {
            return;
        }
        // Out of the directory first: an asker that comes after it is told where else to go by its own view.
        let told = self.mesh.publish(|record| record.instances.retain(|instance| instance.endpoint != self.name));
        if let Err(error) = told {
            tracing::debug!(%error, "an instance was not unregistered");
        }
        self.mesh.endpoints().remove(&self.name);
    }
}
