//! Why a node cannot go on, and how its owner hears of it.

use std::net::SocketAddr;

use starling_ids::{Incarnation, NodeId};
use thiserror::Error;

use super::Mesh;
use crate::membership::Outranked;

/// Why a node cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Failed {
    /// More failures than the root of its actor tree allows.
    #[error("the actor tree has ended")]
    Tree,
    /// Another node lives under its name.
    #[error("the name {node} is held by {}; choose another --name", holder.map_or_else(|| "another node".to_owned(), |at| format!("the node at {at}")))]
    Taken {
        /// The name.
        node: NodeId,
        /// Where the other one is, if that is known.
        holder: Option<SocketAddr>,
    },
    /// The cluster remembers a later life of this node, one that is down: this node's boot counter was lost. Above
    /// `past` it is welcome ([`crate::membership::boot::raise_above`]).
    #[error("the cluster remembers {node} in incarnation {past}: the boot counter of this node was lost")]
    Outlived {
        /// The name.
        node: NodeId,
        /// The last life that is remembered.
        past: Incarnation,
    },
}

impl Failed {
    fn outranked(node: &NodeId, why: &Outranked) -> Self {
        match &why.holder {
            Some(holder) if why.down => Self::Outlived { node: node.clone(), past: holder.incarnation },
            holder => Self::Taken { node: node.clone(), holder: holder.as_ref().map(|holder| holder.address()) },
        }
    }
}

impl Mesh {
    /// Resolves when the node cannot go on.
    pub async fn failed(&self) -> Failed {
        let mut view = self.inner.view.clone();
        let outranked = async {
            match view.wait_for(|view| view.outranked.is_some()).await {
                Ok(view) => view.outranked.clone(),
                // The view ends with the node.
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.inner.root.ended() => Failed::Tree,
            outranked = outranked => match outranked {
                Some(why) => Failed::outranked(&self.inner.node, &why),
                None => Failed::Tree,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::Identity;

    #[test]
    fn a_past_life_that_is_down_is_no_other_node() {
        let node = NodeId::new("w").expect("name");
        let holder = Identity::new(node.clone(), SocketAddr::from(([10, 0, 0, 9], 7)), Incarnation(41));
        let why = |down| Outranked { holder: Some(holder.clone()), down };
        let past = Failed::Outlived { node: node.clone(), past: Incarnation(41) };
        assert_eq!(Failed::outranked(&node, &why(true)), past);
        let text = Failed::outranked(&node, &why(false)).to_string();
        assert_eq!(text, "the name w is held by the node at 10.0.0.9:7; choose another --name");
        let unknown = Failed::outranked(&node, &Outranked { holder: None, down: false }).to_string();
        assert_eq!(unknown, "the name w is held by another node; choose another --name");
    }
}
