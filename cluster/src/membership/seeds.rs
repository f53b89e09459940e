//! Turns seeds as people write them into addresses, again and again.
//!
//! A seed is an address, a name with all its addresses (a Kubernetes headless service has one for each pod), or a file
//! that lists such seeds. Names are looked up and files are read anew each time; what a seed gave last stays while it
//! fails. Called by the gossip thread, at start, and by whoever looks for members.
//! Bounds: [`RESOLVE_MAX`] for one name, [`FILE_MAX`] bytes of a file, [`ADDRESSES_MAX`] addresses in all.

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, Read},
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::BoxFuture;
use starling_ids::Metric;
use thiserror::Error;

/// Longest wait for the resolver.
const RESOLVE_MAX: Duration = Duration::from_secs(2);
/// Longest file of seeds.
const FILE_MAX: u64 = 64 << 10;
/// Addresses that are used; further ones are left out.
const ADDRESSES_MAX: usize = 4096;

/// The text is no seed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not a seed: give HOST:PORT, [IPV6]:PORT or file:PATH")]
pub struct SeedError(String);

/// Where to look for members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seed {
    /// `10.0.0.5:7400`, `[fd00::5]:7400`.
    Address(SocketAddr),
    /// `starling.example.org:7400`: all addresses of the name, of both families.
    Name(String, u16),
    /// `file:/etc/starling/seeds`: one address or name a line, `#` begins a comment.
    File(PathBuf),
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Name(host, port) => write!(f, "{host}:{port}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

impl FromStr for Seed {
    type Err = SeedError;

    fn from_str(text: &str) -> Result<Self, SeedError> {
        let refuse = || SeedError(text.chars().take(120).collect());
        if let Some(path) = text.strip_prefix("file:") {
            return if path.is_empty() { Err(refuse()) } else { Ok(Self::File(path.into())) };
        }
        if let Ok(address) = text.parse::<SocketAddr>() {
            let usable = address.port() != 0 && !address.ip().is_unspecified();
            return if usable { Ok(Self::Address(address)) } else { Err(refuse()) };
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(refuse)?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        // A host of digits and dots alone is an address that did not parse.
        let named = host.bytes().all(plain) && host.bytes().any(|byte| byte.is_ascii_alphabetic()) && host.len() <= 253;
        match port.parse() {
            Ok(port) if port > 0 && named => Ok(Self::Name(host.to_owned(), port)),
            _ => Err(refuse()),
        }
    }
}

/// Looks up the addresses of a host and port.
pub type Lookup = Arc<dyn Fn(String, u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync>;

/// The seeds of one node, and what came of each of them last. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct Seeds(Arc<Inner>);

struct Inner {
    list: Vec<Seed>,
    lookup: Lookup,
    lookup_max: Duration,
    known: Mutex<BTreeMap<String, Known>>,
}

/// What came of one seed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Known {
    addresses: Vec<SocketAddr>,
    fault: Option<String>,
}

impl fmt::Debug for Seeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Seeds({self})")
    }
}

/// As they were written, joined by commas.
impl fmt::Display for Seeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.list.iter().map(Seed::to_string).collect();
        f.write_str(&texts.join(","))
    }
}

impl Seeds {
    /// Reads each text; the first that is no seed is an error.
    pub fn new(texts: &[String]) -> Result<Self, SeedError> {
        let system: Lookup =
            Arc::new(|host, port| Box::pin(async move { Ok(tokio::net::lookup_host((host, port)).await?.collect()) }));
        let list = texts.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
        Ok(Self::with_lookup(list, system, RESOLVE_MAX))
    }

    /// Looks names up in another way, each within `lookup_max`.
    #[must_use]
    pub fn with_lookup(list: Vec<Seed>, lookup: Lookup, lookup_max: Duration) -> Self {
        Self(Arc::new(Inner { list, lookup, lookup_max, known: Mutex::default() }))
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.list.is_empty()
    }

    /// All addresses of all seeds, sorted, each once. A seed that fails now gives what it gave last. Each new failure is
    /// logged once, and so is its end.
    pub async fn resolve(&self) -> Vec<SocketAddr> {
        let mut outcomes: Vec<(String, Result<Vec<SocketAddr>, String>)> = Vec::new();
        let mut entries = Vec::new();
        for seed in &self.0.list {
            match seed {
                Seed::File(path) => match read(path).await {
                    Ok(listed) => {
                        outcomes.push((seed.to_string(), Ok(Vec::new())));
                        for (line, text) in listed {
                            match text.parse() {
                                Ok(entry @ (Seed::Address(_) | Seed::Name(..))) => entries.push(entry),
                                _ => outcomes.push((format!("{seed} line {line}"), Err("not HOST:PORT".to_owned()))),
                            }
                        }
                    }
                    Err(error) => {
                        outcomes.push((seed.to_string(), Err(error.to_string())));
                        entries.extend(self.listed_before());
                    }
                },
                seed => entries.push(seed.clone()),
            }
        }
        let lookups = entries.iter().map(|entry| async move { (entry.to_string(), self.look_up(entry).await) });
        outcomes.extend(futures::future::join_all(lookups).await);
        self.note(outcomes)
    }

