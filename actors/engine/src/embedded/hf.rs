//! A Llama model in a Hugging Face folder: `config.json`, safetensors, tokenizer files.
//!
//! Called by the loader; calls `safetensors` for headers over memory maps. Never: runs code from the folder, or accepts
//! a setting it does not honour; what is not supported is refused by name.

use std::{
    collections::{HashMap, HashSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use starling_ids::TokenId;

use super::{
    Borrowed,
    config::{LlamaConfig, RotaryScaling, rotary_angles},
    map,
    quant::{BLOCK, TensorType},
    repack::Source,
    weights::{Part, Tensors},
};
use crate::{bundle::TokenizerBundle, loader::LoadError};

/// One tensor of one file.
struct Entry {
    file: usize,
    kind: TensorType,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

/// An open folder.
pub(super) struct HfModel {
    files: Vec<Mmap>,
    tensors: HashMap<String, Entry>,
    tied: bool,
    head_dim: usize,
}

/// A folder's parts.
pub(super) struct HfFolder {
    pub(super) config: LlamaConfig,
    pub(super) bundle: TokenizerBundle,
    pub(super) eos_ids: Vec<TokenId>,
    pub(super) tensors: HfModel,
}

fn malformed(path: &Path, reason: impl Into<String>) -> LoadError {
    LoadError::Malformed { path: path.to_owned(), reason: reason.into() }
}

fn read(path: &Path) -> Result<String, LoadError> {
    fs::read_to_string(path).map_err(|source| LoadError::Io { path: path.to_owned(), source })
}

fn read_json(path: &Path) -> Result<Value, LoadError> {
    serde_json::from_str(&read(path)?).map_err(|error| malformed(path, format!("not JSON: {error}")))
}

/// A file that may be absent.
fn read_json_if_there(path: &Path) -> Result<Value, LoadError> {
    if path.exists() { read_json(path) } else { Ok(Value::Null) }
}

/// Opens the folder at `path`.
pub(super) fn open(path: &Path) -> Result<HfFolder, LoadError> {
    let config_path = path.join("config.json");
    let json = read_json(&config_path)?;
    let architecture = json["architectures"][0].as_str().unwrap_or("(none)");
    if architecture != "LlamaForCausalLM" {
        return Err(LoadError::Architecture { path: config_path, architecture: architecture.to_owned() });
    }
    let config = config(&json).map_err(|reason| malformed(&config_path, reason))?;
    let tensors = HfModel::open(path, json["tie_word_embeddings"].as_bool().unwrap_or(false), config.head_dim)?;
    let bundle = bundle(path)?;
    let generation = read_json_if_there(&path.join("generation_config.json"))?;
    let eos_ids = eos_ids(&json, &generation);
    Ok(HfFolder { config, bundle, eos_ids, tensors })
}

/// Tokenizer and sizes of a folder of any architecture; weights need not be there.
pub(super) fn voice(path: &Path) -> Result<Borrowed, LoadError> {
    let config_path = path.join("config.json");
    let json = read_json(&config_path)?;
    // Models that see and hear keep what concerns text apart.
    let count = |key: &str| {
        let value = json[key].as_u64().or_else(|| json["text_config"][key].as_u64());
        let value = value.and_then(|value| u32::try_from(value).ok());
        value.ok_or_else(|| malformed(&config_path, format!("{key} is missing or not a count")))
    };
    let (vocab_size, context_length) = (count("vocab_size")?, count("max_position_embeddings")?);
    let bundle = bundle(path)?;
    let generation = read_json_if_there(&path.join("generation_config.json"))?;
    let mut eos_ids = eos_ids(&json, &generation);
    if eos_ids.is_empty() {
        eos_ids = self::eos_ids(&json["text_config"], &Value::Null);
    }
    Ok(Borrowed { bundle, eos_ids, vocab_size, context_length })
}

fn config(json: &Value) -> Result<LlamaConfig, String> {
    for (key, plain) in [
        ("attention_bias", Value::Bool(false)),
        ("mlp_bias", Value::Bool(false)),
        ("hidden_act", Value::from("silu")),
        ("quantization_config", Value::Null),
    ] {
        if !json[key].is_null() && json[key] != plain {
            return Err(format!("{key} is {}, only {plain} is supported", json[key]));
        }
    }
    let count = |key: &str| {
        let value = json[key].as_u64().ok_or_else(|| format!("{key} is missing or not a count"))?;
        usize::try_from(value).map_err(|_| format!("{key} is too large"))
    };
    let (hidden, heads) = (count("hidden_size")?, count("num_attention_heads")?);
    let head_dim = match json["head_dim"].is_null() {
        false => count("head_dim")?,
        true => hidden.checked_div(heads).ok_or("num_attention_heads is 0")?,
    };
    if head_dim > 512 {
        return Err(format!("head_dim is {head_dim}, at most 512 is supported"));
    }
    let config = LlamaConfig {
        layers: count("num_hidden_layers")?,
        hidden,
        ffn: count("intermediate_size")?,
        heads,
        kv_heads: if json["num_key_value_heads"].is_null() { heads } else { count("num_key_value_heads")? },
        head_dim,
        context: count("max_position_embeddings")?,
        vocab: count("vocab_size")?,
        epsilon: json["rms_norm_eps"].as_f64().unwrap_or(1e-6) as f32,
        rotary: rotary(json, head_dim)?,
    };
    config.check()?;
    Ok(config)
}

/// Rotary angles. Newer folders keep base and scaling together under `rope_parameters`.
fn rotary(json: &Value, head_dim: usize) -> Result<Vec<f64>, String> {
    let newer = &json["rope_parameters"];
    let scaling = if newer.is_null() { &json["rope_scaling"] } else { newer };
    let base = newer["rope_theta"].as_f64().or(json["rope_theta"].as_f64()).unwrap_or(10_000.0);
    let number = |key: &str| scaling[key].as_f64().ok_or_else(|| format!("rotary scaling has no number {key:?}"));
    let kind = scaling["rope_type"].as_str().or(scaling["type"].as_str()).unwrap_or("default");
    let scaling = match kind {
        "default" => RotaryScaling::None,
        "linear" => RotaryScaling::Linear(number("factor")?),
        "llama3" => RotaryScaling::Llama3 {
            factor: number("factor")?,
            low: number("low_freq_factor")?,
            high: number("high_freq_factor")?,
            original: number("original_max_position_embeddings")?,
        },
        other => return Err(format!("rotary scaling {other:?} is not supported; default, linear and llama3 are")),
    };
    Ok(rotary_angles(head_dim, base, scaling))
}

/// A special token is a string, or an object with its text.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or(value["content"].as_str()).map(str::to_owned)
}

fn bundle(path: &Path) -> Result<TokenizerBundle, LoadError> {
    let tokenizer_json = read(&path.join("tokenizer.json"))?;
    let parsed: Value = serde_json::from_str(&tokenizer_json)
        .map_err(|error| malformed(&path.join("tokenizer.json"), format!("not JSON: {error}")))?;
    let settings = read_json_if_there(&path.join("tokenizer_config.json"))?;
    let template_path = path.join("chat_template.jinja");
    let chat_template =
        if template_path.exists() { Some(read(&template_path)?) } else { chat_template(&settings["chat_template"]) };
    let bos_token = token_text(&settings["bos_token"]);
    // Where the setting is absent, the tokenizer's own post-processor says whether it puts the token first.
    let puts_bos = || bos_token.as_ref().is_some_and(|bos| names_token(&parsed["post_processor"], bos));
    let add_bos = settings["add_bos_token"].as_bool().unwrap_or_else(puts_bos);
    let eos_token = token_text(&settings["eos_token"]);
    Ok(TokenizerBundle { tokenizer_json, chat_template, bos_token, eos_token, add_bos })
}

/// One template, or the one named `default` of several.
fn chat_template(value: &Value) -> Option<String> {
    if let Some(text) = value.as_str() {
        return Some(text.to_owned());
    }
    let named = value.as_array()?.iter().find(|entry| entry["name"] == "default")?;
    named["template"].as_str().map(str::to_owned)
}

/// True when a template of a post-processor (perhaps one of a sequence) puts `token` before a single text.
fn names_token(processor: &Value, token: &str) -> bool {
    let single = processor["single"].as_array();
    let own = single.and_then(|parts| parts.first()).is_some_and(|part| part["SpecialToken"]["id"] == token);
    let nested = processor["processors"].as_array();
    own || nested.is_some_and(|parts| parts.iter().any(|part| names_token(part, token)))
}

/// All tokens that either file says end an answer: each a number or several.
fn eos_ids(config: &Value, generation: &Value) -> Vec<TokenId> {
    let mut ids = Vec::new();
    for value in [&config["eos_token_id"], &generation["eos_token_id"]] {
        let listed = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        for id in listed.iter().filter_map(Value::as_u64).filter_map(|id| TokenId::try_from(id).ok()) {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

impl HfModel {
    fn open(folder: &Path, tied: bool, head_dim: usize) -> Result<Self, LoadError> {
        let mut model = Self { files: Vec::new(), tensors: HashMap::new(), tied, head_dim };
        for path in shards(folder)? {
            model.add(&path)?;
        }
        Ok(model)
    }

    fn add(&mut self, path: &Path) -> Result<(), LoadError> {
        let file = map(path)?;
        let parsed =
            SafeTensors::deserialize(&file).map_err(|error| malformed(path, format!("not safetensors: {error}")))?;
        for (name, tensor) in parsed.iter() {
            let kind = match tensor.dtype() {
                Dtype::F32 => TensorType::F32,
                Dtype::F16 => TensorType::F16,
                Dtype::BF16 => TensorType::Bf16,
                // Left out: whether the model needs it is seen when it is looked for.
                _ => continue,
            };
            let start = tensor.data().as_ptr() as usize - file.as_ptr() as usize;
            let bytes = start..start + tensor.data().len();
            let entry = Entry { file: self.files.len(), kind, shape: tensor.shape().to_vec(), bytes };
            self.tensors.insert(name.to_owned(), entry);
        }
        self.files.push(file);
        Ok(())
    }
}

/// The weight files: one, or those an index lists.
fn shards(folder: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let index_path = folder.join("model.safetensors.index.json");
    if !index_path.exists() {
        return Ok(vec![folder.join("model.safetensors")]);
    }
    let index = read_json(&index_path)?;
    let listed = index["weight_map"].as_object().ok_or_else(|| malformed(&index_path, "weight_map is missing"))?;
    let names: HashSet<&str> = listed.values().filter_map(Value::as_str).collect();
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_unstable();
    // A name with a path could point anywhere.
    if let Some(name) = names.iter().find(|name| Path::new(name).components().count() != 1 || name.starts_with('.')) {
        return Err(malformed(&index_path, format!("{name:?} is not a file of this folder")));
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

impl Tensors for HfModel {
    fn find(&self, part: Part) -> Result<Option<Source<'_>>, String> {
        if part == Part::Output && self.tied {
            return Ok(None);
        }
        let name = self.name(part);
        let Some(entry) = self.tensors.get(&name) else {
            let optional = part != Part::Output;
            return if optional {
                Ok(None)
            } else {
                Err(format!("tensor {name:?} is missing and the embedding is not tied"))
            };
        };
        let (rows, cols) = match entry.shape[..] {
            [cols] => (1, cols),
            [rows, cols] => (rows, cols),
            _ => return Err(format!("tensor {name:?} has shape {:?}, one or two dimensions are needed", entry.shape)),
        };
        if rows > 1 && !cols.is_multiple_of(BLOCK) {
            return Err(format!("tensor {name:?} has rows of {cols}, not a multiple of {BLOCK}"));
        }
        let unrotate = matches!(part, Part::Query(_) | Part::Key(_)).then_some(self.head_dim);
        let data = &self.files[entry.file][entry.bytes.clone()];
        Ok(Some(Source { kind: entry.kind, cols, rows, data, unrotate }))
    }

    fn name(&self, part: Part) -> String {
        let layer = |index: usize, name: &str| format!("model.layers.{index}.{name}.weight");
        match part {
            Part::Embedding => "model.embed_tokens.weight".to_owned(),
            Part::Output => "lm_head.weight".to_owned(),
            Part::OutputNorm => "model.norm.weight".to_owned(),
            Part::AttentionNorm(i) => layer(i, "input_layernorm"),
            Part::Query(i) => layer(i, "self_attn.q_proj"),
            Part::Key(i) => layer(i, "self_attn.k_proj"),
            Part::Value(i) => layer(i, "self_attn.v_proj"),
            Part::AttentionOut(i) => layer(i, "self_attn.o_proj"),
            Part::FfnNorm(i) => layer(i, "post_attention_layernorm"),
            Part::Gate(i) => layer(i, "mlp.gate_proj"),
            Part::Up(i) => layer(i, "mlp.up_proj"),
            Part::Down(i) => layer(i, "mlp.down_proj"),
        }
    }
}
