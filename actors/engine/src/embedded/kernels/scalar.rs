//! The portable kernels: the definition that the others are compared with.
//!
//! One output is `acc = fma(dot · x.scale, w.scale, acc)` and, for four-bit weights, `acc = fma(w.offset, x.sum, acc)`
//! for each block in order, where `dot` is exact in 32 bits. Correct anywhere, fast nowhere.

use half::f16;

use super::{
    Columns, ColumnsOut, Kernels,
    generic::{self, Attend, AttendScratch, Simd},
    word_place,
};
use crate::{
    embedded::{
        quant::BLOCK,
        repack::{Form, PANEL_ROWS, Q4_NUMBERS, Q8_NUMBERS, STEP, VECTOR},
    },
    loader::Activations,
};

/// Plain Rust.
struct Portable;
impl Simd for Portable {}

pub(super) fn kernels() -> Kernels {
    Kernels {
        name: "portable",
        q4x8: q4,
        q8x8: q8,
        q4x16: q4,
        q8x16: q8,
        quantize,
        norm_scale,
        scaled_by,
        silu_mul,
        rotate,
        attend,
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Number `i` of block `at`.
fn number_at(x: &Columns, at: usize, i: usize) -> i32 {
    match x.width {
        Activations::Int8 => i32::from(x.bytes[at][i]),
        Activations::Int16 => i32::from(x.words[at][word_place(i)]),
    }
}

fn q4(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    acc.fill(0.0);
    for (index, block) in panel.chunks_exact(Form::Q4.block_bytes()).enumerate() {
        for (column, acc) in acc.chunks_exact_mut(PANEL_ROWS).enumerate() {
            let at = index * x.count + first + column;
            for (row, acc) in acc.iter_mut().enumerate() {
                let dot: i32 = (0..BLOCK)
                    .map(|i| {
                        let step = i / STEP;
                        let pair = block[step / 2 * VECTOR + row * STEP + i % STEP];
                        let number = if step.is_multiple_of(2) { pair & 15 } else { pair >> 4 };
                        i32::from(number) * number_at(x, at, i)
                    })
                    .sum();
                *acc = (dot as f32 * x.scales[at]).mul_add(half_at(block, Q4_NUMBERS + 2 * row), *acc);
                *acc = half_at(block, Q4_NUMBERS + 2 * (PANEL_ROWS + row)).mul_add(x.sums[at], *acc);
            }
        }
    }
}

fn q8(panel: &[u8], x: &Columns, first: usize, acc: &mut [f32]) {
    acc.fill(0.0);
    for (index, block) in panel.chunks_exact(Form::Q8.block_bytes()).enumerate() {
        for (column, acc) in acc.chunks_exact_mut(PANEL_ROWS).enumerate() {
            let at = index * x.count + first + column;
            for (row, acc) in acc.iter_mut().enumerate() {
                let dot: i32 = (0..BLOCK)
                    .map(|i| {
                        let number = block[i / STEP * VECTOR + row * STEP + i % STEP] as i8;
                        i32::from(number) * number_at(x, at, i)
                    })
                    .sum();
                *acc = (dot as f32 * x.scales[at]).mul_add(half_at(block, Q8_NUMBERS + 2 * row), *acc);
            }
        }
    }
}

/// # Safety
/// As for `generic::quantize_column`.
unsafe fn quantize(x: &[f32], out: &ColumnsOut, first: usize, column: usize) {
    // SAFETY: the caller's promise.
    unsafe { generic::quantize_column::<Portable>(x, out, first, column) }
}

fn norm_scale(x: &[f32], epsilon: f32) -> f32 {
    generic::norm_scale(x, epsilon)
}

fn scaled_by(x: &[f32], weight: &[f32], scale: f32, out: &mut [f32]) {
    generic::scaled_by(x, weight, scale, out);
}

fn silu_mul(gate: &mut [f32], up: &[f32]) {
    generic::silu_mul(gate, up);
}

fn rotate(heads: &mut [f32], angles: &[f32], dim: usize) {
    generic::rotate(heads, angles, dim);
}

fn attend(task: &Attend<'_>, scratch: &mut AttendScratch, out: &mut [f32]) {
    // SAFETY: the portable version needs no features.
    unsafe { generic::attend::<Portable>(task, scratch, out) }
}
