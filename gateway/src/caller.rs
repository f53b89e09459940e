//! Who asks, and with what right: the tenant of an API key, its part beside others, how urgent it may be.
//!
//! Called by the handlers and by whoever reads the keys. Keys come with the configuration; a request brings its key and may
//! say how urgent it is. Never: shows a key.

use hyper::HeaderMap;
use serde::Deserialize;

use crate::{error::HttpFault, openai::validate::ValidateError};

/// The header that says how urgent a request is; the field `priority` of the body goes before it.
pub(crate) const PRIORITY: &str = "x-starling-priority";

/// The most urgent a request can be; higher numbers wait longer.
pub const PRIORITY_MIN: i32 = -100;
/// The least urgent.
pub const PRIORITY_MAX: i32 = 100;

/// The largest budget, tokens per minute.
const BUDGET_MAX: u64 = 1_000_000_000_000;

/// What a key allows beside asking for answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// To name the worker: `x-starling-worker`.
    Pin,
    /// To choose workers by their labels: `x-starling-select`, `x-starling-tolerate`.
    Select,
    /// To see the cluster: the page `/ui`.
    View,
}

impl Scope {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Pin, Self::Select, Self::View];

    /// As it is written.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pin => "pin",
            Self::Select => "select",
            Self::View => "view",
        }
    }
}

/// What a key stands for.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Caller {
    /// Whose requests these are; the empty name is shared by all that have none. At most 64 bytes.
    pub tenant: String,
    /// The tenant's part beside other tenants while requests wait, 1 to 1,000.
    pub weight: u32,
    /// The most urgent priority that it may ask for, [`PRIORITY_MIN`] to [`PRIORITY_MAX`].
    pub priority_min: i32,
    /// Tokens per minute, prompts and answers, that the tenant may spend in the whole cluster; 0 without a bound. All keys
    /// of a tenant say the same.
    pub budget: u64,
    /// What it allows besides; nothing where no key is asked for.
    pub scopes: Vec<Scope>,
}

impl Default for Caller {
    fn default() -> Self {
        Self { tenant: String::new(), weight: 1, priority_min: 0, budget: 0, scopes: Vec::new() }
    }
}

/// One key that clients may present.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiKey {
    /// 8 to 512 visible ASCII characters.
    pub key: String,
    /// Whose it is.
    #[serde(default)]
    pub caller: Caller,
}

impl std::fmt::Debug for ApiKey {
    /// The key itself is never shown.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKey({:?})", self.caller)
    }
}

impl From<&str> for ApiKey {
    fn from(key: &str) -> Self {
        Self { key: key.to_owned(), caller: Caller::default() }
    }
}

/// Who asks with this one request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Who {
    /// As [`Caller::tenant`].
    pub tenant: String,
    /// As [`Caller::weight`].
    pub weight: u32,
    /// Lower goes first.
    pub priority: i32,
    /// As [`Caller::budget`].
    pub budget: u64,
}

impl Caller {
    /// Everybody, where no key is asked for.
    pub(crate) fn anybody() -> Self {
        Self { priority_min: PRIORITY_MIN, ..Self::default() }
    }

    /// Who asks, when the request's body asks for `priority`, or else its headers do.
    pub(crate) fn asks(&self, headers: Option<i32>, body: Option<i32>) -> Result<Who, ValidateError> {
        let priority = body.or(headers).unwrap_or(self.priority_min.max(0));
        if priority < self.priority_min {
            let param = if body.is_some() { "priority" } else { PRIORITY };
            let rule = format!("must be {} or more with this API key, not {priority}", self.priority_min);
            return Err(ValidateError::value(param, rule));
        }
        Ok(Who { tenant: self.tenant.clone(), weight: self.weight, priority, budget: self.budget })
    }

    /// Lets a header pass that needs a scope.
    pub(crate) fn need(&self, scope: Scope, header: &'static str) -> Result<(), HttpFault> {
        let scopes = &self.scopes;
        if scopes.contains(&scope) { Ok(()) } else { Err(HttpFault::Forbidden { header, scope: scope.as_str() }) }
    }

    /// Why it cannot be used.
    pub(crate) fn wrong(&self) -> Option<&'static str> {
        if self.tenant.len() > 64 || !self.tenant.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Some("a tenant's name has at most 64 visible ASCII characters");
        }
        if !(1..=1_000).contains(&self.weight) {
            return Some("a weight is 1 to 1000");
        }
        if self.budget > BUDGET_MAX || (self.budget > 0 && self.tenant.is_empty()) {
            return Some("a budget is at most 1000000000000 tokens per minute and belongs to a named tenant");
        }
        let urgent = PRIORITY_MIN..=PRIORITY_MAX;
        (!urgent.contains(&self.priority_min)).then_some("a priority is -100 to 100")
    }
}

/// The priority that the headers ask for.
pub(crate) fn header_priority(headers: &HeaderMap) -> Result<Option<i32>, ValidateError> {
    let Some(value) = headers.get(PRIORITY) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim().parse::<i32>().ok());
    match number.filter(|number| (PRIORITY_MIN..=PRIORITY_MAX).contains(number)) {
        Some(number) => Ok(Some(number)),
        None => Err(ValidateError::value(PRIORITY, format!("must be within {PRIORITY_MIN} to {PRIORITY_MAX}"))),
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn header(value: &'static str) -> Result<Option<i32>, ValidateError> {
        let mut headers = HeaderMap::new();
        headers.insert(PRIORITY, HeaderValue::from_static(value));
        header_priority(&headers)
    }

    #[test]
    fn the_body_goes_before_the_header_and_a_key_sets_how_urgent_it_may_be() {
        let caller = Caller { priority_min: -5, tenant: "t".into(), weight: 3, budget: 9, ..Caller::default() };
        assert_eq!(caller.asks(Some(7), Some(-5)).map(|who| who.priority), Ok(-5));
        assert_eq!(caller.asks(Some(7), None).map(|who| who.priority), Ok(7));
        assert_eq!(caller.asks(None, None), Ok(Who { tenant: "t".into(), weight: 3, priority: 0, budget: 9 }));
        assert_eq!(caller.asks(None, Some(-6)).expect_err("too urgent").param(), Some("priority"));
        assert_eq!(caller.asks(Some(-6), None).expect_err("too urgent").param(), Some(PRIORITY));
        assert_eq!(Caller { priority_min: 9, ..Caller::default() }.asks(None, None).map(|who| who.priority), Ok(9));
        assert_eq!(Caller::anybody().asks(None, Some(PRIORITY_MIN)).map(|who| who.priority), Ok(PRIORITY_MIN));
    }

    #[test]
    fn a_header_that_is_no_priority_is_named() {
        assert_eq!(header(" -100 "), Ok(Some(-100)));
        for wrong in ["", "high", "101", "1.5", "-101"] {
            assert_eq!(header(wrong).expect_err(wrong).param(), Some(PRIORITY));
        }
    }

    #[test]
    fn keys_are_not_shown() {
        assert!(!format!("{:?}", ApiKey::from("secret-key")).contains("secret"));
    }
}
