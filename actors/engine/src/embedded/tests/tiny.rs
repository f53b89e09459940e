//! A made-up Llama model of a few thousand weights, written as a GGUF file and as a Hugging Face folder.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use half::f16;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

use super::super::EmbeddedModel;
use crate::loader::{Activations, EngineKind, KernelChoice, LoadError, ModelOptions};

pub(super) const LAYERS: usize = 2;
pub(super) const HIDDEN: usize = 64;
pub(super) const FFN: usize = 96;
pub(super) const HEADS: usize = 6;
pub(super) const KV_HEADS: usize = 2;
pub(super) const DIM: usize = 16;
pub(super) const VOCAB: usize = 299;
pub(super) const CONTEXT: usize = 1024;
pub(super) const EPSILON: f32 = 1e-5;
pub(super) const BASE: f64 = 10_000.0;

/// One tensor, rows as a Hugging Face folder orders them.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Vec<f32>,
}

/// All tensors by their Hugging Face names.
pub(super) struct Tiny {
    pub(super) tensors: BTreeMap<String, Tensor>,
}

/// How a GGUF file stores matrices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Store {
    F32,
    Q4_1,
    Q8_0,
}

fn gguf_name(name: &str) -> String {
    let name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm");
    name.replace("model.layers.", "blk.")
        .replace("post_attention_layernorm", "ffn_norm")
        .replace("input_layernorm", "attn_norm")
        .replace("self_attn.q_proj", "attn_q")
        .replace("self_attn.k_proj", "attn_k")
        .replace("self_attn.v_proj", "attn_v")
        .replace("self_attn.o_proj", "attn_output")
        .replace("mlp.gate_proj", "ffn_gate")
        .replace("mlp.up_proj", "ffn_up")
        .replace("mlp.down_proj", "ffn_down")
}

