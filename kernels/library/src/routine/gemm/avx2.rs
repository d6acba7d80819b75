//! Micro-kernel for AVX2 and FMA: a tile of 6 x 16 f32 results in 12 registers. Tiles at the edges of C compute only 2 or 4 rows, or 8
//! columns.

use std::arch::x86_64::*;

use super::kernel::{COLUMNS, Columns, Kernel, PART, ROWS};
use super::pack::avx2::{pack_a, pack_b};
use super::store::Store;
use crate::dtype::Elem;

/// Rows of a tile.
pub(super) const MR: usize = 6;
/// Columns of a tile.
pub(super) const NR: usize = 16;

/// f32 numbers.
pub(super) static F32: Kernel = Kernel {
    name: "avx2",
    rows: MR,
    columns: NR,
    pack: 1,
    parts: 1,
    granule: 1,
    depths: 256,
    block_columns: COLUMNS,
    block_rows: ROWS,
    keeps_sums: false,
    part: PART,
    whole: 0,
    group: 0,
    in_place_rows: 24,
    pack_a,
    pack_b,
    tile,
    lines: Some(lines),
    stores_f16: true,
    around: None,
};

/// Calls the micro-kernel for the rows and halves of columns that a tile has.
macro_rules! of_size {
    ($store:ident, $is_line:literal, $arguments:tt) => {
        match ($store.rows.div_ceil(2), $store.cols.div_ceil(8)) {
            (1, 1) => multiply::<2, 1, $is_line> $arguments,
            (1, _) => multiply::<2, 2, $is_line> $arguments,
            (2, 1) => multiply::<4, 1, $is_line> $arguments,
            (2, _) => multiply::<4, 2, $is_line> $arguments,
            (_, 1) => multiply::<MR, 1, $is_line> $arguments,
            _ => multiply::<MR, 2, $is_line> $arguments,
        }
    };
}

/// Multiplies a panel of A by columns of B over `words` depths, and stores the tile.
unsafe fn tile(words: usize, a: *const u32, b: &Columns, store: &Store) {
    // SAFETY: passed on.
    unsafe { of_size!(store, false, (words, (a.cast(), 0), (b.at, b.step), store)) };
}

/// As for a panel of A, for rows that lie `line` bytes apart, and a panel of B.
unsafe fn lines(words: usize, a: (*const u8, isize), b: *const u32, store: &Store) {
    // SAFETY: passed on.
    unsafe { of_size!(store, true, (words, a, (b, NR), store)) };
}

/// Multiplies rows of A, whole lines or those of a panel.
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply<const ROWS: usize, const HALVES: usize, const IS_LINE: bool>(
    words: usize,
    (a, line): (*const u8, isize),
    (b, step): (*const u32, usize),
    store: &Store,
) {
    let mut acc = [[_mm256_setzero_ps(); HALVES]; ROWS];
    // Rows that are not stored are read again in the place of others.
    let last = store.rows - 1;
    let lines: [*const f32; ROWS] =
        std::array::from_fn(|i| a.wrapping_offset(i.min(last) as isize * line).cast());
    let (mut panel, mut b) = (a.cast::<f32>(), b.cast::<f32>());
    // SAFETY: rows and columns hold `words` depths.
    unsafe {
        store.prefetch();
        for word in 0..words {
            let first = _mm256_loadu_ps(b);
            let second = if HALVES > 1 { _mm256_loadu_ps(b.add(8)) } else { first };
            for (i, acc) in acc.iter_mut().enumerate() {
                let x = if IS_LINE { lines[i].add(word) } else { panel.add(i) };
                let x = _mm256_set1_ps(x.read_unaligned());
                acc[0] = _mm256_fmadd_ps(x, first, acc[0]);
                if HALVES > 1 {
                    acc[HALVES - 1] = _mm256_fmadd_ps(x, second, acc[HALVES - 1]);
                }
            }
            panel = panel.wrapping_add(MR);
            b = b.wrapping_add(step);
        }
        let is_plain = store.partial.is_null() && store.row_bias.is_null();
        if is_plain && store.elem == Elem::F32 && store.cols == 8 * HALVES {
            return store_plain(&acc, store);
        }
        let mut sums = [[0f32; NR]; ROWS];
        for (acc, sums) in acc.iter().zip(&mut sums) {
            for (half, acc) in acc.iter().enumerate() {
                _mm256_storeu_ps(sums.as_mut_ptr().add(8 * half), *acc);
            }
        }
        store.finish::<NR>(sums.as_ptr().cast());
    }
}

/// Stores the most frequent kind of tile from registers, in which its sums stay only if all loops over them are unrolled.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn store_plain<const ROWS: usize, const HALVES: usize>(
    acc: &[[__m256; HALVES]; ROWS],
    store: &Store,
) {
    let alpha = _mm256_set1_ps(store.alpha);
    for (i, line) in acc.iter().enumerate() {
        if i < store.rows {
            for (half, sum) in line.iter().enumerate() {
                // SAFETY: all columns and these rows are inside the tile.
                unsafe {
                    let at = i as isize * store.c_row + half as isize * 8;
                    let c = store.c.cast::<f32>().offset(at);
                    let mut value = _mm256_mul_ps(*sum, alpha);
                    if store.load_c {
                        value = _mm256_add_ps(value, _mm256_loadu_ps(c));
                    }
                    if !store.bias.is_null() {
                        value = _mm256_add_ps(value, _mm256_loadu_ps(store.bias.add(8 * half)));
                    }
                    _mm256_storeu_ps(c, value);
                }
            }
        }
    }
}
