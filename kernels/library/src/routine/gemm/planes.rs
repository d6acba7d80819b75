//! Products of a packed left operand and columns that lie in planes, where they need not be packed: for convolutions.

use super::avx512::{MR, NR, planes_bf16, planes_f32};
use super::pack::Source;
use super::pack::avx512::{pack_a, pack_b};
use super::store::Store;
use crate::dtype::Elem;

/// Where a tile of B lies that is no panel: the words of a depth are those of a *plane* from an offset on.
#[derive(Clone, Copy)]
pub(crate) struct Planes<'o> {
    /// Number of planes, which lie one after the other.
    pub(crate) count: usize,
    /// Words of a plane.
    pub(crate) words: usize,
    /// Offsets of the depths within each plane.
    pub(crate) offsets: &'o [usize],
}

/// Whether there are kernels for these types on this CPU, whose words are those of memory.
pub(crate) fn available(elem: Elem, out: Elem) -> bool {
    let is_wide = depths_per_word(elem) * elem.size() == size_of::<u32>();
    crate::simd::has_avx512() && is_wide && (out == Elem::F32 || out == elem)
}

/// Depths in a word of a packed operand.
fn depths_per_word(elem: Elem) -> usize {
    if elem == Elem::BF16 && crate::simd::prefers_bf16_dots() { 2 } else { 1 }
}

/// Packs up to [`MR`] rows of words, one after the other, into a panel.
///
/// # Safety
/// The rows must be readable, `panel` writable for [`MR`] rows; the kernels must be [`available`].
pub(crate) unsafe fn pack_panel(rows: *const u32, count: usize, words: usize, panel: *mut u32) {
    let src = Source {
        elem: Elem::F32,
        pack: 1,
        granule: 1,
        start: rows.cast(),
        line: words as isize,
        depth: 1,
        lines: count,
        depths: words,
        panel: MR * words,
    };
    // SAFETY: the features are present; the caller vouches for the rest.
    unsafe { pack_a(&src, panel) };
}

/// Packs rows of `depths` elements, `line` elements apart, into panels of [`MR`] rows, or as columns into panels of [`NR`].
///
/// # Safety
/// As for [`pack_panel`].
pub(crate) unsafe fn pack_lines(
    elem: Elem,
    (from, line): (*const u8, usize),
    (lines, depths): (usize, usize),
    is_left: bool,
    panels: *mut u32,
) {
    let pack = depths_per_word(elem);
    let width = if is_left { MR } else { NR };
    let src = Source {
        elem,
        pack,
        granule: pack,
        start: from,
        line: line as isize,
        depth: 1,
        lines,
        depths,
        panel: width * depths.div_ceil(pack),
    };
    // SAFETY: the features are present; the caller vouches for the rest.
    unsafe { if is_left { pack_a(&src, panels) } else { pack_b(&src, panels) } };
}

/// Columns of a panel.
pub(crate) const COLUMNS: usize = NR;

/// Multiplies a packed panel of `rows` rows by `cols` columns, and writes rows of C, `pitch` elements apart, or adds to them.
///
/// # Safety
/// Each depth of B must be readable for whole tiles of columns, C writable; the kernels must be [`available`] for `elem` and that of C.
pub(crate) unsafe fn multiply(
    elem: Elem,
    planes: &Planes<'_>,
    panel: *const u32,
    b: *const u32,
    (rows, cols): (usize, usize),
    (c, out, pitch): (*mut u8, Elem, usize),
    accumulate: bool,
) {
    let kernel = if elem == Elem::F32 { planes_f32 } else { planes_bf16 };
    for first in (0..cols).step_by(NR) {
        let store = Store {
            c: out.at_mut(c, first as isize),
            c_row: pitch as isize,
            elem: out,
            load_c: accumulate,
            partial: std::ptr::null(),
            partial_row: 0,
            bias: std::ptr::null(),
            row_bias: std::ptr::null(),
            alpha: 1.0,
            rows,
            cols: NR.min(cols - first),
        };
        // SAFETY: the features are present; the caller vouches for the rest.
        unsafe { kernel(planes, panel, b.wrapping_add(first), &store) };
    }
}
