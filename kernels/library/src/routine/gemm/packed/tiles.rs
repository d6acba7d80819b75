//! The tiles of a block.

use super::block::{Block, BlockedGemm, Left, Shared};
use crate::dtype::Elem;
use crate::routine::gemm::kernel::{Columns, Kernel};
use crate::routine::gemm::store::Store;
use crate::routine::gemm::{Buffers, Operand};
use std::ops::Range;

/// Depths of a packed panel in which it comes from the second-level cache.
const AHEAD: usize = 16;

/// The most elements of a tile of any kernel.
const MAX_TILE: usize = 32 * 32;

impl BlockedGemm {
    /// Multiplies up to [`Kernel::part`] rows by a range of panels of B.
    pub(super) unsafe fn tiles(
        &self,
        at: &Buffers,
        block: &Block,
        scratch: &Shared,
        a: Left,
        rows: Range<usize>,
        (first, last): (usize, usize),
    ) {
        let Kernel { rows: mr, columns: nr, .. } = *self.kernel;
        let words = self.kernel.words(block.depths);
        if let Some([before, _]) = self.kernel.around {
            before();
        }
        // SAFETY: the panels are packed; the caller vouches for the buffers.
        unsafe {
            let stays = self.group == 0;
            let columns = |panel: usize| match self.in_place && (panel + 1) * nr <= block.cols {
                true => {
                    let at = self.right_at(at, block, panel * nr).cast::<u32>();
                    Columns {
                        at,
                        step: self.shape.b.row as usize,
                        next: at.wrapping_add(nr),
                        stays,
                    }
                }
                false => {
                    let at = scratch.b.add(panel * block.panel).cast_const();
                    Columns { at, step: nr, next: at.wrapping_add(AHEAD * nr), stays }
                }
            };
            let tile = |i: usize, panel: usize, b: &Columns| {
                let a = a.skip_rows(i - rows.start, words);
                let size = (mr.min(rows.end - i), nr.min(block.cols - panel * nr));
                self.tile(at, block, scratch, (&a, b, words), (i, panel * nr), size);
            };
            if self.group > 0 {
                for group in (first..last).step_by(self.group) {
                    for i in rows.clone().step_by(mr) {
                        for panel in group..last.min(group + self.group) {
                            tile(i, panel, &columns(panel));
                        }
                    }
                }
            } else {
                for panel in first..last {
                    let b = columns(panel);
                    let again = Columns { next: b.at, ..b };
                    for i in rows.clone().step_by(mr) {
                        tile(i, panel, if i == rows.start { &b } else { &again });
                    }
                }
            }
        }
        if let Some([_, after]) = self.kernel.around {
            after();
        }
    }

    /// Computes the tile at `(i, j)` of the block.
    #[inline(always)]
    unsafe fn tile(
        &self,
        at: &Buffers,
        block: &Block,
        scratch: &Shared,
        (a, b, words): (&Left, &Columns, usize),
        (i, j): (usize, usize),
        (rows, cols): (usize, usize),
    ) {
        let shape = &self.shape;
        let (row, col) = (block.row + i, block.col + j);
        let c = shape.c.elem.at_mut(at.c, row as isize * shape.c.row + col as isize * shape.c.col);
        let partial = scratch.partial.wrapping_add(i * self.nc + j);
        let has_bias = shape.bias.is_some() && block.is_last;
        let (bias, row_bias) = match (has_bias, self.is_swapped) {
            (false, _) => (std::ptr::null(), std::ptr::null()),
            (true, false) => (scratch.bias.wrapping_add(col).cast_const(), std::ptr::null()),
            (true, true) => (std::ptr::null(), scratch.bias.wrapping_add(row).cast_const()),
        };
        let mut store = Store {
            c,
            c_row: shape.c.row,
            elem: shape.c.elem,
            load_c: shape.accumulate,
            partial: std::ptr::null(),
            partial_row: self.nc as isize,
            bias,
            row_bias,
            alpha: shape.alpha,
            rows,
            cols,
        };
        if self.has_partial {
            if self.is_direct && store.elem == Elem::F32 && store.load_c {
                store.load_c = false;
                store.partial = c.cast();
                store.partial_row = store.c_row;
            }
            if !block.is_first {
                store.partial = partial;
                store.partial_row = self.nc as isize;
            }
            if !block.is_last {
                store.c = partial.cast();
                store.c_row = self.nc as isize;
                store.elem = Elem::F32;
                store.load_c = false;
            }
        } else if !block.is_first {
            store.load_c = true;
        }
        // SAFETY: the features are present; the caller vouches for the buffers.
        unsafe {
            if self.is_direct || (self.has_partial && !block.is_last) {
                self.run_kernel(words, a, b, &store);
            } else {
                self.scattered(words, a, b, &store);
            }
        }
    }

    /// Computes a tile whose elements of C the micro-kernel cannot store.
    #[cold]
    unsafe fn scattered(&self, words: usize, a: &Left, b: &Columns, store: &Store) {
        let nr = self.kernel.columns;
        let mut square = [0f32; MAX_TILE];
        let local = Store {
            c: square.as_mut_ptr().cast(),
            c_row: nr as isize,
            elem: Elem::F32,
            load_c: false,
            ..*store
        };
        let Operand { elem, row, col, .. } = self.shape.c;
        // SAFETY: the features are present; the elements are those of the tile.
        unsafe {
            self.run_kernel(words, a, b, &local);
            for i in 0..store.rows {
                for j in 0..store.cols {
                    let at = i as isize * row + j as isize * col;
                    let mut value = square[i * nr + j];
                    if store.load_c {
                        value += elem.load(store.c, at);
                    }
                    elem.store(store.c, at, value);
                }
            }
        }
    }

    /// Runs the micro-kernel.
    #[inline(always)]
    unsafe fn run_kernel(&self, words: usize, a: &Left, b: &Columns, store: &Store) {
        // SAFETY: passed on.
        unsafe {
            match (*a, self.kernel.lines) {
                (Left::Lines(a, line), Some(lines)) => lines(words, (a, line), b.at, store),
                (Left::Lines(..), None) => unreachable!("lines are only read where they can be"),
                (Left::Panel(a), _) => (self.kernel.tile)(words, a, b, store),
            }
        }
    }
}
