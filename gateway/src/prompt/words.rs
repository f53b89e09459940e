//! Text to token ids for byte-level BPE, word by word from a cache.
//!
//! The library's own way keeps offsets and strings for every token, which costs more than the merges do. This one cuts
//! text into words with the tokenizer's own expressions, asks the library only for words it has not met, and keeps
//! what it said. It is used for tokenizers whose steps it knows to the letter ([`WordEncoder::new`] says which), and
//! only when it agrees with the library on [`SAMPLE`].
//!
//! Bounds: [`WORDS_MAX`] words of [`WORD_BYTES_MAX`] bytes in each cache, one cache per text encoded at the same time.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use fancy_regex::Regex;
use serde_json::Value as Json;
use starling_ids::TokenId;
use tokenizers::{Model as _, ModelWrapper, Tokenizer};

use crate::{prompt::PromptError, text::table::char_of};

/// Words kept; a cache that is full starts anew.
const WORDS_MAX: usize = 1 << 15;
/// Longest word kept.
const WORD_BYTES_MAX: usize = 64;
/// Caches kept for the next text; more texts at once than this use one that is thrown away.
const CACHES_MAX: usize = 16;

/// How GPT-2 cuts text, which a `ByteLevel` step does when asked for its expression.
const BYTE_LEVEL: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// How Llama 3 cuts text.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// How Qwen 2 cuts text.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What both ways must agree on before this one is used.
const SAMPLE: &str = "Hello, world!  It's 2024-05-06;\n\n\tfn main() {\r\n  let x = \"\u{e9}\u{301}\";  }   \n \u{a0}I'LL we'll \
    \u{c0}\u{df} \u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}123\u{663} \u{1f642}\u{1f44d}\u{1f3fd}\u{200d} \u{5e9}\u{5dc}\u{5d5}\u{5dd}\u{2028} \u{2167}\u{b2} 1234567 12 _a_b__ \u{0} $%^&*~` ...";

/// One cut of a text into pieces; what lies between the matches is a piece too.
#[derive(Debug)]
enum Cut {
    /// Every digit for itself.
    Digits,
    /// Runs of digits.
    Numbers,
    /// What an expression matches.
    Pattern(Box<Regex>),
    /// The same, of an expression of a known family: plain words and runs of white space need not be searched for.
    Family(Box<Regex>, Family),
}

/// What expressions do with white space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    /// As GPT-2's: all white characters are alike.
    Gpt2,
    /// As Llama 3's and Qwen 2's: line ends are taken first.
    Lines,
}

/// Words and their tokens.
#[derive(Debug, Default)]
struct WordCache {
    /// Where a word's tokens lie in `ids`: start and count.
    places: HashMap<Box<str>, (u32, u32)>,
    ids: Vec<TokenId>,
}

/// Encodes text without added tokens.
#[derive(Debug)]
pub struct WordEncoder {
    cuts: Vec<Cut>,
    /// The tokenizer composes characters first, which changes no ASCII text; other text is the library's.
    ascii_only: bool,
    /// The byte-level character of every byte.
    alphabet: [char; 256],
    caches: Mutex<Vec<WordCache>>,
}

