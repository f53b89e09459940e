//! The links benchmark: the same tokens over the mesh's links, a bare socket, and other libraries.
//!
//! Called by the program `links`. Each measurement is two fresh processes, the side that sends on core 0 and the side
//! that opens and reads on core 1; [`drive`] starts them and compares. [`common`] says what is timed.

mod actors;
mod bare;
mod common;
mod drive;
mod handshake;
mod mesh;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use starling_cluster::security::{Alpn, Connection, Tls};
use starling_ids::NodeId;
use tokio::net::{TcpListener, TcpStream};

pub use self::common::Failure;
pub use self::drive::drive;
use self::{
    bare::BareClient,
    common::{Counts, Plan, Report, SideArgs, both_resident, measure, pin, run_sink, runtime},
};

/// Runs as one of the two sides of a measurement.
///
/// # Errors
/// Whatever keeps it from measuring.
pub fn side(arguments: &[String]) -> Result<(), Failure> {
    let args = SideArgs::parse(arguments)?;
    pin(usize::from(!args.source))?;
    let runtime = runtime()?;
    // In the worker's thread: the main thread only waits.
    if args.source {
        runtime.block_on(async { tokio::spawn(source(args.carrier)).await? })
    } else {
        let report = runtime.block_on(async { tokio::spawn(sink(args)).await? })?;
        println!("{}", serde_json::to_string(&report)?);
        // The node is not asked to leave: its other end is about to be killed as well.
        std::process::exit(0);
    }
}

fn say_address(address: SocketAddr) {
    println!("{address}");
}

async fn source(carrier: String) -> Result<(), Failure> {
    match carrier.as_str() {
        "mesh" => {
            let (mesh, _folder) = mesh::serve().await?;
            say_address(mesh.address());
            std::future::pending().await
        }
        "actors" => {
            let port = actors::serve().await?;
            say_address(SocketAddr::from(([127, 0, 0, 1], port)));
            std::future::pending().await
        }
        _ => {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            say_address(listener.local_addr()?);
            loop {
                let (stream, _) = listener.accept().await?;
                let carrier = carrier.clone();
                tokio::spawn(async move {
                    if let Err(error) = accepted(stream, &carrier).await {
                        eprintln!("source: {error}");
                    }
                });
            }
        }
    }
}

async fn accepted(stream: TcpStream, carrier: &str) -> Result<(), Failure> {
    stream.set_nodelay(true)?;
    if carrier == "tls" {
        let (connection, _) = tls("source")?.accept(stream).await?;
        let (from, to) = tokio::io::split(connection);
        return bare::serve(from, to).await;
    }
    let (from, to) = stream.into_split();
    bare::serve(from, to).await
}

fn tls(name: &str) -> Result<Tls, Failure> {
    Ok(Tls::new(&mesh::key(), &NodeId::new(name)?)?)
}

async fn sink(args: SideArgs) -> Result<Report, Failure> {
    let address = args.address.ok_or("a sink needs --address")?;
    match args.carrier.as_str() {
        "mesh" => run_sink(mesh::MeshClient::connect(address).await?, args).await,
        "actors" => run_sink(actors::ActorsClient::connect(address).await?, args).await,
        "tls" => {
            let connection: Connection =
                tls("sink")?.connect(address, None, Alpn::Link, Duration::from_secs(5)).await?;
            let (from, to) = tokio::io::split(connection);
            run_sink(BareClient::new(from, to), args).await
        }
        "loop" => {
            let (from, to) = plain(address).await?.into_split();
            let counts = Counts::new(args.run.streams, false);
            let plan = Plan { stream: 0, streams: args.run.streams, interval_us: 0 };
            let before = both_resident(args.pid);
            let counting = tokio::spawn(bare::count_all(from, to, plan, Arc::clone(&counts)));
            let report = measure(&counts, args.run, args.pid, before).await;
            counting.abort();
            report
        }
        _ => {
            let (from, to) = plain(address).await?.into_split();
            run_sink(BareClient::new(from, to), args).await
        }
    }
}

async fn plain(address: SocketAddr) -> Result<TcpStream, Failure> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
