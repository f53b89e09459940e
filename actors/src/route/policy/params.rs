//! What a configuration says about one part of a policy, read so that every error names its key and what would be right.
//!
//! Called by [`super::config`] and by constructors of parts. Pure. A key that nobody asked for is an error: a slip in a
//! name must not leave a default in force.

use std::{collections::BTreeMap, ops::RangeInclusive};

use serde::{Deserialize, Serialize};
use starling_cluster::near;
use thiserror::Error;

/// A value of a TOML or JSON document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// A table.
    Table(Table),
}

/// Keys and their values.
pub type Table = BTreeMap<String, Value>;

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Bool(_) => "a truth value",
            Self::Int(_) | Self::Float(_) => "a number",
            Self::Text(_) => "a text",
            Self::List(_) => "a list",
            Self::Table(_) => "a table",
        }
    }
}

/// Why a policy cannot be composed: which key, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{key}: {reason}")]
pub struct PolicyError {
    /// As it is written from the top: `policy.scorers[1].weight`.
    pub key: String,
    /// What is wrong, what would be right.
    pub reason: String,
}

impl PolicyError {
    /// An error about a key.
    #[must_use]
    pub fn new(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { key: key.into(), reason: reason.into() }
    }

    /// A name that does not exist, with those that it may have meant and those that there are.
    #[must_use]
    pub fn unknown<'a>(
        key: impl Into<String>,
        what: &str,
        name: &str,
        known: impl Iterator<Item = &'a str> + Clone,
    ) -> Self {
        let similar = near::similar(name, known.clone());
        let meant = if similar.is_empty() { String::new() } else { format!("did you mean {}? ", similar.join(" or ")) };
        let known = known.collect::<Vec<_>>().join(", ");
        let shown: String = name.chars().take(80).collect();
        Self::new(key, format!("there is no {what} {shown:?}; {meant}there are: {known}"))
    }
}

/// The settings of one part. Whoever makes the part asks for each by its key; what is left then is unknown.
#[derive(Debug, Clone)]
pub struct Params {
    at: String,
    left: Table,
    asked: Vec<&'static str>,
}

impl Params {
    /// The settings that stand at `at`, for example `policy.picker`.
    #[must_use]
    pub fn new(at: impl Into<String>, table: Table) -> Self {
        Self { at: at.into(), left: table, asked: Vec::new() }
    }

    /// Where they stand.
    #[must_use]
    pub fn at(&self) -> &str {
        &self.at
    }

    /// A number within a range, or `default` when nothing is said.
    ///
    /// # Errors
    /// When it is something else.
    pub fn number(&mut self, key: &'static str, range: RangeInclusive<f64>, default: f64) -> Result<f64, PolicyError> {
        let number = match self.take(key) {
            None => return Ok(default),
            Some(Value::Float(number)) => number,
            Some(Value::Int(number)) => number as f64,
            Some(other) => return Err(self.wrong(key, &other, &rule(&range))),
        };
        if range.contains(&number) {
            return Ok(number);
        }
        Err(self.wrong(key, &Value::Float(number), &rule(&range)))
    }

    /// A whole number within a range, or `default` when nothing is said.
    ///
    /// # Errors
    /// When it is something else.
    pub fn count(&mut self, key: &'static str, range: RangeInclusive<u32>, default: u32) -> Result<u32, PolicyError> {
        let rule = format!("a whole number from {} to {}", range.start(), range.end());
        match self.take(key) {
            None => Ok(default),
            Some(Value::Int(number)) => u32::try_from(number)
                .ok()
                .filter(|number| range.contains(number))
                .ok_or_else(|| self.wrong(key, &Value::Int(number), &rule)),
            Some(other) => Err(self.wrong(key, &other, &rule)),
        }
    }

    /// `true` or `false`; false when nothing is said.
    ///
    /// # Errors
    /// When it is something else.
    pub fn truth(&mut self, key: &'static str) -> Result<bool, PolicyError> {
        match self.take(key) {
            None => Ok(false),
            Some(Value::Bool(truth)) => Ok(truth),
            Some(other) => Err(self.wrong(key, &other, "true or false")),
        }
    }

    /// A text, if it is given.
    ///
    /// # Errors
    /// When it is something else.
    pub fn text(&mut self, key: &'static str) -> Result<Option<String>, PolicyError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, &other, "a text")),
        }
    }

    /// A value as it stands, if it is given.
    pub fn take(&mut self, key: &'static str) -> Option<Value> {
        self.asked.push(key);
        self.left.remove(key)
    }

    /// An error about one of these keys.
    #[must_use]
    pub fn error(&self, key: &str, reason: impl Into<String>) -> PolicyError {
        PolicyError::new(format!("{}.{key}", self.at), reason)
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// When a key was not asked for.
    pub fn done(self) -> Result<(), PolicyError> {
        let Some(key) = self.left.keys().next() else { return Ok(()) };
        let at = format!("{}.{key}", self.at);
        if self.asked.is_empty() {
            return Err(PolicyError::new(at, "there are no settings here"));
        }
        Err(PolicyError::unknown(at, "setting", key, self.asked.iter().copied()))
    }

    fn wrong(&self, key: &str, value: &Value, rule: &str) -> PolicyError {
        let said = match value {
            Value::Bool(truth) => truth.to_string(),
            Value::Int(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Text(text) => format!("{:?}", text.chars().take(80).collect::<String>()),
            Value::List(_) | Value::Table(_) => value.kind().to_owned(),
        };
        self.error(key, format!("is {said}; it must be {rule}"))
    }
}

/// A list of a table, empty when absent.
pub(super) fn list(params: &mut Params, key: &'static str) -> Result<Vec<Value>, PolicyError> {
    match params.take(key) {
        None => Ok(Vec::new()),
        Some(Value::List(list)) => Ok(list),
        Some(other) => Err(params.error(key, format!("is {}; it must be a list", other.kind()))),
    }
}

fn rule(range: &RangeInclusive<f64>) -> String {
    format!("a number from {} to {}", range.start(), range.end())
}
