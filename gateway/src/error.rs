//! Every fault and its HTTP answer: one table, total.
//!
//! The parts of the gateway and the cluster say what went wrong and know no status; [`Fault::answer`] is the
//! only place that does. A fault of the client is 4xx and names the field; it is never retried.

use std::time::Duration;

use axum::{body::Body, response::Response};
use bytes::{Bytes, BytesMut};
use hyper::{
    StatusCode,
    header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER},
};
use starling_actors::generate::GenerateError;
use thiserror::Error;

use crate::{
    manner::ADAPTER,
    openai::{json, validate::ValidateError},
    prompt::PromptError,
    text::FrameFault,
};

/// What HTTP itself got wrong, before a request was read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum HttpFault {
    /// The body is over the limit.
    #[error("the request body is larger than {limit} bytes")]
    BodyTooLarge {
        /// The limit, decoded bytes.
        limit: usize,
    },
    /// The client went on sending for too long.
    #[error("the request body did not arrive within {0:?}")]
    BodyTooSlow(Duration),
    /// The connection broke while the body was read.
    #[error("the request body broke off")]
    BodyBroken,
    /// Not JSON by its own word.
    #[error("the Content-Type must be application/json, not {0:?}")]
    NotJson(String),
    /// A compressed body.
    #[error("the Content-Encoding {0:?} is not supported; send the body as it is")]
    Encoded(String),
    /// No such route.
    #[error("there is no {method} {path}")]
    UnknownRoute {
        /// The method.
        method: String,
        /// The path, cut to 200 characters.
        path: String,
    },
    /// The route exists, for another method.
    #[error("{path} does not answer {method}")]
    Method {
        /// The method.
        method: String,
        /// The path, cut to 200 characters.
        path: String,
    },
    /// No key, or an unknown one.
    #[error("a valid API key is needed: send it as `Authorization: Bearer KEY`")]
    Unauthorized,
    /// A header that the key does not allow.
    #[error("the header {header} needs an API key with the scope {scope:?}")]
    Forbidden {
        /// The header.
        header: &'static str,
        /// What the key lacks.
        scope: &'static str,
    },
    /// The page without the right to see it.
    #[error("to see the cluster needs an API key with the scope \"view\"")]
    MayNotSee,
    /// A header that cannot be read.
    #[error("the header {name} {rule}")]
    Header {
        /// The header.
        name: String,
        /// What would be right.
        rule: String,
    },
    /// All permits are taken.
    #[error("this gateway is at its limit of {limit} requests at once")]
    Full {
        /// The limit.
        limit: usize,
    },
    /// All connections are taken.
    #[error("this gateway is at its limit of {limit} connections at once")]
    Crowded {
        /// The limit.
        limit: usize,
    },
    /// The gateway is going away.
    #[error("this gateway is shutting down")]
    Draining,
}

