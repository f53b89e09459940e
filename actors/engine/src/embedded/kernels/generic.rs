//! The floating-point definitions: what is added to what, in which order.
//!
//! Every function is inlined into a wrapper for one instruction set; Rust neither reorders nor fuses floating
//! point on its own, so each wrapper gives the same bits. Sums that cross lanes keep 16 partial sums by index
//! modulo 16 and fold them in halves.
//! Called by the versions of the kernels. Pure.

use super::{super::quant::BLOCK, ColumnsOut, word_place};
use crate::loader::Activations;

/// Partial sums of every sum across a row.
pub(in super::super) const LANES: usize = 16;
/// Tokens of a cache block, fixed by the layout of keys.
pub(in super::super) const KEYS: usize = 16;
/// Keys between two updates of the running maximum. A boundary by position, so that it moves for nobody.
const CHUNK: usize = 8 * KEYS;
/// Queries computed side by side.
const ROWS_MAX: usize = 4;

/// A run-time number of rows to a compile-time one.
macro_rules! by_rows {
    ($rows:expr, $simd:ident :: $name:ident ($($arg:expr),*)) => {
        match $rows {
            1 => $simd::$name::<1>($($arg),*),
            2 => $simd::$name::<2>($($arg),*),
            3 => $simd::$name::<3>($($arg),*),
            _ => $simd::$name::<4>($($arg),*),
        }
    };
}

/// Adding and subtracting it rounds to an integer (ties to even); its low bits then hold that integer.
const ROUNDER: f32 = 12_582_912.0;
/// Blocks whose largest magnitude is below are zero: the reciprocal would overflow.
const TINY: f32 = 1e-30;

/// 32 activations as numbers of 8 or 16 bits; those of 16 in the order of [`word_place`].
pub(super) struct Quantized<T> {
    pub(super) numbers: [T; BLOCK],
    pub(super) scale: f32,
    pub(super) total: i32,
}

/// e^x to about one unit in the last place; 0 below -87.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let clamped = if x < 88.0 { x } else { 88.0 };
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let power = shifted - ROUNDER;
    // ln 2 in two parts: the first has few enough bits for the product to be exact.
    let rest = power.mul_add(-0.693_359_4, clamped);
    let rest = power.mul_add(2.121_944_4e-4, rest);
    let mut series = 1.0 / 5040.0f32;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = series.mul_add(rest, coefficient);
    }
    let exponent = (shifted.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32).wrapping_add(127);
    let scaled = series * f32::from_bits((exponent as u32) << 23);
    if x > -87.0 { scaled } else { 0.0 }
}

#[inline(always)]
fn fold_sum(lanes: [f32; LANES]) -> f32 {
    let mut lanes = lanes;
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[inline(always)]
pub(super) fn norm_scale(x: &[f32], epsilon: f32) -> f32 {
    let mut squares = [0.0f32; LANES];
    let (chunks, _) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            squares[i] = chunk[i].mul_add(chunk[i], squares[i]);
        }
    }
    1.0 / (fold_sum(squares) / x.len() as f32 + epsilon).sqrt()
}

