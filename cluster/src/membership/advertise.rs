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
}

/// Documentation addresses: nobody has them, so the route to them is the default route.
const FAR_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const FAR_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));

/// `advertise` if given, else `bound` if it is one address, else the source address of the route to a seed or out.
///
/// A loopback address is only chosen when every seed is on this machine.
pub fn choose(
    bound: SocketAddr,
    advertise: Option<SocketAddr>,
    seeds: &[SocketAddr],
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
        return Ok(bound);
    }
    let far = if bound.is_ipv4() { vec![FAR_V4] } else { vec![FAR_V4, FAR_V6] };
    let reachable = |ip: &IpAddr| bound.is_ipv6() || ip.is_ipv4();
    let ips = seeds.iter().map(SocketAddr::ip).filter(|ip| !ip.is_loopback()).chain(far).filter(reachable);
    let routed = ips.filter_map(source_towards).find(|ip| !ip.is_loopback());
    let all_local = !seeds.is_empty() && seeds.iter().all(|seed| seed.ip().is_loopback());
    let local = all_local.then(|| seeds[0].ip());
    routed.or(local).map(|ip| SocketAddr::new(ip, bound.port())).ok_or(AdvertiseError::NoRoute(bound))
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

    #[test]
    fn mem_14_what_is_given_is_taken_with_the_bound_port_if_it_has_none() {
        assert_eq!(choose(at("127.0.0.1:7"), Some(at("10.0.0.9:8")), &[]), Ok(at("10.0.0.9:8")));
        assert_eq!(choose(at("127.0.0.1:7"), Some(at("10.0.0.9:0")), &[]), Ok(at("10.0.0.9:7")));
        assert_eq!(choose(at("127.0.0.1:7"), None, &[]), Ok(at("127.0.0.1:7")));
    }
}
