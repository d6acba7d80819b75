//! Micro-kernel for AMX-BF16: a tile of 32 x 32 results in four tile registers of 16 x 16, by products of two registers of A and two of B.
//!
//! A register of A holds 16 rows of 32 bf16 depths, one of B 16 pairs of depths of 16 columns. The loop is written over [`Tiles`], so that
//! the tests of every machine run it over registers in memory.
//!
//! Source: Intel, Architecture Instruction Set Extensions Programming Reference (319433), chapter 3.

mod hardware;
#[cfg(test)]
mod software;
pub(super) mod split;
#[cfg(test)]
mod tests;

use std::mem::MaybeUninit;

use super::avx512;
use super::kernel::{COLUMNS, Columns, Kernel, PART, ROWS, WHOLE};
use super::pack::amx::{pack_a, pack_b};
use super::store::Store;

use hardware::Hardware;

/// Rows and columns of a register of results.
const SIDE: usize = 16;
/// Rows of a tile.
pub(super) const MR: usize = 2 * SIDE;
/// Columns of a tile.
pub(super) const NR: usize = 2 * SIDE;
/// Words of a row of a register.
pub(super) const WORDS: usize = 16;
/// The most depths of a block.
const DEPTHS: usize = 768;
/// Depths of which a panel of A stays in the first-level cache while those of B, and further depths of its own, pass by.
const NEAR_DEPTHS: usize = 640;
/// Bytes of a row of a register.
const ROW_BYTES: usize = WORDS * size_of::<u32>();

/// The eight tile registers of a thread. All are configured to 16 rows of 64 bytes.
pub(super) trait Tiles {
    /// Configures the registers of this thread.
    fn configure();
    /// Gives them up.
    fn release();
    /// Clears register `T`.
    ///
    /// # Safety
    /// The registers must be configured.
    unsafe fn zero<const T: u8>();
    /// Loads register `T` from 16 rows that are `stride` bytes apart.
    ///
    /// # Safety
    /// The registers must be configured, the rows readable.
    unsafe fn load<const T: u8>(from: *const u32, stride: usize);
    /// As [`Tiles::load`], for rows that are not needed soon again: they do not drive others out of the first-level cache.
    ///
    /// # Safety
    /// As for [`Tiles::load`].
    unsafe fn load_passing<const T: u8>(from: *const u32, stride: usize);
    /// Adds to the f32 numbers of register `C` the products of the pairs of bf16 of `A` and `B`.
    ///
    /// # Safety
    /// The registers must be configured.
    unsafe fn dot<const C: u8, const A: u8, const B: u8>();
    /// Stores register `T` as 16 rows that are `stride` bytes apart.
    ///
    /// # Safety
    /// The registers must be configured, the rows writable.
    unsafe fn store<const T: u8>(to: *mut f32, stride: usize);
}

/// The kernel of this processor's registers.
pub(super) static HARDWARE: Kernel = kernel::<Hardware>("amx-bf16");
/// The kernel of registers in memory.
#[cfg(test)]
pub(super) static SOFTWARE: Kernel = kernel::<software::Software>("amx-software");

const fn kernel<T: Tiles>(name: &'static str) -> Kernel {
    Kernel {
        name,
        rows: MR,
        columns: NR,
        pack: 2,
        granule: 2 * WORDS,
        parts: 1,
        depths: DEPTHS,
        block_columns: COLUMNS,
        block_rows: ROWS,
        keeps_sums: false,
        part: 4 * PART,
        whole: WHOLE,
        group: 12,
        in_place_rows: 0,
        pack_a,
        pack_b,
        tile: tile::<T>,
        lines: None,
        stores_f16: false,
        around: Some([T::configure, T::release]),
    }
}

/// Whether this processor has the instructions, and the system lets this process use them.
pub(super) fn is_available() -> bool {
    hardware::is_available()
}

/// Runs chains of products in registers and returns their operations.
pub(super) fn products(rounds: usize) -> usize {
    // Products of zeros would take less power than others, at a higher frequency.
    let numbers: [u32; SIDE * WORDS] = std::array::from_fn(|i| {
        let number = |i: usize| (i as f32 * 0.618).fract().to_bits() >> 16;
        number(2 * i) | number(2 * i + 1) << 16
    });
    Hardware::configure();
    // SAFETY: the registers are configured, and as large as the numbers.
    unsafe {
        Hardware::load::<4>(numbers.as_ptr(), ROW_BYTES);
        Hardware::load::<5>(numbers.as_ptr(), ROW_BYTES);
        for _ in 0..rounds {
            Hardware::dot::<0, 4, 5>();
            Hardware::dot::<1, 4, 5>();
            Hardware::dot::<2, 4, 5>();
            Hardware::dot::<3, 4, 5>();
        }
    }
    Hardware::release();
    4 * 2 * SIDE * SIDE * 2 * WORDS * rounds
}

