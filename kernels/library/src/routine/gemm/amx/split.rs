//! Products of f32 numbers by the tile registers: each operand is the sum of three bf16 numbers, and six products of these are added in f32.
//!
//! With `x = x0 + x1 + x2`, each part the bf16 number nearest to what the ones before leave, the six are those whose sizes are within
//! 2⁻¹⁶ of that of `x y`: `x0 y0`, `x0 y1`, `x1 y0`, `x1 y1`, `x0 y2`, `x2 y0`. Those left out amount to at most 2⁻²³ of `|x y|`, as
//! much as the rounding of one f32 product and sum; the sums of a register are shorter than those of one multiply-add after the other, so
//! results are nearer to the exact ones than those of f32 instructions. A number below 2⁻¹⁰² loses its last bits, as parts that are
//! subnormal count as zero. An infinite part times one that is zero is no number, so tiles whose operands are not all finite are multiplied
//! with f32 instructions: packing marks these.
//!
//! Source: Henry, Tang, Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations (2019).

use std::arch::x86_64::{_MM_HINT_NTA, _mm_prefetch};
use std::mem::MaybeUninit;

use super::hardware::Hardware;
use super::{MR, NR, ROW_BYTES, SIDE, Sums, Tiles, WORDS, finish};
use crate::dtype::Elem;
use crate::routine::gemm::kernel::{Columns, Kernel};
use crate::routine::gemm::pack::split::{pack_a, pack_b};
use crate::routine::gemm::store::Store;

/// Parts of a number.
pub(in crate::routine::gemm) const PARTS: usize = 3;
/// Products of parts that are added.
const PRODUCTS: usize = 6;
/// Words of one part of all lines of a panel, of as many depths as a register holds.
pub(in crate::routine::gemm) const PART_WORDS: usize = MR * WORDS;
/// All parts of the numbers of a granule, the depths that a register holds, of all lines of a panel.
pub(in crate::routine::gemm) type Parts = [[u32; PART_WORDS]; PARTS];
/// Words of all parts.
const ALL_WORDS: usize = PARTS * PART_WORDS;
/// Where of the words of all parts there is [`MARK`] if one of the numbers is not finite, instead of the third parts of the first two.
pub(in crate::routine::gemm) const MARKED: usize = 2 * PART_WORDS;
/// Two third parts that no finite numbers have.
pub(in crate::routine::gemm) const MARK: u32 = u32::MAX;
/// The most depths of a block: a panel of A fills half of the first-level cache.
const DEPTHS: usize = 128;

/// The kernel of this processor's registers.
pub(in crate::routine::gemm) static HARDWARE: Kernel = kernel::<Hardware>("amx-bf16x3");
/// The kernel of registers in memory.
#[cfg(test)]
pub(in crate::routine::gemm) static SOFTWARE: Kernel =
    kernel::<super::software::Software>("amx-software-x3");

const fn kernel<T: Tiles>(name: &'static str) -> Kernel {
    Kernel {
        parts: PARTS,
        depths: DEPTHS,
        block_columns: 768,
        block_rows: 1024,
        keeps_sums: true,
        pack_a,
        pack_b,
        tile: tile::<T>,
        ..super::kernel::<T>(name)
    }
}

/// Multiplies a panel of A by a panel of B over `words` words of each line, and stores the tile.
unsafe fn tile<T: Tiles>(words: usize, a: *const u32, b: &Columns, store: &Store) {
    let granules = words / (PARTS * WORDS);
    let panels = Panels { a, b: b.at, granules, right_stays: b.stays };
    let mut sums = MaybeUninit::<Sums>::uninit();
    let local = Square { at: sums.as_mut_ptr().cast(), row: NR };
    // SAFETY: the caller vouches for the panels, the store and the configuration of the registers. These read and write whole rows of C, or
    // of the sums, of which all are written before any is read.
    unsafe {
        if panels.are_marked() {
            local.at.cast::<Sums>().write(panels.products_of_singles());
            return finish(store, sums.assume_init_ref());
        }
        let is_whole = store.rows.is_multiple_of(SIDE) && store.cols.is_multiple_of(SIDE);
        let (former, rest) = former(store);
        let is_plain = rest.partial.is_null() && rest.bias.is_null() && rest.row_bias.is_null();
        let is_plain = is_plain && !rest.load_c && rest.elem == Elem::F32 && rest.alpha == 1.0;
        let former = match former {
            Some(former) if !is_whole => {
                local.at.cast::<Sums>().write(former.padded(store));
                Some(local)
            }
            former => former,
        };
        if is_whole && is_plain {
            let c = Square { at: rest.c.cast(), row: rest.c_row as usize };
            panels.add_products::<T>(store, former, c, false);
        } else {
            panels.add_products::<T>(store, former, local, true);
            finish(&rest, sums.assume_init_ref());
        }
    }
}

