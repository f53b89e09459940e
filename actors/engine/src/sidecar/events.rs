//! The server's KV events: subscribed to, put in order, told in our names.
//!
//! A task of the io thread. What it knows is worth what its connection is worth: when that breaks, every block is forgotten, and the
//! next one begins with all that the server still has in its replay buffer. A gap is asked for at the replay socket; without one,
//! or when that cannot close it, everything is forgotten, which costs a router's expectation and never a wrong one.
//! Bounds: [`BLOCKS_MAX`] blocks of the server; those of the feed and of the wire. Never: gives up.

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use starling_ids::Metric;
use starling_kv::{
    adapt::{Adapter, Arrival, BlockTokensDiffer, Feed, Step, decode},
    events::KvEvent,
    index::Tier,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

use super::{
    dialect::seed_of,
    io::{News, Outlet, Shared},
    zmtp::{self, Decoder, Item, Kind},
};

/// Blocks of the server that are known at once.
const BLOCKS_MAX: usize = 1 << 20;
/// How long a connection and its handshake may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// How long the replay socket may be silent while something is asked of it.
const REPLAY_WITHIN: Duration = Duration::from_secs(5);
/// How long a subscription may take to be in force.
const SETTLE: Duration = Duration::from_millis(200);
/// Between two tries to connect, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// The number by which the replay socket says that it has sent all.
const REPLAY_END: u64 = u64::MAX;

/// An address that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an address such as tcp://127.0.0.1:5557 is needed")]
pub struct EndpointError;

/// Where a ZeroMQ socket of the server is: `tcp://HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let place = text.trim().strip_prefix("tcp://").ok_or(EndpointError)?;
        let (host, port) = place.rsplit_once(':').ok_or(EndpointError)?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or(EndpointError)?;
        let good = !host.is_empty() && host != "*" && !host.contains(['/', '@', ' ']);
        good.then(|| Self { host: host.to_owned(), port }).ok_or(EndpointError)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}:{}", self.host, self.port)
    }
}

/// Listens until the runtime ends.
pub(super) async fn listen(shared: Arc<Shared>, outlet: Outlet) {
    let Some(endpoint) = &shared.options.events else { return };
    let mut pause = RETRY.0;
    loop {
        let why = match Socket::open(endpoint, Kind::Sub).await {
            Err(error) => error,
            Ok(socket) => {
                pause = RETRY.0;
                tracing::info!(%endpoint, "listening to the engine's KV events");
                // What is asked to be sent again shall reach up to what is published from now on.
                sleep(SETTLE).await;
                let mut listener = Listener::new(&shared, &outlet);
                let error = listener.run(socket).await;
                // Nobody knows what is stored meanwhile.
                outlet.send(News::Blocks(nothing())).await;
                tracing::warn!(%endpoint, %error, "the engine's KV events ended; its blocks are forgotten");
                if matches!(error, Ended::Blocks(_)) {
                    return;
                }
                error
            }
        };
        tracing::debug!(%endpoint, %why, "no KV events");
        sleep(pause).await;
        pause = (pause * 2).min(RETRY.1);
    }
}

/// That nothing is stored anywhere.
fn nothing() -> Vec<KvEvent> {
    let below = [Tier::Host, Tier::Disk].map(|tier| KvEvent::ClearedBelow { tier });
    [KvEvent::Cleared].into_iter().chain(below).collect()
}

/// Why a connection is of no use any more.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Zmtp(#[from] zmtp::ZmtpError),
    #[error("the other side closed the connection")]
    Closed,
    #[error("no connection within {} s", CONNECT_WITHIN.as_secs())]
    Late,
    #[error(transparent)]
    Blocks(#[from] BlockTokensDiffer),
}

/// One connection.
struct Socket {
    stream: TcpStream,
    decoder: Decoder,
    buffer: Vec<u8>,
}

impl Socket {
    async fn open(endpoint: &Endpoint, kind: Kind) -> Result<Self, Ended> {
        let open = async {
            let host = endpoint.host.trim_start_matches('[').trim_end_matches(']');
            let mut stream = TcpStream::connect((host, endpoint.port)).await?;
            stream.write_all(&zmtp::greeting()).await?;
            stream.write_all(&zmtp::ready(kind)).await?;
            let mut socket = Self { stream, decoder: Decoder::default(), buffer: vec![0; 1 << 16] };
            while socket.item().await? != Item::Ready {}
            if kind == Kind::Sub {
                socket.stream.write_all(&zmtp::subscribe(b"")).await?;
            }
            Ok(socket)
        };
        timeout(CONNECT_WITHIN, open).await.map_err(|_| Ended::Late)?
    }

    /// The next item. May be dropped at any time: nothing is lost.
    async fn item(&mut self) -> Result<Item, Ended> {
        loop {
            if let Some(item) = self.decoder.next()? {
                return Ok(item);
            }
            let read = self.stream.read(&mut self.buffer).await?;
            if read == 0 {
                return Err(Ended::Closed);
            }
            self.decoder.push(&self.buffer[..read]);
        }
    }
}

/// Reads the events of one connection.
struct Listener<'a> {
    shared: &'a Shared,
    outlet: &'a Outlet,
    feed: Feed,
    /// The replay socket while something is asked of it.
    replay: Option<Socket>,
    /// Until when it must say something.
    patience: Instant,
    /// What to ask of it next.
    ask: Option<u64>,
    gaps: u64,
    odd: u64,
}