    /// Why seeds give nothing new, by seed.
    #[must_use]
    pub fn faults(&self) -> BTreeMap<String, String> {
        let known = self.0.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().filter_map(|(seed, known)| Some((seed.clone(), known.fault.clone()?))).collect()
    }

    /// What is known and not in the list came from files: it stays while they cannot be read.
    fn listed_before(&self) -> Vec<Seed> {
        let known = self.0.known.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = |seed: &Seed| !matches!(seed, Seed::File(_)) && !self.0.list.contains(seed);
        known.keys().filter_map(|seed| seed.parse().ok()).filter(entry).collect()
    }

    async fn look_up(&self, seed: &Seed) -> Result<Vec<SocketAddr>, String> {
        let (host, port) = match seed {
            Seed::Address(address) => return Ok(vec![*address]),
            Seed::Name(host, port) => (host.clone(), *port),
            Seed::File(_) => return Ok(Vec::new()),
        };
        match tokio::time::timeout(self.0.lookup_max, (self.0.lookup)(host, port)).await {
            Ok(Ok(addresses)) if addresses.is_empty() => Err("the name has no address".to_owned()),
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("the name service gave no answer within {:?}", self.0.lookup_max)),
        }
    }

    /// Remembers what came of each seed, says what has changed, and gives all addresses.
    fn note(&self, outcomes: Vec<(String, Result<Vec<SocketAddr>, String>)>) -> Vec<SocketAddr> {
        let mut known = self.0.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = BTreeMap::new();
        for (seed, outcome) in outcomes {
            let mut now = known.get(&seed).cloned().unwrap_or_default();
            match outcome {
                Ok(mut addresses) => {
                    addresses.sort_unstable();
                    if now.fault.take().is_some() {
                        tracing::info!(%seed, addresses = addresses.len(), "the seed is found again");
                    }
                    now.addresses = addresses;
                }
                Err(fault) if now.fault.as_ref() != Some(&fault) => {
                    tracing::warn!(%seed, %fault, still_used = now.addresses.len(), "no address for a seed; tried again for ever");
                    now.fault = Some(fault);
                }
                Err(_) => {}
            }
            next.insert(seed, now);
        }
        *known = next;
        let failing = known.values().filter(|known| known.fault.is_some()).count();
        metrics::gauge!(Metric::SeedsFailing.name()).set(f64::from(u32::try_from(failing).unwrap_or(u32::MAX)));
        let mut addresses: Vec<SocketAddr> = known.values().flat_map(|known| known.addresses.iter().copied()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses.truncate(ADDRESSES_MAX);
        addresses
    }
}

