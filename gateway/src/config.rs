//! Every setting of the gateway, with its unit and bounds.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use hyper::header::HeaderName;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::caller::{ApiKey, Caller};

/// Settings of one gateway. [`GatewayConfig::validate`] checks the bounds.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// Where to listen. Port 0 takes a free one.
    pub http: SocketAddr,
    /// Requests computed at once; one more is answered 503. 1 to 1,000,000.
    pub permits_max: usize,
    /// Open connections; one more is answered 503 and closed. 1 to 1,000,000.
    pub connections_max: usize,
    /// Bytes of a request body. 1 KiB to 64 MiB.
    pub body_bytes_max: usize,
    /// Milliseconds for a client to send a request's head, counted from the end of the request before: an idle
    /// connection is kept this long, longer than the 60 s of usual load balancers. 100 to 3,600,000.
    pub head_ms_max: u64,
    /// Milliseconds for a client to send a request's body. 100 to 600,000.
    pub receive_ms_max: u64,
    /// Milliseconds for a whole request. 100 to 86,400,000.
    pub request_ms_max: u64,
    /// Milliseconds without a byte before a stream gets a comment that keeps proxies awake. 100 to 600,000.
    pub keep_alive_ms: u64,
    /// Milliseconds that running requests get after a shutdown was asked for. At most 86,400,000.
    pub drain_ms_max: u64,
    /// Prompts tokenized at once outside the request's own task; 0 takes one per core. At most 1,024.
    pub tokenizer_tasks: usize,
    /// Keys that a client may present as `Authorization: Bearer KEY`. Empty: no key is asked for. Each 8 to 512
    /// visible ASCII characters. Never written out again.
    #[serde(skip_serializing)]
    pub api_keys: Vec<ApiKey>,
    /// Header whose value keeps requests together, in lower case.
    pub session_header: String,
}

/// A setting outside its bounds.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("gateway.{field}: {rule}")]
pub struct ConfigError {
    /// The setting.
    pub field: &'static str,
    /// What would be right.
    pub rule: String,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            http: SocketAddr::from((Ipv4Addr::LOCALHOST, 8000)),
            permits_max: 4096,
            connections_max: 8192,
            body_bytes_max: 8 << 20,
            head_ms_max: 75_000,
            receive_ms_max: 30_000,
            request_ms_max: 600_000,
            keep_alive_ms: 15_000,
            drain_ms_max: 30_000,
            tokenizer_tasks: 0,
            api_keys: Vec::new(),
            session_header: "x-session-id".to_owned(),
        }
    }
}

impl std::fmt::Debug for GatewayConfig {
    /// Keys are counted, never shown.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatewayConfig")
            .field("http", &self.http)
            .field("permits_max", &self.permits_max)
            .field("connections_max", &self.connections_max)
            .field("body_bytes_max", &self.body_bytes_max)
            .field("head_ms_max", &self.head_ms_max)
            .field("receive_ms_max", &self.receive_ms_max)
            .field("request_ms_max", &self.request_ms_max)
            .field("keep_alive_ms", &self.keep_alive_ms)
            .field("drain_ms_max", &self.drain_ms_max)
            .field("tokenizer_tasks", &self.tokenizer_tasks)
            .field("api_keys", &self.api_keys.len())
            .field("session_header", &self.session_header)
            .finish()
    }
}

impl GatewayConfig {
    /// Checks every bound.
    pub fn validate(&self) -> Result<(), ConfigError> {
        within("permits_max", self.permits_max as u64, 1, 1_000_000)?;
        within("connections_max", self.connections_max as u64, 1, 1_000_000)?;
        within("body_bytes_max", self.body_bytes_max as u64, 1 << 10, 64 << 20)?;
        within("head_ms_max", self.head_ms_max, 100, 3_600_000)?;
        within("receive_ms_max", self.receive_ms_max, 100, 600_000)?;
        within("request_ms_max", self.request_ms_max, 100, 86_400_000)?;
        within("keep_alive_ms", self.keep_alive_ms, 100, 600_000)?;
        within("drain_ms_max", self.drain_ms_max, 0, 86_400_000)?;
        within("tokenizer_tasks", self.tokenizer_tasks as u64, 0, 1_024)?;
        if HeaderName::from_lowercase(self.session_header.as_bytes()).is_err() {
            let rule = "the name of a header in lower case".to_owned();
            return Err(ConfigError { field: "session_header", rule });
        }
        let wrong = |rule: &str| Err(ConfigError { field: "api_keys", rule: rule.into() });
        let good = |key: &str| (8..=512).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic());
        if !self.api_keys.iter().all(|entry| good(&entry.key)) {
            return wrong("each key has 8 to 512 visible ASCII characters");
        }
        if let Some(rule) = self.api_keys.iter().find_map(|entry| entry.caller.wrong()) {
            return wrong(rule);
        }
        let mut budgets = HashMap::new();
        let mut same =
            |Caller { tenant, budget, .. }: &Caller| *budgets.entry(tenant.clone()).or_insert(*budget) == *budget;
        if self.api_keys.iter().all(|entry| same(&entry.caller)) {
            Ok(())
        } else {
            wrong("all keys of a tenant have the same budget")
        }
    }

    /// Time for a whole request.
    #[must_use]
    pub fn request_max(&self) -> Duration {
        Duration::from_millis(self.request_ms_max)
    }

    /// Time for a client to send a head.
    #[must_use]
    pub fn head_max(&self) -> Duration {
        Duration::from_millis(self.head_ms_max)
    }

    /// Time for a client to send a body.
    #[must_use]
    pub fn receive_max(&self) -> Duration {
        Duration::from_millis(self.receive_ms_max)
    }

    /// Longest silence of a stream.
    #[must_use]
    pub fn keep_alive(&self) -> Duration {
        Duration::from_millis(self.keep_alive_ms)
    }

    /// Time for running requests after a shutdown was asked for.
    #[must_use]
    pub fn drain_max(&self) -> Duration {
        Duration::from_millis(self.drain_ms_max)
    }
}

fn within(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), ConfigError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(ConfigError { field, rule: format!("{value} is not within {min} to {max}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_out_of_bounds_is_named() {
        assert_eq!(GatewayConfig::default().validate(), Ok(()));
        let error = GatewayConfig { permits_max: 0, ..GatewayConfig::default() }.validate().expect_err("no permits");
        assert_eq!(error.to_string(), "gateway.permits_max: 0 is not within 1 to 1000000");
        let keyed = GatewayConfig { api_keys: vec!["secret-key".into()], ..GatewayConfig::default() };
        assert!(keyed.validate().is_ok() && !format!("{keyed:?}").contains("secret"));
    }
}
