//! Starling serves large language models from many machines as one system.
//!
//! Every part that does work is a supervised actor on a node of a gossip cluster, and actors reach each other by
//! messages and streams. There are three ways to use it:
//!
//! 1. **Operators** run the program: `starling up` on one machine, `starling join HOST:PORT` on the next.
//! 2. **Applications** call the OpenAI HTTP API of any gateway.
//! 3. **Programs** use this library: join a cluster, serve and call endpoints, spawn actors here and on other nodes.
//!
//! # A program in the cluster
//!
//! A program becomes a member with [`Mesh::join`]. It needs a name, the cluster's key and the address of any member; it
//! listens on a port of its own and finds the others by gossip. An error names the field that is wrong.
//!
//! ```no_run
//! use starling::{JoinConfig, Mesh};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let mesh = Mesh::join(JoinConfig::new("shop-1").key_file("cluster.key").seed("10.0.0.1:7400")).await?;
//! # Ok(())
//! # }
//! ```
//!
//! To try it without a running cluster, let the program begin one: [`JoinConfig::key_file_or_new`] makes the key, and
//! without a seed there is nobody to look for. Its `Cargo.toml` names `starling`, `tokio` (with the feature `full`) and,
//! for requests and answers of its own types, `serde` (with `derive`).
//!
//! ## Serve and call
//!
//! An endpoint is a name of three parts with the types of its requests and answers. One side serves it, any other calls
//! it; the types are plain serde types and travel as MessagePack.
//!
//! ```no_run
//! # async fn example(mesh: starling::Mesh) -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use starling::{Endpoint, Fault, FaultKind, emit};
//!
//! let greet: Endpoint<String, String> = mesh.namespace("shop")?.component("desk")?.endpoint("greet")?;
//! let served = greet.serve(|name| async move {
//!     if name.is_empty() {
//!         return Err(Fault::new(FaultKind::Invalid, "say who you are"));
//!     }
//!     Ok(format!("good morning, {name}"))
//! })?;
//! // Elsewhere, on this node or any other, in the same way. A node that has just joined has not heard of everybody.
//! let client = greet.client();
//! if !client.wait_for(1, Duration::from_secs(10)).await {
//!     return Err("nobody greets in this cluster".into());
//! }
//! let answer = client.unary(&"Ada".to_owned()).await?;
//!
//! // Many answers to one request. `emit` turns a loop into a stream; a slow reader slows the loop.
//! let count: Endpoint<u32, u32> = mesh.namespace("shop")?.component("desk")?.endpoint("count")?;
//! let counting = count.serve_stream(|upto| async move {
//!     Ok(emit(move |out| async move {
//!         for n in 0..upto {
//!             out.send(n).await?;
//!         }
//!         Ok(())
//!     }))
//! })?;
//! let mut numbers = count.client().stream(&3).await?;
//! while let Some(number) = numbers.next().await {
//!     println!("{}", number?);
//! }
//!
//! // Takes nothing new, finishes what runs, leaves the directory. Dropping the guard only does the last.
//! served.drain().await;
//! # drop(counting);
//! # Ok(())
//! # }
//! ```
//!
//! A handler refuses with a [`Fault`]; a stream that breaks is never mistaken for one that ended. A mistyped name is
//! answered with those that exist.
//!
//! ## Both ways at once
//!
//! The handler of [`Endpoint::serve_opening`] looks at the call, then takes it or refuses it before any data flows.
//! [`Endpoint::serve_duplex`] takes every call.
//!
//! ```no_run
//! # async fn example(mesh: starling::Mesh) -> Result<(), Box<dyn std::error::Error>> {
//! use starling::{Endpoint, Fault, FaultKind, Opening, current_call};
//!
//! let sum: Endpoint<i64, i64> = mesh.namespace("shop")?.component("desk")?.endpoint("sum")?;
//! let served = sum.serve_opening(|opening: Opening<i64, i64>| async move {
//!     if current_call().is_some_and(|call| call.context.tenant == "stranger") {
//!         return Err(Fault::new(FaultKind::Invalid, "customers only"));
//!     }
//!     let (mut numbers, sums) = opening.accept()?;
//!     let mut sum = 0;
//!     while let Some(number) = numbers.next().await {
//!         sum += number?;
//!         sums.send(&sum).await?;
//!     }
//!     Ok(())
//! })?;
//! let mut call = sum.client().duplex().await?;
//! call.send(&40).await?;
//! call.send(&2).await?;
//! assert_eq!(call.end().all().await?, [40, 42]);
//! # drop(served);
//! # Ok(())
//! # }
//! ```
//!
//! ## Which instance answers
//!
//! Several nodes may serve one endpoint. A [`Client`] takes them in turn unless told otherwise, passes over those that
//! are full, draining or out of reach, and tries another one while a request was surely not begun. Retries are paid for
//! by successes, so trouble is not multiplied.
//!
//! ```no_run
//! # async fn example(greet: starling::Endpoint<String, String>) -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use starling::{Advice, CallError, InstanceEvent, Picker};
//!
//! let client = greet.client().pick(Picker::LeastInFlight).deadline(Duration::from_secs(2));
//! let near = client.clone().pick_with(|candidates| {
//!     candidates.iter().position(|one| one.instance.labels.get("zone").is_some_and(|zone| zone == "north"))
//! });
//! for instance in greet.list_instances() {
//!     println!("{}", greet.client().direct(&instance.id).unary(&"Ada".to_owned()).await?);
//! }
//! match near.unary(&"Ada".to_owned()).await {
//!     Ok(answer) => println!("{answer}"),
//!     Err(CallError::Directory(fault)) => println!("nothing was sent: {fault}"),
//!     Err(error) if error.may_have_acted() => println!("perhaps done, perhaps not: {error}"),
//!     Err(error) if error.advice() == Advice::GiveUp => println!("never: {error}"),
//!     Err(error) => println!("later perhaps: {error}"),
//! }
//! let mut news = greet.watch();
//! while let Some(event) = news.next().await {
//!     if let InstanceEvent::Removed(instance) = event {
//!         println!("{instance} is gone");
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! ## What crosses every hop
//!
//! A call carries a [`Context`]: request id, W3C trace parent, deadline, attempt, tenant, priority and [`Baggage`]. A
//! handler reads it with [`current_call`], and calls made inside the handler inherit it, with the time that is left. The
//! gateways take `traceparent` and `baggage` from HTTP, so they reach your worker.
//!
//! ```no_run
//! # async fn example(greet: starling::Endpoint<String, String>) -> Result<(), Box<dyn std::error::Error>> {
//! use starling::current_call;
//!
//! let served = greet.serve(|name| async move {
//!     let call = current_call();
//!     let zone = call.as_ref().and_then(|call| call.context.baggage.get("zone")).unwrap_or("nowhere");
//!     Ok(format!("good morning {name} of {zone}"))
//! })?;
//! let mut baggage = starling::Baggage::default();
//! baggage.set("zone", "north")?;
//! let client = greet.client().context(move |context| context.baggage = baggage.clone());
//! println!("{}", client.unary(&"Ada".to_owned()).await?);
//! # drop(served);
//! # Ok(())
//! # }
//! ```
//!
//! ## Actors
//!
//! An [`Actor`] keeps state and handles requests one after the other. The node's supervisor starts it again when it
//! panics; a handle goes on working.
//!
//! ```no_run
//! use starling::{Actor, Fault, supervise::Restart};
//!
//! struct Counter(u64);
//!
//! impl Actor for Counter {
//!     type Request = u64;
//!     type Reply = u64;
//!
//!     async fn handle(&mut self, more: u64) -> Result<u64, Fault> {
//!         self.0 += more;
//!         Ok(self.0)
//!     }
//! }
//!
//! # async fn example(mesh: starling::Mesh) -> Result<(), Box<dyn std::error::Error>> {
//! let here = mesh.spawn("visits", Restart::Permanent, || Counter(0)).await?;
//! assert_eq!(here.ask(2).await?, 2);
//! here.tell(3)?;
//! # Ok(())
//! # }
//! ```
//!
//! The same actor can be started on another node that has registered a factory for it, asked, told and followed from
//! anywhere. It ends with whoever started it, an actor or a node, unless it is [`Lifetime::Detached`].
//!
//! ```no_run
//! # struct Counter(u64);
//! # impl starling::Actor for Counter {
//! #     type Request = u64;
//! #     type Reply = u64;
//! #     async fn handle(&mut self, more: u64) -> Result<u64, starling::Fault> { self.0 += more; Ok(self.0) }
//! # }
//! # async fn example(mesh: starling::Mesh, there: starling::NodeId) -> Result<(), Box<dyn std::error::Error>> {
//! use starling::{ActorEvent, Lifetime, SpawnOptions};
//!
//! // On the other node:
//! mesh.register_factory("counter", |from: u64| Ok(Counter(from)));
//! // Here:
//! let counter = mesh.spawn_on::<Counter>(&there, "counter", &40u64).await?;
//! assert_eq!(counter.ask(&2).await?, 42);
//! // Nobody waits for the answer; the outbox is bounded and says when it is full.
//! counter.tell(&1)?;
//! let mut life = counter.monitor();
//! while let Some(event) = life.next().await {
//!     match event {
//!         ActorEvent::Started => println!("it runs"),
//!         ActorEvent::Restarted { restarts } => println!("it died and came back, {restarts} times so far"),
//!         ActorEvent::Stopped(reason) => println!("it has ended: {reason:?}"),
//!         ActorEvent::NodeDown => println!("start it elsewhere"),
//!     }
//! }
//! let options = SpawnOptions { lifetime: Lifetime::Detached, ..SpawnOptions::default() };
//! let orphan = mesh.spawn_on_with::<Counter>(&there, "counter", &0u64, options).await?;
//! // Later, from any node:
//! let found = mesh.actor_on::<Counter>(&there, orphan.name())?;
//! # drop(found);
//! # Ok(())
//! # }
//! ```
//!
//! [`Endpoint::serve_actor`] puts an actor of the actor library itself ([`ractor`], supervised with
//! [`supervise::child`]) behind an endpoint.
//!
//! ## Groups
//!
//! A [`Group`] gathers endpoints and actors of one kind, anywhere, under one name, and asks all of them at once. Members
//! leave with their guard, their actor or their node.
//!
//! ```no_run
//! # async fn example(mesh: starling::Mesh, ear: starling::Endpoint<String, String>) -> Result<(), Box<dyn std::error::Error>> {
//! let served = ear.serve(|said| async move { Ok(format!("heard {said}")) })?;
//! let group = mesh.group::<String, String>("ears")?;
//! let member = group.join(&served)?;
//! for (instance, heard) in group.broadcast(&"hello".to_owned()).await {
//!     println!("{instance}: {heard:?}");
//! }
//! # drop(member);
//! # Ok(())
//! # }
//! ```
//!
//! ## Pipelines
//!
//! An [`Operator`] sees a request on its way in and its answers on their way out. [`Operator::over`] puts it in front of a
//! client, a local function or another operator; [`Endpoint::serve_service`] puts the whole behind an endpoint.
//!
//! ```no_run
//! use futures::StreamExt;
//! use starling::{Answers, Below, CallError, Operator, futures};
//!
//! /// Answers "ping" itself, and shouts what the others answer, word by word.
//! struct Loud;
//!
//! impl Operator for Loud {
//!     type Request = String;
//!     type Response = String;
//!     type InnerRequest = String;
//!     type InnerResponse = String;
//!
//!     async fn call(&self, request: String, below: Below<String, String>) -> Result<Answers<String>, CallError> {
//!         if request == "ping" {
//!             return Ok(Answers::once("PONG".to_owned()));
//!         }
//!         let answers = below.call(request).await?;
//!         Ok(Answers::new(answers.map(|answer| Ok(answer?.to_uppercase()))))
//!     }
//! }
//!
//! # async fn example(
//! #     greet: starling::Endpoint<String, String>,
//! #     loud: starling::Endpoint<String, String>,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! use starling::Service;
//!
//! // Before an endpoint:
//! println!("{:?}", Loud.over(greet.client()).call("Ada".to_owned()).await?.all().await?);
//! // Behind one:
//! let served = loud.serve_service(Loud.over(greet.client()))?;
//! # drop(served);
//! # Ok(())
//! # }
//! ```
//!
//! ## A language model of your own
//!
//! [`worker`] is what a program needs to join as a worker behind the OpenAI gateways; [`examples::custom_worker`] does it
//! in under 60 lines.
//!
//! ## Leaving
//!
//! [`Mesh::leave`] refuses new calls as draining, which sends callers elsewhere; finishes what runs, for at most
//! [`LEAVE_MAX`]; delivers what was told; and says goodbye. A program that is killed instead is noticed: its streams
//! break at once, its instances go when gossip has declared it down, and what it had started elsewhere ends.
//! [`Mesh::failed`] resolves when the node cannot go on by itself.
//!
//! ## Whole programs
//!
//! [`examples`] shows the four that are in the source folder, each run by a test: an echo service, a word count streamed
//! between two processes, an actor on another node, and a language model.
//!
//! ## Below the types
//!
//! Frames of bytes instead of values: [`StreamHandler`] with [`Mesh::endpoints`] answers streams, [`Mesh::open`] opens
//! one at a node in one incarnation, [`Mesh::publish`] and [`Mesh::snapshot`] are the directory.
//!
//! # A whole node
//!
//! [`node::Node`] is what `starling up` runs, with [`config::Config`] as its settings. `ARCHITECTURE.md` in the source
//! folder walks a request through it.

