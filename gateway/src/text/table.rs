//! The bytes of every token of a vocabulary, worked out once per model.
//!
//! Byte-level BPE and SentencePiece-style tokenizers decode token by token, so a table answers. Any other
//! decoder looks at its neighbours and is asked for whole windows of tokens ([`Decoding::Window`]).

use starling_ids::TokenId;
use tokenizers::Tokenizer;

/// How a model's tokens become bytes.
#[derive(Debug)]
pub enum Decoding {
    /// Each token stands for fixed bytes.
    Table(TokenTable),
    /// The tokenizer's own decoder, over windows of tokens.
    Window(Box<Tokenizer>),
}

impl Decoding {
    /// A table when the tokenizer's decoder allows one, windows otherwise.
    #[must_use]
    pub fn new(tokenizer: &Tokenizer) -> Self {
        match TokenTable::new(tokenizer) {
            Some(table) => Self::Table(table),
            None => Self::Window(Box::new(tokenizer.clone())),
        }
    }

    /// The bytes of one token on its own, for log-probabilities: special tokens show their text.
    #[must_use]
    pub fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        match self {
            Self::Table(table) => table.bytes(id).to_vec(),
            Self::Window(tokenizer) => tokenizer.decode(&[id], false).map(String::into_bytes).unwrap_or_default(),
        }
    }
}

/// Fixed bytes per token id.
#[derive(Debug)]
pub struct TokenTable {
    bytes: Vec<u8>,
    /// `ends[id]` is where the bytes of `id` end; they begin where those of `id - 1` end.
    ends: Vec<u32>,
    special: Vec<bool>,
    /// The decoder drops one space at the very start of a text.
    pub(super) strips_first_space: bool,
}

/// What a decoder does, as far as a table can do it.
struct TableRule {
    byte_level: bool,
    byte_fallback: bool,
    strips_first_space: bool,
}

impl TokenTable {
    /// The table of a tokenizer, or `None` when its decoder needs context.
    #[must_use]
    pub fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let rule = TableRule::of(tokenizer)?;
        let added = tokenizer.get_added_tokens_decoder();
        let mut texts: Vec<(TokenId, String)> =
            tokenizer.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
        texts.sort_unstable();
        let size = texts.last().map_or(0, |(id, _)| *id as usize + 1);
        let mut table = Self {
            bytes: Vec::with_capacity(size * 6),
            ends: Vec::with_capacity(size),
            special: vec![false; size],
            strips_first_space: rule.strips_first_space,
        };
        for (id, text) in texts {
            let index = id as usize;
            // Ids without a token, and a second name of one id, get no bytes.
            while table.ends.len() < index {
                table.ends.push(table.bytes.len() as u32);
            }
            if table.ends.len() > index {
                continue;
            }
            match added.get(&id) {
                Some(token) => {
                    table.special[index] = token.special;
                    table.bytes.extend_from_slice(token.content.as_bytes());
                }
                None => rule.append(&text, &mut table.bytes),
            }
            table.ends.push(table.bytes.len() as u32);
        }
        Some(table)
    }

    /// The bytes of a token; none for an unknown id.
    #[must_use]
    pub fn bytes(&self, id: TokenId) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// True for control tokens, which are shown only when asked for.
    #[must_use]
    pub fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

impl TableRule {
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let decoder = serde_json::to_value(tokenizer.get_decoder()?).ok()?;
        let mut rule = Self { byte_level: false, byte_fallback: false, strips_first_space: false };
        let mut spaces = false;
        let steps = match decoder.get("decoders").and_then(serde_json::Value::as_array) {
            Some(list) => list.clone(),
            None => vec![decoder],
        };
        for step in &steps {
            match step.get("type")?.as_str()? {
                "ByteLevel" => rule.byte_level = true,
                "ByteFallback" => rule.byte_fallback = true,
                "Fuse" => {}
                "Replace" if step["pattern"]["String"] == "\u{2581}" && step["content"] == " " => spaces = true,
                "Strip" if step["content"] == " " && step["start"] == 1 && step["stop"] == 0 => {
                    rule.strips_first_space = true;
                }
                "Metaspace" if step["replacement"] == "\u{2581}" => {
                    spaces = true;
                    rule.strips_first_space = step["prepend_scheme"] != "never";
                }
                _ => return None,
            }
        }
        (rule.byte_level != spaces).then_some(rule)
    }

    fn append(&self, text: &str, out: &mut Vec<u8>) {
        if self.byte_level {
            let start = out.len();
            for c in text.chars() {
                let Some(byte) = byte_of(c) else {
                    // A token outside the byte alphabet stands for itself.
                    out.truncate(start);
                    out.extend_from_slice(text.as_bytes());
                    return;
                };
                out.push(byte);
            }
            return;
        }
        if self.byte_fallback
            && let Some(byte) = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'))
            && byte.len() == 2
            && let Ok(byte) = u8::from_str_radix(byte, 16)
        {
            out.push(byte);
            return;
        }
        out.extend_from_slice(text.replace('\u{2581}', " ").as_bytes());
    }
}

/// Printable bytes stand for themselves in a byte-level vocabulary; the others are numbered from U+0100.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The byte that a character of the byte-level alphabet stands for.
fn byte_of(c: char) -> Option<u8> {
    let code = c as u32;
    if code < 256 {
        return u8::try_from(code).ok().filter(|byte| is_printable(*byte));
    }
    (0..=255u8).filter(|byte| !is_printable(*byte)).nth(code as usize - 256)
}

/// The character that a byte is written as in a byte-level vocabulary.
#[must_use]
pub fn char_of(byte: u8) -> char {
    if is_printable(byte) {
        return byte as char;
    }
    let number = (0..byte).filter(|other| !is_printable(*other)).count() as u32;
    char::from_u32(256 + number).unwrap_or('\u{FFFD}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        for byte in 0..=255u8 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!(char_of(b' '), 'Ġ');
        assert_eq!(char_of(b'\n'), 'Ċ');
    }

    #[test]
    fn a_byte_level_vocabulary_gets_a_table() {
        let tokenizer = fixtures::tokenizer();
        let table = TokenTable::new(&tokenizer).expect("byte level");
        for byte in 0..=255u8 {
            assert_eq!(table.bytes(fixtures::byte(byte)), [byte]);
        }
        assert!(table.is_special(fixtures::IM_END));
        assert_eq!(table.bytes(fixtures::IM_END), b"<|im_end|>");
        assert!(table.bytes(1 << 30).is_empty());
    }

    #[test]
    fn a_sentencepiece_style_vocabulary_gets_a_table() {
        let tokenizer = fixtures::sentencepiece_tokenizer();
        let table = TokenTable::new(&tokenizer).expect("replace, fallback, fuse, strip");
        assert!(table.strips_first_space);
        let id = tokenizer.token_to_id("\u{2581}hi").expect("in the vocabulary");
        assert_eq!(table.bytes(id), b" hi");
        let id = tokenizer.token_to_id("<0xC3>").expect("in the vocabulary");
        assert_eq!(table.bytes(id), [0xC3]);
    }
}
