//! Eight-bit weights on AVX2.
//!
//! For eight-bit activations weights are multiplied as magnitudes, with the sign moved to the activation; for
//! sixteen-bit ones they are widened first. Called by the table of kernels. Pure.

use std::arch::x86_64::*;

use super::{
    super::{Columns, prefetch},
    products::{STEPS, TILE, Unpacked, halves, load, multiplied, numbers, scaled, spread, store, tiles, widen},
};
use crate::embedded::repack::{Form, PANEL_ROWS, Q8_NUMBERS, VECTOR};

/// 32 eight-bit weights as two registers of words: even bytes, odd bytes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn words(bytes: __m256i) -> [__m256i; 2] {
    [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes)), _mm256_srai_epi16::<8>(bytes)]
}

/// Eight-bit weights by sixteen-bit activations.
///
/// # Safety
/// See `Kernels::panel`, which checks all bounds; the columns are of words.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn q8_words(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    if acc.len() == PANEL_ROWS {
        // SAFETY: the caller's promise.
        return unsafe { q8_words_single(panel, x, first, acc) };
    }
    acc.fill(0.0);
    let mut w = Unpacked { numbers: [0; _], scales: [0.0; _], offsets: [0.0; _] };
    for (index, block) in panel.chunks_exact(Form::Q8.block_bytes()).enumerate() {
        prefetch(block);
        for step in 0..STEPS {
            for half in 0..2 {
                // SAFETY: a block has 512 bytes of numbers, which become 1,024.
                unsafe {
                    let [even, odd] = words(load(block, step * VECTOR + half * 32));
                    store(&mut w.numbers, 2 * step * VECTOR + half * 32, even);
                    store(&mut w.numbers, (2 * step + 1) * VECTOR + half * 32, odd);
                }
            }
        }
        // SAFETY: scales follow the numbers; the columns are as promised.
        unsafe {
            widen(block, Q8_NUMBERS, &mut w.scales);
            tiles::<true, false>(&w, x, index * x.count + first, acc);
        }
    }
}

/// # Safety
/// As for `q8_words`, with one column.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn q8_words_single(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    let mut sums = [_mm256_setzero_ps(); 2];
    for (index, block) in panel.chunks_exact(Form::Q8.block_bytes()).enumerate() {
        prefetch(block);
        let at = index * x.count + first;
        let mut dots = [[_mm256_setzero_si256(); 2]; 2];
        for step in 0..STEPS {
            // SAFETY: the caller's promise; a block has 512 bytes of numbers.
            unsafe {
                let column = numbers::<true>(x, at);
                let x = [spread(column, 2 * step), spread(column, 2 * step + 1)];
                for (half, dots) in dots.iter_mut().enumerate() {
                    let w = words(load(block, step * VECTOR + half * 32));
                    dots[0] = multiplied::<true>(dots[0], w[0], x[0]);
                    dots[1] = multiplied::<true>(dots[1], w[1], x[1]);
                }
            }
        }
        for half in 0..2 {
            let dot = _mm256_add_epi32(dots[half][0], dots[half][1]);
            // SAFETY: the caller's promise; scales follow the numbers.
            unsafe {
                let scale = halves(block, Q8_NUMBERS + half * 16);
                sums[half] = scaled(dot, *x.scales.get_unchecked(at), scale, sums[half]);
            }
        }
    }
    for (half, sum) in sums.iter().enumerate() {
        // SAFETY: `acc` has 16 places.
        unsafe { _mm256_storeu_ps(acc.as_mut_ptr().add(half * 8), *sum) };
    }
}

/// Eight-bit weights by eight-bit activations.
///
/// # Safety
/// See `Kernels::panel`, which checks all bounds; the columns are of bytes.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn q8_bytes(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    acc.fill(0.0);
    for (index, block) in panel.chunks_exact(Form::Q8.block_bytes()).enumerate() {
        prefetch(block);
        let at = index * x.count + first;
        for (tile, acc) in acc.chunks_mut(TILE * PANEL_ROWS).enumerate() {
            let at = at + tile * TILE;
            // SAFETY: the caller's promise; the tile's columns are the length of `acc`.
            unsafe {
                match acc.len() / PANEL_ROWS {
                    4 => q8_bytes_tile::<4>(block, x, at, acc),
                    3 => q8_bytes_tile::<3>(block, x, at, acc),
                    2 => q8_bytes_tile::<2>(block, x, at, acc),
                    _ => q8_bytes_tile::<1>(block, x, at, acc),
                }
            }
        }
    }
}

/// # Safety
/// `acc` has `C` columns and `at + C <= x.bytes.len()`; `block` is one panel block.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn q8_bytes_tile<const C: usize>(block: &[u8], x: &Columns, at: usize, acc: &mut [f32]) {
    let ones = _mm256_set1_epi16(1);
    let mut dots = [[_mm256_setzero_si256(); 2]; C];
    for step in 0..std::hint::black_box(STEPS) {
        // SAFETY: a block has 512 bytes of numbers; columns as promised.
        unsafe {
            let w = [load(block, step * VECTOR), load(block, step * VECTOR + 32)];
            let magnitude = w.map(|w| _mm256_abs_epi8(w));
            for (column, dots) in dots.iter_mut().enumerate() {
                let x = spread(numbers::<false>(x, at + column), step);
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
