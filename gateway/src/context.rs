//! What all handlers share, and what one request brings along in its head and body.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{
    HeaderMap, Request,
    body::Body as _,
    header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, EXPECT, HeaderValue},
};
use starling_actors::{client::Baggage, engine::ModelCard, generate::GenerateError};
use starling_ids::{ModelId, RequestId};
use tokio::sync::Semaphore;

use crate::{
    Backend, GatewayConfig,
    admission::Admission,
    caller::Caller,
    error::{Fault, HttpFault},
    manner::Manner,
    prompt::PromptModels,
};

/// The header that names a request, in and out.
pub(crate) const REQUEST_ID: &str = "x-request-id";
/// Longest request name that is taken from a client.
const REQUEST_ID_BYTES_MAX: usize = 128;
/// What of an over-long body is read and thrown away, so that its sender reads our answer, in body limits.
const DISCARD_FACTOR: usize = 4;

/// One gateway's parts.
pub(crate) struct App {
    pub(crate) config: GatewayConfig,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) models: PromptModels,
    pub(crate) metrics_render: crate::MetricsRender,
    /// Views of the cluster that are being made.
    pub(crate) views: Semaphore,
}

/// The names of one request.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    /// Ours.
    pub(crate) request: RequestId,
    /// What the client reads back: its own name, or ours.
    pub(crate) echo: HeaderValue,
    /// The client's trace, if its header is well formed.
    pub(crate) trace_parent: Option<String>,
    /// The client's baggage, as much of it as the cluster carries.
    pub(crate) baggage: Baggage,
}

impl Names {
    /// From a request's head. A client's name that is a request id is taken as ours too.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(REQUEST_ID).filter(|value| {
            let bytes = value.as_bytes();
            (1..=REQUEST_ID_BYTES_MAX).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
        });
        let text = given.and_then(|value| value.to_str().ok());
        let parsed = text.filter(|text| text.len() == 32).and_then(|text| text.parse().ok());
        let request = parsed.unwrap_or_else(|| RequestId(rand::random()));
        let ours = || HeaderValue::from_str(&request.to_string()).unwrap_or(HeaderValue::from_static("-"));
        let trace = headers.get("traceparent").and_then(|value| value.to_str().ok());
        Self {
            request,
            echo: given.cloned().unwrap_or_else(ours),
            trace_parent: trace.filter(|text| is_trace_parent(text)).map(str::to_owned),
            baggage: baggage(headers),
        }
    }
}

/// All `baggage` headers as one list. What is past a limit or cannot be read is left out: it is no reason to refuse a
/// request.
fn baggage(headers: &HeaderMap) -> Baggage {
    let values: Vec<&str> = headers.get_all("baggage").iter().filter_map(|value| value.to_str().ok()).collect();
    if values.is_empty() {
        return Baggage::default();
    }
    let (baggage, left_out) = Baggage::from_header(&values.join(","));
    if left_out > 0 {
        tracing::debug!(left_out, "pairs of a client's baggage are not carried");
    }
    baggage
}

/// `00-<32 hex>-<16 hex>-<2 hex>`, lower case.
fn is_trace_parent(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let hex = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    parts.iter().map(|part| part.len()).eq([2, 32, 16, 2]) && parts.iter().all(|part| hex(part))
}

