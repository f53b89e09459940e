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
//! binds a port of its own and finds the others by gossip.
//!
//! ```no_run
//! use starling::{ClusterConfig, ClusterKey, Mesh};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let key = ClusterKey::load("cluster.key".as_ref())?;
//! let mesh = Mesh::join(ClusterConfig::program("shop-1", key)?.seed("10.0.0.1:7400")).await?;
//! # Ok(())
//! # }
//! ```
//!
//! ## Serve and call
//!
//! An endpoint is a name of three parts with the types of its requests and answers. One side serves it, any other calls
//! it; the types are plain serde types and travel as MessagePack.
//!
//! ```no_run
//! # async fn example(mesh: starling::Mesh) -> Result<(), Box<dyn std::error::Error>> {
//! use starling::{Endpoint, Fault, FaultKind, emit};
//!
//! let greet: Endpoint<String, String> = mesh.namespace("shop")?.component("desk")?.endpoint("greet")?;
//! let served = greet.serve(|name| async move {
//!     if name.is_empty() {
//!         return Err(Fault::new(FaultKind::Invalid, "say who you are"));
//!     }
//!     Ok(format!("good morning, {name}"))
//! })?;
//! // Elsewhere, on this node or any other, in the same way:
//! let answer = greet.client().unary(&"Ada".to_owned()).await?;
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
//! // Takes nothing new, finishes what runs, leaves the directory.
//! served.drain().await;
//! # drop(counting);
//! # Ok(())
//! # }
//! ```
//!
//! [`Endpoint::serve_duplex`] and [`Client::duplex`] send both ways at once. A request is refused with a typed reason
//! before any data flows, and a stream that breaks is never mistaken for one that ended.
//!
//! ## Which instance answers
//!
//! Several nodes may serve one endpoint. A [`Client`] takes them in turn unless told otherwise, passes over those that
//! are full, draining or out of reach, and tries another one while a request was surely not begun.
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
//!     Err(error) if error.advice() == Advice::IfIdempotent => println!("perhaps done, perhaps not: {error}"),
//!     Err(error) => println!("{error}"),
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
//! ## Actors
//!
//! An [`Actor`] keeps state and handles requests one after the other. The node's supervisor starts it again when it
//! panics; a handle goes on working. The same actor can be started on another node that has registered a factory for it,
//! and followed from anywhere.
//!
//! ```no_run
//! use starling::{Actor, ActorEvent, Fault, supervise::Restart};
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
//! # async fn example(mesh: starling::Mesh, other: starling::NodeId) -> Result<(), Box<dyn std::error::Error>> {
//! let here = mesh.spawn("visits", Restart::Permanent, || Counter(0)).await?;
//! assert_eq!(here.ask(2).await?, 2);
//!
//! // On the other node: mesh.register_factory("counter", |from: u64| Ok(Counter(from)));
//! let there = mesh.spawn_on::<Counter>(&other, "counter", &40u64).await?;
//! assert_eq!(there.ask(&2).await?, 42);
//! let mut life = there.monitor();
//! while let Some(event) = life.next().await {
//!     if event == ActorEvent::NodeDown {
//!         println!("start it elsewhere");
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`Endpoint::serve_actor`] puts an actor of the actor library itself ([`ractor`], supervised with
//! [`supervise::child`]) behind an endpoint.
//!
//! ## Groups and pipelines
//!
//! [`Mesh::group`] gathers endpoints under one name and asks all of them at once. An [`Operator`] changes the request on
//! its way in and the answers on their way out; [`Operator::over`] puts it in front of a client, a local function or
//! another operator, and [`Endpoint::serve_service`] puts the whole behind an endpoint.
//!
//! ## A language model of your own
//!
//! [`worker`] is what a program needs to join as a worker behind the OpenAI gateways; `examples/custom_worker.rs` does it
//! in under 60 lines. The other examples are `echo.rs`, `word_count.rs` and `remote_spawn.rs`.
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
pub mod shutdown;
pub mod telemetry;
pub mod worker;

pub use starling_cluster::{
    config::{ClusterConfig, Timings},
    discovery::{Instance, InstanceKind, Lifecycle, NodeRecord, NodeState, NodeView, Snapshot},
    mesh::{ClusterError, Mesh},
    program::{
        Actor, ActorEvent, ActorHandle, Advice, Answers, CallError, CallInfo, Candidate, Client, Component,
        DirectoryFault, Duplex, Emitter, Endpoint, Group, GroupMember, InstanceEvent, InstanceId, InstanceView,
        InstanceWatch, Monitor, Namespace, Operator, Picker, Pipeline, Receiver, RemoteActor, RequestFault, Sender,
        ServeError, ServedEndpoint, Service, SpawnError, SpawnOptions, current_call, emit, service_fn,
    },
    security::ClusterKey,
    stream::{
        Acceptor, Context, Endpoints, Fault, FaultKind, Incoming, Opened, StreamError, StreamHandler, StreamRx,
        StreamTx,
    },
    supervise,
};
pub use starling_ids::{EndpointName, Incarnation, ModelId, NodeId, RequestId, WorkerId};
/// The crates whose types appear in this library's functions, in the versions it uses.
pub use {bytes, futures, ractor};

/// The program in the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
