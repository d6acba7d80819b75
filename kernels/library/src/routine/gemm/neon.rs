//! Micro-kernel for NEON: a tile of 12 x 8 f32 results in 24 registers. Tiles at the edges of C compute only 4 or 8 rows, or 4 columns.

use std::arch::aarch64::*;

use super::kernel::{COLUMNS, Columns, Kernel, PART, ROWS};
use super::pack::neon::{pack_a, pack_b};
use super::store::Store;

/// Rows of a tile.
pub(super) const MR: usize = 12;
/// Columns of a tile.
pub(super) const NR: usize = 8;

/// f32 numbers.
pub(super) static F32: Kernel = Kernel {
    name: "neon",
    rows: MR,
    columns: NR,
    pack: 1,
    parts: 1,
    granule: 1,
    depths: 512,
    block_columns: COLUMNS,
    block_rows: ROWS,
    keeps_sums: false,
    part: PART,
    whole: 0,
    group: 0,
    in_place_rows: 2 * MR,
    pack_a,
    pack_b,
    tile,
    lines: None,
    stores_f16: true,
    around: None,
};

/// Multiplies a panel of A by columns of B over `words` depths, and stores the tile.
unsafe fn tile(words: usize, a: *const u32, b: &Columns, store: &Store) {
    let (a, b) = (a.cast(), (b.at.cast(), b.step));
    // SAFETY: passed on.
    unsafe {
        match (store.rows.div_ceil(4), store.cols.div_ceil(4)) {
            (1, 1) => multiply::<1, 1>(words, a, b, store),
            (1, _) => multiply::<1, 2>(words, a, b, store),
            (2, 1) => multiply::<2, 1>(words, a, b, store),
            (2, _) => multiply::<2, 2>(words, a, b, store),
            (_, 1) => multiply::<3, 1>(words, a, b, store),
            _ => multiply::<3, 2>(words, a, b, store),
        }
    }
}

/// Adds products of columns and each lane of four rows.
macro_rules! add_lanes {
    ($acc:expr, $rows:expr, $columns:expr, $($lane:literal)*) => {
        $(for (acc, columns) in $acc[$lane].iter_mut().zip(&$columns) {
            *acc = vfmaq_laneq_f32::<$lane>(*acc, *columns, $rows);
        })*
    };
}

/// Multiplies `ROWS` times four rows by `COLS` times four columns.
#[target_feature(enable = "neon")]
unsafe fn multiply<const ROWS: usize, const COLS: usize>(
    words: usize,
    a: *const f32,
    (b, step): (*const f32, usize),
    store: &Store,
) {
    let (mut a, mut b) = (a, b);
    let mut acc = [[[vdupq_n_f32(0.0); COLS]; 4]; ROWS];
    // SAFETY: the panel and the columns hold `words` depths.
    unsafe {
        for _ in 0..words {
            let columns: [float32x4_t; COLS] = std::array::from_fn(|j| vld1q_f32(b.add(4 * j)));
            for (i, acc) in acc.iter_mut().enumerate() {
                let rows = vld1q_f32(a.add(4 * i));
                add_lanes!(acc, rows, columns, 0 1 2 3);
            }
            a = a.add(MR);
            b = b.wrapping_add(step);
        }
        let mut sums = [[0f32; NR]; MR];
        for (acc, sums) in acc.as_flattened().iter().zip(&mut sums) {
            for (j, acc) in acc.iter().enumerate() {
                vst1q_f32(sums.as_mut_ptr().add(4 * j), *acc);
            }
        }
        store.finish::<NR>(sums.as_flattened().as_ptr());
    }
}
