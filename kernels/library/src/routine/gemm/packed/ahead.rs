//! Operands packed once for several GEMMs: the whole right operand, or the whole left one.

use super::block::{Block, BlockedGemm, Left, Shared};
use super::{NOWHERE, PANELS};
use crate::pool::Scratch;
use crate::routine::gemm::kernel::Kernel;
use crate::routine::gemm::pack::Source;
use crate::routine::gemm::{Buffers, Gemm, Operand};
use std::ops::Range;

/// Bytes of the lines of a computed right operand that are packed at a time: a part of the first-level cache.
const LINES_BYTES: usize = 16 << 10;

/// The right operand of a packed left one.
pub(in crate::routine::gemm) enum Right<'r> {
    /// In memory, as the GEMM says.
    At(*const u8),
    /// Computed: writes the rows of a range of depths, of all columns one after the other.
    Rows(&'r dyn Fn(Range<usize>, *mut u8)),
}

/// Bytes of the whole right operand when packed.
pub(in crate::routine::gemm) fn packed_bytes(kernel: &'static Kernel, whole: &Gemm) -> usize {
    let (blocked, _) = BlockedGemm::new(kernel, whole, NOWHERE);
    let Gemm { n, k, .. } = blocked.shape;
    n.div_ceil(blocked.nc) * k.div_ceil(blocked.kc) * blocked.packed_block() * size_of::<u32>()
}

/// Packs the whole right operand.
///
/// # Safety
/// `b` must be valid, `out` writable for [`packed_bytes`].
pub(in crate::routine::gemm) unsafe fn pack_whole(
    kernel: &'static Kernel,
    whole: &Gemm,
    b: *const u8,
    out: *mut u8,
) {
    for first in (0..whole.n.div_ceil(kernel.columns)).step_by(PANELS) {
        // SAFETY: passed on.
        unsafe { pack_columns(kernel, whole, first, b, out) };
    }
}

/// Packs all depths of up to [`PANELS`] panels of the right operand, from a number on. Calls for other panels may run at the same time.
///
/// # Safety
/// As for [`pack_whole`].
pub(super) unsafe fn pack_columns(
    kernel: &'static Kernel,
    whole: &Gemm,
    first: usize,
    b: *const u8,
    out: *mut u8,
) {
    let (blocked, at) =
        BlockedGemm::new(kernel, &Gemm { m: 1, ..*whole }, Buffers { b, ..NOWHERE });
    let columns = first * kernel.columns;
    blocked.each_block(|block| {
        // Blocks have whole panels, but these may be those of two.
        let last = block.cols.div_ceil(kernel.columns);
        let begin = columns.saturating_sub(block.col) / kernel.columns;
        let end = (columns + PANELS * kernel.columns).saturating_sub(block.col) / kernel.columns;
        let scratch = Shared { b: blocked.packed_at(out.cast(), &block), ..Shared::EMPTY };
        if begin < end.min(last) {
            // SAFETY: passed on.
            unsafe { blocked.pack_panels(&at, &block, &scratch, begin..end.min(last)) };
        }
    });
}

/// Multiplies `m` rows by the first `n` columns and `k` depths of a packed right operand.
///
/// # Safety
/// As for [`Gemm::run`]; `packed` must come from [`pack_whole`] of the same GEMM.
pub(in crate::routine::gemm) unsafe fn run_packed(
    kernel: &'static Kernel,
    whole: &Gemm,
    (m, n, k): (usize, usize, usize),
    packing: &mut Scratch,
    at: Buffers,
    packed: *const u8,
) {
    let (mut blocked, at) = BlockedGemm::new(kernel, whole, at);
    assert!(!blocked.is_swapped && m <= whole.m);
    if kernel.keeps_sums {
        // Rows of A are packed just before.
        blocked.group = 0;
    }
    let [a_bytes, _, partial_bytes, bias_bytes] = blocked.scratch();
    let [a, partial, bias] = packing.split([a_bytes, partial_bytes, bias_bytes]);
    let shared = Shared { partial: partial.cast(), bias: bias.cast(), ..Shared::EMPTY };
    // SAFETY: the part holds it.
    unsafe { blocked.prepare_bias(&at, &shared) };
    blocked.shape = Gemm { m, n, k, ..blocked.shape };
    blocked.each_block(|mut block| {
        block.panel = kernel.columns * kernel.words(blocked.kc.min(whole.k - block.depth));
        let b = blocked.packed_at(packed.cast_mut().cast(), &block);
        let scratch = Shared { b, ..shared };
        let all = (0, block.cols.div_ceil(kernel.columns));
        for row in (0..block.rows).step_by(kernel.part) {
            let rows = row..block.rows.min(row + kernel.part);
            // SAFETY: the scratch parts are as large as asked for; the caller vouches for the rest.
            unsafe { blocked.multiply(&at, &block, &scratch, a.cast(), rows, all) };
        }
    });
}

/// Bytes of the whole left operand when packed.
pub(in crate::routine::gemm) fn packed_left_bytes(kernel: &'static Kernel, whole: &Gemm) -> usize {
    let (blocked, _) = BlockedGemm::new(kernel, whole, NOWHERE);
    left_parts(kernel, whole) * blocked.left_part() * size_of::<u32>()
}

/// Parts of the left operand: its blocks of depths.
fn left_parts(kernel: &'static Kernel, whole: &Gemm) -> usize {
    let (blocked, _) = BlockedGemm::new(kernel, whole, NOWHERE);
    whole.k.div_ceil(blocked.kc)
}

