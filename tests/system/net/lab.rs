//! A cluster whose nodes live on a network of their own.

use std::{net::Ipv4Addr, path::Path, time::Duration};

use super::{
    eyes::Eyes,
    fabric::{Fabric, Seen},
    figures,
    namespace::{self, Namespace, ip},
    packet::Nat,
    tun,
};
use crate::harness::{Cluster, Launched, Node};

/// The port of every node's cluster address, and the one of its HTTP server.
const MESH_PORT: u16 = 7400;
const HTTP_PORT: u16 = 8000;
/// Largest gossip packet: what crosses any network in one piece.
const DATAGRAM_MAX: usize = 1400;
/// The test's own address in the subnet.
const HOST: u8 = 254;

/// Where one node lives.
#[derive(Debug)]
pub(crate) struct Place {
    namespace: Namespace,
    pub(crate) ip: Ipv4Addr,
}

impl Place {
    /// The cluster address of a node here.
    pub(crate) fn mesh(&self) -> String {
        format!("{}:{MESH_PORT}", self.ip)
    }
}

/// Namespaces, the wire between them, and the cluster's folder. Dropping it ends and deletes all.
#[derive(Debug)]
pub(crate) struct Lab {
    // Fields are dropped in this order: processes of the namespaces first, then the wire.
    places: Vec<Place>,
    pub(crate) fabric: Fabric,
    pub(crate) cluster: Cluster,
    pub(crate) eyes: Eyes,
    subnet: [u8; 3],
}

impl Lab {
    /// A network with `places` for nodes; `None`, said in one line and counted, where that cannot be had.
    pub(crate) async fn new(places: usize) -> Option<Self> {
        let cluster = Cluster::new().await;
        match Self::build(cluster, places) {
            Ok(lab) => Some(lab),
            Err(reason) => {
                figures::skipped(&reason);
                None
            }
        }
    }

