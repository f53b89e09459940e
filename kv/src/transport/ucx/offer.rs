//! The address of a host's UCX, as one line of text in its descriptor.
//!
//! Called by the transport on both sides. Pure. Never: trusts a length. Bounds: `PART_MAX` bytes a part; some hundred
//! bytes in practice.
//!
//! `<control address>/<base>/<key>/<probe's base>/<probe's key>`, all but the first in hexadecimal.

use std::{fmt, net::SocketAddr, str::FromStr};

use super::super::error::Refusal;

/// Bytes of a key at most.
const PART_MAX: usize = 4 << 10;

/// One region, as a peer reaches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Window {
    /// The address of its first byte in the owner's process.
    pub(super) base: u64,
    /// UCX's key to it.
    pub(super) key: Vec<u8>,
}

/// All that a peer needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reach {
    /// Where the owner's gate is asked.
    pub(super) control: SocketAddr,
    /// The region that the descriptor is of.
    pub(super) window: Window,
    /// The probe's region.
    pub(super) probe: Window,
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.control)?;
        [&self.window, &self.probe].iter().try_for_each(|window| write!(f, "/{:x}/{}", window.base, Hex(&window.key)))
    }
}

fn bytes(text: &str) -> Option<Vec<u8>> {
    let fits = !text.is_empty() && text.len().is_multiple_of(2) && text.len() <= 2 * PART_MAX;
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |pair: &[u8]| u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok();
    if fits { text.as_bytes().chunks_exact(2).map(byte).collect() } else { None }
}

fn read(text: &str) -> Option<Reach> {
    let mut parts = text.split('/');
    let control = parts.next()?.parse().ok()?;
    let mut window = || Some(Window { base: u64::from_str_radix(parts.next()?, 16).ok()?, key: bytes(parts.next()?)? });
    let (window, probe) = (window()?, window()?);
    parts.next().is_none().then_some(Reach { control, window, probe })
}

impl FromStr for Reach {
    type Err = Refusal;

    fn from_str(text: &str) -> Result<Self, Refusal> {
        read(text).ok_or(Refusal::Malformed)
    }
}
