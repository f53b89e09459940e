//! How many files this process may have open, and how many of them clients may take.
//!
//! Called at a node's start. Every client, every peer and every file takes one; the limit that most systems begin with
//! is 1,024, which a gateway reaches long before anything else is short.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises this process's limit to the most it may have.
pub(crate) fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::debug!(from = ?current, to = ?maximum, "more files may be open"),
        Err(error) => tracing::warn!(%error, "the limit of open files stays as it is"),
    }
}

/// Connections that clients may have: `wanted`, or what the limit leaves beside peers and files.
pub(crate) fn connections_max(wanted: usize) -> usize {
    let connections = share(wanted, getrlimit(Resource::Nofile).current);
    if connections < wanted {
        tracing::warn!(connections, wanted, "the limit of open files allows fewer connections; raise it (ulimit -Hn)");
    }
    connections
}

/// Three quarters of the limit at most; no limit gives all.
fn share(wanted: usize, limit: Option<u64>) -> usize {
    let share = limit.map_or(usize::MAX, |limit| usize::try_from(limit / 4 * 3).unwrap_or(usize::MAX));
    wanted.min(share).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lif_08_a_node_takes_all_open_files_it_may_have_and_leaves_some_for_peers() {
        raise();
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        assert_eq!(current, maximum);
        assert_eq!(share(8_192, Some(1_024)), 768);
        assert_eq!(share(8_192, Some(1 << 20)), 8_192);
        assert_eq!(share(8_192, None), 8_192);
        assert_eq!(share(8_192, Some(0)), 1);
    }
}
