//! Which of several instances takes the next request. Pure: counts, a turn and a random number come in.
//!
//! Called by clients with candidates sorted by node. Never: looks at the directory or a clock.

use std::{fmt, ops::Deref, sync::Arc};

use super::instances::InstanceView;
use crate::discovery::Routable;

/// An instance that may be chosen.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Who it is, with its labels.
    pub instance: Arc<InstanceView>,
    /// Requests that this client (and its clones) has open there.
    pub in_flight: usize,
}

type Custom = dyn Fn(&[Candidate]) -> Option<usize> + Send + Sync;

/// How an instance is chosen.
#[derive(Clone, Default)]
pub enum Picker {
    /// One after the other.
    #[default]
    RoundRobin,
    /// Any, all alike.
    Random,
    /// The one with the fewest open requests of this client; of several such, the next in turn.
    LeastInFlight,
    /// A function of the candidates: an index, or `None` to refuse them all.
    Custom(Arc<Custom>),
}

impl fmt::Debug for Picker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RoundRobin => "RoundRobin",
            Self::Random => "Random",
            Self::LeastInFlight => "LeastInFlight",
            Self::Custom(_) => "Custom",
        })
    }
}

impl Picker {
    /// The index of the chosen one. `turn` rises by one for each call, `chance` is any random number.
    pub(super) fn pick(&self, candidates: &[Candidate], turn: usize, chance: u64) -> Option<usize> {
        if candidates.is_empty() {
            return None;
        }
        let count = candidates.len();
        match self {
            Self::RoundRobin => Some(turn % count),
            Self::Random => usize::try_from(chance % count as u64).ok(),
            Self::LeastInFlight => {
                let by_load = |step: &usize| candidates[(turn + step) % count].in_flight;
                (0..count).min_by_key(by_load).map(|step| (turn + step) % count)
            }
            Self::Custom(choose) => choose(candidates).filter(|at| *at < count),
        }
    }
}

/// Those that may be called: all that serve on living nodes, or, when there is none, those on suspected ones.
pub(super) fn callable<V: Deref<Target = InstanceView>>(instances: impl Iterator<Item = V>) -> Vec<V> {
    let mut callable: Vec<V> = instances.filter(|view| view.is_callable()).collect();
    let alive = |view: &V| Routable::of(view.lifecycle, view.state) == Routable::Yes;
    if callable.iter().any(alive) {
        callable.retain(alive);
    }
    callable
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use starling_ids::{EndpointName, Incarnation, NodeId};

    use super::*;
    use crate::{
        discovery::{InstanceKind, Lifecycle, NodeState},
        program::instances::InstanceId,
    };

    fn instance(node: &str, lifecycle: Lifecycle, state: NodeState) -> InstanceView {
        InstanceView {
            id: InstanceId {
                endpoint: EndpointName::new("a/b/c").unwrap(),
                node: NodeId::new(node).unwrap(),
                incarnation: Incarnation(1),
            },
            kind: InstanceKind::Service,
            lifecycle,
            state,
            labels: BTreeMap::new(),
        }
    }

    fn candidates(loads: &[usize]) -> Vec<Candidate> {
        let candidate = |(at, load): (usize, &usize)| Candidate {
            instance: Arc::new(instance(&format!("n{at}"), Lifecycle::Serving, NodeState::Alive)),
            in_flight: *load,
        };
        loads.iter().enumerate().map(candidate).collect()
    }

    #[test]
    fn each_picker_keeps_its_word() {
        let three = candidates(&[2, 1, 1]);
        let turns = |picker: &Picker| (0..6).map(|turn| picker.pick(&three, turn, 0).unwrap()).collect::<Vec<_>>();
        assert_eq!(turns(&Picker::RoundRobin), [0, 1, 2, 0, 1, 2]);
        assert_eq!(turns(&Picker::LeastInFlight), [1, 1, 2, 1, 1, 2]);
        assert_eq!(Picker::Random.pick(&three, 0, u64::MAX), Some((u64::MAX % 3) as usize));
        let last = Picker::Custom(Arc::new(|candidates| candidates.len().checked_sub(1)));
        assert_eq!(last.pick(&three, 0, 0), Some(2));
        let wild = Picker::Custom(Arc::new(|_| Some(99)));
        assert_eq!(wild.pick(&three, 0, 0), None);
        for picker in [Picker::RoundRobin, Picker::Random, Picker::LeastInFlight, last] {
            assert_eq!(picker.pick(&[], 3, 7), None);
        }
    }

    #[test]
    fn only_those_that_serve_within_reach_are_called_and_suspects_last() {
        use Lifecycle::{Draining, Serving};
        let all = vec![
            instance("a", Draining, NodeState::Alive),
            instance("b", Serving, NodeState::Suspect),
            instance("c", Serving, NodeState::Unreachable),
        ];
        let names =
            |all: &[InstanceView]| callable(all.iter()).iter().map(|view| view.id.node.to_string()).collect::<Vec<_>>();
        assert_eq!(names(&all), ["b"]);
        let with_alive = [all, vec![instance("d", Serving, NodeState::Alive)]].concat();
        assert_eq!(names(&with_alive), ["d"]);
    }
}
