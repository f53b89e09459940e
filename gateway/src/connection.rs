//! Connections: which are taken, how long one may be silent, and what one over the limit still gets.
//!
//! A gateway that has all its connections takes [`SPARE_MAX`] more, one request each, and answers them at once: health,
//! liveness and metrics as ever, 503 to the rest. A health check never waits behind clients.
//!
//! Bounds: the places of the settings and [`SPARE_MAX`]; a connection that brings no request within the head time is
//! closed, whatever else it sent. A client that closes its sending side counts as gone, as in most servers: TCP says no
//! more than that, and waiting for a write to fail would leave a worker computing for nobody.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Body};
use hyper::{Request, body::Incoming};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
};
use tower::ServiceExt as _;

/// Connections taken over the limit.
const SPARE_MAX: usize = 64;
/// All that one of those gets.
const SPARE_TIME: Duration = Duration::from_secs(5);
/// After an `accept` that failed for want of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// An `accept` that goes on failing is told this often.
const ACCEPT_TOLD_EVERY: Duration = Duration::from_secs(5);
/// Requests of one HTTP/2 connection at once.
const H2_STREAMS_MAX: u32 = 256;

/// The open connections and what a new one needs.
pub(crate) struct Connections {
    places: Arc<Semaphore>,
    spare: Arc<Semaphore>,
    rules: Rules,
    /// What a connection over the limit is served.
    crowded: Router,
    tasks: JoinSet<()>,
    told: Option<Instant>,
}

/// What every connection is served with.
#[derive(Clone)]
pub(crate) struct Rules {
    pub(crate) router: Router,
    /// True when connections shall close.
    pub(crate) closing: watch::Receiver<bool>,
    /// Time for a request's head, counted from the end of the request before.
    pub(crate) head_max: Duration,
    /// How often an HTTP/2 client is asked whether it is still there.
    pub(crate) ping_every: Duration,
}

impl Connections {
    /// None open; at most `most` served by `rules`, and the spare ones by `crowded`.
    pub(crate) fn new(most: usize, rules: Rules, crowded: Router) -> Self {
        let (places, spare) = (Arc::new(Semaphore::new(most)), Arc::new(Semaphore::new(SPARE_MAX)));
        Self { places, spare, rules, crowded, tasks: JoinSet::new(), told: None }
    }

    /// Takes connections, one place each. Never returns by itself.
    pub(crate) async fn accept(&mut self, listener: &TcpListener) {
        loop {
            // Finished tasks are let go as new ones come.
            while self.tasks.try_join_next().is_some() {}
            match listener.accept().await {
                Ok((stream, _)) => self.take(stream).await,
                Err(error) => {
                    if self.told.is_none_or(|told| told.elapsed() > ACCEPT_TOLD_EVERY) {
                        tracing::warn!(%error, "connections cannot be accepted");
                        self.told = Some(Instant::now());
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn take(&mut self, stream: TcpStream) {
        if let Ok(place) = self.places.clone().try_acquire_owned() {
            self.tasks.spawn(serve(stream, place, self.rules.clone()));
            return;
        }
        // Nobody closes the semaphore.
        let Ok(place) = self.spare.clone().acquire_owned().await else { return };
        let rules = Rules { router: self.crowded.clone(), head_max: SPARE_TIME, ..self.rules.clone() };
        let served = tokio::time::timeout(SPARE_TIME, serve(stream, place, rules));
        self.tasks.spawn(async {
            let _too_slow = served.await.is_err();
        });
    }

    /// Waits for all to end, and ends those that take longer than `time`.
    pub(crate) async fn close(mut self, time: Duration) {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(time, all).await.is_err() {
            self.tasks.shutdown().await;
        }
    }
}

async fn serve(stream: TcpStream, place: OwnedSemaphorePermit, rules: Rules) {
    let Rules { router, mut closing, head_max, ping_every } = rules;
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection keeps its delay");
    }
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(head_max);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(H2_STREAMS_MAX).keep_alive_interval(ping_every);
    let begun = Arc::new(AtomicBool::new(false));
    let begins = begun.clone();
    let service = TowerToHyperService::new(router.map_request(move |request: Request<Incoming>| {
        begins.store(true, Ordering::Relaxed);
        request.map(Body::new)
    }));
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = without_request(head_max, &begun) => return,
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

/// Resolves when a connection has been open for `time` and no request had come. The timers of HTTP begin only when the
/// client has shown which version it speaks.
async fn without_request(time: Duration, begun: &AtomicBool) {
    tokio::time::sleep(time).await;
    if begun.load(Ordering::Relaxed) {
        std::future::pending::<()>().await;
    }
}

/// Resolves when connections shall close; a sender that is gone means the same.
async fn told(closing: &mut watch::Receiver<bool>) {
    let _gone = closing.wait_for(|closing| *closing).await.is_err();
}
