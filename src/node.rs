//! A whole node: started step by step, ended in the reverse order.
//!
//! Called by `starling up` and `starling join`. Steps: metrics, data folder, key, model, mesh, cast, HTTP server,
//! node.json. A step that fails undoes those before it. Bounds: the drain ends after [`Config::drain`].

use std::{
    net::{SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use metrics_exporter_prometheus::PrometheusHandle;
use starling_actors::tree::{self, NodeOptions, WorkerRole};
use starling_cluster::{
    config::{ClusterConfig, Timings},
    discovery::{Instance, InstanceKind, Lifecycle},
    membership::{self, Seeds},
    mesh::{ClusterError, Failed, Mesh},
    security::{KeyError, KeyRing},
    supervise::{Policy, SuperviseError},
};
use starling_engine::{EngineKind, LoadError, LoadedModel, ModelOptions, sidecar::SidecarModel};
use starling_gateway::{Backend, GatewayConfig};
use starling_ids::EndpointName;
use starling_kv::{
    tier::{DiskOptions, TierOptions},
    transport::{UcxConfig, Ways},
};
use thiserror::Error;

use crate::{
    api_keys::{self, ApiKeysError},
    backend::{ClusterBackend, NodeBackend},
    config::Config,
    control,
    facts::Facts,
    home::{Home, HomeError, NodeFile},
    http_server::{HttpError, HttpServer},
    open_files,
    progress::LoadProgress,
    shutdown::Ending,
    telemetry,
};

/// How often histograms are folded, so that samples nobody scrapes do not pile up.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// Why a node did not start. Each message names the step's subject and what would be right.
#[derive(Debug, Error)]
pub enum StartError {
    /// The file with the API keys.
    #[error(transparent)]
    ApiKeys(#[from] ApiKeysError),
    /// The metrics recorder, which a process has once.
    #[error("metrics: {0}")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
    /// The data folder.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The cluster key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The model.
    #[error("model: {0}")]
    Model(#[from] LoadError),
    /// The node's place in the cluster.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The cast.
    #[error(transparent)]
    Cast(#[from] tree::NodeError),
    /// An actor.
    #[error(transparent)]
    Actor(#[from] SuperviseError),
    /// The folder of the disk tier.
    #[error("kv-disk: {0}: {1}")]
    Disk(PathBuf, std::io::Error),
    /// The HTTP server.
    #[error("HTTP: {0}")]
    Http(String),
    /// It gave up before it was ready.
    #[error("the node ended before it was ready: {0}")]
    Ended(String),
    /// Its boot counter had been lost; it is raised now, and a new start will do.
    #[error("{0}; it is raised now: start the node again")]
    Outlived(Failed),
}

impl From<HttpError> for StartError {
    fn from(error: HttpError) -> Self {
        Self::Http(error.to_string())
    }
}

/// How a node ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Asked once, everything finished or was cut off at its deadline.
    InOrder,
    /// Asked twice.
    AtOnce,
    /// It could not go on: too many restarts, or its name belongs to another node.
    Broken,
    /// Its boot counter had been lost; it is raised now, and a new start will do.
    Outlived,
}

/// A running node.
#[derive(Debug)]
pub struct Node {
    facts: Facts,
    home: Home,
    mesh: Mesh,
    cast: tree::Node,
    http: Option<HttpServer>,
    metrics: PrometheusHandle,
    drain: Duration,
}

impl Node {
    /// Starts everything the roles ask for; returns when requests can be served.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let metrics = telemetry::install()?;
        open_files::raise();
        let home = Home::claim(&config)?;
        let keys = keys(&home)?;
        let model = load_model(&config).await?;
        let served = model.as_ref().map(|model| model.card().id.to_string());
        let mesh = step("mesh", Box::pin(start_mesh(&config, &home, keys))).await?;
        match Box::pin(Self::on_mesh(&config, &mesh, model, &metrics)).await {
            Ok((cast, http)) => {
                let facts = facts(&config, &home, &mesh, served, http.as_ref());
                home.publish(&node_file(&facts, &home))?;
                Ok(Self { facts, home, mesh, cast, http, metrics, drain: config.drain })
            }
            Err(error) => {
                mesh.leave().await;
                if let StartError::Outlived(failed) = &error {
                    step_over(&home, failed);
                }
                Err(error)
            }
        }
    }

    /// What runs.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The node's place in the cluster, for programs that add their own actors.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Serves until a signal, or until the node cannot go on; then ends in order.
    pub async fn run_until(self, ending: &mut Ending) -> End {
        let end = tokio::select! {
            () = ending.signal() => End::InOrder,
            end = self.broken() => end,
            () = self.upkeep() => End::Broken,
        };
        tracing::info!(drain_secs = self.drain.as_secs(), "ending in order; a second signal ends at once");
        tokio::select! {
            () = Box::pin(self.end()) => end,
            () = ending.signal() => End::AtOnce,
        }
    }

    /// Ends in order: no new requests, those in flight finish, the cast stops, the cluster is told.
    pub async fn end(self) {
        let deadline = Instant::now() + self.drain;
        publish_gateway(&self.mesh, self.http.as_ref(), Lifecycle::Draining);
        if let Some(http) = &self.http {
            http.drain().await;
        }
        if !self.cast.drain(deadline.saturating_duration_since(Instant::now())).await {
            tracing::warn!("the drain time was over before all sequences ended");
        }
        self.cast.stop().await;
        self.mesh.leave().await;
        tracing::info!(name = %self.home.name, "ended");
    }

    /// Resolves when the node cannot go on.
    async fn broken(&self) -> End {
        let failed = self.mesh.failed().await;
        tracing::error!(reason = %failed, "the node cannot go on");
        if step_over(&self.home, &failed) { End::Outlived } else { End::Broken }
    }

    async fn upkeep(&self) {
        let mut ticks = tokio::time::interval(UPKEEP_EVERY);
        loop {
            ticks.tick().await;
            self.metrics.run_upkeep();
        }
    }

    async fn on_mesh(
        config: &Config,
        mesh: &Mesh,
        model: Option<Arc<dyn LoadedModel>>,
        metrics: &PrometheusHandle,
    ) -> Result<(tree::Node, Option<HttpServer>), StartError> {
        control::serve(mesh);
        let worker = model.map(|model| WorkerRole {
            model,
            engine: engine_label(config.engine).to_owned(),
            count: config.workers,
            duty: config.worker_role,
        });
        let policy = config.policy.clone();
        let tiers = tiers(config, mesh)?;
        let (queue, spread) = (config.queue.clone(), config.spread);
        let ucx = UcxConfig { library: config.ucx_lib.clone(), ..UcxConfig::default() };
        let ways = Ways { only: config.kv_transport, ucx };
        let (router, joins) = (config.roles.router, !config.seeds.is_empty());
        let (engine, planner) = (config.manner.clone(), config.planner.clone());
        let options = NodeOptions { worker, router, policy, tiers, engine, ways, queue, spread, planner, joins };
        let cast = step("cast", tree::Node::start(mesh, options)).await?;
        let ready = Arc::new(AtomicBool::new(false));
        let http = start_http(config, mesh, &cast, metrics, ready.clone()).await?;
        tokio::select! {
            () = step("workers", cast.ready()) => {}
            failed = mesh.failed() => return Err(match failed {
                Failed::Outlived { .. } => StartError::Outlived(failed),
                failed => StartError::Ended(failed.to_string()),
            }),
        }
        ready.store(true, Ordering::Release);
        publish_gateway(mesh, http.as_ref(), Lifecycle::Serving);
        Ok((cast, http))
    }
}

/// Raises the boot counter above a past life; whether that was the trouble and is mended.
fn step_over(home: &Home, failed: &Failed) -> bool {
    let Failed::Outlived { past, .. } = failed else { return false };
    let raised = membership::boot::raise_above(&home.dir, *past);
    raised.inspect_err(|error| tracing::error!(%error, "the boot counter was not raised")).is_ok()
}

/// Times a step for the log.
async fn step<T>(name: &'static str, work: impl Future<Output = T>) -> T {
    let begun = Instant::now();
    let result = work.await;
    tracing::debug!(step = name, ms = begun.elapsed().as_millis(), "start-up");
    result
}

/// Reads the cluster keys; makes one when this is the first start of the first node.
fn keys(home: &Home) -> Result<KeyRing, KeyError> {
    if home.make_key && !home.key_file.exists() {
        let keys = KeyRing::load_or_make(&home.key_file)?;
        tracing::info!(file = %home.key_file.display(), "made the cluster key; other machines need a copy to join");
        return Ok(keys);
    }
    KeyRing::load(&home.key_file)
}

/// Loads the model on a thread that may block; nothing without the worker role.
/// The tiers of each worker. The folder of the disk is looked at now, so that a wrong one is a failed start.
fn tiers(config: &Config, mesh: &Mesh) -> Result<TierOptions, StartError> {
    let disk = match config.kv_disk.as_ref().filter(|_| config.roles.worker) {
        None => None,
        Some(path) => {
            // Nodes of one machine may share a disk.
            let folder = path.join(mesh.node().as_str());
            std::fs::create_dir_all(&folder).map_err(|error| StartError::Disk(folder.clone(), error))?;
            Some(DiskOptions { folder, bytes: config.kv_disk_size, file: None })
        }
    };
    Ok(TierOptions { host_bytes: config.kv_host, disk })
}

async fn load_model(config: &Config) -> Result<Option<Arc<dyn LoadedModel>>, StartError> {
    if !config.roles.worker {
        return Ok(None);
    }
    let options = ModelOptions {
        kind: config.engine,
        path: config.model.clone(),
        served_name: config.served_name.clone(),
        threads: config.threads,
        kv_bytes: config.kv_bytes,
        sequences_max: config.sequences_max,
        waiting_max: config.waiting_max,
        batch_tokens_max: config.batch_tokens_max,
        kernel: config.kernel,
        activations: config.activations,
    };
    let file = config.model.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let server = config.server.clone();
    let loading = tokio::task::spawn_blocking(move || -> Result<Arc<dyn LoadedModel>, LoadError> {
        if let Some(server) = &server {
            return Ok(Arc::new(SidecarModel::load(&options, server)?));
        }
        let mut progress = LoadProgress::begin(file.as_deref().unwrap_or(engine_label(options.kind)));
        starling_engine::load(&options, &mut |news| progress.report(&news))
    });
    let loaded = step("model", loading).await;
    loaded.map_err(|error| StartError::Ended(error.to_string()))?.map(Some).map_err(StartError::Model)
}

async fn start_mesh(config: &Config, home: &Home, keys: KeyRing) -> Result<Mesh, ClusterError> {
    let bind = match (config.bind, Seeds::new(&config.seeds)) {
        (Some(bind), _) => bind,
        (None, Ok(seeds)) => towards(&seeds.resolve().await),
        // The mesh refuses such a seed by its name.
        (None, Err(_)) => towards(&[]),
    };
    Mesh::start(ClusterConfig {
        name: home.name.clone(),
        bind,
        advertise: config.advertise,
        seeds: config.seeds.clone(),
        data_dir: home.dir.clone(),
        keys,
        roles: config.roles.names(),
        http: None,
        labels: config.labels.clone(),
        software: concat!("starling ", env!("CARGO_PKG_VERSION")).to_owned(),
        timings: Timings::default(),
    })
    .await
}

/// This machine's address towards the first seed it has a route to, any free port; all addresses without one. Loopback
/// only when no seed is elsewhere: others could not reach it.
fn towards(seeds: &[SocketAddr]) -> SocketAddr {
    let source = |seed: &SocketAddr| {
        let any = if seed.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        // Connecting a datagram socket asks the routing table and sends nothing.
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(seed).ok()?;
        Some(SocketAddr::new(socket.local_addr().ok()?.ip(), 0))
    };
    let sources: Vec<SocketAddr> = seeds.iter().filter_map(source).collect();
    let elsewhere = sources.iter().find(|source| !source.ip().is_loopback());
    elsewhere.or(sources.first()).copied().unwrap_or_else(|| SocketAddr::from(([0, 0, 0, 0], 0)))
}

/// The HTTP server, when an address is set: the API with the gateway role, else health and metrics.
async fn start_http(
    config: &Config,
    mesh: &Mesh,
    cast: &tree::Node,
    metrics: &PrometheusHandle,
    ready: Arc<AtomicBool>,
) -> Result<Option<HttpServer>, StartError> {
    let Some(http) = config.http else { return Ok(None) };
    let api = config.roles.gateway;
    let (client, of) = (cast.client().clone(), mesh.clone());
    let backend: Arc<dyn Backend> =
        if api { Arc::new(ClusterBackend { client, mesh: of }) } else { Arc::new(NodeBackend { mesh: of, ready }) };
    let drain_ms_max = u64::try_from(config.drain.as_millis()).unwrap_or(u64::MAX);
    let settings = GatewayConfig::default();
    let connections_max = open_files::connections_max(settings.connections_max);
    let api_keys = config.api_keys_file.as_deref().map(api_keys::read).transpose()?.unwrap_or_default();
    let session_header = config.session_header.clone();
    let settings = GatewayConfig { http, drain_ms_max, connections_max, api_keys, session_header, ..settings };
    let metrics = metrics.clone();
    let render = Arc::new(move || metrics.render());
    let supervisor = mesh.supervisor().child_supervisor("gateway", Policy::default()).await?;
    let server = step("http", HttpServer::start(&supervisor, settings, backend, render, api)).await?;
    Ok(Some(server))
}

/// Tells the cluster where this node's HTTP server is and, with the gateway role, in which part of its life.
fn publish_gateway(mesh: &Mesh, http: Option<&HttpServer>, lifecycle: Lifecycle) {
    let Some(http) = http.map(HttpServer::address) else { return };
    let Ok(endpoint) = EndpointName::new("starling/gateway/http") else { return };
    let told = mesh.publish(|record| {
        record.http = Some(http);
        record.instances.retain(|instance| instance.endpoint != endpoint);
        if record.roles.iter().any(|role| role == "gateway") {
            let labels = [("http".to_owned(), http.to_string())].into();
            let gateway = Instance::new(endpoint, InstanceKind::Gateway, lifecycle);
            record.instances.push(Instance { labels, ..gateway });
        }
    });
    if let Err(error) = told {
        tracing::warn!(%error, "the cluster was not told about this gateway");
    }
}

fn facts(config: &Config, home: &Home, mesh: &Mesh, model: Option<String>, http: Option<&HttpServer>) -> Facts {
    Facts {
        name: home.name.clone(),
        address: mesh.address(),
        http: http.map(HttpServer::address),
        roles: config.roles,
        model,
        workers: config.workers,
        program: std::env::args().next().unwrap_or_else(|| "starling".to_owned()),
        key_file: home.key_file.display().to_string(),
        key_is_default: home.key_is_default(),
    }
}

fn node_file(facts: &Facts, home: &Home) -> NodeFile {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    NodeFile {
        name: facts.name.clone(),
        address: facts.address,
        http: facts.http,
        pid: std::process::id(),
        started: since_epoch.as_secs(),
        key_file: home.key_file.clone(),
    }
}

fn engine_label(engine: EngineKind) -> &'static str {
    match engine {
        EngineKind::Embedded => "embedded",
        EngineKind::Simulated => "simulated",
        EngineKind::Sidecar(dialect) => dialect.label(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_beside_its_seed_binds_loopback() {
        let bind = towards(&["127.0.0.1:7400".parse().unwrap()]);
        assert_eq!(bind.to_string(), "127.0.0.1:0");
        assert!(towards(&[]).ip().is_unspecified());
    }
}
