//! Attention, and activations to numbers, for AVX2: what [`Simd`] lets an instruction set do its own way.
//!
//! Called by the kernels for AVX2 and, since its time is in conversions, by those for AVX-512. Pure.

use std::arch::x86_64::*;

use super::super::generic::{self, KEYS, Quantized, SCORE_STRIDE, Simd};
use crate::embedded::quant::BLOCK;

/// A block as integers up to `top`, its scale, and the integers' sum.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn rounded(x: &[f32; BLOCK], top: f32) -> ([__m256i; 4], f32, i32) {
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
        let (scale, inverse) = generic::scales(largest, top);
        let inverse = _mm256_set1_ps(inverse);
        // Conversion rounds to nearest, ties to even, as the definition does.
        let rounded = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse)));
        let sums = _mm256_add_epi32(_mm256_add_epi32(rounded[0], rounded[1]), _mm256_add_epi32(rounded[2], rounded[3]));
        let four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
        let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
        let total = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)));
        (rounded, scale, total)
    }
}

/// Attention with eight lanes; AVX-512 machines use it too, since its time is in the conversions.
pub(in super::super) struct Avx2;

impl Simd for Avx2 {
    #[inline(always)]
    unsafe fn quantize_bytes(x: &[f32; BLOCK]) -> Quantized<i8> {
        // SAFETY: the caller promises AVX2.
        unsafe {
            let (rounded, scale, total) = rounded(x, generic::BYTE_MAX);
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
    unsafe fn quantize_words(x: &[f32; BLOCK]) -> Quantized<i16> {
        // SAFETY: the caller promises AVX2; two registers are the 32 numbers.
        unsafe {
            let (rounded, scale, total) = rounded(x, generic::WORD_MAX);
            let mut numbers = [0i16; BLOCK];
            for half in 0..2 {
                let packed = _mm256_packs_epi32(rounded[2 * half], rounded[2 * half + 1]);
                let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
                // Each four from 0, 1, 2, 3 to 0, 2, 1, 3.
                let words = _mm256_shufflelo_epi16::<0b11_01_10_00>(words);
                let words = _mm256_shufflehi_epi16::<0b11_01_10_00>(words);
                _mm256_storeu_si256(numbers.as_mut_ptr().add(16 * half).cast(), words);
            }
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
