//! Newtypes that every crate shares: who, which, where, and nothing else.
//!
//! A leaf: it depends on no other crate of the workspace, does no I/O and reads no clock, so that any
//! part of the system can name any other part without importing it.

mod block;
mod endpoint;
mod metric;
mod model;
mod node;
mod request;
mod text;

pub use block::{BlockHash, TokenId};
pub use endpoint::EndpointName;
pub use metric::{Metric, MetricKind};
pub use model::ModelId;
pub use node::{Incarnation, NodeId, WorkerId};
pub use request::{AttemptId, RequestId};
pub use text::NameError;
