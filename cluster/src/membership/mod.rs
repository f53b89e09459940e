//! Who is a member: SWIM gossip over sealed datagrams, on a thread of its own.
//!
//! How [`crate::mesh`] puts it together, in this order:
//!
//! ```text
//! let (listener, socket) = bind_pair(config.bind)?;                   // one port for TCP and UDP
//! let seeds = Seeds::new(&config.seeds)?;                             // looked up again and again
//! let address = advertise(bound, config.advertise, &seeds.resolve().await)?; // never 0.0.0.0
//! let incarnation = claim(Claim { .. }).await?;                       // raises the boot counter; refuses a taken name
//! let membership = MembershipHandle::default();
//! supervisor.add(membership_child(&membership, MembershipArgs { .. })).await?;
//! membership.leave().await?;                                          // at the end
//! ```
//!
//! `MembershipArgs::view` is `Arc::new(watch::Sender::new(Arc::default()))`; the directory reads the same watch. When
//! [`MembershipView::outranked`] is set, another node holds the name and this one has fallen silent: the
//! process should end.
//!
//! Pure parts: [`Identity`] (which claim to a name wins), `sizing` (how fast), `message` (what a datagram says),
//! [`Driver`] (foca and the habits around it), [`boot`] (the incarnation).

mod actor;
mod advertise;
pub mod boot;
mod claim;
mod driver;
mod identity;
mod index;
mod message;
mod news;
mod outreach;
mod rumours;
mod runtime;
mod seeds;
mod sizing;
mod socket;
mod thread;
mod visits;

use std::{collections::BTreeMap, sync::Arc};

pub use actor::{MembershipArgs, MembershipHandle, membership_child};
pub use advertise::{AdvertiseError, choose as advertise};
pub use claim::{Claim, ClaimError, claim};
pub use driver::{Driver, EXCHANGE_MAX, Effect, Look, MemberView, Outranked, Peer, Proof, VERIFY_MAX};
pub use identity::{Identity, place};
pub use message::Rumour;
pub use outreach::OP_EXCHANGE;
pub use seeds::{Lookup, Seed, SeedError, Seeds};
pub use socket::bind_pair;
use starling_ids::NodeId;
pub use visits::{Ask, Visit, ask_by_session, visits};

/// What gossip says now. Published through a watch: only the latest one counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MembershipView {
    /// All members except this node; down ones are not among them.
    pub members: BTreeMap<NodeId, MemberView>,
    /// Set when somebody else holds this node's name; then gossip has ended.
    pub outranked: Option<Outranked>,
    /// Another living process that last claimed this node's name, and lost to it.
    pub rival: Option<Identity>,
}

/// A watch for [`MembershipView`], empty.
#[must_use]
pub fn view_watch() -> Arc<tokio::sync::watch::Sender<Arc<MembershipView>>> {
    Arc::new(tokio::sync::watch::Sender::new(Arc::default()))
}
