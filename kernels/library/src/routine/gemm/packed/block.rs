//! A GEMM cut into blocks, and the products of a block.

use super::{LINE_BYTES, LINES_PANELS, PAGE_BYTES};
use crate::dtype::Elem;
use crate::routine::convert::to_f32;
use crate::routine::gemm::kernel::Kernel;
use crate::routine::gemm::pack::Source;
use crate::routine::gemm::{Buffers, Gemm, Operand};
use std::ops::Range;

/// Scratch memory that the threads share.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    /// The packed column block of B.
    pub(super) b: *mut u32,
    /// Partial sums of a row range of the column block.
    pub(super) partial: *mut f32,
    /// The bias in f32.
    pub(super) bias: *mut f32,
}

impl Shared {
    pub(super) const EMPTY: Shared = Shared {
        b: std::ptr::null_mut(),
        partial: std::ptr::null_mut(),
        bias: std::ptr::null_mut(),
    };
}

/// Rows of A, as the micro-kernels read them.
#[derive(Clone, Copy)]
pub(super) enum Left {
    /// Packed.
    Panel(*const u32),
    /// In memory, and the bytes between two.
    Lines(*const u8, isize),
}

impl Left {
    /// The rows from number `row` on, a multiple of those of a tile.
    pub(super) fn skip_rows(self, row: usize, words: usize) -> Left {
        match self {
            Left::Panel(a) => Left::Panel(a.wrapping_add(row * words)),
            Left::Lines(a, line) => Left::Lines(a.wrapping_offset(row as isize * line), line),
        }
    }
}

/// A block of C and of the depth.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) row: usize,
    pub(super) rows: usize,
    pub(super) col: usize,
    pub(super) cols: usize,
    pub(super) depth: usize,
    pub(super) depths: usize,
    pub(super) is_first: bool,
    pub(super) is_last: bool,
    /// Words between two packed panels of B.
    pub(super) panel: usize,
}

/// A GEMM brought into the form of the kernel: transposed as a whole if that makes the columns
/// of C contiguous.
pub(super) struct BlockedGemm {
    pub(super) shape: Gemm,
    /// The bias runs along the rows of C.
    pub(super) is_swapped: bool,
    pub(super) kernel: &'static Kernel,
    /// Rows, columns and depths of a block.
    pub(super) mc: usize,
    pub(super) nc: usize,
    pub(super) kc: usize,
    /// Column blocks of the whole B.
    pub(super) col_blocks: usize,
    /// The micro-kernel stores into C by itself.
    pub(super) is_direct: bool,
    /// Sums over depth blocks are kept in scratch memory.
    pub(super) has_partial: bool,
    /// Whole panels of columns of B are read where they are.
    pub(super) in_place: bool,
    /// Panels of B by which each panel of A is multiplied before the next one, as [`Kernel::group`].
    pub(super) group: usize,
}

impl BlockedGemm {
    pub(super) fn new(
        kernel: &'static Kernel,
        shape: &Gemm,
        at: Buffers,
    ) -> (BlockedGemm, Buffers) {
        let is_swapped = shape.c.row == 1 && shape.c.col != 1;
        let (shape, at) = if is_swapped {
            let swapped = Gemm {
                m: shape.n,
                n: shape.m,
                a: shape.b.transposed(),
                b: shape.a.transposed(),
                c: shape.c.transposed(),
                ..*shape
            };
            (swapped, Buffers { a: at.b, b: at.a, ..at })
        } else {
            (*shape, at)
        };
        let kc = even_part(shape.k, kernel.depths).next_multiple_of(kernel.granule);
        let nc = even_part(shape.n, kernel.block_columns).next_multiple_of(kernel.columns);
        let is_direct = shape.c.col == 1 && (kernel.stores_f16 || shape.c.elem != Elem::F16);
        let sums_in_c = is_direct && shape.c.elem == Elem::F32 && !kernel.keeps_sums;
        let has_partial = kc < shape.k && !sums_in_c;
        let mc = if has_partial { even_part(shape.m, kernel.block_rows) } else { shape.m };
        let mc = mc.next_multiple_of(kernel.part);
        let col_blocks = shape.n.div_ceil(nc);
        let in_place = false;
        let blocked = BlockedGemm {
            shape,
            is_swapped,
            kernel,
            mc,
            nc,
            kc,
            col_blocks,
            is_direct,
            has_partial,
            in_place,
            group: kernel.group,
        };
        (blocked, at)
    }

    /// Reads columns of B in memory where they are, if they need not be converted and too few rows of A share them for packing to pay. Depths
    /// that are whole pages apart would share the same lines of the first-level cache.
    pub(super) fn reading_in_place(mut self) -> BlockedGemm {
        let Gemm { m, b: Operand { elem, row, col, .. }, .. } = self.shape;
        let collide = (row.unsigned_abs() * elem.size()).is_multiple_of(PAGE_BYTES);
        let is_plain = elem == Elem::F32 && col == 1 && row > 0 && !collide;
        self.in_place = is_plain && m <= self.kernel.in_place_rows;
        self
    }

    /// Whether rows of A are read where they are, as they are read too seldom for packing to pay.
    fn reads_lines(&self, block: &Block, panels: usize) -> bool {
        let Operand { elem, row, col, .. } = self.shape.a;
        let bytes = row.unsigned_abs() * elem.size();
        // Rows that are multiples of this apart would evict each other from the first-level cache.
        let collide = bytes.is_multiple_of(LINE_BYTES);
        let is_whole = block.depths.is_multiple_of(self.kernel.granule);
        let is_wide = self.kernel.pack * elem.size() == size_of::<u32>();
        let can_be = self.kernel.lines.is_some() && is_wide && is_whole;
        col == 1 && can_be && !collide && panels <= LINES_PANELS && !self.in_place
    }

