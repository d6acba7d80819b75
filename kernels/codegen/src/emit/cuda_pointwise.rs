//! Pointwise regions on CUDA: a grid-stride loop over tiles of vectors.
//!
//! A tile has several vectors per thread; all are loaded before the first is computed, to keep loads in flight. Values that are the
//! same for all elements are computed once per thread, before the loop. The result does not depend on the number of blocks, so the
//! grid is sized when the GPU is known.

use super::cuda_function::{Shape, register, thread_and_block};
use super::expr::{Expr, Id};
use super::point::{Emitter, Scope};
use super::region::Program;
use super::text::Val;

/// Threads of a block.
pub(super) const THREADS: usize = 256;
/// Bytes that a thread should have in flight. By Little's law the memory of an H100 is busy with about 20 KB of each
/// multiprocessor (3.35 TB/s for 0.8 µs, over 132): of the 2048 threads that fit, 320 must be waiting.
pub(super) const BYTES_IN_FLIGHT: usize = 64;
/// Maximum vectors per thread and tile.
const MAX_VECTORS: usize = 8;
/// Tiles that give every multiprocessor of a large GPU work: eight blocks for each of the 132 of an H100.
const ENOUGH_TILES: usize = 1056;

/// One vector of a tile that belongs to a thread.
struct Part {
    rows: Vec<Val>,
    col: Val,
    /// Whether there is such a vector; `None` if there always is. If not, it is the last one.
    inside: Option<Val>,
    scope: Scope,
}

/// Threads and blocks: one for each tile, or fewer.
pub(crate) fn emit(e: &mut Emitter<'_>) -> Shape {
    let program = e.program;
    let n = program.rows() * (program.cols() / e.width);
    let per_thread = vectors_of_thread(program, e.width, n);
    let tiles = n.div_ceil(THREADS * per_thread);
    let (thread, block) = thread_and_block(e);
    e.prepare_uniform(|_| true);
    if tiles == 1 {
        tile(e, thread, block, per_thread, n);
    } else {
        let (end, step) = (e.t.index(tiles), register(e, "nctaid.x"));
        e.for_loop([block, end, step], &[], |e, index, _| {
            tile(e, thread, index, per_thread, n);
            vec![]
        });
    }
    (THREADS, [tiles, 1])
}

/// Vectors per thread and tile: enough for [`BYTES_IN_FLIGHT`], provided that tiles remain for all multiprocessors.
pub(super) fn vectors_of_thread(program: &Program, width: usize, n: usize) -> usize {
    let bytes = loaded_bytes(program, width);
    let mut vectors = MAX_VECTORS;
    while vectors > 1 && (vectors * bytes > BYTES_IN_FLIGHT || n < ENOUGH_TILES * THREADS * vectors)
    {
        vectors /= 2;
    }
    vectors
}

/// Bytes of operands that are read for a vector of this many elements.
pub(super) fn loaded_bytes(program: &Program, width: usize) -> usize {
    let bytes = |id: Id| match program.dag.get(id) {
        Expr::Load { operand, .. } => program.types[*operand].dtype.size() * width,
        _ => 0,
    };
    loads(program).map(bytes).sum()
}

/// The operands' elements that are read for each vector.
fn loads(program: &Program) -> impl Iterator<Item = Id> {
    program.dag.ids().filter(|&id| {
        let is_load = matches!(program.dag.get(id), Expr::Load { .. });
        is_load && program.live[id.index()] && program.depends(id).col
    })
}

/// Computes the tile at `index`.
pub(super) fn tile(e: &mut Emitter<'_>, thread: Val, index: Val, per_thread: usize, n: usize) {
    let program = e.program;
    let size = e.t.index(THREADS * per_thread);
    let first = e.t.same("arith.muli", &[index, size]);
    let first = e.t.same("arith.addi", &[first, thread]);
    let partial = !n.is_multiple_of(THREADS * per_thread);
    let mut parts: Vec<Part> =
        (0..per_thread).map(|k| part(e, first, k * THREADS, partial.then_some(n))).collect();
    let loads: Vec<Id> = loads(program).collect();
    let results: Vec<Id> = program.stores.iter().map(|s| s.value).collect();
    for values in [loads, results] {
        for part in &mut parts {
            e.rows.clone_from(&part.rows);
            e.resume(part.col, &mut part.scope, |e| {
                for &id in &values {
                    e.value(id);
                }
            });
        }
    }
    for part in &mut parts {
        e.rows.clone_from(&part.rows);
        part.inside.iter().for_each(|&inside| e.t.open_if(inside));
        e.resume(part.col, &mut part.scope, |e| e.scope(|e| e.store_all(&program.stores)));
        part.inside.iter().for_each(|_| e.t.close());
    }
}

/// The vector `first + after`, or the last of `limit` if it is beyond.
fn part(e: &mut Emitter<'_>, first: Val, after: usize, limit: Option<usize>) -> Part {
    let program = e.program;
    let after = e.t.index(after);
    let mut index = e.t.same("arith.addi", &[first, after]);
    let inside = limit.map(|n| {
        let last = e.t.index(n - 1);
        let inside = e.t.cmpi("ule", index, last);
        index = e.t.same("arith.minui", &[index, last]);
        inside
    });
    let (per_row, width) = (program.cols() / e.width, e.t.index(e.width));
    let (mut row, mut col) = (e.t.index(0), index);
    if program.rows() > 1 {
        let per_row = e.t.index(per_row);
        row = e.t.same("arith.divui", &[index, per_row]);
        col = e.t.same("arith.remui", &[index, per_row]);
    }
    let col = e.t.same("arith.muli", &[col, width]);
    e.set_row(row);
    Part { rows: e.rows.clone(), col, inside, scope: Scope::default() }
}