/// Seconds since 1970.
pub(crate) fn unix_s() -> u64 {
    // A clock before 1970 shows 1970.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl App {
    /// Lets a request pass when no key is set, or when it brings one of them; says who it is.
    pub(crate) fn authorize(&self, headers: &HeaderMap) -> Result<Caller, HttpFault> {
        if self.config.api_keys.is_empty() {
            return Ok(Caller::anybody());
        }
        let given = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes).and_then(bearer).unwrap_or(b"");
        // Every key is compared to the end: time tells nothing about which one was close.
        let known = self
            .config
            .api_keys
            .iter()
            .fold(None, |known, entry| if same(entry.key.as_bytes(), given) { Some(&entry.caller) } else { known });
        known.cloned().ok_or(HttpFault::Unauthorized)
    }

    /// How a request is to be routed, as far as its sender may say.
    pub(crate) fn manner(&self, headers: &HeaderMap, caller: &Caller) -> Result<Manner, HttpFault> {
        Manner::of(headers, &self.config.session_header, caller)
    }

    /// The card of a model that can be asked for now, by its exact name.
    pub(crate) fn card(&self, name: &str) -> Result<ModelCard, Fault> {
        let served = self.backend.models().into_iter().find(|served| served.card.id.as_str() == name);
        if let Some(served) = served {
            return Ok(served.card);
        }
        // A name that no model can have is not served either; it is shown without what makes it impossible.
        let plain: String = name.trim().chars().filter(|c| !c.is_control()).take(80).collect();
        let id = ModelId::new(name).or_else(|_| ModelId::new(plain.trim()));
        Err(id.map_or_else(
            |_| Fault::Validate(crate::openai::validate::ValidateError::value("model", "is not a model's name")),
            |id| {
                // A model whose workers are out of reach for a moment is worth another try; an unknown one is not.
                let here = self.backend.announces(&id);
                let away = || GenerateError::Unavailable(format!("no worker of `{id}` can be reached now"));
                Fault::Generate(if here { away() } else { GenerateError::UnknownModel(id) })
            },
        ))
    }

    /// The card of a model for a request, which waits for one whose workers are out of reach for a moment.
    pub(crate) async fn card_in_reach(&self, name: &str) -> Result<ModelCard, Fault> {
        if let Ok(id) = ModelId::new(name) {
            self.backend.reach(&id).await;
        }
        self.card(name)
    }

    /// Runs what comes before a worker is asked, for no longer than a whole request may take.
    pub(crate) async fn in_time<T>(&self, work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
        let ended = tokio::time::timeout(self.config.request_max(), work).await;
        ended.unwrap_or(Err(Fault::Generate(GenerateError::Deadline)))
    }

    /// Reads a JSON body within its limits of size and time.
    pub(crate) async fn body(&self, request: Request<Body>) -> Result<Bytes, HttpFault> {
        check_kind(request.headers())?;
        let limit = self.config.body_bytes_max;
        let asks_first =
            request.headers().get(EXPECT).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let mut body = request.into_body();
        let announced = body.size_hint().lower();
        if asks_first && announced > limit as u64 {
            // Nothing was sent yet; reading would ask for it.
            return Err(HttpFault::BodyTooLarge { limit });
        }
        let read = async {
            if announced <= limit as u64 {
                match Limited::new(&mut body, limit).collect().await {
                    Ok(whole) => return Ok(whole.to_bytes()),
                    Err(error) if error.is::<LengthLimitError>() => {}
                    Err(_) => return Err(HttpFault::BodyBroken),
                }
            }
            discard(&mut body, limit.saturating_mul(DISCARD_FACTOR)).await;
            Err(HttpFault::BodyTooLarge { limit })
        };
        let time = self.config.receive_max();
        tokio::time::timeout(time, read).await.unwrap_or(Err(HttpFault::BodyTooSlow(time)))
    }
}

/// Reads and forgets what a client still sends, up to `most` bytes.
async fn discard(body: &mut Body, most: usize) {
    let mut seen = 0;
    while seen < most {
        match body.frame().await {
            Some(Ok(frame)) => seen += frame.data_ref().map_or(0, Bytes::len),
            Some(Err(_)) | None => return,
        }
    }
}

fn check_kind(headers: &HeaderMap) -> Result<(), HttpFault> {
    let shown = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).chars().take(100).collect::<String>();
    if let Some(value) = headers.get(CONTENT_ENCODING)
        && !value.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        return Err(HttpFault::Encoded(shown(value)));
    }
    let Some(value) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let kind = value.to_str().unwrap_or("").split(';').next().unwrap_or("").trim();
    if kind.eq_ignore_ascii_case("application/json") { Ok(()) } else { Err(HttpFault::NotJson(shown(value))) }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Compares in a time that depends on the lengths alone.
fn same(key: &[u8], given: &[u8]) -> bool {
    let differs = key.iter().enumerate().fold(0, |sum, (at, byte)| sum | (byte ^ given.get(at).copied().unwrap_or(0)));
    (std::hint::black_box(differs) == 0) & (key.len() == given.len())
}

/// An empty buffer for one reply.
pub(crate) fn buffer() -> BytesMut {
    BytesMut::with_capacity(1024)
}