impl Tiny {
    pub(super) fn new(seed: u64) -> Self {
        let mut state = seed;
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, rows: usize, cols: usize, middle: f32, spread: f32| {
            let data = (0..rows * cols).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                middle + spread * ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
            });
            let data = data.collect();
            tensors.insert(name, Tensor { rows, cols, data });
        };
        add("model.embed_tokens.weight".to_owned(), VOCAB, HIDDEN, 0.0, 1.0);
        add("model.norm.weight".to_owned(), 1, HIDDEN, 1.0, 0.3);
        for i in 0..LAYERS {
            let name = |part: &str| format!("model.layers.{i}.{part}.weight");
            add(name("input_layernorm"), 1, HIDDEN, 1.0, 0.3);
            add(name("post_attention_layernorm"), 1, HIDDEN, 1.0, 0.3);
            add(name("self_attn.q_proj"), HEADS * DIM, HIDDEN, 0.0, 0.3);
            add(name("self_attn.k_proj"), KV_HEADS * DIM, HIDDEN, 0.0, 0.3);
            add(name("self_attn.v_proj"), KV_HEADS * DIM, HIDDEN, 0.0, 0.3);
            add(name("self_attn.o_proj"), HIDDEN, HEADS * DIM, 0.0, 0.2);
            add(name("mlp.gate_proj"), FFN, HIDDEN, 0.0, 0.3);
            add(name("mlp.up_proj"), FFN, HIDDEN, 0.0, 0.3);
            add(name("mlp.down_proj"), HIDDEN, FFN, 0.0, 0.2);
        }
        Self { tensors }
    }

    /// The bytes of a GGUF file.
    pub(super) fn gguf(&self, store: Store) -> Vec<u8> {
        let mut file = Writer::default();
        file.bytes.extend(b"GGUF\x03\0\0\0");
        file.bytes.extend((self.tensors.len() as u64).to_le_bytes());
        let at = file.bytes.len();
        file.bytes.extend(0u64.to_le_bytes());
        file.text("general.architecture", "llama");
        for (key, value) in [
            ("block_count", LAYERS),
            ("context_length", CONTEXT),
            ("embedding_length", HIDDEN),
            ("feed_forward_length", FFN),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
            ("attention.key_length", DIM),
            ("rope.dimension_count", DIM),
        ] {
            file.count(&format!("llama.{key}"), value as u32);
        }
        file.float("llama.rope.freq_base", BASE as f32);
        file.float("llama.attention.layer_norm_rms_epsilon", EPSILON);
        file.text("tokenizer.ggml.model", "gpt2");
        file.text("tokenizer.ggml.pre", "smollm");
        file.texts("tokenizer.ggml.tokens", &tokens());
        file.texts("tokenizer.ggml.merges", &["t h".to_owned(), "th e".to_owned()]);
        let types: Vec<u32> = (0..VOCAB).map(|id| if id < 3 { 3 } else { 1 }).collect();
        file.counts("tokenizer.ggml.token_type", &types);
        file.count("tokenizer.ggml.bos_token_id", 1);
        file.count("tokenizer.ggml.eos_token_id", 2);
        let entries = file.entries.to_le_bytes();
        file.bytes[at..at + 8].copy_from_slice(&entries);
        file.tensors(self, store);
        file.bytes
    }

    /// Writes `config.json`, `model.safetensors` and tokenizer files into `folder`.
    pub(super) fn folder(&self, folder: &Path) {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": FFN,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "head_dim": DIM, "max_position_embeddings": CONTEXT, "vocab_size": VOCAB, "rms_norm_eps": EPSILON,
            "rope_theta": BASE, "tie_word_embeddings": true, "eos_token_id": 2, "hidden_act": "silu"
        });
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let bytes: Vec<(&String, &Tensor, Vec<u8>)> = self
            .tensors
            .iter()
            .map(|(name, tensor)| (name, tensor, tensor.data.iter().flat_map(|x| x.to_le_bytes()).collect()))
            .collect();
        let views = bytes.iter().map(|(name, tensor, data)| {
            let shape = if tensor.rows == 1 { vec![tensor.cols] } else { vec![tensor.rows, tensor.cols] };
            (name.as_str(), TensorView::new(Dtype::F32, shape, data).unwrap())
        });
        fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
        let tokenizer = json!({"version": "1.0", "post_processor": null, "model": {"type": "BPE"}});
        fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let settings = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ 1 }}"});
        fs::write(folder.join("tokenizer_config.json"), settings.to_string()).unwrap();
    }

    /// A loaded model of the GGUF kind; the folder that holds its file is gone by then.
    pub(super) fn load(&self, store: Store, threads: usize, kernel: KernelChoice) -> EmbeddedModel {
        self.load_with(store, threads, kernel, Activations::default())
    }

    pub(super) fn load_with(
        &self,
        store: Store,
        threads: usize,
        kernel: KernelChoice,
        activations: Activations,
    ) -> EmbeddedModel {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        fs::write(&path, self.gguf(store)).unwrap();
        load_with(path, threads, kernel, activations).unwrap()
    }
}

pub(super) fn load(path: PathBuf, threads: usize, kernel: KernelChoice) -> Result<EmbeddedModel, LoadError> {
    load_with(path, threads, kernel, Activations::default())
}

pub(super) fn load_with(
    path: PathBuf,
    threads: usize,
    kernel: KernelChoice,
    activations: Activations,
) -> Result<EmbeddedModel, LoadError> {
    let options = ModelOptions {
        kind: EngineKind::Embedded,
        path: Some(path),
        served_name: None,
        threads,
        kv_bytes: 1 << 20,
        sequences_max: 8,
        waiting_max: 8,
        batch_tokens_max: 64,
        kernel,
        activations,
    };
    EmbeddedModel::load(&options, &mut |_| {})
}

