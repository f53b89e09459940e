//! Operators around an endpoint: each sees the request on its way in and the answers, or the failure, on their way out.
//!
//! Called by programs. A [`Service`] is anything that turns a request into answers: a [`Client`] of a remote endpoint, a
//! local function ([`service_fn`]), or an operator over another service. A pipeline does not know which, so it is the
//! same locally and remotely, before an endpoint and behind one: [`super::Endpoint::serve_service`] puts one there.

use std::{marker::PhantomData, sync::Arc};

use futures::{FutureExt, StreamExt, future::BoxFuture};
use serde::{Serialize, de::DeserializeOwned};

use super::{RequestFault, answers::Answers, client::Client, error::CallError};
use crate::stream::Fault;

/// Turns a request into answers.
pub trait Service: Send + Sync + 'static {
    /// What goes in.
    type Request: Send + 'static;
    /// What comes out, any number of them.
    type Response: Send + 'static;
    /// Resolves when the request was taken, or was refused. Dropping the answers cancels it.
    fn call(&self, request: Self::Request) -> BoxFuture<'static, Result<Answers<Self::Response>, CallError>>;
}

/// One step of a pipeline, in front of whatever is below it.
///
/// ```
/// use futures::StreamExt;
/// use starling_cluster::program::{Answers, Below, CallError, Operator};
/// use starling_cluster::stream::{Fault, FaultKind};
///
/// /// Trims the request, refuses an empty one, answers "ping" itself, and ends each answer with a full stop.
/// struct Polite;
///
/// impl Operator for Polite {
///     type Request = String;
///     type Response = String;
///     type InnerRequest = String;
///     type InnerResponse = String;
///
///     async fn call(&self, request: String, below: Below<String, String>) -> Result<Answers<String>, CallError> {
///         let request = request.trim().to_owned();
///         match request.as_str() {
///             "" => Err(Fault::new(FaultKind::Invalid, "say something").into()),
///             "ping" => Ok(Answers::once("pong.".to_owned())),
///             _ => {
///                 let answers = below.call(request).await?;
///                 Ok(Answers::new(answers.map(|answer| Ok(answer? + "."))))
///             }
///         }
///     }
/// }
/// ```
pub trait Operator: Send + Sync + 'static {
    /// What it takes.
    type Request: Send + 'static;
    /// What it gives back.
    type Response: Send + 'static;
    /// What the service below takes.
    type InnerRequest: Send + 'static;
    /// What the service below gives back.
    type InnerResponse: Send + 'static;

    /// Answers one request, asking below as often as it needs to: not at all, once, or again after a failure. An error
    /// before the answers refuses the request; one among them ends them.
    fn call(
        &self,
        request: Self::Request,
        below: Below<Self::InnerRequest, Self::InnerResponse>,
    ) -> impl Future<Output = Result<Answers<Self::Response>, CallError>> + Send;

    /// This operator in front of a service.
    fn over<S>(self, service: S) -> Pipeline<Self>
    where
        Self: Sized,
        S: Service<Request = Self::InnerRequest, Response = Self::InnerResponse>,
    {
        Pipeline { operator: Arc::new(self), below: Below(Arc::new(service)) }
    }
}

/// What an operator stands in front of. Cheap to clone.
pub struct Below<Req, Resp>(Arc<dyn Service<Request = Req, Response = Resp>>);

impl<Req, Resp> Clone for Below<Req, Resp> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<Req, Resp> std::fmt::Debug for Below<Req, Resp> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Below")
    }
}

impl<Req: Send + 'static, Resp: Send + 'static> Below<Req, Resp> {
    /// Hands a request on. Resolves when it was taken, or was refused.
    pub async fn call(&self, request: Req) -> Result<Answers<Resp>, CallError> {
        self.0.call(request).await
    }
}

/// An operator in front of a service; itself a service, so pipelines nest. Cheap to clone.
pub struct Pipeline<O: Operator> {
    operator: Arc<O>,
    below: Below<O::InnerRequest, O::InnerResponse>,
}

impl<O: Operator> Clone for Pipeline<O> {
    fn clone(&self) -> Self {
        Self { operator: self.operator.clone(), below: self.below.clone() }
    }
}

impl<O: Operator> std::fmt::Debug for Pipeline<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pipeline")
    }
}

impl<O: Operator> Service for Pipeline<O> {
    type Request = O::Request;
    type Response = O::Response;

    fn call(&self, request: O::Request) -> BoxFuture<'static, Result<Answers<O::Response>, CallError>> {
        let (operator, below) = (self.operator.clone(), self.below.clone());
        async move { operator.call(request, below).await }.boxed()
    }
}

impl<Req, Resp> Service for Client<Req, Resp>
where
    Req: Serialize + Send + Sync + 'static,
    Resp: DeserializeOwned + Send + 'static,
{
    type Request = Req;
    type Response = Resp;

    fn call(&self, request: Req) -> BoxFuture<'static, Result<Answers<Resp>, CallError>> {
        let client = self.clone();
        async move { client.stream(&request).await }.boxed()
    }
}

/// A local function as a service; made by [`service_fn`].
pub struct ServiceFn<Req, F> {
    function: F,
    _of: PhantomData<fn(Req)>,
}

impl<Req, F> std::fmt::Debug for ServiceFn<Req, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ServiceFn")
    }
}

/// A service from a function that returns a stream of answers.
pub fn service_fn<Req, Resp, F, Fut, S>(function: F) -> ServiceFn<Req, F>
where
    F: Fn(Req) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<S, Fault>> + Send + 'static,
    S: futures::Stream<Item = Result<Resp, Fault>> + Send + 'static,
{
    ServiceFn { function, _of: PhantomData }
}

impl<Req, Resp, F, Fut, S> Service for ServiceFn<Req, F>
where
    Req: Send + 'static,
    Resp: Send + 'static,
    F: Fn(Req) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<S, Fault>> + Send + 'static,
    S: futures::Stream<Item = Result<Resp, Fault>> + Send + 'static,
{
    type Request = Req;
    type Response = Resp;

    fn call(&self, request: Req) -> BoxFuture<'static, Result<Answers<Resp>, CallError>> {
        let answers = (self.function)(request);
        async move {
            let failed = |fault| CallError::Request(RequestFault::Failed(fault));
            let answers = answers.await?;
            Ok(Answers::new(answers.map(move |answer| answer.map_err(failed))))
        }
        .boxed()
    }
}