/// A matrix of f32 numbers in memory, whose rows are `row` numbers apart.
#[derive(Clone, Copy)]
struct Square {
    at: *mut f32,
    row: usize,
}

impl Square {
    /// The part at a row and a column.
    fn skip(self, row: usize, column: usize) -> Square {
        Square { at: self.at.wrapping_add(row * self.row + column), ..self }
    }

    /// The numbers of a tile, and zeros around them.
    #[cold]
    unsafe fn padded(self, store: &Store) -> Sums {
        let mut sums = Sums([[0.0; NR]; MR]);
        for (i, sums) in sums.0.iter_mut().enumerate().take(store.rows) {
            // SAFETY: the caller vouches for the numbers of the tile.
            let row = unsafe { std::slice::from_raw_parts(self.skip(i, 0).at, store.cols) };
            sums[..store.cols].copy_from_slice(row);
        }
        sums
    }
}

/// The numbers to which the products of a tile are added, and what is left to be stored with the sums. They do not depend on the size of
/// the tile, so that a row has the same bits in any.
#[inline(always)]
fn former(store: &Store) -> (Option<Square>, Store) {
    let row = |row: isize| row as usize;
    if store.alpha != 1.0 {
        (None, *store)
    } else if !store.partial.is_null() {
        let partial = Square { at: store.partial.cast_mut(), row: row(store.partial_row) };
        (Some(partial), Store { partial: std::ptr::null(), ..*store })
    } else if store.load_c && store.elem == Elem::F32 {
        let c = Square { at: store.c.cast(), row: row(store.c_row) };
        (Some(c), Store { load_c: false, ..*store })
    } else {
        (None, *store)
    }
}

/// A packed panel of A and one of B.
#[derive(Clone, Copy)]
struct Panels {
    a: *const u32,
    b: *const u32,
    granules: usize,
    /// That of B stays in the first-level cache.
    right_stays: bool,
}

impl Panels {
    /// Whether one has a number that is not finite.
    #[inline(always)]
    unsafe fn are_marked(self) -> bool {
        let is_marked = |panel: *const u32, granule: usize| {
            // SAFETY: the caller vouches for the panels.
            unsafe { *panel.add(granule * ALL_WORDS + MARKED) == MARK }
        };
        (0..self.granules).any(|granule| is_marked(self.a, granule) || is_marked(self.b, granule))
    }

    /// Adds the products to the former numbers, and stores the sums, of unused registers, too, if `all`.
    #[inline(always)]
    unsafe fn add_products<T: Tiles>(
        self,
        store: &Store,
        former: Option<Square>,
        to: Square,
        all: bool,
    ) {
        // SAFETY: passed on.
        unsafe {
            match (store.rows > SIDE, store.cols > SIDE) {
                (true, true) => self.multiply::<T, true, true>(store, former, to, all),
                (true, false) => self.multiply::<T, true, false>(store, former, to, all),
                (false, true) => self.multiply::<T, false, true>(store, former, to, all),
                (false, false) => self.multiply::<T, false, false>(store, former, to, all),
            }
        }
    }

    /// Multiplies 16 rows, or `LOWER` 32, by 16 columns, or `RIGHT` 32.
    #[inline(always)]
    unsafe fn multiply<T: Tiles, const LOWER: bool, const RIGHT: bool>(
        self,
        store: &Store,
        former: Option<Square>,
        to: Square,
        all: bool,
    ) {
        let rows = MR.div_ceil(self.granules);
        let mut below = MR..2 * MR;
        // SAFETY: passed on.
        unsafe {
            begin::<T, 0>(former, (0, 0), true);
            begin::<T, 1>(former, (0, SIDE), RIGHT);
            begin::<T, 2>(former, (SIDE, 0), LOWER);
            begin::<T, 3>(former, (SIDE, SIDE), LOWER && RIGHT);
            for granule in 0..self.granules {
                below.by_ref().take(rows).for_each(|row| store.prefetch_below(row));
                let at = granule * ALL_WORDS;
                let (a, b) = (self.a.wrapping_add(at), self.b.wrapping_add(at));
                let next = if self.right_stays { a } else { b }.wrapping_add(ALL_WORDS);
                products::<T, LOWER, RIGHT>(a, b, next);
            }
            end::<T, 0>(to, (0, 0), true);
            end::<T, 1>(to, (0, SIDE), all || RIGHT);
            end::<T, 2>(to, (SIDE, 0), all || LOWER);
            end::<T, 3>(to, (SIDE, SIDE), all || (LOWER && RIGHT));
        }
    }

