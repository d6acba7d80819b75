//! Where micro-kernels store a tile.

use crate::dtype::Elem;
use crate::routine::convert::{from_f32, to_f32};

/// Where a tile is stored and what is added to it: `c = alpha * GEMM + partial + former c + bias`, rounded to the
/// type of C.
#[derive(Clone, Copy)]
pub(super) struct Store {
    /// The tile of C; columns are contiguous.
    pub(super) c: *mut u8,
    /// Elements between two rows of C.
    pub(super) c_row: isize,
    /// F16 only for kernels that store it.
    pub(super) elem: Elem,
    /// Adds the former contents of C.
    pub(super) load_c: bool,
    /// An f32 tile to add, or null.
    pub(super) partial: *const f32,
    /// Elements between two rows of it.
    pub(super) partial_row: isize,
    /// One f32 for each column of a whole tile, or null.
    pub(super) bias: *const f32,
    /// One f32 for each row, or null.
    pub(super) row_bias: *const f32,
    /// Factor of the tile.
    pub(super) alpha: f32,
    /// Rows to store, at most those of a tile.
    pub(super) rows: usize,
    /// Columns to store, at most those of a tile.
    pub(super) cols: usize,
}

impl Store {
    /// Fetches the rows of C into the cache.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(super) fn prefetch(&self) {
        for row in 0..self.rows {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let line = self.elem.at(self.c, row as isize * self.c_row);
            // SAFETY: every x86-64 processor has the instruction, which may take any address.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(line.cast());
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(64).cast());
            }
        }
    }

    /// Fetches a row of a tile below this one into the second-level cache; it may be that of no tile.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn prefetch_below(&self, row: usize) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let line = self.elem.at(self.c, row as isize * self.c_row);
        // SAFETY: as for `prefetch`.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(line.cast());
            if self.elem == Elem::F32 {
                _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(64).cast());
            }
        }
    }

    /// Stores the tile whose `W` columns of sums lie row after row at `sums`. Compiled with the features of the micro-kernel that calls it.
    ///
    /// # Safety
    /// The sums of all rows must be readable, and the store valid.
    #[inline(always)]
    pub(super) unsafe fn finish<const W: usize>(&self, sums: *const f32) {
        for i in 0..self.rows {
            // SAFETY: rows and columns are inside the tile.
            unsafe {
                let mut line = sums.add(i * W).cast::<[f32; W]>().read();
                line.iter_mut().for_each(|sum| *sum *= self.alpha);
                let row = i as isize;
                if !self.partial.is_null() {
                    self.add(&mut line, self.partial.offset(row * self.partial_row));
                }
                let c = self.elem.at_mut(self.c, row * self.c_row);
                if self.load_c && self.elem == Elem::F32 {
                    self.add(&mut line, c.cast::<f32>().cast_const());
                } else if self.load_c {
                    let mut former = [0f32; W];
                    to_f32(c, self.elem, &mut former[..self.cols]);
                    self.add(&mut line, former.as_ptr());
                }
                if !self.row_bias.is_null() {
                    let bias = *self.row_bias.add(i);
                    line.iter_mut().for_each(|sum| *sum += bias);
                }
                if !self.bias.is_null() {
                    self.add(&mut line, self.bias);
                }
                if self.elem == Elem::F32 && self.cols == W {
                    c.cast::<[f32; W]>().write_unaligned(line);
                } else {
                    from_f32(&line[..self.cols], c, self.elem);
                }
            }
        }
    }

    /// Adds the numbers of the columns that are stored.
    #[inline(always)]
    unsafe fn add<const W: usize>(&self, line: &mut [f32; W], from: *const f32) {
        // SAFETY: the caller vouches for the columns.
        unsafe {
            if self.cols == W {
                let from = from.cast::<[f32; W]>().read_unaligned();
                line.iter_mut().zip(from).for_each(|(sum, x)| *sum += x);
            } else {
                let from = std::slice::from_raw_parts(from, self.cols);
                line.iter_mut().zip(from).for_each(|(sum, x)| *sum += x);
            }
        }
    }
}