#[inline(always)]
pub(super) fn scaled_by(x: &[f32], weight: &[f32], scale: f32, out: &mut [f32]) {
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

/// The largest number of each width.
pub(super) const BYTE_MAX: f32 = 127.0;
pub(super) const WORD_MAX: f32 = 32_767.0;

/// What numbers up to `top` are multiplied with, and values, in a block whose largest magnitude is `largest`.
#[inline(always)]
pub(super) fn scales(largest: f32, top: f32) -> (f32, f32) {
    if largest > TINY { (largest / top, top / largest) } else { (0.0, 0.0) }
}

/// Numbers of up to 22 bits, the scale and the numbers' sum.
#[inline(always)]
fn rounded(x: &[f32; BLOCK], top: f32) -> Quantized<i32> {
    let mut largest = [0.0f32; LANES];
    for i in 0..LANES {
        largest[i] = larger(x[i].abs(), x[i + LANES].abs());
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            largest[i] = larger(largest[i], largest[i + half]);
        }
    }
    let (scale, inverse) = scales(largest[0], top);
    let mut numbers = [0i32; BLOCK];
    let mut total = 0i32;
    for i in 0..BLOCK {
        numbers[i] = (x[i] * inverse + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
        total += numbers[i];
    }
    Quantized { numbers, scale, total }
}

#[inline(always)]
pub(super) fn quantize_bytes(x: &[f32; BLOCK]) -> Quantized<i8> {
    let Quantized { numbers, scale, total } = rounded(x, BYTE_MAX);
    Quantized { numbers: numbers.map(|n| n as i8), scale, total }
}

#[inline(always)]
pub(super) fn quantize_words(x: &[f32; BLOCK]) -> Quantized<i16> {
    let Quantized { numbers, scale, total } = rounded(x, WORD_MAX);
    Quantized { numbers: std::array::from_fn(|i| numbers[word_place(i)] as i16), scale, total }
}

/// Quantizes the blocks of `x` into one column, from block `first` on.
///
/// # Safety
/// As for [`ColumnsOut::place`], for all these blocks; the CPU has the features of `S`.
#[inline(always)]
pub(super) unsafe fn quantize_column<S: Simd>(x: &[f32], out: &ColumnsOut, first: usize, column: usize) {
    let (blocks, _) = x.as_chunks::<BLOCK>();
    for (index, block) in blocks.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            match out.width {
                Activations::Int8 => out.put_bytes(first + index, column, &S::quantize_bytes(block)),
                Activations::Int16 => out.put_words(first + index, column, &S::quantize_words(block)),
            }
        }
    }
}

#[inline(always)]
pub(super) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

#[inline(always)]
pub(super) fn rotate(heads: &mut [f32], angles: &[f32], dim: usize) {
    for head in heads.chunks_exact_mut(dim) {
        for (pair, angle) in head.chunks_exact_mut(2).zip(angles.chunks_exact(2)) {
            let (a, b) = (pair[0], pair[1]);
            pair[0] = a * angle[0] - b * angle[1];
            pair[1] = a * angle[1] + b * angle[0];
        }
    }
}

/// Attention of some consecutive tokens of one sequence over one key-value head.
pub(in super::super) struct Attend<'a> {
    /// Queries, rotated: token `t` of the tile has `group * dim` values from `t * stride`.
    pub(in super::super) queries: &'a [f32],
    /// Distance of two tokens in `queries`.
    pub(in super::super) stride: usize,
    /// Tokens in the tile.
    pub(in super::super) tokens: usize,
    /// Position of the first of them.
    pub(in super::super) start: usize,
    /// Query heads that share the key-value head.
    pub(in super::super) group: usize,
    /// Width of a head, a multiple of 16.
    pub(in super::super) dim: usize,
    /// Keys `[dim][16]` and values `[16][dim]`, f16 bits, of block `i` of the sequence.
    pub(in super::super) block: &'a (dyn Fn(usize) -> (&'a [u16], &'a [u16]) + Sync),
}

/// Memory of one thread for [`Attend`].
#[derive(Debug, Default)]
pub(in super::super) struct AttendScratch {
    queries: Vec<f32>,
    block: Vec<f32>,
    scores: Vec<f32>,
    largest: Vec<f32>,
    sums: Vec<[f32; LANES]>,
}

/// What an instruction set does its own way; the defaults define the bits.
pub(super) trait Simd {
    /// 32 values to eight bits.
    ///
    /// # Safety
    /// The CPU has the version's features.
    #[inline(always)]
    unsafe fn quantize_bytes(x: &[f32; BLOCK]) -> Quantized<i8> {
        quantize_bytes(x)
    }

    /// 32 values to sixteen bits, in the order of [`word_place`].
    ///
    /// # Safety
    /// The CPU has the version's features.
    #[inline(always)]
    unsafe fn quantize_words(x: &[f32; BLOCK]) -> Quantized<i16> {
        quantize_words(x)
    }

