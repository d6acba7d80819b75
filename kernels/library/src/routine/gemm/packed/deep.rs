//! GEMMs of few results that are sums over many depths, such as gradients of the weights of narrow layers: each part of the depths is
//! multiplied by one thread, and the parts are added in their order.

use super::{Buffers, Gemm, Kernel, run_serial};
use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::simd::vectorized;

/// The most results: sums of all parts fit in a cache.
const MOST: usize = 1 << 16;
/// Parts, and the fewest depths of one. The order of sums follows from the shape alone.
const PARTS: usize = 8;
const DEPTHS: usize = 512;
/// Results that are added at a time.
const STEP: usize = 1 << 12;

/// Whether a GEMM is computed so.
pub(super) fn is_deep(shape: &Gemm) -> bool {
    let is_plain = shape.c.elem == Elem::F32 && shape.c.col == 1 && shape.bias.is_none();
    is_plain && shape.m * shape.n <= MOST && shape.k >= PARTS * DEPTHS
}

/// Runs one GEMM on the pool.
///
/// # Safety
/// As for [`Gemm::run`].
pub(super) unsafe fn run(kernel: &'static Kernel, shape: &Gemm, pool: &Pool, at: Buffers) {
    let Gemm { m, n, k, a, b, c, .. } = *shape;
    let [sums] = pool.common([PARTS * m * n * size_of::<f32>()]);
    let sent = Shareable::new((at, sums.cast::<f32>()));
    // Whole granules of any kernel.
    let first = |part: usize| (part * k / PARTS).next_multiple_of(kernel.granule).min(k);
    pool.run_workers(PARTS, &|part, worker| {
        let (at, sums) = sent.get();
        let depth = first(part) as isize;
        let of_part = Gemm {
            k: first(part + 1) - first(part),
            c: Gemm::row_major(a.elem, Elem::F32, m, n, k).c,
            accumulate: false,
            ..*shape
        };
        let at = Buffers {
            a: a.elem.at(at.a, depth * a.col),
            b: b.elem.at(at.b, depth * b.row),
            c: sums.wrapping_add(part * m * n).cast(),
            bias: at.bias,
        };
        // SAFETY: parts of the sums are disjoint; the caller vouches for the rest.
        unsafe { run_serial(kernel, &of_part, &mut worker.packing, at) };
    });
    pool.run((m * n).div_ceil(STEP), &|chunk| {
        let (at, sums) = sent.get();
        let mut from = chunk * STEP;
        let end = (m * n).min(from + STEP);
        while from < end {
            // As many as lie in one row of C.
            let (row, column) = (from / n, from % n);
            let len = (n - column).min(end - from);
            // SAFETY: rows of C are disjoint, and all parts are written.
            unsafe {
                let to = at.c.cast::<f32>().offset(row as isize * c.row).add(column);
                let to = std::slice::from_raw_parts_mut(to, len);
                let parts = std::slice::from_raw_parts(sums.add(from), (PARTS - 1) * m * n + len);
                add_parts(parts, m * n, shape.accumulate, to);
            }
            from += len;
        }
    });
}

vectorized! {
    /// Adds parts that lie `pitch` apart, one after the other.
    fn add_parts(parts: &[f32], pitch: usize, accumulate: bool, to: &mut [f32]) {
        for (i, to) in to.iter_mut().enumerate() {
            let mut sum = parts[i];
            for part in 1..PARTS {
                sum += parts[part * pitch + i];
            }
            *to = if accumulate { *to + sum } else { sum };
        }
    }
}
