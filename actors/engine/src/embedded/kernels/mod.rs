//! The inner loops, in three versions that give the same bits.
//!
//! The order of every floating-point sum is fixed in `generic.rs` and `scalar.rs`; the AVX2 and AVX-512 versions
//! only do several outputs at once. [`Kernels::choose`] takes the widest version this CPU has and compares it
//! with the portable one, bit for bit, before it is used.
//! Called by the forward pass; calls nothing. Never: allocates, or depends on how many columns are computed together.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(super) mod generic;
mod scalar;
mod selfcheck;
pub(super) mod speed;

use self::generic::{Attend, AttendScratch};
use super::{
    quant::BLOCK,
    repack::{Form, PANEL_ROWS, Panel, STEP},
};
use crate::loader::{Activations, KernelChoice};

/// Activations as the kernels read them: numbers of 8 or 16 bits, a scale and a sum for each block of 32 of each
/// column. All are ordered `[block][column]`.
#[derive(Debug, Default)]
pub(super) struct Columns {
    /// How many bits; says which of the next two is in use.
    pub(super) width: Activations,
    /// [`Activations::Int8`]: 32 numbers each, -127 to 127.
    pub(super) bytes: Vec<[i8; BLOCK]>,
    /// [`Activations::Int16`]: 32 numbers each, -32767 to 32767, each four in the order 0, 2, 1, 3. Neighbours are
    /// then what the even and the odd bytes of a weight vector are multiplied with.
    pub(super) words: Vec<[i16; BLOCK]>,
    /// What a number is multiplied with.
    pub(super) scales: Vec<f32>,
    /// Scale times the sum of the numbers.
    pub(super) sums: Vec<f32>,
    /// The sum of the numbers.
    pub(super) totals: Vec<i32>,
    /// Columns.
    pub(super) count: usize,
}

/// Bytes ahead of its use at which a weight is fetched. Weights are read once a step in the order of memory; the
/// processor's own prefetching stops at each page and reached two thirds of the speed.
#[cfg(target_arch = "x86_64")]
const PREFETCH: usize = 2048;

/// Fetches the block that lies [`PREFETCH`] bytes after `block`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch(block: &[u8]) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    for line in (0..block.len()).step_by(64) {
        // SAFETY: a hint, which touches no memory: any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(block.as_ptr().wrapping_add(PREFETCH + line).cast()) };
    }
}

/// Where number `i` of a block lies among its words. Its own inverse.
#[inline(always)]
pub(super) const fn word_place(i: usize) -> usize {
    match i % STEP {
        1 => i + 1,
        2 => i - 1,
        _ => i,
    }
}

impl Columns {
    /// No columns of this width.
    pub(super) fn new(width: Activations) -> Self {
        Self { width, ..Self::default() }
    }

    /// Makes room for `count` columns of `blocks` blocks. Contents are whatever was there.
    pub(super) fn resize(&mut self, count: usize, blocks: usize) {
        let len = count * blocks;
        self.count = count;
        if self.scales.len() < len {
            match self.width {
                Activations::Int8 => self.bytes.resize(len, [0; BLOCK]),
                Activations::Int16 => self.words.resize(len, [0; BLOCK]),
            }
            self.scales.resize(len, 0.0);
            self.sums.resize(len, 0.0);
            self.totals.resize(len, 0);
        }
    }

    /// Blocks there is room for, all columns together.
    fn len(&self) -> usize {
        match self.width {
            Activations::Int8 => self.bytes.len(),
            Activations::Int16 => self.words.len(),
        }
    }
}

/// Quantizes blocks of f32 into one column: `(x, out, first block, column)`.
type QuantizeFn = unsafe fn(&[f32], &ColumnsOut, usize, usize);
/// Adds nothing, sets `acc[column][row]` for the columns `first..first + acc.len() / 16` of one panel.
type PanelFn = unsafe fn(&[u8], &Columns, usize, &mut [f32]);

