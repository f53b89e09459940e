//! Shell: the copy with AVX2 and non-temporal stores, and xxh3-64 over the registers that it passes.
//!
//! Called by [`super::page`] alone. The hash is the long form of XXH3 (more than 240 bytes, seed 0) as its specification
//! defines it: eight 64-bit lanes take one stripe of 64 bytes at a time; after sixteen stripes they are scrambled.

use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32, _mm256_set1_epi64x,
    _mm256_shuffle_epi32, _mm256_slli_epi64, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_stream_si256,
    _mm256_xor_si256,
};

use crate::hash::xxh3::{AVALANCHE, PRIME_1, PRIME_2, PRIME_3, PRIME_4, PRIME_5, SECRET};

const STRIPE: usize = 64;
const BLOCK: usize = 16 * STRIPE;
/// How far ahead the source is asked for: the hardware stops at each 4 KiB.
const AHEAD: usize = 2048;

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;

/// The secret from byte `at` on.
fn secret(at: usize) -> *const u8 {
    SECRET.as_ptr().cast::<u8>().wrapping_add(at)
}

/// Eight lanes in two registers.
#[derive(Clone, Copy)]
struct Lanes(__m256i, __m256i);

#[target_feature(enable = "avx2")]
fn start() -> Lanes {
    let lanes = [PRIME32_3, PRIME_1, PRIME_2, PRIME_3, PRIME_4, PRIME32_2, PRIME_5, PRIME32_1];
    // SAFETY: `lanes` has 64 bytes.
    unsafe { Lanes(_mm256_loadu_si256(lanes.as_ptr().cast()), _mm256_loadu_si256(lanes.as_ptr().add(4).cast())) }
}

#[target_feature(enable = "avx2")]
fn half(lanes: __m256i, data: __m256i, key: __m256i) -> __m256i {
    let keyed = _mm256_xor_si256(data, key);
    let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
    // 0x4E swaps neighbouring 64-bit lanes.
    _mm256_add_epi64(lanes, _mm256_add_epi64(product, _mm256_shuffle_epi32::<0x4E>(data)))
}

/// Takes one stripe with the secret from byte `at` (at most 128) on.
#[target_feature(enable = "avx2")]
fn stripe(lanes: Lanes, data: (__m256i, __m256i), at: usize) -> Lanes {
    debug_assert!(at <= 128);
    // SAFETY: `at + 64` is within the 192 bytes of the secret.
    let keys = unsafe { (_mm256_loadu_si256(secret(at).cast()), _mm256_loadu_si256(secret(at + 32).cast())) };
    Lanes(half(lanes.0, data.0, keys.0), half(lanes.1, data.1, keys.1))
}

#[target_feature(enable = "avx2")]
fn scramble(lanes: Lanes) -> Lanes {
    // SAFETY: 128 + 64 is the length of the secret.
    let keys = unsafe { (_mm256_loadu_si256(secret(128).cast()), _mm256_loadu_si256(secret(160).cast())) };
    let one = |lanes: __m256i, key: __m256i| {
        let mixed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64::<47>(lanes)), key);
        let prime = _mm256_set1_epi64x(PRIME32_1 as i64);
        let (low, high) = (_mm256_mul_epu32(mixed, prime), _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime));
        _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high))
    };
    Lanes(one(lanes.0, keys.0), one(lanes.1, keys.1))
}

#[target_feature(enable = "avx2")]
fn finish(lanes: Lanes, len: usize) -> u64 {
    let mut eight = [0_u64; 8];
    // SAFETY: `eight` has 64 bytes.
    unsafe {
        _mm256_storeu_si256(eight.as_mut_ptr().cast(), lanes.0);
        _mm256_storeu_si256(eight.as_mut_ptr().add(4).cast(), lanes.1);
    }
    let mut hash = (len as u64).wrapping_mul(PRIME_1);
    for (pair, at) in eight.chunks_exact(2).zip((11..).step_by(16)) {
        // SAFETY: 11 + 3 * 16 + 16 is below the length of the secret.
        let keys =
            unsafe { [secret(at).cast::<u64>().read_unaligned(), secret(at + 8).cast::<u64>().read_unaligned()] };
        let wide = u128::from(pair[0] ^ keys[0]) * u128::from(pair[1] ^ keys[1]);
        hash = hash.wrapping_add(wide as u64 ^ (wide >> 64) as u64);
    }
    hash = (hash ^ (hash >> 37)).wrapping_mul(AVALANCHE);
    hash ^ (hash >> 32)
}

/// Reads 64 bytes.
///
/// # Safety
/// `from` has 64 readable bytes.
#[target_feature(enable = "avx2")]
unsafe fn load(from: *const u8) -> (__m256i, __m256i) {
    // SAFETY: the caller's promise.
    unsafe { (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())) }
}

/// Moves `stripes` stripes (at most 16), hashed with the secret's first bytes on.
///
/// # Safety
/// As for [`copy`], for `64 * stripes` bytes.
#[target_feature(enable = "avx2")]
unsafe fn stripes<const SUM: bool>(mut lanes: Lanes, from: *const u8, to: *mut u8, stripes: usize) -> Lanes {
    for index in 0..stripes {
        let at = index * STRIPE;
        // A prefetch of an address that is not there does nothing.
        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + AHEAD).cast());
        // SAFETY: the caller's promise: `at + 64` is at most `64 * stripes`, and `to` stays 32-byte aligned.
        let data = unsafe {
            let data = load(from.add(at));
            _mm256_stream_si256(to.add(at).cast(), data.0);
            _mm256_stream_si256(to.add(at + 32).cast(), data.1);
            data
        };
        if SUM {
            lanes = stripe(lanes, data, index * 8);
        }
    }
    lanes
}

/// Copies `len` bytes past the cache; their hash if `SUM`, else 0.
///
/// # Safety
/// `from` has `len` readable bytes, `to` has `len` writable ones and is 32-byte aligned, the two do not overlap, and `len`
/// is more than 240.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy<const SUM: bool>(from: *const u8, to: *mut u8, len: usize) -> u64 {
    let mut lanes = start();
    // The last byte is never of a whole block or stripe: that is how the algorithm counts.
    let blocks = (len - 1) / BLOCK;
    for block in 0..blocks {
        let at = block * BLOCK;
        // SAFETY: `at + BLOCK` is below `len`.
        lanes = unsafe { stripes::<SUM>(lanes, from.add(at), to.add(at), 16) };
        if SUM {
            lanes = scramble(lanes);
        }
    }
    let at = blocks * BLOCK;
    let rest = (len - 1 - at) / STRIPE;
    // SAFETY: `at + rest * STRIPE` is below `len`, `rest` below 16; the tail is what is left of `len`; the last 64 bytes
    // of more than 240 are there.
    unsafe {
        lanes = stripes::<SUM>(lanes, from.add(at), to.add(at), rest);
        let tail = at + rest * STRIPE;
        std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), len - tail);
        if !SUM {
            return 0;
        }
        finish(stripe(lanes, load(from.add(len - STRIPE)), 121), len)
    }
}
