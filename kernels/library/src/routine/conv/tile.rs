//! The transforms of Winograd's tiles, a vector of tiles side by side at a time.
//!
//! Rows of tiles are whole vectors of [`LANES`]: buffers are padded, and what is written behind the tiles of a row belongs to the next
//! row or to padding.

use crate::simd::vectorized;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Elements of a transformed tile.
pub(super) const POINTS: usize = 16;
/// Tiles of a vector.
pub(super) const LANES: usize = 16;

/// `d B` of a padded row: the four elements of each tile. The line has two elements more than twice the tiles.
pub(super) fn along(line: &[f32], out: &mut [&mut [f32]; 4]) {
    let n = out[0].len();
    assert!(n.is_multiple_of(LANES) && line.len() >= 2 * n + 2 && out.iter().all(|o| o.len() == n));
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx512() {
        // SAFETY: the processor has the features; the lengths are checked above.
        return unsafe { x86::along(line.as_ptr(), out.each_mut().map(|o| o.as_mut_ptr()), n) };
    }
    for i in 0..n {
        let [a, b, c, d] = [0, 1, 2, 3].map(|k| line[2 * i + k]);
        for (out, value) in out.iter_mut().zip([a - c, b + c, c - b, b - d]) {
            out[i] = value;
        }
    }
}

/// `Bᵀ d` of four rows of a row of tiles.
///
/// # Safety
/// `to` must be writable for as many elements as the rows have.
pub(super) unsafe fn across(rows: [&[f32]; 4], to: [*mut f32; 4]) {
    let n = rows[0].len();
    assert!(n.is_multiple_of(LANES) && rows.iter().all(|row| row.len() == n));
    // SAFETY: the processor has the features; the caller vouches for the rest.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if crate::simd::has_avx512() {
            return x86::across(rows.map(<[f32]>::as_ptr), to, n);
        }
        for i in 0..n {
            let [a, b, c, d] = rows.map(|row| row[i]);
            for (to, value) in to.into_iter().zip([a - c, b + c, c - b, b - d]) {
                *to.add(i) = value;
            }
        }
    }
}

/// `Aᵀ m A` of a row of `n` tiles, each point at one of `from`: two rows of positions.
///
/// # Safety
/// `from` must be readable for `n` elements.
pub(super) unsafe fn untransform(
    from: [*const f32; POINTS],
    n: usize,
    above: &mut [f32],
    below: &mut [f32],
) {
    let least = 2 * n.next_multiple_of(LANES);
    assert!(above.len() >= least && below.len() >= least);
    // SAFETY: the processor has the features; the caller vouches for the rest.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if crate::simd::has_avx512() {
            return x86::untransform(from, n, above.as_mut_ptr(), below.as_mut_ptr());
        }
        for i in 0..n {
            let m = from.map(|point| *point.add(i));
            let column = |j: usize| [m[j] + m[4 + j] + m[8 + j], m[4 + j] - m[8 + j] - m[12 + j]];
            let [a, b, c, d] = [0, 1, 2, 3].map(column);
            for (row, line) in [&mut *above, &mut *below].into_iter().enumerate() {
                line[2 * i] = a[row] + b[row] + c[row];
                line[2 * i + 1] = b[row] - c[row] - d[row];
            }
        }
    }
}

/// `A dy Aᵀ` of two padded rows of positions, `n` tiles.
///
/// # Safety
/// `to` must be writable for `n` elements, rounded up to whole vectors.
pub(super) unsafe fn spread(above: &[f32], below: &[f32], n: usize, to: [*mut f32; POINTS]) {
    let least = 2 * n.next_multiple_of(LANES);
    assert!(above.len() >= least && below.len() >= least);
    // SAFETY: the processor has the features; the caller vouches for the rest.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if crate::simd::has_avx512() {
            return x86::spread(above.as_ptr(), below.as_ptr(), n, to);
        }
        for i in 0..n {
            let side = |line: &[f32]| {
                let (a, b) = (line[2 * i], line[2 * i + 1]);
                [a, a + b, a - b, -b]
            };
            let (upper, lower) = (side(above), side(below));
            for j in 0..4 {
                let column = [upper[j], upper[j] + lower[j], upper[j] - lower[j], -lower[j]];
                for (k, value) in column.into_iter().enumerate() {
                    *to[4 * k + j].add(i) = value;
                }
            }
        }
    }
}

/// `G g Gᵀ` of kernels one after the other, their elements `pitch` apart.
pub(super) unsafe fn transform_kernels(taps: &[f32], to: *mut f32, pitch: usize) {
    // SAFETY: the caller vouches for the kernels at all points.
    let out = std::array::from_fn(|point| unsafe {
        std::slice::from_raw_parts_mut(to.add(point * pitch), taps.len() / 9)
    });
    widen(taps, out);
}

vectorized! {
    fn widen(taps: &[f32], out: [&mut [f32]; 16]) {
        let n = taps.len() / 9;
        let taps = &taps[..9 * n];
        let out = out.map(|part| &mut part[..n]);
        for i in 0..n {
            let side = |a: f32, b: f32, c: f32| [a, 0.5 * (a + b + c), 0.5 * (a - b + c), c];
            let row = |j: usize| side(taps[9 * i + 3 * j], taps[9 * i + 3 * j + 1], taps[9 * i + 3 * j + 2]);
            let [upper, middle, lower] = [row(0), row(1), row(2)];
            for j in 0..4 {
                let column = side(upper[j], middle[j], lower[j]);
                for (k, value) in column.into_iter().enumerate() {
                    out[4 * k + j][i] = value;
                }
            }
        }
    }
}

