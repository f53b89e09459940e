//! The kernels for AVX2 with FMA and F16C.
//!
//! Four-bit weights stay below 16, so a product of two of them with activations fits 16 bits eight times over:
//! a block needs one widening at its end. Eight-bit weights are multiplied as magnitudes with the sign moved
//! to the activation. A register holds eight rows; a tile is 16 rows by up to four columns.

use std::arch::x86_64::*;

use super::{
    Columns, ColumnsOut, Kernels,
    generic::{self, Attend, AttendScratch, KEYS, Quantized, SCORE_STRIDE, Simd},
};
use crate::embedded::{
    quant::BLOCK,
    repack::{Form, PANEL_ROWS, Q4_NUMBERS, Q8_NUMBERS, STEP, VECTOR},
};

/// Steps of four columns in a block.
const STEPS: usize = BLOCK / STEP;
/// Columns of one tile.
const TILE: usize = 4;

pub(super) fn kernels() -> Kernels {
    Kernels { name: "avx2", q4, q8, quantize, norm_scale, scaled_by, silu_mul, rotate, attend }
}

/// Loads 32 bytes at `bytes[at..]`.
///
/// # Safety
/// `at + 32 <= bytes.len()`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load(bytes: &[u8], at: usize) -> __m256i {
    debug_assert!(at + 32 <= bytes.len());
    // SAFETY: the caller's promise; unaligned loads are allowed.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().add(at).cast()) }
}

/// Eight f16 at `bytes[at..]` as f32.
///
/// # Safety
/// `at + 16 <= bytes.len()`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn halves(bytes: &[u8], at: usize) -> __m256 {
    debug_assert!(at + 16 <= bytes.len());
    // SAFETY: the caller's promise; unaligned loads are allowed.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().add(at).cast())) }
}

/// Four activations, repeated over the register.
///
/// # Safety
/// `step < 8` and `at < x.numbers.len()`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn spread(x: &Columns, at: usize, step: usize) -> __m256i {
    debug_assert!(step < STEPS && at < x.numbers.len());
    // SAFETY: the caller's promise; the read is unaligned.
    unsafe { _mm256_set1_epi32(x.numbers.as_ptr().add(at).cast::<i32>().add(step).read_unaligned()) }
}

/// `acc = fma(dot * scale of x, scales of w, acc)` for eight rows.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn scaled(dot: __m256i, x_scale: f32, w_scale: __m256, acc: __m256) -> __m256 {
    _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(x_scale)), w_scale, acc)
}

/// # Safety
/// See `Kernels::panel`, which checks all bounds.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q4(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    if acc.len() == PANEL_ROWS {
        // SAFETY: the caller's promise.
        return unsafe { q4_single(panel, x, first, acc) };
    }
    acc.fill(0.0);
    let mut unpacked = [0u8; BLOCK * PANEL_ROWS];
    for (index, block) in panel.chunks_exact(Form::Q4.block_bytes()).enumerate() {
        let low = _mm256_set1_epi8(15);
        for pair in 0..STEPS / 2 {
            for half in 0..2 {
                let at = pair * VECTOR + half * 32;
                // SAFETY: both stay within the block's 256 packed and 512 unpacked bytes.
                unsafe {
                    let packed = load(block, at);
                    let to = unpacked.as_mut_ptr().add(2 * pair * VECTOR + half * 32);
                    _mm256_storeu_si256(to.cast(), _mm256_and_si256(packed, low));
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), low);
                    _mm256_storeu_si256(to.add(VECTOR).cast(), high);
                }
            }
        }
        let at = index * x.count + first;
        for (tile, acc) in acc.chunks_mut(TILE * PANEL_ROWS).enumerate() {
            let at = at + tile * TILE;
            // SAFETY: the caller's promise; the tile's columns are the length of `acc`.
            unsafe {
                match acc.len() / PANEL_ROWS {
                    4 => q4_tile::<4>(&unpacked, block, x, at, acc),
                    3 => q4_tile::<3>(&unpacked, block, x, at, acc),
                    2 => q4_tile::<2>(&unpacked, block, x, at, acc),
                    _ => q4_tile::<1>(&unpacked, block, x, at, acc),
                }
            }
        }
    }
}

