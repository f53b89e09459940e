//! What files give: the same model from either kind, and refusals that name what is wrong.

use std::fs;

use serde_json::Value;

use super::{
    super::config::{RotaryScaling, rotary_angles},
    bits, feed, slots,
    tiny::{BASE, CONTEXT, DIM, EPSILON, FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, Store, Tensor, Tiny, VOCAB, load},
};
use crate::loader::{KernelChoice, LoadError, LoadedModel};

const TOKENS: [u32; 40] = [
    5, 17, 3, 298, 40, 41, 42, 7, 7, 7, 100, 2, 55, 250, 1, 9, 31, 64, 128, 255, 11, 13, 19, 23, 29, 37, 43, 47, 53,
    59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103,
];

#[test]
fn a_gguf_file_and_a_folder_of_the_same_weights_give_the_same_bits() {
    let tiny = Tiny::new(7);
    let folder = tempfile::tempdir().unwrap();
    tiny.folder(folder.path());
    let from_folder = load(folder.path().to_owned(), 2, KernelChoice::Auto).unwrap();
    let from_gguf = tiny.load(Store::F32, 2, KernelChoice::Auto);
    let logits = |model: &super::super::EmbeddedModel| {
        bits(&feed(&mut model.backend().unwrap().0, &slots(0, 3), &TOKENS, 0, 64))
    };
    assert_eq!(logits(&from_folder), logits(&from_gguf));
    assert_eq!(from_folder.card().eos_ids, [2]);
    assert_eq!(from_folder.bundle().bos_token.as_deref(), Some("<s>"));
    assert_eq!(from_folder.bundle().chat_template.as_deref(), Some("{{ 1 }}"));
    assert_eq!(from_gguf.card().id.as_str(), "tiny");
    let tokenizer: tokenizers::Tokenizer = from_gguf.bundle().tokenizer_json.parse().unwrap();
    assert_eq!(tokenizer.encode("the<s>", false).unwrap().get_ids(), [7, 1]);
}

/// The forward pass in f64, written for clarity: the engine's numbers must be near it.
struct Plain<'a>(&'a Tiny);

impl Plain<'_> {
    fn tensor(&self, name: &str) -> &Tensor {
        &self.0.tensors[name]
    }

    fn times(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let rows = self.tensor(name).data.chunks(x.len());
        rows.map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(EPSILON)).sqrt();
        x.iter().zip(&self.tensor(name).data).map(|(x, w)| x * scale * f64::from(*w)).collect()
    }

    /// Hugging Face rotates element i of a head with i + dim/2.
    fn rotate(x: &mut [f64], position: usize) {
        let angles = rotary_angles(DIM, BASE, RotaryScaling::None);
        for head in x.chunks_mut(DIM) {
            for (i, angle) in angles.iter().enumerate() {
                let (sine, cosine) = (position as f64 * angle).sin_cos();
                let (a, b) = (head[i], head[i + DIM / 2]);
                head[i] = a * cosine - b * sine;
                head[i + DIM / 2] = a * sine + b * cosine;
            }
        }
    }

    fn attend(query: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>]) -> Vec<f64> {
        let mut out = vec![0.0; HEADS * DIM];
        for head in 0..HEADS {
            let kv = head / (HEADS / KV_HEADS) * DIM;
            let query = &query[head * DIM..][..DIM];
            let score =
                |key: &Vec<f64>| query.iter().zip(&key[kv..]).map(|(q, k)| q * k).sum::<f64>() / (DIM as f64).sqrt();
            let weights: Vec<f64> = keys.iter().map(|key| score(key).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (weight, value) in weights.iter().zip(values) {
                for d in 0..DIM {
                    out[head * DIM + d] += weight / total * value[kv + d];
                }
            }
        }
        out
    }

    fn logits(&self, tokens: &[u32]) -> Vec<f64> {
        let mut cache = vec![(Vec::new(), Vec::new()); LAYERS];
        let mut x = Vec::new();
        for (position, token) in tokens.iter().enumerate() {
            let row = &self.tensor("model.embed_tokens.weight").data[*token as usize * HIDDEN..][..HIDDEN];
            x = row.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
            for (layer, (keys, values)) in cache.iter_mut().enumerate() {
                let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
                let input = self.norm(&name("input_layernorm"), &x);
                let mut query = self.times(&name("self_attn.q_proj"), &input);
                let mut key = self.times(&name("self_attn.k_proj"), &input);
                Self::rotate(&mut query, position);
                Self::rotate(&mut key, position);
                keys.push(key);
                values.push(self.times(&name("self_attn.v_proj"), &input));
                let attended = self.times(&name("self_attn.o_proj"), &Self::attend(&query, keys, values));
                x.iter_mut().zip(attended).for_each(|(x, a)| *x += a);
                let input = self.norm(&name("post_attention_layernorm"), &x);
                let gate = self.times(&name("mlp.gate_proj"), &input);
                let up = self.times(&name("mlp.up_proj"), &input);
                let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                assert_eq!(inner.len(), FFN);
                x.iter_mut().zip(self.times(&name("mlp.down_proj"), &inner)).for_each(|(x, a)| *x += a);
            }
        }
        self.times("model.embed_tokens.weight", &self.norm("model.norm.weight", &x))
    }
}