    fn build(cluster: Cluster, count: usize) -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("network namespaces need root".to_owned());
        }
        namespace::sweep();
        let pid = std::process::id();
        // Two runs on one machine take different subnets.
        let subnet = [10, 128 + (pid % 100) as u8, (pid / 100 % 256) as u8];
        let [a, b, c] = subnet;
        let host = Ipv4Addr::new(a, b, c, HOST);
        let seed = u64::from(pid);
        eprintln!("packets are lost by seed {seed}");
        let fabric = Fabric::start(host, seed);
        let name = format!("sl{pid}h");
        let device = tun::open(&name).map_err(|error| format!("/dev/net/tun: {error}"))?;
        ip(&["address", "add", &format!("{host}/24"), "dev", &name])?;
        ip(&["link", "set", &name, "up"])?;
        fabric.plug(host, device);
        let eyes = Eyes::new(&cluster.key());
        let mut lab = Self { places: Vec::new(), fabric, cluster, eyes, subnet };
        for _ in 0..count {
            lab.add()?;
        }
        Ok(lab)
    }

    /// One more place; its number.
    fn add(&mut self) -> Result<usize, String> {
        let number = self.places.len();
        let [a, b, c] = self.subnet;
        let address = Ipv4Addr::new(a, b, c, u8::try_from(number + 1).map_err(|error| error.to_string())?);
        let namespace = Namespace::new(number)?;
        let device = format!("sl{}n{number}", std::process::id());
        let file = tun::open(&device).map_err(|error| format!("/dev/net/tun: {error}"))?;
        ip(&["link", "set", &device, "netns", namespace.name()])?;
        let add = format!("address add {address}/24 dev {device}");
        let (up, route) = (format!("link set {device} up"), format!("route add default dev {device}"));
        namespace.configure(&[&add, &up, &route])?;
        self.fabric.plug(address, file);
        self.places.push(Place { namespace, ip: address });
        Ok(number)
    }

    pub(crate) fn place(&self, number: usize) -> &Place {
        &self.places[number]
    }

    /// The cluster addresses of some places, as seeds.
    pub(crate) fn seeds(&self, numbers: &[usize]) -> Vec<String> {
        numbers.iter().map(|number| self.places[*number].mesh()).collect()
    }

    /// Starts a node at a place and does not wait for it. `args` may bind elsewhere.
    pub(crate) fn launch(&self, place: usize, name: &str, seeds: &[usize], args: &[&str]) -> Launched {
        let seeds = self.seeds(seeds);
        let seeds: Vec<&str> = seeds.iter().map(String::as_str).collect();
        self.launch_to(place, name, &seeds, args)
    }

    /// The same with seeds as written.
    pub(crate) fn launch_to(&self, place: usize, name: &str, seeds: &[&str], args: &[&str]) -> Launched {
        let at = &self.places[place];
        let (mesh, http) = (at.mesh(), format!("{}:{HTTP_PORT}", at.ip));
        let mut verb = if seeds.is_empty() { vec!["up"] } else { vec!["join"] };
        verb.extend(seeds);
        if !args.contains(&"--bind") {
            verb.extend(["--bind", &mesh]);
        }
        if !args.contains(&"--http") {
            verb.extend(["--http", &http]);
        }
        self.cluster.launch_in(Some(at.namespace.name()), name, &verb, args)
    }

    /// Starts a node and waits until it is ready.
    pub(crate) async fn start(&self, place: usize, name: &str, seeds: &[usize], args: &[&str]) -> Node {
        self.launch(place, name, seeds, args).ready().await
    }

    /// Runs a verb of the program at a place.
    pub(crate) async fn run(&self, place: usize, args: &[&str]) -> std::process::Output {
        self.cluster.run_in(Some(self.places[place].namespace.name()), args).await
    }

    /// From each of `from` nothing reaches any of `to`, when `cut`; else packets pass again.
    pub(crate) fn one_way(&self, from: &[usize], to: &[usize], cut: bool) {
        let pairs: Vec<_> =
            from.iter().flat_map(|a| to.iter().map(|b| (self.places[*a].ip, self.places[*b].ip))).collect();
        self.fabric.rules(|rules| {
            for pair in pairs.into_iter().filter(|(a, b)| a != b) {
                if cut {
                    rules.cuts.insert(pair)
                } else {
                    rules.cuts.remove(&pair)
                };
            }
        });
    }

    /// Nothing passes between the two groups.
    pub(crate) fn split(&self, one: &[usize], other: &[usize]) {
        self.one_way(one, other, true);
        self.one_way(other, one, true);
    }

    /// Everything passes again.
    pub(crate) fn heal(&self) {
        self.fabric.rules(|rules| rules.cuts.clear());
    }

    /// Loses a part of all packets, and delays the others.
    pub(crate) fn weather(&self, loss: f64, delay: Duration) {
        self.fabric.rules(|rules| (rules.loss, rules.delay) = (loss, delay));
    }

    /// Puts a place behind an address of its own, outside: `port` there is `inner` here. The outer IP.
    pub(crate) fn nat(&self, place: usize, inner: u16, port: u16) -> Ipv4Addr {
        let ip = self.places[place].ip;
        let [a, b, c, d] = ip.octets();
        let outer = Ipv4Addr::new(a, b, c, d + 100);
        let nat =
            Nat { inner: std::net::SocketAddrV4::new(ip, inner), outer: std::net::SocketAddrV4::new(outer, port) };
        self.fabric.rules(|rules| rules.nats.push(nat));
        outer
    }

    /// Takes a place off the network: it has loopback and nothing else.
    pub(crate) fn unplug(&self, place: usize) {
        let device = format!("sl{}n{place}", std::process::id());
        let down = self.places[place].namespace.configure(&[&format!("link set {device} down")]);
        assert_eq!(down, Ok(()));
    }

    /// The end of a test: no datagram was larger than any network carries. What was carried.
    pub(crate) fn done(&self) -> Seen {
        let seen = self.fabric.seen();
        let (passed, dropped) = (seen.passed, seen.dropped);
        eprintln!("{passed} packets passed, {dropped} lost, largest datagram {} bytes", seen.datagram_max);
        assert!(seen.datagram_max <= DATAGRAM_MAX, "a datagram of {} bytes", seen.datagram_max);
        assert_eq!(seen.fragments, 0, "packets came in pieces");
        assert!(Path::new("/proc").exists() && passed > 0, "nothing crossed the network");
        seen
    }
}
