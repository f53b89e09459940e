//! Listens, serves connections, and goes away in order.
//!
//! On shutdown the gateway stops admitting (503) and goes on listening until the requests that are here have
//! ended or the drain time is over; only then are connections closed.
//!
//! A client that closes its sending side counts as gone, as in most servers: TCP says no more than that, and waiting
//! for a write to fail would leave a worker computing for nobody.

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::State,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use hyper::{
    Request, StatusCode,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use thiserror::Error;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
};
use tower::ServiceExt as _;

use crate::{
    Backend, ConfigError, GatewayConfig, Readiness,
    admission::Admission,
    chat, completions,
    context::{App, Names, REQUEST_ID},
    error::{Fault, HttpFault},
    metrics::Route,
    models,
    prompt::PromptModels,
    reply,
};

/// Writes the text of `/metrics`.
pub type MetricsRender = Arc<dyn Fn() -> String + Send + Sync>;

/// Connections that have nothing to say get this long to close once the drain is over.
const CLOSE_MAX: Duration = Duration::from_secs(1);
/// After an `accept` that failed for want of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How often newly served models are looked for, to load their tokenizers before a request needs them.
const WARM_EVERY: Duration = Duration::from_millis(500);
/// Requests of one HTTP/2 connection at once.
const H2_STREAMS_MAX: u32 = 256;

/// Why a gateway does not serve.
#[derive(Debug, Error)]
pub enum GatewayError {
    /// A setting is out of bounds.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
}

/// How a drain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainReport {
    /// Requests that were cut off because the drain time was over.
    pub cut_off: usize,
}

/// A gateway that listens and does not serve yet.
pub struct Gateway {
    listener: TcpListener,
    address: SocketAddr,
    app: Arc<App>,
    routes: fn(Arc<App>) -> Router,
}

impl Gateway {
    /// Checks the settings and listens. Install the metrics recorder before: handles are taken here.
    pub async fn bind(
        config: GatewayConfig,
        backend: Arc<dyn Backend>,
        metrics_render: MetricsRender,
    ) -> Result<Self, GatewayError> {
        config.validate()?;
        let address = config.http;
        let bind = |source| GatewayError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        Ok(Self { listener, address, app: app(config, backend, metrics_render), routes: router })
    }

