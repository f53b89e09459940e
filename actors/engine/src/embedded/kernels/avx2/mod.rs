//! The kernels for AVX2 with FMA and F16C.
//!
//! Called through the table of kernels; calls the definitions in `generic` and the products. Pure.

mod attention;
mod eight_bit;
mod products;

pub(super) use self::attention::Avx2;
use super::{
    ColumnsOut, Kernels,
    generic::{self, Attend, AttendScratch},
};

pub(super) fn kernels() -> Kernels {
    Kernels {
        name: "avx2",
        q4x8: products::q4::<false>,
        q8x8: eight_bit::q8_bytes,
        q4x16: products::q4::<true>,
        q8x16: eight_bit::q8_words,
        quantize,
        norm_scale,
        scaled_by,
        silu_mul,
        rotate,
        attend,
    }
}

/// # Safety
/// As for `generic::quantize_column`, on a CPU with the features.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantize(x: &[f32], out: &ColumnsOut, first: usize, column: usize) {
    // SAFETY: the caller's promise, and this CPU has the features of `Avx2`.
    unsafe { generic::quantize_column::<Avx2>(x, out, first, column) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn norm_scale(x: &[f32], epsilon: f32) -> f32 {
    generic::norm_scale(x, epsilon)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn scaled_by(x: &[f32], weight: &[f32], scale: f32, out: &mut [f32]) {
    generic::scaled_by(x, weight, scale, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn silu_mul(gate: &mut [f32], up: &[f32]) {
    generic::silu_mul(gate, up);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rotate(heads: &mut [f32], angles: &[f32], dim: usize) {
    generic::rotate(heads, angles, dim);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn attend(task: &Attend<'_>, scratch: &mut AttendScratch, out: &mut [f32]) {
    // SAFETY: this function runs on CPUs with the features of `Avx2` only.
    unsafe { generic::attend::<Avx2>(task, scratch, out) }
}
