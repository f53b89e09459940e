//! From the tokenizer in a GGUF file to a Hugging Face `tokenizer.json`.
//!
//! Called by the GGUF loader; pure. Never: guesses. A pre-tokenizer or model kind that is not known is refused by
//! name, because a nearly right tokenizer gives answers that are nearly right.

use serde_json::{Value, json};
use starling_ids::TokenId;

use super::gguf::Gguf;
use crate::bundle::TokenizerBundle;

/// Token types of the format.
const CONTROL: f64 = 3.0;
const USER_DEFINED: f64 = 4.0;

/// Llama 3's split, as its `tokenizer.json` has it.
const LLAMA3_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Control tokens that end an answer in the chat formats of this family, beside the one the file names.
const END_TEXTS: [&str; 5] = ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "</s>"];

/// A tokenizer as a gateway needs it, and the tokens that end an answer.
pub(super) struct GgufTokenizer {
    pub(super) bundle: TokenizerBundle,
    pub(super) eos_ids: Vec<TokenId>,
    /// Number of token ids.
    pub(super) vocab: usize,
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

/// How text is cut before merging; `(pre-tokenizer, merge whole words first)`.
fn pre_tokenizer(name: &str) -> Result<(Value, bool), String> {
    match name {
        "smollm" => {
            let digits = json!({"type": "Digits", "individual_digits": true});
            Ok((json!({"type": "Sequence", "pretokenizers": [digits, byte_level(true)]}), false))
        }
        "gpt2" | "gpt-2" | "default" => Ok((byte_level(true), false)),
        "llama-bpe" | "llama3" | "llama-v3" => {
            let split = json!({
                "type": "Split", "pattern": {"Regex": LLAMA3_SPLIT}, "behavior": "Isolated", "invert": false
            });
            Ok((json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]}), true))
        }
        other => Err(format!(
            "pre-tokenizer {other:?} is not supported; supported: smollm, gpt2, llama-bpe. \
             A Hugging Face folder of the same model brings its own tokenizer.json"
        )),
    }
}

impl GgufTokenizer {
    /// Builds the bundle from a file's metadata.
    pub(super) fn build(gguf: &Gguf) -> Result<Self, String> {
        match gguf.text("tokenizer.ggml.model") {
            Some("gpt2") => {}
            other => {
                let other = other.unwrap_or("(none)");
                return Err(format!(
                    "tokenizer model {other:?} is not supported in a GGUF file, \"gpt2\" (byte-level BPE) is"
                ));
            }
        }
        let tokens = gguf.texts("tokenizer.ggml.tokens").ok_or("tokenizer.ggml.tokens is missing")?;
        let merges = gguf.texts("tokenizer.ggml.merges").ok_or("tokenizer.ggml.merges is missing")?;
        let types = gguf.numbers("tokenizer.ggml.token_type").unwrap_or_default();
        let (cut, ignore_merges) = pre_tokenizer(gguf.text("tokenizer.ggml.pre").unwrap_or("default"))?;
        let special = |id: usize| types.get(id).copied() == Some(CONTROL);
        let added: Vec<Value> = (0..tokens.len())
            .filter(|&id| special(id) || types.get(id).copied() == Some(USER_DEFINED))
            .map(|id| {
                json!({
                    "id": id, "content": tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": special(id)
                })
            })
            .collect();
        let vocab: serde_json::Map<String, Value> =
            tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
        let merges = merges.iter().map(|merge| pair(merge)).collect::<Result<Vec<_>, _>>()?;
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
            "pre_tokenizer": cut, "post_processor": byte_level(false), "decoder": byte_level(false),
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges
            }
        });
        let id = |key: &str| gguf.unsigned(key).and_then(|id| usize::try_from(id).ok()).filter(|&id| id < tokens.len());
        let (bos, eos) = (id("tokenizer.ggml.bos_token_id"), id("tokenizer.ggml.eos_token_id"));
        let eot = id("tokenizer.ggml.eot_token_id");
        let named =
            END_TEXTS.iter().filter_map(|text| (0..tokens.len()).find(|&id| special(id) && tokens[id] == *text));
        let mut eos_ids: Vec<TokenId> = Vec::new();
        for id in eos.into_iter().chain(eot).chain(named) {
            let id = id as TokenId;
            if !eos_ids.contains(&id) {
                eos_ids.push(id);
            }
        }
        let bundle = TokenizerBundle {
            tokenizer_json: tokenizer.to_string(),
            chat_template: gguf.text("tokenizer.chat_template").map(str::to_owned),
            bos_token: bos.map(|id| tokens[id].clone()),
            eos_token: eos.map(|id| tokens[id].clone()),
            // Llama 3 files leave it out and mean yes.
            add_bos: gguf.bool("tokenizer.ggml.add_bos_token").unwrap_or(ignore_merges),
        };
        Ok(Self { bundle, eos_ids, vocab: tokens.len() })
    }
}

/// A merge is two tokens with a space between; byte-level tokens hold no space themselves.
fn pair(merge: &str) -> Result<Value, String> {
    let (left, right) = merge.split_once(' ').ok_or_else(|| format!("merge {merge:?} is not two tokens"))?;
    Ok(json!([left, right]))
}
