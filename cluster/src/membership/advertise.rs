//! Which address of this machine others are told to dial.
//!
//! Called once at start. Asks the kernel's routing table through an unconnected datagram socket; sends nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use thiserror::Error;

/// No address could be found that others can dial.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AdvertiseError {
    /// The address given stands for "any".
    #[error("--advertise {0} cannot be dialled; give an address of this machine")]
    Unspecified(SocketAddr),
    /// Bound to all interfaces of a machine without a route.
    #[error("--bind {0} listens everywhere and this machine has no route out; say with --advertise what others dial")]
    NoRoute(SocketAddr),
    /// Bound to loopback, and a seed is on another machine.
    #[error(
        "--bind {0} can be reached from this machine alone, and seed {1} is elsewhere; give --bind an address of this machine that others can reach"
    )]
    LoopbackOnly(SocketAddr, SocketAddr),
}

/// Documentation addresses: nobody has them, so the route to them is the default route.
const FAR_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const FAR_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));

/// `advertise` if given, else `bound` if it is one address, else the source address of the route to a seed or out.
///
/// A loopback address is only taken when every seed is on this machine.
pub fn choose(
    bound: SocketAddr,
    advertise: Option<SocketAddr>,
    seeds: &[SocketAddr],
) -> Result<SocketAddr, AdvertiseError> {
    decide(bound, advertise, seeds, source_towards)
}

/// The rule. `source` gives the address that packets to an address would come from.
fn decide(
    bound: SocketAddr,
    advertise: Option<SocketAddr>,
    seeds: &[SocketAddr],
    source: impl Fn(IpAddr) -> Option<IpAddr>,
) -> Result<SocketAddr, AdvertiseError> {
    if let Some(given) = advertise {
        let port = if given.port() == 0 { bound.port() } else { given.port() };
        let unspecified = given.ip().is_unspecified();
        return if unspecified {
            Err(AdvertiseError::Unspecified(given))
        } else {
            Ok(SocketAddr::new(given.ip(), port))
        };
    }
    if !bound.ip().is_unspecified() {
        let here = |ip: IpAddr| ip.is_loopback() || source(ip) == Some(ip);
        let elsewhere = seeds.iter().find(|seed| bound.ip().is_loopback() && !here(seed.ip()));
        return elsewhere.map_or(Ok(bound), |seed| Err(AdvertiseError::LoopbackOnly(bound, *seed)));
    }
    let far = if bound.is_ipv4() { vec![FAR_V4] } else { vec![FAR_V4, FAR_V6] };
    let reachable = |ip: &IpAddr| bound.is_ipv6() || ip.is_ipv4();
    let ips = seeds.iter().map(SocketAddr::ip).filter(|ip| !ip.is_loopback()).chain(far).filter(reachable);
    let routed = ips.filter_map(source).find(dialled_by_others);
    let all_local = !seeds.is_empty() && seeds.iter().all(|seed| seed.ip().is_loopback());
    let local = all_local.then(|| seeds[0].ip());
    routed.or(local).map(|ip| SocketAddr::new(ip, bound.port())).ok_or(AdvertiseError::NoRoute(bound))
}

/// A link-local address means nothing without the interface, which others do not know.
fn dialled_by_others(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    }
}

/// The address packets to `ip` would carry as their source.
fn source_towards(ip: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((ip, 9)).ok()?;
    let source = socket.local_addr().ok()?.ip();
    (!source.is_unspecified()).then_some(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("address")
    }

    #[test]
    fn mem_13_an_unspecified_address_is_never_advertised() {
        for bound in ["0.0.0.0:7", "[::]:7"] {
            match choose(at(bound), None, &[]) {
                Ok(chosen) => assert!(!chosen.ip().is_unspecified() && !chosen.ip().is_loopback(), "{chosen}"),
                Err(error) => assert!(error.to_string().contains("--advertise"), "{error}"),
            }
            assert!(choose(at(bound), Some(at("0.0.0.0:7")), &[]).is_err());
        }
        let local = choose(at("0.0.0.0:7"), None, &[at("127.0.0.1:9")]).expect("a seed on this machine");
        assert!(!local.ip().is_unspecified());
        assert_eq!(local.port(), 7);
    }

    /// A machine with these addresses, all of it reachable from the first one of each family.
    fn machine(addresses: &'static [&'static str]) -> impl Fn(IpAddr) -> Option<IpAddr> {
        move |to| {
            let own: Vec<IpAddr> = addresses.iter().map(|text| text.parse().expect("ip")).collect();
            if to.is_loopback() || own.contains(&to) {
                return Some(to);
            }
            own.into_iter().find(|ip| ip.is_ipv4() == to.is_ipv4())
        }
    }

    #[test]
    fn mem_13_a_wildcard_takes_a_routable_address_or_refuses() {
        let (all, all6) = (at("0.0.0.0:7"), at("[::]:7"));
        let plain = || machine(&["10.0.0.5"]);
        assert_eq!(decide(all, None, &[], plain()), Ok(at("10.0.0.5:7")));
        assert_eq!(decide(all6, None, &[], plain()), Ok(at("10.0.0.5:7")), "[::] takes IPv4 too");
        assert_eq!(decide(all6, None, &[], machine(&["fd00::5"])), Ok(at("[fd00::5]:7")));
        assert_eq!(decide(all6, None, &[at("[fd00::9]:7")], machine(&["10.0.0.5", "fd00::5"])), Ok(at("[fd00::5]:7")));
        assert_eq!(decide(all, None, &[at("[fd00::9]:7")], machine(&["10.0.0.5", "fd00::5"])), Ok(at("10.0.0.5:7")));
        // Only loopback, or only an address that needs its interface's name.
        for lonely in [machine(&[]), machine(&["fe80::5"])] {
            for bound in [all, all6] {
                assert_eq!(decide(bound, None, &[], &lonely), Err(AdvertiseError::NoRoute(bound)));
                assert_eq!(decide(bound, None, &[at("10.0.0.9:7")], &lonely), Err(AdvertiseError::NoRoute(bound)));
                let port = bound.port();
                let local = SocketAddr::new(at("127.0.0.1:1").ip(), port);
                assert_eq!(decide(bound, None, &[at("127.0.0.1:9")], &lonely), Ok(local));
            }
        }
    }

    #[test]
    fn mem_13_loopback_is_never_gossiped_to_another_machine() {
        let (bound, own, other) = (at("127.0.0.1:7"), at("10.0.0.5:9"), at("10.0.0.9:9"));
        let decide = |seeds: &[SocketAddr]| decide(bound, None, seeds, machine(&["10.0.0.5"]));
        assert_eq!(decide(&[]), Ok(bound));
        assert_eq!(decide(&[at("127.0.0.1:9"), own]), Ok(bound), "both on this machine");
        let error = decide(&[at("127.0.0.1:9"), other]).expect_err("refused");
        assert_eq!(error, AdvertiseError::LoopbackOnly(bound, other));
        assert!(error.to_string().contains("--bind"), "{error}");
    }

    #[test]
    fn mem_14_what_is_given_is_taken_with_the_bound_port_if_it_has_none() {
        assert_eq!(choose(at("127.0.0.1:7"), Some(at("10.0.0.9:8")), &[]), Ok(at("10.0.0.9:8")));
        assert_eq!(choose(at("127.0.0.1:7"), Some(at("10.0.0.9:0")), &[]), Ok(at("10.0.0.9:7")));
        assert_eq!(choose(at("127.0.0.1:7"), None, &[]), Ok(at("127.0.0.1:7")));
    }
}
