//! A GEMM of which the smaller operand is packed as a whole, by all threads, and the larger is shared out among them: each packs its parts.
//! So every element is packed once.

use super::{PANELS, SMALL, ahead};
use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::routine::gemm::kernel::Kernel;
use crate::routine::gemm::{Buffers, Gemm};

/// The fewest depths that are packed at a time.
const MIN_DEPTHS: usize = 512;
/// Columns of a part, at most.
const COLUMNS: usize = 384;

/// The depths by which a GEMM that is large enough for two steps is cut, so that its smaller operand can be packed as a whole: all, if that
/// is small enough; fewer only where a tile goes on with the sums that are in C, so that their order does not depend on how depths are cut.
pub(super) fn depths(kernel: &Kernel, shape: &Gemm) -> Option<usize> {
    let Gemm { m, n, k, .. } = *shape;
    let elem = shape.a.elem.size();
    if shape.c.col != 1 || m * n * k < SMALL || kernel.whole == 0 {
        return None;
    }
    let most = kernel.whole / (m.min(n) * elem);
    if k <= most {
        return Some(k);
    }
    let most = most / kernel.depths * kernel.depths;
    let goes_on = kernel.keeps_sums && shape.c.elem == Elem::F32 && shape.alpha == 1.0;
    (goes_on && most >= MIN_DEPTHS).then_some(most)
}

/// Runs one GEMM with all threads of the pool, so many depths after the other.
///
/// # Safety
/// As for [`Gemm::run`]; the depths must be those of [`depths`].
pub(super) unsafe fn run(
    kernel: &'static Kernel,
    shape: &Gemm,
    depths: usize,
    pool: &Pool,
    at: Buffers,
) {
    for first in (0..shape.k).step_by(depths) {
        let k = depths.min(shape.k - first);
        let accumulate = shape.accumulate || first > 0;
        let bias = if first + k == shape.k { shape.bias } else { None };
        let part = Gemm { k, accumulate, bias, ..*shape };
        let a = shape.a.elem.at(at.a, first as isize * shape.a.col);
        let b = shape.b.elem.at(at.b, first as isize * shape.b.row);
        // SAFETY: passed on.
        unsafe { run_depths(kernel, &part, pool, Buffers { a, b, ..at }) };
    }
}

/// As [`run`], of all depths at once.
unsafe fn run_depths(kernel: &'static Kernel, shape: &Gemm, pool: &Pool, at: Buffers) {
    let Gemm { m, n, .. } = *shape;
    let threads = pool.threads();
    // SAFETY: the caller vouches for the buffers; parts of C are disjoint.
    unsafe {
        if is_left(kernel, shape, threads) {
            let [left] = pool.common([ahead::packed_left_bytes(kernel, shape)]);
            let sent = Shareable::new((at, left));
            let step = kernel.rows * PANELS / 2;
            pool.run(m.div_ceil(step), &|chunk| {
                let (at, left) = sent.get();
                let rows = chunk * step..m.min((chunk + 1) * step);
                let a = shape.a.elem.at(at.a, rows.start as isize * shape.a.row);
                ahead::pack_left(kernel, shape, rows, 0..shape.k, a, left);
            });
            let step = part(n, kernel.columns, COLUMNS, threads);
            pool.run_workers(n.div_ceil(step), &|chunk, worker| {
                let (at, left) = sent.get();
                let first = (chunk * step) as isize;
                let columns = step.min(n - chunk * step);
                let part = Gemm { n: columns, ..*shape };
                let b = shape.b.elem.at(at.b, first * shape.b.col);
                let c = shape.c.elem.at_mut(at.c, first * shape.c.col);
                let bias = shape.bias.map_or(at.bias, |elem| elem.at(at.bias, first));
                let (size, packing) = ((0..m, columns), &mut worker.packing);
                let right = ahead::Right::At(b);
                ahead::run_packed_left(kernel, &part, size, packing, left, &right, (c, bias));
            });
        } else {
            let [right] = pool.common([ahead::packed_bytes(kernel, shape)]);
            let sent = Shareable::new((at, right));
            pool.run(n.div_ceil(PANELS * kernel.columns), &|chunk| {
                let (at, right) = sent.get();
                ahead::pack_columns(kernel, shape, chunk * PANELS, at.b, right);
            });
            let step = part(m, kernel.rows, kernel.part, threads);
            pool.run_workers(m.div_ceil(step), &|chunk, worker| {
                let (at, right) = sent.get();
                let rows = step.min(m - chunk * step);
                let first = (chunk * step) as isize;
                let a = shape.a.elem.at(at.a, first * shape.a.row);
                let c = shape.c.elem.at_mut(at.c, first * shape.c.row);
                let (part, size) = (Gemm { m: step, ..*shape }, (rows, n, shape.k));
                let at = Buffers { a, c, ..at };
                ahead::run_packed(kernel, &part, size, &mut worker.packing, at, right);
            });
        }
    }
}

/// Whether the left operand is packed as a whole: the smaller one, or where sums are kept in scratch memory and each thread has enough
/// columns, not too large a one, as what is packed just before it is multiplied is still in the second-level cache.
fn is_left(kernel: &Kernel, shape: &Gemm, threads: usize) -> bool {
    let Gemm { m, n, k, .. } = *shape;
    let fits = m * k * shape.a.elem.size() <= 2 * kernel.whole;
    m <= n || (kernel.keeps_sums && fits && n >= threads * COLUMNS / 2)
}

/// The lines of each of equal parts of `len` lines, in whole tiles: at most `most`, and as many parts for each thread.
fn part(len: usize, tile: usize, most: usize, threads: usize) -> usize {
    let tiles = len.div_ceil(tile);
    let parts = tiles.div_ceil(most / tile);
    let parts = if threads > 1 { parts.next_multiple_of(threads).min(tiles) } else { parts };
    tiles.div_ceil(parts) * tile
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::routine::gemm::amx::split::SOFTWARE;
    use crate::routine::gemm::packed::NOWHERE;

    #[test]
    fn depths_that_are_cut_keep_the_order_of_sums() {
        let (m, n, k) = (64, 96, 1000);
        let number = |i: usize| (i * 7919 % 2003) as f32 / 1001.0 - 1.0;
        let a: Vec<f32> = (0..m * k).map(number).collect();
        let b: Vec<f32> = (0..k * n).map(number).collect();
        let gemm = Gemm::row_major(Elem::F32, Elem::F32, m, n, k);
        let product = |depths: usize| {
            let mut c = vec![7f32; m * n];
            let (a, b) = (a.as_ptr().cast(), b.as_ptr().cast());
            let at = Buffers { a, b, c: c.as_mut_ptr().cast(), ..NOWHERE };
            // SAFETY: the matrices have these sizes.
            unsafe { run(&SOFTWARE, &gemm, depths, &Pool::new(2), at) };
            c
        };
        let whole = product(k);
        for depths in [128, 256, 640] {
            assert!(product(depths) == whole, "{depths}");
        }
    }
}
