//! The number formats of weight files, block by block of 32 weights.
//!
//! Called by the repacker; pure. Two internal forms exist: [`Q4Block`] (4-bit numbers with scale and offset)
//! and [`Q8Block`] (8-bit numbers with a scale). Q4_0, Q4_1, Q5_0 and Q8_0 keep their numbers exactly; Q4_K
//! keeps its numbers and rounds its scales to f16; all else is dequantized and quantized again to 8 bits.

use half::{bf16, f16};

/// Weights that share a scale in both internal forms.
pub(super) const BLOCK: usize = 32;

/// Element types that can be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TensorType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl TensorType {
    /// For messages.
    pub(super) const NAMES: &'static str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K";

    /// The type with this code in a GGUF file.
    pub(super) fn from_gguf(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// Elements in one unit of storage; a row is a whole number of units.
    pub(super) fn elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of one unit.
    fn unit_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `cols` elements, `None` when that overflows.
    pub(super) fn bytes_for(self, cols: usize) -> Option<usize> {
        (cols / self.elements()).checked_mul(self.unit_bytes())
    }

    /// True for types kept at 4 bits.
    pub(super) fn is_four_bit(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q4_1 | Self::Q4K)
    }
}

/// 32 weights `scale * numbers[i] + offset`, numbers 0 to 15.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Q4Block {
    pub(super) scale: f16,
    pub(super) offset: f16,
    pub(super) numbers: [u8; BLOCK],
}

/// 32 weights `scale * numbers[i]`, numbers -127 to 127 (-128 may come from a file).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Q8Block {
    pub(super) scale: f16,
    pub(super) numbers: [i8; BLOCK],
}

fn half_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Low nibbles are the first 16 numbers, high nibbles the last 16.
fn nibbles(bytes: &[u8]) -> [u8; BLOCK] {
    std::array::from_fn(|i| if i < 16 { bytes[i] & 15 } else { bytes[i - 16] >> 4 })
}

/// The 6-bit scale and offset number of sub-block `sub` (0 to 7) of a k-quant's 12 packed bytes.
fn k_scale(packed: &[u8], sub: usize) -> (f32, f32) {
    let (scale, offset) = if sub < 4 {
        (packed[sub] & 63, packed[sub + 4] & 63)
    } else {
        let low = packed[sub + 4];
        ((low & 15) | ((packed[sub - 4] >> 6) << 4), (low >> 4) | ((packed[sub] >> 6) << 4))
    };
    (f32::from(scale), f32::from(offset))
}

/// The four-bit numbers of sub-block `sub`; pairs of sub-blocks share 32 bytes, one in each nibble.
fn k_nibbles(quants: &[u8], sub: usize) -> [u8; BLOCK] {
    let pair = &quants[sub / 2 * 32..];
    std::array::from_fn(|i| if sub.is_multiple_of(2) { pair[i] & 15 } else { pair[i] >> 4 })
}

/// Block `index` of a row of a four-bit type, in the internal form. `row` is the whole row.
pub(super) fn four_bit_block(kind: TensorType, row: &[u8], index: usize) -> Q4Block {
    match kind {
        TensorType::Q4_1 => {
            let unit = &row[index * 20..][..20];
            Q4Block { scale: half_at(unit, 0), offset: half_at(unit, 2), numbers: nibbles(&unit[4..]) }
        }
        TensorType::Q4K => {
            let unit = &row[index / 8 * 144..][..144];
            let (scale, offset) = k_scale(&unit[4..16], index % 8);
            Q4Block {
                scale: f16::from_f32(half_at(unit, 0).to_f32() * scale),
                offset: f16::from_f32(-half_at(unit, 2).to_f32() * offset),
                numbers: k_nibbles(&unit[16..], index % 8),
            }
        }
        _ => {
            let unit = &row[index * 18..][..18];
            let scale = half_at(unit, 0);
            // Eight times an f16 is exact short of overflow, which no real weight comes near.
            let offset = f16::from_f32(scale.to_f32() * -8.0);
            Q4Block { scale, offset, numbers: nibbles(&unit[2..]) }
        }
    }
}

/// Block `index` of a row of any type, in the eight-bit form.
pub(super) fn eight_bit_block(kind: TensorType, row: &[u8], index: usize) -> Q8Block {
    match kind {
        TensorType::Q8_0 => {
            let unit = &row[index * 34..][..34];
            Q8Block { scale: half_at(unit, 0), numbers: std::array::from_fn(|i| unit[2 + i] as i8) }
        }
        TensorType::Q5_0 => {
            let unit = &row[index * 22..][..22];
            let (high, low) = (word_at(unit, 2), nibbles(&unit[6..]));
            let numbers = std::array::from_fn(|i| (low[i] | (((high >> i) & 1) as u8) << 4) as i8 - 16);
            Q8Block { scale: half_at(unit, 0), numbers }
        }
        _ => quantize_block(&dequantized_block(kind, row, index)),
    }
}