impl WordEncoder {
    /// For a BPE tokenizer without dropout, whose normalizer is none or NFC and whose steps are `Digits`, `Split` by an
    /// expression and, last, `ByteLevel` without a space of its own. `None` for any other.
    #[must_use]
    pub fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(bpe) = tokenizer.get_model() else { return None };
        if bpe.dropout.is_some() {
            return None;
        }
        let ascii_only = match tokenizer.get_normalizer() {
            None => false,
            Some(normalizer) if serde_json::to_value(normalizer).ok()?["type"] == "NFC" => true,
            Some(_) => return None,
        };
        let cuts = cuts(&serde_json::to_value(tokenizer.get_pre_tokenizer()?).ok()?)?;
        let encoder = Self {
            cuts,
            ascii_only,
            alphabet: std::array::from_fn(|byte| char_of(byte as u8)),
            caches: Mutex::default(),
        };
        let agrees = [SAMPLE, &SAMPLE.replace(|c: char| !c.is_ascii(), "")].into_iter().all(|text| {
            let theirs = tokenizer.encode_fast(text, false).map(|encoding| encoding.get_ids().to_vec()).ok();
            !encoder.takes(text) || encoder.encode(tokenizer, text).ok() == theirs
        });
        agrees.then_some(encoder)
    }

    /// True when this text may be encoded here.
    #[must_use]
    pub fn takes(&self, text: &str) -> bool {
        !self.ascii_only || text.is_ascii()
    }

    /// Token ids of a text that [`Self::takes`] and that holds no added token.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<TokenId>, PromptError> {
        let mut cache = self.caches.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.cut(&self.cuts, text, &mut |word| self.word(tokenizer, &mut cache, word, &mut ids))?;
        let mut caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        if caches.len() < CACHES_MAX {
            caches.push(cache);
        }
        Ok(ids)
    }

    /// Applies the cuts one inside the other and hands the pieces on in order.
    fn cut(&self, cuts: &[Cut], text: &str, each: &mut Each<'_>) -> Result<(), PromptError> {
        let Some((first, rest)) = cuts.split_first() else { return each(text) };
        let mut from = 0;
        let mut piece = |start: usize, end: usize| {
            if from < start {
                self.cut(rest, &text[from..start], each)?;
            }
            from = end;
            self.cut(rest, &text[start..end], each)
        };
        match first {
            Cut::Digits => {
                for (at, digit) in text.char_indices().filter(|(_, c)| c.is_numeric()) {
                    piece(at, at + digit.len_utf8())?;
                }
            }
            Cut::Numbers => {
                let mut number = None;
                for (at, c) in text.char_indices() {
                    match (number, c.is_numeric()) {
                        (None, true) => number = Some(at),
                        (Some(start), false) => {
                            piece(start, at)?;
                            number = None;
                        }
                        _ => {}
                    }
                }
                if let Some(start) = number {
                    piece(start, text.len())?;
                }
            }
            Cut::Pattern(pattern) => {
                for found in pattern.find_iter(text) {
                    let found = found.map_err(|error| bad(error.to_string()))?;
                    piece(found.start(), found.end())?;
                }
            }
            Cut::Family(pattern, family) => {
                let mut at = 0;
                while at < text.len() {
                    let (start, end) = match family.known(text, at) {
                        Some(end) => (at, end),
                        None => match pattern.find_from_pos(text, at).map_err(|error| bad(error.to_string()))? {
                            Some(found) => (found.start(), found.end()),
                            None => break,
                        },
                    };
                    piece(start, end)?;
                    at = end;
                }
            }
        }
        if from < text.len() { self.cut(rest, &text[from..], each) } else { Ok(()) }
    }

    fn word(
        &self,
        tokenizer: &Tokenizer,
        cache: &mut WordCache,
        word: &str,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), PromptError> {
        if let Some(&(start, count)) = cache.places.get(word) {
            ids.extend_from_slice(&cache.ids[start as usize..][..count as usize]);
            return Ok(());
        }
        let written: String = word.bytes().map(|byte| self.alphabet[byte as usize]).collect();
        let tokens = tokenizer.get_model().tokenize(&written).map_err(|error| bad(error.to_string()))?;
        ids.extend(tokens.iter().map(|token| token.id));
        if word.len() <= WORD_BYTES_MAX {
            if cache.places.len() >= WORDS_MAX {
                *cache = WordCache::default();
            }
            let place = (cache.ids.len() as u32, tokens.len() as u32);
            cache.ids.extend(tokens.iter().map(|token| token.id));
            cache.places.insert(word.into(), place);
        }
        Ok(())
    }
}

impl Family {
    /// The end of the match at `at`, where it is one of the two kinds that most are.
    fn known(self, text: &str, at: usize) -> Option<usize> {
        plain_word(text.as_bytes(), at).or_else(|| self.white_run(text, at))
    }

    /// Two or more white characters: as `\s+(?!\S)` all but the last, or all at the end of the text. Expressions that know
    /// lines take everything up to the last line end first. The expression itself would try every length, one by one.
    fn white_run(self, text: &str, at: usize) -> Option<usize> {
        let (mut count, mut last, mut line_end, mut end) = (0, at, None, at);
        for c in text[at..].chars().take_while(|c| c.is_whitespace()) {
            (count, last, end) = (count + 1, end, end + c.len_utf8());
            if matches!(c, '\r' | '\n') {
                line_end = Some(end);
            }
        }
        match (self, line_end) {
            _ if count < 2 => None,
            (Self::Lines, Some(line_end)) => Some(line_end),
            _ if end == text.len() => Some(end),
            _ => Some(last),
        }
    }
}

/// The end of the ASCII word at `at`, with or without a space before it, when it is certain what ends it: a letter of
/// another script might go on with it.
fn plain_word(text: &[u8], at: usize) -> Option<usize> {
    let start = at + usize::from(text[at] == b' ');
    let letters = text[start..].iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
    let end = start + letters;
    (letters > 0 && text.get(end).is_none_or(u8::is_ascii)).then_some(end)
}

type Each<'a> = dyn FnMut(&str) -> Result<(), PromptError> + 'a;

fn bad(reason: String) -> PromptError {
    PromptError::Untokenizable(reason)
}

