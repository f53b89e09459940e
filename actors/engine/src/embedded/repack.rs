//! Weights in the order the kernels read them.
//!
//! A matrix becomes panels of 16 rows; a panel is a run of blocks of 32 columns. One vector register holds four
//! neighbouring columns of each row of a panel, so a kernel adds sixteen outputs side by side and never sums
//! across a register: the order of every sum is the order of the blocks, whatever the register's width.
//! Called by the loader and, for embedding rows, by the forward pass. Bounds: the arena is one allocation,
//! its size known before it is made.
//!
//! | form | bytes of one panel block | content |
//! |---|---|---|
//! | [`Form::Q4`] | 320 | 4 vectors of 64 (low nibbles: columns 8j..8j+4, high: 8j+4..8j+8), 16 scales f16, 16 offsets f16 |
//! | [`Form::Q8`] | 544 | 8 vectors of 64 (columns 4j..4j+4), 16 scales f16 |

use half::f16;
use memmap2::MmapMut;

use super::{
    compute::Turn,
    quant::{BLOCK, TensorType, eight_bit_block, four_bit_block},
};

/// Rows of one panel.
pub(super) const PANEL_ROWS: usize = 16;
/// Columns of a block that lie side by side in one vector.
pub(super) const STEP: usize = 4;
/// Bytes of one vector: a step of every row.
pub(super) const VECTOR: usize = PANEL_ROWS * STEP;
/// Bytes of the packed numbers of a [`Form::Q4`] panel block.
pub(super) const Q4_NUMBERS: usize = BLOCK * PANEL_ROWS / 2;
/// Bytes of the numbers of a [`Form::Q8`] panel block.
pub(super) const Q8_NUMBERS: usize = BLOCK * PANEL_ROWS;
/// Panels start on cache lines.
const LINE: usize = 64;

/// How a panel stores its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Four bits, scale and offset.
    Q4,
    /// Eight bits and a scale.
    Q8,
}

impl Form {
    /// Bytes of one panel block.
    pub(super) fn block_bytes(self) -> usize {
        match self {
            Self::Q4 => Q4_NUMBERS + 4 * PANEL_ROWS,
            Self::Q8 => Q8_NUMBERS + 2 * PANEL_ROWS,
        }
    }
}

/// A tensor to be repacked, still in its file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source<'a> {
    /// Element type.
    pub(super) kind: TensorType,
    /// Columns, a multiple of 32.
    pub(super) cols: usize,
    /// Rows.
    pub(super) rows: usize,
    /// `rows` rows of `kind.bytes_for(cols)` bytes.
    pub(super) data: &'a [u8],
    /// Rotary halves to pairs: rows of one head in the file. `None` keeps the rows' order.
    pub(super) unrotate: Option<usize>,
}

impl<'a> Source<'a> {
    /// Row `index` of the repacked matrix; `None` past the end, where a panel is padded with zeros.
    fn row(&self, index: usize) -> Option<&'a [u8]> {
        if index >= self.rows {
            return None;
        }
        // Hugging Face rotates element i with i + dim/2; here neighbours 2i and 2i + 1 are rotated.
        let from = self.unrotate.map_or(index, |dim| {
            let (head, within) = (index / dim, index % dim);
            head * dim + within / 2 + within % 2 * (dim / 2)
        });
        let len = self.kind.bytes_for(self.cols)?;
        self.data.get(from * len..(from + 1) * len)
    }

    fn form(&self) -> Form {
        if self.kind.is_four_bit() { Form::Q4 } else { Form::Q8 }
    }
}

/// Where one panel lies in the arena.
#[derive(Debug, Clone, Copy)]
pub(super) struct PanelRef {
    /// First byte.
    offset: usize,
    /// Bytes.
    len: usize,
    /// How its numbers are stored.
    form: Form,
}

/// One panel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panel<'a> {
    /// How its numbers are stored.
    pub(super) form: Form,
    /// Whole blocks.
    pub(super) bytes: &'a [u8],
}

/// A matrix, as panels in the arena.
#[derive(Debug, Clone)]
pub(super) struct Matrix {
    /// In row order.
    pub(super) panels: Vec<PanelRef>,
    /// Rows with a meaning; the last panel may have more, all zero.
    pub(super) rows: usize,
}

/// All panels of a model.
#[derive(Debug)]
pub(super) struct Arena(MmapMut);

impl Arena {
    /// A panel.
    pub(super) fn panel(&self, panel: PanelRef) -> Panel<'_> {
        Panel { form: panel.form, bytes: &self.0[panel.offset..panel.offset + panel.len] }
    }

    /// Weight row `row` of `matrix` as f32; `out` has as many places as the matrix has columns.
    pub(super) fn row(&self, matrix: &Matrix, row: usize, out: &mut [f32]) {
        let panel = self.panel(matrix.panels[row / PANEL_ROWS]);
        let lane = row % PANEL_ROWS;
        let blocks = panel.bytes.chunks_exact(panel.form.block_bytes());
        for (block, out) in blocks.zip(out.chunks_exact_mut(BLOCK)) {
            let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
            for (i, value) in out.iter_mut().enumerate() {
                let (step, within) = (i / STEP, lane * STEP + i % STEP);
                *value = match panel.form {
                    Form::Q4 => {
                        let pair = block[step / 2 * VECTOR + within];
                        let number = if step.is_multiple_of(2) { pair & 15 } else { pair >> 4 };
                        let scale = half(Q4_NUMBERS + 2 * lane);
                        f32::from(number) * scale + half(Q4_NUMBERS + 2 * (PANEL_ROWS + lane))
                    }
                    Form::Q8 => f32::from(block[step * VECTOR + within] as i8) * half(Q8_NUMBERS + 2 * lane),
                };
            }
        }
    }
}