/// The lines of a file that say something, with their numbers.
async fn read(path: &Path) -> io::Result<Vec<(usize, String)>> {
    let path = path.to_owned();
    // A file on a network may take its time.
    let reading = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        std::fs::File::open(&path)?.take(FILE_MAX).read_to_string(&mut text)?;
        Ok::<_, io::Error>(text)
    });
    let text = match tokio::time::timeout(RESOLVE_MAX, reading).await {
        Ok(read) => read.map_err(io::Error::other)??,
        Err(_) => return Err(io::Error::from(io::ErrorKind::TimedOut)),
    };
    let plain = |line: &str| line.split('#').next().unwrap_or_default().trim().to_owned();
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, plain(line)));
    Ok(lines.filter(|(_, line)| !line.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("address")
    }

    /// Names and their addresses, changed by the test while seeds look them up.
    type Zone = Arc<Mutex<BTreeMap<String, Vec<&'static str>>>>;

    fn seeds(texts: &[&str], zone: &Zone) -> Seeds {
        let zone = zone.clone();
        let lookup: Lookup = Arc::new(move |host, port| {
            let found = zone.lock().expect("zone").get(&host).cloned();
            Box::pin(async move {
                if host == "hangs" {
                    std::future::pending::<()>().await;
                }
                let found = found.ok_or_else(|| io::Error::other("no such name"))?;
                Ok(found.iter().map(|ip| SocketAddr::new(ip.parse().expect("ip"), port)).collect())
            })
        });
        let list = texts.iter().map(|text| text.parse().expect("seed")).collect();
        Seeds::with_lookup(list, lookup, Duration::from_millis(20))
    }

    fn set(zone: &Zone, name: &str, ips: &[&'static str]) {
        zone.lock().expect("zone").insert(name.to_owned(), ips.to_vec());
    }

    #[test]
    fn a_seed_is_an_address_a_name_or_a_file() {
        assert_eq!("10.0.0.5:7400".parse(), Ok(Seed::Address(at("10.0.0.5:7400"))));
        assert_eq!("[fd00::5]:7400".parse(), Ok(Seed::Address(at("[fd00::5]:7400"))));
        assert_eq!("starling-0.svc_a.local:7400".parse(), Ok(Seed::Name("starling-0.svc_a.local".into(), 7400)));
        assert_eq!("file:/etc/seeds".parse(), Ok(Seed::File("/etc/seeds".into())));
        for bad in [
            "",
            "nowhere",
            ":7400",
            "a:0",
            "a:70000",
            "a:x",
            "::1:7400",
            "0.0.0.0:1",
            "10.0.0:7400",
            "a b:1",
            "file:",
            "http://a:1",
        ] {
            let error = bad.parse::<Seed>().expect_err(bad).to_string();
            assert!(error.contains("HOST:PORT") && error.contains("file:PATH"), "{error}");
        }
    }

    #[tokio::test]
    async fn all_addresses_of_all_seeds_are_taken_once() {
        let zone = Zone::default();
        set(&zone, "pods", &["10.0.0.2", "10.0.0.1", "fd00::1"]);
        let seeds = seeds(&["10.0.0.1:7", "pods:7", "pods:7", "[fd00::1]:7", "pods:8"], &zone);
        let all = ["10.0.0.1:7", "10.0.0.1:8", "10.0.0.2:7", "10.0.0.2:8", "[fd00::1]:7", "[fd00::1]:8"];
        assert_eq!(seeds.resolve().await, all.map(at));
        assert!(seeds.faults().is_empty());
    }

    #[tokio::test]
    async fn names_are_looked_up_again_and_keep_their_addresses_while_they_fail() {
        let zone = Zone::default();
        let seeds = seeds(&["pods:7", "10.0.0.9:7", "hangs:7"], &zone);
        assert_eq!(seeds.resolve().await, [at("10.0.0.9:7")]);
        let faults = seeds.faults();
        assert!(faults["pods:7"].contains("no such name") && faults["hangs:7"].contains("no answer"), "{faults:?}");
        set(&zone, "pods", &["10.0.0.1", "10.0.0.2"]);
        assert_eq!(seeds.resolve().await, ["10.0.0.1:7", "10.0.0.2:7", "10.0.0.9:7"].map(at));
        assert!(!seeds.faults().contains_key("pods:7"));
        // Pods come and go.
        set(&zone, "pods", &["10.0.0.3"]);
        assert_eq!(seeds.resolve().await, ["10.0.0.3:7", "10.0.0.9:7"].map(at));
        set(&zone, "pods", &[]);
        assert_eq!(seeds.resolve().await, ["10.0.0.3:7", "10.0.0.9:7"].map(at));
        assert_eq!(seeds.faults()["pods:7"], "the name has no address");
    }

    #[tokio::test]
    async fn a_file_is_read_anew_and_a_bad_line_spoils_nothing_else() {
        let (zone, folder) = (Zone::default(), tempfile::tempdir().expect("folder"));
        set(&zone, "pods", &["10.0.0.1"]);
        let path = folder.path().join("seeds");
        let text = format!("file:{}", path.display());
        let seeds = seeds(&[&text, "10.0.0.9:7"], &zone);
        assert_eq!(seeds.resolve().await, [at("10.0.0.9:7")], "a file may come later");
        assert!(seeds.faults().contains_key(&text));
        std::fs::write(&path, "# our nodes\n\npods:7   # all of them\n10.0.0.2:7\nnonsense\nfile:/etc/passwd\n")
            .expect("written");
        assert_eq!(seeds.resolve().await, ["10.0.0.1:7", "10.0.0.2:7", "10.0.0.9:7"].map(at));
        let faults: Vec<_> = seeds.faults().into_keys().collect();
        assert_eq!(faults, [format!("{text} line 5"), format!("{text} line 6")]);
        std::fs::write(&path, "10.0.0.3:7").expect("written");
        assert_eq!(seeds.resolve().await, ["10.0.0.3:7", "10.0.0.9:7"].map(at));
        assert!(seeds.faults().is_empty());
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(seeds.resolve().await, ["10.0.0.3:7", "10.0.0.9:7"].map(at), "what it gave last stays");
        assert_eq!(seeds.faults().len(), 1);
    }

    #[tokio::test]
    async fn the_system_resolver_finds_this_machine() {
        let seeds = Seeds::new(&["localhost:7".to_owned()]).expect("seeds");
        let found = seeds.resolve().await;
        assert!(!found.is_empty() && found.iter().all(|address| address.ip().is_loopback()), "{found:?}");
        let error = Seeds::new(&["10.0.0.1:7".to_owned(), "nonsense".to_owned()]).expect_err("refused");
        assert!(error.to_string().contains("nonsense"));
    }

    proptest::proptest! {
        #[test]
        fn what_reads_as_a_seed_reads_back(text in "(file:)?[a-z0-9.:\\[\\]-]{0,24}(:[0-9]{1,6})?") {
            if let Ok(seed) = text.parse::<Seed>() {
                proptest::prop_assert_eq!(seed.to_string().parse(), Ok(seed));
            }
        }
    }
}
