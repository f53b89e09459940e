//! Who holds one block: a few slots in place, a bitset when there are many.
//!
//! Called by the index alone. 16 bytes in the common case; a reader may mark it as used without owning it.

use std::sync::atomic::{AtomicBool, Ordering};

/// A worker's dense number in one index.
pub(super) type Slot = u16;

const FEW: usize = 6;

/// A set of slots, and whether a match went through it lately.
#[derive(Debug)]
pub(super) enum Holders {
    Few { touched: AtomicBool, len: u8, slots: [Slot; FEW] },
    Many(Box<Bits>),
}

#[derive(Debug)]
pub(super) struct Bits {
    touched: AtomicBool,
    count: u32,
    words: Vec<u64>,
}

impl Default for Holders {
    fn default() -> Self {
        Self::Few { touched: AtomicBool::new(false), len: 0, slots: [0; FEW] }
    }
}

impl Holders {
    pub(super) fn contains(&self, slot: Slot) -> bool {
        match self {
            Self::Few { len, slots, .. } => slots[..usize::from(*len)].contains(&slot),
            Self::Many(bits) => bits.words.get(usize::from(slot) / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Few { len, .. } => *len == 0,
            Self::Many(bits) => bits.count == 0,
        }
    }

    /// False when it was there already.
    pub(super) fn insert(&mut self, slot: Slot) -> bool {
        if self.contains(slot) {
            return false;
        }
        if let Self::Few { len, slots, touched } = self {
            if usize::from(*len) < FEW {
                slots[usize::from(*len)] = slot;
                *len += 1;
                return true;
            }
            let mut bits = Bits { touched: AtomicBool::new(*touched.get_mut()), count: 0, words: Vec::new() };
            slots.iter().for_each(|slot| bits.set(*slot));
            *self = Self::Many(Box::new(bits));
        }
        if let Self::Many(bits) = self {
            bits.set(slot);
        }
        true
    }

    /// False when it was not there.
    pub(super) fn remove(&mut self, slot: Slot) -> bool {
        match self {
            Self::Few { len, slots, .. } => {
                let Some(at) = slots[..usize::from(*len)].iter().position(|held| *held == slot) else { return false };
                *len -= 1;
                slots.swap(at, usize::from(*len));
                true
            }
            Self::Many(bits) => {
                let Some(word) = bits.words.get_mut(usize::from(slot) / 64) else { return false };
                let mask = 1 << (slot % 64);
                let held = *word & mask != 0;
                *word &= !mask;
                bits.count -= u32::from(held);
                // Half of what fits in place: a slot that comes and goes does not move it back and forth.
                if bits.count as usize <= FEW / 2 {
                    *self = Self::shrunk(bits);
                }
                held
            }
        }
    }

    fn shrunk(bits: &Bits) -> Self {
        let mut few = Self::default();
        for slot in bits.slots() {
            few.insert(slot);
        }
        few.set_touched(bits.touched.load(Ordering::Relaxed));
        few
    }

    /// The set as bits, in `words` from the lowest slot on; `words` is long enough for every slot.
    pub(super) fn write_mask(&self, words: &mut [u64]) {
        words.fill(0);
        match self {
            Self::Few { len, slots, .. } => {
                for slot in &slots[..usize::from(*len)] {
                    if let Some(word) = words.get_mut(usize::from(*slot) / 64) {
                        *word |= 1 << (slot % 64);
                    }
                }
            }
            Self::Many(bits) => words.iter_mut().zip(&bits.words).for_each(|(word, held)| *word = *held),
        }
    }

    /// A match went through it. Written only when that is news, so that readers share the cache line.
    pub(super) fn touch(&self) {
        let touched = self.touched();
        if !touched.load(Ordering::Relaxed) {
            touched.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a match went through it since the last call.
    pub(super) fn take_touched(&self) -> bool {
        self.touched().swap(false, Ordering::Relaxed)
    }

    fn set_touched(&self, value: bool) {
        self.touched().store(value, Ordering::Relaxed);
    }

    fn touched(&self) -> &AtomicBool {
        match self {
            Self::Few { touched, .. } => touched,
            Self::Many(bits) => &bits.touched,
        }
    }

    /// Memory outside the map's own entry.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Few { .. } => 0,
            Self::Many(bits) => std::mem::size_of::<Bits>() + bits.words.capacity() * 8,
        }
    }
}

impl Bits {
    fn set(&mut self, slot: Slot) {
        let at = usize::from(slot) / 64;
        if self.words.len() <= at {
            self.words.reserve_exact(at + 1 - self.words.len());
            self.words.resize(at + 1, 0);
        }
        self.words[at] |= 1 << (slot % 64);
        self.count += 1;
    }

    fn slots(&self) -> impl Iterator<Item = Slot> {
        ones(&self.words)
    }
}

/// The slots whose bits are set, lowest first.
pub(super) fn ones(words: &[u64]) -> impl Iterator<Item = Slot> {
    words.iter().enumerate().flat_map(|(at, word)| {
        let mut left = *word;
        std::iter::from_fn(move || {
            let bit = left.trailing_zeros();
            left &= left.checked_sub(1)?;
            Some((at * 64) as Slot + bit as Slot)
        })
    })
}
