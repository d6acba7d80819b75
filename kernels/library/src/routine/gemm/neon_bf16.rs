//! Micro-kernel for `bfmmla`: a tile of 12 x 8 results in 24 registers of 2 x 2, each by products of four depths of two rows and two
//! columns. Tiles at the edges of C compute only 4 or 8 rows, or 4 columns.
//!
//! The instruction treats subnormal numbers as zero and rounds sums to odd.

use std::arch::aarch64::*;
use std::arch::asm;

use super::kernel::{COLUMNS, Columns, Kernel, PART, ROWS};
use super::neon::{MR, NR};
use super::pack::neon::{pack_a_fours, pack_b_fours};
use super::store::Store;

/// Depths that one instruction multiplies.
const DEPTHS: usize = 4;
/// Words of these for a line.
pub(super) const WORDS: usize = DEPTHS / 2;

/// Groups of four bf16.
pub(super) static BF16: Kernel = Kernel {
    name: "neon-bf16",
    rows: MR,
    columns: NR,
    pack: 2,
    parts: 1,
    granule: DEPTHS,
    depths: 1024,
    block_columns: COLUMNS,
    block_rows: ROWS,
    keeps_sums: false,
    part: PART,
    whole: 0,
    group: 0,
    in_place_rows: 0,
    pack_a: pack_a_fours,
    pack_b: pack_b_fours,
    tile,
    lines: None,
    stores_f16: true,
    around: None,
};

/// Multiplies a panel of A by a panel of B over `words` words of each line, and stores the tile.
unsafe fn tile(words: usize, a: *const u32, &Columns { at: b, .. }: &Columns, store: &Store) {
    // SAFETY: passed on.
    unsafe {
        match (store.rows.div_ceil(4), store.cols.div_ceil(4)) {
            (1, 1) => multiply::<2, 2>(words, a, b, store),
            (1, _) => multiply::<2, 4>(words, a, b, store),
            (2, 1) => multiply::<4, 2>(words, a, b, store),
            (2, _) => multiply::<4, 4>(words, a, b, store),
            (_, 1) => multiply::<6, 2>(words, a, b, store),
            _ => multiply::<6, 4>(words, a, b, store),
        }
    }
}

/// Multiplies pairs of rows by pairs of columns.
#[target_feature(enable = "neon,bf16")]
unsafe fn multiply<const ROWS: usize, const COLS: usize>(
    words: usize,
    a: *const u32,
    b: *const u32,
    store: &Store,
) {
    let (mut a, mut b) = (a, b);
    let mut acc = [[vdupq_n_f32(0.0); COLS]; ROWS];
    // SAFETY: the panels hold `words` words of each line.
    unsafe {
        for _ in 0..words / WORDS {
            let columns: [uint32x4_t; COLS] = std::array::from_fn(|j| vld1q_u32(b.add(4 * j)));
            for (i, acc) in acc.iter_mut().enumerate() {
                let rows = vld1q_u32(a.add(4 * i));
                for (acc, columns) in acc.iter_mut().zip(columns) {
                    *acc = add_products(*acc, rows, columns);
                }
            }
            a = a.add(MR * WORDS);
            b = b.add(NR * WORDS);
        }
        let mut sums = [[0f32; NR]; MR];
        for (i, acc) in acc.iter().enumerate() {
            for (j, acc) in acc.iter().enumerate() {
                vst1_f32(sums[2 * i].as_mut_ptr().add(2 * j), vget_low_f32(*acc));
                vst1_f32(sums[2 * i + 1].as_mut_ptr().add(2 * j), vget_high_f32(*acc));
            }
        }
        store.finish::<NR>(sums.as_flattened().as_ptr());
    }
}

/// Adds the products of two rows and two columns of four bf16 numbers, for which the compiler has no stable function.
#[target_feature(enable = "neon,bf16")]
#[inline]
fn add_products(acc: float32x4_t, rows: uint32x4_t, columns: uint32x4_t) -> float32x4_t {
    let mut acc = acc;
    // SAFETY: the instruction only reads and writes these registers.
    unsafe {
        asm!(
            "bfmmla {:v}.4s, {:v}.8h, {:v}.8h",
            inout(vreg) acc, in(vreg) rows, in(vreg) columns,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    acc
}

/// Runs chains of products in registers and returns their operations.
#[target_feature(enable = "neon,bf16")]
pub(super) fn products(rounds: usize) -> usize {
    let ones = std::hint::black_box(vdupq_n_u32(0x3f80_3f80));
    let mut chains = [vdupq_n_f32(1.0); 12];
    for _ in 0..rounds {
        for chain in &mut chains {
            *chain = add_products(*chain, ones, ones);
        }
    }
    std::hint::black_box(chains);
    2 * 2 * 2 * DEPTHS * chains.len() * rounds
}
