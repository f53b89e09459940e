//! The one source of chance: a number from (seed, position).
//!
//! Called by the filters. Never: holds a state, so that a continued sequence draws what it would have drawn.

/// A number in [0, 1), uniform over seeds and positions.
#[must_use]
pub fn uniform(seed: u64, position: u64) -> f64 {
    // Two rounds keep neighbouring positions of one seed and equal positions of neighbouring seeds apart.
    let word =
        scramble(scramble(seed ^ 0x5354_4152_4c49_4e47).wrapping_add(position.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    (word >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// A bijection on 64 bits in which each input bit reaches each output bit (the finaliser of SplitMix64).
fn scramble(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