/// The cuts of a pre-tokenizer, or `None` when one of its steps is not known here.
fn cuts(pre_tokenizer: &Json) -> Option<Vec<Cut>> {
    let steps = match pre_tokenizer["pretokenizers"].as_array() {
        Some(list) => list.as_slice(),
        None => std::slice::from_ref(pre_tokenizer),
    };
    let (last, before) = steps.split_last()?;
    let pattern = |text: &str| {
        let regex = Box::new(Regex::new(text).ok()?);
        Some(match text {
            BYTE_LEVEL => Cut::Family(regex, Family::Gpt2),
            LLAMA3 | QWEN2 => Cut::Family(regex, Family::Lines),
            _ => Cut::Pattern(regex),
        })
    };
    let mut cuts = Vec::new();
    for step in before {
        cuts.push(match step["type"].as_str()? {
            "Digits" if step["individual_digits"] == true => Cut::Digits,
            "Digits" => Cut::Numbers,
            "Split" if step["behavior"] == "Isolated" && step["invert"] == false => {
                pattern(step["pattern"]["Regex"].as_str()?)?
            }
            _ => return None,
        });
    }
    if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
        return None;
    }
    if last["use_regex"] == true {
        cuts.push(pattern(BYTE_LEVEL)?);
    }
    Some(cuts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// A byte-level tokenizer with some merges of its own and these steps before it.
    fn tokenizer(normalizer: Json, steps: &[Json]) -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        for byte in 0..=255u8 {
            vocab.insert(char_of(byte).to_string(), u32::from(byte).into());
        }
        let merges =
            ["t h", "th e", "Ġ the", "Ġ a", "i n", "Ġ Ġ", "ĠĠ ĠĠ", "1 2", "Ã ©", "Ġ Ã", "Ċ Ċ", "' s", "l l", "' ll"];
        for merge in merges {
            let next = vocab.len();
            vocab.insert(merge.replace(' ', ""), next.into());
        }
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": merges}
        })
        .to_string()
        .parse()
        .expect("a good tokenizer")
    }

    fn byte_level(use_regex: bool) -> Json {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
    }

    fn split(expression: &str) -> Json {
        json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false})
    }

    /// The steps of the families that are met: GPT-2, SmolLM, StarCoder, Llama 3, one that matches empty text, Qwen 2.
    fn families() -> Vec<Tokenizer> {
        let digits = |individual: bool| json!({"type": "Digits", "individual_digits": individual});
        vec![
            tokenizer(Json::Null, &[byte_level(true)]),
            tokenizer(Json::Null, &[digits(true), byte_level(true)]),
            tokenizer(Json::Null, &[digits(false), byte_level(true)]),
            tokenizer(Json::Null, &[split(LLAMA3), byte_level(false)]),
            tokenizer(Json::Null, &[split(r"\p{L}*|\s+"), byte_level(false)]),
            tokenizer(json!({"type": "NFC"}), &[split(QWEN2), byte_level(false)]),
        ]
    }

    #[test]
    fn only_steps_known_to_the_letter_are_taken() {
        assert!(families().iter().all(|tokenizer| WordEncoder::new(tokenizer).is_some()));
        let spaced = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        assert!(WordEncoder::new(&tokenizer(Json::Null, &[spaced])).is_none());
        assert!(WordEncoder::new(&tokenizer(json!({"type": "Lowercase"}), &[byte_level(true)])).is_none());
        assert!(WordEncoder::new(&tokenizer(Json::Null, &[json!({"type": "Whitespace"}), byte_level(true)])).is_none());
    }

    #[test]
    fn a_full_cache_starts_anew_and_changes_nothing() {
        let tokenizer = &families()[0];
        let encoder = WordEncoder::new(tokenizer).expect("known");
        let text: String = (0..WORDS_MAX + 10).map(|number| format!(" {number}")).collect();
        let theirs = tokenizer.encode_fast(text.as_str(), false).expect("encodes").get_ids().to_vec();
        for _ in 0..2 {
            assert_eq!(encoder.encode(tokenizer, &text), Ok(theirs.clone()));
        }
    }

    #[test]
    fn a_million_spaces_are_text() {
        // The expression alone gives up on them.
        let families = families();
        for tokenizer in [&families[0], &families[3]] {
            let encoder = WordEncoder::new(tokenizer).expect("known");
            for white in [" ", "\u{a0}"] {
                let ids = encoder.encode(tokenizer, &(white.repeat(1_100_000) + "x"));
                assert!(ids.is_ok_and(|ids| ids.len() > 10_000));
            }
        }
    }

    proptest! {
        #[test]
        fn ids_are_those_of_the_library(
            text in prop_oneof![
                any::<String>(),
                "[ \n\t\r'a-dA-D0-9é٣²Ⅷ\u{301}\u{a0}\u{2028}你🙂<|>.]{0,60}",
                "[ \n\r\t\u{a0}\u{2028}x1.]{0,14}",
                "( the| a|in|'ll|'s|12|  |\n\n){0,20}",
            ],
        ) {
            thread_local!(static FAMILIES: Vec<(Tokenizer, WordEncoder)> = families()
                .into_iter()
                .map(|tokenizer| { let encoder = WordEncoder::new(&tokenizer).expect("known"); (tokenizer, encoder) })
                .collect());
            FAMILIES.with(|families| {
                for (tokenizer, encoder) in families {
                    if encoder.takes(&text) {
                        let theirs = tokenizer.encode_fast(text.as_str(), false).expect("encodes").get_ids().to_vec();
                        prop_assert_eq!(encoder.encode(tokenizer, &text).expect("encodes"), theirs);
                    }
                }
                Ok(())
            })?;
        }
    }
}