/// # Safety
/// `acc` has `C` columns and `at + C <= x.numbers.len()`; `block` is one panel block.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn q4_tile<const C: usize>(numbers: &[u8; 512], block: &[u8], x: &Columns, at: usize, acc: &mut [f32]) {
    let mut dots = [[_mm256_setzero_si256(); 2]; C];
    // A count that the compiler cannot see: unrolled, it would add in another order and run out of registers.
    for step in 0..std::hint::black_box(STEPS) {
        // SAFETY: `step * VECTOR + 64 <= 512`; columns as promised.
        unsafe {
            let w = [load(numbers, step * VECTOR), load(numbers, step * VECTOR + 32)];
            for (column, dots) in dots.iter_mut().enumerate() {
                let x = spread(x, at + column, step);
                dots[0] = _mm256_add_epi16(dots[0], _mm256_maddubs_epi16(w[0], x));
                dots[1] = _mm256_add_epi16(dots[1], _mm256_maddubs_epi16(w[1], x));
            }
        }
    }
    let ones = _mm256_set1_epi16(1);
    for half in 0..2 {
        // SAFETY: scales and offsets follow the numbers: 32 bytes each.
        let scale = unsafe { halves(block, Q4_NUMBERS + half * 16) };
        // SAFETY: as above.
        let offset = unsafe { halves(block, Q4_NUMBERS + 2 * PANEL_ROWS + half * 16) };
        for (column, dots) in dots.iter().enumerate() {
            // SAFETY: `acc` has C columns of 16; columns as promised.
            unsafe {
                let acc = acc.as_mut_ptr().add(column * PANEL_ROWS + half * 8);
                let dot = _mm256_madd_epi16(dots[half], ones);
                let sum = scaled(dot, *x.scales.get_unchecked(at + column), scale, _mm256_loadu_ps(acc));
                let x_sum = _mm256_set1_ps(*x.sums.get_unchecked(at + column));
                _mm256_storeu_ps(acc, _mm256_fmadd_ps(offset, x_sum, sum));
            }
        }
    }
}

/// One column: numbers go from memory through registers, sums stay there.
///
/// # Safety
/// As for `q4`, with one column.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn q4_single(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let mut sums = [_mm256_setzero_ps(); 2];
    for (index, block) in panel.chunks_exact(Form::Q4.block_bytes()).enumerate() {
        let at = index * x.count + first;
        let mut dots = [[_mm256_setzero_si256(); 2]; 2];
        for pair in 0..STEPS / 2 {
            // SAFETY: the caller's promise; a block has 256 packed bytes.
            unsafe {
                let even = spread(x, at, 2 * pair);
                let odd = spread(x, at, 2 * pair + 1);
                for (half, dots) in dots.iter_mut().enumerate() {
                    let packed = load(block, pair * VECTOR + half * 32);
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), low);
                    let packed = _mm256_and_si256(packed, low);
                    dots[0] = _mm256_add_epi16(dots[0], _mm256_maddubs_epi16(packed, even));
                    dots[1] = _mm256_add_epi16(dots[1], _mm256_maddubs_epi16(high, odd));
                }
            }
        }
        // SAFETY: the caller's promise; scales and offsets follow the numbers.
        unsafe {
            let (x_scale, x_sum) = (*x.scales.get_unchecked(at), _mm256_set1_ps(*x.sums.get_unchecked(at)));
            for half in 0..2 {
                let dot = _mm256_madd_epi16(_mm256_add_epi16(dots[half][0], dots[half][1]), ones);
                let sum = scaled(dot, x_scale, halves(block, Q4_NUMBERS + half * 16), sums[half]);
                let offset = halves(block, Q4_NUMBERS + 2 * PANEL_ROWS + half * 16);
                sums[half] = _mm256_fmadd_ps(offset, x_sum, sum);
            }
        }
    }
    for (half, sum) in sums.iter().enumerate() {
        // SAFETY: `acc` has 16 places.
        unsafe { _mm256_storeu_ps(acc.as_mut_ptr().add(half * 8), *sum) };
    }
}

