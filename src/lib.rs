//! Starling serves large language models from many machines as one system.
//!
//! Every part that does work is a supervised actor on a node of a gossip cluster, and actors reach each other by
//! messages and streams. There are three ways to use it:
//!
//! 1. **Operators** run the program: `starling up` on one machine, `starling join HOST:PORT` on the next.
//! 2. **Applications** call the OpenAI HTTP API of any gateway.
//! 3. **Programs** use this library: join a cluster, serve an endpoint, open streams to others by name.
//!
//! # A program in the cluster
//!
//! A program becomes a member with [`Mesh::start`], answers streams of an endpoint `namespace/component/endpoint` with a
//! [`StreamHandler`], and tells the others with [`Mesh::publish`]. Whoever wants it finds its instances in
//! [`Mesh::snapshot`] and opens a stream with [`Mesh::open`]. A stream is accepted or refused with a typed reason
//! before any data flows, carries frames both ways under credits, and a break is never mistaken for an end.
//!
//! ```no_run
//! use std::{sync::Arc, time::Duration};
//!
//! use starling::{
//!     ClusterConfig, ClusterKey, Context, EndpointName, Incoming, Mesh, NodeId, RequestId, StreamHandler, Timings,
//!     bytes::Bytes, futures::future::BoxFuture,
//! };
//!
//! /// Sends back what it gets.
//! struct Echo;
//!
//! impl StreamHandler for Echo {
//!     fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
//!         Box::pin(async move {
//!             let Some((mut tx, mut rx)) = incoming.acceptor.accept(Bytes::new()) else { return };
//!             while let Some(Ok(frame)) = rx.recv().await {
//!                 if tx.send(frame).await.is_err() {
//!                     return;
//!                 }
//!             }
//!             tx.end();
//!         })
//!     }
//! }
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let mesh = Mesh::start(ClusterConfig {
//!     name: NodeId::new("echo-1")?,
//!     bind: "127.0.0.1:0".parse()?,
//!     advertise: None,
//!     seeds: vec!["127.0.0.1:7400".into()],
//!     data_dir: "echo-1".into(),
//!     key: ClusterKey::load("cluster.key".as_ref())?,
//!     roles: Vec::new(),
//!     http: None,
//!     software: "echo 1.0".into(),
//!     timings: Timings::default(),
//! })
//! .await?;
//! let name = EndpointName::new("demo/echo/stream")?;
//! mesh.endpoints().serve(name.clone(), Arc::new(Echo));
//!
//! let context = Context::new(RequestId(1), Duration::from_secs(10));
//! let mut stream = mesh.open(mesh.node(), mesh.incarnation(), &name, context, Bytes::new()).await?;
//! stream.tx.send(Bytes::from_static(b"hello")).await?;
//! assert_eq!(stream.rx.recv().await.transpose()?, Some(Bytes::from_static(b"hello")));
//! mesh.leave().await;
//! # Ok(())
//! # }
//! ```
//!
//! Actors of your own live under the node's supervision: [`supervise::child`] describes one, and
//! `mesh.supervisor().add(…)` starts it and starts it again when it dies.
//!
//! # A whole node
//!
//! [`node::Node`] is what `starling up` runs, with [`config::Config`] as its settings. `ARCHITECTURE.md` in the source
//! folder walks a request through it.

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

pub use starling_cluster::{
    config::{ClusterConfig, Timings},
    discovery::{Instance, InstanceKind, Lifecycle, NodeRecord, NodeState, NodeView, Snapshot},
    mesh::{ClusterError, Mesh},
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