    /// The same for a node without the gateway role: `/health`, `/live` and `/metrics`, and nothing else.
    pub async fn bind_admin(
        config: GatewayConfig,
        backend: Arc<dyn Backend>,
        metrics_render: MetricsRender,
    ) -> Result<Self, GatewayError> {
        let mut gateway = Self::bind(config, backend, metrics_render).await?;
        gateway.routes = admin_router;
        Ok(gateway)
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown` resolves, then drains. Returns when the last connection is closed.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> DrainReport {
        let Self { listener, app, routes, .. } = self;
        let (close, closing) = watch::channel(false);
        let mut connections = Connections {
            places: Arc::new(Semaphore::new(app.config.connections_max)),
            router: routes(app.clone()),
            closing,
            receive_max: app.config.receive_max(),
            tasks: JoinSet::new(),
        };
        tokio::select! {
            () = shutdown => {}
            () = connections.accept(&listener) => {}
            () = warm(&app) => {}
        }
        app.admission.drain();
        let drained = async {
            tokio::select! {
                () = app.admission.idle() => {}
                () = connections.accept(&listener) => {}
            }
        };
        let late = tokio::time::timeout(app.config.drain_max(), drained).await.is_err();
        let cut_off = if late { app.admission.in_flight() } else { 0 };
        drop(listener);
        // Nobody listening any more is as good: then there is no connection left.
        close.send_replace(true);
        connections.close(if late { Duration::ZERO } else { CLOSE_MAX }).await;
        DrainReport { cut_off }
    }
}

/// The open connections and what a new one needs.
struct Connections {
    places: Arc<Semaphore>,
    router: Router,
    closing: watch::Receiver<bool>,
    receive_max: Duration,
    tasks: JoinSet<()>,
}

impl Connections {
    /// Takes connections, one place each. Never returns by itself.
    async fn accept(&mut self, listener: &TcpListener) {
        loop {
            // Finished tasks are let go as new ones come.
            while self.tasks.try_join_next().is_some() {}
            let Ok(place) = self.places.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let router = self.router.clone();
                    let connection = serve_connection(stream, place, router, self.closing.clone(), self.receive_max);
                    self.tasks.spawn(connection);
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn close(mut self, time: Duration) {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(time, all).await.is_err() {
            self.tasks.shutdown().await;
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    place: OwnedSemaphorePermit,
    router: Router,
    mut closing: watch::Receiver<bool>,
    receive_max: Duration,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection keeps its delay");
    }
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(receive_max);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(H2_STREAMS_MAX).keep_alive_interval(receive_max);
    let service = TowerToHyperService::new(router.map_request(|request: Request<Incoming>| request.map(Body::new)));
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = told(&mut closing) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        // Clients leave in the middle all the time; what that means for a request is counted there.
        tracing::debug!(%error, "a connection ended early");
    }
    drop(place);
}

/// Resolves when connections shall close; a sender that is gone means the same.
async fn told(closing: &mut watch::Receiver<bool>) {
    let _gone = closing.wait_for(|closing| *closing).await.is_err();
}

/// Loads the tokenizers of newly served models, and forgets those of models that are gone.
async fn warm(app: &App) {
    let mut ticks = tokio::time::interval(WARM_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let models = app.backend.models();
        app.models.retain(&models.iter().map(|served| served.card.bundle_digest.clone()).collect());
        for served in models {
            if let Err(fault) = app.in_time(app.models.get(&*app.backend, &served.card)).await {
                tracing::debug!(model = %served.card.id, error = %fault, "a model's tokenizer is not loaded yet");
            }
        }
    }
}

/// The parts of a gateway, without a socket.
pub(crate) fn app(config: GatewayConfig, backend: Arc<dyn Backend>, metrics_render: MetricsRender) -> Arc<App> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let tasks = if config.tokenizer_tasks == 0 { cores } else { config.tokenizer_tasks };
    Arc::new(App {
        admission: Admission::new(config.permits_max),
        models: PromptModels::new(tasks),
        config,
        backend,
        metrics_render,
    })
}

/// All routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    let api = Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one));
    with_admin(api, app)
}

/// The routes of a node without the gateway role.
fn admin_router(app: Arc<App>) -> Router {
    with_admin(Router::new(), app)
}

fn with_admin(routes: Router<Arc<App>>, app: Arc<App>) -> Router {
    routes
        .route("/health", get(health))
        .route("/live", get(async || "ok\n"))
        .route("/metrics", get(metrics_text))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn(name_request))
        .with_state(app)
}

/// Gives a request its names and its answer the header that carries them.
async fn name_request(mut request: Request<Body>, next: Next) -> Response {
    let names = Names::of(request.headers());
    let echo = names.echo.clone();
    request.extensions_mut().insert(names);
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, echo);
    response
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let reason = match app.backend.readiness() {
        _ if app.admission.is_draining() => "shutting down".to_owned(),
        Readiness::Ready => return "ok\n".into_response(),
        Readiness::NotReady(reason) => reason,
    };
    (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")).into_response()
}

async fn metrics_text(State(app): State<Arc<App>>) -> Response {
    let mut response = (app.metrics_render)().into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"));
    response
}

async fn unknown_route(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    let (method, path) = shown(&request);
    let ticket = app.admission.arrive(Route::Unknown);
    reply::refuse(&Fault::Http(HttpFault::UnknownRoute { method, path }), ticket)
}

async fn wrong_method(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    let (method, path) = shown(&request);
    let ticket = app.admission.arrive(Route::Unknown);
    reply::refuse(&Fault::Http(HttpFault::Method { method, path }), ticket)
}

fn shown(request: &Request<Body>) -> (String, String) {
    let cut = |text: &str| text.chars().take(200).collect::<String>();
    (cut(request.method().as_str()), cut(request.uri().path()))
}
