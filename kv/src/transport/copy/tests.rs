//! Shell: The copy against the plain way, at every border of its kernel.

use proptest::prelude::*;

use super::{super::batch::page_sum, *};

/// Copies within one buffer, at these places in it, and compares with the plain way.
fn same_as_plain(len: usize, from: usize, to: usize) {
    let mut bytes: Vec<u8> = (0..from.max(to) + len + 64).map(|at| (at * at + at / 7) as u8).collect();
    let skew = bytes.as_ptr().align_offset(32);
    let mut expected = bytes.clone();
    expected.copy_within(from..from + len, to + skew);
    for sum in [false, true] {
        let mut copied = bytes.clone();
        let want = page_sum(&bytes[from..from + len]);
        let source = if from.abs_diff(to + skew) >= len {
            copied.as_ptr().wrapping_add(from)
        } else {
            bytes.as_ptr().wrapping_add(from)
        };
        // SAFETY: both ranges lie in their vectors.
        let got = unsafe { page(source, copied.as_mut_ptr().wrapping_add(to + skew), len, sum) };
        fence();
        assert_eq!(got, if sum { want } else { 0 }, "sum of {len} bytes");
        assert!(copied == expected, "{len} bytes from {from} to {to}");
    }
    // Within one buffer, where the ranges may overlap.
    // SAFETY: both ranges lie in the vector.
    unsafe { page(bytes.as_ptr().wrapping_add(from), bytes.as_mut_ptr().wrapping_add(to + skew), len, true) };
    assert!(bytes == expected);
}

#[test]
fn lengths_at_the_borders_of_stripes_and_blocks() {
    for len in
        [1, 63, 64, 240, 241, 4095, 4096, 4097, 4159, 4160, 4161, 5119, 5120, 5121, 6143, 6144, 6145, 16_384, 70_001]
    {
        same_as_plain(len, 0, len.next_multiple_of(32));
        same_as_plain(len, 1, len.next_multiple_of(32) + 32);
    }
}

proptest! {
    #[test]
    fn any_place_and_length(len in 1_usize..40_000, from in 0_usize..3_000, to in 0_usize..3_000, apart: bool) {
        same_as_plain(len, from, if apart { (from + len).next_multiple_of(32) } else { to });
    }
}
