//! How many times as fast as the portable version the others are, in this build, on this machine.
//!
//! A kernel whose inner loop the compiler did not inline gives the same bits and computes several times as long, which no
//! test of its bits sees. Called by `benches/kernels.rs`, which has the clock. Never: while anybody is served.

use std::{hint::black_box, time::Duration};

use half::f16;

use super::{
    Columns, ColumnsOut, Kernels,
    generic::{Attend, AttendScratch},
    selfcheck::Noise,
};
use crate::{
    embedded::{
        quant::BLOCK,
        repack::{Form, PANEL_ROWS, Panel},
    },
    loader::Activations,
};

/// Both versions take turns so often; the shortest time of each counts, so that what disturbs one of them does not.
const ROUNDS: usize = 9;

/// One kernel of one version.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gain {
    /// `avx512` or `avx2`.
    pub version: &'static str,
    /// `attention`, `four-bit products` or `eight-bit products`.
    pub kernel: &'static str,
    /// The portable version takes so many times as long.
    pub times: f64,
}

/// Measures every version that this CPU can run; `time` does what it is given and says how long that took.
pub fn gains(time: &dyn Fn(&mut dyn FnMut()) -> Duration) -> Vec<Gain> {
    let portable = Kernels::portable();
    let mut found = Vec::new();
    for (_, kernels) in Kernels::available() {
        let mut gain = |kernel, times| found.push(Gain { version: kernels.name, kernel, times });
        gain("attention", attention(&kernels, &portable, time));
        gain("four-bit products", products(&kernels, &portable, Form::Q4, time));
        gain("eight-bit products", products(&kernels, &portable, Form::Q8, time));
    }
    found
}

/// The shortest time of the second over the shortest of the first.
fn ratio(time: &dyn Fn(&mut dyn FnMut()) -> Duration, [ours, theirs]: [&mut dyn FnMut(); 2]) -> f64 {
    let mut shortest = [Duration::MAX; 2];
    for _ in 0..ROUNDS {
        shortest = [shortest[0].min(time(ours)), shortest[1].min(time(theirs))];
    }
    shortest[1].as_secs_f64() / shortest[0].as_secs_f64().max(1e-9)
}

/// Attention of a tile of a prompt over half a thousand tokens before it.
fn attention(a: &Kernels, b: &Kernels, time: &dyn Fn(&mut dyn FnMut()) -> Duration) -> f64 {
    const DIM: usize = 64;
    const BLOCKS: usize = 32;
    let (group, tokens) = (3, 16);
    let mut noise = Noise(7);
    let store: Vec<u16> = (0..BLOCKS * 2 * 16 * DIM).map(|_| f16::from_f32(noise.float(1.0)).to_bits()).collect();
    let queries = noise.floats(tokens * group * DIM, 4.0);
    let block = |i: usize| store[i * 32 * DIM..(i + 1) * 32 * DIM].split_at(16 * DIM);
    let start = BLOCKS * 16 - tokens;
    let task = Attend { queries: &queries, stride: group * DIM, tokens, start, group, dim: DIM, block: &block };
    let work = |kernels: &Kernels| {
        let (kernels, task) = (*kernels, &task);
        let (mut scratch, mut out) = (AttendScratch::default(), vec![0.0; tokens * group * DIM]);
        move || {
            kernels.attend(black_box(task), &mut scratch, &mut out);
            black_box(&out);
        }
    };
    ratio(time, [&mut work(a), &mut work(b)])
}

/// A panel of weights times the columns of a prompt's tile.
fn products(a: &Kernels, b: &Kernels, form: Form, time: &dyn Fn(&mut dyn FnMut()) -> Duration) -> f64 {
    const BLOCKS: usize = 18;
    const COUNT: usize = 16;
    const AGAIN: usize = 8;
    let mut noise = Noise(9);
    let panel = noise.panel(form, BLOCKS);
    let x = noise.floats(COUNT * BLOCKS * BLOCK, 3.0);
    let work = |kernels: &Kernels| {
        let (kernels, bytes) = (*kernels, panel.as_slice());
        let mut columns = Columns::new(Activations::Int16);
        columns.resize(COUNT, BLOCKS);
        let out = ColumnsOut::new(&mut columns);
        for (column, x) in x.chunks_exact(BLOCKS * BLOCK).enumerate() {
            // SAFETY: one thread, and `columns` lives on.
            unsafe { kernels.quantize(x, &out, 0, column) };
        }
        let mut sums = vec![0.0; COUNT * PANEL_ROWS];
        move || {
            for _ in 0..AGAIN {
                kernels.panel(Panel { form, bytes: black_box(bytes) }, &columns, 0, &mut sums);
            }
            black_box(&sums);
        }
    };
    ratio(time, [&mut work(a), &mut work(b)])
}
