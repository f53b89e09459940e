//! A product of a repacked matrix and some columns, cut into tasks for the pool.
//!
//! A task is a run of panels times a tile of columns. Which thread does it, and how large it is, changes no bit.
//! Called by the forward pass; calls the kernels. Bounds: scratch of one unit of panels per thread.

use std::sync::{Mutex, PoisonError};

use super::{
    compute::Turn,
    kernels::{Columns, Kernels},
    repack::{Arena, Matrix, PANEL_ROWS},
};
use crate::contract::EngineError;

/// Panels of a group of gate and up rows.
pub(super) const GATE_UNIT: usize = 4;
/// Columns of a tile: their sums for one panel stay in the first-level cache.
const COLUMNS_TILE: usize = 64;
/// Tasks per thread, at least: small enough to even out.
const TASKS_PER_THREAD: usize = 4;
/// Weight bytes of a task times its columns, at most, if it has more than one unit: 5 to 10 µs. The threads of a long
/// product end together, and it is still long enough that starting a task costs nothing and memory is read in runs.
const TASK_BYTES: usize = 128 << 10;

/// One thread's sums, per thread.
#[derive(Debug)]
pub(super) struct MatmulScratch(Vec<Mutex<Vec<f32>>>);

impl MatmulScratch {
    /// For `width` threads.
    pub(super) fn new(width: usize) -> Self {
        Self((0..width).map(|_| Mutex::new(vec![0.0; GATE_UNIT * COLUMNS_TILE * PANEL_ROWS])).collect())
    }
}

/// Rows of f32 that several threads write, each its own parts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    base: *mut f32,
    len: usize,
    stride: usize,
}

// SAFETY: it is an address; `part` states what its callers keep apart.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    /// Rows of `stride` values each.
    pub(super) fn new(values: &mut [f32], stride: usize) -> Self {
        Self { base: values.as_mut_ptr(), len: values.len(), stride }
    }

    /// Values `from..from + len` of row `row`.
    ///
    /// # Safety
    /// The values are alive, and nobody else uses this part while the returned slice is used.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn part<'a>(&self, row: usize, from: usize, len: usize) -> &'a mut [f32] {
        let at = row * self.stride + from;
        assert!(from + len <= self.stride && at + len <= self.len, "a part outside its row");
        // SAFETY: in bounds by the assertion; the caller keeps users apart.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) }
    }
}

/// `matrix · columns`.
pub(super) struct Product<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) arena: &'a Arena,
    pub(super) matrix: &'a Matrix,
    pub(super) columns: &'a Columns,
    pub(super) scratch: &'a MatmulScratch,
}

impl Product<'_> {
    /// Computes it in units of `unit` panels. `sink` gets the unit's first panel, the tile's first column and
    /// `[panel][column][row]` sums; it is called once for every unit and tile, on any thread.
    pub(super) fn run(
        &self,
        turn: &Turn<'_>,
        unit: usize,
        sink: &(impl Fn(usize, usize, &[f32]) + Sync),
    ) -> Result<(), EngineError> {
        let (panels, count) = (&self.matrix.panels, self.columns.count);
        let tiles = count.div_ceil(COLUMNS_TILE);
        let units = panels.len() / unit;
        let shares = (turn.width() * TASKS_PER_THREAD).div_ceil(tiles.max(1));
        let unit_bytes = panels.first().map_or(0, |panel| self.arena.panel(*panel).bytes.len()) * unit;
        let most = TASK_BYTES / (unit_bytes * COLUMNS_TILE.min(count)).max(1);
        let share = units.div_ceil(shares).min(most).max(1);
        let task = |worker: usize, task: usize| {
            let first = task % tiles * COLUMNS_TILE;
            let columns = COLUMNS_TILE.min(count - first);
            let mut sums = self.scratch.0[worker].lock().unwrap_or_else(PoisonError::into_inner);
            let sums = &mut sums[..unit * columns * PANEL_ROWS];
            let from = task / tiles * share;
            for index in from..(from + share).min(units) {
                let unit_panels = &panels[index * unit..(index + 1) * unit];
                for (panel, sums) in unit_panels.iter().zip(sums.chunks_exact_mut(columns * PANEL_ROWS)) {
                    self.kernels.panel(self.arena.panel(*panel), self.columns, first, sums);
                }
                sink(index * unit, first, sums);
            }
        };
        turn.run(units.div_ceil(share) * tiles, &task).map_err(|error| EngineError::Step(error.to_string()))
    }
}
