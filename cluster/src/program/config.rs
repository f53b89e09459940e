//! How a program joins: a name, a key, seeds; sensible values for everything else.
//!
//! Called by programs before [`Mesh::join`]. Nothing is checked before the join, so that a configuration is one
//! expression; what is wrong then is told with the name of the field.

use std::{collections::BTreeMap, convert::Infallible, net::SocketAddr, path::PathBuf};

use starling_ids::{NameError, NodeId};

use crate::{
    config::{ClusterConfig, ConfigError, Timings},
    mesh::{ClusterError, Mesh},
    security::KeyRing,
};

/// Where the key comes from.
#[derive(Debug, Clone)]
enum KeyFrom {
    Given(KeyRing),
    File(PathBuf),
    FileOrNew(PathBuf),
}

/// A program's way into a cluster.
///
/// ```
/// use starling_cluster::program::JoinConfig;
/// let config = JoinConfig::new("shop-1").key_file("cluster.key").seed("10.0.0.1:7400");
/// ```
#[derive(Debug, Clone)]
pub struct JoinConfig {
    name: String,
    key: Option<KeyFrom>,
    seeds: Vec<String>,
    bind: SocketAddr,
    advertise: Option<SocketAddr>,
    data_dir: Option<PathBuf>,
    software: String,
    timings: Timings,
}

impl JoinConfig {
    /// A program named `name`, unique in the cluster: 1 to 48 of `a-z 0-9 . _ -`. Unless set otherwise it listens on any
    /// free port, is reached at the address that routes to its first seed, and keeps its boot counter under
    /// `.starling/NAME` in the working folder.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            key: None,
            seeds: Vec::new(),
            bind: SocketAddr::from(([0, 0, 0, 0], 0)),
            advertise: None,
            data_dir: None,
            software: "program".to_owned(),
            timings: Timings::default(),
        }
    }

    /// The cluster's key, from the file that `starling up` wrote.
    #[must_use]
    pub fn key_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.key = Some(KeyFrom::File(path.into()));
        self
    }

    /// The same, made when there is no such file: for the program that begins a cluster.
    #[must_use]
    pub fn key_file_or_new(mut self, path: impl Into<PathBuf>) -> Self {
        self.key = Some(KeyFrom::FileOrNew(path.into()));
        self
    }

    /// A key or a ring that the program has; [`crate::security::ClusterKey::generate`] makes a key. A roll is kept only
    /// in the file of a ring that came from one.
    #[must_use]
    pub fn key(mut self, keys: impl Into<KeyRing>) -> Self {
        self.key = Some(KeyFrom::Given(keys.into()));
        self
    }

    /// One more `host:port` or `file:path` to join through. Without any the program begins a cluster, or waits for others to join it.
    #[must_use]
    pub fn seed(mut self, address: impl Into<String>) -> Self {
        self.seeds.push(address.into());
        self
    }

    /// Where it listens; port 0 takes any free one.
    #[must_use]
    pub fn bind(mut self, address: SocketAddr) -> Self {
        self.bind = address;
        self
    }

    /// What others dial, when that is another address than `bind`.
    #[must_use]
    pub fn advertise(mut self, address: SocketAddr) -> Self {
        self.advertise = Some(address);
        self
    }

    /// Where its boot counter is kept; it must outlive the program.
    #[must_use]
    pub fn data_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.data_dir = Some(folder.into());
        self
    }

    /// Name and version of the program, for tables.
    #[must_use]
    pub fn software(mut self, software: impl Into<String>) -> Self {
        self.software = software.into();
        self
    }

    /// Waits and periods of links.
    #[must_use]
    pub fn timings(mut self, timings: Timings) -> Self {
        self.timings = timings;
        self
    }
}

impl TryFrom<JoinConfig> for ClusterConfig {
    type Error = ClusterError;