/// One version of every inner loop.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernels {
    /// `avx512`, `avx2` or `portable`.
    pub(super) name: &'static str,
    /// Four-bit weights by eight-bit activations; the others likewise.
    q4x8: PanelFn,
    q8x8: PanelFn,
    q4x16: PanelFn,
    q8x16: PanelFn,
    quantize: QuantizeFn,
    norm_scale: unsafe fn(&[f32], f32) -> f32,
    scaled_by: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    silu_mul: unsafe fn(&mut [f32], &[f32]),
    rotate: unsafe fn(&mut [f32], &[f32], usize),
    attend: unsafe fn(&Attend<'_>, &mut AttendScratch, &mut [f32]),
}

/// Where columns are written by several threads, each its own columns or blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct ColumnsOut {
    width: Activations,
    bytes: *mut [i8; BLOCK],
    words: *mut [i16; BLOCK],
    scales: *mut f32,
    sums: *mut f32,
    totals: *mut i32,
    len: usize,
    count: usize,
}

// SAFETY: it is a set of addresses; `place` states what its callers keep apart.
unsafe impl Send for ColumnsOut {}
// SAFETY: as above.
unsafe impl Sync for ColumnsOut {}

impl ColumnsOut {
    /// A way to write into `columns` from several threads while the borrow of `columns` is idle.
    pub(super) fn new(columns: &mut Columns) -> Self {
        Self {
            width: columns.width,
            len: columns.len(),
            count: columns.count,
            bytes: columns.bytes.as_mut_ptr(),
            words: columns.words.as_mut_ptr(),
            scales: columns.scales.as_mut_ptr(),
            sums: columns.sums.as_mut_ptr(),
            totals: columns.totals.as_mut_ptr(),
        }
    }

    /// Writes block `block` of column `column`; returns where it lies.
    ///
    /// # Safety
    /// The columns are alive and unmoved, and no other thread writes or reads this block of this column.
    #[inline(always)]
    unsafe fn place<T>(&self, block: usize, column: usize, quantized: &generic::Quantized<T>) -> usize {
        let at = block * self.count + column;
        assert!(at < self.len && column < self.count, "a block outside its columns");
        // SAFETY: `at` is in bounds of all, which have equal length; the caller keeps writers apart.
        unsafe {
            *self.scales.add(at) = quantized.scale;
            *self.sums.add(at) = quantized.scale * quantized.total as f32;
            *self.totals.add(at) = quantized.total;
        }
        at
    }

    /// Eight bits, for columns of that width.
    ///
    /// # Safety
    /// As for `place`.
    #[inline(always)]
    unsafe fn put_bytes(&self, block: usize, column: usize, quantized: &generic::Quantized<i8>) {
        debug_assert!(self.width == Activations::Int8);
        // SAFETY: the caller's promise; `place` checks the bounds.
        unsafe { *self.bytes.add(self.place(block, column, quantized)) = quantized.numbers };
    }

    /// Sixteen bits, for columns of that width.
    ///
    /// # Safety
    /// As for `place`.
    #[inline(always)]
    unsafe fn put_words(&self, block: usize, column: usize, quantized: &generic::Quantized<i16>) {
        debug_assert!(self.width == Activations::Int16);
        // SAFETY: the caller's promise; `place` checks the bounds.
        unsafe { *self.words.add(self.place(block, column, quantized)) = quantized.numbers };
    }
}

impl Kernels {
    /// The version to use. A forced one that this CPU lacks is refused; an automatic one that fails its
    /// self-check gives way to the next with a warning.
    pub(super) fn choose(choice: KernelChoice) -> Result<Self, String> {
        let wanted = |kind: KernelChoice| choice == KernelChoice::Auto || choice == kind;
        for candidate in Self::available() {
            if !wanted(candidate.0) {
                continue;
            }
            match selfcheck::first_difference(&candidate.1, &Self::portable()) {
                None => return Ok(candidate.1),
                Some(what) if choice == KernelChoice::Auto => {
                    tracing::warn!(kernels = candidate.1.name, what, "kernels differ from the portable ones; not used");
                }
                Some(what) => return Err(format!("{} kernels fail their self-check: {what}", candidate.1.name)),
            }
        }
        if wanted(KernelChoice::Portable) {
            return Ok(Self::portable());
        }
        Err(format!("this CPU has no {choice:?} kernels; use Auto"))
    }

