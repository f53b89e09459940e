//! The OpenAI HTTP API in front of the cluster.
//!
//! A request passes through the files in this order: `connection` takes it, `server` finds its route, `admission` counts it,
//! [`openai`] validates it, [`prompt`] turns it into tokens, the [`Backend`] finds a worker, `run` follows the
//! answer, [`text`] turns tokens into text, `sse` or `reply` writes it. The gateway knows the cluster only as a
//! [`Backend`]; it holds no actor and no link.

pub mod backend;
pub mod config;
pub mod openai;
pub mod prompt;
pub mod text;

mod admission;
mod caller;
mod chat;
mod completions;
mod connection;
mod console;
mod context;
mod error;
#[cfg(test)]
mod fixtures;
mod manner;
mod metrics;
mod models;
mod ratelimit;
mod reply;
mod run;
mod server;
mod sse;
#[cfg(test)]
mod tests;

pub use backend::{Backend, Call, Generation, Readiness, View};
pub use caller::{ApiKey, Caller, PRIORITY_MAX, PRIORITY_MIN, Scope, Who};
pub use config::{ConfigError, GatewayConfig};
pub use server::{DrainReport, Gateway, GatewayError, MetricsRender};
