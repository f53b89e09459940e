//! The kernels for AVX-512 with VNNI.
//!
//! A register holds all 16 rows of a panel; one instruction multiplies four columns of each with eight-bit
//! activations, or two with sixteen-bit ones, and adds into 32 bits. For bytes it wants unsigned weights: eight-bit
//! ones get 128 added and 128 times the activations' sum taken off again, exact in integers. A tile is 16 rows by up
//! to eight columns.

use std::arch::x86_64::*;

use super::{
    Columns, ColumnsOut, Kernels, avx2,
    generic::{self, Attend, AttendScratch},
    prefetch,
};
use crate::embedded::{
    quant::BLOCK,
    repack::{Form, PANEL_ROWS, Q4_NUMBERS, Q8_NUMBERS, STEP, VECTOR},
};

/// Steps of four columns in a block.
const STEPS: usize = BLOCK / STEP;
/// Steps of two columns in a block, for sixteen-bit activations.
const WORD_STEPS: usize = 2 * STEPS;
/// Columns of one tile.
const TILE: usize = 8;

pub(super) fn kernels() -> Kernels {
    Kernels {
        name: "avx512",
        q4x8: q4::<STEPS>,
        q8x8: q8::<STEPS>,
        q4x16: q4::<WORD_STEPS>,
        q8x16: q8::<WORD_STEPS>,
        quantize,
        norm_scale,
        scaled_by,
        silu_mul,
        rotate,
        attend,
    }
}

/// The numbers of a block, one register for each four bytes of activations, and what they are scaled with.
struct Weights<const N: usize> {
    /// For bytes of activations unsigned bytes, for words signed words.
    steps: [__m512i; N],
    scale: __m512,
    /// Four-bit weights: the offset. Eight-bit weights: unused.
    offset: __m512,
}

/// # Safety
/// `at + 32 <= bytes.len()`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn halves(bytes: &[u8], at: usize) -> __m512 {
    debug_assert!(at + 32 <= bytes.len());
    // SAFETY: the caller's promise; unaligned loads are allowed.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().add(at).cast())) }
}

/// Four-bit weights as bytes, or as words in the order of the activations.
///
/// # Safety
/// `block` is one panel block of four-bit weights.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn q4_weights<const N: usize>(block: &[u8]) -> Weights<N> {
    let mut steps = [_mm512_setzero_si512(); N];
    for pair in 0..STEPS / 2 {
        // SAFETY: a block has 256 packed bytes.
        let packed = unsafe { _mm512_loadu_si512(block.as_ptr().add(pair * VECTOR).cast()) };
        if N == WORD_STEPS {
            let low = _mm512_set1_epi16(15);
            steps[4 * pair] = _mm512_and_si512(packed, low);
            steps[4 * pair + 1] = _mm512_and_si512(_mm512_srli_epi16::<8>(packed), low);
            steps[4 * pair + 2] = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), low);
            steps[4 * pair + 3] = _mm512_srli_epi16::<12>(packed);
        } else {
            let low = _mm512_set1_epi8(15);
            steps[2 * pair] = _mm512_and_si512(packed, low);
            steps[2 * pair + 1] = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), low);
        }
    }
    // SAFETY: scales and offsets follow the numbers, 32 bytes each.
    unsafe { Weights { steps, scale: halves(block, Q4_NUMBERS), offset: halves(block, Q4_NUMBERS + 2 * PANEL_ROWS) } }
}

/// Eight-bit weights as bytes with 128 added, or as words, even bytes before odd ones.
///
/// # Safety
/// `block` is one panel block of eight-bit weights.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn q8_weights<const N: usize>(block: &[u8]) -> Weights<N> {
    let mut steps = [_mm512_setzero_si512(); N];
    for step in 0..STEPS {
        // SAFETY: a block has 512 bytes of numbers.
        let bytes = unsafe { _mm512_loadu_si512(block.as_ptr().add(step * VECTOR).cast()) };
        if N == WORD_STEPS {
            steps[2 * step] = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes));
            steps[2 * step + 1] = _mm512_srai_epi16::<8>(bytes);
        } else {
            steps[step] = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
        }
    }
    // SAFETY: scales follow the numbers.
    unsafe { Weights { steps, scale: halves(block, Q8_NUMBERS), offset: _mm512_setzero_ps() } }
}

/// Four bytes of the activations of block `at`.
///
/// # Safety
/// `at` is below the blocks of `x`, whose width is that of `N`, and `step < N`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn spread<const N: usize>(x: &Columns, at: usize, step: usize) -> __m512i {
    debug_assert!(step < N && at < if N == WORD_STEPS { x.words.len() } else { x.bytes.len() });
    // SAFETY: the caller's promise; the read is unaligned.
    unsafe {
        let numbers: *const i32 =
            if N == WORD_STEPS { x.words.as_ptr().add(at).cast() } else { x.bytes.as_ptr().add(at).cast() };
        _mm512_set1_epi32(numbers.add(step).read_unaligned())
    }
}

