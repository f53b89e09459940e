//! ractor_cluster alone: each token is a cast to an actor of the other node, over its own TCP.
//!
//! Its writer queue has no bound, so the collector acknowledges every 1,024 tokens and a semaphore holds what is
//! not acknowledged below [`WINDOW`]; without that the unpaced run would only fill memory.

use std::{collections::HashMap, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use ractor::{
    Actor, ActorProcessingErr, ActorRef, Message, RpcReplyPort,
    message::{BoxedDowncastErr, SerializedMessage},
    pg,
};
use ractor_cluster::{NodeServer, NodeServerMessage, client_connect};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
};

use super::common::{Client, Failure, Plan, Rx, Tx, decode_plan, encode_plan, produce, wait_for};

/// Tokens that may be under way, all streams together.
const WINDOW: usize = 32 << 10;
const ACKNOWLEDGE: u32 = 1024;
const SOURCE: &str = "bench-source";
const COLLECTOR: &str = "bench-collector";

/// Bytes cast to a remote actor, or a call with bytes.
enum Raw {
    Cast(Vec<u8>),
    Call(Vec<u8>, RpcReplyPort<Vec<u8>>),
    Register(u32, mpsc::UnboundedSender<Bytes>),
}

impl Message for Raw {
    fn serializable() -> bool {
        true
    }

    fn serialize(self) -> Result<SerializedMessage, BoxedDowncastErr> {
        let variant = String::new();
        match self {
            Self::Cast(args) => Ok(SerializedMessage::Cast { variant, args, metadata: None }),
            Self::Call(args, reply) => Ok(SerializedMessage::Call { variant, args, reply, metadata: None }),
            Self::Register(..) => Err(BoxedDowncastErr),
        }
    }

    fn deserialize(message: SerializedMessage) -> Result<Self, BoxedDowncastErr> {
        match message {
            SerializedMessage::Cast { args, .. } => Ok(Self::Cast(args)),
            SerializedMessage::Call { args, reply, .. } => Ok(Self::Call(args, reply)),
            SerializedMessage::CallReply(..) => Err(BoxedDowncastErr),
        }
    }
}

async fn server(name: &str) -> Result<(ActorRef<NodeServerMessage>, u16), Failure> {
    // Its port is asked of the kernel, because it does not tell which one it got.
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let server = NodeServer::new(port, "cookie".into(), name.into(), "localhost".into(), None, None)
        .with_listen_addr(std::net::Ipv4Addr::LOCALHOST.into());
    let (server, _running) = Actor::spawn(None, server, ()).await?;
    Ok((server, port))
}

fn member(group: &str) -> Option<ActorRef<Raw>> {
    pg::get_members(&group.to_owned()).into_iter().next().map(ActorRef::from)
}

struct Source;

struct Sources {
    tasks: JoinSet<()>,
    window: Arc<Semaphore>,
}

impl Actor for Source {
    type Msg = Raw;
    type State = Sources;
    type Arguments = ();

    async fn pre_start(&self, myself: ActorRef<Raw>, (): ()) -> Result<Sources, ActorProcessingErr> {
        pg::join(SOURCE.to_owned(), vec![myself.get_cell()]);
        Ok(Sources { tasks: JoinSet::new(), window: Arc::new(Semaphore::new(WINDOW)) })
    }

    async fn handle(&self, _: ActorRef<Raw>, message: Raw, state: &mut Sources) -> Result<(), ActorProcessingErr> {
        match message {
            Raw::Cast(bytes) if bytes.is_empty() => state.window.add_permits(ACKNOWLEDGE as usize),
            Raw::Cast(bytes) => {
                let (Some(plan), Some(collector)) = (decode_plan(&bytes), member(COLLECTOR)) else {
                    return Err("no plan or no collector".into());
                };
                let sender = Sender { stream: plan.stream, collector, window: state.window.clone() };
                state.tasks.spawn(produce(sender, plan));
            }
            Raw::Call(body, reply) => reply.send(body)?,
            Raw::Register(..) => {}
        }
        Ok(())
    }
}

