//! Grants leases on the budgets of the tenants that this node owns.
//!
//! Parent: `router` supervisor. Children: none.
//! Mailbox: one question a tenant and client at a time; a busy client asks about once a second.
//! Owns: the buckets of [`crate::route::budget::owner`]. Never: decides whose node owns a tenant; clients do, by rendezvous.
//! If it dies: the next life begins with full buckets, which is one life of an owner more in the bound of
//! [`crate::route::budget`]; clients that ask meanwhile take their own part.

#[cfg(test)]
mod tests;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::future::BoxFuture;
use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use starling_cluster::{
    mesh::Mesh,
    stream::{Fault, FaultKind},
    supervise::Handle,
};
use starling_ids::{Metric, NodeId};

use crate::{
    names,
    route::budget::{Lease, LeaseAsk, owner::Owner},
};

/// Longest wait for the actor; a grant takes microseconds.
const GRANT_MAX: Duration = Duration::from_secs(1);

/// What it is asked.
#[derive(Debug)]
pub(crate) enum BudgetMsg {
    /// For a lease.
    Lease(LeaseAsk, RpcReplyPort<Lease>),
}

impl ractor::Message for BudgetMsg {}

/// The actor.
pub(crate) struct BudgetOwner;

/// What one life owns.
pub(crate) struct BudgetState {
    owner: Owner,
    began: Instant,
}

impl Actor for BudgetOwner {
    type Msg = BudgetMsg;
    type State = BudgetState;
    type Arguments = ();

    async fn pre_start(&self, _myself: ActorRef<BudgetMsg>, (): ()) -> Result<BudgetState, ActorProcessingErr> {
        Ok(BudgetState { owner: Owner::default(), began: Instant::now() })
    }

    async fn handle(
        &self,
        _myself: ActorRef<BudgetMsg>,
        message: BudgetMsg,
        state: &mut BudgetState,
    ) -> Result<(), ActorProcessingErr> {
        let BudgetMsg::Lease(ask, reply) = message;
        let lease = state.owner.grant(&ask, state.began.elapsed());
        let outcome = match lease.tokens {
            0 => "empty",
            tokens if tokens < ask.want => "short",
            _ => "granted",
        };
        metrics::counter!(Metric::BudgetLeases.name(), "outcome" => outcome).increment(1);
        metrics::counter!(Metric::BudgetTokens.name()).increment(lease.tokens);
        // An asker that has gone loses what was granted: too little is better than too much.
        reply.send(lease).ok();
        Ok(())
    }
}

/// Answers the questions of other nodes and of this one.
pub(crate) fn serve(mesh: &Mesh, handle: &Handle<BudgetMsg>) {
    let handle = handle.clone();
    let answer = move |_from: NodeId, body: Bytes| -> BoxFuture<'static, Result<Bytes, Fault>> {
        let handle = handle.clone();
        Box::pin(async move {
            let ask =
                rmp_serde::from_slice(&body).map_err(|error| Fault::new(FaultKind::Invalid, error.to_string()))?;
            let lease = handle.call(|reply| BudgetMsg::Lease(ask, reply), GRANT_MAX).await;
            let lease = lease.map_err(|error| Fault::new(FaultKind::Unavailable, error.to_string()))?;
            let bytes = rmp_serde::to_vec(&lease);
            bytes.map(Bytes::from).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
        })
    };
    mesh.serve_op(names::OP_BUDGET, Arc::new(answer));
}
