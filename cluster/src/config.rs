//! What a node needs to know to take part in a cluster, checked once before anything starts.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use starling_ids::NodeId;
use thiserror::Error;

use crate::{
    discovery::LABEL_MAX,
    membership::{SeedError, Seeds},
    security::KeyRing,
    wire::limits,
};

/// Labels of one node.
const LABELS_MAX: usize = 64;

/// The configuration of one node.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    /// Its stable name.
    pub name: NodeId,
    /// Where it listens: TCP for links and sessions, UDP for gossip, the same port.
    pub bind: SocketAddr,
    /// What others dial, when it differs from `bind`. Found by the route to the seeds when `bind` is a wildcard.
    pub advertise: Option<SocketAddr>,
    /// Nodes to join through: `host:port`, or `file:path` with one a line. Several, in any order of start, tried for ever;
    /// of a name all addresses.
    pub seeds: Vec<String>,
    /// Where the boot counter is kept.
    pub data_dir: PathBuf,
    /// The secrets that make it a member. When they came from a file, a roll is kept there.
    pub keys: KeyRing,
    /// `worker`, `router`, `gateway`.
    pub roles: Vec<String>,
    /// Where its gateway listens, if it has one.
    pub http: Option<SocketAddr>,
    /// Free labels of the node: `zone`, `rack`. Keys and values of at most [`LABEL_MAX`] bytes.
    pub labels: BTreeMap<String, String>,
    /// Name and version of the software, for tables.
    pub software: String,
    /// Waits and periods of links.
    pub timings: Timings,
}

/// Waits and periods of links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timings {
    /// A link without streams is closed after this long by the side that dialled it, after twice as long by the other.
    pub link_idle: Duration,
    /// A link with streams and nothing received for this long is pinged, and again after each such time.
    pub ping_every: Duration,
    /// A link with streams and nothing received for this long is broken. At least twice `ping_every`.
    pub silence_max: Duration,
    /// Longest TCP connect of a dial.
    pub dial_max: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            link_idle: Duration::from_secs(60),
            ping_every: Duration::from_secs(1),
            silence_max: Duration::from_secs(5),
            dial_max: limits::DIAL_TIME_MAX,
        }
    }
}

/// A setting that cannot work. The message names the field and says what would be right.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{field}: {rule}")]
pub struct ConfigError {
    /// Which field.
    pub field: &'static str,
    /// What would be right.
    pub rule: String,
}

impl ConfigError {
    pub(crate) fn seeds(error: SeedError) -> Self {
        Self { field: "seeds", rule: error.to_string() }
    }
}

impl ClusterConfig {
    /// Checks everything that can be checked without the network.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let refuse = |field, rule: &str| Err(ConfigError { field, rule: rule.to_owned() });
        if self.advertise.is_some_and(|address| address.ip().is_unspecified()) {
            return refuse("advertise", "0.0.0.0 and [::] cannot be dialled; give an address of this machine");
        }
        Seeds::new(&self.seeds).map_err(ConfigError::seeds)?;
        let long =
            |(key, value): (&String, &String)| key.is_empty() || key.len() > LABEL_MAX || value.len() > LABEL_MAX;
        if self.labels.len() > LABELS_MAX || self.labels.iter().any(long) {
            let rule = format!("at most {LABELS_MAX} labels, each KEY=VALUE of at most {LABEL_MAX} bytes a side");
            return refuse("labels", &rule);
        }
        if self.timings.ping_every.is_zero() || self.timings.silence_max < self.timings.ping_every * 2 {
            return refuse("timings", "silence_max must be at least twice ping_every, and that above zero");
        }
        limits::check().map_err(|rule| ConfigError { field: "limits", rule })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ClusterConfig {
        ClusterConfig {
            name: NodeId::new("a").unwrap(),
            bind: "127.0.0.1:7000".parse().unwrap(),
            advertise: None,
            seeds: vec!["b.example:7000".into(), "[::1]:7000".into()],
            data_dir: PathBuf::from("data"),
            keys: crate::security::ClusterKey::from_bytes([1; 32]).into(),
            roles: Vec::new(),
            http: None,
            labels: BTreeMap::new(),
            software: "test".into(),
            timings: Timings::default(),
        }
    }

    #[test]
    fn a_usable_configuration_passes() {
        assert_eq!(config().validate(), Ok(()));
    }

    #[test]
    fn mem_13_a_wildcard_address_is_never_advertised() {
        let bind: SocketAddr = "0.0.0.0:7000".parse().unwrap();
        assert_eq!(ClusterConfig { advertise: Some(bind), ..config() }.validate().unwrap_err().field, "advertise");
        let advertise = Some("10.0.0.1:7000".parse().unwrap());
        assert_eq!(ClusterConfig { bind, advertise, ..config() }.validate(), Ok(()));
    }

    #[test]
    fn each_refusal_names_its_field() {
        let seeds = vec!["nowhere".to_owned()];
        assert_eq!(ClusterConfig { seeds, ..config() }.validate().unwrap_err().field, "seeds");
        let labels = [(String::new(), "x".to_owned())].into();
        assert_eq!(ClusterConfig { labels, ..config() }.validate().unwrap_err().field, "labels");
        let timings = Timings { silence_max: Duration::from_secs(1), ..Timings::default() };
        assert_eq!(ClusterConfig { timings, ..config() }.validate().unwrap_err().field, "timings");
    }
}