impl<'a> Listener<'a> {
    fn new(shared: &'a Shared, outlet: &'a Outlet) -> Self {
        let (seed, block_tokens) = shared.naming;
        let feed = Feed::new(Adapter::new(seed, block_tokens, BLOCKS_MAX).salted_by(seed_of));
        // What was stored before is asked for at once.
        let ask = shared.options.replay.is_some().then_some(0);
        Self { shared, outlet, feed, replay: None, patience: Instant::now(), ask, gaps: 0, odd: 0 }
    }

    async fn run(&mut self, mut live: Socket) -> Ended {
        loop {
            if let Err(ended) = self.begin_replay().await {
                return ended;
            }
            let turned = tokio::select! {
                item = live.item() => self.live(&mut live, item).await,
                item = replayed(&mut self.replay, self.patience) => self.replayed(item).await,
            };
            if let Err(ended) = turned {
                return ended;
            }
        }
    }

    async fn live(&mut self, live: &mut Socket, item: Result<Item, Ended>) -> Result<(), Ended> {
        match item? {
            Item::Ready => {}
            Item::Ping(pong) => live.stream.write_all(&pong).await?,
            Item::Message(frames) => {
                let [_, number, payload] = frames.as_slice() else {
                    self.note_odd("a message of other than three frames");
                    return Ok(());
                };
                self.take(number, payload, Arrival::Live).await?;
            }
        }
        Ok(())
    }

    async fn replayed(&mut self, item: Option<Result<Item, Ended>>) -> Result<(), Ended> {
        self.patience = Instant::now() + REPLAY_WITHIN;
        let ended = match item {
            Some(Ok(Item::Message(frames))) => match frames.as_slice() {
                [.., number, payload] if number_of(number) != Some(REPLAY_END) => {
                    self.take(number, payload, Arrival::Replayed).await?;
                    false
                }
                _ => true,
            },
            Some(Ok(_)) => false,
            Some(Err(_)) | None => true,
        };
        if ended {
            self.replay = None;
            // A gap that showed while it ran may lie behind what it sent: it is asked once more.
            if self.ask.is_none() {
                let step = self.feed.replay_ended()?;
                self.tell(step).await;
            }
        }
        Ok(())
    }

    /// Takes a message; one that cannot be read counts as lost.
    async fn take(&mut self, number: &[u8], payload: &[u8], by: Arrival) -> Result<(), Ended> {
        let Some(seq) = number_of(number) else {
            self.note_odd("a message without a number");
            return Ok(());
        };
        match decode(payload) {
            Ok(batch) => {
                let step = self.feed.message(seq, batch.events, by)?;
                self.tell(step).await;
            }
            Err(error) => self.note_odd(&error.to_string()),
        }
        Ok(())
    }

    fn note_odd(&mut self, what: &str) {
        if self.odd == 0 {
            tracing::warn!(what, "the engine sent KV events that cannot be read; they count as lost");
        }
        self.odd += 1;
        metrics::counter!(Metric::EngineEventsLost.name(), "reason" => "unreadable").increment(1);
    }

    async fn tell(&mut self, step: Step) {
        let lost = self.feed.gaps().saturating_sub(self.gaps);
        if lost > 0 {
            self.gaps = self.feed.gaps();
            metrics::counter!(Metric::EngineEventsLost.name(), "reason" => "gap").increment(lost);
            tracing::warn!("KV events of the engine were lost; its blocks are forgotten");
        }
        if step.replay_from.is_some() {
            self.ask = step.replay_from;
        }
        if !step.events.is_empty() {
            self.outlet.send(News::Blocks(step.events)).await;
        }
    }

    /// Asks for what is missing, when something is and nothing is asked.
    async fn begin_replay(&mut self) -> Result<(), Ended> {
        if self.replay.is_some() {
            return Ok(());
        }
        let Some(from) = self.ask.take() else { return Ok(()) };
        self.patience = Instant::now() + REPLAY_WITHIN;
        let Some(endpoint) = &self.shared.options.replay else {
            let step = self.feed.replay_ended()?;
            self.tell(step).await;
            return Ok(());
        };
        let asked = async {
            let mut socket = Socket::open(endpoint, Kind::Dealer).await?;
            socket.stream.write_all(&zmtp::message(&[b"", &from.to_be_bytes()])).await?;
            Ok::<_, Ended>(socket)
        };
        match asked.await {
            Ok(socket) => self.replay = Some(socket),
            Err(error) => {
                tracing::warn!(%endpoint, %error, "KV events that are missing cannot be asked for");
                let step = self.feed.replay_ended()?;
                self.tell(step).await;
            }
        }
        Ok(())
    }
}

/// What the replay socket says; `None` when it is silent for too long. Waits for ever while nothing is asked.
async fn replayed(socket: &mut Option<Socket>, until: Instant) -> Option<Result<Item, Ended>> {
    match socket {
        Some(socket) => tokio::time::timeout_at(until, socket.item()).await.ok(),
        None => std::future::pending().await,
    }
}

fn number_of(frame: &[u8]) -> Option<u64> {
    frame.try_into().ok().map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_tcp_with_a_port() {
        let read = |text: &str| text.parse::<Endpoint>().map(|endpoint| endpoint.to_string());
        assert_eq!(read("tcp://127.0.0.1:5557").unwrap(), "tcp://127.0.0.1:5557");
        assert_eq!(read("tcp://[::1]:5557").unwrap(), "tcp://[::1]:5557");
        for wrong in ["tcp://*:5557", "ipc:///tmp/x", "127.0.0.1:5557", "tcp://host", "tcp://host:0", "tcp://:1"] {
            assert_eq!(read(wrong), Err(EndpointError), "{wrong}");
        }
    }
}