vectorized! {
    /// `Gᵀ s G` of sums, to kernels one after the other.
    pub(super) fn untransform_kernels(from: &[&[f32]; 16], to: &mut [f32]) {
        let n = to.len() / 9;
        let s: [&[f32]; 16] = std::array::from_fn(|i| &from[i][..n]);
        let to = &mut to[..9 * n];
        for i in 0..n {
            let side = |a: f32, b: f32, c: f32, d: f32| {
                [a + 0.5 * (b + c), 0.5 * (b - c), 0.5 * (b + c) + d]
            };
            let column = |j: usize| side(s[j][i], s[4 + j][i], s[8 + j][i], s[12 + j][i]);
            let [a, b, c, d] = [column(0), column(1), column(2), column(3)];
            for k in 0..3 {
                let row = side(a[k], b[k], c[k], d[k]);
                to[9 * i + 3 * k..][..3].copy_from_slice(&row);
            }
        }
    }
}

/// With AVX-512, bit for bit the same.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;

    /// The elements of even and of odd numbers of 32.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn split(at: *const f32) -> [__m512; 2] {
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        // SAFETY: the caller vouches for 32 elements.
        let (low, high) = unsafe { (_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(LANES))) };
        [_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)]
    }

    /// Writes elements of two vectors in turn.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn join(even: __m512, odd: __m512, to: *mut f32) {
        let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        // SAFETY: the caller vouches for 32 elements.
        unsafe {
            _mm512_storeu_ps(to, _mm512_permutex2var_ps(even, low, odd));
            _mm512_storeu_ps(to.add(LANES), _mm512_permutex2var_ps(even, high, odd));
        }
    }

    /// `Bᵀ` times a column.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn of_image([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
        [_mm512_sub_ps(a, c), _mm512_add_ps(b, c), _mm512_sub_ps(c, b), _mm512_sub_ps(b, d)]
    }

    /// `Aᵀ` times a column.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn to_positions([a, b, c, d]: [__m512; 4]) -> [__m512; 2] {
        let first = _mm512_add_ps(_mm512_add_ps(a, b), c);
        [first, _mm512_sub_ps(_mm512_sub_ps(b, c), d)]
    }

    /// `A` times a column.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn of_positions([a, b]: [__m512; 2]) -> [__m512; 4] {
        let negative = _mm512_sub_ps(_mm512_set1_ps(-0.0), b);
        [a, _mm512_add_ps(a, b), _mm512_sub_ps(a, b), negative]
    }

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn along(line: *const f32, out: [*mut f32; 4], n: usize) {
        for i in (0..n).step_by(LANES) {
            // SAFETY: the caller vouches for whole vectors.
            unsafe {
                let [a, b] = split(line.add(2 * i));
                let [c, d] = split(line.add(2 * i + 2));
                for (to, value) in out.into_iter().zip(of_image([a, b, c, d])) {
                    _mm512_storeu_ps(to.add(i), value);
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn across(rows: [*const f32; 4], to: [*mut f32; 4], n: usize) {
        for i in (0..n).step_by(LANES) {
            // SAFETY: the caller vouches for whole vectors.
            unsafe {
                let column = [0, 1, 2, 3].map(|k| _mm512_loadu_ps(rows[k].add(i)));
                for (to, value) in to.into_iter().zip(of_image(column)) {
                    _mm512_storeu_ps(to.add(i), value);
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn untransform(
        from: [*const f32; POINTS],
        n: usize,
        above: *mut f32,
        below: *mut f32,
    ) {
        for i in (0..n).step_by(LANES) {
            let left = (n - i).min(LANES);
            let mask = u16::MAX >> (LANES - left);
            // SAFETY: the mask keeps loads inside the tiles; the lines hold whole vectors.
            unsafe {
                let load = |point: usize| _mm512_maskz_loadu_ps(mask, from[point].add(i));
                let column =
                    |j: usize| to_positions([load(j), load(4 + j), load(8 + j), load(12 + j)]);
                let [a, b, c, d] = [column(0), column(1), column(2), column(3)];
                for (row, line) in [above, below].into_iter().enumerate() {
                    let [even, odd] = to_positions([a[row], b[row], c[row], d[row]]);
                    join(even, odd, line.add(2 * i));
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn spread(
        above: *const f32,
        below: *const f32,
        n: usize,
        to: [*mut f32; POINTS],
    ) {
        for i in (0..n).step_by(LANES) {
            // SAFETY: the caller vouches for whole vectors.
            unsafe {
                let upper = of_positions(split(above.add(2 * i)));
                let lower = of_positions(split(below.add(2 * i)));
                for j in 0..4 {
                    let column = of_positions([upper[j], lower[j]]);
                    for (k, value) in column.into_iter().enumerate() {
                        _mm512_storeu_ps(to[4 * k + j].add(i), value);
                    }
                }
            }
        }
    }
}
