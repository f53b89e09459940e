//! Four-bit weights on AVX2, and the tile that all products but one share: 16 rows by up to four columns.
//!
//! A register holds eight rows. Eight-bit activations: weights stay below 16, so a product of two of them fits 16 bits
//! eight times over and a block needs one widening at its end. Sixteen-bit activations: weights are widened to 16 bits,
//! even and odd bytes apart, and two products go to 32 bits in one instruction.
//! Called by the table of kernels. Pure.

use std::arch::x86_64::*;

use super::super::{Columns, prefetch};
use crate::embedded::{
    quant::BLOCK,
    repack::{Form, PANEL_ROWS, Q4_NUMBERS, STEP, VECTOR},
};

/// Steps of four columns in a block.
pub(super) const STEPS: usize = BLOCK / STEP;
/// Columns of one tile: its sums fill eight of sixteen registers.
pub(super) const TILE: usize = 4;

/// One panel block, ready to be multiplied.
#[repr(align(64))]
pub(super) struct Unpacked {
    /// A vector of 64 bytes for each four bytes of activations.
    pub(super) numbers: [u8; 2 * BLOCK * PANEL_ROWS],
    pub(super) scales: [f32; PANEL_ROWS],
    pub(super) offsets: [f32; PANEL_ROWS],
}

/// Loads 32 bytes at `bytes[at..]`.
///
/// # Safety
/// `at + 32 <= bytes.len()`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn load(bytes: &[u8], at: usize) -> __m256i {
    debug_assert!(at + 32 <= bytes.len());
    // SAFETY: the caller's promise; unaligned loads are allowed.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().add(at).cast()) }
}

/// Stores 32 bytes at `bytes[at..]`.
///
/// # Safety
/// `at + 32 <= bytes.len()`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn store(bytes: &mut [u8], at: usize, value: __m256i) {
    debug_assert!(at + 32 <= bytes.len());
    // SAFETY: the caller's promise; unaligned stores are allowed.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().add(at).cast(), value) }
}

/// Eight f16 at `bytes[at..]` as f32.
///
/// # Safety
/// `at + 16 <= bytes.len()`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn halves(bytes: &[u8], at: usize) -> __m256 {
    debug_assert!(at + 16 <= bytes.len());
    // SAFETY: the caller's promise; unaligned loads are allowed.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().add(at).cast())) }
}

/// The numbers of block `at`, as bytes.
///
/// # Safety
/// `at` is below the number of blocks, and the columns' width is that of `WORDS`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn numbers<const WORDS: bool>(x: &Columns, at: usize) -> *const i8 {
    debug_assert!(at < if WORDS { x.words.len() } else { x.bytes.len() });
    // SAFETY: the caller's promise.
    unsafe { if WORDS { x.words.as_ptr().add(at).cast() } else { x.bytes.as_ptr().add(at).cast() } }
}

/// Four bytes of activations, repeated over the register.
///
/// # Safety
/// They are within their block.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn spread(numbers: *const i8, step: usize) -> __m256i {
    // SAFETY: the caller's promise; the read is unaligned.
    unsafe { _mm256_set1_epi32(numbers.cast::<i32>().add(step).read_unaligned()) }
}

/// Adds products: pairs of bytes to sixteen 16-bit sums, or pairs of words to eight 32-bit ones.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn multiplied<const WORDS: bool>(sums: __m256i, w: __m256i, x: __m256i) -> __m256i {
    if WORDS {
        _mm256_add_epi32(sums, _mm256_madd_epi16(w, x))
    } else {
        _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x))
    }
}

/// The sums of a block as eight 32-bit ones.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widened<const WORDS: bool>(sums: __m256i) -> __m256i {
    if WORDS { sums } else { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) }
}

/// `acc = fma(dot * scale of x, scales of w, acc)` for eight rows.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn scaled(dot: __m256i, x_scale: f32, w_scale: __m256, acc: __m256) -> __m256 {
    _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(x_scale)), w_scale, acc)
}

/// 32 packed bytes of four-bit weights as two registers of bytes, low nibbles first, or four of words, in the order
/// of the activations.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn nibbles<const WORDS: bool>(packed: __m256i) -> [__m256i; 4] {
    if WORDS {
        let low = _mm256_set1_epi16(15);
        [
            _mm256_and_si256(packed, low),
            _mm256_and_si256(_mm256_srli_epi16::<8>(packed), low),
            _mm256_and_si256(_mm256_srli_epi16::<4>(packed), low),
            _mm256_srli_epi16::<12>(packed),
        ]
    } else {
        let low = _mm256_set1_epi8(15);
        let (even, odd) = (_mm256_and_si256(packed, low), _mm256_and_si256(_mm256_srli_epi16::<4>(packed), low));
        [even, odd, even, odd]
    }
}

/// Four-bit weights.
///
/// # Safety
/// See `Kernels::panel`, which checks all bounds; the columns' width is that of `WORDS`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn q4<const WORDS: bool>(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    if acc.len() == PANEL_ROWS {
        // SAFETY: the caller's promise.
        return unsafe { q4_single::<WORDS>(panel, x, first, acc) };
    }
    acc.fill(0.0);
    let parts = if WORDS { 4 } else { 2 };
    let mut w = Unpacked { numbers: [0; _], scales: [0.0; _], offsets: [0.0; _] };
    for (index, block) in panel.chunks_exact(Form::Q4.block_bytes()).enumerate() {
        prefetch(block);
        for pair in 0..STEPS / 2 {
            for half in 0..2 {
                // SAFETY: a block has 256 packed bytes, which become 512 or 1,024.
                unsafe {
                    let unpacked = nibbles::<WORDS>(load(block, pair * VECTOR + half * 32));
                    for (part, numbers) in unpacked.into_iter().enumerate().take(parts) {
                        store(&mut w.numbers, (pair * parts + part) * VECTOR + half * 32, numbers);
                    }
                }
            }
        }
        // SAFETY: scales and offsets follow the numbers; the columns are as promised.
        unsafe {
            widen(block, Q4_NUMBERS, &mut w.scales);
            widen(block, Q4_NUMBERS + 2 * PANEL_ROWS, &mut w.offsets);
            tiles::<WORDS, true>(&w, x, index * x.count + first, acc);
        }
    }
}

