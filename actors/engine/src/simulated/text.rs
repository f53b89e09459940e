//! What the simulated model says: words, chosen by the tokens before them alone.
//!
//! Called by the backend with one token at a time. The state after a token is a function of the prefix, so it can be
//! cached, moved and recomputed like keys and values. It knows where the prompt ended without being told: an answer is
//! the run of tokens that are the ones it would have said itself.

use starling_ids::TokenId;
use tokenizers::Tokenizer;

/// Plain words, each at most 9 letters.
const WORDS: [&str; 48] = [
    "air", "amber", "apple", "bird", "branch", "bridge", "cedar", "cloud", "coast", "copper", "dawn", "deep", "field",
    "fire", "flock", "forest", "garden", "grain", "green", "harbour", "hill", "island", "lake", "light", "meadow",
    "mist", "moon", "morning", "mountain", "night", "north", "ocean", "path", "quiet", "rain", "river", "sand",
    "shadow", "silver", "sky", "snow", "south", "spring", "starling", "stone", "summer", "valley", "wind",
];

/// Shortest answer, in tokens with its end token.
const LENGTH_MIN: u64 = 16;
/// Lengths are spread over this many; the word that is being said is finished, so an answer may be up to 9 tokens longer.
const LENGTH_SPREAD: u64 = 176;

/// The words as tokens.
#[derive(Debug)]
pub(super) struct Language {
    /// Words that begin an answer, then as many that follow another word.
    words: Vec<Vec<TokenId>>,
    eos: TokenId,
}

/// The state after one token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct State {
    /// Digest of all tokens so far; never 0 once there is one.
    pub(super) digest: u64,
    /// Digest where the run of its own words began.
    pub(super) anchor: u64,
    /// Tokens in that run.
    pub(super) run: u32,
    /// The word being said.
    pub(super) word: u32,
    /// Its tokens said.
    pub(super) offset: u32,
    /// 1 when the run has had its end token.
    pub(super) ended: u32,
}

impl Language {
    /// Encodes the words with a `tokenizer.json`.
    ///
    /// # Errors
    /// What is wrong with the tokenizer, in words.
    pub(super) fn new(tokenizer_json: &str, eos_ids: &[TokenId]) -> Result<Self, String> {
        let tokenizer: Tokenizer = tokenizer_json.parse().map_err(|error| format!("tokenizer: {error}"))?;
        let eos = *eos_ids.first().ok_or("the tokenizer names no end-of-sequence token")?;
        let capital = |word: &str| word.get(..1).unwrap_or_default().to_uppercase() + word.get(1..).unwrap_or_default();
        let first = WORDS.iter().map(|word| capital(word));
        let mut words = Vec::with_capacity(2 * WORDS.len());
        for text in first.chain(WORDS.iter().map(|word| format!(" {word}"))) {
            let encoded = tokenizer.encode_fast(text.as_str(), false).map_err(|error| format!("{text:?}: {error}"))?;
            if encoded.get_ids().is_empty() {
                return Err(format!("the tokenizer has no token for {text:?}"));
            }
            words.push(encoded.get_ids().to_vec());
        }
        Ok(Self { words, eos })
    }

    /// The token that it would say next.
    pub(super) fn next(&self, state: State) -> TokenId {
        let between = state.offset == 0 && state.run > 0;
        let length = LENGTH_MIN + state.anchor % LENGTH_SPREAD;
        if between && state.ended == 0 && u64::from(state.run) + 1 >= length {
            return self.eos;
        }
        let word = self.words.get(state.word as usize).map_or(&[][..], Vec::as_slice);
        word.get(state.offset as usize).copied().unwrap_or(self.eos)
    }

    /// The state after `token`.
    pub(super) fn after(&self, state: State, token: TokenId) -> State {
        let digest = mix(state.digest, u64::from(token)) | 1;
        if state.digest == 0 || token != self.next(state) {
            let word = (mix(digest, 1) % WORDS.len() as u64) as u32;
            return State { digest, anchor: mix(digest, 0), run: 0, word, offset: 0, ended: 0 };
        }
        let run = state.run + 1;
        let said = state.offset as usize + 1;
        let ended = u32::from(state.ended == 1 || (token == self.eos && state.offset == 0 && state.run > 0));
        let whole = self.words.get(state.word as usize).is_none_or(|word| said >= word.len());
        if whole || ended > state.ended {
            let word = WORDS.len() as u64 + mix(state.anchor, u64::from(run)) % WORDS.len() as u64;
            return State { digest, run, word: word as u32, offset: 0, ended, ..state };
        }
        State { digest, run, offset: said as u32, ended, ..state }
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x2d35_8dcc_aa6c_78a5) * u128::from(b ^ 0x8bb8_4b93_962e_acc9);
    let folded = (product >> 64) as u64 ^ product as u64;
    (folded ^ (folded >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl State {
    /// Bytes of one state.
    pub(super) const BYTES: usize = 32;

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.digest.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.anchor.to_le_bytes());
        for (place, value) in bytes[16..].chunks_exact_mut(4).zip([self.run, self.word, self.offset, self.ended]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let long = |at: usize| (0..8).fold(0, |value, byte| value | u64::from(bytes[at + byte]) << (8 * byte));
        let short = |at: usize| long(at) as u32;
        let (run, word, offset) = (short(16), short(20), short(24));
        let ended = (long(24) >> 32) as u32;
        Self { digest: long(0), anchor: long(8), run, word, offset, ended }
    }
}
