//! xxh3-128 of a parent hash and sixteen tokens, in registers.
//!
//! Called for blocks of 16 tokens, the usual size. The 80 bytes fall into the specification's case "17 to 128 bytes", which
//! reads them once: no copy into a buffer, and of a chain only the last of three rounds waits for the block before.
//! Equal to the general function; tests compare the two.

use starling_ids::TokenId;

use super::xxh3::{AVALANCHE, PRIME_1, PRIME_2, PRIME_4, SECRET};

const LEN: u64 = 80;

/// Two words mixed with two of the secret.
#[inline]
fn mix((a, b): (u64, u64), at: usize) -> u64 {
    let product = u128::from(a ^ SECRET[at]) * u128::from(b ^ SECRET[at + 1]);
    product as u64 ^ (product >> 64) as u64
}

#[inline]
fn avalanche(mut hash: u64) -> u64 {
    hash ^= hash >> 37;
    hash = hash.wrapping_mul(AVALANCHE);
    hash ^ (hash >> 32)
}

#[inline]
fn sum((a, b): (u64, u64)) -> u64 {
    a.wrapping_add(b)
}

/// The hash of `before` and the tokens after it, all little-endian.
#[inline]
pub(super) fn hash(before: u128, tokens: &[TokenId; 16]) -> u128 {
    let word = |at: usize| u64::from(tokens[2 * at]) | u64::from(tokens[2 * at + 1]) << 32;
    let pair = |at: usize| (word(2 * at), word(2 * at + 1));
    let (first, second, third, fourth) = (pair(0), pair(1), pair(2), pair(3));
    let parent = (before as u64, (before >> 64) as u64);
    let (mut low, mut high) = (LEN.wrapping_mul(PRIME_1), 0u64);
    // Bytes 32 to 47 twice, then 16 to 31 with 48 to 63, then 0 to 15 with 64 to 79.
    low = low.wrapping_add(mix(second, 8)) ^ sum(second);
    high = high.wrapping_add(mix(second, 10)) ^ sum(second);
    low = low.wrapping_add(mix(first, 4)) ^ sum(third);
    high = high.wrapping_add(mix(third, 6)) ^ sum(first);
    low = low.wrapping_add(mix(parent, 0)) ^ sum(fourth);
    high = high.wrapping_add(mix(fourth, 2)) ^ sum(parent);
    let folded_low = avalanche(low.wrapping_add(high));
    let mixed = low.wrapping_mul(PRIME_1).wrapping_add(high.wrapping_mul(PRIME_4));
    let folded_high = avalanche(mixed.wrapping_add(LEN.wrapping_mul(PRIME_2))).wrapping_neg();
    u128::from(folded_high) << 64 | u128::from(folded_low)
}