/// Sixteen f16 as f32.
///
/// # Safety
/// `at + 32 <= block.len()`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn widen(block: &[u8], at: usize, out: &mut [f32; PANEL_ROWS]) {
    for half in 0..2 {
        // SAFETY: the caller's promise; `out` has two registers.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(half * 8), halves(block, at + half * 16)) };
    }
}

/// One block's share of all columns of `acc`.
///
/// # Safety
/// `at` plus the columns of `acc` is at most the blocks of `x`, whose width is that of `WORDS`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn tiles<const WORDS: bool, const OFFSET: bool>(
    w: &Unpacked,
    x: &Columns,
    at: usize,
    acc: &mut [f32],
) {
    for (index, acc) in acc.chunks_mut(TILE * PANEL_ROWS).enumerate() {
        let at = at + index * TILE;
        // SAFETY: the caller's promise; the tile's columns are the length of `acc`.
        unsafe {
            match acc.len() / PANEL_ROWS {
                4 => tile::<4, WORDS, OFFSET>(w, x, at, acc),
                3 => tile::<3, WORDS, OFFSET>(w, x, at, acc),
                2 => tile::<2, WORDS, OFFSET>(w, x, at, acc),
                _ => tile::<1, WORDS, OFFSET>(w, x, at, acc),
            }
        }
    }
}

/// # Safety
/// `acc` has `C` columns; the rest as for `tiles`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn tile<const C: usize, const WORDS: bool, const OFFSET: bool>(
    w: &Unpacked,
    x: &Columns,
    at: usize,
    acc: &mut [f32],
) {
    let mut dots = [[_mm256_setzero_si256(); 2]; C];
    // SAFETY: the caller's promise.
    let columns: [*const i8; C] = std::array::from_fn(|column| unsafe { numbers::<WORDS>(x, at + column) });
    // A count that the compiler cannot see: unrolled, it would add in another order and run out of registers.
    for step in 0..std::hint::black_box(if WORDS { 2 * STEPS } else { STEPS }) {
        // SAFETY: `step * VECTOR + 64` is at most the unpacked bytes in use; a block has `step` times four bytes.
        unsafe {
            let w = [load(&w.numbers, step * VECTOR), load(&w.numbers, step * VECTOR + 32)];
            for (dots, column) in dots.iter_mut().zip(columns) {
                let x = spread(column, step);
                dots[0] = multiplied::<WORDS>(dots[0], w[0], x);
                dots[1] = multiplied::<WORDS>(dots[1], w[1], x);
            }
        }
    }
    for half in 0..2 {
        // SAFETY: two registers of scales and of offsets; `acc` has C columns of 16; columns as promised.
        unsafe {
            let scale = _mm256_load_ps(w.scales.as_ptr().add(half * 8));
            let offset = _mm256_load_ps(w.offsets.as_ptr().add(half * 8));
            for (column, dots) in dots.iter().enumerate() {
                let acc = acc.as_mut_ptr().add(column * PANEL_ROWS + half * 8);
                let dot = widened::<WORDS>(dots[half]);
                let mut sum = scaled(dot, *x.scales.get_unchecked(at + column), scale, _mm256_loadu_ps(acc));
                if OFFSET {
                    let x_sum = _mm256_set1_ps(*x.sums.get_unchecked(at + column));
                    sum = _mm256_fmadd_ps(offset, x_sum, sum);
                }
                _mm256_storeu_ps(acc, sum);
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
unsafe fn q4_single<const WORDS: bool>(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    let parts = if WORDS { 4 } else { 2 };
    let mut sums = [_mm256_setzero_ps(); 2];
    for (index, block) in panel.chunks_exact(Form::Q4.block_bytes()).enumerate() {
        prefetch(block);
        let at = index * x.count + first;
        let mut dots = [[_mm256_setzero_si256(); 2]; 2];
        for pair in 0..STEPS / 2 {
            // SAFETY: the caller's promise; a block has 256 packed bytes.
            unsafe {
                let x = numbers::<WORDS>(x, at);
                let x: [__m256i; 4] = std::array::from_fn(|part| spread(x, pair * parts + part % parts));
                for (half, dots) in dots.iter_mut().enumerate() {
                    let w = nibbles::<WORDS>(load(block, pair * VECTOR + half * 32));
                    for part in 0..parts {
                        dots[part % 2] = multiplied::<WORDS>(dots[part % 2], w[part], x[part]);
                    }
                }
            }
        }
        // SAFETY: the caller's promise; scales and offsets follow the numbers.
        unsafe {
            let (x_scale, x_sum) = (*x.scales.get_unchecked(at), _mm256_set1_ps(*x.sums.get_unchecked(at)));
            for half in 0..2 {
                let [even, odd] = dots[half];
                let dot = if WORDS { _mm256_add_epi32(even, odd) } else { _mm256_add_epi16(even, odd) };
                let scale = halves(block, Q4_NUMBERS + half * 16);
                let sum = scaled(widened::<WORDS>(dot), x_scale, scale, sums[half]);
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