    /// f16 bits to f32.
    ///
    /// # Safety
    /// The CPU has the version's features. Equal lengths, a multiple of 16.
    #[inline(always)]
    unsafe fn widen(from: &[u16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = half::f16::from_bits(*from).to_f32();
        }
    }

    /// Scores of `R` queries, `dim` wide, against 16 keys: `out[row * CHUNK + key]`.
    ///
    /// # Safety
    /// The CPU has the version's features. `queries` has `R * dim` values, `keys` `16 * dim`, `out` reaches
    /// `(R - 1) * CHUNK + 16`.
    #[inline(always)]
    unsafe fn score<const R: usize>(queries: &[f32], keys: &[f32], dim: usize, out: &mut [f32]) {
        for row in 0..R {
            let mut acc = [0.0f32; KEYS];
            for (d, keys) in keys.chunks_exact(KEYS).enumerate().take(dim) {
                for i in 0..KEYS {
                    acc[i] = queries[row * dim + d].mul_add(keys[i], acc[i]);
                }
            }
            out[row * CHUNK..][..KEYS].copy_from_slice(&acc);
        }
    }

    /// Adds `keys` value rows, weighed by `weights[row * CHUNK + key]`, to `out[row * dim..]`.
    ///
    /// # Safety
    /// The CPU has the version's features. `out` has `R * dim` values, `values` `keys * dim`.
    #[inline(always)]
    unsafe fn mix<const R: usize>(weights: &[f32], values: &[f32], keys: usize, out: &mut [f32]) {
        let dim = out.len() / R;
        for row in 0..R {
            let out = &mut out[row * dim..][..dim];
            for key in 0..keys {
                for (out, value) in out.iter_mut().zip(&values[key * dim..][..dim]) {
                    *out = weights[row * CHUNK + key].mul_add(*value, *out);
                }
            }
        }
    }
}

/// Weighs the scores of one row in one chunk: exponentials in place, sums by lane. Returns what the row's
/// output so far is multiplied with.
#[inline(always)]
fn weigh(scores: &mut [f32], valid: usize, largest: &mut f32, sums: &mut [f32; LANES]) -> f32 {
    let padded = valid.next_multiple_of(LANES);
    scores[valid..padded].fill(f32::NEG_INFINITY);
    let mut top = [f32::NEG_INFINITY; LANES];
    for chunk in scores[..padded].chunks_exact(LANES) {
        for i in 0..LANES {
            top[i] = larger(top[i], chunk[i]);
        }
    }
    let top = top.iter().fold(*largest, |a, b| larger(a, *b));
    let rescale = exp(*largest - top);
    *largest = top;
    for sum in sums.iter_mut() {
        *sum *= rescale;
    }
    for chunk in scores[..padded].chunks_exact_mut(LANES) {
        for i in 0..LANES {
            chunk[i] = exp(chunk[i] - top);
            sums[i] += chunk[i];
        }
    }
    rescale
}

