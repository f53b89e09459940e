//! What is asked, and when; and how a recorded trace is read.
//!
//! A prompt is a list of pieces, each a made-up text that is the same wherever its number is the same. A request may
//! go on from another one: then its prompt begins with that one's prompt and answer, and it comes when that has ended.

use std::{collections::HashSet, fs, path::Path, time::Duration};

use serde::Deserialize;
use starling_ids::TokenId;
use thiserror::Error;

/// Tokens behind one hash id of a Mooncake trace.
pub const TRACE_BLOCK: u32 = 512;

/// Longest prompt that a line may ask for, tokens.
const PROMPT_MAX: u32 = 16 << 20;

/// A run of made-up tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Equal numbers stand for equal tokens.
    pub id: u64,
    /// How many.
    pub tokens: u32,
}

/// One request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Asked {
    /// When, since the traffic began; for one that waits for others, how long after the last of them.
    pub at: Duration,
    /// Tokens in the prompt, what it goes on from included.
    pub prompt: u32,
    /// Tokens in the answer, at least 1.
    pub answer: u32,
    /// What the prompt adds to what it goes on from.
    pub pieces: Vec<Piece>,
    /// Earlier requests that must have ended. It goes on from the first: that one's prompt and answer begin its prompt.
    pub after: Vec<usize>,
}

/// Why a trace cannot be used.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line is not what it should be.
    #[error(
        "{path} line {line}: {reason}; a line is a JSON object with timestamp (ms), input_length, output_length, hash_ids"
    )]
    Line {
        /// Which file.
        path: String,
        /// Which line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// There is nothing in it.
    #[error("{path}: no requests in it")]
    Empty {
        /// Which file.
        path: String,
    },
}

#[derive(Debug, Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

impl Line {
    fn check(&self) -> Result<(), String> {
        if !(0.0..=1e12).contains(&self.timestamp) {
            return Err(format!("timestamp {} is not a number of milliseconds from 0 to 10^12", self.timestamp));
        }
        if self.input_length == 0 || self.input_length > PROMPT_MAX {
            return Err(format!("input_length {} is not from 1 to {PROMPT_MAX}", self.input_length));
        }
        Ok(())
    }

    fn asked(self, own: u64) -> Asked {
        let mut left = self.input_length;
        let mut pieces = Vec::with_capacity(self.hash_ids.len() + 1);
        for id in self.hash_ids {
            let tokens = left.min(TRACE_BLOCK);
            if tokens > 0 {
                pieces.push(Piece { id, tokens });
            }
            left -= tokens;
        }
        if left > 0 {
            // A prompt may be longer than its ids say; what no id stands for is this request's own.
            pieces.push(Piece { id: own, tokens: left });
        }
        Asked {
            at: Duration::from_secs_f64(self.timestamp / 1e3),
            prompt: self.input_length,
            answer: self.output_length.max(1),
            pieces,
            after: Vec::new(),
        }
    }
}

/// Reads a Mooncake trace: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one for each
/// [`TRACE_BLOCK`] tokens). Requests are sorted by time; equal times keep the file's order.
///
/// # Errors
/// Names the file, and the line that cannot be read.
pub fn mooncake(path: &Path) -> Result<Vec<Asked>, TraceError> {
    let name = || path.display().to_string();
    let text = fs::read_to_string(path).map_err(|source| TraceError::Io { path: name(), source })?;
    let mut asked = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |reason: String| TraceError::Line { path: name(), line: number + 1, reason };
        let line: Line = serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
        line.check().map_err(wrong)?;
        asked.push(line.asked(mix(u64::MAX, number as u64)));
    }
    if asked.is_empty() {
        return Err(TraceError::Empty { path: name() });
    }
    asked.sort_by_key(|asked| asked.at);
    spread(&mut asked);
    Ok(asked)
}

/// The trace's clock is coarse: many requests bear the same time. They are spread over the gap to the next one.
fn spread(asked: &mut [Asked]) {
    let mut from = 0;
    while from < asked.len() {
        let at = asked[from].at;
        let to = (from..asked.len()).find(|next| asked[*next].at > at).unwrap_or(asked.len());
        let gap = asked.get(to).map_or(Duration::ZERO, |next| next.at - at);
        for (place, one) in asked[from..to].iter_mut().enumerate() {
            one.at = at + gap.mul_f64(place as f64 / (to - from) as f64);
        }
        from = to;
    }
}

/// The same traffic with arrivals `factor` times as far apart; pauses between turns stay as long as they are.
#[must_use]
pub fn stretched(asked: &[Asked], factor: f64) -> Vec<Asked> {
    let mut asked = asked.to_vec();
    for one in asked.iter_mut().filter(|one| one.after.is_empty()) {
        one.at = one.at.mul_f64(factor);
    }
    asked
}

/// Requests a second over the time in which they come by themselves; all of a session count at its first one.
#[must_use]
pub fn rate(asked: &[Asked]) -> f64 {
    let last = asked.iter().filter(|one| one.after.is_empty()).map(|one| one.at).max().unwrap_or_default();
    asked.len() as f64 / last.as_secs_f64().max(1e-3)
}

/// The tokens of pieces, appended. `vocabulary` is the number of token ids.
pub fn write_tokens(pieces: &[Piece], vocabulary: u32, tokens: &mut Vec<TokenId>) {
    for piece in pieces {
        let mut state = mix(piece.id, 0);
        for _ in 0..piece.tokens {
            // A linear congruence is random enough for token ids.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            tokens.push(((state >> 33) % u64::from(vocabulary.max(1))) as TokenId);
        }
    }
}

/// For each request, leading prompt tokens that an earlier one had too: what a cache without bounds, shared by all workers
/// and filled at once, would hold.
#[must_use]
pub fn seen_before(asked: &[Asked]) -> Vec<u32> {
    let mut seen = HashSet::new();
    // The chain over prompt and answer of each request, for those that go on from it.
    let mut ends = vec![0u64; asked.len()];
    let mut cached = Vec::with_capacity(asked.len());
    for (at, one) in asked.iter().enumerate() {
        let base = one.after.first().copied().filter(|base| *base < at);
        let mut chain = base.map_or(0, |base| ends[base]);
        let own: u32 = one.pieces.iter().map(|piece| piece.tokens).sum();
        let mut tokens = one.prompt.saturating_sub(own);
        let mut known = true;
        for piece in &one.pieces {
            chain = mix(chain, mix(piece.id, u64::from(piece.tokens)));
            known &= !seen.insert(chain);
            tokens += if known { piece.tokens } else { 0 };
        }
        ends[at] = mix(chain, u64::MAX - at as u64);
        cached.push(tokens.min(one.prompt));
    }
    cached
}

/// A well mixed number of two others.
#[must_use]
pub fn mix(a: u64, b: u64) -> u64 {
    // The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
    let mut x = a ^ b.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