    /// The products of all depths with f32 instructions.
    #[cold]
    unsafe fn products_of_singles(self) -> Sums {
        let mut sums = Sums([[0.0; NR]; MR]);
        for granule in 0..self.granules {
            // SAFETY: the caller vouches for the panels.
            let [a, b] = unsafe {
                [self.a, self.b].map(|panel| &*panel.add(granule * ALL_WORDS).cast::<Parts>())
            };
            add_products_of_singles(a, b, &mut sums.0);
        }
        sums
    }
}

crate::simd::vectorized! {
    fn add_products_of_singles(a: &Parts, b: &Parts, sums: &mut [[f32; NR]; MR]) {
        let (a, b) = (numbers(a), numbers(b));
        for (half, a) in a.iter().enumerate() {
            for (a, sums) in a.chunks_exact(WORDS).zip(sums.iter_mut()) {
                let mut line = *sums;
                for (x, b) in a.iter().zip(b[half].chunks_exact(NR)) {
                    line.iter_mut().zip(b).for_each(|(sum, y)| *sum = x.mul_add(*y, *sum));
                }
                *sums = line;
            }
        }
    }
}

/// The numbers of the lower halves of all words, and those of the upper ones.
#[inline(always)]
fn numbers(parts: &Parts) -> [[f32; PART_WORDS]; 2] {
    let mut parts = *parts;
    let mark = &mut parts.as_flattened_mut()[MARKED];
    if *mark == MARK {
        *mark = 0;
    }
    let [first, second, third] = &parts;
    [16, 0].map(|shift| {
        let number = |word: u32| f32::from_bits(word << shift & 0xffff_0000);
        std::array::from_fn(|i| number(first[i]) + number(second[i]) + number(third[i]))
    })
}

/// Loads the former numbers of a register of results, if it is used and there are some, else clears it.
#[inline(always)]
unsafe fn begin<T: Tiles, const R: u8>(
    former: Option<Square>,
    (row, column): (usize, usize),
    is_used: bool,
) {
    // SAFETY: the caller vouches for the numbers.
    unsafe {
        match former {
            Some(former) if is_used => {
                let from = former.skip(row, column);
                T::load::<R>(from.at.cast(), from.row * size_of::<f32>());
            }
            _ => T::zero::<R>(),
        }
    }
}

/// Stores a register of results, if it is used.
#[inline(always)]
unsafe fn end<T: Tiles, const R: u8>(to: Square, (row, column): (usize, usize), is_used: bool) {
    let to = to.skip(row, column);
    if is_used {
        // SAFETY: the caller vouches for the numbers.
        unsafe { T::store::<R>(to.at, to.row * size_of::<f32>()) };
    }
}

/// Adds the six products of the parts of a granule to registers 0 to 3, the least first. From one to the next only one operand changes.
/// Meanwhile `next` is fetched, some lines beside each product, as more at once would delay loads.
#[inline(always)]
unsafe fn products<T: Tiles, const LOWER: bool, const RIGHT: bool>(
    a: *const u32,
    b: *const u32,
    next: *const u32,
) {
    // SAFETY: the caller vouches for the panels.
    unsafe {
        right::<T, RIGHT>(b, 2);
        left::<T, LOWER>(a, 0);
        fetch(next, 0);
        dot::<T, LOWER, RIGHT>();
        right::<T, RIGHT>(b, 1);
        fetch(next, 1);
        dot::<T, LOWER, RIGHT>();
        left::<T, LOWER>(a, 1);
        fetch(next, 2);
        dot::<T, LOWER, RIGHT>();
        right::<T, RIGHT>(b, 0);
        fetch(next, 3);
        dot::<T, LOWER, RIGHT>();
        left::<T, LOWER>(a, 2);
        fetch(next, 4);
        dot::<T, LOWER, RIGHT>();
        left::<T, LOWER>(a, 0);
        fetch(next, 5);
        dot::<T, LOWER, RIGHT>();
    }
}

/// Fetches a sixth of the lines of a granule, which need not exist, past the second-level cache, in which it is already.
#[inline(always)]
fn fetch(granule: *const u32, part: usize) {
    const LINES: usize = ALL_WORDS / WORDS / PRODUCTS;
    for line in part * LINES..(part + 1) * LINES {
        // SAFETY: every x86-64 processor has the instruction, which may take any address.
        unsafe { _mm_prefetch::<_MM_HINT_NTA>(granule.wrapping_add(line * WORDS).cast()) };
    }
}

/// Loads registers 4 and 5 from a part of A.
#[inline(always)]
unsafe fn left<T: Tiles, const LOWER: bool>(a: *const u32, part: usize) {
    // SAFETY: the caller vouches for the part.
    unsafe {
        let a = a.add(part * PART_WORDS);
        T::load::<4>(a, ROW_BYTES);
        if LOWER {
            T::load::<5>(a.add(SIDE * WORDS), ROW_BYTES);
        }
    }
}

