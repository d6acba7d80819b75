//! A GEMM of which the smaller operand is packed as a whole, by all threads, and the larger is shared out among them: each packs its parts.
//! So every element is packed once.

use super::{PANELS, SMALL, ahead};
use crate::pool::{Pool, Shareable};
use crate::routine::gemm::kernel::Kernel;
use crate::routine::gemm::{Buffers, Gemm};

/// Columns of a part, at most.
const COLUMNS: usize = 384;

/// Whether a GEMM is large enough for two steps, and its smaller operand small enough to be packed as a whole.
pub(super) fn fits(kernel: &Kernel, shape: &Gemm) -> bool {
    let Gemm { m, n, k, .. } = *shape;
    let bytes = m.min(n) * k * shape.a.elem.size();
    shape.c.col == 1 && m * n * k >= SMALL && bytes <= kernel.whole
}

/// Runs one GEMM with all threads of the pool.
///
/// # Safety
/// As for [`Gemm::run`]; it must fit.
pub(super) unsafe fn run(kernel: &'static Kernel, shape: &Gemm, pool: &Pool, at: Buffers) {
    let Gemm { m, n, .. } = *shape;
    let threads = pool.threads();
    // SAFETY: the caller vouches for the buffers; parts of C are disjoint.
    unsafe {
        if m <= n {
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

/// The lines of each of equal parts of `len` lines, in whole tiles: at most `most`, and as many parts for each thread.
fn part(len: usize, tile: usize, most: usize, threads: usize) -> usize {
    let tiles = len.div_ceil(tile);
    let parts = tiles.div_ceil(most / tile);
    let parts = if threads > 1 { parts.next_multiple_of(threads).min(tiles) } else { parts };
    tiles.div_ceil(parts) * tile
}