/// The sums of a tile.
#[repr(align(64))]
struct Sums([[f32; NR]; MR]);

/// Multiplies a panel of A by a panel of B over `words` words of each line, and stores the tile.
unsafe fn tile<T: Tiles>(words: usize, a: *const u32, b: &Columns, store: &Store) {
    let mut sums = MaybeUninit::<Sums>::uninit();
    let to = sums.as_mut_ptr().cast::<f32>();
    // SAFETY: passed on; all registers are stored, so all numbers are written.
    let sums = unsafe {
        match (store.rows > SIDE, store.cols > SIDE) {
            (true, true) => multiply::<T, true, true>(words, a, b, store, to),
            (true, false) => multiply::<T, true, false>(words, a, b, store, to),
            (false, true) => multiply::<T, false, true>(words, a, b, store, to),
            (false, false) => multiply::<T, false, false>(words, a, b, store, to),
        }
        sums.assume_init_ref()
    };
    finish(store, sums);
}

/// Multiplies 16 rows, or `LOWER` 32, by 16 columns, or `RIGHT` 32, and writes the sums as rows of [`NR`].
#[inline(always)]
unsafe fn multiply<T: Tiles, const LOWER: bool, const RIGHT: bool>(
    words: usize,
    a: *const u32,
    &Columns { at: b, step, .. }: &Columns,
    store: &Store,
    to: *mut f32,
) {
    // Those of the tile below are fetched little by little, as loads of operands wait for the same buffers.
    let rows = MR.div_ceil(words / WORDS);
    let mut below = MR..2 * MR;
    let mut fetch = || below.by_ref().take(rows).for_each(|row| store.prefetch_below(row));
    let b_bytes = step * size_of::<u32>();
    let c_bytes = NR * size_of::<f32>();
    // SAFETY: the caller vouches for the panels and for the configuration; the sums are those of the registers.
    unsafe {
        T::zero::<0>();
        T::zero::<1>();
        T::zero::<2>();
        T::zero::<3>();
        let near = words.min(NEAR_DEPTHS / 2);
        for word in (0..near).step_by(WORDS) {
            let (a, b) = (a.add(word * MR), b.add(word * step));
            fetch();
            add_products::<T, LOWER, RIGHT, true>(a, b, b_bytes);
        }
        for word in (near..words).step_by(WORDS) {
            let (a, b) = (a.add(word * MR), b.add(word * step));
            fetch();
            add_products::<T, LOWER, RIGHT, false>(a, b, b_bytes);
        }
        T::store::<0>(to, c_bytes);
        T::store::<1>(to.add(SIDE), c_bytes);
        T::store::<2>(to.add(SIDE * NR), c_bytes);
        T::store::<3>(to.add(SIDE * NR + SIDE), c_bytes);
    }
}

/// Adds the products of a register of depths to registers 0 to 3.
#[inline(always)]
unsafe fn add_products<T: Tiles, const LOWER: bool, const RIGHT: bool, const NEAR: bool>(
    a: *const u32,
    b: *const u32,
    b_bytes: usize,
) {
    // SAFETY: the caller vouches for the depths.
    unsafe {
        T::load_passing::<6>(b, b_bytes);
        load_left::<T, 4, NEAR>(a);
        T::dot::<0, 4, 6>();
        if RIGHT {
            T::load_passing::<7>(b.add(SIDE), b_bytes);
            T::dot::<1, 4, 7>();
        }
        if LOWER {
            load_left::<T, 5, NEAR>(a.add(SIDE * WORDS));
            T::dot::<2, 5, 6>();
        }
        if LOWER && RIGHT {
            T::dot::<3, 5, 7>();
        }
    }
}

#[inline(always)]
unsafe fn load_left<T: Tiles, const R: u8, const NEAR: bool>(a: *const u32) {
    // SAFETY: passed on.
    unsafe {
        match NEAR {
            true => T::load::<R>(a, ROW_BYTES),
            false => T::load_passing::<R>(a, ROW_BYTES),
        }
    }
}

/// Stores the sums of a tile.
#[inline(always)]
fn finish(store: &Store, sums: &Sums) {
    if crate::simd::has_bf16() {
        // SAFETY: the features are present; the caller of the micro-kernel vouches for the store.
        unsafe { avx512::store_sums(&sums.0, store) };
    } else {
        finish_vectorized(store, &sums.0);
    }
}

crate::simd::vectorized! {
    fn finish_vectorized(store: &Store, sums: &[[f32; NR]; MR]) {
        // SAFETY: the caller of the micro-kernel vouches for the store.
        unsafe { store.finish::<NR>(sums.as_flattened().as_ptr()) }
    }
}
