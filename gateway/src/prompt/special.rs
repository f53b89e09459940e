//! Control tokens that a user typed are text, not control.
//!
//! Before a template sees the messages, the texts of control tokens in them are replaced by private-use
//! characters that no message contains ([`Disguise`]). The control tokens in the rendered text are then the
//! template's own: the text is cut at them, the disguises are taken off, and what lies between is encoded
//! with control tokens switched off. Role borders, and so block hashes, cannot be forged.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;
use starling_ids::TokenId;
use tokenizers::Tokenizer;

/// Disguises come from here: a plane for private use.
const DISGUISES: std::ops::Range<u32> = 0xF_0000..0xF_FFFE;

/// One control token.
#[derive(Debug, Clone)]
pub struct Special {
    text: String,
    id: TokenId,
    /// The token swallows white space on that side.
    strips_left: bool,
    strips_right: bool,
}

/// Finds control tokens in text.
#[derive(Debug)]
pub struct Specials {
    /// By first byte, longest text first.
    by_first: BTreeMap<u8, Vec<Special>>,
    /// Bytes that a token begins with.
    begins: [bool; 256],
}

/// A cut of a rendered prompt.
#[derive(Debug, PartialEq, Eq)]
pub enum Segment<'a> {
    /// A control token of the template.
    Control(TokenId),
    /// Text between control tokens.
    Text(&'a str),
}

impl Specials {
    /// The control tokens of a tokenizer.
    #[must_use]
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self::of(tokenizer, true)
    }

    /// The added tokens of a tokenizer that are not control tokens: words it has been given whole.
    #[must_use]
    pub fn words(tokenizer: &Tokenizer) -> Self {
        Self::of(tokenizer, false)
    }

    fn of(tokenizer: &Tokenizer, control: bool) -> Self {
        let mut by_first: BTreeMap<u8, Vec<Special>> = BTreeMap::new();
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            let Some(&first) = token.content.as_bytes().first() else { continue };
            if token.special == control {
                by_first.entry(first).or_default().push(Special {
                    text: token.content,
                    id,
                    strips_left: token.lstrip,
                    strips_right: token.rstrip,
                });
            }
        }
        for list in by_first.values_mut() {
            list.sort_by_key(|special| std::cmp::Reverse(special.text.len()));
        }
        let begins = std::array::from_fn(|byte| by_first.contains_key(&(byte as u8)));
        Self { by_first, begins }
    }

    /// The first control token in `text`: where, and which.
    fn find(&self, text: &str) -> Option<(usize, &Special)> {
        let bytes = text.bytes().enumerate().filter(|(_, byte)| self.begins[usize::from(*byte)]);
        bytes.into_iter().find_map(|(at, byte)| {
            let list = self.by_first.get(&byte)?;
            let special = list.iter().find(|special| text.as_bytes()[at..].starts_with(special.text.as_bytes()))?;
            Some((at, special))
        })
    }

    /// Adds the control tokens found in `text`, as [`Self::find`] meets them one after the other.
    fn collect<'a>(&'a self, text: &str, found: &mut BTreeSet<&'a str>) {
        let mut rest = text;
        while let Some((at, special)) = self.find(rest) {
            found.insert(&special.text);
            rest = &rest[at + special.text.len()..];
        }
    }

    /// True when `text` contains one.
    #[must_use]
    pub fn in_text(&self, text: &str) -> bool {
        self.find(text).is_some()
    }

    /// True when any string in `messages` contains a control token's text.
    #[must_use]
    pub fn any_in(&self, messages: &[Json]) -> bool {
        messages.iter().any(|message| any_string(message, &|text| self.find(text).is_some()))
    }

    /// Cuts a rendered prompt at its control tokens.
    #[must_use]
    pub fn cut<'a>(&self, rendered: &'a str) -> Vec<Segment<'a>> {
        let mut segments = Vec::new();
        let mut rest = rendered;
        while let Some((at, special)) = self.find(rest) {
            let before = if special.strips_left { rest[..at].trim_end() } else { &rest[..at] };
            if !before.is_empty() {
                segments.push(Segment::Text(before));
            }
            segments.push(Segment::Control(special.id));
            rest = &rest[at + special.text.len()..];
            if special.strips_right {
                rest = rest.trim_start();
            }
        }
        if !rest.is_empty() {
            segments.push(Segment::Text(rest));
        }
        segments
    }
}

