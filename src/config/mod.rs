//! One configuration: defaults under a TOML file under environment variables under flags.
//!
//! [`settings`] is the table of all settings, [`layers`] puts the sources on top of each other, [`Config`] is the typed
//! and checked result. Called by the command line. The only place that reads environment variables.
//! Never: opens a socket or makes a folder; what depends on the machine's state is decided by [`crate::home`].

mod layers;
mod parse;
pub mod settings;

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use starling_actors::{
    planner::PlannerOptions,
    route::{policy::PolicyConfig, queue::QueueConfig, split::Role, spread::SpreadRule},
    tree::EngineManner,
};
use starling_engine::{Activations, EngineKind, KernelChoice, sidecar::ServerOptions, simulated::faults::Fault};
use starling_ids::{ModelId, NodeId};
use starling_kv::transport::TransportKind;
use thiserror::Error;

pub use layers::{Layered, Source, Value};

/// File name of the model that `make model` brings.
pub const DEFAULT_MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Why a configuration was refused. Each names the setting and says what would be right.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be used.
    #[error("{path}: {reason}")]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// One value is wrong by itself.
    #[error("{name} = {text:?} ({origin}): must be {rule}")]
    Value {
        /// The setting.
        name: &'static str,
        /// The value, cut to 120 characters.
        text: String,
        /// Where it was said.
        origin: String,
        /// What would be right.
        rule: &'static str,
    },
    /// The policy cannot be composed.
    #[error("{reason} ({origin})")]
    Policy {
        /// Where it was said.
        origin: String,
        /// Which key of it is wrong, and what would be right.
        reason: String,
    },
    /// Two values that cannot work together, or one that is missing.
    #[error("{0}")]
    Together(String),
}

/// Which parts a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Roles {
    /// Engines.
    pub worker: bool,
    /// Router shard and index.
    pub router: bool,
    /// The OpenAI API.
    pub gateway: bool,
}

impl Roles {
    /// The names, sorted.
    #[must_use]
    pub fn names(self) -> Vec<String> {
        let all = [(self.gateway, "gateway"), (self.router, "router"), (self.worker, "worker")];
        all.into_iter().filter(|(on, _)| *on).map(|(_, name)| name.to_owned()).collect()
    }
}

/// Form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
}

/// The effective configuration of one node, checked by [`Config::validate`].
#[derive(Debug, Clone)]
pub struct Config {
    /// Started by `starling join` rather than `starling up`.
    pub join: bool,
    /// The node's name; `None` lets the data folder decide.
    pub name: Option<NodeId>,
    /// What runs.
    pub roles: Roles,
    /// Cluster address, UDP and TCP; port 0 takes a free one. `None` is this machine's address towards the first seed.
    pub bind: Option<SocketAddr>,
    /// What others dial; `None` is the bind address. Port 0 means the bound port.
    pub advertise: Option<SocketAddr>,
    /// HTTP server: the API with the gateway role, health and metrics with any. Port 0 takes a free one.
    pub http: Option<SocketAddr>,
    /// A GGUF file or a folder; set whenever an embedded worker runs.
    pub model: Option<PathBuf>,
    /// Name that clients use; `None` derives it from the model.
    pub served_name: Option<ModelId>,
    /// What computes.
    pub engine: EngineKind,
    /// The server behind it, when it computes in another process.
    pub server: Option<ServerOptions>,
    /// Inner loops of the embedded engine.
    pub kernel: KernelChoice,
    /// How the embedded engine rounds activations.
    pub activations: Activations,
    /// Workers in this process, 1 to 64; 0 without the worker role.
    pub workers: u16,
    /// Compute threads of the process, 0 to 1024; 0 is one per core.
    pub threads: usize,
    /// KV memory of each worker in bytes.
    pub kv_bytes: usize,
    /// Memory of each worker for blocks that leave its pool, bytes; 0 for none.
    pub kv_host: u64,
    /// Folder for blocks that leave the memory; `None` for no disk tier.
    pub kv_disk: Option<PathBuf>,
    /// Bytes of blocks of each worker in it.
    pub kv_disk_size: u64,
    /// The only way of blocks between processes; `None` keeps the fastest.
    pub kv_transport: Option<TransportKind>,
    /// The UCX to load instead of the system's.
    pub ucx_lib: Option<PathBuf>,
    /// Sequences decoded together by one worker, 1 to 1024.
    pub sequences_max: u32,
    /// Sequences waiting at one worker, 1 to 65,536.
    pub waiting_max: u32,
    /// Tokens computed in one step, 16 to 65,536.
    pub batch_tokens_max: u32,
    /// How long requests in flight may take to finish at the end, up to a day.
    pub drain: Duration,
    /// Data folder; `None` lets [`crate::home`] choose one.
    pub data_dir: Option<PathBuf>,
    /// Key file; `None` is `cluster.key` of the data folder of `starling up`.
    pub key_file: Option<PathBuf>,
    /// How the router chooses workers.
    pub policy: PolicyConfig,
    /// The request header that names a session, in lower case.
    pub session_header: String,
    /// Who waits at the router, and for how long.
    pub queue: QueueConfig,
    /// How its planner plans.
    pub planner: PlannerOptions,
    /// When a model's decisions are spread over more routers.
    pub spread: SpreadRule,
    /// What its workers are for.
    pub worker_role: Role,
    /// What its engines have and do beside the model itself.
    pub manner: EngineManner,
    /// File with the API keys of the gateway; `None` leaves the API open.
    pub api_keys_file: Option<PathBuf>,
    /// Members to join by, `host:port` or `file:path`.
    pub seeds: Vec<String>,
    /// Labels of this node.
    pub labels: BTreeMap<String, String>,
    /// Form of the log.
    pub log: LogFormat,
    /// Filter of the log.
    pub log_level: String,
}

