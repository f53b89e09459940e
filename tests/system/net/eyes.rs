//! Looks at nodes without being a member: their tables over links that are kept open.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use serde::de::DeserializeOwned;
use starling::control::{InstanceRow, NodeRow, op};
use starling_cluster::{link::ControlClient, security::KeyRing};
use tokio::{sync::Mutex as AsyncMutex, task::JoinSet};

use crate::harness::Node;

/// How long a node gets for an answer. A frozen node gives none.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// The kept links. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Eyes {
    /// Read anew for each link: the keys in it may be rolled.
    key: Arc<Path>,
    links: Arc<AsyncMutex<HashMap<Spot, Arc<ControlClient>>>>,
}

/// A node's address and process: a new process at an old address needs a new link.
type Spot = (SocketAddr, u32);

impl Eyes {
    pub(crate) fn new(key: &Path) -> Self {
        Self { key: key.into(), links: Arc::default() }
    }

    /// The members as a node sees them; `None` when it does not answer.
    pub(crate) async fn nodes(&self, at: &Node) -> Option<Vec<NodeRow>> {
        self.ask(spot(at), op::NODES).await
    }

    /// The instances as a node sees them.
    pub(crate) async fn instances(&self, at: &Node) -> Option<Vec<InstanceRow>> {
        self.ask(spot(at), op::INSTANCES).await
    }

    async fn ask<T: DeserializeOwned>(&self, at: Spot, op: &str) -> Option<T> {
        let asked = async {
            let kept = self.links.lock().await.get(&at).cloned();
            let link = match kept {
                Some(link) => link,
                None => {
                    let keys = KeyRing::load(&self.key).ok()?;
                    let link = Arc::new(ControlClient::connect(at.0, &keys).await.ok()?);
                    self.links.lock().await.insert(at, link.clone());
                    link
                }
            };
            link.call(op, Bytes::new(), ANSWER_WITHIN).await.ok()
        };
        let answer = tokio::time::timeout(ANSWER_WITHIN, asked).await.ok().flatten();
        match answer {
            Some(answer) => rmp_serde::from_slice(&answer).ok(),
            None => {
                self.links.lock().await.remove(&at);
                None
            }
        }
    }

    /// Whether these nodes see exactly these members, each once and alive; else what is wrong.
    pub(crate) async fn one_cluster(&self, nodes: &[&Node], names: &[&str]) -> Result<(), String> {
        let mut names = names.to_vec();
        names.sort_unstable();
        for node in nodes {
            let Some(rows) = self.nodes(node).await else { return Err(format!("{} does not answer", node.name)) };
            let seen: Vec<(&str, &str)> = rows.iter().map(|row| (row.name.as_str(), row.state.as_str())).collect();
            let all = seen.len() == names.len()
                && seen.iter().zip(&names).all(|((name, state), expected)| name == expected && *state == "alive");
            if !all {
                return Err(format!("{} sees {seen:?}, not {names:?}", node.name));
            }
        }
        Ok(())
    }

    /// Whether these nodes list the same instances, each once, all of living members and serving; else what is wrong.
    pub(crate) async fn same_instances(&self, nodes: &[&Node], count: usize) -> Result<(), String> {
        for node in nodes {
            let Some(rows) = self.instances(node).await else { return Err(format!("{} does not answer", node.name)) };
            let mut seen: Vec<(&str, &str)> =
                rows.iter().map(|row| (row.endpoint.as_str(), row.node.as_str())).collect();
            let listed = seen.len();
            seen.dedup();
            let well = rows.iter().all(|row| row.node_state == "alive" && row.lifecycle == "serving");
            if listed != count || seen.len() != count || !well {
                return Err(format!("{} lists {rows:?}, not {count} that serve", node.name));
            }
        }
        Ok(())
    }

    /// Follows how `observers` see `subjects` until the watch ends.
    pub(crate) fn watch(&self, observers: &[&Node], subjects: &[&str]) -> Watch {
        let seen: Arc<Mutex<BTreeMap<Lapse, Duration>>> = Arc::default();
        let looks: Arc<Mutex<BTreeMap<String, u64>>> = Arc::default();
        let mut tasks = JoinSet::new();
        let begun = Instant::now();
        for observer in observers {
            let (eyes, at, name) = (self.clone(), spot(observer), observer.name.clone());
            let subjects: Vec<String> = subjects.iter().map(|subject| (*subject).to_owned()).collect();
            let (seen, looks) = (seen.clone(), looks.clone());
            tasks.spawn(async move {
                loop {
                    if let Some(rows) = eyes.ask::<Vec<NodeRow>>(at, op::NODES).await {
                        *looks.lock().unwrap_or_else(PoisonError::into_inner).entry(name.clone()).or_default() += 1;
                        for subject in &subjects {
                            let row = rows.iter().find(|row| row.name == *subject);
                            let state = row.map_or("down", |row| row.state.as_str());
                            if state != "alive" {
                                let lapse =
                                    Lapse { observer: name.clone(), subject: subject.clone(), state: state.to_owned() };
                                let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                                seen.entry(lapse).or_insert(begun.elapsed());
                            }
                        }
                    }
                    tokio::time::sleep(LOOK_EVERY * 4).await;
                }
            });
        }
        Watch { seen, looks, tasks }
    }
}

fn spot(node: &Node) -> Spot {
    (node.address.parse().expect("an address"), node.pid)
}

/// A subject that was seen in another state than alive.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lapse {
    pub(crate) observer: String,
    pub(crate) subject: String,
    /// `suspect`, `unreachable`, or `down` when it was not listed.
    pub(crate) state: String,
}

/// A watch in the background; it ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    seen: Arc<Mutex<BTreeMap<Lapse, Duration>>>,
    looks: Arc<Mutex<BTreeMap<String, u64>>>,
    tasks: JoinSet<()>,
}

impl Watch {
    /// Ends the watch: who was not seen alive by whom, each once with the time of its first sight.
    pub(crate) fn end(mut self) -> Vec<(Lapse, Duration)> {
        self.tasks.abort_all();
        let looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(!looks.is_empty() && looks.values().all(|looks| *looks > 3), "too few looks: {looks:?}");
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().map(|(lapse, first)| (lapse.clone(), *first)).collect()
    }
}

/// Asks until nothing is wrong; how long it took. Fails with what was wrong last after `within`.
pub(crate) async fn settled<F: Future<Output = Result<(), String>>>(
    what: &str,
    within: Duration,
    state: impl FnMut() -> F,
) -> Duration {
    settled_for(what, within, Duration::ZERO, state).await
}

/// Asks until nothing is wrong for as long as `hold`; how long it took until nothing was wrong any more.
pub(crate) async fn settled_for<F: Future<Output = Result<(), String>>>(
    what: &str,
    within: Duration,
    hold: Duration,
    mut state: impl FnMut() -> F,
) -> Duration {
    let begun = Instant::now();
    let mut well: Option<Duration> = None;
    loop {
        match state().await {
            Ok(()) => {
                let since = *well.get_or_insert(begun.elapsed());
                if begun.elapsed().saturating_sub(since) >= hold {
                    return since;
                }
            }
            Err(wrong) => {
                if let Some(since) = well.take() {
                    eprintln!("{what}: well after {since:?}, wrong after {:?}: {wrong}", begun.elapsed());
                }
                assert!(begun.elapsed() < within, "not within {within:?}: {what}: {wrong}");
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