    /// Vector versions this CPU can run, widest first.
    fn available() -> Vec<(KernelChoice, Self)> {
        #[cfg(target_arch = "x86_64")]
        {
            let mut found = Vec::new();
            let base = std::is_x86_feature_detected!("avx2")
                && std::is_x86_feature_detected!("fma")
                && std::is_x86_feature_detected!("f16c");
            let wide = std::is_x86_feature_detected!("avx512f")
                && std::is_x86_feature_detected!("avx512bw")
                && std::is_x86_feature_detected!("avx512vl")
                && std::is_x86_feature_detected!("avx512dq")
                && std::is_x86_feature_detected!("avx512vnni");
            if base && wide {
                found.push((KernelChoice::Avx512, avx512::kernels()));
            }
            if base {
                found.push((KernelChoice::Avx2, avx2::kernels()));
            }
            found
        }
        #[cfg(not(target_arch = "x86_64"))]
        Vec::new()
    }

    /// The version that runs anywhere and defines the bits.
    pub(super) fn portable() -> Self {
        scalar::kernels()
    }

    /// One panel times columns `first..first + acc.len() / 16`: `acc[column][row]`, overwritten.
    pub(super) fn panel(&self, panel: Panel<'_>, columns: &Columns, first: usize, acc: &mut [f32]) {
        let Panel { form, bytes } = panel;
        let blocks = bytes.len() / form.block_bytes();
        let count = acc.len() / PANEL_ROWS;
        assert!(first + count <= columns.count && acc.len().is_multiple_of(PANEL_ROWS), "columns out of bounds");
        assert!(blocks * columns.count <= columns.len(), "columns shorter than the panel");
        assert!(blocks * form.block_bytes() == bytes.len(), "a panel is whole blocks");
        let kernel = match (form, columns.width) {
            (Form::Q4, Activations::Int8) => self.q4x8,
            (Form::Q8, Activations::Int8) => self.q8x8,
            (Form::Q4, Activations::Int16) => self.q4x16,
            (Form::Q8, Activations::Int16) => self.q8x16,
        };
        // SAFETY: the CPU has the features (`available`), and the bounds the kernels rely on hold (above).
        unsafe { kernel(bytes, columns, first, acc) }
    }

    /// Quantizes `x`, a multiple of 32 long, into column `column` from block `first` on.
    ///
    /// # Safety
    /// The columns behind `out` are alive, and no other thread touches these blocks of this column.
    pub(super) unsafe fn quantize(&self, x: &[f32], out: &ColumnsOut, first: usize, column: usize) {
        // SAFETY: the CPU has the features; the rest is the caller's promise.
        unsafe { (self.quantize)(x, out, first, column) }
    }

    /// What a root-mean-square norm multiplies `x`, a multiple of 16 long, with.
    pub(super) fn norm_scale(&self, x: &[f32], epsilon: f32) -> f32 {
        // SAFETY: the CPU has the features.
        unsafe { (self.norm_scale)(x, epsilon) }
    }

    /// `out = x * scale * weight`; equal lengths.
    pub(super) fn scaled(&self, x: &[f32], weight: &[f32], scale: f32, out: &mut [f32]) {
        // SAFETY: the CPU has the features.
        unsafe { (self.scaled_by)(x, weight, scale, out) }
    }

    /// `gate = silu(gate) * up`; equal lengths, a multiple of 16.
    pub(super) fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
        // SAFETY: the CPU has the features.
        unsafe { (self.silu_mul)(gate, up) }
    }

    /// Rotates neighbouring pairs of each head of `heads`, `dim` wide, by `angles`: cosine, sine per pair.
    pub(super) fn rotate(&self, heads: &mut [f32], angles: &[f32], dim: usize) {
        // SAFETY: the CPU has the features.
        unsafe { (self.rotate)(heads, angles, dim) }
    }

    /// Attention of a tile of tokens over one key-value head.
    pub(super) fn attend(&self, task: &Attend<'_>, scratch: &mut AttendScratch, out: &mut [f32]) {
        // SAFETY: the CPU has the features.
        unsafe { (self.attend)(task, scratch, out) }
    }
}
