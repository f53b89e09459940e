//! Loops over a vocabulary, written so that the compiler can use vectors, with one result on every machine.
//!
//! Called by the sampler. Never: calls the platform's exponential, whose last bit differs between systems.

/// Numbers computed at once.
const LANES: usize = 16;

/// Logits looked at together.
pub(super) const BLOCK: usize = 64;

/// The highest logit, or `None` when one is not a number or +∞, or none is above -∞.
pub(super) fn finite_max(logits: &[f32]) -> Option<f32> {
    let mut highest = [f32::NEG_INFINITY; LANES];
    let mut broken = [false; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            let logit = chunk[lane];
            highest[lane] = if logit > highest[lane] { logit } else { highest[lane] };
            broken[lane] |= logit.is_nan();
        }
    }
    let mut max = rest.iter().fold(f32::NEG_INFINITY, |max, logit| max.max(*logit));
    let mut nan = rest.iter().any(|logit| logit.is_nan());
    for lane in 0..LANES {
        max = max.max(highest[lane]);
        nan |= broken[lane];
    }
    (!nan && max.is_finite()).then_some(max)
}

/// The lowest index that holds `value`; 0 when none does.
pub(super) fn first_at(logits: &[f32], value: f32) -> u32 {
    logits.iter().position(|logit| *logit == value).unwrap_or(0) as u32
}

/// Calls back for each logit above `threshold`, in order of ids. Looks at a whole block first: few hold one.
pub(super) fn above(logits: &[f32], threshold: f32, mut found: impl FnMut(u32, f32)) {
    let (blocks, rest) = logits.as_chunks::<BLOCK>();
    let mut each = |at: usize, few: &[f32]| {
        for (lane, logit) in few.iter().enumerate().filter(|(_, logit)| **logit > threshold) {
            found((at + lane) as u32, *logit);
        }
    };
    for (at, block) in blocks.iter().enumerate() {
        if block_max(block) > threshold {
            each(at * BLOCK, block);
        }
    }
    each(blocks.len() * BLOCK, rest);
}

/// The highest logit of a block.
#[inline]
pub(super) fn block_max(block: &[f32; BLOCK]) -> f32 {
    let mut highest = [f32::NEG_INFINITY; LANES];
    for chunk in block.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            highest[lane] = if chunk[lane] > highest[lane] { chunk[lane] } else { highest[lane] };
        }
    }
    // Halves onto each other in fixed widths, so that they stay vectors to the end.
    let fold = |low: f32, high: f32| if high > low { high } else { low };
    let eight: [f32; 8] = std::array::from_fn(|lane| fold(highest[lane], highest[lane + 8]));
    let four: [f32; 4] = std::array::from_fn(|lane| fold(eight[lane], eight[lane + 4]));
    fold(fold(four[0], four[2]), fold(four[1], four[3]))
}

/// e^x for x ≤ 0, relative error below 3e-7; 0 below -87.
#[inline]
pub(super) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts: the high one has few bits, so that its multiples are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding this rounds to a whole number, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let bounded = if x > -87.0 { x } else { -87.0 };
    let shifted = bounded * LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let r = bounded - whole * LN2_HIGH - whole * LN2_LOW;
    let series =
        1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0))))));
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    let value = series * f32::from_bits(power);
    if x > -87.0 { value } else { 0.0 }
}

/// Σ e^((logit - max) · scale), summed in f64 in an order that depends on the length alone.
pub(super) fn exp_sum(logits: &[f32], max: f32, scale: f32) -> f64 {
    let mut sums = [0.0f64; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += f64::from(exp((chunk[lane] - max) * scale));
        }
    }
    let tail: f64 = rest.iter().map(|logit| f64::from(exp((logit - max) * scale))).sum();
    sums.iter().sum::<f64>() + tail
}
