//! Row and column reductions in one region, on CUDA.
//!
//! The first kernel has as many blocks as are resident at a time, and each strides over the rows, reducing every one as
//! [`super::cuda_row_reduce`] does. A thread processes the same columns of all its rows and accumulates the column
//! reductions in registers; meanwhile the elements of its next row are brought to L2. At the end the threads of a row write
//! their sums to scratch memory, and a second kernel adds these in order, like the second stage of
//! [`super::cuda_col_reduce`].

use super::cuda_block::WARP;
use super::cuda_col_reduce::{scratch_index, write_scratch};
use super::cuda_function::{Shape, thread_and_block};
use super::cuda_row_reduce::{Part, Tile, accumulate, reduce, shared_memory, store};
use super::expr::Id;
use super::point::Emitter;
use super::region::{Program, col_reductions};
use super::text::Val;
use crate::error::Unsupported;

/// Threads that occupy a large GPU: 512, with up to 128 registers each, on each of the 132 multiprocessors of an H100.
const BUSY_THREADS: usize = 132 * 512;
/// Minimum rows per sum in scratch memory, so that the traffic of the sums is small compared with that of the rows.
const MIN_ROWS: usize = 8;
/// Maximum columns per thread, and maximum sums: more do not fit its registers together with the elements of a row.
const MAX_COLS: usize = 16;
const MAX_SUMS: usize = 48;

/// Number of parts of the rows, each with its own partial sums.
///
/// # Errors
/// Rows, or sums, that do not fit a thread's registers.
pub(crate) fn parts(program: &Program, width: usize) -> Result<usize, Unsupported> {
    let refuse = |why: &str| Err(Unsupported::new("reduce", why));
    let tile = Tile::of(program, width);
    let vectors = tile.vectors_in_registers();
    let Some(cols) = vectors.map(|n| n * width).filter(|n| *n <= MAX_COLS) else {
        return refuse("its rows are too long to be reduced over both axes");
    };
    if cols * col_reductions(program).len() > MAX_SUMS {
        return refuse("it has too many sums over the rows");
    }
    if program.rows() == 1 {
        return refuse("it has one row");
    }
    let fitting = program.rows() / (tile.rows * MIN_ROWS);
    Ok((BUSY_THREADS / tile.block()).min(fitting).max(1) * tile.rows)
}

/// Emits the first kernel: the results of all rows, and the partial sums of each part.
pub(crate) fn rows(
    e: &mut Emitter<'_>,
    symbol: &str,
    globals: &mut String,
    parts: usize,
) -> Result<Shape, Unsupported> {
    let program = e.program;
    let tile = Tile::of(program, e.width);
    let (thread, block) = thread_and_block(e);
    let (thread, own) = tile.place(e, thread);
    let columns = tile.parts(e, thread);
    let shared = shared_memory(e, symbol, globals, tile)?;
    let reductions = col_reductions(program);
    let operands: Vec<Id> = reductions.iter().map(|&id| e.reduction(id).1).collect();
    let mut starts = Vec::with_capacity(columns.len() * reductions.len());
    for _ in &columns {
        starts.extend(reductions.iter().map(|&id| e.identity(id, e.width)));
    }
    let size = e.t.index(tile.rows);
    let begin = e.t.same("arith.muli", &[block, size]);
    let range = [begin, e.t.index(program.rows()), e.t.index(parts)];
    let sums = e.for_loop(range, &starts, |e, first, sums| {
        prefetch_next(e, tile, first, parts, own, &columns);
        let row_inside = tile.set_row(e, first, own);
        let mut parts: Vec<Part> = columns.iter().map(Part::of_next_row).collect();
        reduce(e, tile, thread, &mut parts, &shared);
        e.prepare(&operands, |d| !d.col);
        let mut next = Vec::with_capacity(sums.len());
        for (part, sums) in parts.iter_mut().zip(sums.chunks(reductions.len())) {
            let inside = both(e, part.inside, row_inside);
            next.extend(
                e.resume(part.col, &mut part.scope, |e| accumulate(e, &reductions, sums, inside)),
            );
        }
        store(e, tile, thread, row_inside, &mut parts);
        if tile.threads > WARP {
            // Shared memory is written again for the next row.
            e.t.line(format_args!("nvvm.barrier0"));
        }
        next
    });
    let index = own.map_or(begin, |own| e.t.same("arith.addi", &[begin, own]));
    for (part, sums) in columns.iter().zip(sums.chunks(reductions.len())) {
        if let Some(inside) = part.inside {
            e.t.open_if(inside);
        }
        for (i, &sum) in sums.iter().enumerate() {
            let at = scratch_index(e, i, parts, index, part.col);
            write_scratch(e, reductions.len() * parts, at, sum);
        }
        if part.inside.is_some() {
            e.t.close();
        }
    }
    Ok((tile.block(), [parts / tile.rows, 1]))
}

/// Prefetches the row that follows in a block: its threads have no registers left for the elements of two rows.
fn prefetch_next(
    e: &mut Emitter<'_>,
    tile: Tile,
    first: Val,
    parts: usize,
    own: Option<Val>,
    columns: &[Part],
) {
    let (step, end) = (e.t.index(parts), e.t.index(e.program.rows()));
    let next = e.t.same("arith.addi", &[first, step]);
    let inside = e.t.cmpi("ult", next, end);
    e.t.open_if(inside);
    e.scope(|e| {
        tile.set_row(e, next, own);
        for part in columns {
            e.at_col(part.col, None, Emitter::prefetch_row);
        }
    });
    e.t.close();
}

fn both(e: &mut Emitter<'_>, a: Option<Val>, b: Option<Val>) -> Option<Val> {
    match (a, b) {
        (Some(a), Some(b)) => Some(e.t.same("arith.andi", &[a, b])),
        _ => a.or(b),
    }
}
