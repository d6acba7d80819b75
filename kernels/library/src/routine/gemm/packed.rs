//! Packed GEMM with AVX-512, by f32 numbers or by pairs of bf16: loops over column blocks, depth blocks and row blocks of C.
//!
//! All threads pack one column block of B together and share it; each packs its own rows of A. Results are summed over the depths of a
//! block in registers, and over blocks in C itself if that is f32 with contiguous columns, else in f32 scratch memory that is rounded
//! once. Neither depends on the number of threads.

mod ahead;

use super::microkernel::{
    Columns, MR, NR, Store, depths_per_word, lines_bf16, lines_f32, tile_bf16, tile_f32,
};
use super::pack::{Source, pack_a, pack_b};
use super::{Buffers, Gemm, Operand};
use crate::dtype::Elem;
use crate::pool::{Pool, Scratch, Shareable};
use crate::routine::convert::to_f32;
pub(super) use ahead::{
    Right, pack_left, pack_whole, packed_bytes, packed_left_bytes, run_packed, run_packed_left,
};
use std::ops::Range;

/// Rows of A packed at a time: with [`KC`] depths they fill a part of the second-level cache.
const MC: usize = 96;
/// The most depths of a block in words of the packed operands; the depth is split evenly.
const KC: usize = 512;
/// The most columns of a block: packed, 4 MiB.
const NC: usize = 2048;
/// The most rows whose partial sums are kept in scratch memory.
const PARTIAL_ROWS: usize = 2048;
/// Panels of B that a thread packs at a time.
const PANELS: usize = 8;
/// The most rows of A for which columns of B are read in place.
const IN_PLACE_ROWS: usize = 272;
/// The most panels of B for which rows of A are read in place, and of which distance in bytes these may not be multiples.
const LINES_PANELS: usize = 8;
const LINE_BYTES: usize = 1024;
/// Tasks per thread, so that uneven ones level out.
const TASKS_PER_THREAD: usize = 4;
/// A batch of GEMMs smaller than this (in multiplications) is spread as whole GEMMs.
const SMALL: usize = 1 << 22;

/// Whether there are kernels on this CPU.
pub(super) fn available() -> bool {
    crate::simd::has_avx512()
}

/// Runs all GEMMs of the batch on the pool.
///
/// # Safety
/// As for [`Gemm::run`]; no empty dimension, and kernels must be [`available`].
pub(super) unsafe fn run(shape: &Gemm, pool: &Pool, at: Buffers) {
    let threads = pool.threads();
    let small = shape.m * shape.n * shape.k < SMALL;
    let even = shape.batch.is_multiple_of(threads) || shape.batch >= TASKS_PER_THREAD * threads;
    if shape.batch > 1 && (small || even) {
        let at = super::shareable(at);
        pool.run_workers(shape.batch, &|index, worker| {
            // SAFETY: the matrices of C are disjoint; the caller vouches for the rest.
            unsafe { run_serial(shape, &mut worker.packing, shape.of_batch(at.get(), index)) };
        });
        return;
    }
    for index in 0..shape.batch {
        // SAFETY: the caller vouches for the buffers.
        unsafe { run_shared(shape, pool, shape.of_batch(at, index)) };
    }
}

/// Runs one GEMM on the calling thread.
///
/// # Safety
/// As for [`run`].
pub(super) unsafe fn run_serial(shape: &Gemm, packing: &mut Scratch, at: Buffers) {
    let (blocked, at) = BlockedGemm::new(shape, at);
    let blocked = blocked.reading_in_place();
    let [a_bytes, shared @ ..] = blocked.scratch();
    let [a, b, partial, bias] = packing.split([a_bytes, shared[0], shared[1], shared[2]]);
    let scratch = Shared { b: b.cast(), partial: partial.cast(), bias: bias.cast() };
    // SAFETY: the scratch parts are as large as asked for; the caller vouches for the rest.
    unsafe {
        blocked.prepare_bias(&at, &scratch);
        blocked.each_block(|block| {
            for panel in (0..block.cols.div_ceil(NR)).step_by(PANELS) {
                blocked.pack_panels(&at, &block, &scratch, panel);
            }
            let all = (0, block.cols.div_ceil(NR));
            for row in (0..block.rows).step_by(MC) {
                let rows = row..block.rows.min(row + MC);
                blocked.multiply(&at, &block, &scratch, a.cast(), rows, all);
            }
        });
    }
}

/// The buffers of a GEMM that is only planned.
const NOWHERE: Buffers = Buffers {
    a: std::ptr::null(),
    b: std::ptr::null(),
    c: std::ptr::null_mut(),
    bias: std::ptr::null(),
};

