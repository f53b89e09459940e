//! The rules for names that people type and logs print.

use thiserror::Error;

/// Why a name was refused. The message names the field and says what would be right.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{field}: {value:?} is not allowed: {rule}")]
pub struct NameError {
    /// Which name: `node name`, `model`, `endpoint`.
    pub field: &'static str,
    /// What was given, cut to 80 characters.
    pub value: String,
    /// What would be right.
    pub rule: &'static str,
}

impl NameError {
    pub(crate) fn new(field: &'static str, value: &str, rule: &'static str) -> Self {
        Self { field, value: value.chars().take(80).collect(), rule }
    }
}

/// Lower-case letters, digits, `.`, `_` and `-`, starting with a letter or digit.
pub(crate) fn is_label(text: &str, len_max: usize) -> bool {
    let mut bytes = text.bytes();
    let Some(first) = bytes.next() else { return false };
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.len() <= len_max && plain(first) && bytes.all(|b| plain(b) || matches!(b, b'.' | b'_' | b'-'))
}
