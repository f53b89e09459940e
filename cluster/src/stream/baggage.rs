//! Key and value pairs that travel with a request over every hop, as W3C baggage does between HTTP services.
//!
//! Part of [`super::Context`]. Pure. Bounds: [`Baggage::PAIRS_MAX`] pairs and [`Baggage::BYTES_MAX`] bytes of keys and
//! values, checked where a pair is set and again where a peer's baggage is read.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a pair was not taken. Each message names the limit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BaggageError {
    /// Too many pairs.
    #[error("baggage: at most {} pairs travel with a request", Baggage::PAIRS_MAX)]
    Pairs,
    /// Too many bytes.
    #[error("baggage: {bytes} bytes of keys and values, at most {} travel with a request", Baggage::BYTES_MAX)]
    Bytes {
        /// What it would have come to.
        bytes: usize,
    },
    /// The key is empty or has a character that no HTTP token has.
    #[error("baggage: the key {0:?} is not one or more of a-z A-Z 0-9 ! # $ % & ' * + - . ^ _ ` | ~")]
    Key(String),
    /// The value has a control character.
    #[error("baggage: the value of {0:?} has a control character")]
    Value(String),
}

/// The pairs, in the order in which they were set; each key once.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<(String, String)>")]
pub struct Baggage(Vec<(String, String)>);

impl TryFrom<Vec<(String, String)>> for Baggage {
    type Error = BaggageError;

    fn try_from(pairs: Vec<(String, String)>) -> Result<Self, BaggageError> {
        let mut baggage = Self::default();
        for (key, value) in pairs {
            baggage.set(key, value)?;
        }
        Ok(baggage)
    }
}

impl Baggage {
    /// Most pairs.
    pub const PAIRS_MAX: usize = 32;
    /// Most bytes of all keys and values together.
    pub const BYTES_MAX: usize = 4_096;

    /// Sets a pair; an earlier value of the key is replaced. Changes nothing when it is refused.
    ///
    /// # Errors
    /// [`BaggageError`] names the limit that it would pass.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<String>) -> Result<(), BaggageError> {
        let (key, value) = (key.into(), value.into());
        if key.is_empty() || !key.bytes().all(is_token) {
            return Err(BaggageError::Key(key.chars().take(80).collect()));
        }
        if value.chars().any(char::is_control) {
            return Err(BaggageError::Value(key));
        }
        let at = self.0.iter().position(|(known, _)| *known == key);
        let before = at.map_or(0, |at| key.len() + self.0[at].1.len());
        let bytes = self.bytes() - before + key.len() + value.len();
        if bytes > Self::BYTES_MAX {
            return Err(BaggageError::Bytes { bytes });
        }
        match at {
            Some(at) => self.0[at].1 = value,
            None if self.0.len() >= Self::PAIRS_MAX => return Err(BaggageError::Pairs),
            None => self.0.push((key, value)),
        }
        Ok(())
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    /// Takes a pair away.
    pub fn remove(&mut self, key: &str) -> Option<String> {
        let at = self.0.iter().position(|(known, _)| known == key)?;
        Some(self.0.remove(at).1)
    }

    /// All pairs.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// How many pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of all keys and values.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|(key, value)| key.len() + value.len()).sum()
    }

    /// Reads the value of an HTTP `baggage` header and says how many of its pairs were left out: those that cannot be
    /// read and those past a limit. Properties of a pair (after `;`) are not kept.
    #[must_use]
    pub fn from_header(text: &str) -> (Self, usize) {
        let (mut baggage, mut left_out) = (Self::default(), 0);
        for member in text.split(',').map(str::trim).filter(|member| !member.is_empty()) {
            let pair = member.split(';').next().and_then(|pair| pair.split_once('='));
            let pair = pair.and_then(|(key, value)| Some((key.trim(), decode(value.trim())?)));
            let taken = pair.is_some_and(|(key, value)| baggage.set(key, value).is_ok());
            left_out += usize::from(!taken);
        }
        (baggage, left_out)
    }

    /// The value of an HTTP `baggage` header.
    #[must_use]
    pub fn header(&self) -> String {
        let member = |(key, value): &(String, String)| format!("{key}={}", encode(value));
        self.0.iter().map(member).collect::<Vec<_>>().join(",")
    }
}