/// Runs one GEMM with all threads of the pool.
unsafe fn run_shared(shape: &Gemm, pool: &Pool, at: Buffers) {
    let (blocked, at) = BlockedGemm::new(shape, at);
    let blocked = blocked.reading_in_place();
    let [a_bytes, shared @ ..] = blocked.scratch();
    let [b, partial, bias] = pool.common(shared);
    let scratch = Shared { b: b.cast(), partial: partial.cast(), bias: bias.cast() };
    let sent = Shareable::new((at, scratch));
    // SAFETY: as in `run_serial`; panels and row-column ranges of one block are disjoint.
    unsafe {
        blocked.prepare_bias(&at, &scratch);
        blocked.each_block(|block| {
            let panels = block.cols.div_ceil(NR);
            pool.run(panels.div_ceil(PANELS), &|chunk| {
                let (at, scratch) = sent.get();
                blocked.pack_panels(&at, &block, &scratch, chunk * PANELS);
            });
            // Parts of equal numbers of tiles, as many for each thread: one more for some would make the others wait.
            let threads = pool.threads();
            let row_tiles = block.rows.div_ceil(MR);
            let row_parts = block.rows.div_ceil(MC);
            let row_parts =
                if row_parts > threads { row_parts.next_multiple_of(threads) } else { row_parts };
            let first_row = |part: usize| (part * row_tiles / row_parts * MR).min(block.rows);
            let wanted = if threads == 1 { 1 } else { TASKS_PER_THREAD * threads };
            let col_parts = wanted.div_ceil(row_parts).min(panels);
            let step = panels.div_ceil(col_parts);
            let col_parts = panels.div_ceil(step);
            pool.run_workers(row_parts * col_parts, &|chunk, worker| {
                let (at, scratch) = sent.get();
                let [a] = worker.packing.split([a_bytes]);
                let first = chunk % col_parts * step;
                let range = (first, panels.min(first + step));
                let part = chunk / col_parts;
                let rows = first_row(part)..first_row(part + 1);
                blocked.multiply(&at, &block, &scratch, a.cast(), rows, range);
            });
        });
    }
}

/// Scratch memory that the threads share.
#[derive(Clone, Copy)]
struct Shared {
    /// The packed column block of B.
    b: *mut u32,
    /// Partial sums of a row range of the column block.
    partial: *mut f32,
    /// The bias in f32.
    bias: *mut f32,
}

impl Shared {
    const EMPTY: Shared = Shared {
        b: std::ptr::null_mut(),
        partial: std::ptr::null_mut(),
        bias: std::ptr::null_mut(),
    };
}

/// Rows of A, as the micro-kernels read them.
#[derive(Clone, Copy)]
enum Left {
    /// Packed.
    Panel(*const u32),
    /// In memory, and the bytes between two.
    Lines(*const u8, isize),
}

impl Left {
    /// The rows from number `row` on, a multiple of [`MR`].
    fn skip_rows(self, row: usize, words: usize) -> Left {
        match self {
            Left::Panel(a) => Left::Panel(a.wrapping_add(row * words)),
            Left::Lines(a, line) => Left::Lines(a.wrapping_offset(row as isize * line), line),
        }
    }
}

/// A block of C and of the depth.
#[derive(Clone, Copy)]
struct Block {
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
    depth: usize,
    depths: usize,
    is_first: bool,
    is_last: bool,
    /// Words between two packed panels of B.
    panel: usize,
}

/// A GEMM brought into the form of the kernel: transposed as a whole if that makes the columns
/// of C contiguous.
struct BlockedGemm {
    shape: Gemm,
    /// The bias runs along the rows of C.
    is_swapped: bool,
    /// Depths in a word of the packed operands.
    pack: usize,
    /// Rows, columns and depths of a block.
    mc: usize,
    nc: usize,
    kc: usize,
    /// Column blocks of the whole B.
    col_blocks: usize,
    /// The micro-kernel stores into C by itself.
    is_direct: bool,
    /// Sums over depth blocks are kept in scratch memory.
    has_partial: bool,
    /// Whole panels of columns of B are read where they are.
    in_place: bool,
}