/// Plans the arena first, fills it afterwards.
#[derive(Debug, Default)]
pub(super) struct Packer<'a> {
    /// What fills each panel: tensor and first row.
    fills: Vec<(PanelRef, Source<'a>, usize)>,
    bytes: usize,
}

impl<'a> Packer<'a> {
    /// Plans the rows of `sources` one after the other. All have equal columns; all but the last have rows in
    /// multiples of 16.
    pub(super) fn stack(&mut self, sources: &[Source<'a>]) -> Matrix {
        let mut matrix = Matrix { panels: Vec::new(), rows: 0 };
        for source in sources {
            for first in (0..source.rows).step_by(PANEL_ROWS) {
                matrix.panels.push(self.place(*source, first));
            }
            matrix.rows += source.rows;
        }
        matrix
    }

    /// Plans two tensors of equal shape as groups of four panels: 32 rows of `a`, then the same 32 of `b`.
    pub(super) fn interleave(&mut self, a: Source<'a>, b: Source<'a>) -> Matrix {
        let mut matrix = Matrix { panels: Vec::new(), rows: a.rows + b.rows };
        for first in (0..a.rows).step_by(2 * PANEL_ROWS) {
            for source in [a, b] {
                matrix.panels.push(self.place(source, first));
                matrix.panels.push(self.place(source, first + PANEL_ROWS));
            }
        }
        matrix
    }

    fn place(&mut self, source: Source<'a>, first: usize) -> PanelRef {
        let form = source.form();
        let panel = PanelRef { offset: self.bytes, len: form.block_bytes() * (source.cols / BLOCK), form };
        self.bytes = (self.bytes + panel.len).next_multiple_of(LINE);
        self.fills.push((panel, source, first));
        panel
    }

    /// Repacks everything on the pool; `progress` hears the share done.
    pub(super) fn pack(self, turn: &Turn<'_>, progress: &mut dyn FnMut(f32)) -> Result<Arena, String> {
        let mut map = MmapMut::map_anon(self.bytes.max(1)).map_err(|e| format!("no memory for the weights: {e}"))?;
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "no huge pages for the weights; decoding is a little slower");
        }
        // Slices are cut apart here so that tasks write without sharing.
        let mut rest: &mut [u8] = &mut map;
        let mut at = 0;
        let mut slices = Vec::with_capacity(self.fills.len());
        for (panel, source, first) in &self.fills {
            let (_, tail) = std::mem::take(&mut rest).split_at_mut(panel.offset - at);
            let (slice, tail) = tail.split_at_mut(panel.len);
            slices.push(std::sync::Mutex::new((slice, *source, *first)));
            (rest, at) = (tail, panel.offset + panel.len);
        }
        const ROUNDS: usize = 16;
        let round = slices.len().div_ceil(ROUNDS).max(1);
        let rounds = slices.len().div_ceil(round);
        for (done, slices) in slices.chunks(round).enumerate() {
            turn.run(slices.len().div_ceil(8), &|_, task| {
                for slice in slices.iter().skip(task * 8).take(8) {
                    let mut guard = slice.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    let (slice, source, first) = &mut *guard;
                    fill(slice, source, *first);
                }
            })
            .map_err(|e| e.to_string())?;
            progress((done + 1) as f32 / rounds as f32);
        }
        drop(slices);
        Ok(Arena(map))
    }
}

/// Writes the panel of rows `first..first + 16`.
fn fill(panel: &mut [u8], source: &Source<'_>, first: usize) {
    let form = source.form();
    for lane in 0..PANEL_ROWS {
        // Memory from the system is zero: a missing row stays zero.
        let Some(row) = source.row(first + lane) else { continue };
        for (index, block) in panel.chunks_exact_mut(form.block_bytes()).enumerate() {
            match form {
                Form::Q4 => fill_q4(block, lane, source.kind, row, index),
                Form::Q8 => fill_q8(block, lane, source.kind, row, index),
            }
        }
    }
}

fn fill_q4(block: &mut [u8], lane: usize, kind: TensorType, row: &[u8], index: usize) {
    let weights = four_bit_block(kind, row, index);
    for (pair, numbers) in weights.numbers.chunks_exact(2 * STEP).enumerate() {
        let out = &mut block[pair * VECTOR + lane * STEP..][..STEP];
        for i in 0..STEP {
            out[i] = numbers[i] | numbers[STEP + i] << 4;
        }
    }
    block[Q4_NUMBERS + 2 * lane..][..2].copy_from_slice(&weights.scale.to_le_bytes());
    block[Q4_NUMBERS + 2 * (PANEL_ROWS + lane)..][..2].copy_from_slice(&weights.offset.to_le_bytes());
}

fn fill_q8(block: &mut [u8], lane: usize, kind: TensorType, row: &[u8], index: usize) {
    let weights = eight_bit_block(kind, row, index);
    for (step, numbers) in weights.numbers.chunks_exact(STEP).enumerate() {
        let out = &mut block[step * VECTOR + lane * STEP..][..STEP];
        for i in 0..STEP {
            out[i] = numbers[i] as u8;
        }
    }
    block[Q8_NUMBERS + 2 * lane..][..2].copy_from_slice(&weights.scale.to_le_bytes());
}