/// `out[token][group * dim]`: softmax(queries · keys / sqrt(dim)) · values over all positions up to the token's own.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd>(task: &Attend<'_>, scratch: &mut AttendScratch, out: &mut [f32]) {
    let (dim, group) = (task.dim, task.group);
    let (width, rows) = (group * dim, task.tokens * group);
    assert!(dim % LANES == 0 && out.len() == rows * dim, "a tile's output has its queries' shape");
    let scale = 1.0 / (dim as f32).sqrt();
    scratch.queries.clear();
    for token in 0..task.tokens {
        scratch.queries.extend(task.queries[token * task.stride..][..width].iter().map(|q| q * scale));
    }
    scratch.block.resize(KEYS * dim, 0.0);
    scratch.scores.resize(rows * CHUNK, 0.0);
    scratch.largest.clear();
    scratch.largest.resize(rows, f32::NEG_INFINITY);
    scratch.sums.clear();
    scratch.sums.resize(rows, [0.0; LANES]);
    out.fill(0.0);
    let end = task.start + task.tokens;
    for base in (0..end).step_by(CHUNK) {
        // Tokens before `from` end before this chunk.
        let from = base.saturating_sub(task.start).min(task.tokens);
        for first in (base..end.min(base + CHUNK)).step_by(KEYS) {
            let (keys, _) = (task.block)(first / KEYS);
            // SAFETY: the caller's promise; a block has 16 keys.
            unsafe { S::widen(&keys[..KEYS * dim], &mut scratch.block) };
            for token in first.saturating_sub(task.start)..task.tokens {
                for (row, rows) in parts(token * group, group) {
                    let queries = &scratch.queries[row * dim..(row + rows) * dim];
                    let out = &mut scratch.scores[row * CHUNK + first - base..];
                    // SAFETY: the caller's promise; the slices have the lengths that `score` names.
                    unsafe { by_rows!(rows, S::score(queries, &scratch.block, dim, out)) }
                }
            }
        }
        for row in from * group..rows {
            let valid = (task.start + row / group + 1 - base).min(CHUNK);
            let scores = &mut scratch.scores[row * CHUNK..][..CHUNK];
            let rescale = weigh(scores, valid, &mut scratch.largest[row], &mut scratch.sums[row]);
            for value in &mut out[row * dim..][..dim] {
                *value *= rescale;
            }
        }
        for first in (base..end.min(base + CHUNK)).step_by(KEYS) {
            let (_, values) = (task.block)(first / KEYS);
            // SAFETY: the caller's promise; a block has 16 values.
            unsafe { S::widen(&values[..KEYS * dim], &mut scratch.block) };
            for token in first.saturating_sub(task.start)..task.tokens {
                let keys = (task.start + token + 1 - first).min(KEYS);
                for (row, rows) in parts(token * group, group) {
                    let weights = &scratch.scores[row * CHUNK + first - base..];
                    let out = &mut out[row * dim..(row + rows) * dim];
                    // SAFETY: the caller's promise; the slices have the lengths that `mix` names.
                    unsafe { by_rows!(rows, S::mix(weights, &scratch.block, keys, out)) }
                }
            }
        }
    }
    for (row, out) in out.chunks_exact_mut(dim).enumerate() {
        let inverse = 1.0 / fold_sum(scratch.sums[row]);
        for value in out {
            *value *= inverse;
        }
    }
}

/// (First row, rows) of each part of one token's rows, at most [`ROWS_MAX`] at once. Not a function that takes what is to be
/// done with them: a closure that the compiler does not inline has none of the features of the kernel around it, and each of
/// its vector instructions becomes a call.
#[inline(always)]
fn parts(first: usize, count: usize) -> impl Iterator<Item = (usize, usize)> {
    (first..first + count).step_by(ROWS_MAX).map(move |row| (row, (first + count - row).min(ROWS_MAX)))
}

/// The distance of two rows of scores, for the versions of [`Simd`].
pub(super) const SCORE_STRIDE: usize = CHUNK;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere_it_matters() {
        for i in -8600..8700 {
            let x = i as f32 * 0.01;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 3e-7, "exp({x}): relative error {error}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn quantizing_keeps_within_half_a_step_and_counts_its_sum() {
        let x: [f32; BLOCK] = std::array::from_fn(|i| (i as f32 - 13.7) * 0.37);
        let quantized = quantize_bytes(&x);
        assert_eq!(quantized.total, quantized.numbers.iter().map(|n| i32::from(*n)).sum::<i32>());
        for (x, n) in x.iter().zip(quantized.numbers) {
            assert!((x - f32::from(n) * quantized.scale).abs() <= quantized.scale * 0.5001);
        }
        let quantized = quantize_words(&x);
        assert_eq!(quantized.total, quantized.numbers.iter().map(|n| i32::from(*n)).sum::<i32>());
        for (i, x) in x.iter().enumerate() {
            let n = quantized.numbers[word_place(i)];
            assert!((x - f32::from(n) * quantized.scale).abs() <= quantized.scale * 0.51, "{x} became {n}");
        }
        assert_eq!(quantize_bytes(&[0.0; BLOCK]).scale, 0.0);
    }
}