/// Adds one block's share of `C` columns to `acc`.
///
/// # Safety
/// `acc` has `C` columns of 16, `at + C` is at most the blocks of `x`, and its width is that of `N`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn tile<const C: usize, const N: usize, const FOUR: bool>(
    w: &Weights<N>,
    x: &Columns,
    at: usize,
    acc: &mut [f32],
) {
    let mut dots = [_mm512_setzero_si512(); C];
    for (step, numbers) in w.steps.iter().enumerate() {
        for (column, dot) in dots.iter_mut().enumerate() {
            // SAFETY: columns as promised, `step < N`.
            let x = unsafe { spread::<N>(x, at + column, step) };
            *dot = if N == WORD_STEPS {
                _mm512_dpwssd_epi32(*dot, *numbers, x)
            } else {
                _mm512_dpbusd_epi32(*dot, *numbers, x)
            };
        }
    }
    for (column, dot) in dots.iter().enumerate() {
        // SAFETY: columns as promised; `acc` has C columns of 16.
        unsafe {
            let acc = acc.as_mut_ptr().add(column * PANEL_ROWS);
            let x_scale = _mm512_set1_ps(*x.scales.get_unchecked(at + column));
            let dot = if FOUR || N == WORD_STEPS {
                *dot
            } else {
                _mm512_sub_epi32(*dot, _mm512_set1_epi32(*x.totals.get_unchecked(at + column) * 128))
            };
            let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), x_scale);
            let mut sum = _mm512_fmadd_ps(scaled, w.scale, _mm512_loadu_ps(acc));
            if FOUR {
                sum = _mm512_fmadd_ps(w.offset, _mm512_set1_ps(*x.sums.get_unchecked(at + column)), sum);
            }
            _mm512_storeu_ps(acc, sum);
        }
    }
}

/// # Safety
/// As for `tile`, for all columns of `acc`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn tiles<const N: usize, const FOUR: bool>(w: &Weights<N>, x: &Columns, at: usize, acc: &mut [f32]) {
    for (index, acc) in acc.chunks_mut(TILE * PANEL_ROWS).enumerate() {
        let at = at + index * TILE;
        // SAFETY: the caller's promise; the tile's columns are the length of `acc`.
        unsafe {
            match acc.len() / PANEL_ROWS {
                8 => tile::<8, N, FOUR>(w, x, at, acc),
                7 => tile::<7, N, FOUR>(w, x, at, acc),
                6 => tile::<6, N, FOUR>(w, x, at, acc),
                5 => tile::<5, N, FOUR>(w, x, at, acc),
                4 => tile::<4, N, FOUR>(w, x, at, acc),
                3 => tile::<3, N, FOUR>(w, x, at, acc),
                2 => tile::<2, N, FOUR>(w, x, at, acc),
                _ => tile::<1, N, FOUR>(w, x, at, acc),
            }
        }
    }
}

/// # Safety
/// See `Kernels::panel`, which checks all bounds; the columns' width is that of `N`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn q4<const N: usize>(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    acc.fill(0.0);
    for (index, block) in panel.chunks_exact(Form::Q4.block_bytes()).enumerate() {
        prefetch(block);
        // SAFETY: the caller's promise.
        unsafe { tiles::<N, true>(&q4_weights(block), x, index * x.count + first, acc) };
    }
}

/// # Safety
/// See `Kernels::panel`, which checks all bounds; the columns' width is that of `N`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn q8<const N: usize>(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    acc.fill(0.0);
    for (index, block) in panel.chunks_exact(Form::Q8.block_bytes()).enumerate() {
        prefetch(block);
        // SAFETY: the caller's promise.
        unsafe { tiles::<N, false>(&q8_weights(block), x, index * x.count + first, acc) };
    }
}

/// # Safety
/// As for `generic::quantize_column`, on a CPU with the features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn quantize(x: &[f32], out: &ColumnsOut, first: usize, column: usize) {
    // SAFETY: the caller's promise.
    unsafe { generic::quantize_column::<avx2::Avx2>(x, out, first, column) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn norm_scale(x: &[f32], epsilon: f32) -> f32 {
    generic::norm_scale(x, epsilon)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn scaled_by(x: &[f32], weight: &[f32], scale: f32, out: &mut [f32]) {
    generic::scaled_by(x, weight, scale, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn silu_mul(gate: &mut [f32], up: &[f32]) {
    generic::silu_mul(gate, up);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn rotate(heads: &mut [f32], angles: &[f32], dim: usize) {
    generic::rotate(heads, angles, dim);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn attend(task: &Attend<'_>, scratch: &mut AttendScratch, out: &mut [f32]) {
    // SAFETY: this function runs on CPUs with AVX-512, which have AVX2, FMA and F16C.
    unsafe { generic::attend::<avx2::Avx2>(task, scratch, out) }
}