struct Sender {
    stream: u32,
    collector: ActorRef<Raw>,
    window: Arc<Semaphore>,
}

impl Tx for Sender {
    async fn send(&mut self, frame: Vec<u8>) -> bool {
        let Ok(room) = self.window.acquire().await else { return false };
        room.forget();
        let mut bytes = Vec::with_capacity(4 + frame.len());
        bytes.extend_from_slice(&self.stream.to_be_bytes());
        bytes.extend_from_slice(&frame);
        self.collector.cast(Raw::Cast(bytes)).is_ok()
    }
}

/// Starts the side that sends; its port.
pub(crate) async fn serve() -> Result<u16, Failure> {
    let (_server, port) = server("source").await?;
    Actor::spawn(None, Source, ()).await?;
    Ok(port)
}

struct Collector;

#[derive(Default)]
struct Collected {
    streams: HashMap<u32, mpsc::UnboundedSender<Bytes>>,
    unacknowledged: u32,
}

impl Actor for Collector {
    type Msg = Raw;
    type State = Collected;
    type Arguments = ();

    async fn pre_start(&self, myself: ActorRef<Raw>, (): ()) -> Result<Collected, ActorProcessingErr> {
        pg::join(COLLECTOR.to_owned(), vec![myself.get_cell()]);
        Ok(Collected::default())
    }

    async fn handle(&self, _: ActorRef<Raw>, message: Raw, state: &mut Collected) -> Result<(), ActorProcessingErr> {
        match message {
            Raw::Register(stream, queue) => {
                state.streams.insert(stream, queue);
            }
            Raw::Cast(bytes) => {
                let (stream, payload) = bytes.split_first_chunk::<4>().ok_or("too short")?;
                if let Some(queue) = state.streams.get(&u32::from_be_bytes(*stream)) {
                    queue.send(Bytes::copy_from_slice(payload))?;
                }
                state.unacknowledged += 1;
                if state.unacknowledged == ACKNOWLEDGE {
                    state.unacknowledged = 0;
                    member(SOURCE).ok_or("no source")?.cast(Raw::Cast(Vec::new()))?;
                }
            }
            Raw::Call(..) => {}
        }
        Ok(())
    }
}

/// The side that opens.
#[derive(Clone)]
pub(crate) struct ActorsClient {
    collector: ActorRef<Raw>,
    source: ActorRef<Raw>,
}

impl ActorsClient {
    pub(crate) async fn connect(address: SocketAddr) -> Result<Self, Failure> {
        let (server, _port) = server("sink").await?;
        let (collector, _running) = Actor::spawn(None, Collector, ()).await?;
        client_connect(&server, address).await?;
        wait_for(|| member(SOURCE).is_some(), "the other node's actor is known").await?;
        // The other node must know the collector before the first plan comes.
        let source = member(SOURCE).ok_or("gone")?;
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        Ok(Self { collector, source })
    }
}

impl Client for ActorsClient {
    type Rx = Receiver;

    async fn open(&self, plan: Plan) -> Result<Receiver, Failure> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.collector.cast(Raw::Register(plan.stream, sender))?;
        self.source.cast(Raw::Cast(encode_plan(plan)))?;
        Ok(Receiver(receiver))
    }

    async fn call(&self, body: Vec<u8>) -> Result<Bytes, Failure> {
        let limit = Some(std::time::Duration::from_secs(10));
        match self.source.call(|reply| Raw::Call(body, reply), limit).await? {
            ractor::rpc::CallResult::Success(reply) => Ok(reply.into()),
            other => Err(format!("{other:?}").into()),
        }
    }
}

pub(crate) struct Receiver(mpsc::UnboundedReceiver<Bytes>);

impl Rx for Receiver {
    async fn recv(&mut self) -> Option<Bytes> {
        self.0.recv().await
    }
}