/// Packs some rows and depths of the left operand; the element of the first of both is at `a`.
///
/// # Safety
/// `a` must be valid, `out` writable for [`packed_left_bytes`]; the rows begin at a multiple of those of a tile,
/// the depths at one of the kernel's granule.
pub(in crate::routine::gemm) unsafe fn pack_left(
    kernel: &'static Kernel,
    whole: &Gemm,
    rows: Range<usize>,
    depths: Range<usize>,
    a: *const u8,
    out: *mut u8,
) {
    let (blocked, at) = BlockedGemm::new(kernel, whole, Buffers { a, ..NOWHERE });
    let kc = blocked.kc;
    let Kernel { rows: mr, pack, granule, .. } = *kernel;
    let Gemm { k, a: Operand { elem, row, col, .. }, .. } = blocked.shape;
    debug_assert!(rows.start.is_multiple_of(mr) && depths.start.is_multiple_of(granule));
    for part in depths.start / kc..depths.end.div_ceil(kc) {
        let block = part * kc..k.min((part + 1) * kc);
        let panel = mr * kernel.words(block.len());
        let range = depths.start.max(block.start)..depths.end.min(block.end);
        let src = Source {
            elem,
            pack,
            granule,
            start: elem.at(at.a, (range.start - depths.start) as isize * col),
            line: row,
            depth: col,
            lines: rows.len(),
            depths: range.len(),
            panel,
        };
        let place = rows.start / mr * panel + kernel.words(range.start - block.start) * mr;
        // SAFETY: the features are present; the place lies inside of the part.
        unsafe { (kernel.pack_a)(&src, out.cast::<u32>().add(part * blocked.left_part() + place)) };
    }
}

/// Multiplies some rows of a packed left operand by the first `n` columns of the right one; `c` is where
/// the first of these rows goes. The bias may be null without one.
///
/// # Safety
/// As for [`Gemm::run`]; `packed` must come from [`pack_left`] of the same GEMM, and the rows begin at a
/// multiple of those of a tile.
pub(in crate::routine::gemm) unsafe fn run_packed_left(
    kernel: &'static Kernel,
    whole: &Gemm,
    (rows, n): (Range<usize>, usize),
    packing: &mut Scratch,
    packed: *const u8,
    right: &Right<'_>,
    (c, bias): (*mut u8, *const u8),
) {
    let b = match right {
        Right::At(b) => *b,
        Right::Rows(_) => std::ptr::null(),
    };
    let (mut blocked, at) = BlockedGemm::new(kernel, whole, Buffers { b, c, bias, ..NOWHERE });
    assert!(!blocked.is_swapped && n <= whole.n);
    assert!(rows.start.is_multiple_of(kernel.rows) && rows.end <= whole.m);
    let [_, b_bytes, partial_bytes, bias_bytes] = blocked.scratch();
    let line_bytes = blocked.nc * whole.b.elem.size();
    let step = (LINES_BYTES / line_bytes).max(1).next_multiple_of(kernel.granule);
    let computed = if matches!(right, Right::Rows(_)) { step * n * whole.b.elem.size() } else { 0 };
    let [b, partial, lines, bias] = packing.split([b_bytes, partial_bytes, computed, bias_bytes]);
    let left_part = blocked.left_part();
    blocked.shape = Gemm { m: rows.len(), n, ..blocked.shape };
    if matches!(right, Right::At(_)) {
        blocked = blocked.reading_in_place();
    }
    let scratch = Shared { b: b.cast(), partial: partial.cast(), bias: bias.cast() };
    // SAFETY: the part holds it.
    unsafe { blocked.prepare_bias(&at, &scratch) };
    // SAFETY: the scratch parts are as large as asked for; the caller vouches for the rest.
    blocked.each_block(|block| unsafe {
        let panels = block.cols.div_ceil(kernel.columns);
        match right {
            Right::At(_) => {
                for panel in (0..panels).step_by(PANELS) {
                    let panels = panel..panels.min(panel + PANELS);
                    blocked.pack_panels(&at, &block, &scratch, panels);
                }
            }
            Right::Rows(rows) => blocked.pack_rows(&block, &scratch, (step, n), lines, rows),
        }
        let part = packed.cast::<u32>().add(block.depth / blocked.kc * left_part);
        let words = kernel.words(block.depths);
        for row in (0..block.rows).step_by(kernel.part) {
            let a = part.add((rows.start + block.row + row) * words);
            let rows = row..block.rows.min(row + kernel.part);
            blocked.tiles(&at, &block, &scratch, Left::Panel(a), rows, (0, panels));
        }
    });
}

impl BlockedGemm {
    /// Packs the column block of a computed right operand of `n` columns, `step` depths at a time.
    unsafe fn pack_rows(
        &self,
        block: &Block,
        scratch: &Shared,
        (step, n): (usize, usize),
        lines: *mut u8,
        rows: &dyn Fn(Range<usize>, *mut u8),
    ) {
        let columns = self.kernel.columns;
        for first in (0..block.depths).step_by(step) {
            let depths = step.min(block.depths - first);
            let depth = block.depth + first;
            rows(depth..depth + depths, lines);
            let src = Source {
                elem: self.shape.b.elem,
                pack: self.kernel.pack,
                granule: self.kernel.granule,
                start: self.shape.b.elem.at(lines, block.col as isize),
                line: 1,
                depth: n as isize,
                lines: block.cols,
                depths,
                panel: block.panel,
            };
            // SAFETY: the features are present; the part holds the whole column block.
            unsafe {
                (self.kernel.pack_b)(&src, scratch.b.add(self.kernel.words(first) * columns))
            };
        }
    }
}
