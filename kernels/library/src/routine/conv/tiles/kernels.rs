//! Kernels of 3 × 3 taps and their transforms, the elements of a transform `pitch` apart.

use super::POINTS;
use crate::simd::vectorized;

/// Taps of a kernel.
const TAPS: usize = 9;

/// Writes `G g Gᵀ` of kernels that lie one after the other.
///
/// # Safety
/// `to` must be writable for as many elements at each point.
pub(in super::super) unsafe fn transform(taps: &[f32], to: *mut f32, pitch: usize) {
    let n = taps.len() / TAPS;
    // SAFETY: the caller vouches for the kernels at all points; the processor has the features.
    unsafe {
        let points: [*mut f32; POINTS] = std::array::from_fn(|point| to.add(point * pitch));
        #[cfg(target_arch = "x86_64")]
        let done = if crate::simd::has_avx512() { x86::transform(taps, points) } else { 0 };
        #[cfg(not(target_arch = "x86_64"))]
        let done = 0;
        let rest = points.map(|at| std::slice::from_raw_parts_mut(at.add(done), n - done));
        widen(&taps[TAPS * done..], rest);
    }
}

/// Writes `Gᵀ s G` of sums, to kernels one after the other.
pub(in super::super) fn restore(from: &[&[f32]; POINTS], to: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the processor has the features.
    let done = if crate::simd::has_avx512() { unsafe { x86::restore(from, to) } } else { 0 };
    #[cfg(not(target_arch = "x86_64"))]
    let done = 0;
    narrow(&from.map(|part| &part[done..]), &mut to[TAPS * done..]);
}

vectorized! {
    fn widen(taps: &[f32], out: [&mut [f32]; POINTS]) {
        let n = taps.len() / TAPS;
        let taps = &taps[..TAPS * n];
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
    fn narrow(from: &[&[f32]; POINTS], to: &mut [f32]) {
        let n = to.len() / TAPS;
        let s: [&[f32]; POINTS] = std::array::from_fn(|i| &from[i][..n]);
        let to = &mut to[..TAPS * n];
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

/// Sixteen kernels at a time, whose taps are nine vectors; bit for bit the same.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{POINTS, TAPS};
    use std::arch::x86_64::*;

    /// Kernels, and lanes.
    const LANES: usize = 16;

    /// For each tap the lanes of nine vectors, and which of the vectors, that have it: tap `t` of kernel `i` is element `9 i + t`.
    const GATHER: [([i32; LANES], [u16; TAPS]); TAPS] = {
        let mut table = [([0; LANES], [0; TAPS]); TAPS];
        let mut element = 0;
        while element < LANES * TAPS {
            let (kernel, tap) = (element / TAPS, element % TAPS);
            table[tap].0[kernel] = (element % LANES) as i32;
            table[tap].1[element / LANES] |= 1 << kernel;
            element += 1;
        }
        table
    };

    /// For each of nine vectors the kernels of its lanes, and which of the taps these are.
    const SCATTER: [([i32; LANES], [u16; TAPS]); TAPS] = {
        let mut table = [([0; LANES], [0; TAPS]); TAPS];
        let mut element = 0;
        while element < LANES * TAPS {
            let (vector, lane) = (element / LANES, element % LANES);
            table[vector].0[lane] = (element / TAPS) as i32;
            table[vector].1[element % TAPS] |= 1 << lane;
            element += 1;
        }
        table
    };

    /// Nine vectors of which each has some lanes of others.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn exchange(
        from: [__m512; TAPS],
        table: &[([i32; LANES], [u16; TAPS]); TAPS],
    ) -> [__m512; TAPS] {
        std::array::from_fn(|to| {
            let (lanes, masks) = &table[to];
            // SAFETY: the table holds a vector.
            let lanes = unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) };
            let zero = _mm512_setzero_ps();
            from.iter().zip(masks).fold(zero, |found, (from, mask)| {
                _mm512_mask_permutexvar_ps(found, *mask, lanes, *from)
            })
        })
    }

    /// `G` times a column.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn widen([a, b, c]: [__m512; 3]) -> [__m512; 4] {
        let half = _mm512_set1_ps(0.5);
        let sum = _mm512_add_ps(_mm512_add_ps(a, b), c);
        let difference = _mm512_add_ps(_mm512_sub_ps(a, b), c);
        [a, _mm512_mul_ps(half, sum), _mm512_mul_ps(half, difference), c]
    }

    /// `Gᵀ` times a column.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn narrow([a, b, c, d]: [__m512; 4]) -> [__m512; 3] {
        let half = _mm512_set1_ps(0.5);
        let sum = _mm512_mul_ps(half, _mm512_add_ps(b, c));
        [_mm512_add_ps(a, sum), _mm512_mul_ps(half, _mm512_sub_ps(b, c)), _mm512_add_ps(sum, d)]
    }

    /// Transforms whole vectors of kernels, and says how many kernels these are.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn transform(taps: &[f32], to: [*mut f32; POINTS]) -> usize {
        let n = taps.len() / TAPS / LANES * LANES;
        for i in (0..n).step_by(LANES) {
            // SAFETY: all have whole vectors here.
            unsafe {
                let at = taps.as_ptr().add(TAPS * i);
                let taps = std::array::from_fn(|k| _mm512_loadu_ps(at.add(LANES * k)));
                let t = exchange(taps, &GATHER);
                let rows = [0, 1, 2].map(|k| widen([t[3 * k], t[3 * k + 1], t[3 * k + 2]]));
                for j in 0..4 {
                    let column = widen(rows.map(|row| row[j]));
                    for (k, values) in column.into_iter().enumerate() {
                        _mm512_storeu_ps(to[4 * k + j].add(i), values);
                    }
                }
            }
        }
        n
    }

    /// Restores whole vectors of kernels, and says how many kernels these are.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn restore(from: &[&[f32]; POINTS], to: &mut [f32]) -> usize {
        let n = to.len() / TAPS / LANES * LANES;
        assert!(from.iter().all(|part| part.len() >= n));
        for i in (0..n).step_by(LANES) {
            // SAFETY: all have whole vectors here.
            unsafe {
                let point = |k: usize, j: usize| _mm512_loadu_ps(from[4 * k + j].as_ptr().add(i));
                let columns = [0, 1, 2, 3].map(|j| narrow([0, 1, 2, 3].map(|k| point(k, j))));
                let rows = [0, 1, 2].map(|k| narrow(columns.map(|column| column[k])));
                let taps = std::array::from_fn(|t| rows[t / 3][t % 3]);
                for (k, values) in exchange(taps, &SCATTER).into_iter().enumerate() {
                    _mm512_storeu_ps(to.as_mut_ptr().add(TAPS * i + LANES * k), values);
                }
            }
        }
        n
    }
}
