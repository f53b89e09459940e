//! Plain HTTP/1.1 to one server: a connection for each call, which is dropped with the call.
//!
//! Called by `call` and `health`, on the io thread. A dropped response closes its connection, by which servers notice that nobody
//! waits any more. Never: logs the key. Bounds: [`CONNECT_WITHIN`]; the other waits are the callers'.

use std::{fmt, path::Path, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{
    Method, Request, Response, Uri,
    body::Incoming,
    client::conn::http1,
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue},
};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{net::TcpStream, task::JoinSet, time::timeout};

/// How long a connection may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Bytes of a whole answer that are read.
const BODY_MAX: usize = 4 << 20;

/// An address that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an address such as http://127.0.0.1:8000 is needed: http, a host, perhaps a port and a path, nothing else")]
pub struct UrlError;

/// Where a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    host: String,
    port: u16,
    /// What comes before its paths: nothing, or a path without a slash at its end.
    prefix: String,
}

impl Place {
    pub(super) fn read(text: &str) -> Result<Self, UrlError> {
        let uri: Uri = text.trim().parse().map_err(|_| UrlError)?;
        let bare = uri.scheme_str() == Some("http") && uri.query().is_none();
        let host = uri.host().filter(|host| bare && !host.is_empty()).ok_or(UrlError)?;
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(UrlError);
        }
        let prefix = uri.path().trim_end_matches('/').to_owned();
        Ok(Self { host: host.to_owned(), port: uri.port_u16().unwrap_or(80), prefix })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}:{}{}", self.host, self.port, self.prefix)
    }
}

/// The key in a file, as a header's value.
pub(super) fn read_key(path: &Path) -> Result<HeaderValue, String> {
    let named = |what: String| format!("engine-key-file: {}: {what}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
    let key = text.trim();
    let good = (1..=4_096).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic());
    let value = good.then(|| HeaderValue::from_str(&format!("Bearer {key}")).ok()).flatten();
    let mut value = value.ok_or_else(|| named("one key of visible ASCII characters is needed".to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    /// Nobody listens there.
    #[error("no connection: {0}")]
    Connect(String),
    /// It broke.
    #[error("the connection broke: {0}")]
    Broken(String),
    /// It took too long.
    #[error("no answer within {} s", .0.as_secs())]
    Late(Duration),
    /// More than is read.
    #[error("an answer of more than {BODY_MAX} bytes")]
    TooLong,
}

/// A server and the key that it wants.
#[derive(Debug)]
pub(super) struct Server {
    place: Place,
    key: Option<HeaderValue>,
}

/// An answer whose body comes. Dropping it closes the connection.
pub(super) struct Answer {
    response: Response<Incoming>,
    /// The task that drives the connection, ended with this.
    _connection: JoinSet<()>,
}

impl Answer {
    /// The status.
    pub(super) fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    /// The next bytes of the body; `None` at its end.
    pub(super) async fn bytes(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let frame = match self.response.body_mut().frame().await {
                None => return Ok(None),
                Some(frame) => frame.map_err(|error| Failure::Broken(error.to_string()))?,
            };
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
    }

    /// All that is left of the body.
    pub(super) async fn rest(mut self) -> Result<Vec<u8>, Failure> {
        let mut body = Vec::new();
        while let Some(bytes) = self.bytes().await? {
            if body.len() + bytes.len() > BODY_MAX {
                return Err(Failure::TooLong);
            }
            body.extend_from_slice(&bytes);
        }
        Ok(body)
    }
}

impl Server {
    /// Nothing is connected yet.
    pub(super) fn new(place: Place, key: Option<HeaderValue>) -> Self {
        Self { place, key }
    }

    /// Where it is.
    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// Status and body of a GET, within `limit`.
    pub(super) async fn get(&self, path: &str, limit: Duration) -> Result<(u16, Vec<u8>), Failure> {
        let all = async {
            let answer = self.send(Method::GET, path, Bytes::new()).await?;
            Ok((answer.status(), answer.rest().await?))
        };
        timeout(limit, all).await.map_err(|_| Failure::Late(limit))?
    }

    /// The answer to a POST, as soon as its head has come.
    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<Answer, Failure> {
        self.send(Method::POST, path, Bytes::from(body.to_string())).await
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Answer, Failure> {
        let Place { host, port, prefix } = &self.place;
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let connected = timeout(CONNECT_WITHIN, TcpStream::connect((bare, *port))).await;
        let stream = connected
            .map_err(|_| Failure::Connect(format!("not within {} s", CONNECT_WITHIN.as_secs())))?
            .map_err(|error| Failure::Connect(error.to_string()))?;
        // Tokens are small and should not wait for each other.
        stream.set_nodelay(true).map_err(|error| Failure::Connect(error.to_string()))?;
        let broken = |error: hyper::Error| Failure::Broken(error.to_string());
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        // Its error is told by the response.
        let mut driven = JoinSet::new();
        driven.spawn(async move { drop(connection.await) });
        let mut request = Request::builder().method(method).uri(format!("{prefix}{path}"));
        request = request.header(HOST, format!("{host}:{port}")).header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key);
        }
        let request = request.body(Full::new(body)).map_err(|error| Failure::Broken(error.to_string()))?;
        let response = sender.send_request(request).await.map_err(broken)?;
        Ok(Answer { response, _connection: driven })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_http_with_a_host() {
        let read = |text: &str| Place::read(text).map(|place| place.to_string());
        assert_eq!(read("http://127.0.0.1:8001").unwrap(), "http://127.0.0.1:8001");
        assert_eq!(read("http://gpu-3/vllm/").unwrap(), "http://gpu-3:80/vllm");
        assert_eq!(read("http://[::1]:9/").unwrap(), "http://[::1]:9");
        for wrong in ["https://a:1", "127.0.0.1:8001", "http://", "http://a/?x=1", "http://u:p@a", "tcp://a:1"] {
            assert_eq!(read(wrong), Err(UrlError), "{wrong}");
        }
    }

    #[test]
    fn a_key_is_one_line_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        std::fs::write(&path, "s3cret-key\n").unwrap();
        let key = read_key(&path).unwrap();
        assert_eq!(key.as_bytes(), b"Bearer s3cret-key");
        assert!(!format!("{key:?}").contains("s3cret"));
        std::fs::write(&path, "two words\n").unwrap();
        assert!(read_key(&path).unwrap_err().contains("engine-key-file"));
        assert!(read_key(&folder.path().join("none")).is_err());
    }
}
