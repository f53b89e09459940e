//! The weights of a Llama model, repacked, and how they are found in a file.
//!
//! Called by the loader with a [`Tensors`]: GGUF and Hugging Face folders name and order tensors differently, the
//! rest is the same. Never: keeps a reference into the file.

use super::{
    compute::Turn,
    config::LlamaConfig,
    quant::dequantized_row,
    repack::{Arena, Matrix, PANEL_ROWS, Packer, Source},
};

/// The tensors of a model by the part they play.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Embedding,
    Output,
    OutputNorm,
    AttentionNorm(usize),
    Query(usize),
    Key(usize),
    Value(usize),
    AttentionOut(usize),
    FfnNorm(usize),
    Gate(usize),
    Up(usize),
    Down(usize),
}

/// A file with tensors.
pub(super) trait Tensors: Sync {
    /// The tensor that plays `part`, `None` when the file has none.
    fn find(&self, part: Part) -> Result<Option<Source<'_>>, String>;
    /// The name of `part` in this kind of file, for messages.
    fn name(&self, part: Part) -> String;
}

/// One layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    /// Queries, keys and values, stacked.
    pub(super) qkv: Matrix,
    pub(super) attention_out: Matrix,
    pub(super) ffn_norm: Vec<f32>,
    /// Groups of 32 gate rows and 32 up rows.
    pub(super) gate_up: Matrix,
    pub(super) down: Matrix,
}

/// All weights.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) arena: Arena,
    pub(super) embedding: Matrix,
    /// `None` when the embedding is the output matrix too.
    pub(super) output: Option<Matrix>,
    pub(super) output_norm: Vec<f32>,
    pub(super) layers: Vec<Layer>,
}

impl Weights {
    /// The matrix that gives logits.
    pub(super) fn output(&self) -> &Matrix {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

/// Looks tensors up and checks their shapes.
struct Finder<'a> {
    tensors: &'a dyn Tensors,
}

impl<'a> Finder<'a> {
    fn optional(&self, part: Part, rows: usize, cols: usize) -> Result<Option<Source<'a>>, String> {
        let Some(source) = self.tensors.find(part)? else { return Ok(None) };
        let name = self.tensors.name(part);
        if (source.rows, source.cols) != (rows, cols) {
            let (r, c) = (source.rows, source.cols);
            return Err(format!("tensor {name:?} is {r} × {c}, the model's shape needs {rows} × {cols}"));
        }
        let needed = source.kind.bytes_for(cols).and_then(|row| row.checked_mul(rows));
        if needed != Some(source.data.len()) {
            return Err(format!("tensor {name:?} has {} bytes, its shape needs {needed:?}", source.data.len()));
        }
        Ok(Some(source))
    }

    fn matrix(&self, part: Part, rows: usize, cols: usize) -> Result<Source<'a>, String> {
        let missing = || format!("tensor {:?} is missing", self.tensors.name(part));
        self.optional(part, rows, cols)?.ok_or_else(missing)
    }

    fn vector(&self, part: Part, len: usize) -> Result<Vec<f32>, String> {
        let source = self.matrix(part, 1, len)?;
        Ok(dequantized_row(source.kind, source.data, len))
    }

    fn layer(&self, packer: &mut Packer<'a>, config: &LlamaConfig, index: usize) -> Result<Layer, String> {
        let (hidden, ffn) = (config.hidden, config.ffn);
        let (q, kv) = (config.q_width(), config.kv_width());
        let qkv = [
            self.matrix(Part::Query(index), q, hidden)?,
            self.matrix(Part::Key(index), kv, hidden)?,
            self.matrix(Part::Value(index), kv, hidden)?,
        ];
        let (gate, up) = (self.matrix(Part::Gate(index), ffn, hidden)?, self.matrix(Part::Up(index), ffn, hidden)?);
        Ok(Layer {
            attention_norm: self.vector(Part::AttentionNorm(index), hidden)?,
            qkv: packer.stack(&qkv),
            attention_out: packer.stack(&[self.matrix(Part::AttentionOut(index), hidden, q)?]),
            ffn_norm: self.vector(Part::FfnNorm(index), hidden)?,
            gate_up: packer.interleave(gate, up),
            down: packer.stack(&[self.matrix(Part::Down(index), hidden, ffn)?]),
        })
    }
}

/// Finds, checks and repacks all weights; `progress` hears the share done.
pub(super) fn load(
    tensors: &dyn Tensors,
    config: &LlamaConfig,
    turn: &Turn<'_>,
    progress: &mut dyn FnMut(f32),
) -> Result<Weights, String> {
    debug_assert!(config.hidden.is_multiple_of(PANEL_ROWS), "checked by the config");
    let finder = Finder { tensors };
    let mut packer = Packer::default();
    let layers = (0..config.layers).map(|index| finder.layer(&mut packer, config, index)).collect::<Result<_, _>>()?;
    let embedding = packer.stack(&[finder.matrix(Part::Embedding, config.vocab, config.hidden)?]);
    let output = finder.optional(Part::Output, config.vocab, config.hidden)?.map(|source| packer.stack(&[source]));
    let output_norm = finder.vector(Part::OutputNorm, config.hidden)?;
    let arena = packer.pack(turn, progress)?;
    Ok(Weights { arena, embedding, output, output_norm, layers })
}
