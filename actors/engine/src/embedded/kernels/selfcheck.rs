//! Compares two versions of the kernels bit for bit on made-up data, before one of them is trusted.
//!
//! Called when a model is loaded and by tests. A few hundred microseconds.

use half::f16;

use super::{Columns, ColumnsOut, Kernels, generic::Attend, generic::AttendScratch};
use crate::{
    embedded::{
        quant::BLOCK,
        repack::{Form, PANEL_ROWS, Panel, Q4_NUMBERS, Q8_NUMBERS},
    },
    loader::Activations,
};

/// A small generator, so that every start checks the same data.
pub(super) struct Noise(pub(super) u64);

impl Noise {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// In [-scale, scale].
    pub(super) fn float(&mut self, scale: f32) -> f32 {
        (self.next() as f32 / 1_073_741_824.0 - 1.0) * scale
    }

    pub(super) fn floats(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.float(scale)).collect()
    }

    /// A panel of `blocks` blocks: any numbers, plain scales.
    pub(super) fn panel(&mut self, form: Form, blocks: usize) -> Vec<u8> {
        let numbers = match form {
            Form::Q4 => Q4_NUMBERS,
            Form::Q8 => Q8_NUMBERS,
        };
        let mut panel = Vec::new();
        for _ in 0..blocks {
            panel.extend((0..numbers).map(|_| self.next() as u8));
            for _ in 0..(form.block_bytes() - numbers) / 2 {
                panel.extend(f16::from_f32(self.float(0.1)).to_le_bytes());
            }
        }
        panel
    }
}

const BLOCKS: usize = 5;

fn columns(kernels: &Kernels, x: &[f32], count: usize, width: Activations) -> Columns {
    let mut columns = Columns::new(width);
    columns.resize(count, BLOCKS);
    let out = ColumnsOut::new(&mut columns);
    for (column, x) in x.chunks_exact(BLOCKS * BLOCK).enumerate() {
        // SAFETY: one thread, and `columns` lives on.
        unsafe { kernels.quantize(x, &out, 0, column) };
    }
    columns
}

fn differ(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).any(|(a, b)| a.to_bits() != b.to_bits())
}

/// What the two versions compute differently, if anything.
pub(super) fn first_difference(a: &Kernels, b: &Kernels) -> Option<&'static str> {
    let mut noise = Noise(20);
    let counts = [1, 2, 3, 4, 5, 8, 13].into_iter();
    let mut cases = counts.flat_map(|count| [Activations::Int8, Activations::Int16].map(|width| (count, width)));
    cases
        .find_map(|(count, width)| products_difference(a, b, &mut noise, count, width))
        .or_else(|| elementwise_difference(a, b, &mut noise))
        .or_else(|| attention_difference(a, b, &mut noise))
}

fn products_difference(
    a: &Kernels,
    b: &Kernels,
    noise: &mut Noise,
    count: usize,
    width: Activations,
) -> Option<&'static str> {
    let x = noise.floats(count * BLOCKS * BLOCK, 3.0);
    let (ours, theirs) = (columns(a, &x, count, width), columns(b, &x, count, width));
    let numbers_differ = ours.bytes != theirs.bytes || ours.words != theirs.words || ours.totals != theirs.totals;
    if numbers_differ || differ(&ours.sums, &theirs.sums) || differ(&ours.scales, &theirs.scales) {
        return Some("quantized activations");
    }
    for form in [Form::Q4, Form::Q8] {
        let panel = noise.panel(form, BLOCKS);
        let mut sums = [vec![1.0; count * PANEL_ROWS], vec![2.0; count * PANEL_ROWS]];
        let panel = Panel { form, bytes: &panel };
        a.panel(panel, &ours, 0, &mut sums[0]);
        b.panel(panel, &theirs, 0, &mut sums[1]);
        if differ(&sums[0], &sums[1]) {
            return Some(if form == Form::Q4 { "four-bit products" } else { "eight-bit products" });
        }
    }
    None
}

fn elementwise_difference(a: &Kernels, b: &Kernels, noise: &mut Noise) -> Option<&'static str> {
    let (x, y) = (noise.floats(96, 40.0), noise.floats(96, 2.0));
    let mut out = [vec![0.0; 96], vec![0.0; 96]];
    for (kernels, out) in [a, b].into_iter().zip(&mut out) {
        kernels.scaled(&x, &y, kernels.norm_scale(&x, 1e-5), out);
    }
    if differ(&out[0], &out[1]) {
        return Some("norms");
    }
    let mut out = [x.clone(), x.clone()];
    a.silu_mul(&mut out[0], &y);
    b.silu_mul(&mut out[1], &y);
    if differ(&out[0], &out[1]) {
        return Some("activation function");
    }
    a.rotate(&mut out[0], &y[..32], 32);
    b.rotate(&mut out[1], &y[..32], 32);
    differ(&out[0], &out[1]).then_some("rotation")
}

fn attention_difference(a: &Kernels, b: &Kernels, noise: &mut Noise) -> Option<&'static str> {
    const DIM: usize = 32;
    let store: Vec<u16> = (0..10 * 2 * 16 * DIM).map(|_| f16::from_f32(noise.float(1.0)).to_bits()).collect();
    for (group, start) in [(3, 0), (1, 14), (6, 125)] {
        let tokens = 7;
        let queries = noise.floats(tokens * group * DIM, 4.0);
        let block = |i: usize| store[i * 32 * DIM..(i + 1) * 32 * DIM].split_at(16 * DIM);
        let task = Attend { queries: &queries, stride: group * DIM, tokens, start, group, dim: DIM, block: &block };
        let mut out = [vec![0.0; queries.len()], vec![1.0; queries.len()]];
        a.attend(&task, &mut AttendScratch::default(), &mut out[0]);
        b.attend(&task, &mut AttendScratch::default(), &mut out[1]);
        if differ(&out[0], &out[1]) {
            return Some("attention");
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_this_cpu_has_gives_the_portable_bits() {
        for (choice, kernels) in Kernels::available() {
            assert_eq!(first_difference(&kernels, &Kernels::portable()), None, "{choice:?}");
        }
    }

    #[test]
    fn products_are_close_to_plain_arithmetic() {
        let mut noise = Noise(3);
        let x = noise.floats(BLOCKS * BLOCK, 1.0);
        let kernels = Kernels::portable();
        let panel = noise.panel(Form::Q8, BLOCKS);
        let sums = [Activations::Int8, Activations::Int16].map(|width| {
            let mut sums = vec![0.0; PANEL_ROWS];
            let columns = columns(&kernels, &x, 1, width);
            kernels.panel(Panel { form: Form::Q8, bytes: &panel }, &columns, 0, &mut sums);
            sums
        });
        for row in 0..PANEL_ROWS {
            let mut expected = 0.0f64;
            for (i, x) in x.iter().enumerate() {
                let block = &panel[i / BLOCK * Form::Q8.block_bytes()..];
                let number = block[i % BLOCK / 4 * 64 + row * 4 + i % 4] as i8;
                let scale = f16::from_le_bytes([block[Q8_NUMBERS + 2 * row], block[Q8_NUMBERS + 2 * row + 1]]);
                expected += f64::from(*x) * f64::from(number) * scale.to_f64();
            }
            // Activations are rounded to 1/127 or 1/32767 of their block's largest.
            for (sums, within) in sums.iter().zip([2.0, 0.01]) {
                let sum = sums[row];
                assert!((f64::from(sum) - expected).abs() < within, "row {row}: {sum} against {expected}");
            }
        }
    }
}