    /// Words of a packed block of B.
    pub(super) fn packed_block(&self) -> usize {
        self.nc * self.kernel.words(self.kc)
    }

    /// Words of a packed part of the left operand.
    pub(super) fn left_part(&self) -> usize {
        self.shape.m.next_multiple_of(self.kernel.rows) * self.kernel.words(self.kc)
    }

    /// Where a block of the whole packed B begins.
    pub(super) fn packed_at(&self, packed: *mut u32, block: &Block) -> *mut u32 {
        let index = block.depth / self.kc * self.col_blocks + block.col / self.nc;
        packed.wrapping_add(index * self.packed_block())
    }

    /// Bytes of: packed A of one thread, packed B, partial sums, bias.
    pub(super) fn scratch(&self) -> [usize; 4] {
        let word = size_of::<u32>();
        let words = self.kernel.words(self.kc);
        let rows = self.kernel.part.min(self.shape.m.next_multiple_of(self.kernel.rows));
        let bias = if self.is_swapped { self.shape.m } else { self.shape.n };
        [
            rows * words * word,
            self.nc * words * word,
            if self.has_partial { self.mc.min(self.shape.m) * self.nc * word } else { 0 },
            if self.shape.bias.is_some() {
                bias.next_multiple_of(self.kernel.columns) * word
            } else {
                0
            },
        ]
    }

    pub(super) unsafe fn prepare_bias(&self, at: &Buffers, scratch: &Shared) {
        if let Some(elem) = self.shape.bias {
            let len = if self.is_swapped { self.shape.m } else { self.shape.n };
            // SAFETY: the part holds the bias, rounded up to whole panels.
            unsafe {
                scratch.bias.write_bytes(0, len.next_multiple_of(self.kernel.columns));
                to_f32(at.bias, elem, std::slice::from_raw_parts_mut(scratch.bias, len));
            }
        }
    }

    /// Calls `body` for each block, in the order that sums demand.
    pub(super) fn each_block(&self, mut body: impl FnMut(Block)) {
        let Gemm { m, n, k, .. } = self.shape;
        for row in (0..m).step_by(self.mc) {
            for col in (0..n).step_by(self.nc) {
                for depth in (0..k).step_by(self.kc) {
                    let depths = self.kc.min(k - depth);
                    body(Block {
                        row,
                        rows: self.mc.min(m - row),
                        col,
                        cols: self.nc.min(n - col),
                        depth,
                        depths,
                        is_first: depth == 0,
                        is_last: depth + depths == k,
                        panel: self.kernel.columns * self.kernel.words(depths),
                    });
                }
            }
        }
    }

    /// Packs some panels of B, of which those that are read in place are left out.
    pub(super) unsafe fn pack_panels(
        &self,
        at: &Buffers,
        block: &Block,
        scratch: &Shared,
        panels: Range<usize>,
    ) {
        let columns = self.kernel.columns;
        let mut first = panels.start;
        if self.in_place {
            let whole = block.cols / columns;
            if whole == block.cols.div_ceil(columns) || whole >= panels.end {
                return;
            }
            first = whole;
        }
        let skip = first * columns;
        let Operand { elem, row, col, .. } = self.shape.b;
        let src = Source {
            elem,
            pack: self.kernel.pack,
            granule: self.kernel.granule,
            start: self.right_at(at, block, skip),
            line: col,
            depth: row,
            lines: (panels.end * columns).min(block.cols) - skip,
            depths: block.depths,
            panel: block.panel,
        };
        // SAFETY: the features are present; the part holds the whole column block.
        unsafe { (self.kernel.pack_b)(&src, scratch.b.add(first * block.panel)) };
    }

    /// The first element of B in a column of a block.
    pub(super) fn right_at(&self, at: &Buffers, block: &Block, column: usize) -> *const u8 {
        let Operand { elem, row, col, .. } = self.shape.b;
        elem.at(at.b, block.depth as isize * row + (block.col + column) as isize * col)
    }

    /// Packs at most [`Kernel::part`] rows of A into `a` and multiplies them by a range of panels of B.
    pub(super) unsafe fn multiply(
        &self,
        at: &Buffers,
        block: &Block,
        scratch: &Shared,
        a: *mut u32,
        rows: Range<usize>,
        panels: (usize, usize),
    ) {
        let shape = &self.shape;
        let offset =
            (block.row + rows.start) as isize * shape.a.row + block.depth as isize * shape.a.col;
        let src = Source {
            elem: shape.a.elem,
            pack: self.kernel.pack,
            granule: self.kernel.granule,
            start: shape.a.elem.at(at.a, offset),
            line: shape.a.row,
            depth: shape.a.col,
            lines: rows.len(),
            depths: block.depths,
            panel: self.kernel.rows * self.kernel.words(block.depths),
        };
        // SAFETY: the features are present; the caller vouches for the buffers.
        unsafe {
            if self.reads_lines(block, panels.1 - panels.0) {
                let a = Left::Lines(src.start, shape.a.row * shape.a.elem.size() as isize);
                return self.tiles(at, block, scratch, a, rows, panels);
            }
            (self.kernel.pack_a)(&src, a);
            self.tiles(at, block, scratch, Left::Panel(a), rows, panels);
        }
    }
}

/// The size of a part if `len` is split evenly into the fewest parts of at most `most`.
fn even_part(len: usize, most: usize) -> usize {
    len.div_ceil(len.div_ceil(most).max(1))
}
