//! The kernels for AVX-512 with VNNI.
//!
//! A register holds all 16 rows of a panel; one instruction multiplies four columns of each with an activation
//! and adds into 32 bits. It wants unsigned weights: eight-bit ones get 128 added and 128 times the activations'
//! sum taken off again, exact in integers. A tile is 16 rows by up to eight columns.

use std::arch::x86_64::*;

use super::{
    Columns, ColumnsOut, Kernels, avx2,
    generic::{self, Attend, AttendScratch},
};
use crate::embedded::{
    quant::BLOCK,
    repack::{Form, PANEL_ROWS, Q4_NUMBERS, Q8_NUMBERS, STEP, VECTOR},
};

/// Steps of four columns in a block.
const STEPS: usize = BLOCK / STEP;
/// Columns of one tile.
const TILE: usize = 8;

pub(super) fn kernels() -> Kernels {
    Kernels { name: "avx512", q4, q8, quantize, norm_scale, scaled_by, silu_mul, rotate, attend }
}

/// The unsigned numbers of a block, one register per step, and what they are scaled with.
struct Weights {
    steps: [__m512i; STEPS],
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

/// # Safety
/// `block` is one panel block of four-bit weights.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn q4_weights(block: &[u8]) -> Weights {
    let low = _mm512_set1_epi8(15);
    let mut steps = [_mm512_setzero_si512(); STEPS];
    for pair in 0..STEPS / 2 {
        // SAFETY: a block has 256 packed bytes.
        let packed = unsafe { _mm512_loadu_si512(block.as_ptr().add(pair * VECTOR).cast()) };
        steps[2 * pair] = _mm512_and_si512(packed, low);
        steps[2 * pair + 1] = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), low);
    }
    // SAFETY: scales and offsets follow the numbers, 32 bytes each.
    unsafe { Weights { steps, scale: halves(block, Q4_NUMBERS), offset: halves(block, Q4_NUMBERS + 2 * PANEL_ROWS) } }
}

/// # Safety
/// `block` is one panel block of eight-bit weights.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn q8_weights(block: &[u8]) -> Weights {
    let flip = _mm512_set1_epi8(-128);
    let mut steps = [_mm512_setzero_si512(); STEPS];
    for (step, numbers) in steps.iter_mut().enumerate() {
        // SAFETY: a block has 512 bytes of numbers.
        *numbers = unsafe { _mm512_xor_si512(_mm512_loadu_si512(block.as_ptr().add(step * VECTOR).cast()), flip) };
    }
    // SAFETY: scales follow the numbers.
    unsafe { Weights { steps, scale: halves(block, Q8_NUMBERS), offset: _mm512_setzero_ps() } }
}

/// Adds one block's share of `C` columns to `acc`.
///
/// # Safety
/// `acc` has `C` columns of 16 and `at + C <= x.numbers.len()`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn tile<const C: usize, const FOUR: bool>(w: &Weights, x: &Columns, at: usize, acc: &mut [f32]) {
    let mut dots = [_mm512_setzero_si512(); C];
    for (step, numbers) in w.steps.iter().enumerate() {
        for (column, dot) in dots.iter_mut().enumerate() {
            // SAFETY: columns as promised, `step < 8`; the read is unaligned.
            let four = unsafe { x.numbers.as_ptr().add(at + column).cast::<i32>().add(step).read_unaligned() };
            *dot = _mm512_dpbusd_epi32(*dot, *numbers, _mm512_set1_epi32(four));
        }
    }
    for (column, dot) in dots.iter().enumerate() {
        // SAFETY: columns as promised; `acc` has C columns of 16.
        unsafe {
            let acc = acc.as_mut_ptr().add(column * PANEL_ROWS);
            let x_scale = _mm512_set1_ps(*x.scales.get_unchecked(at + column));
            let dot = if FOUR {
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
unsafe fn tiles<const FOUR: bool>(w: &Weights, x: &Columns, at: usize, acc: &mut [f32]) {
    for (index, acc) in acc.chunks_mut(TILE * PANEL_ROWS).enumerate() {
        let at = at + index * TILE;
        // SAFETY: the caller's promise; the tile's columns are the length of `acc`.
        unsafe {
            match acc.len() / PANEL_ROWS {
                8 => tile::<8, FOUR>(w, x, at, acc),
                7 => tile::<7, FOUR>(w, x, at, acc),
                6 => tile::<6, FOUR>(w, x, at, acc),
                5 => tile::<5, FOUR>(w, x, at, acc),
                4 => tile::<4, FOUR>(w, x, at, acc),
                3 => tile::<3, FOUR>(w, x, at, acc),
                2 => tile::<2, FOUR>(w, x, at, acc),
                _ => tile::<1, FOUR>(w, x, at, acc),
            }
        }
    }
}

/// # Safety
/// See `Kernels::panel`, which checks all bounds.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn q4(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    acc.fill(0.0);
    for (index, block) in panel.chunks_exact(Form::Q4.block_bytes()).enumerate() {
        // SAFETY: the caller's promise.
        unsafe { tiles::<true>(&q4_weights(block), x, index * x.count + first, acc) };
    }
}

/// # Safety
/// See `Kernels::panel`, which checks all bounds.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn q8(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    acc.fill(0.0);
    for (index, block) in panel.chunks_exact(Form::Q8.block_bytes()).enumerate() {
        // SAFETY: the caller's promise.
        unsafe { tiles::<false>(&q8_weights(block), x, index * x.count + first, acc) };
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
