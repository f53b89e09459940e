//! Tokenizers, frames and a scripted cluster for the tests of this crate.

use std::sync::{Arc, LazyLock};

use starling_actors::{
    engine::{FinishReason, SampledToken, TokenizerBundle},
    generate::GenerateFrame,
};
use starling_ids::TokenId;
use tokenizers::Tokenizer;

use crate::text::{Decoding, table::char_of};

pub(crate) mod cluster;

/// Ids of the fixture's control tokens; bytes follow them.
pub(crate) const IM_START: TokenId = 1;
/// Ends a turn, and an answer.
pub(crate) const IM_END: TokenId = 2;
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// The token that stands for one byte.
pub(crate) fn byte(value: u8) -> TokenId {
    CONTROL.len() as u32 + u32::from(value)
}

/// Tokens of the fixture's vocabulary: control tokens and one per byte.
pub(crate) const VOCAB: u32 = CONTROL.len() as u32 + 256;

/// The template of the test model: ChatML that can show tool calls and refuses what it must.
pub(crate) const TEMPLATE: &str = "{% for message in messages %}\
{% if message.role == 'tool' and loop.first %}{{ raise_exception('a tool turn needs a call before it') }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message.tool_calls %}{% for call in message.tool_calls %}\
{{ '<call>' }}{{ call.function.name }} {{ call.function.arguments | tojson }}{{ '</call>' }}{% endfor %}\
{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn tokenizer_json() -> String {
    let mut vocab = serde_json::Map::new();
    for (id, text) in CONTROL.iter().enumerate() {
        vocab.insert((*text).into(), id.into());
    }
    for value in 0..=255u8 {
        vocab.insert(char_of(value).to_string(), byte(value).into());
    }
    let added: Vec<_> = CONTROL
        .iter()
        .enumerate()
        .map(|(id, text)| {
            serde_json::json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    let byte_level =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []}
    })
    .to_string()
}

/// A bundle of the byte-level fixture tokenizer and [`TEMPLATE`].
pub(crate) fn bundle() -> TokenizerBundle {
    TokenizerBundle {
        tokenizer_json: tokenizer_json(),
        chat_template: Some(TEMPLATE.into()),
        bos_token: None,
        eos_token: Some("<|im_end|>".into()),
        add_bos: false,
    }
}

/// A tokenizer with one token per byte.
pub(crate) fn tokenizer() -> Tokenizer {
    tokenizer_json().parse().expect("a good tokenizer")
}

/// The decoding of [`tokenizer`].
pub(crate) fn decoding() -> Arc<Decoding> {
    static DECODING: LazyLock<Arc<Decoding>> = LazyLock::new(|| Arc::new(Decoding::new(&tokenizer())));
    DECODING.clone()
}

/// A tokenizer that decodes as Llama 2's does.
pub(crate) fn sentencepiece_tokenizer() -> Tokenizer {
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
            "vocab": {"\u{2581}hi": 0, "<0xC3>": 1, "<0xA9>": 2, "x": 3}, "merges": []}
    })
    .to_string()
    .parse()
    .expect("a good tokenizer")
}

/// A token whose log-probability is its id, negated.
pub(crate) fn token(id: TokenId) -> SampledToken {
    SampledToken { id, logprob: Some(-(id as f32)), top: Vec::new() }
}

/// One frame.
pub(crate) fn frame(choice: u32, ids: &[TokenId], finish: Option<FinishReason>) -> GenerateFrame {
    GenerateFrame { choice, tokens: ids.iter().map(|id| token(*id)).collect(), cached_tokens: None, finish }
}