impl BlockedGemm {
    fn new(shape: &Gemm, at: Buffers) -> (BlockedGemm, Buffers) {
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
        let pack = depths_per_word(shape.a.elem);
        let kc = even_part(shape.k, KC * pack).next_multiple_of(pack);
        let nc = even_part(shape.n, NC).next_multiple_of(NR);
        // The kernel of pairs does not round to f16.
        let is_direct = shape.c.col == 1 && (pack == 1 || shape.c.elem != Elem::F16);
        let sums_in_c = is_direct && shape.c.elem == Elem::F32;
        let has_partial = kc < shape.k && !sums_in_c;
        let mc = if has_partial { even_part(shape.m, PARTIAL_ROWS) } else { shape.m };
        let mc = mc.next_multiple_of(MC);
        let col_blocks = shape.n.div_ceil(nc);
        let in_place = false;
        let blocked = BlockedGemm {
            shape,
            is_swapped,
            pack,
            mc,
            nc,
            kc,
            col_blocks,
            is_direct,
            has_partial,
            in_place,
        };
        (blocked, at)
    }

    /// Reads columns of B in memory where they are, if they need not be converted and too few rows of A share them for packing to pay.
    fn reading_in_place(mut self) -> BlockedGemm {
        let Gemm { m, b: Operand { elem, row, col, .. }, .. } = self.shape;
        self.in_place = elem == Elem::F32 && col == 1 && row > 0 && m <= IN_PLACE_ROWS;
        self
    }

    /// Runs the micro-kernel of the operands' type. For lines of A, columns of B are a panel.
    unsafe fn kernel(&self, words: usize, a: Left, b: Columns, store: &Store) {
        // SAFETY: passed on.
        unsafe {
            match (a, self.pack) {
                (Left::Panel(a), 1) => tile_f32(words, a, b, store),
                (Left::Panel(a), _) => tile_bf16(words, a, b, store),
                (Left::Lines(a, line), 1) => lines_f32(words, (a, line), b.at, store),
                (Left::Lines(a, line), _) => lines_bf16(words, (a, line), b.at, store),
            }
        }
    }

    /// Whether rows of A are read where they are, as they are read too seldom for packing to pay.
    fn reads_lines(&self, block: &Block, panels: usize) -> bool {
        let Operand { elem, row, col, .. } = self.shape.a;
        let bytes = row.unsigned_abs() * elem.size();
        // Rows that are multiples of this apart would evict each other from the first-level cache.
        let collide = bytes.is_multiple_of(LINE_BYTES);
        let is_whole = block.depths.is_multiple_of(self.pack);
        let is_wide = self.pack * elem.size() == size_of::<u32>();
        col == 1 && is_wide && is_whole && !collide && panels <= LINES_PANELS && !self.in_place
    }

    /// Words of a packed block of B.
    fn packed_block(&self) -> usize {
        self.nc * (self.kc / self.pack)
    }

    /// Words of a packed part of the left operand.
    fn left_part(&self) -> usize {
        self.shape.m.next_multiple_of(MR) * (self.kc / self.pack)
    }

    /// Where a block of the whole packed B begins.
    fn packed_at(&self, packed: *mut u32, block: &Block) -> *mut u32 {
        let index = block.depth / self.kc * self.col_blocks + block.col / self.nc;
        packed.wrapping_add(index * self.packed_block())
    }

    /// Bytes of: packed A of one thread, packed B, partial sums, bias.
    fn scratch(&self) -> [usize; 4] {
        let word = size_of::<u32>();
        let words = self.kc / self.pack;
        let rows = MC.min(self.shape.m.next_multiple_of(MR));
        let bias = if self.is_swapped { self.shape.m } else { self.shape.n };
        [
            rows * words * word,
            self.nc * words * word,
            if self.has_partial { self.mc.min(self.shape.m) * self.nc * word } else { 0 },
            if self.shape.bias.is_some() { bias.next_multiple_of(NR) * word } else { 0 },
        ]
    }

    unsafe fn prepare_bias(&self, at: &Buffers, scratch: &Shared) {
        if let Some(elem) = self.shape.bias {
            let len = if self.is_swapped { self.shape.m } else { self.shape.n };
            // SAFETY: the part holds the bias, rounded up to whole panels.
            unsafe {
                scratch.bias.write_bytes(0, len.next_multiple_of(NR));
                to_f32(at.bias, elem, std::slice::from_raw_parts_mut(scratch.bias, len));
            }
        }
    }

