//! The actor that owns the HTTP server of a node: its listener, its connections, its drain.
//!
//! Parent: the supervisor `gateway`. Children: none; connections are tasks of the server that it owns.
//! Bounds: the gateway's permits and connections; its mailbox gets one message at the end of a node's life.
//! If it dies: its connections break, clients see it at once; it is started again on the same address.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use starling_cluster::supervise::{Handle, Restart, SuperviseError, SupervisorHandle, child};
use starling_gateway::{Backend, DrainReport, Gateway, GatewayConfig, GatewayError, MetricsRender};
use tokio::{sync::watch, task::JoinSet};

/// What every start needs.
#[derive(Clone)]
struct Args {
    config: GatewayConfig,
    backend: Arc<dyn Backend>,
    render: MetricsRender,
    /// The API, or health and metrics alone.
    api: bool,
    /// Listens already at the first start, so that a taken address is the error of the one who starts the node.
    first: Arc<Mutex<Option<Gateway>>>,
}

impl Args {
    async fn bind(&self) -> Result<Gateway, GatewayError> {
        let (config, backend, render) = (self.config.clone(), self.backend.clone(), self.render.clone());
        if self.api {
            Gateway::bind(config, backend, render).await
        } else {
            Gateway::bind_admin(config, backend, render).await
        }
    }
}

/// What the actor is told.
#[derive(Debug)]
pub(crate) enum HttpMsg {
    /// Take nothing new; answer when the last request has ended or the drain time is over.
    Drain(RpcReplyPort<DrainReport>),
    /// The server has ended.
    Ended(DrainReport),
}

impl ractor::Message for HttpMsg {}

/// A running HTTP server.
#[derive(Debug, Clone)]
pub(crate) struct HttpServer {
    handle: Handle<HttpMsg>,
    address: SocketAddr,
    drain_max: Duration,
}

impl HttpServer {
    /// Listens, and serves under the supervisor.
    pub(crate) async fn start(
        supervisor: &SupervisorHandle,
        mut config: GatewayConfig,
        backend: Arc<dyn Backend>,
        render: MetricsRender,
        api: bool,
    ) -> Result<Self, HttpError> {
        let mut args = Args { config: config.clone(), backend, render, api, first: Arc::default() };
        let gateway = args.bind().await?;
        let address = gateway.local_addr();
        // Port 0 was a free port once; a restart takes the same one.
        config.http = address;
        let drain_max = config.drain_max();
        args.config = config;
        args.first = Arc::new(Mutex::new(Some(gateway)));
        let handle = Handle::new();
        let make = move || (Server, args.clone());
        supervisor.add(child("http", "http-server", Restart::Permanent, &handle, make)).await?;
        Ok(Self { handle, address, drain_max })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes nothing new and waits until what runs has ended, at most the drain time.
    pub(crate) async fn drain(&self) {
        // The server keeps its own time; the margin is for closing connections.
        match self.handle.call(HttpMsg::Drain, self.drain_max + Duration::from_secs(5)).await {
            Ok(DrainReport { cut_off: 0 }) => tracing::info!("all requests of this gateway have ended"),
            Ok(DrainReport { cut_off }) => tracing::warn!(cut_off, "the drain time was over before all requests ended"),
            Err(error) => tracing::warn!(%error, "the HTTP server did not drain"),
        }
    }
}

/// Why there is no HTTP server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    #[error(transparent)]
    Supervise(#[from] SuperviseError),
}

struct Server;

struct State {
    stop: watch::Sender<bool>,
    asked: Vec<RpcReplyPort<DrainReport>>,
    ended: Option<DrainReport>,
    /// Dropped with the state: the server's end, however the actor ends.
    _serving: JoinSet<()>,
}

impl Actor for Server {
    type Msg = HttpMsg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, myself: ActorRef<HttpMsg>, args: Args) -> Result<State, ActorProcessingErr> {
        let first = args.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gateway = match first {
            Some(gateway) => gateway,
            None => args.bind().await?,
        };
        let (stop, mut stopped) = watch::channel(false);
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let shutdown = async move {
                // The sender is gone only with the actor, and then this task is too.
                stopped.wait_for(|stop| *stop).await.ok();
            };
            let report = Box::pin(gateway.serve(shutdown)).await;
            if myself.send_message(HttpMsg::Ended(report)).is_err() {
                tracing::debug!("the HTTP server ended after its actor");
            }
        });
        Ok(State { stop, asked: Vec::new(), ended: None, _serving: serving })
    }

    async fn handle(
        &self,
        _myself: ActorRef<HttpMsg>,
        message: HttpMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match (message, state.ended) {
            (HttpMsg::Drain(reply), None) => {
                state.asked.push(reply);
                state.stop.send_replace(true);
            }
            (HttpMsg::Drain(reply), Some(report)) => answer(reply, report),
            (HttpMsg::Ended(_), _) if !*state.stop.borrow() => return Err("the server ended by itself".into()),
            (HttpMsg::Ended(report), _) => {
                state.ended = Some(report);
                state.asked.drain(..).for_each(|reply| answer(reply, report));
            }
        }
        Ok(())
    }
}

fn answer(reply: RpcReplyPort<DrainReport>, report: DrainReport) {
    if reply.send(report).is_err() {
        tracing::debug!("nobody waits for the drain any more");
    }
}
