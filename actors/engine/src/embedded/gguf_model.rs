//! A Llama model in a GGUF file: its shape, its tensors' names, its tokenizer.
//!
//! Called by the loader; calls the GGUF reader over a memory map. Never: changes the file.

use memmap2::Mmap;

use super::{
    config::{LlamaConfig, RotaryScaling, rotary_angles},
    gguf::Gguf,
    quant::{BLOCK, TensorType, dequantized_row},
    repack::Source,
    weights::{Part, Tensors},
};

/// An open file.
pub(super) struct GgufModel {
    map: Mmap,
    header: Gguf,
}

impl GgufModel {
    /// Parses the header of `map`.
    pub(super) fn open(map: Mmap) -> Result<Self, String> {
        let header = Gguf::parse(&map)?;
        Ok(Self { map, header })
    }

    /// The parsed header.
    pub(super) fn header(&self) -> &Gguf {
        &self.header
    }

    /// What the file says it is.
    pub(super) fn architecture(&self) -> &str {
        self.header.text("general.architecture").unwrap_or("(none)")
    }

    fn count(&self, key: &str) -> Result<usize, String> {
        let value = self.header.unsigned(key).ok_or_else(|| format!("metadata {key:?} is missing or not a count"))?;
        usize::try_from(value).map_err(|_| format!("metadata {key:?} is {value}, too large"))
    }

    /// The model's shape; `vocab` comes from the tokenizer.
    pub(super) fn config(&self, vocab: usize) -> Result<LlamaConfig, String> {
        let (hidden, heads) = (self.count("llama.embedding_length")?, self.count("llama.attention.head_count")?);
        let head_dim = match self.header.unsigned("llama.attention.key_length") {
            Some(dim) => usize::try_from(dim).map_err(|_| "the head width is too large")?,
            None => hidden.checked_div(heads).ok_or("llama.attention.head_count is 0")?,
        };
        if self.header.unsigned("llama.rope.dimension_count").is_some_and(|dims| dims != head_dim as u64) {
            return Err(format!("llama.rope.dimension_count differs from the head width {head_dim}: not supported"));
        }
        if self.header.unsigned("llama.expert_count").is_some_and(|experts| experts > 0) {
            return Err("a mixture of experts is not supported".to_owned());
        }
        let epsilon = self.header.float("llama.attention.layer_norm_rms_epsilon");
        let config = LlamaConfig {
            layers: self.count("llama.block_count")?,
            hidden,
            ffn: self.count("llama.feed_forward_length")?,
            heads,
            kv_heads: self.count("llama.attention.head_count_kv").unwrap_or(heads),
            head_dim,
            context: self.count("llama.context_length")?,
            vocab,
            epsilon: epsilon.ok_or("llama.attention.layer_norm_rms_epsilon is missing")? as f32,
            rotary: self.rotary(head_dim)?,
        };
        config.check()?;
        Ok(config)
    }

    fn rotary(&self, head_dim: usize) -> Result<Vec<f64>, String> {
        if head_dim > 512 {
            return Err(format!("head width is {head_dim}, at most 512 is supported"));
        }
        let scaling = match self.header.text("llama.rope.scaling.type") {
            None | Some("none") => RotaryScaling::None,
            Some("linear") => RotaryScaling::Linear(self.header.float("llama.rope.scaling.factor").unwrap_or(1.0)),
            Some(other) => {
                return Err(format!("rotary scaling {other:?} is not supported; none, linear and llama3 are"));
            }
        };
        let base = self.header.float("llama.rope.freq_base").unwrap_or(10_000.0);
        let mut angles = rotary_angles(head_dim, base, scaling);
        // Llama 3's scaling comes as one divisor per pair.
        if let Some(info) = self.header.tensors.get("rope_freqs.weight") {
            let fits = info.kind == TensorType::F32 && (info.rows, info.cols) == (1, angles.len());
            if !fits {
                return Err("tensor \"rope_freqs.weight\" does not fit the head width".to_owned());
            }
            let factors = dequantized_row(info.kind, &self.map[info.bytes.clone()], info.cols);
            angles.iter_mut().zip(factors).for_each(|(angle, factor)| *angle /= f64::from(factor));
        }
        Ok(angles)
    }
}

impl Tensors for GgufModel {
    fn find(&self, part: Part) -> Result<Option<Source<'_>>, String> {
        let name = self.name(part);
        let Some(info) = self.header.tensors.get(&name) else { return Ok(None) };
        if info.rows > 1 && !info.cols.is_multiple_of(BLOCK) {
            return Err(format!("tensor {name:?} has rows of {}, not a multiple of {BLOCK}", info.cols));
        }
        let data = &self.map[info.bytes.clone()];
        // Files of this architecture hold rotary pairs side by side already.
        Ok(Some(Source { kind: info.kind, cols: info.cols, rows: info.rows, data, unrotate: None }))
    }

    fn name(&self, part: Part) -> String {
        let layer = |index: usize, name: &str| format!("blk.{index}.{name}.weight");
        match part {
            Part::Embedding => "token_embd.weight".to_owned(),
            Part::Output => "output.weight".to_owned(),
            Part::OutputNorm => "output_norm.weight".to_owned(),
            Part::AttentionNorm(i) => layer(i, "attn_norm"),
            Part::Query(i) => layer(i, "attn_q"),
            Part::Key(i) => layer(i, "attn_k"),
            Part::Value(i) => layer(i, "attn_v"),
            Part::AttentionOut(i) => layer(i, "attn_output"),
            Part::FfnNorm(i) => layer(i, "ffn_norm"),
            Part::Gate(i) => layer(i, "ffn_gate"),
            Part::Up(i) => layer(i, "ffn_up"),
            Part::Down(i) => layer(i, "ffn_down"),
        }
    }
}
