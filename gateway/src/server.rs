//! Listens, serves connections, and goes away in order.
//!
//! On shutdown the gateway stops admitting (503) and goes on listening until the requests that are here have
//! ended or the drain time is over; only then are connections closed.

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::State,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use hyper::{
    Request, StatusCode,
    header::{CONNECTION, CONTENT_TYPE, HeaderValue},
};
use thiserror::Error;
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
};

use crate::{
    Backend, ConfigError, GatewayConfig, Readiness,
    admission::Admission,
    chat, completions,
    connection::{Connections, Rules},
    console,
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
/// How often newly served models are looked for, to load their tokenizers before a request needs them.
const WARM_EVERY: Duration = Duration::from_millis(500);

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
        let rules = Rules {
            router: routes(app.clone()),
            closing,
            head_max: app.config.head_max(),
            ping_every: app.config.receive_max(),
        };
        let mut connections = Connections::new(app.config.connections_max, rules, crowded_router(app.clone()));
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
        views: Semaphore::new(console::VIEWS_AT_ONCE),
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

/// What a connection over the limit is served; it closes after one request.
fn crowded_router(app: Arc<App>) -> Router {
    let router = with_admin(Router::new().route("/v1/{*path}", any(crowded)), app);
    router.layer(middleware::map_response(async |mut response: Response| {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        response
    }))
}

async fn crowded(State(app): State<Arc<App>>) -> Response {
    let ticket = app.admission.arrive(Route::Unknown);
    reply::refuse(&Fault::Http(HttpFault::Crowded { limit: app.config.connections_max }), ticket)
}

fn with_admin(routes: Router<Arc<App>>, app: Arc<App>) -> Router {
    routes
        .route("/health", get(health))
        .route("/live", get(async || "ok\n"))
        .route("/metrics", get(metrics_text))
        .merge(console::routes())
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