    fn try_from(config: JoinConfig) -> Result<Self, ClusterError> {
        let missing = || ConfigError {
            field: "key",
            rule: "give the cluster's key with `key_file`, or begin a cluster with `key_file_or_new`".to_owned(),
        };
        let keys = match config.key.ok_or_else(missing)? {
            KeyFrom::Given(key) => key,
            KeyFrom::File(path) => KeyRing::load(&path)?,
            KeyFrom::FileOrNew(path) => KeyRing::load_or_make(&path)?,
        };
        let program = Self::program(&config.name, keys)?;
        let built = Self {
            bind: config.bind,
            advertise: config.advertise,
            seeds: config.seeds,
            data_dir: config.data_dir.unwrap_or(program.data_dir),
            software: config.software,
            timings: config.timings,
            ..program
        };
        built.validate()?;
        Ok(built)
    }
}

impl From<Infallible> for ClusterError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl ClusterConfig {
    /// A program named `name`: any free port of the address that routes to the first seed, its boot counter under
    /// `.starling/NAME` in the working folder. [`JoinConfig`] builds one field by field.
    pub fn program(name: &str, keys: impl Into<KeyRing>) -> Result<Self, NameError> {
        Ok(Self {
            name: NodeId::new(name)?,
            bind: SocketAddr::from(([0, 0, 0, 0], 0)),
            advertise: None,
            seeds: Vec::new(),
            data_dir: PathBuf::from(".starling").join(name),
            keys: keys.into(),
            roles: Vec::new(),
            http: None,
            labels: BTreeMap::new(),
            software: "program".to_owned(),
            timings: Timings::default(),
        })
    }

    /// One more `host:port` to join through.
    #[must_use]
    pub fn seed(mut self, address: impl Into<String>) -> Self {
        self.seeds.push(address.into());
        self
    }

    /// Where it listens; port 0 takes any free one.
    #[must_use]
    pub fn bind(mut self, address: SocketAddr) -> Self {
        self.bind = address;
        self
    }

    /// Where its boot counter is kept.
    #[must_use]
    pub fn data_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.data_dir = folder.into();
        self
    }
}

impl Mesh {
    /// Joins a cluster through the seeds of a [`JoinConfig`] (or [`ClusterConfig`]), or begins one when there are none.
    ///
    /// Returns as soon as the node answers; other members appear as gossip finds them. An error names the field.
    pub async fn join<C>(config: C) -> Result<Self, ClusterError>
    where
        C: TryInto<ClusterConfig>,
        ClusterError: From<C::Error>,
    {
        Self::start(config.try_into()?).await
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::security::ClusterKey;

    fn refused(config: JoinConfig) -> String {
        ClusterConfig::try_from(config).unwrap_err().to_string()
    }

    #[test]
    fn a_configuration_is_one_expression_and_each_refusal_names_its_field() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.key");
        let missing = refused(JoinConfig::new("shop-1").key_file(&path));
        assert!(missing.starts_with("key file /"), "{missing}");
        let made = ClusterConfig::try_from(JoinConfig::new("shop-1").key_file_or_new(&path)).unwrap();
        assert_eq!(made.data_dir, Path::new(".starling/shop-1"));
        let joined = JoinConfig::new("shop-2").key_file(&path).seed("10.0.0.1:7400").data_dir("d");
        let joined = ClusterConfig::try_from(joined).unwrap();
        assert_eq!((joined.keys.ids(), joined.data_dir.as_path()), (made.keys.ids(), Path::new("d")));
        let key = ClusterKey::generate;
        for (config, field) in [
            (JoinConfig::new("shop-1"), "key: "),
            (JoinConfig::new("Shop 1").key(key()), "node name: \"Shop 1\""),
            (JoinConfig::new("shop-1").key(key()).seed("nowhere"), "seeds: \"nowhere\""),
            (JoinConfig::new("shop-1").key(key()).advertise(([0, 0, 0, 0], 1).into()), "advertise: "),
        ] {
            let told = refused(config);
            assert!(told.starts_with(field), "{told}");
        }
    }
}
