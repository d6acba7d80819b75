//! Transposes of two dimensions, in blocks of 8 × 8 elements: in registers where the processor has AVX2.

use super::Dim;
use std::mem::MaybeUninit;

/// Side of a block.
const SIDE: usize = 8;
/// Side of the square whose blocks follow each other, so that both sides move whole cache lines.
pub(super) const SQUARE: usize = 32;

/// Copies elements that are contiguous along `rows` in the source and along `cols` in the destination.
pub(super) unsafe fn transpose<T: Copy>(rows: Dim, cols: Dim, src: *const T, dst: *mut T) {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::level() >= crate::simd::AVX2 {
        // SAFETY: the feature is present; the caller vouches for the elements.
        return unsafe { x86::squares(rows, cols, src, dst) };
    }
    // SAFETY: the caller vouches for the elements.
    unsafe { squares(rows, cols, (src, dst), block) };
}

/// Copies squares, block by block, and what is left of blocks element by element.
#[inline(always)]
unsafe fn squares<T: Copy>(
    rows: Dim,
    cols: Dim,
    (src, dst): (*const T, *mut T),
    block: impl Fn((*const T, isize), (*mut T, isize)),
) {
    let at = |row: usize, col: usize| {
        let (row, col) = (row as isize, col as isize);
        let from = src.wrapping_offset(row + col * cols.src);
        (from, dst.wrapping_offset(row * rows.dst + col))
    };
    for first_row in (0..rows.size).step_by(SQUARE) {
        for first_col in (0..cols.size).step_by(SQUARE) {
            let last_row = rows.size.min(first_row + SQUARE);
            let last_col = cols.size.min(first_col + SQUARE);
            for row in (first_row..last_row).step_by(SIDE) {
                for col in (first_col..last_col).step_by(SIDE) {
                    if row + SIDE <= last_row && col + SIDE <= last_col {
                        let (from, to) = at(row, col);
                        block((from, cols.src), (to, rows.dst));
                        continue;
                    }
                    for row in row..last_row.min(row + SIDE) {
                        for col in col..last_col.min(col + SIDE) {
                            let (from, to) = at(row, col);
                            // SAFETY: the caller vouches for the elements.
                            unsafe { *to = *from };
                        }
                    }
                }
            }
        }
    }
}

/// Copies a block through a local one.
fn block<T: Copy>((src, from): (*const T, isize), (dst, to): (*mut T, isize)) {
    let mut lines = [[MaybeUninit::<T>::uninit(); SIDE]; SIDE];
    for col in 0..SIDE {
        for (row, line) in lines.iter_mut().enumerate() {
            // SAFETY: the caller of `squares` vouches for whole blocks.
            line[col].write(unsafe { *src.offset(col as isize * from).add(row) });
        }
    }
    for (row, line) in lines.iter().enumerate() {
        // SAFETY: as above; all elements have been written.
        unsafe { dst.offset(row as isize * to).cast::<[MaybeUninit<T>; SIDE]>().write(*line) };
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::Dim;
    use std::arch::x86_64::*;

    /// As [`super::squares`], with blocks in registers for elements of 2 and 4 bytes.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn squares<T: Copy>(rows: Dim, cols: Dim, src: *const T, dst: *mut T) {
        // SAFETY: the caller vouches for the elements.
        unsafe {
            match size_of::<T>() {
                2 => super::squares(rows, cols, (src, dst), |from, to| words(from, to)),
                4 => super::squares(rows, cols, (src, dst), |from, to| doubles(from, to)),
                _ => super::squares(rows, cols, (src, dst), super::block),
            }
        }
    }

    /// A block of elements of 2 bytes: vectors that hold pairs, then fours, then eights of a column.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn words<T>((src, from): (*const T, isize), (dst, to): (*mut T, isize)) {
        // SAFETY: the caller of `squares` vouches for whole blocks.
        let load =
            |i: usize| unsafe { _mm_loadu_si128(src.wrapping_offset(i as isize * from).cast()) };
        let x: [__m128i; 8] = std::array::from_fn(load);
        let pair =
            |i: usize| [_mm_unpacklo_epi16(x[i], x[i + 1]), _mm_unpackhi_epi16(x[i], x[i + 1])];
        let pairs = [pair(0), pair(2), pair(4), pair(6)];
        let four = |i: usize, half: usize| {
            let (a, b) = (pairs[2 * i][half], pairs[2 * i + 1][half]);
            [_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b)]
        };
        for half in 0..2 {
            let (first, second) = (four(0, half), four(1, half));
            for i in 0..2 {
                let low = _mm_unpacklo_epi64(first[i], second[i]);
                let high = _mm_unpackhi_epi64(first[i], second[i]);
                for (row, line) in [low, high].into_iter().enumerate() {
                    let row = (4 * half + 2 * i + row) as isize;
                    // SAFETY: as above.
                    unsafe { _mm_storeu_si128(dst.wrapping_offset(row * to).cast(), line) };
                }
            }
        }
    }

    /// A block of elements of 4 bytes, in the same way within the halves of vectors; halves of rows are loaded where they will stay.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn doubles<T>((src, from): (*const T, isize), (dst, to): (*mut T, isize)) {
        // Columns i and i + 4, of the rows from `half` on.
        let load = |i: usize, half: usize| {
            let at = |col: usize| src.wrapping_offset(col as isize * from).wrapping_add(half);
            // SAFETY: the caller of `squares` vouches for whole blocks.
            unsafe { _mm256_loadu2_m128i(at(i + 4).cast(), at(i).cast()) }
        };
        for half in [0, 4] {
            let x: [__m256i; 4] = std::array::from_fn(|i| load(i, half));
            let low = [_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpacklo_epi32(x[2], x[3])];
            let high = [_mm256_unpackhi_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[2], x[3])];
            let lines = [
                _mm256_unpacklo_epi64(low[0], low[1]),
                _mm256_unpackhi_epi64(low[0], low[1]),
                _mm256_unpacklo_epi64(high[0], high[1]),
                _mm256_unpackhi_epi64(high[0], high[1]),
            ];
            for (row, line) in lines.into_iter().enumerate() {
                let row = (half + row) as isize;
                // SAFETY: as above.
                unsafe { _mm256_storeu_si256(dst.wrapping_offset(row * to).cast(), line) };
            }
        }
    }
}
