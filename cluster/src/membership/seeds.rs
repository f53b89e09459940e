//! Turns seeds as people write them into addresses, again and again.
//!
//! Called by the gossip thread and at start. Bounds: [`RESOLVE_MAX`] for one name; a name may have many addresses.

use std::{net::SocketAddr, time::Duration};

/// Longest wait for the resolver.
const RESOLVE_MAX: Duration = Duration::from_secs(2);

/// All addresses of all seeds, sorted, each once. A name that does not resolve now is left out.
pub async fn resolve(seeds: &[String]) -> Vec<SocketAddr> {
    let lookups = seeds.iter().map(|seed| async move {
        match tokio::time::timeout(RESOLVE_MAX, tokio::net::lookup_host(seed.as_str())).await {
            Ok(Ok(addresses)) => addresses.collect::<Vec<_>>(),
            Ok(Err(error)) => {
                tracing::debug!(seed, %error, "seed does not resolve");
                Vec::new()
            }
            Err(_) => {
                tracing::debug!(seed, "seed did not resolve in time");
                Vec::new()
            }
        }
    });
    let mut addresses = futures::future::join_all(lookups).await.concat();
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_addresses_of_all_seeds_are_taken_once() {
        let seeds = ["127.0.0.1:7", "127.0.0.1:7", "[::1]:7", "no-such-host.invalid:7", "nonsense"];
        let addresses = resolve(&seeds.map(str::to_owned)).await;
        assert_eq!(addresses, ["127.0.0.1:7".parse().expect("address"), "[::1]:7".parse().expect("address")]);
    }
}
