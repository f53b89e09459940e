//! A configuration for programs: sensible values for everything but the name, the key and the seeds.
//!
//! Called by programs before [`Mesh::join`].

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use starling_ids::{NameError, NodeId};

use crate::{
    config::{ClusterConfig, Timings},
    mesh::{ClusterError, Mesh},
    security::{ClusterKey, KeyError},
};

impl ClusterConfig {
    /// A program named `name`: any free port of the address that routes to the first seed, its boot counter under
    /// `.starling/NAME` in the working folder.
    pub fn program(name: &str, key: ClusterKey) -> Result<Self, NameError> {
        Ok(Self {
            name: NodeId::new(name)?,
            bind: SocketAddr::from(([0, 0, 0, 0], 0)),
            advertise: None,
            seeds: Vec::new(),
            data_dir: PathBuf::from(".starling").join(name),
            key,
            roles: Vec::new(),
            http: None,
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
    /// Joins a cluster through the configuration's seeds, or begins one when there are none. The same as
    /// [`Mesh::start`].
    pub async fn join(config: ClusterConfig) -> Result<Self, ClusterError> {
        Self::start(config).await
    }
}

impl ClusterKey {
    /// Reads a key file, or makes it when there is none. Of several processes that start together, one makes it.
    pub fn load_or_make(path: &Path) -> Result<Self, KeyError> {
        if !path.exists() {
            match Self::generate().store(path) {
                Ok(()) => {}
                Err(_) if path.exists() => tracing::debug!("another process made the key file"),
                Err(error) => return Err(error),
            }
        }
        Self::load(path)
    }
}