impl Config {
    /// Reads file and environment, puts the flags on top, types and checks the result.
    ///
    /// `flags` are (setting, text); `file` is the value of `--config`, before `STARLING_CONFIG`.
    pub fn load(join: bool, file: Option<PathBuf>, flags: &[(&'static str, String)]) -> Result<Self, ConfigError> {
        Self::from_layers(join, &Self::layers(join, file, flags)?)?.validate()
    }

    /// The layered values as text, each with its source; what `starling config` prints.
    pub fn layers(join: bool, file: Option<PathBuf>, flags: &[(&'static str, String)]) -> Result<Layered, ConfigError> {
        let path = file.or_else(|| variable("STARLING_CONFIG").filter(|p| !p.is_empty()).map(PathBuf::from));
        let file = path
            .map(|path| match std::fs::read_to_string(&path) {
                Ok(text) => Ok((path, text)),
                Err(e) => Err(ConfigError::File { path, reason: format!("cannot be read: {e}") }),
            })
            .transpose()?;
        layers::layer(join, file, &variable, flags)
    }

    /// Types the layered values. Pure apart from the place of the default model.
    pub fn from_layers(join: bool, layered: &Layered) -> Result<Self, ConfigError> {
        let read = parse::Reader(layered);
        let roles = read.roles()?;
        let engine = read.engine()?;
        let embedded = roles.worker && engine == EngineKind::Embedded;
        let gateway_http = roles.gateway.then(|| SocketAddr::from(([127, 0, 0, 1], 0)));
        let kv_mib = read.number("kv-mib", 8..=1_048_576)?;
        let server = read.server(engine)?;
        let workers = read.workers(server.is_some())?;
        let silent = server.as_ref().is_some_and(|server| server.events.is_none());
        Ok(Self {
            join,
            name: read.parsed("name")?,
            roles,
            bind: read.parsed("bind")?,
            advertise: read.advertise()?,
            http: read.http()?.unwrap_or(gateway_http),
            model: read.path("model")?.or_else(|| embedded.then(default_model).flatten()),
            served_name: read.parsed("served-name")?,
            engine,
            server,
            kernel: read.kernel()?,
            activations: read.activations()?,
            workers: if roles.worker { narrow(workers) } else { 0 },
            threads: narrow(read.number("threads", 0..=1024)?),
            kv_bytes: narrow::<usize>(kv_mib).saturating_mul(1 << 20),
            kv_host: read.bytes("kv-host", 0..=1 << 50)?,
            kv_disk: read.path("kv-disk")?,
            kv_disk_size: read.bytes("kv-disk-size", 1 << 20..=1 << 50)?,
            kv_transport: read.transport()?,
            ucx_lib: read.path("ucx-lib")?,
            sequences_max: narrow(read.number("sequences-max", 1..=1024)?),
            waiting_max: narrow(read.number("waiting-max", 1..=65_536)?),
            batch_tokens_max: narrow(read.number("batch-tokens-max", 16..=65_536)?),
            drain: Duration::from_secs(read.number("drain-secs", 0..=86_400)?),
            data_dir: read.path("data-dir")?,
            key_file: read.path("key-file")?,
            policy: read.policy()?,
            session_header: read.session_header()?,
            queue: read.queue()?,
            planner: read.planner()?,
            spread: read.spread()?,
            worker_role: read.parsed("worker-role")?.unwrap_or_default(),
            manner: read.manner(silent)?,
            api_keys_file: read.path("api-keys-file")?,
            seeds: read.seeds()?,
            labels: read.labels()?,
            log: read.log()?,
            log_level: read.log_level()?,
        })
    }

    /// Checks what single values cannot show, and hands the configuration back.
    pub fn validate(self) -> Result<Self, ConfigError> {
        let wrong = |text: &str| Err(ConfigError::Together(text.to_owned()));
        if self.join && self.seeds.is_empty() {
            return wrong("no seed: `starling join HOST:PORT` needs the address of at least one member");
        }
        if self.roles.gateway && self.http.is_none() {
            return wrong("role gateway needs an address: give --http ADDR, or leave the role out");
        }
        if self.batch_tokens_max < self.sequences_max {
            return wrong("batch-tokens-max is below sequences-max: one step must hold one token of every sequence");
        }
        if let (Some(bind), Some(advertise)) = (self.bind, self.advertise)
            && bind.is_ipv4() != advertise.is_ipv4()
        {
            return wrong("bind and advertise are of different families: both IPv4 or both IPv6");
        }
        if self.planner.rules.min > self.planner.rules.max {
            return wrong("planner-min is above planner-max: there must be room for as many workers as there must be");
        }
        if !self.manner.adapters.is_empty() && self.engine != EngineKind::Simulated {
            return wrong(
                "only the simulated engine has adapters: give --engine simulated as well, or leave --adapters out",
            );
        }
        if self.manner.fault != Fault::None && self.engine != EngineKind::Simulated {
            return wrong(
                "only the simulated engine has faults on command: give --engine simulated as well, or leave --fault out",
            );
        }
        if self.roles.worker && self.engine != EngineKind::Simulated {
            self.check_model()?;
        }
        Ok(self)
    }

    fn check_model(&self) -> Result<(), ConfigError> {
        let Some(path) = &self.model else {
            if let Some(server) = &self.server {
                let dialect = server.dialect;
                return Err(ConfigError::Together(format!(
                    "engine {dialect} needs the model's tokenizer: give --model with the model's folder or GGUF file"
                )));
            }
            return Err(ConfigError::Together(
                "no model: neither HOME nor XDG_CACHE_HOME is set, so give --model PATH".to_owned(),
            ));
        };
        if path.exists() {
            return Ok(());
        }
        let path = path.display();
        Err(ConfigError::Together(format!(
            "model: {path} does not exist; `make model` in the source folder brings it, or give --model PATH"
        )))
    }
}

/// A number whose range was checked before.
fn narrow<T: TryFrom<u64> + Default>(number: u64) -> T {
    T::try_from(number).unwrap_or_default()
}

/// An environment variable as text; one that is not UTF-8 counts as not set.
#[expect(clippy::disallowed_methods, reason = "this is the one place where the environment is read")]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// `$XDG_DATA_HOME/starling`, else `~/.local/share/starling`.
pub(crate) fn data_home() -> Option<PathBuf> {
    Some(base("XDG_DATA_HOME", ".local/share")?.join("starling"))
}

fn default_model() -> Option<PathBuf> {
    Some(base("XDG_CACHE_HOME", ".cache")?.join("starling/models").join(DEFAULT_MODEL))
}

/// A base folder by the XDG rule: the variable when it is an absolute path, else below the home folder.
fn base(name: &str, below_home: &str) -> Option<PathBuf> {
    let given = variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    given.or_else(|| variable("HOME").filter(|home| !home.is_empty()).map(|home| PathBuf::from(home).join(below_home)))
}

#[cfg(test)]
mod tests {
    use starling_actors::{plan::Mode, planner::hook::Hook};

    use super::*;

    fn typed(join: bool, flags: &[(&'static str, &str)]) -> Result<Config, ConfigError> {
        let flags: Vec<_> = flags.iter().map(|(name, text)| (*name, (*text).to_owned())).collect();
        let layered = layers::layer(join, None, &|_| None, &flags)?;
        Config::from_layers(join, &layered)?.validate()
    }

    #[test]
    fn defaults_of_up_are_a_whole_node_on_loopback() {
        let config = typed(false, &[("engine", "simulated")]).unwrap();
        assert_eq!(config.roles.names(), ["gateway", "router", "worker"]);
        assert_eq!(config.bind, Some("127.0.0.1:7400".parse().unwrap()));
        assert_eq!(config.http, Some("127.0.0.1:8000".parse().unwrap()));
        assert_eq!(config.workers, 2);
    }

    #[test]
    fn defaults_of_join_leave_ports_free_and_run_one_worker() {
        let config = typed(true, &[("engine", "simulated"), ("seeds", "127.0.0.1:7400")]).unwrap();
        assert_eq!((config.bind, config.http, config.workers), (None, None, 1));
        let config = typed(true, &[("role", "router,gateway"), ("seeds", "a:1,b:2")]).unwrap();
        assert_eq!(config.http.map(|a| a.port()), Some(0));
        assert_eq!(config.workers, 0);
        assert_eq!(config.seeds, ["a:1", "b:2"]);
        let config =
            typed(true, &[("engine", "simulated"), ("seeds", "a:1"), ("label", "zone=north, rack=7=b")]).unwrap();
        assert_eq!(config.labels, [("rack", "7=b"), ("zone", "north")].map(|(k, v)| (k.into(), v.into())).into());
    }

    #[test]
    fn tiers_are_sized_with_units() {
        let flags = [("engine", "simulated"), ("kv-host", "2 GiB"), ("kv-disk", "/tmp/x"), ("kv-disk-size", "100MiB")];
        let config = typed(false, &flags).unwrap();
        assert_eq!((config.kv_host, config.kv_disk_size), (2 << 30, 100 << 20));
        assert_eq!(config.kv_disk, Some(PathBuf::from("/tmp/x")));
        let config = typed(false, &[("engine", "simulated"), ("kv-transport", "ucx")]).unwrap();
        assert_eq!(config.kv_transport, Some(TransportKind::Ucx));
        let config = typed(false, &[("engine", "simulated"), ("kv-host", "4096")]).unwrap();
        assert_eq!(config.kv_transport, None);
        assert_eq!((config.kv_host, config.kv_disk), (4_096, None));
    }

    #[test]
    fn a_planner_advises_unless_told_otherwise() {
        let planner = |flags: &[(&'static str, &str)]| {
            typed(false, &[&[("engine", "simulated")], flags].concat()).map(|config| config.planner)
        };
        let default = planner(&[]).unwrap();
        assert_eq!((default.rules.mode, default.hook), (Mode::Advise, None));
        let hook = [("planner", "act"), ("planner-hook", "/bin/true"), ("planner-hook-secs", "5")];
        let acting = planner(&hook).unwrap();
        assert_eq!((acting.rules.mode, acting.rules.max), (Mode::Act, 8));
        assert_eq!(acting.hook, Some(Hook { path: "/bin/true".into(), limit: Duration::from_secs(5) }));
        let error = planner(&[("planner-min", "9")]).unwrap_err().to_string();
        assert!(error.contains("planner-max"), "{error}");
    }

    #[test]
    fn faults_are_for_the_simulated_engine_alone() {
        let flags = [("engine", "simulated"), ("fault", "slow=2.5"), ("kv-events", "off"), ("adapters", "law, poems")];
        let manner = typed(false, &flags).unwrap().manner;
        assert_eq!((manner.fault, manner.kv_silent), (Fault::Slow(2.5), true));
        assert_eq!(manner.adapters, ["law", "poems"]);
        let manner = typed(false, &[("engine", "simulated")]).unwrap().manner;
        assert_eq!((manner.fault, manner.adapters.len()), (Fault::None, 0));
        let refused = typed(false, &[("engine", "embedded"), ("adapters", "law")]);
        assert!(refused.unwrap_err().to_string().contains("only the simulated engine has adapters"));
        let refused = typed(false, &[("engine", "embedded"), ("fault", "hang")]).and_then(Config::validate);
        assert!(refused.unwrap_err().to_string().contains("--engine simulated"));
    }

    #[test]
    fn an_engine_elsewhere_needs_its_address_and_a_tokenizer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let (vllm, url) = (("engine", "vllm"), ("engine-url", "http://127.0.0.1:8001"));
        let config = typed(false, &[vllm, url, ("model", path)]).unwrap();
        assert_eq!((config.workers, config.manner.kv_silent), (1, true));
        assert_eq!(config.server.unwrap().url.to_string(), "http://127.0.0.1:8001");
        let events = ("engine-events", "tcp://127.0.0.1:5557");
        let config = typed(false, &[vllm, url, events, ("model", path)]).unwrap();
        assert!(!config.manner.kv_silent && config.server.unwrap().events.is_some());
        let error = |flags: &[(&'static str, &str)]| typed(false, flags).unwrap_err().to_string();
        assert!(error(&[vllm, ("model", path)]).contains("--engine-url"));
        assert!(error(&[vllm, url]).contains("--model"));
        assert!(error(&[url]).contains("engine-url is for an engine in another process"));
        assert!(error(&[vllm, url, ("workers", "2"), ("model", path)]).contains("workers"));
        assert!(error(&[vllm, url, ("engine-replay", "tcp://a:1"), ("model", path)]).contains("--engine-events"));
        assert!(error(&[("engine", "llama.cpp"), url, events, ("model", path)]).contains("engine-events"));
    }

    #[test]
    fn wrong_values_name_the_setting_the_source_and_the_rule() {
        for (name, text) in [
            ("workers", "0"),
            ("workers", "many"),
            ("bind", "localhost"),
            ("advertise", "0.0.0.0:7400"),
            ("engine", "tgi"),
            ("engine-url", "https://a:1"),
            ("engine-events", "tcp://*:5557"),
            ("engine-replay", "5558"),
            ("role", "boss"),
            ("log", "xml"),
            ("log-level", "loud"),
            ("kv-mib", "7"),
            ("kv-host", "2GB"),
            ("kv-disk-size", "1000"),
            ("kv-disk-size", "99999999TiB"),
            ("kv-transport", "mem"),
            ("kv-events", "maybe"),
            ("fault", "slow=1"),
            ("adapters", "law,,poems"),
            ("name", "Not A Name"),
            ("seeds", "host-without-port"),
            ("label", "=north"),
            ("label", "zone=north,rack"),
            ("session-header", "x session"),
            ("planner", "on"),
            ("planner-ttft-ms", "0"),
            ("planner-max", "70000"),
            ("planner-interval", "0"),
            ("planner-predictor", "arima"),
            ("planner-hook", "/nowhere/hook"),
            ("planner-hook", "/"),
        ] {
            let error =
                typed(true, &[("seeds", "a:1"), ("engine", "simulated"), (name, text)]).unwrap_err().to_string();
            assert!(error.starts_with(name) && error.contains("flag") && error.contains("must be"), "{error}");
        }
    }

    #[test]
    fn a_policy_is_a_name_or_a_table_and_errors_name_the_key() {
        let policy =
            |text: &str| typed(false, &[("engine", "simulated"), ("policy", text)]).map(|config| config.policy);
        assert_eq!(policy("p2c").unwrap().label(), "p2c");
        let composed = policy("{ scorers = ['prefix', { name = 'fill', weight = 2.0 }], picker = 'softmin' }").unwrap();
        assert_eq!((composed.label(), composed.scorers.len()), ("composed", 2));
        for (text, key, right) in [
            ("robin", "policy.name", "round-robin"),
            ("{ scorers = ['prefx'] }", "policy.scorers[0].name", "did you mean prefix?"),
            ("{ picker = { name = 'softmin', temperature = 'hot' } }", "policy.picker.temperature", "a number"),
            ("{ scorers = ", "policy", ""),
        ] {
            let error = policy(text).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains(right) && error.contains("flag"), "{error}");
        }
    }

    #[test]
    fn combinations_that_cannot_work_are_refused() {
        let error = |join, flags: &[(&'static str, &str)]| typed(join, flags).unwrap_err().to_string();
        assert!(error(true, &[("engine", "simulated")]).contains("seed"));
        assert!(error(false, &[("engine", "simulated"), ("http", "none")]).contains("--http"));
        assert!(error(false, &[("model", "/nowhere/x.gguf")]).contains("make model"));
        assert!(error(false, &[("engine", "simulated"), ("advertise", "[::1]:7400")]).contains("famil"));
    }
}
