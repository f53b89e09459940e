//! Turns the text of a setting into its type, or says which setting, from where, and what would be right.
//!
//! Called by [`super::Config::from_layers`]. Pure, but for the look whether a program is there.

use std::{
    collections::BTreeMap, net::SocketAddr, ops::RangeInclusive, os::unix::fs::PermissionsExt, path::PathBuf,
    str::FromStr, time::Duration,
};

use super::{
    ConfigError, LogFormat, Roles,
    layers::{Layered, Source, Value},
    settings::setting,
};
use starling_actors::{
    plan::Rules,
    planner::{PlannerOptions, hook::Hook},
    route::{
        policy::{PolicyConfig, PolicyError, Table},
        queue::{Order, QueueConfig, rooms::Rooms},
        spread::SpreadRule,
    },
    tree::EngineManner,
};
use starling_cluster::{discovery::LABEL_MAX, membership::Seeds};
use starling_engine::{Activations, EngineKind, KernelChoice, sidecar::ServerOptions};
use starling_kv::transport::TransportKind;

/// Reads typed values out of the layers.
pub(super) struct Reader<'a>(pub(super) &'a Layered);

impl Reader<'_> {
    fn value(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    fn wrong(&self, name: &'static str) -> ConfigError {
        let (text, origin) = self
            .value(name)
            .map_or_else(|| (String::new(), "default".to_owned()), |v| (v.text.clone(), v.source.to_string()));
        let rule = setting(name).map_or("", |known| known.rule);
        ConfigError::Value { name, text: text.chars().take(120).collect(), origin, rule }
    }

    /// A value that parses by its own rules; `None` when it is derived at start.
    pub(super) fn parsed<T: FromStr>(&self, name: &'static str) -> Result<Option<T>, ConfigError> {
        self.value(name).map(|v| v.text.trim().parse().map_err(|_| self.wrong(name))).transpose()
    }

    /// A whole number in a range. The table gives each of them a default.
    pub(super) fn number(&self, name: &'static str, range: RangeInclusive<u64>) -> Result<u64, ConfigError> {
        self.parsed(name)?.filter(|n| range.contains(n)).ok_or_else(|| self.wrong(name))
    }

    /// A preset by its name, or a table.
    pub(super) fn policy(&self) -> Result<PolicyConfig, ConfigError> {
        let text = self.value("policy").map_or("", |v| v.text.trim());
        let table = if text.starts_with('{') { format!("policy = {text}") } else { String::new() };
        let read = || -> Result<PolicyConfig, String> {
            if table.is_empty() {
                return Ok(PolicyConfig::named(text.parse().map_err(|error: PolicyError| error.to_string())?));
            }
            let mut document: BTreeMap<String, Table> =
                toml::from_str(&table).map_err(|error| format!("policy: {}", error.message()))?;
            let config = PolicyConfig::try_from(document.remove("policy").unwrap_or_default());
            config.map_err(|error| error.to_string())
        };
        let origin = || self.value("policy").map_or_else(String::new, |v| v.source.to_string());
        let wrong = |reason: String| ConfigError::Policy { origin: origin(), reason };
        let config = read().map_err(wrong)?;
        config.build().map_err(|error| wrong(error.to_string()))?;
        Ok(config)
    }

    /// The name of a header, in lower case.
    pub(super) fn session_header(&self) -> Result<String, ConfigError> {
        let text = self.value("session-header").map_or("", |v| v.text.trim()).to_ascii_lowercase();
        let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_');
        let right = (1..=64).contains(&text.len()) && text.bytes().all(good);
        if right { Ok(text) } else { Err(self.wrong("session-header")) }
    }

    /// A number of bytes in a range: a whole number, a binary unit may follow.
    pub(super) fn bytes(&self, name: &'static str, range: RangeInclusive<u64>) -> Result<u64, ConfigError> {
        let text = self.value(name).map_or("", |v| v.text.trim());
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let shift = match unit.trim() {
            "" | "B" => 0,
            "KiB" => 10,
            "MiB" => 20,
            "GiB" => 30,
            "TiB" => 40,
            _ => return Err(self.wrong(name)),
        };
        let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
        bytes.filter(|bytes| range.contains(bytes)).ok_or_else(|| self.wrong(name))
    }

    /// A path, not empty.
    pub(super) fn path(&self, name: &'static str) -> Result<Option<PathBuf>, ConfigError> {
        match self.value(name) {
            Some(v) if v.text.is_empty() => Err(self.wrong(name)),
            found => Ok(found.map(|v| PathBuf::from(&v.text))),
        }
    }

    /// `none`, or an address; the outer `None` when nobody said anything.
    pub(super) fn http(&self) -> Result<Option<Option<SocketAddr>>, ConfigError> {
        match self.value("http") {
            Some(v) if v.text.trim() == "none" => Ok(Some(None)),
            _ => Ok(self.parsed("http")?.map(Some)),
        }
    }

    /// An address that others can reach; the port may be 0.
    pub(super) fn advertise(&self) -> Result<Option<SocketAddr>, ConfigError> {
        let address: Option<SocketAddr> = self.parsed("advertise")?;
        if address.is_some_and(|a| a.ip().is_unspecified()) { Err(self.wrong("advertise")) } else { Ok(address) }
    }

    /// `host:port` or `file:path`, several of them.
    pub(super) fn seeds(&self) -> Result<Vec<String>, ConfigError> {
        let text = self.value("seeds").map_or("", |v| v.text.as_str());
        let seeds: Vec<String> = text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned).collect();
        if Seeds::new(&seeds).is_ok() { Ok(seeds) } else { Err(self.wrong("seeds")) }
    }

    /// `KEY=VALUE`, several of them; the last of one key counts.
    pub(super) fn labels(&self) -> Result<BTreeMap<String, String>, ConfigError> {
        let text = self.value("label").map_or("", |v| v.text.as_str());
        let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
        let pair = |pair: &str| {
            let (key, value) = pair.split_once('=')?;
            let (key, value) = (key.trim(), value.trim());
            let right = !key.is_empty() && key.len() <= LABEL_MAX && value.len() <= LABEL_MAX;
            right.then(|| (key.to_owned(), value.to_owned()))
        };
        let labels: Option<BTreeMap<String, String>> = pairs.map(pair).collect();
        labels.filter(|labels| labels.len() <= 64).ok_or_else(|| self.wrong("label"))
    }

    /// How KV blocks move between processes; `None` for the fastest.
    pub(super) fn transport(&self) -> Result<Option<TransportKind>, ConfigError> {
        match self.value("kv-transport").map(|v| v.text.trim()) {
            Some("auto") => Ok(None),
            Some("shm") => Ok(Some(TransportKind::Shm)),
            Some("ucx") => Ok(Some(TransportKind::Ucx)),
            Some("tcp") => Ok(Some(TransportKind::Tcp)),
            _ => Err(self.wrong("kv-transport")),
        }
    }

    /// Who waits at the router.
    pub(super) fn queue(&self) -> Result<QueueConfig, ConfigError> {
        let order = match self.value("queue-order").map(|v| v.text.trim()) {
            Some("cached") => Order::Cached,
            Some("deadline") => Order::Deadline,
            Some("shortest-miss") => Order::ShortestMiss,
            _ => return Err(self.wrong("queue-order")),
        };
        let places = usize::try_from(self.number("queue-max", 0..=1_048_576)?).unwrap_or(usize::MAX);
        let wait_ms_max = self.number("queue-secs", 1..=86_400)?.saturating_mul(1_000);
        // A named tenant may take half of the places, so that one that floods leaves room for the others.
        let tenant_places = places.div_ceil(2);
        let prefill_steps = u32::try_from(self.number("queue-prefill-steps", 0..=1_024)?).unwrap_or(u32::MAX);
        let defaults = QueueConfig::default();
        let passed_ms_max = self.number("queue-ahead-secs", 0..=3_600)?.saturating_mul(1_000);
        let kv_percent = u32::try_from(self.number("queue-kv-percent", 0..=1_000)?).unwrap_or(u32::MAX);
        let rooms = Rooms { prefill_steps, kv_percent, ..defaults.rooms };
        Ok(QueueConfig { places, tenant_places, wait_ms_max, order, passed_ms_max, rooms, ..defaults })
    }

    /// When a model's decisions are spread over more routers.
    pub(super) fn spread(&self) -> Result<SpreadRule, ConfigError> {
        let per_second = u32::try_from(self.number("shard-decisions", 1..=1_000_000)?).unwrap_or(u32::MAX);
        Ok(SpreadRule { per_second: f64::from(per_second), ..SpreadRule::default() })
    }

    /// How the planner plans.
    pub(super) fn planner(&self) -> Result<PlannerOptions, ConfigError> {
        // Ranges far below what the types hold.
        let count = |name, range| Ok(u32::try_from(self.number(name, range)?).unwrap_or(u32::MAX));
        let ms = |name, range| count(name, range).map(f64::from);
        let rules = Rules {
            mode: self.parsed("planner")?.unwrap_or_default(),
            ttft_ms: ms("planner-ttft-ms", 1..=3_600_000)?,
            itl_ms: ms("planner-itl-ms", 1..=60_000)?,
            min: count("planner-min", 1..=1_024)?,
            max: count("planner-max", 1..=65_536)?,
            interval: Duration::from_secs(self.number("planner-interval", 1..=3_600)?),
            predictor: self.parsed("planner-predictor")?.unwrap_or_default(),
            ..Rules::default()
        };
        let limit = Duration::from_secs(self.number("planner-hook-secs", 1..=3_600)?);
        let path = self.path("planner-hook")?;
        let runs = |path: &PathBuf| {
            let file = std::fs::metadata(path);
            file.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
        };
        if path.as_ref().is_some_and(|path| !runs(path)) {
            return Err(self.wrong("planner-hook"));
        }
        Ok(PlannerOptions { rules, hook: path.map(|path| Hook { path, limit }) })
    }

    /// What engines have and do beside the model.
    /// `silent`: nobody tells what the engine stores.
    pub(super) fn manner(&self, silent: bool) -> Result<EngineManner, ConfigError> {
        let off = match self.value("kv-events").map_or("on", |value| value.text.as_str()) {
            "on" => false,
            "off" => true,
            _ => return Err(self.wrong("kv-events")),
        };
        let names = self.value("adapters").map_or("", |value| value.text.as_str());
        let names = names.split(',').map(str::trim).filter(|_| !names.trim().is_empty());
        let adapters: Vec<String> = names.map(str::to_owned).collect();
        let good = |name: &String| (1..=128).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        if adapters.len() > 64 || !adapters.iter().all(good) {
            return Err(self.wrong("adapters"));
        }
        Ok(EngineManner { kv_silent: off || silent, fault: self.parsed("fault")?.unwrap_or_default(), adapters })
    }

    /// Which roles.
    pub(super) fn roles(&self) -> Result<Roles, ConfigError> {
        let text = self.value("role").map_or("", |v| v.text.as_str());
        let mut roles = Roles::default();
        for word in text.split(',').map(str::trim) {
            match word {
                "worker" => roles.worker = true,
                "router" => roles.router = true,
                "gateway" => roles.gateway = true,
                "all" => roles = Roles { worker: true, router: true, gateway: true },
                _ => return Err(self.wrong("role")),
            }
        }
        Ok(roles)
    }

    /// Which engine.
    pub(super) fn engine(&self) -> Result<EngineKind, ConfigError> {
        match self.value("engine").map(|v| v.text.trim()) {
            Some("embedded") => Ok(EngineKind::Embedded),
            Some("simulated") => Ok(EngineKind::Simulated),
            Some(word) => word.parse().map(EngineKind::Sidecar).map_err(|_| self.wrong("engine")),
            None => Err(self.wrong("engine")),
        }
    }

    /// The server behind an engine in another process.
    pub(super) fn server(&self, engine: EngineKind) -> Result<Option<ServerOptions>, ConfigError> {
        let url = self.parsed("engine-url")?;
        let (events, replay) = (self.parsed("engine-events")?, self.parsed("engine-replay")?);
        let key_file = self.path("engine-key-file")?;
        let EngineKind::Sidecar(dialect) = engine else {
            let said = ["engine-url", "engine-events", "engine-replay", "engine-key-file"];
            return match said.into_iter().find(|name| self.value(name).is_some()) {
                None => Ok(None),
                Some(name) => Err(ConfigError::Together(format!(
                    "{name} is for an engine in another process: give --engine vllm, sglang, llama.cpp or openai as well, \
                     or leave it out"
                ))),
            };
        };
        let url = url.ok_or_else(|| {
            ConfigError::Together(format!("engine {dialect} needs the address of its server: give --engine-url URL"))
        })?;
        if events.is_some() && !dialect.has_events() {
            let text = format!("engine-events: an engine of kind {dialect} publishes none; leave it out");
            return Err(ConfigError::Together(text));
        }
        if replay.is_some() && events.is_none() {
            let text = "engine-replay: give --engine-events as well, which it completes".to_owned();
            return Err(ConfigError::Together(text));
        }
        Ok(Some(ServerOptions { dialect, url, events, replay, key_file }))
    }

    /// How many workers. There is one in front of a server: more would be the same one.
    pub(super) fn workers(&self, fronts: bool) -> Result<u64, ConfigError> {
        let count = self.number("workers", 1..=64)?;
        let said = self.value("workers").is_some_and(|value| value.source != Source::Default);
        match (fronts, said && count > 1) {
            (false, _) => Ok(count),
            (true, false) => Ok(1),
            (true, true) => Err(ConfigError::Together(
                "workers: a process has one worker in front of a server; start a process for each server".to_owned(),
            )),
        }
    }

    /// Which inner loops.
    pub(super) fn kernel(&self) -> Result<KernelChoice, ConfigError> {
        match self.value("kernel").map(|v| v.text.trim()) {
            Some("auto") => Ok(KernelChoice::Auto),
            Some("avx512") => Ok(KernelChoice::Avx512),
            Some("avx2") => Ok(KernelChoice::Avx2),
            Some("portable") => Ok(KernelChoice::Portable),
            _ => Err(self.wrong("kernel")),
        }
    }

    /// How activations are rounded.
    pub(super) fn activations(&self) -> Result<Activations, ConfigError> {
        match self.value("activations").map(|v| v.text.trim()) {
            Some("int8") => Ok(Activations::Int8),
            Some("int16") => Ok(Activations::Int16),
            _ => Err(self.wrong("activations")),
        }
    }

    /// Which form of log.
    pub(super) fn log(&self) -> Result<LogFormat, ConfigError> {
        match self.value("log").map(|v| v.text.trim()) {
            Some("human") => Ok(LogFormat::Human),
            Some("json") => Ok(LogFormat::Json),
            _ => Err(self.wrong("log")),
        }
    }

    /// A filter that the log understands.
    pub(super) fn log_level(&self) -> Result<String, ConfigError> {
        let text = self.value("log-level").map_or("info", |v| v.text.trim());
        let bare = !text.contains(['=', ',']);
        let level = matches!(text, "error" | "warn" | "info" | "debug" | "trace" | "off");
        if bare != level || text.parse::<tracing_subscriber::filter::EnvFilter>().is_err() {
            return Err(self.wrong("log-level"));
        }
        Ok(text.to_owned())
    }
}
