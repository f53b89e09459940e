//! The control operations of a node: name to handler, shared by sessions and the control endpoint of links.
//!
//! Called by whoever serves or answers an operation. Bounds: none of its own; callers bound how many run.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
};

use bytes::Bytes;
use futures::future::BoxFuture;
use starling_ids::NodeId;

use crate::stream::{Fault, FaultKind};

/// Answers one operation: who asks, with what body.
pub type OpHandler = Arc<dyn Fn(NodeId, Bytes) -> BoxFuture<'static, Result<Bytes, Fault>> + Send + Sync>;

/// The table of operations. Cheap to clone; all clones are one table.
#[derive(Clone, Default)]
pub struct Ops {
    table: Arc<RwLock<BTreeMap<&'static str, OpHandler>>>,
}

impl std::fmt::Debug for Ops {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_set().entries(table.keys()).finish()
    }
}

impl Ops {
    /// Registers or replaces an operation, named `subject/verb`.
    pub fn serve(&self, op: &'static str, handler: OpHandler) {
        self.table.write().unwrap_or_else(PoisonError::into_inner).insert(op, handler);
    }

    /// Answers `op` for `from`.
    pub fn answer(&self, from: NodeId, op: &str, body: Bytes) -> BoxFuture<'static, Result<Bytes, Fault>> {
        let handler = self.table.read().unwrap_or_else(PoisonError::into_inner).get(op).cloned();
        match handler {
            Some(handler) => handler(from, body),
            None => {
                let op: String = op.chars().take(80).collect();
                let fault = Fault::new(FaultKind::NotFound, format!("this node has no operation {op:?}"));
                Box::pin(std::future::ready(Err(fault)))
            }
        }
    }
}
