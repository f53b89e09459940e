//! A tokenizer made by code: one token a byte, two special tokens, a chat template.
//!
//! Called when the simulated engine is loaded without a model file.

use serde_json::{Map, Value, json};
use starling_ids::TokenId;

use crate::bundle::TokenizerBundle;

/// Begins a message.
pub(super) const START: TokenId = 256;
/// Ends a message and an answer.
pub(super) const END: TokenId = 257;
/// Bytes and the two.
pub(super) const VOCAB_SIZE: u32 = 258;

const START_TEXT: &str = "<|im_start|>";
const END_TEXT: &str = "<|im_end|>";

/// Each message between the two special tokens, its role on the first line.
const CHAT_TEMPLATE: &str = "{%- for message in messages -%}\
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}";

/// Byte-level tokenization without merges.
pub(super) fn byte_level() -> TokenizerBundle {
    let special = |id: TokenId, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(START, START_TEXT), special(END, END_TEXT)],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary(), "merges": [],
        },
    });
    TokenizerBundle {
        tokenizer_json: tokenizer.to_string(),
        chat_template: Some(CHAT_TEMPLATE.to_owned()),
        bos_token: None,
        eos_token: Some(END_TEXT.to_owned()),
        add_bos: false,
    }
}

/// Every byte under the printable character that byte-level tokenizers write for it: visible Latin-1 bytes stand for
/// themselves, the others for the characters from U+0100 on. Visible ones have the lowest ids.
fn vocabulary() -> Map<String, Value> {
    let visible = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let shown = (0..=u8::MAX).filter(visible).map(char::from);
    let hidden = (0..=u8::MAX).filter(|byte| !visible(byte)).zip('\u{100}'..).map(|(_, letter)| letter);
    let mut vocabulary: Map<String, Value> =
        shown.chain(hidden).enumerate().map(|(id, letter)| (letter.to_string(), json!(id))).collect();
    vocabulary.insert(START_TEXT.to_owned(), json!(START));
    vocabulary.insert(END_TEXT.to_owned(), json!(END));
    vocabulary
}