/// # Safety
/// See `Kernels::panel`, which checks all bounds.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q8(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    acc.fill(0.0);
    for (index, block) in panel.chunks_exact(Form::Q8.block_bytes()).enumerate() {
        let at = index * x.count + first;
        for (tile, acc) in acc.chunks_mut(TILE * PANEL_ROWS).enumerate() {
            let at = at + tile * TILE;
            // SAFETY: the caller's promise; the tile's columns are the length of `acc`.
            unsafe {
                match acc.len() / PANEL_ROWS {
                    4 => q8_tile::<4>(block, x, at, acc),
                    3 => q8_tile::<3>(block, x, at, acc),
                    2 => q8_tile::<2>(block, x, at, acc),
                    _ => q8_tile::<1>(block, x, at, acc),
                }
            }
        }
    }
}

/// # Safety
/// `acc` has `C` columns and `at + C <= x.numbers.len()`; `block` is one panel block.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn q8_tile<const C: usize>(block: &[u8], x: &Columns, at: usize, acc: &mut [f32]) {
    let ones = _mm256_set1_epi16(1);
    let mut dots = [[_mm256_setzero_si256(); 2]; C];
    for step in 0..std::hint::black_box(STEPS) {
        // SAFETY: a block has 512 bytes of numbers; columns as promised.
        unsafe {
            let w = [load(block, step * VECTOR), load(block, step * VECTOR + 32)];
            let magnitude = w.map(|w| _mm256_abs_epi8(w));
            for (column, dots) in dots.iter_mut().enumerate() {
                let x = spread(x, at + column, step);
                for half in 0..2 {
                    // |w| is at most 128 and x at most 127: two products fit 16 bits.
                    let pairs = _mm256_maddubs_epi16(magnitude[half], _mm256_sign_epi8(x, w[half]));
                    dots[half] = _mm256_add_epi32(dots[half], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
    }
    for half in 0..2 {
        // SAFETY: scales follow the numbers; `acc` has C columns of 16; columns as promised.
        unsafe {
            let scale = halves(block, Q8_NUMBERS + half * 16);
            for (column, dots) in dots.iter().enumerate() {
                let acc = acc.as_mut_ptr().add(column * PANEL_ROWS + half * 8);
                let sum = scaled(dots[half], *x.scales.get_unchecked(at + column), scale, _mm256_loadu_ps(acc));
                _mm256_storeu_ps(acc, sum);
            }
        }
    }
}

/// # Safety
/// As for `generic::quantize_column`, on a CPU with the features.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantize(x: &[f32], out: &ColumnsOut, first: usize, column: usize) {
    // SAFETY: the caller's promise, and this CPU has the features of `Avx2`.
    unsafe { generic::quantize_column::<Avx2>(x, out, first, column) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn norm_scale(x: &[f32], epsilon: f32) -> f32 {
    generic::norm_scale(x, epsilon)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn scaled_by(x: &[f32], weight: &[f32], scale: f32, out: &mut [f32]) {
    generic::scaled_by(x, weight, scale, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn silu_mul(gate: &mut [f32], up: &[f32]) {
    generic::silu_mul(gate, up);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rotate(heads: &mut [f32], angles: &[f32], dim: usize) {
    generic::rotate(heads, angles, dim);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn attend(task: &Attend<'_>, scratch: &mut AttendScratch, out: &mut [f32]) {
    // SAFETY: this function runs on CPUs with the features of `Avx2` only.
    unsafe { generic::attend::<Avx2>(task, scratch, out) }
}

/// Attention with eight lanes; AVX-512 machines use it too, since its time is in the conversions.
pub(super) struct Avx2;

impl Simd for Avx2 {
    #[inline(always)]
    unsafe fn quantize(x: &[f32; BLOCK]) -> Quantized {
        // SAFETY: four registers are the block; the caller promises AVX2.
        unsafe {
            let x: [__m256; 4] = std::array::from_fn(|i| _mm256_loadu_ps(x.as_ptr().add(i * 8)));
            let unsigned = _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX));
            let pair = |i: usize| {
                let (a, b) = (_mm256_and_ps(x[i], unsigned), _mm256_and_ps(x[i + 2], unsigned));
                _mm256_max_ps(b, a)
            };
            let eight = _mm256_max_ps(pair(1), pair(0));
            let four = _mm_max_ps(_mm256_extractf128_ps::<1>(eight), _mm256_castps256_ps128(eight));
            let two = _mm_max_ps(_mm_movehl_ps(four, four), four);
            let largest = _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
            let (scale, inverse) = generic::scales(largest);
            let inverse = _mm256_set1_ps(inverse);
            // Conversion rounds to nearest, ties to even, as the definition does.
            let rounded = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse)));
            let sums =
                _mm256_add_epi32(_mm256_add_epi32(rounded[0], rounded[1]), _mm256_add_epi32(rounded[2], rounded[3]));
            let four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            let total = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)));
            let low = _mm256_packs_epi32(rounded[0], rounded[1]);
            let high = _mm256_packs_epi32(rounded[2], rounded[3]);
            // Packing works within halves; this puts the groups of four back in order.
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
            let mut numbers = [0i8; BLOCK];
            _mm256_storeu_si256(numbers.as_mut_ptr().cast(), bytes);
            Quantized { numbers, scale, total }
        }
    }

    #[inline(always)]
    unsafe fn widen(from: &[u16], to: &mut [f32]) {
        assert!(from.len() == to.len() && from.len().is_multiple_of(8), "a block is whole registers");
        for at in (0..from.len()).step_by(8) {
            // SAFETY: `at + 8 <= len` of both; the caller promises F16C.
            unsafe {
                let wide = _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(at).cast()));
                _mm256_storeu_ps(to.as_mut_ptr().add(at), wide);
            }
        }
    }

    #[inline(always)]
    unsafe fn score<const R: usize>(queries: &[f32], keys: &[f32], dim: usize, out: &mut [f32]) {
        assert!(queries.len() >= R * dim && keys.len() >= dim * KEYS, "queries and keys of a tile");
        assert!(out.len() >= (R - 1) * SCORE_STRIDE + KEYS, "scores of a tile");
        // SAFETY: in bounds by the assertions; the caller promises AVX2 and FMA.
        unsafe {
            let mut acc = [[_mm256_setzero_ps(); 2]; R];
            for d in 0..dim {
                let low = _mm256_loadu_ps(keys.as_ptr().add(d * KEYS));
                let high = _mm256_loadu_ps(keys.as_ptr().add(d * KEYS + 8));
                for (row, acc) in acc.iter_mut().enumerate() {
                    let query = _mm256_set1_ps(*queries.as_ptr().add(row * dim + d));
                    acc[0] = _mm256_fmadd_ps(query, low, acc[0]);
                    acc[1] = _mm256_fmadd_ps(query, high, acc[1]);
                }
            }
            for (row, acc) in acc.iter().enumerate() {
                let out = out.as_mut_ptr().add(row * SCORE_STRIDE);
                _mm256_storeu_ps(out, acc[0]);
                _mm256_storeu_ps(out.add(8), acc[1]);
            }
        }
    }

    #[inline(always)]
    unsafe fn mix<const R: usize>(weights: &[f32], values: &[f32], keys: usize, out: &mut [f32]) {
        /// Registers of one row's output computed together.
        const WIDE: usize = 2;
        let dim = out.len() / R;
        assert!(dim.is_multiple_of(8 * WIDE) && values.len() >= keys * dim, "values of a block");
        assert!(weights.len() >= (R - 1) * SCORE_STRIDE + keys, "weights of a tile");
        for from in (0..dim).step_by(8 * WIDE) {
            // SAFETY: in bounds by the assertions; the caller promises AVX2 and FMA.
            unsafe {
                let mut acc = [[_mm256_setzero_ps(); WIDE]; R];
                for (row, acc) in acc.iter_mut().enumerate() {
                    for (i, acc) in acc.iter_mut().enumerate() {
                        *acc = _mm256_loadu_ps(out.as_ptr().add(row * dim + from + i * 8));
                    }
                }
                for key in 0..keys {
                    let value: [__m256; WIDE] =
                        std::array::from_fn(|i| _mm256_loadu_ps(values.as_ptr().add(key * dim + from + i * 8)));
                    for (row, acc) in acc.iter_mut().enumerate() {
                        let weight = _mm256_set1_ps(*weights.as_ptr().add(row * SCORE_STRIDE + key));
                        for (acc, value) in acc.iter_mut().zip(value) {
                            *acc = _mm256_fmadd_ps(weight, value, *acc);
                        }
                    }
                }
                for (row, acc) in acc.iter().enumerate() {
                    for (i, acc) in acc.iter().enumerate() {
                        _mm256_storeu_ps(out.as_mut_ptr().add(row * dim + from + i * 8), *acc);
                    }
                }
            }
        }
    }
}
