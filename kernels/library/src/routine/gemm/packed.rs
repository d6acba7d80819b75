//! Packed GEMM by any micro-kernel: loops over column blocks, depth blocks and row blocks of C.
//!
//! All threads pack one column block of B together and share it; each packs its own rows of A. Results are summed over the depths of a
//! block in registers, and over blocks in C itself if that is f32 with contiguous columns, else in f32 scratch memory that is rounded
//! once. Neither depends on the number of threads.

mod ahead;
mod block;
mod deep;
mod tiles;
mod whole;

use super::kernel::Kernel;
use super::{Buffers, Gemm};
use crate::pool::{Pool, Scratch, Shareable};
pub(super) use ahead::{
    Right, pack_left, pack_whole, packed_bytes, packed_left_bytes, run_packed, run_packed_left,
};
use block::{BlockedGemm, Shared};

/// Panels of B that a thread packs at a time.
const PANELS: usize = 8;
/// The most panels of B for which rows of A are read in place, and of which distance in bytes these may not be multiples.
const LINES_PANELS: usize = 8;
const LINE_BYTES: usize = 1024;
/// Bytes after which lines of the first-level cache repeat, on processors that look them up by the offset in a page.
const PAGE_BYTES: usize = 4096;
/// Tasks per thread, so that uneven ones level out.
const TASKS_PER_THREAD: usize = 4;
/// A batch of GEMMs smaller than this (in multiplications) is spread as whole GEMMs.
const SMALL: usize = 1 << 22;

/// Runs all GEMMs of the batch on the pool.
///
/// # Safety
/// As for [`Gemm::run`]; no empty dimension.
pub(super) unsafe fn run(kernel: &'static Kernel, shape: &Gemm, pool: &Pool, at: Buffers) {
    let threads = pool.threads();
    let small = shape.m * shape.n * shape.k < SMALL;
    let even = shape.batch.is_multiple_of(threads) || shape.batch >= TASKS_PER_THREAD * threads;
    if shape.batch > 1 && (small || even) {
        let at = super::shareable(at);
        pool.run_workers(shape.batch, &|index, worker| {
            // SAFETY: the matrices of C are disjoint; the caller vouches for the rest.
            unsafe {
                run_serial(kernel, shape, &mut worker.packing, shape.of_batch(at.get(), index))
            };
        });
        return;
    }
    for index in 0..shape.batch {
        // SAFETY: the caller vouches for the buffers.
        unsafe {
            let at = shape.of_batch(at, index);
            match whole::depths(kernel, shape) {
                _ if deep::is_deep(shape) => deep::run(kernel, shape, pool, at),
                Some(depths) => whole::run(kernel, shape, depths, pool, at),
                None => run_shared(kernel, shape, pool, at),
            }
        };
    }
}

/// Runs one GEMM on the calling thread.
///
/// # Safety
/// As for [`run`].
pub(super) unsafe fn run_serial(
    kernel: &'static Kernel,
    shape: &Gemm,
    packing: &mut Scratch,
    at: Buffers,
) {
    let (blocked, at) = BlockedGemm::new(kernel, shape, at);
    let blocked = blocked.reading_in_place();
    let [a_bytes, shared @ ..] = blocked.scratch();
    let [a, b, partial, bias] = packing.split([a_bytes, shared[0], shared[1], shared[2]]);
    let scratch = Shared { b: b.cast(), partial: partial.cast(), bias: bias.cast() };
    // SAFETY: the scratch parts are as large as asked for; the caller vouches for the rest.
    unsafe {
        blocked.prepare_bias(&at, &scratch);
        blocked.each_block(|block| {
            let last = block.cols.div_ceil(kernel.columns);
            for panel in (0..last).step_by(PANELS) {
                blocked.pack_panels(&at, &block, &scratch, panel..last.min(panel + PANELS));
            }
            let all = (0, last);
            for row in (0..block.rows).step_by(kernel.part) {
                let rows = row..block.rows.min(row + kernel.part);
                blocked.multiply(&at, &block, &scratch, a.cast(), rows, all);
            }
        });
    }
}

/// The buffers of a GEMM that is only planned.
const NOWHERE: Buffers = Buffers {
    a: std::ptr::null(),
    b: std::ptr::null(),
    c: std::ptr::null_mut(),
    bias: std::ptr::null(),
};

/// Runs one GEMM with all threads of the pool.
unsafe fn run_shared(kernel: &'static Kernel, shape: &Gemm, pool: &Pool, at: Buffers) {
    let (blocked, at) = BlockedGemm::new(kernel, shape, at);
    let blocked = blocked.reading_in_place();
    let [a_bytes, shared @ ..] = blocked.scratch();
    let [b, partial, bias] = pool.common(shared);
    let scratch = Shared { b: b.cast(), partial: partial.cast(), bias: bias.cast() };
    let sent = Shareable::new((at, scratch));
    // SAFETY: as in `run_serial`; panels and row-column ranges of one block are disjoint.
    unsafe {
        blocked.prepare_bias(&at, &scratch);
        blocked.each_block(|block| {
            let panels = block.cols.div_ceil(kernel.columns);
            let threads = pool.threads();
            let chunks = panels.div_ceil(PANELS).next_multiple_of(threads).min(panels);
            pool.run(chunks, &|chunk| {
                let (at, scratch) = sent.get();
                let of_chunk = chunk * panels / chunks..(chunk + 1) * panels / chunks;
                blocked.pack_panels(&at, &block, &scratch, of_chunk);
            });
            // Parts of equal numbers of tiles, as many for each thread: one more for some would make the others wait.
            let row_tiles = block.rows.div_ceil(kernel.rows);
            let row_parts = block.rows.div_ceil(kernel.part);
            let is_even = row_parts > threads || kernel.group > 0;
            let row_parts = match is_even {
                true => row_parts.next_multiple_of(threads).min(row_tiles),
                false => row_parts,
            };
            let first_row =
                |part: usize| (part * row_tiles / row_parts * kernel.rows).min(block.rows);
            // Where packing a row is dear beside its products, each is packed once.
            let wanted = match threads {
                1 => 1,
                _ if kernel.group > 0 => threads,
                _ => TASKS_PER_THREAD * threads,
            };
            let col_parts = wanted.div_ceil(row_parts).min(panels);
            let step = panels.div_ceil(col_parts);
            let col_parts = panels.div_ceil(step);
            pool.run_workers(row_parts * col_parts, &|chunk, worker| {
                let (at, scratch) = sent.get();
                let [a] = worker.packing.split([a_bytes]);
                let first = chunk % col_parts * step;
                let range = (first, panels.min(first + step));
                let part = chunk / col_parts;
                let rows = first_row(part)..first_row(part + 1);
                blocked.multiply(&at, &block, &scratch, a.cast(), rows, range);
            });
        });
    }
}