/// What HTTP allows in a token.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// `%41` to `A`; `None` when what comes out is no text.
fn decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let value = digit(bytes.next())? * 16 + digit(bytes.next())?;
        out.push(u8::try_from(value).ok()?);
    }
    String::from_utf8(out).ok()
}

fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'"' | b',' | b';' | b'\\' | b'%' => out.push_str(&format!("%{byte:02X}")),
            0x21..=0x7e => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_limit_is_named_and_a_refused_pair_changes_nothing() {
        let mut baggage = Baggage::default();
        for n in 0..Baggage::PAIRS_MAX {
            baggage.set(format!("k{n}"), "v").unwrap();
        }
        let full = baggage.clone();
        assert_eq!(
            baggage.set("more", "v").unwrap_err().to_string(),
            "baggage: at most 32 pairs travel with a request"
        );
        let long = baggage.set("k0", "x".repeat(Baggage::BYTES_MAX)).unwrap_err();
        assert!(long.to_string().ends_with("at most 4096 travel with a request"), "{long}");
        assert!(matches!(baggage.set("a b", "v"), Err(BaggageError::Key(_))));
        assert!(matches!(baggage.set("", "v"), Err(BaggageError::Key(_))));
        assert!(matches!(baggage.set("a", "line\n"), Err(BaggageError::Value(_))));
        assert_eq!(baggage, full);
        baggage.set("k0", "other").unwrap();
        assert_eq!((baggage.get("k0"), baggage.len()), (Some("other"), 32));
        assert_eq!(baggage.remove("k0").as_deref(), Some("other"));
        assert_eq!(baggage.get("k0"), None);
    }

    #[test]
    fn a_header_is_read_as_far_as_it_can_be() {
        let (baggage, left_out) = Baggage::from_header("user=Ada%20L, zone = north;ttl=3 ,, broken, x=%zz,=v,user=Bo");
        assert_eq!(baggage.iter().collect::<Vec<_>>(), [("user", "Bo"), ("zone", "north")]);
        assert_eq!(left_out, 3);
        let many: Vec<_> = (0..40).map(|n| format!("k{n}=v")).collect();
        let (baggage, left_out) = Baggage::from_header(&many.join(","));
        assert_eq!((baggage.len(), left_out), (32, 8));
    }

    #[test]
    fn a_peers_baggage_is_checked_as_well() {
        let pairs: Vec<_> = (0..40).map(|n| (format!("k{n}"), String::new())).collect();
        let bytes = rmp_serde::to_vec_named(&pairs).unwrap();
        let error = rmp_serde::from_slice::<Baggage>(&bytes).unwrap_err();
        assert!(error.to_string().contains("at most 32 pairs"), "{error}");
    }

    proptest! {
        #[test]
        fn a_header_comes_back_as_it_was_written(
            pairs in proptest::collection::btree_map("[a-z]{1,9}", "[a-zA-Z0-9 ,;=%\"\\\\äß日]{0,20}", 0..20)
        ) {
            let mut baggage = Baggage::default();
            for (key, value) in &pairs {
                baggage.set(key, value).unwrap();
            }
            prop_assert_eq!(Baggage::from_header(&baggage.header()), (baggage.clone(), 0));
            let bytes = rmp_serde::to_vec_named(&baggage).unwrap();
            prop_assert_eq!(rmp_serde::from_slice::<Baggage>(&bytes).unwrap(), baggage);
        }

        #[test]
        fn any_text_is_survived(text in ".{0,400}") {
            let (baggage, _) = Baggage::from_header(&text);
            prop_assert!(baggage.len() <= Baggage::PAIRS_MAX && baggage.bytes() <= Baggage::BYTES_MAX);
        }
    }
}
