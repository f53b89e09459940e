//! The programming model: endpoints, clients, actors, groups and pipelines on a [`Mesh`].
//!
//! Built on streams, the directory and control operations; it adds types, choice of an instance, retries and
//! supervision by name. Called by programs through the `starling` crate. Never: opens a socket or keeps a member list.
//!
//! | a program wants to | it takes |
//! |---|---|
//! | join | [`Mesh::join`] with a [`JoinConfig`] |
//! | answer requests | [`Endpoint::serve`], [`Endpoint::serve_stream`], [`Endpoint::serve_duplex`], [`Endpoint::serve_actor`] |
//! | ask | [`Endpoint::client`]: [`Client::unary`], [`Client::stream`], [`Client::duplex`] |
//! | keep something running | [`Mesh::spawn`] with an [`Actor`] |
//! | start it on another node | [`Mesh::register_factory`] there, [`Mesh::spawn_on`] here, with a [`Lifetime`] |
//! | ask it, tell it, follow it | [`RemoteActor::ask`], [`RemoteActor::tell`], [`RemoteActor::monitor`] |
//! | know who offers what | [`Mesh::list_instances`], [`Endpoint::watch`] |
//! | speak to all of a kind | [`Mesh::group`] |
//! | change requests and answers on their way | [`Operator`] |
//!
//! Bodies are MessagePack with field names, so both sides may gain fields with defaults. The [`current_call`] of a
//! handler crosses every hop: a call made inside a handler takes over its request id, trace, attempt, tenant, priority,
//! baggage and deadline.

mod actor;
mod answers;
mod budget;
mod call;
mod client;
mod codec;
mod config;
mod emit;
mod endpoint;
mod error;
mod gate;
mod group;
mod halves;
mod handlers;
mod instances;
mod monitor;
mod opening;
mod owners;
mod pick;
mod pipeline;
mod programs;
mod remote;
mod serve;
mod spawn;
mod told;
mod tries;
mod watch;

#[cfg(test)]
mod tests;

pub use actor::{Actor, ActorHandle};
pub use answers::{Answers, Duplex};
pub use call::{CallInfo, current_call};
pub use client::Client;
pub use config::JoinConfig;
pub use emit::{Emitter, emit};
pub use endpoint::{Component, Endpoint, Namespace};
pub use error::{CallError, DirectoryFault, RequestFault};
pub use group::{Group, GroupMember};
pub use halves::{Receiver, Sender};
pub use instances::{InstanceEvent, InstanceId, InstanceView};
pub use monitor::{ActorEvent, Monitor, StopReason};
pub use opening::Opening;
pub use pick::{Candidate, Picker};
pub use pipeline::{Below, Operator, Pipeline, Service, ServiceFn, service_fn};
pub use remote::{Lifetime, RemoteActor, SpawnOptions};
pub use serve::{ServeError, ServedEndpoint};
pub use spawn::SpawnError;
pub use told::TellError;
pub use watch::InstanceWatch;

pub(crate) use {programs::Programs, spawn::install};

#[allow(unused_imports)] // for links in this file
use crate::mesh::Mesh;
