//! Tokens to text, one at a time, exact to the byte.
//!
//! A character spread over tokens is held until it is whole; U+FFFD appears only for bytes that no
//! continuation can make valid, and for an answer that ends in mid-character. The joined pieces equal
//! the text of all tokens decoded at once.

use std::sync::Arc;

use starling_ids::TokenId;
use tokenizers::Tokenizer;

use crate::text::table::{Decoding, TokenTable};

/// Most tokens a window holds back while their text ends in U+FFFD; a character never needs more.
const WINDOW_TOKENS_MAX: usize = 16;

/// The decoding state of one answer.
#[derive(Debug)]
pub struct Detokenizer {
    decoding: Arc<Decoding>,
    skip_special: bool,
    /// Bytes of an unfinished character, at most 3; with a window decoder, unused.
    tail: Vec<u8>,
    at_start: bool,
    window: Window,
}

/// Which tokens a window decoder still has to look at.
#[derive(Debug, Default)]
struct Window {
    ids: Vec<TokenId>,
    /// Tokens before this are decoded only as context.
    shown: usize,
}

impl Detokenizer {
    /// The state before the first token.
    #[must_use]
    pub fn new(decoding: Arc<Decoding>, skip_special: bool) -> Self {
        Self { decoding, skip_special, tail: Vec::new(), at_start: true, window: Window::default() }
    }

    /// Appends what `id` completes to `out`.
    pub fn push(&mut self, id: TokenId, out: &mut String) {
        match &*self.decoding {
            Decoding::Table(table) => {
                let bytes = visible_bytes(table, id, self.skip_special, &mut self.at_start);
                append_utf8(&mut self.tail, bytes, out);
            }
            Decoding::Window(tokenizer) => {
                self.window.ids.push(id);
                self.window.advance(tokenizer, self.skip_special, false, out);
            }
        }
    }

    /// Appends what was held back: the tokens are over.
    pub fn finish(&mut self, out: &mut String) {
        match &*self.decoding {
            Decoding::Table(_) => {
                if !self.tail.is_empty() {
                    out.push('\u{FFFD}');
                    self.tail.clear();
                }
            }
            Decoding::Window(tokenizer) => self.window.advance(tokenizer, self.skip_special, true, out),
        }
    }
}

fn visible_bytes<'a>(table: &'a TokenTable, id: TokenId, skip_special: bool, at_start: &mut bool) -> &'a [u8] {
    if skip_special && table.is_special(id) {
        return &[];
    }
    let bytes = table.bytes(id);
    if *at_start && !bytes.is_empty() {
        *at_start = false;
        if table.strips_first_space {
            return bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
    }
    bytes
}

impl Window {
    fn advance(&mut self, tokenizer: &Tokenizer, skip_special: bool, last: bool, out: &mut String) {
        // A decoder that fails on these ids shows nothing for them; the ids themselves were valid.
        let decode = |ids: &[TokenId]| tokenizer.decode(ids, skip_special).unwrap_or_default();
        let before = decode(&self.ids[..self.shown]);
        let now = decode(&self.ids);
        let waiting = self.ids.len() - self.shown;
        if now.ends_with('\u{FFFD}') && !last && waiting < WINDOW_TOKENS_MAX {
            return;
        }
        let new = now.get(before.len()..).unwrap_or("");
        out.push_str(new);
        if !new.is_empty() {
            // What was just shown is context enough for what comes next.
            self.ids.drain(..self.shown);
        }
        self.shown = self.ids.len();
    }
}

/// Appends the valid text of `tail` and `bytes` to `out` and leaves an unfinished character in `tail`.
fn append_utf8(tail: &mut Vec<u8>, bytes: &[u8], out: &mut String) {
    if bytes.is_empty() {
        return;
    }
    if tail.is_empty()
        && let Ok(text) = std::str::from_utf8(bytes)
    {
        out.push_str(text);
        return;
    }
    tail.extend_from_slice(bytes);
    let joined = std::mem::take(tail);
    let mut chunks = joined.utf8_chunks().peekable();
    while let Some(chunk) = chunks.next() {
        out.push_str(chunk.valid());
        let invalid = chunk.invalid();
        if invalid.is_empty() {
            continue;
        }
        let unfinished = std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
        if unfinished && chunks.peek().is_none() {
            tail.extend_from_slice(invalid);
        } else {
            out.push('\u{FFFD}');
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures;

    fn decode(ids: &[TokenId]) -> String {
        let mut detokenizer = Detokenizer::new(fixtures::decoding(), true);
        let mut text = String::new();
        for id in ids {
            detokenizer.push(*id, &mut text);
        }
        detokenizer.finish(&mut text);
        text
    }

    #[test]
    fn txt_01_characters_over_tokens_come_out_whole() {
        let text = "삼겹살🙂é";
        let ids: Vec<_> = text.bytes().map(fixtures::byte).collect();
        let mut detokenizer = Detokenizer::new(fixtures::decoding(), true);
        let mut out = String::new();
        for id in &ids {
            detokenizer.push(*id, &mut out);
            assert!(text.starts_with(&out), "{out:?}");
        }
        assert_eq!(out, text);
        assert_eq!(decode(&ids[..ids.len() - 1]), "삼겹살🙂\u{FFFD}");
        assert_eq!(decode(&[fixtures::byte(0xFF), fixtures::byte(b'a')]), "\u{FFFD}a");
    }

    #[test]
    fn txt_04_special_tokens_show_only_when_asked() {
        let ids = [fixtures::byte(b'a'), fixtures::IM_END];
        assert_eq!(decode(&ids), "a");
        let mut shown = Detokenizer::new(fixtures::decoding(), false);
        let mut out = String::new();
        ids.iter().for_each(|id| shown.push(*id, &mut out));
        assert_eq!(out, "a<|im_end|>");
    }

    #[test]
    fn a_window_decoder_gives_the_same_text_as_one_decode() {
        let tokenizer = fixtures::sentencepiece_tokenizer();
        let ids: Vec<_> = ["\u{2581}hi", "\u{2581}hi", "<0xC3>", "<0xA9>", "\u{2581}hi"]
            .iter()
            .map(|token| tokenizer.token_to_id(token).expect("in the vocabulary"))
            .collect();
        let whole = tokenizer.decode(&ids, true).expect("decodes");
        for decoding in [Decoding::Window(Box::new(tokenizer.clone())), Decoding::new(&tokenizer)] {
            let mut detokenizer = Detokenizer::new(Arc::new(decoding), true);
            let mut out = String::new();
            ids.iter().for_each(|id| detokenizer.push(*id, &mut out));
            detokenizer.finish(&mut out);
            assert_eq!(out, whole);
            assert_eq!(out, "hi hié hi");
        }
    }

    proptest! {
        #[test]
        fn joined_pieces_equal_the_lossy_text_of_all_bytes(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let ids: Vec<_> = bytes.iter().map(|byte| fixtures::byte(*byte)).collect();
            prop_assert_eq!(decode(&ids), String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