    /// Calls `body` for each block, in the order that sums demand.
    fn each_block(&self, mut body: impl FnMut(Block)) {
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
                        panel: NR * depths.div_ceil(self.pack),
                    });
                }
            }
        }
    }

    /// Packs some panels of B, from number `first` on, of which those that are read in place are left out.
    unsafe fn pack_panels(&self, at: &Buffers, block: &Block, scratch: &Shared, first: usize) {
        let mut first = first;
        if self.in_place {
            let whole = block.cols / NR;
            if whole == block.cols.div_ceil(NR) || whole >= first + PANELS {
                return;
            }
            first = whole;
        }
        let skip = first * NR;
        let Operand { elem, row, col, .. } = self.shape.b;
        let src = Source {
            elem,
            pack: self.pack,
            start: self.right_at(at, block, skip),
            line: col,
            depth: row,
            lines: (PANELS * NR).min(block.cols - skip),
            depths: block.depths,
            panel: block.panel,
        };
        // SAFETY: the features are present; the part holds the whole column block.
        unsafe { pack_b(&src, scratch.b.add(first * block.panel)) };
    }

    /// The first element of B in a column of a block.
    fn right_at(&self, at: &Buffers, block: &Block, column: usize) -> *const u8 {
        let Operand { elem, row, col, .. } = self.shape.b;
        elem.at(at.b, block.depth as isize * row + (block.col + column) as isize * col)
    }

    /// Packs at most [`MC`] rows of A into `a` and multiplies them by a range of panels of B.
    unsafe fn multiply(
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
            pack: self.pack,
            start: shape.a.elem.at(at.a, offset),
            line: shape.a.row,
            depth: shape.a.col,
            lines: rows.len(),
            depths: block.depths,
            panel: MR * block.depths.div_ceil(self.pack),
        };
        // SAFETY: the features are present; the caller vouches for the buffers.
        unsafe {
            if self.reads_lines(block, panels.1 - panels.0) {
                let a = Left::Lines(src.start, shape.a.row * shape.a.elem.size() as isize);
                return self.tiles(at, block, scratch, a, rows, panels);
            }
            pack_a(&src, a);
            self.tiles(at, block, scratch, Left::Panel(a), rows, panels);
        }
    }

    /// Multiplies up to [`MC`] rows by a range of panels of B.
    unsafe fn tiles(
        &self,
        at: &Buffers,
        block: &Block,
        scratch: &Shared,
        a: Left,
        rows: Range<usize>,
        (first, last): (usize, usize),
    ) {
        let words = block.depths.div_ceil(self.pack);
        // SAFETY: the panels are packed; the caller vouches for the buffers.
        unsafe {
            for panel in first..last {
                let mut b = match self.in_place && (panel + 1) * NR <= block.cols {
                    true => {
                        let at = self.right_at(at, block, panel * NR).cast::<u32>();
                        let next = at.wrapping_add(NR);
                        Columns { at, step: self.shape.b.row as usize, next }
                    }
                    false => {
                        let at = scratch.b.add(panel * block.panel).cast_const();
                        Columns { at, step: NR, next: at }
                    }
                };
                for i in rows.clone().step_by(MR) {
                    let a = a.skip_rows(i - rows.start, words);
                    let size = (MR.min(rows.end - i), NR.min(block.cols - panel * NR));
                    self.tile(at, block, scratch, (a, b, words), (i, panel * NR), size);
                    b.next = b.at;
                }
            }
        }
    }

    /// Computes the tile at `(i, j)` of the block.
    #[inline]
    unsafe fn tile(
        &self,
        at: &Buffers,
        block: &Block,
        scratch: &Shared,
        (a, b, words): (Left, Columns, usize),
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
            if !block.is_first {
                store.partial = partial;
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
                self.kernel(words, a, b, &store);
            } else {
                self.scattered(words, a, b, &store);
            }
        }
    }

    /// Computes a tile whose elements of C the micro-kernel cannot store.
    #[cold]
    unsafe fn scattered(&self, words: usize, a: Left, b: Columns, store: &Store) {
        let mut square = [0f32; MR * NR];
        let local = Store {
            c: square.as_mut_ptr().cast(),
            c_row: NR as isize,
            elem: Elem::F32,
            load_c: false,
            ..*store
        };
        let Operand { elem, row, col, .. } = self.shape.c;
        // SAFETY: the features are present; the elements are those of the tile.
        unsafe {
            self.kernel(words, a, b, &local);
            for i in 0..store.rows {
                for j in 0..store.cols {
                    let at = i as isize * row + j as isize * col;
                    let mut value = square[i * NR + j];
                    if store.load_c {
                        value += elem.load(store.c, at);
                    }
                    elem.store(store.c, at, value);
                }
            }
        }
    }
}

/// The size of a part if `len` is split evenly into the fewest parts of at most `most`.
fn even_part(len: usize, most: usize) -> usize {
    len.div_ceil(len.div_ceil(most).max(1))
}
