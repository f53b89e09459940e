//! The model's own tokenizer, where a server speaks text.
//!
//! Called by the dialects: to write a prompt for a server of text alone, and to find the tokens of text that came without them.
//! Pure.

use starling_ids::TokenId;
use tokenizers::Tokenizer;

use crate::bundle::TokenizerBundle;

/// A text that every tokenizer cuts into several tokens; asked of the server to see that it has the same tokenizer.
pub(super) const PROBE: &str = "The quick brown fox: 1234 + naïve café, déjà vu! fn main() {}\n\tüber";

/// See the module.
pub(super) struct Words {
    tokenizer: Tokenizer,
    /// Tokens that end an answer.
    pub(super) eos: Vec<TokenId>,
    /// Every id is below it.
    pub(super) vocab: u32,
    /// Servers put it before a text by themselves.
    bos: Option<TokenId>,
}

impl Words {
    /// Reads a tokenizer.
    pub(super) fn new(bundle: &TokenizerBundle, eos: &[TokenId], vocab: u32) -> Result<Self, String> {
        let tokenizer: Tokenizer =
            bundle.tokenizer_json.parse().map_err(|error| format!("the tokenizer cannot be used: {error}"))?;
        let bos = bundle.bos_token.as_deref().filter(|_| bundle.add_bos).and_then(|text| tokenizer.token_to_id(text));
        Ok(Self { tokenizer, eos: eos.to_vec(), vocab, bos })
    }

    /// The tokens of a text, nothing added.
    pub(super) fn tokens(&self, text: &str) -> Result<Vec<TokenId>, String> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, special ones included, without the one that a server puts before it by itself.
    pub(super) fn text(&self, tokens: &[TokenId]) -> Result<String, String> {
        let tokens = match (tokens.first(), self.bos) {
            (Some(first), Some(bos)) if *first == bos => &tokens[1..],
            _ => tokens,
        };
        self.tokenizer.decode(tokens, false).map_err(|error| error.to_string())
    }

    /// Whether text may be cut anywhere: the tokens of its pieces are then tokens of the whole.
    pub(super) fn joins_anywhere(&self) -> bool {
        let pieces = ["Hello", " wor", "ld", ",\n", "  x", "yz", " ", "é"];
        let tokens: Result<Vec<Vec<TokenId>>, String> = pieces.iter().map(|piece| self.tokens(piece)).collect();
        let joined =
            tokens.and_then(|tokens| self.tokenizer.decode(&tokens.concat(), false).map_err(|error| error.to_string()));
        joined.is_ok_and(|joined| joined == pieces.concat())
    }
}
