//! How much of a direction's window one frame takes. Pure arithmetic, the same on both sides.
//!
//! A window is counted in bytes. A frame takes its length, but at least as much as makes
//! [`limits::STREAM_WINDOW_FRAMES`] of them fill the window, and at most three quarters of it: so a frame larger than
//! the window passes once what lies unread takes no more than a quarter. A reader gives back what it took in portions
//! of a quarter; what it holds back is below that, so no frame can wait for ever.

use crate::wire::limits;

/// The window of one direction, as its reader announced it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    bytes: u32,
    least: u32,
}

impl Window {
    /// What readers of this software take.
    pub(crate) const OURS: Self = Self::new(limits::STREAM_WINDOW_FRAMES as u32, limits::STREAM_WINDOW_BYTES as u32);

    /// A window of so many frames and bytes, neither of them zero.
    pub(crate) const fn new(frames: u32, bytes: u32) -> Self {
        let frames = if frames == 0 { 1 } else { frames };
        Self { bytes, least: bytes / frames }
    }

    /// All of it.
    pub(crate) const fn size(self) -> u32 {
        self.bytes
    }

    /// What a frame of `len` bytes takes of it.
    pub(crate) fn cost(self, len: usize) -> u32 {
        let most = self.bytes - self.bytes / 4;
        u32::try_from(len).unwrap_or(u32::MAX).max(self.least).min(most).max(1)
    }

    /// A reader gives back as soon as it has taken this much.
    pub(crate) const fn portion(self) -> u32 {
        self.bytes / 4
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn small_frames_count_by_number_and_large_ones_by_size() {
        let window = Window::OURS;
        assert_eq!(window.cost(0) as usize * limits::STREAM_WINDOW_FRAMES, limits::STREAM_WINDOW_BYTES);
        assert_eq!(window.cost(16 << 10), window.cost(1));
        assert_eq!(window.cost(20_000), 20_000);
        assert_eq!(window.cost(limits::FRAME_PAYLOAD_MAX) as usize, limits::STREAM_WINDOW_BYTES * 3 / 4);
    }

    proptest! {
        #[test]
        fn every_frame_fits_beside_what_a_reader_may_hold_back(
            frames in 1u32..1000,
            bytes in 4u32..(1 << 24),
            len in 0usize..(9 << 20),
        ) {
            let window = Window::new(frames, bytes);
            // Less than a portion is held back by a reader that has taken everything.
            prop_assert!(window.cost(len) + window.portion().saturating_sub(1) <= window.size());
            prop_assert!(window.cost(len) > 0);
        }
    }
}
