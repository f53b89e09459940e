//! Operators around an endpoint: each changes the request on its way in and the answers on their way out.
//!
//! Called by programs. A [`Service`] is anything that turns a request into answers: a [`Client`] of a remote endpoint, a
//! local function ([`service_fn`]), or an operator over another service. A pipeline does not know which, so it is the
//! same locally and remotely; [`super::Endpoint::serve_service`] puts one behind an endpoint.

use std::{marker::PhantomData, sync::Arc};

use futures::{FutureExt, StreamExt, future::BoxFuture};
use serde::{Serialize, de::DeserializeOwned};

use super::{answers::Answers, client::Client, error::CallError};
use crate::stream::Fault;

/// Turns a request into answers.
pub trait Service: Send + Sync + 'static {
    /// What goes in.
    type Request: Send + 'static;
    /// What comes out, any number of them.
    type Response: Send + 'static;
    /// Resolves when the request was taken. Dropping the answers cancels it.
    fn call(&self, request: Self::Request) -> BoxFuture<'static, Result<Answers<Self::Response>, CallError>>;
}

/// One step of a pipeline: a forward edge for the request, a backward edge for the answers.
pub trait Operator: Send + Sync + 'static {
    /// What it takes.
    type Request: Send + 'static;
    /// What it gives back.
    type Response: Send + 'static;
    /// What the service below takes.
    type InnerRequest: Send + 'static;
    /// What the service below gives back.
    type InnerResponse: Send + 'static;
    /// What the forward edge remembers for the backward edge of the same request.
    type State: Send + 'static;

    /// Changes the request, or refuses it.
    fn forward(
        &self,
        request: Self::Request,
    ) -> impl Future<Output = Result<(Self::InnerRequest, Self::State), Fault>> + Send;

    /// Changes the answers: maps, drops, adds, ends early.
    fn backward(&self, state: Self::State, answers: Answers<Self::InnerResponse>) -> Answers<Self::Response>;

    /// This operator in front of a service.
    fn over<S>(self, service: S) -> Pipeline<Self, S>
    where
        Self: Sized,
        S: Service<Request = Self::InnerRequest, Response = Self::InnerResponse>,
    {
        Pipeline { operator: Arc::new(self), service: Arc::new(service) }
    }
}

/// An operator in front of a service; itself a service, so pipelines nest.
#[derive(Debug)]
pub struct Pipeline<O, S> {
    operator: Arc<O>,
    service: Arc<S>,
}

impl<O, S> Clone for Pipeline<O, S> {
    fn clone(&self) -> Self {
        Self { operator: self.operator.clone(), service: self.service.clone() }
    }
}

impl<O, S> Service for Pipeline<O, S>
where
    O: Operator,
    S: Service<Request = O::InnerRequest, Response = O::InnerResponse>,
{
    type Request = O::Request;
    type Response = O::Response;

    fn call(&self, request: O::Request) -> BoxFuture<'static, Result<Answers<O::Response>, CallError>> {
        let (operator, service) = (self.operator.clone(), self.service.clone());
        async move {
            let refused = |fault| CallError::Request(super::RequestFault::Rejected(fault));
            let (inner, state) = operator.forward(request).await.map_err(refused)?;
            let answers = service.call(inner).await?;
            Ok(operator.backward(state, answers))
        }
        .boxed()
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
            let refused = |fault| CallError::Request(super::RequestFault::Rejected(fault));
            let failed = |fault| CallError::Request(super::RequestFault::Failed(fault));
            let answers = answers.await.map_err(refused)?;
            Ok(Answers::new(answers.map(move |answer| answer.map_err(failed))))
        }
        .boxed()
    }
}
