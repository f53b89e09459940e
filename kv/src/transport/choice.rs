//! Shell: which transport a pair of hosts uses: each one both have is tried for a few megabytes, and the fastest stays.
//!
//! Called by the fabric when it meets a peer. Never: measures TCP where memory can be shared, because sockets copy the same
//! bytes twice. Bounds: [`PROBE_LIMIT`] for each transport.

use std::time::{Duration, Instant};

use super::{
    Fabric,
    batch::{Batch, Direction, Page},
    descriptor::{Descriptor, TransportKind},
    error::TransferError,
    host::{Host, PROBE, PROBE_BYTES},
    region::Region,
    session::Session,
    ucx::UcxConfig,
};

/// The longest that a probe of one transport takes.
pub const PROBE_LIMIT: Duration = Duration::from_millis(500);
/// Times that the probe's region is read in one measurement.
const READS: usize = 4;
/// Measurements; the best counts, because a busy machine only ever makes one slower.
const ROUNDS: usize = 3;
/// How much faster a transport must be than one that comes before it: less is noise, and the earlier one costs the peer
/// less.
const BETTER: f64 = 1.25;

/// Which transports a process uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ways {
    /// The only one between processes; `None` measures those there are.
    pub only: Option<TransportKind>,
    /// Which UCX.
    pub ucx: UcxConfig,
}

impl Ways {
    /// The transports to start, best first. UCX is started by itself only where other machines can be peers (`near` is
    /// false): on one machine shared memory does the same without its cost.
    #[must_use]
    pub fn kinds(&self, near: bool) -> Vec<TransportKind> {
        let between = match self.only {
            Some(only) => vec![only],
            None if near => vec![TransportKind::Shm, TransportKind::Tcp],
            None => vec![TransportKind::Shm, TransportKind::Ucx, TransportKind::Tcp],
        };
        std::iter::once(TransportKind::Mem).chain(between).collect()
    }
}

/// The place of the one to keep among rates in bytes per second, the preferred transports first.
pub(super) fn fastest(rates: &[f64]) -> Option<usize> {
    let better = |best: Option<usize>, at: usize| match best {
        Some(best) if rates[at] <= rates[best] * BETTER => Some(best),
        _ => Some(at),
    };
    (0..rates.len()).fold(None, better)
}

/// See [`Fabric::choose`].
pub(super) fn choose(fabric: &Fabric, peer: &Descriptor) -> Result<Session, TransferError> {
    let have = fabric.kinds();
    let possible = |kind: TransportKind| peer.address(kind).is_some() && have.contains(&kind);
    if possible(TransportKind::Mem) && Host::find(peer.host).is_some() {
        return fabric.connect(peer, TransportKind::Mem);
    }
    let mut last = TransferError::Unreachable("no transport in common".to_owned());
    let (mut sessions, mut rates) = (Vec::new(), Vec::new());
    for kind in [TransportKind::Shm, TransportKind::Ucx, TransportKind::Tcp] {
        let shared = sessions.iter().any(|session: &Session| session.kind() == TransportKind::Shm);
        if !possible(kind) || (kind == TransportKind::Tcp && shared) {
            continue;
        }
        let tried = fabric.connect(peer, kind).and_then(|session| probe(&session, peer).map(|rate| (session, rate)));
        match tried {
            Ok((session, rate)) => {
                tracing::debug!(%kind, gb_per_s = rate / 1e9, "a way to a peer's memory was measured");
                sessions.push(session);
                rates.push(rate);
            }
            Err(error) => {
                tracing::debug!(%kind, %error, "no way to a peer's memory");
                last = error;
            }
        }
    }
    match fastest(&rates) {
        Some(best) => Ok(sessions.swap_remove(best)),
        None => Err(last),
    }
}

/// Reads the peer's probe region: once so that the connection is made, then to measure. Bytes per second.
fn probe(session: &Session, peer: &Descriptor) -> Result<f64, TransferError> {
    let until = Instant::now() + PROBE_LIMIT;
    let local = Region::private(READS * PROBE_BYTES)?;
    let read = |times: usize| {
        let page = |at: usize| Page { local: (at * PROBE_BYTES) as u64, remote: 0, len: PROBE_BYTES as u32 };
        let batch = Batch::new(Direction::Pull, &local, PROBE, (0..times).map(page).collect(), peer.door);
        session.post(batch.within(until.saturating_duration_since(Instant::now()))).wait()
    };
    let mut best: f64 = 0.0;
    for round in 0..=ROUNDS {
        let done = match read(if round == 0 { 1 } else { READS }) {
            Ok(done) => done,
            // Slow is an answer too.
            Err(TransferError::Timeout) if best > 0.0 => break,
            Err(error) => return Err(error),
        };
        best = best.max(done.bytes as f64 / done.took.as_secs_f64().max(1e-9));
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_wins_and_the_preferred_one_wins_a_near_tie() {
        assert_eq!(fastest(&[]), None);
        assert_eq!(fastest(&[5.0]), Some(0));
        assert_eq!(fastest(&[5.0, 6.0]), Some(0));
        assert_eq!(fastest(&[5.0, 6.5, 7.0]), Some(1));
        assert_eq!(fastest(&[5.0, 1.0, 9.0]), Some(2));
    }

    #[test]
    fn ucx_starts_by_itself_only_where_other_machines_can_be_peers() {
        use TransportKind::{Mem, Shm, Tcp, Ucx};
        assert_eq!(Ways::default().kinds(true), [Mem, Shm, Tcp]);
        assert_eq!(Ways::default().kinds(false), [Mem, Shm, Ucx, Tcp]);
        assert_eq!(Ways { only: Some(Ucx), ..Ways::default() }.kinds(true), [Mem, Ucx]);
    }
}
