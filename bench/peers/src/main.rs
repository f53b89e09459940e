//! The crate `velo` behind the commands of the links benchmark: `side source|sink --carrier velo ...`.
//!
//! A workspace of its own, so that its dependencies never enter the mesh's lock file:
//! `cd bench/peers && CARGO_TARGET_DIR=../../target/peers cargo build --release`. Streams use its defaults (the batched
//! multiplexed transport over one TCP connection), and carry the same bytes as every other carrier.

#[path = "../../src/links/common.rs"]
mod common;

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use common::{Client, Failure, Plan, Rx, SideArgs, Tx, decode_plan, encode_plan, pin, produce, run_sink, runtime};
use tokio::{io::AsyncReadExt, io::AsyncWriteExt, net::TcpListener, net::TcpStream};
use velo::{
    Handler, InstanceId, PeerInfo, StreamAnchor, StreamAnchorHandle, StreamFrame, StreamSender, Velo,
    transports::tcp::TcpTransportBuilder,
};

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let args = SideArgs::parse(&arguments)?;
    pin(usize::from(!args.source))?;
    let runtime = runtime()?;
    if args.source {
        return runtime.block_on(async { tokio::spawn(source()).await? });
    }
    let report = runtime.block_on(async { tokio::spawn(sink(args)).await? })?;
    println!("{}", serde_json::to_string(&report)?);
    std::process::exit(0)
}

async fn velo() -> Result<Velo, Failure> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let transport = TcpTransportBuilder::new().from_listener(listener)?.build()?;
    Ok(Velo::builder().add_transport(Arc::new(transport)).mux_only().build().await?)
}

/// Tells the other side who this is, and hears the same, over a connection of its own.
async fn introduce(velo: &Velo, mut stream: TcpStream) -> Result<PeerInfo, Failure> {
    let ours = rmp_serde::to_vec_named(&velo.peer_info())?;
    stream.write_u32(u32::try_from(ours.len())?).await?;
    stream.write_all(&ours).await?;
    let mut theirs = vec![0; stream.read_u32().await? as usize];
    stream.read_exact(&mut theirs).await?;
    let peer: PeerInfo = rmp_serde::from_slice(&theirs)?;
    velo.register_peer(peer.clone())?;
    // Both know each other before anything is sent.
    stream.write_u8(1).await?;
    stream.read_u8().await?;
    Ok(peer)
}

struct Sender(StreamSender<Bytes>);

impl Tx for Sender {
    async fn send(&mut self, frame: Vec<u8>) -> bool {
        self.0.send_bytes(frame).await.is_ok()
    }
}

async fn source() -> Result<(), Failure> {
    let velo = velo().await?;
    velo.register_handler(Handler::unary_handler("echo", |call| Ok(Some(call.payload))).build())?;
    let own = velo.downgrade();
    let open = Handler::unary_handler_async("open", move |call| {
        let own = own.clone();
        async move {
            let (handle, plan) = call.payload.split_at(16);
            let (Some(velo), Ok(handle), Some(plan)) = (own.upgrade(), handle.try_into(), decode_plan(plan)) else {
                return Ok(None);
            };
            let handle = StreamAnchorHandle::from_u128(u128::from_be_bytes(handle));
            let sender = velo.attach_anchor::<Bytes>(handle).await?;
            tokio::spawn(produce(Sender(sender), plan));
            Ok(Some(Bytes::from_static(b"ok")))
        }
    });
    velo.register_handler(open.build())?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let (stream, _) = listener.accept().await?;
    introduce(&velo, stream).await?;
    std::future::pending().await
}

async fn sink(args: SideArgs) -> Result<common::Report, Failure> {
    let address: SocketAddr = args.address.ok_or("a sink needs --address")?;
    let velo = velo().await?;
    let peer = introduce(&velo, TcpStream::connect(address).await?).await?;
    run_sink(VeloClient { velo, peer: peer.instance_id() }, args).await
}

#[derive(Clone)]
struct VeloClient {
    velo: Velo,
    peer: InstanceId,
}

struct Receiver(StreamAnchor<Bytes>);

impl Rx for Receiver {
    async fn recv(&mut self) -> Option<Bytes> {
        match self.0.next_bytes().await {
            Some(Ok(StreamFrame::Item(bytes))) => Some(bytes),
            _ => None,
        }
    }
}

impl Client for VeloClient {
    type Rx = Receiver;

    async fn open(&self, plan: Plan) -> Result<Receiver, Failure> {
        let anchor = self.velo.create_anchor::<Bytes>();
        let body = [anchor.handle().as_u128().to_be_bytes().as_slice(), &encode_plan(plan)].concat();
        self.velo.unary("open")?.raw_payload(body.into()).instance(self.peer).send().await?;
        Ok(Receiver(anchor))
    }

    async fn call(&self, body: Vec<u8>) -> Result<Bytes, Failure> {
        Ok(self.velo.unary("echo")?.raw_payload(body.into()).instance(self.peer).send().await?)
    }
}