#[test]
fn logits_are_near_those_of_plain_arithmetic() {
    let tiny = Tiny::new(11);
    let expected = Plain(&tiny).logits(&TOKENS);
    let spread = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    for (store, allowed) in [(Store::F32, 0.03), (Store::Q8_0, 0.03), (Store::Q4_1, 0.4)] {
        let model = tiny.load(store, 1, KernelChoice::Auto);
        let logits = feed(&mut model.backend().unwrap().0, &slots(0, 3), &TOKENS, 0, 64);
        let squares = logits.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).powi(2));
        let error = (squares.sum::<f64>() / expected.len() as f64).sqrt() / spread;
        assert!(error < allowed, "{store:?}: relative error {error}");
    }
}

fn refusal(change: impl Fn(&mut Value)) -> LoadError {
    let folder = tempfile::tempdir().unwrap();
    Tiny::new(1).folder(folder.path());
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(&path, config.to_string()).unwrap();
    load(folder.path().to_owned(), 1, KernelChoice::Auto).unwrap_err()
}

#[test]
fn folders_of_other_models_are_refused_by_name() {
    let error = refusal(|config| config["architectures"] = serde_json::json!(["Qwen2ForCausalLM"]));
    assert!(matches!(&error, LoadError::Architecture { architecture, .. } if architecture == "Qwen2ForCausalLM"));
    let error = refusal(|config| config["rope_scaling"] = serde_json::json!({"rope_type": "yarn", "factor": 4.0}));
    assert!(error.to_string().contains("yarn"), "{error}");
    let error = refusal(|config| config["attention_bias"] = true.into());
    assert!(error.to_string().contains("attention_bias"), "{error}");
    let error = refusal(|config| config["tie_word_embeddings"] = false.into());
    assert!(error.to_string().contains("lm_head.weight"), "{error}");
    let error = refusal(|config| config["intermediate_size"] = 128.into());
    assert!(error.to_string().contains("mlp.") && error.to_string().contains("128"), "{error}");
    let error = load("/nowhere/at/all.gguf".into(), 1, KernelChoice::Auto).unwrap_err();
    assert!(matches!(error, LoadError::Io { .. }));
}

#[test]
fn a_damaged_gguf_file_is_refused_and_never_panics() {
    let whole = Tiny::new(1).gguf(Store::Q4_1);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.gguf");
    for share in 1..60 {
        fs::write(&path, &whole[..whole.len() * share / 60]).unwrap();
        let error = load(path.clone(), 1, KernelChoice::Auto).unwrap_err();
        assert!(matches!(error, LoadError::Malformed { .. }), "{share}: {error}");
    }
    // Any byte of the header may be wrong: loaded or refused, nothing else.
    for at in (0..2_000).step_by(3) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x41;
        fs::write(&path, &bytes).unwrap();
        let _loaded_or_refused = load(path.clone(), 1, KernelChoice::Auto);
    }
    assert_eq!((VOCAB, CONTEXT), (299, 1024));
}