/// Loads registers 6 and 7 from a part of B.
#[inline(always)]
unsafe fn right<T: Tiles, const RIGHT: bool>(b: *const u32, part: usize) {
    let b_bytes = NR * size_of::<u32>();
    // SAFETY: the caller vouches for the part.
    unsafe {
        let b = b.add(part * PART_WORDS);
        T::load::<6>(b, b_bytes);
        if RIGHT {
            T::load::<7>(b.add(SIDE), b_bytes);
        }
    }
}

/// Adds the products of registers 4 and 5 and registers 6 and 7 to registers 0 to 3.
#[inline(always)]
unsafe fn dot<T: Tiles, const LOWER: bool, const RIGHT: bool>() {
    // SAFETY: the caller vouches for the configuration.
    unsafe {
        T::dot::<0, 4, 6>();
        if RIGHT {
            T::dot::<1, 4, 7>();
        }
        if LOWER {
            T::dot::<2, 5, 6>();
        }
        if LOWER && RIGHT {
            T::dot::<3, 5, 7>();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;
    use crate::routine::gemm::{Buffers, Gemm, packed};

    /// The product of row-major matrices by registers in memory.
    fn product([m, n, k]: [usize; 3], a: &[f32], b: &[f32]) -> Vec<f32> {
        let mut c = vec![7f32; m * n];
        let gemm = Gemm::row_major(Elem::F32, Elem::F32, m, n, k);
        let at = Buffers {
            a: a.as_ptr().cast(),
            b: b.as_ptr().cast(),
            c: c.as_mut_ptr().cast(),
            bias: std::ptr::null(),
        };
        // SAFETY: the matrices have these sizes.
        unsafe { packed::run(&SOFTWARE, &gemm, &Pool::new(2), at) };
        c
    }

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        let number = |i: usize| ((i * 7919 + seed * 104_729) % 20_011) as f32 / 10_006.0 - 1.0;
        (0..count).map(number).collect()
    }

    /// Root mean squares of the errors, beside those of f32 multiply-adds one after the other.
    #[test]
    fn sums_are_nearer_than_those_of_f32() {
        let size @ [m, n, k] = [40, 48, 700];
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
        let got = product(size, &a, &b);
        let (mut error, mut error_of_f32) = (0.0, 0.0);
        for i in 0..m {
            for j in 0..n {
                let pairs = (0..k).map(|p| (a[i * k + p], b[p * n + j]));
                let exact: f64 = pairs.clone().map(|(x, y)| f64::from(x) * f64::from(y)).sum();
                let single = pairs.fold(0f32, |sum, (x, y)| x.mul_add(y, sum));
                error += (f64::from(got[i * n + j]) - exact).powi(2);
                error_of_f32 += (f64::from(single) - exact).powi(2);
            }
        }
        assert!(error < error_of_f32, "{error:e} {error_of_f32:e}");
        // One part less would be some hundred times as far.
        assert!(error.sqrt() < 0.7 * error_of_f32.sqrt(), "{error:e} {error_of_f32:e}");
    }

    /// Some rows and columns have the bits that they have in the whole, at whatever place in a tile.
    #[test]
    fn the_order_of_sums_depends_on_the_depth_alone() {
        let [m, n, k] = [70, 100, 300];
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
        let whole = product([m, n, k], &a, &b);
        for (first, rows, columns) in [(0, 33, 100), (5, 48, 47), (40, 17, 80)] {
            let left = &a[first * k..][..rows * k];
            let right: Vec<f32> = b.chunks(n).flat_map(|row| &row[..columns]).copied().collect();
            let part = product([rows, columns, k], left, &right);
            for (i, row) in part.chunks(columns).enumerate() {
                assert_eq!(row, &whole[(first + i) * n..][..columns], "row {i} from {first}");
            }
        }
    }

    /// Numbers that are not finite, and those near the largest, give what f32 multiply-adds do.
    #[test]
    fn infinite_operands_are_multiplied_as_f32() {
        let size @ [m, n, k] = [64, 64, 160];
        let special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 3.0e38, -3.39e38];
        for (case, special) in special.into_iter().enumerate() {
            let (mut a, b) = (numbers(m * k, 1), numbers(k * n, 2));
            a[33 * k + 130] = special;
            a[2 * k] = special;
            let got = product(size, &a, &b);
            for i in 0..m {
                for j in 0..n {
                    let pairs = (0..k).map(|p| (a[i * k + p], b[p * n + j]));
                    let want = pairs.fold(0f32, |sum, (x, y)| x.mul_add(y, sum));
                    let got = got[i * n + j];
                    let near = (got - want).abs() <= 1e-5 * want.abs().max(1.0);
                    let same = got == want || (got.is_nan() && want.is_nan());
                    assert!(near || same, "case {case}, {i} {j}: {got} {want}");
                }
            }
        }
    }
}
