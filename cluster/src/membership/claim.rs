//! Claims a node's name before it joins: an incarnation that no living or remembered node outranks.
//!
//! Called once at start, before the actors. Asks the seeds who holds the name. An earlier life of this node that is
//! down, or dies while we wait, is stepped over, also when the data directory was lost; another node that
//! lives under the name is an error that names `--name`. Bounds: `SILENCE` when no seed answers,
//! `ALIVE_MAX` when the holder looks alive.

use std::{io, net::SocketAddr, path::Path, time::Duration};

use starling_ids::{Incarnation, NodeId};
use thiserror::Error;
use tokio::time::{Instant, timeout_at};

use super::{
    Identity,
    boot::{self, BootError},
    message::{self, Opened, Word},
    socket::SealedSocket,
};
use crate::security::Keys;

/// How long seeds have to answer a node that is otherwise free to go.
const SILENCE: Duration = Duration::from_millis(600);
/// How long a holder of the name may look alive: longer than gossip takes to notice a death.
const ALIVE_MAX: Duration = Duration::from_secs(8);
const ASK_EVERY: Duration = Duration::from_millis(150);

/// Why the node cannot start under its name.
#[derive(Debug, Error)]
pub enum ClaimError {
    /// Somebody else lives under it.
    #[error("node {name} already runs at {address} in incarnation {incarnation}; stop it or choose another --name")]
    Taken {
        /// The name.
        name: NodeId,
        /// Where its holder is.
        address: SocketAddr,
        /// In which life.
        incarnation: Incarnation,
    },
    /// The boot counter could not be raised.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The gossip socket failed.
    #[error("gossip socket: {0}")]
    Socket(#[from] io::Error),
}

/// What a claim needs.
#[derive(Debug)]
pub struct Claim<'a> {
    /// The gossip socket, already bound.
    pub socket: &'a std::net::UdpSocket,
    /// The keys of the cluster.
    pub keys: &'a Keys,
    /// The cluster's name.
    pub cluster: &'a str,
    /// Whom to ask.
    pub seeds: &'a [SocketAddr],
    /// The name.
    pub node: &'a NodeId,
    /// What this node will advertise.
    pub address: SocketAddr,
    /// Where the boot counter is kept.
    pub data_dir: &'a Path,
}

/// Raises the boot counter and, if the cluster remembers a later life, steps above that one.
pub async fn claim(claim: Claim<'_>) -> Result<Incarnation, ClaimError> {
    let incarnation = boot::next(claim.data_dir)?;
    let seeds: Vec<SocketAddr> = claim.seeds.iter().copied().filter(|seed| *seed != claim.address).collect();
    if seeds.is_empty() {
        return Ok(incarnation);
    }
    let mut socket = SealedSocket::new(claim.socket, claim.keys, claim.cluster, (claim.node, incarnation))?;
    let started = Instant::now();
    let mut until = started + SILENCE;
    let mut rival = None;
    while Instant::now() < until {
        match ask(&mut socket, &seeds, claim.node).await {
            Some(Some((holder, false))) if holder.incarnation >= incarnation => {
                until = started + ALIVE_MAX;
                rival = Some(holder);
            }
            Some(Some((holder, true))) if holder.incarnation >= incarnation => {
                return Ok(boot::raise_above(claim.data_dir, holder.incarnation)?);
            }
            Some(_) => return Ok(incarnation),
            None => {}
        }
    }
    match rival {
        Some(holder) => {
            tell_the_holder(&mut socket, &holder, Identity::new(claim.node.clone(), claim.address, incarnation));
            let (address, incarnation) = (holder.address(), holder.incarnation);
            Err(ClaimError::Taken { name: claim.node.clone(), address, incarnation })
        }
        None => Ok(incarnation),
    }
}

/// Its operator should hear of a second process under the name too. Sent more than once: packets get lost.
fn tell_the_holder(socket: &mut SealedSocket, holder: &Identity, rival: Identity) {
    match message::word(&Word::Rival(rival)) {
        Ok(word) => (0..3).for_each(|_| socket.send(holder.address(), &word)),
        Err(error) => tracing::error!(%error, "a gossip word does not encode"),
    }
}

/// Asks all seeds once. `None`: nobody answered; otherwise the holder that outranks the others.
async fn ask(socket: &mut SealedSocket, seeds: &[SocketAddr], node: &NodeId) -> Option<Option<(Identity, bool)>> {
    match message::word(&Word::WhoIs(node.clone())) {
        Ok(question) => seeds.iter().for_each(|seed| socket.send(*seed, &question)),
        Err(error) => tracing::error!(%error, "a gossip word does not encode"),
    }
    let end = Instant::now() + ASK_EVERY;
    let mut answer: Option<Option<(Identity, bool)>> = None;
    while let Ok((_, payload)) = timeout_at(end, socket.receive()).await {
        let Ok(Opened::Word(Word::Holder(about, holder))) = message::open(&payload) else { continue };
        if about != *node {
            continue;
        }
        let better = match (&answer, &holder) {
            (Some(Some((known, _))), Some((heard, _))) => heard.beats(known),
            (Some(Some(_)), None) => false,
            _ => true,
        };
        if better {
            answer = Some(holder);
        }
    }
    answer
}
