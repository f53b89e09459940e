//! Bytes that begin at a page, as reads and writes past the page cache need them.
//!
//! Called by the disk and by whoever holds a block's bytes.

use std::{fmt, ops::Deref};

/// Alignment of addresses, lengths and offsets of a read past the page cache: enough for every disk in use.
pub const PAGE: usize = 4_096;

/// Owned bytes; those made by [`PageBuffer::new`] begin at a multiple of [`PAGE`] and are as many as asked for.
pub struct PageBuffer {
    memory: Vec<u8>,
    start: usize,
    end: usize,
}

impl PageBuffer {
    /// `len` zeros, beginning at a page.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let memory = vec![0; len + PAGE];
        let start = memory.as_ptr().align_offset(PAGE).min(PAGE);
        Self { memory, start, end: start + len }
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.end]
    }

    /// Keeps the bytes from `from` to `to` alone, both within the present ones.
    pub fn narrow(&mut self, from: usize, to: usize) {
        let end = self.start + to;
        (self.start, self.end) = ((self.start + from).min(self.end), end.min(self.end));
    }
}

impl From<Vec<u8>> for PageBuffer {
    fn from(memory: Vec<u8>) -> Self {
        let end = memory.len();
        Self { memory, start: 0, end }
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }
}

impl PartialEq for PageBuffer {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for PageBuffer {}

impl fmt::Debug for PageBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}
