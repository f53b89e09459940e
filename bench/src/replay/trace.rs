//! What is asked, and when.

use std::{fs, path::Path, time::Duration};

use serde::Deserialize;
use starling_ids::TokenId;

/// Tokens behind one hash id of a Mooncake trace.
pub const TRACE_BLOCK: usize = 512;

/// One request.
#[derive(Debug, Clone)]
pub struct Asked {
    /// When, since the trace began.
    pub at: Duration,
    /// Tokens in the prompt.
    pub prompt: u32,
    /// Tokens in the answer.
    pub answer: u32,
    /// One id for each [`TRACE_BLOCK`] tokens; equal ids stand for equal tokens.
    pub blocks: Vec<u64>,
}

#[derive(Debug, Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

impl Asked {
    /// The prompt's tokens: a made-up text that is the same for the same ids. `salt` makes another text of it.
    #[must_use]
    pub fn tokens(&self, salt: u64, vocabulary: u32) -> Vec<TokenId> {
        let length = self.prompt.max(1) as usize;
        let mut tokens = Vec::with_capacity(length + TRACE_BLOCK);
        for id in &self.blocks {
            let mut state = mix(*id ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            for _ in 0..TRACE_BLOCK {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                tokens.push(((state >> 33) % u64::from(vocabulary)) as TokenId);
            }
        }
        // A trace may be longer than its ids say; what nobody else has, is this request's own.
        let mut state = mix(self.at.as_nanos() as u64 ^ salt);
        while tokens.len() < length {
            state = mix(state);
            tokens.push((state % u64::from(vocabulary)) as TokenId);
        }
        tokens.truncate(length);
        tokens
    }
}

/// Reads a Mooncake trace: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.
///
/// # Errors
/// The file, or the number of the line that cannot be read.
pub fn mooncake(path: &Path) -> Result<Vec<Asked>, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut asked = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let line: Line =
            serde_json::from_str(line).map_err(|error| format!("{} line {}: {error}", path.display(), number + 1))?;
        asked.push(Asked {
            at: Duration::from_secs_f64(line.timestamp.max(0.0) / 1e3),
            prompt: line.input_length,
            answer: line.output_length.max(1),
            blocks: line.hash_ids,
        });
    }
    // Many arrive in the same millisecond of a coarse clock; they keep their order.
    asked.sort_by_key(|asked| asked.at);
    Ok(asked)
}

/// A well mixed number of another.
fn mix(x: u64) -> u64 {
    let mut x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