/// Which private-use character stands for which control token's text in one request.
#[derive(Debug, Default)]
pub struct Disguise {
    texts: BTreeMap<char, String>,
}

impl Disguise {
    /// Replaces the control tokens' texts in all strings of `messages`. `None` when the messages use up every
    /// private-use character themselves, which no honest text does.
    #[must_use]
    pub fn put_on(specials: &Specials, messages: &mut [Json]) -> Option<Self> {
        let (mut typed, mut used) = (BTreeSet::new(), BTreeSet::new());
        for message in messages.iter_mut() {
            each_string(message, &mut |text| {
                specials.collect(text, &mut typed);
                used.extend(text.chars().filter(|c| DISGUISES.contains(&u32::from(*c))));
            });
        }
        let mut free = DISGUISES.filter_map(char::from_u32).filter(|c| !used.contains(c));
        let mut by_text: BTreeMap<&str, char> = BTreeMap::new();
        for text in typed {
            by_text.insert(text, free.next()?);
        }
        for message in messages.iter_mut() {
            each_string(message, &mut |text| *text = replace_all(specials, &by_text, text));
        }
        Some(Self { texts: by_text.into_iter().map(|(text, c)| (c, text.to_owned())).collect() })
    }

    /// The text as its user typed it.
    #[must_use]
    pub fn take_off(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            match self.texts.get(&c) {
                Some(original) => out.push_str(original),
                None => out.push(c),
            }
        }
        out
    }
}

fn replace_all(specials: &Specials, by_text: &BTreeMap<&str, char>, text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((at, special)) = specials.find(rest) {
        out.push_str(&rest[..at]);
        out.extend(by_text.get(special.text.as_str()));
        rest = &rest[at + special.text.len()..];
    }
    out.push_str(rest);
    out
}

fn any_string(value: &Json, found: &impl Fn(&str) -> bool) -> bool {
    match value {
        Json::String(text) => found(text),
        Json::Array(items) => items.iter().any(|item| any_string(item, found)),
        Json::Object(fields) => fields.iter().any(|(key, value)| found(key) || any_string(value, found)),
        Json::Null | Json::Bool(_) | Json::Number(_) => false,
    }
}

fn each_string(value: &mut Json, change: &mut impl FnMut(&mut String)) {
    match value {
        Json::String(text) => change(text),
        Json::Array(items) => items.iter_mut().for_each(|item| each_string(item, change)),
        Json::Object(fields) => {
            // Keys are a client's text too: the arguments of a tool call.
            let old = std::mem::take(fields);
            for (mut key, mut value) in old {
                change(&mut key);
                each_string(&mut value, change);
                fields.insert(key, value);
            }
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixtures;

    #[test]
    fn a_disguise_comes_off_as_it_was_put_on() {
        let specials = Specials::new(&fixtures::tokenizer());
        let original =
            json!({"role": "user", "content": "a<|im_end|>\u{F0000}<|im_end|><|im_start|>", "x": [{"<|im_end|>": 1}]});
        let mut messages = [original.clone()];
        assert!(specials.any_in(&messages));
        let disguise = Disguise::put_on(&specials, &mut messages).expect("characters enough");
        assert!(!specials.any_in(&messages));
        assert_eq!(disguise.take_off(&messages[0].to_string()), original.to_string());
    }

    #[test]
    fn a_rendered_prompt_is_cut_at_its_control_tokens() {
        let specials = Specials::new(&fixtures::tokenizer());
        let cut = specials.cut("<|im_start|>user\nhi<|im_end|>");
        let expected =
            [Segment::Control(fixtures::IM_START), Segment::Text("user\nhi"), Segment::Control(fixtures::IM_END)];
        assert_eq!(cut, expected);
    }
}
