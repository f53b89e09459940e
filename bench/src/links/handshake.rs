//! What a TLS handshake of the mesh costs: the first one between two nodes, and a resumed one.

use std::time::{Duration, Instant};

use starling_cluster::security::{Alpn, Tls};
use starling_ids::NodeId;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use super::{
    common::{Failure, cpu_ns},
    mesh,
};

/// Milliseconds on the clock and of CPU (both sides) of one connection, from dial to the first byte back.
pub(crate) struct Handshake {
    pub(crate) wall_ms: f64,
    pub(crate) cpu_ms: f64,
}

/// Full handshakes, each by a process that has met nobody, and resumed ones by one that has: medians of `times`.
pub(crate) async fn handshakes(times: u32) -> Result<(Handshake, Handshake), Failure> {
    let (server, listener) = (tls("server")?, TcpListener::bind("127.0.0.1:0").await?);
    let address = listener.local_addr()?;
    let serving = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await?;
            let (mut connection, _) = server.accept(stream).await?;
            connection.read_u8().await?;
            connection.write_u8(1).await?;
            connection.flush().await?;
            connection.shutdown().await?;
        }
        #[allow(unreachable_code, reason = "says the type of the errors")]
        Ok::<(), Failure>(())
    });
    let mut fresh = Vec::new();
    for _ in 0..times {
        fresh.push(tls("client")?);
    }
    let known = tls("client")?;
    once(&known, address).await?;
    let full = median_of(fresh.iter(), address).await?;
    let resumed = median_of((0..times).map(|_| &known), address).await?;
    serving.abort();
    Ok((full, resumed))
}

fn tls(name: &str) -> Result<Tls, Failure> {
    Ok(Tls::new(&mesh::key(), &NodeId::new(name)?)?)
}

async fn median_of(clients: impl Iterator<Item = &Tls>, address: std::net::SocketAddr) -> Result<Handshake, Failure> {
    let (mut walls, mut cpus) = (Vec::new(), Vec::new());
    for client in clients {
        let (start, cpu) = (Instant::now(), cpu_ns(std::process::id()));
        once(client, address).await?;
        walls.push(start.elapsed().as_secs_f64() * 1e3);
        #[allow(clippy::cast_precision_loss)]
        cpus.push((cpu_ns(std::process::id()) - cpu) as f64 / 1e6);
    }
    Ok(Handshake { wall_ms: crate::median(&walls), cpu_ms: crate::median(&cpus) })
}

async fn once(client: &Tls, address: std::net::SocketAddr) -> Result<(), Failure> {
    let node = NodeId::new("server")?;
    let mut connection = client.connect(address, Some(&node), Alpn::Link, Duration::from_secs(5)).await?;
    connection.write_u8(1).await?;
    connection.flush().await?;
    connection.read_u8().await?;
    // To the end: tickets come behind the first byte.
    let mut rest = [0; 8];
    while connection.read(&mut rest).await.is_ok_and(|read| read > 0) {}
    Ok(())
}