/// Three control tokens, then something for every other id.
fn tokens() -> Vec<String> {
    (0..VOCAB)
        .map(|id| match id {
            0 => "<unk>".to_owned(),
            1 => "<s>".to_owned(),
            2 => "</s>".to_owned(),
            3 => "t".to_owned(),
            4 => "h".to_owned(),
            5 => "e".to_owned(),
            6 => "th".to_owned(),
            7 => "the".to_owned(),
            id => char::from_u32(0x4E00 + id as u32).unwrap().to_string(),
        })
        .collect()
}

/// The bytes of a file under construction.
#[derive(Default)]
struct Writer {
    bytes: Vec<u8>,
    entries: u64,
}

impl Writer {
    fn string(&mut self, text: &str) {
        self.bytes.extend((text.len() as u64).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }

    fn key(&mut self, key: &str, kind: u32) {
        self.entries += 1;
        self.string(key);
        self.bytes.extend(kind.to_le_bytes());
    }

    fn text(&mut self, key: &str, value: &str) {
        self.key(key, 8);
        self.string(value);
    }

    fn count(&mut self, key: &str, value: u32) {
        self.key(key, 4);
        self.bytes.extend(value.to_le_bytes());
    }

    fn float(&mut self, key: &str, value: f32) {
        self.key(key, 6);
        self.bytes.extend(value.to_le_bytes());
    }

    fn texts(&mut self, key: &str, values: &[String]) {
        self.key(key, 9);
        self.bytes.extend(8u32.to_le_bytes());
        self.bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| self.string(value));
    }

    fn counts(&mut self, key: &str, values: &[u32]) {
        self.key(key, 9);
        self.bytes.extend(4u32.to_le_bytes());
        self.bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| self.bytes.extend(value.to_le_bytes()));
    }

    fn tensors(&mut self, tiny: &Tiny, store: Store) {
        let mut data: Vec<u8> = Vec::new();
        for (name, tensor) in &tiny.tensors {
            let store = if tensor.rows == 1 { Store::F32 } else { store };
            self.string(&gguf_name(name));
            self.bytes.extend(2u32.to_le_bytes());
            self.bytes.extend((tensor.cols as u64).to_le_bytes());
            self.bytes.extend((tensor.rows as u64).to_le_bytes());
            let code: u32 = match store {
                Store::F32 => 0,
                Store::Q4_1 => 3,
                Store::Q8_0 => 8,
            };
            self.bytes.extend(code.to_le_bytes());
            self.bytes.extend((data.len() as u64).to_le_bytes());
            let rotated = name.contains("q_proj") || name.contains("k_proj");
            for row in 0..tensor.rows {
                let from = if rotated { row / DIM * DIM + row % DIM / 2 + row % 2 * (DIM / 2) } else { row };
                encode(store, &tensor.data[from * tensor.cols..][..tensor.cols], &mut data);
            }
            data.resize(data.len().next_multiple_of(32), 0);
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(32), 0);
        self.bytes.extend(data);
    }
}

fn encode(store: Store, row: &[f32], out: &mut Vec<u8>) {
    match store {
        Store::F32 => out.extend(row.iter().flat_map(|x| x.to_le_bytes())),
        Store::Q8_0 => {
            for block in row.chunks(32) {
                let scale = f16::from_f32(block.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0);
                out.extend(scale.to_le_bytes());
                out.extend(block.iter().map(|x| (x / scale.to_f32()).round().clamp(-127.0, 127.0) as i8 as u8));
            }
        }
        Store::Q4_1 => {
            for block in row.chunks(32) {
                let low = block.iter().copied().fold(f32::INFINITY, f32::min);
                let high = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let (scale, offset) = (f16::from_f32((high - low) / 15.0), f16::from_f32(low));
                out.extend(scale.to_le_bytes());
                out.extend(offset.to_le_bytes());
                let number = |x: f32| ((x - offset.to_f32()) / scale.to_f32()).round().clamp(0.0, 15.0) as u8;
                out.extend((0..16).map(|i| number(block[i]) | number(block[i + 16]) << 4));
            }
        }
    }
}