mod api_keys;
mod backend;
pub mod cli;
pub mod config;
pub mod control;
pub mod facts;
pub mod home;
mod http_server;
pub mod logging;
pub mod node;
mod open_files;
pub mod progress;
pub mod routing;
pub mod shutdown;
pub mod telemetry;
pub mod worker;

pub use starling_cluster::{
    config::{ClusterConfig, ConfigError, Timings},
    discovery::{Instance, InstanceKind, Lifecycle, NodeRecord, NodeState, NodeView, Snapshot},
    mesh::{ClusterError, Failed, LEAVE_MAX, Mesh},
    program::{
        Actor, ActorEvent, ActorHandle, Answers, Below, CallError, CallInfo, Candidate, Client, Component,
        DirectoryFault, Duplex, Emitter, Endpoint, Group, GroupMember, InstanceEvent, InstanceId, InstanceView,
        InstanceWatch, JoinConfig, Lifetime, Monitor, Namespace, Opening, Operator, Picker, Pipeline, Receiver,
        RemoteActor, RequestFault, Sender, ServeError, ServedEndpoint, Service, SpawnError, SpawnOptions, StopReason,
        TellError, current_call, emit, service_fn,
    },
    security::{ClusterKey, KeyError, KeyRing},
    stream::{
        Acceptor, Advice, Baggage, BaggageError, Context, Endpoints, Fault, FaultKind, Incoming, Layer, Opened,
        StreamError, StreamHandler, StreamRx, StreamTx,
    },
    supervise,
};
pub use starling_ids::{EndpointName, Incarnation, ModelId, NodeId, RequestId, WorkerId};
/// The crates whose types appear in this library's functions, in the versions it uses.
pub use {bytes, futures, ractor};

/// The examples of the source folder, whole. Each is run by a test as the processes it describes.
#[cfg(doc)]
pub mod examples {
    #[doc = concat!("```rust,ignore\n", include_str!("../examples/echo.rs"), "```")]
    pub mod echo {}
    #[doc = concat!("```rust,ignore\n", include_str!("../examples/word_count.rs"), "```")]
    pub mod word_count {}
    #[doc = concat!("```rust,ignore\n", include_str!("../examples/remote_spawn.rs"), "```")]
    pub mod remote_spawn {}
    #[doc = concat!("```rust,ignore\n", include_str!("../examples/custom_worker.rs"), "```")]
    pub mod custom_worker {}
    #[doc = concat!("```rust,ignore\n", include_str!("../examples/custom_scorer.rs"), "```")]
    pub mod custom_scorer {}
}

/// The program in the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