/// Anything that ends a request early.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum Fault {
    /// HTTP.
    #[error(transparent)]
    Http(#[from] HttpFault),
    /// The request's fields.
    #[error(transparent)]
    Validate(#[from] ValidateError),
    /// The prompt.
    #[error(transparent)]
    Prompt(PromptError),
    /// The cluster.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The worker's frames.
    #[error(transparent)]
    Frame(#[from] FrameFault),
}

/// The row of the table for one fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Status before the first byte of a reply; afterwards the stream ends with an error frame.
    pub(crate) status: StatusCode,
    /// For programs; from a closed set.
    pub(crate) code: &'static str,
    /// The field of the request.
    pub(crate) param: Option<String>,
    /// For people.
    pub(crate) message: String,
    /// When to try again.
    pub(crate) retry_after: Option<Duration>,
}

/// Retry after this when nothing better is known.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);

impl Fault {
    /// The HTTP answer to this fault.
    pub(crate) fn answer(&self) -> Answer {
        let (status, code, param, retry_after) = match self {
            Self::Http(fault) => http_row(fault),
            Self::Validate(error) => (StatusCode::BAD_REQUEST, error.code(), error.param().map(str::to_owned), None),
            Self::Prompt(error) => prompt_row(error),
            Self::Generate(error) => generate_row(error),
            Self::Frame(_) => (StatusCode::INTERNAL_SERVER_ERROR, "engine_error", None, None),
        };
        Answer { status, code, param, message: self.to_string(), retry_after }
    }
}

type Row = (StatusCode, &'static str, Option<String>, Option<Duration>);

fn http_row(fault: &HttpFault) -> Row {
    let (status, code) = match fault {
        HttpFault::BodyTooLarge { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "request_too_large"),
        HttpFault::BodyTooSlow(_) => (StatusCode::REQUEST_TIMEOUT, "request_timeout"),
        HttpFault::BodyBroken => (StatusCode::BAD_REQUEST, "incomplete_body"),
        HttpFault::NotJson(_) => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_content_type"),
        HttpFault::Encoded(_) => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_content_encoding"),
        HttpFault::UnknownRoute { .. } => (StatusCode::NOT_FOUND, "unknown_url"),
        HttpFault::Method { .. } => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
        HttpFault::Unauthorized => (StatusCode::UNAUTHORIZED, "invalid_api_key"),
        HttpFault::Forbidden { .. } | HttpFault::MayNotSee => (StatusCode::FORBIDDEN, "missing_scope"),
        HttpFault::Header { .. } => (StatusCode::BAD_REQUEST, "invalid_header"),
        HttpFault::Full { .. } | HttpFault::Crowded { .. } => (StatusCode::SERVICE_UNAVAILABLE, "overloaded"),
        HttpFault::Draining => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
    };
    let passes = matches!(fault, HttpFault::Full { .. } | HttpFault::Crowded { .. } | HttpFault::Draining);
    let retry = passes.then_some(RETRY_AFTER_DEFAULT);
    (status, code, None, retry)
}

fn prompt_row(error: &PromptError) -> Row {
    let bad = |param: &str, code| (StatusCode::BAD_REQUEST, code, Some(param.to_owned()), None);
    match error {
        PromptError::NoTemplate => bad("messages", "no_chat_template"),
        PromptError::Refused(_) => bad("messages", "invalid_value"),
        PromptError::NotShown { param, .. } => bad(param, "unsupported_value"),
        PromptError::Empty => bad("prompt", "invalid_value"),
        PromptError::Untokenizable(_) => (StatusCode::BAD_REQUEST, "invalid_value", None, None),
        PromptError::Model { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "model_error", None, None),
    }
}

fn generate_row(error: &GenerateError) -> Row {
    let client = |status, code, param: Option<&str>| (status, code, param.map(str::to_owned), None);
    match error {
        GenerateError::UnknownModel(_) => client(StatusCode::NOT_FOUND, "model_not_found", Some("model")),
        GenerateError::UnknownAdapter { .. } => client(StatusCode::NOT_FOUND, "adapter_not_found", Some(ADAPTER)),
        GenerateError::Invalid { param, .. } => client(StatusCode::BAD_REQUEST, "invalid_value", param.as_deref()),
        GenerateError::ContextLength { .. } => client(StatusCode::BAD_REQUEST, "context_length_exceeded", None),
        GenerateError::Overloaded { retry_after_ms } => {
            let retry_after = Some(Duration::from_millis(*retry_after_ms));
            (StatusCode::SERVICE_UNAVAILABLE, "overloaded", None, retry_after)
        }
        GenerateError::TenantLimit { retry_after_ms, .. } => {
            let retry_after = Some(Duration::from_millis(*retry_after_ms));
            (StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", None, retry_after)
        }
        GenerateError::Unavailable(_) => {
            (StatusCode::SERVICE_UNAVAILABLE, "no_worker", None, Some(RETRY_AFTER_DEFAULT))
        }
        GenerateError::WorkerLost { .. } => (StatusCode::BAD_GATEWAY, "worker_lost", None, None),
        GenerateError::Deadline => (StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", None, None),
        GenerateError::Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, "internal_error", None, None),
    }
}

impl Answer {
    /// OpenAI's word for whose fault it is.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// The error envelope, without a line end.
    pub(crate) fn write(&self, out: &mut BytesMut) {
        out.extend_from_slice(b"{\"error\":{\"message\":");
        json::string(out, &self.message);
        out.extend_from_slice(b",\"type\":");
        json::string(out, self.kind());
        out.extend_from_slice(b",\"param\":");
        match &self.param {
            Some(param) => json::string(out, param),
            None => out.extend_from_slice(b"null"),
        }
        out.extend_from_slice(b",\"code\":");
        json::string(out, self.code);
        out.extend_from_slice(b"}}");
    }

    /// The response with the envelope as its body.
    pub(crate) fn response(&self) -> Response {
        let mut body = BytesMut::with_capacity(256);
        self.write(&mut body);
        let mut response = json_response(self.status, body.freeze());
        if let Some(after) = self.retry_after {
            // Whole seconds, and never "at once".
            let seconds = after.as_millis().div_ceil(1_000).max(1);
            if let Ok(value) = HeaderValue::from_str(&seconds.to_string()) {
                response.headers_mut().insert(RETRY_AFTER, value);
            }
        }
        response
    }
}

/// A JSON body under a status.
pub(crate) fn json_response(status: StatusCode, body: Bytes) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use starling_ids::{ModelId, NodeId, WorkerId};

    use super::*;

    #[test]
    fn err_01_the_envelope_is_the_one_that_clients_parse() {
        let fault = Fault::Generate(GenerateError::Invalid { message: "no \"x\"".into(), param: Some("x".into()) });
        let mut body = BytesMut::new();
        fault.answer().write(&mut body);
        let value: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        let expected = serde_json::json!({"error":
            {"message": "no \"x\"", "type": "invalid_request_error", "param": "x", "code": "invalid_value"}});
        assert_eq!(value, expected);
    }

    #[test]
    fn every_cluster_fault_has_its_status() {
        let model = ModelId::new("m").expect("good");
        let worker = WorkerId { node: NodeId::new("n").expect("good"), index: 0 };
        let table = [
            (GenerateError::UnknownAdapter { model: model.clone(), adapter: "a".into(), known: Vec::new() }, 404),
            (GenerateError::UnknownModel(model), 404),
            (GenerateError::Invalid { message: String::new(), param: None }, 400),
            (GenerateError::ContextLength { prompt: 2, context: 1 }, 400),
            (GenerateError::Overloaded { retry_after_ms: 1 }, 503),
            (GenerateError::TenantLimit { reason: String::new(), retry_after_ms: 1 }, 429),
            (GenerateError::Unavailable(String::new()), 503),
            (GenerateError::WorkerLost { worker, reason: String::new() }, 502),
            (GenerateError::Deadline, 504),
            (GenerateError::Internal(String::new()), 500),
        ];
        for (error, status) in table {
            assert_eq!(Fault::Generate(error).answer().status.as_u16(), status);
        }
        let busy = Fault::Generate(GenerateError::Overloaded { retry_after_ms: 1_200 }).answer().response();
        assert_eq!(busy.headers()[RETRY_AFTER], "2");
    }
}