/// 32 weights to eight bits: the scale maps the largest magnitude to 127.
pub(super) fn quantize_block(values: &[f32; BLOCK]) -> Q8Block {
    let largest = values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let scale = f16::from_f32(largest / 127.0);
    let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
    Q8Block { scale, numbers: values.map(|x| (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8) }
}

/// Block `index` of a row as f32.
pub(super) fn dequantized_block(kind: TensorType, row: &[u8], index: usize) -> [f32; BLOCK] {
    let from = index * BLOCK;
    match kind {
        TensorType::F32 => std::array::from_fn(|i| f32::from_bits(word_at(row, (from + i) * 4))),
        TensorType::F16 => std::array::from_fn(|i| half_at(row, (from + i) * 2).to_f32()),
        TensorType::Bf16 => std::array::from_fn(|i| {
            let at = (from + i) * 2;
            bf16::from_le_bytes([row[at], row[at + 1]]).to_f32()
        }),
        TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q4K => {
            let block = four_bit_block(kind, row, index);
            block.numbers.map(|n| block.scale.to_f32() * f32::from(n) + block.offset.to_f32())
        }
        TensorType::Q5_0 | TensorType::Q8_0 => {
            let block = eight_bit_block(kind, row, index);
            block.numbers.map(|n| block.scale.to_f32() * f32::from(n))
        }
        TensorType::Q5_1 => {
            let unit = &row[index * 24..][..24];
            let (scale, offset) = (half_at(unit, 0).to_f32(), half_at(unit, 2).to_f32());
            let (high, low) = (word_at(unit, 4), nibbles(&unit[8..]));
            std::array::from_fn(|i| scale * f32::from(low[i] | (((high >> i) & 1) as u8) << 4) + offset)
        }
        TensorType::Q5K => {
            let (unit, sub) = (&row[index / 8 * 176..][..176], index % 8);
            let (scale, offset) = k_scale(&unit[4..16], sub);
            let (scale, offset) = (half_at(unit, 0).to_f32() * scale, half_at(unit, 2).to_f32() * offset);
            let (high, low) = (&unit[16..48], k_nibbles(&unit[48..], sub));
            std::array::from_fn(|i| scale * f32::from(low[i] | ((high[i] >> sub) & 1) << 4) - offset)
        }
        TensorType::Q6K => six_bit_block(&row[index / 8 * 210..][..210], index % 8),
    }
}

/// Sub-block `sub` of 32 in a Q6_K unit: 128 bytes of low nibbles, 64 of high pairs, 16 scales, the scale.
fn six_bit_block(unit: &[u8], sub: usize) -> [f32; BLOCK] {
    let (half_index, quarter) = (sub / 4, sub % 4);
    let low = &unit[half_index * 64 + quarter % 2 * 32..][..32];
    let high = &unit[128 + half_index * 32..][..32];
    let scales = &unit[192 + half_index * 8 + quarter * 2..][..2];
    let scale = half_at(unit, 208).to_f32();
    std::array::from_fn(|i| {
        let four = if quarter < 2 { low[i] & 15 } else { low[i] >> 4 };
        let number = four | ((high[i] >> (2 * quarter)) & 3) << 4;
        scale * f32::from(scales[i / 16] as i8) * (f32::from(number) - 32.0)
    })
}

/// A whole row as f32.
pub(super) fn dequantized_row(kind: TensorType, row: &[u8], cols: usize) -> Vec<f32> {
    match kind.elements() {
        // Norm weights may have any length, not only multiples of a block.
        1 => (0..cols)
            .map(|i| match kind {
                TensorType::F32 => f32::from_bits(word_at(row, i * 4)),
                TensorType::F16 => half_at(row, i * 2).to_f32(),
                _ => bf16::from_le_bytes([row[i * 2], row[i * 2 + 1]]).to_f32(),
            })
            .collect(),
        _ => (0..cols / BLOCK).flat_map(|index| dequantized_block(kind, row, index)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_and_eight_bit_files_keep_their_numbers() {
        let mut row = f16::from_f32(0.5).to_le_bytes().to_vec();
        row.extend(f16::from_f32(-1.0).to_le_bytes());
        row.extend((0..16u8).map(|i| i | (15 - i) << 4));
        let block = four_bit_block(TensorType::Q4_1, &row, 0);
        assert_eq!((block.numbers[0], block.numbers[15], block.numbers[16], block.numbers[31]), (0, 15, 15, 0));
        assert_eq!(dequantized_block(TensorType::Q4_1, &row, 0)[3], 0.5);

        let mut row = f16::from_f32(2.0).to_le_bytes().to_vec();
        row.extend([0x80u8; 16]);
        assert_eq!(dequantized_block(TensorType::Q4_0, &row, 0)[0], -16.0);
        assert_eq!(dequantized_block(TensorType::Q4_0, &row, 0)[31], 0.0);
    }

    #[test]
    fn quantizing_again_stays_within_half_a_step() {
        let values: [f32; BLOCK] = std::array::from_fn(|i| ((i * 37 % 64) as f32 - 31.0) * 0.031);
        let block = quantize_block(&values);
        let scale = block.scale.to_f32();
        for (value, number) in values.iter().zip(block.numbers) {
            assert!((value - scale * f32::from(number)).abs() <= scale * 0.51);
        }
        assert_eq!(quantize_block(&[0.0; BLOCK]).numbers, [0; BLOCK]);
    }

    #[test]
    fn k_quant_scales_unpack_as_the_format_says() {
        let packed: [u8; 12] = [1, 2, 3, 0xC4, 5, 6, 7, 0x48, 0x9A, 0, 0, 0x21];
        assert_eq!(k_scale(&packed, 0), (1.0, 5.0));
        assert_eq!(k_scale(&packed, 3), (4.0, 8.0));
        assert_eq!(k_scale(&packed, 4), (10.0, 9.0));
        // High bits of sub-block 7 come from the tops of bytes 3 and 7.
        assert_eq!(k_scale(&packed, 7), (f32::from(1u8 | 3 << 4), f32::from(2u8 | 1 << 4)));
    }
}
