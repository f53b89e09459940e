//! The mesh itself: two nodes, streams to an endpoint over the link between them.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use starling_cluster::{
    config::{ClusterConfig, Timings},
    mesh::Mesh,
    security::ClusterKey,
    stream::{Context, Incoming, StreamHandler, StreamRx, StreamTx},
};
use starling_ids::{EndpointName, Incarnation, NodeId, RequestId};

use super::common::{Client, Failure, Plan, Rx, Tx, decode_plan, encode_plan, produce, wait_for};

const TOKENS: &str = "bench/links/tokens";
const ECHO: &str = "bench/links/echo";
const SOURCE: &str = "source";

/// The key of the two processes: any will do, both must have it.
pub(crate) fn key() -> ClusterKey {
    ClusterKey::from_bytes([7; 32])
}

struct Tokens;

impl StreamHandler for Tokens {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Some(plan) = decode_plan(&incoming.body) else { return };
            let Some((tx, _rx)) = incoming.acceptor.accept(Bytes::new()) else { return };
            produce(tx, plan).await;
        })
    }
}

struct Echo;

impl StreamHandler for Echo {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if let Some((tx, _rx)) = incoming.acceptor.accept(incoming.body) {
                tx.end();
            }
        })
    }
}

impl Tx for StreamTx {
    async fn send(&mut self, frame: Vec<u8>) -> bool {
        Self::send(self, frame.into()).await.is_ok()
    }
}

impl Rx for StreamRx {
    async fn recv(&mut self) -> Option<Bytes> {
        Self::recv(self).await.and_then(Result::ok)
    }
}

/// A node's data folder, removed with it.
pub(crate) struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(format!("starling-links-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap_or_default();
    }
}

async fn node(name: &str, seeds: Vec<String>) -> Result<(Mesh, Folder), Failure> {
    let folder = Folder::new()?;
    let config = ClusterConfig {
        name: NodeId::new(name)?,
        bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        advertise: None,
        seeds,
        data_dir: folder.0.clone(),
        keys: key().into(),
        roles: Vec::new(),
        http: None,
        software: "links benchmark".to_owned(),
        labels: Default::default(),
        timings: Timings::default(),
    };
    Ok((Mesh::start(config).await?, folder))
}

/// Starts the side that sends.
pub(crate) async fn serve() -> Result<(Mesh, Folder), Failure> {
    let (mesh, folder) = node(SOURCE, Vec::new()).await?;
    mesh.endpoints().serve(EndpointName::new(TOKENS)?, Arc::new(Tokens));
    mesh.endpoints().serve(EndpointName::new(ECHO)?, Arc::new(Echo));
    Ok((mesh, folder))
}

/// The side that opens.
#[derive(Clone)]
pub(crate) struct MeshClient {
    mesh: Mesh,
    source: NodeId,
    incarnation: Incarnation,
    tokens: EndpointName,
    echo: EndpointName,
    _folder: Arc<Folder>,
}

impl MeshClient {
    pub(crate) async fn connect(address: SocketAddr) -> Result<Self, Failure> {
        let (mesh, folder) = node("sink", vec![address.to_string()]).await?;
        let source = NodeId::new(SOURCE)?;
        wait_for(|| mesh.snapshot().node(&source).is_some(), "the other node is known").await?;
        let incarnation = mesh.snapshot().node(&source).ok_or("gone")?.record.incarnation;
        let (tokens, echo) = (EndpointName::new(TOKENS)?, EndpointName::new(ECHO)?);
        Ok(Self { mesh, source, incarnation, tokens, echo, _folder: Arc::new(folder) })
    }

    fn context() -> Context {
        Context::new(RequestId(1), Duration::from_secs(600))
    }
}

impl Client for MeshClient {
    type Rx = StreamRx;

    async fn open(&self, plan: Plan) -> Result<StreamRx, Failure> {
        let body = encode_plan(plan).into();
        let opened = self.mesh.open(&self.source, self.incarnation, &self.tokens, Self::context(), body).await?;
        opened.tx.end();
        Ok(opened.rx)
    }

    async fn call(&self, body: Vec<u8>) -> Result<Bytes, Failure> {
        let context = Self::context();
        let opened = self.mesh.open(&self.source, self.incarnation, &self.echo, context, body.into()).await?;
        opened.tx.end();
        Ok(opened.reply)
    }
}
