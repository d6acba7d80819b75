//! Row reductions on CUDA.
//!
//! A block reduces one row: each thread reduces its columns, shuffles combine the threads of each warp, and shared
//! memory combines the warps. Rows that need at most one warp share a block. If a thread has few vectors of a row, they
//! stay in registers between levels; longer rows stay in shared memory if they fit, and are read again at each level otherwise.

use super::cuda_block::{Shared, WARP, butterfly};
use super::cuda_function::{Shape, thread_and_block};
use super::cuda_kept_row::{self, KeptRow};
use super::expr::{Expr, Id};
use super::point::{Emitter, Scope};
use super::region::{Program, Store, levels};
use super::text::Val;
use crate::error::Unsupported;
use frit_ir::ops::ReduceFn;

const MAX_THREADS: usize = 512;
/// Threads per block where a row needs at most one warp.
const FEW_THREADS: usize = 128;
/// Maximum vectors of a row that a thread keeps in registers.
const MAX_VECTORS: usize = 4;
/// Vectors that a thread reads at once of a row that is not kept in registers, so that enough loads are in flight and that
/// most of the row needs no comparison with where its classes end; and those whose results it writes at once.
const READ_AT_ONCE: usize = 4;
const WRITTEN_AT_ONCE: usize = 2;

/// How a block's threads map to rows.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// Vectors per row.
    vectors: usize,
    /// Threads per row; a power of two, so that no row of a warp is split.
    pub(crate) threads: usize,
    /// Rows per block.
    pub(crate) rows: usize,
}

impl Tile {
    pub(crate) fn of(program: &Program, width: usize) -> Tile {
        let vectors = program.cols() / width;
        let threads = vectors.next_power_of_two().min(MAX_THREADS);
        let rows = match threads {
            1..=WARP => {
                let rows = program.rows().next_power_of_two();
                (FEW_THREADS / threads).min(rows).max(WARP / threads)
            }
            _ => 1,
        };
        Tile { vectors, threads, rows }
    }

    /// Threads per block.
    pub(crate) fn block(self) -> usize {
        self.threads * self.rows
    }

    /// Vectors of a row that a thread keeps in registers; `None` if it has too many.
    pub(crate) fn vectors_in_registers(self) -> Option<usize> {
        Some(self.vectors.div_ceil(self.threads)).filter(|n| *n <= MAX_VECTORS)
    }

    /// The thread's index in its row and, if the block has several rows, its row's index in the block.
    pub(crate) fn place(self, e: &mut Emitter<'_>, thread: Val) -> (Val, Option<Val>) {
        if self.rows == 1 {
            return (thread, None);
        }
        let by = e.t.index(self.threads);
        let row = e.t.same("arith.divui", &[thread, by]);
        (e.t.same("arith.remui", &[thread, by]), Some(row))
    }

    /// Sets the current row to the thread's, where `first` is the first row of its block. Returns whether that row
    /// exists; `None` if it always does. If it does not, the last row is used, because all threads of a warp must take
    /// part in its shuffles.
    pub(crate) fn set_row(self, e: &mut Emitter<'_>, first: Val, own: Option<Val>) -> Option<Val> {
        let Some(own) = own else {
            e.set_row(first);
            return None;
        };
        let (rows, mut inside) = (e.program.rows(), None);
        let mut row = e.t.same("arith.addi", &[first, own]);
        if !rows.is_multiple_of(self.rows) {
            let last = e.t.index(rows - 1);
            inside = Some(e.t.cmpi("ule", row, last));
            row = e.t.same("arith.minui", &[row, last]);
        }
        e.set_row(row);
        inside
    }

    /// The vectors of a row that a thread keeps in registers; none if it has too many.
    pub(crate) fn parts(self, e: &mut Emitter<'_>, thread: Val) -> Vec<Part> {
        let (n, vectors) = (self.vectors_in_registers().unwrap_or(0), self.vectors);
        (0..n)
            .map(|k| {
                let (first, end) = (k * self.threads, (k + 1) * self.threads);
                part(e, thread, first, vectors, end > vectors)
            })
            .collect()
    }

    /// Runs `f` at every vector of a thread, in order, `unroll` of them in one iteration, with carried values.
    fn each_vector(
        self,
        e: &mut Emitter<'_>,
        thread: Val,
        unroll: usize,
        carried: &[Val],
        mut f: impl FnMut(&mut Emitter<'_>, &[Val]) -> Vec<Val>,
    ) -> Vec<Val> {
        let round = self.threads * e.width;
        let unrolled = e.program.cols() / (round * unroll) * (round * unroll);
        let width = e.t.index(e.width);
        let own = e.t.same("arith.muli", &[thread, width]);
        let mut carried = carried.to_vec();
        if unrolled > 0 {
            let range = [own, e.t.index(unrolled), e.t.index(round * unroll)];
            e.end = unrolled;
            carried = e.for_loop(range, &carried, |e, first, carried| {
                (0..unroll).fold(carried.to_vec(), |carried, k| {
                    let offset = e.t.index(k * round);
                    let col = e.t.same("arith.addi", &[first, offset]);
                    e.at_col(col, None, |e| f(e, &carried))
                })
            });
        }
        e.end = e.program.cols();
        if unrolled < e.program.cols() {
            let offset = e.t.index(unrolled);
            let first = e.t.same("arith.addi", &[own, offset]);
            let range = [first, e.t.index(e.program.cols()), e.t.index(round)];
            carried = e.for_loop(range, &carried, |e, col, carried| {
                e.at_col(col, None, |e| f(e, carried))
            });
        }
        carried
    }
}

/// One vector of the row that belongs to a thread.
pub(crate) struct Part {
    pub(crate) col: Val,
    /// Whether the vector is inside the row; `None` if it always is. Outside, `col` is the last one.
    pub(crate) inside: Option<Val>,
    pub(crate) scope: Scope,
}

impl Part {
    /// The same columns of another row.
    pub(crate) fn of_next_row(&self) -> Part {
        Part { col: self.col, inside: self.inside, scope: Scope::default() }
    }
}

/// Emits the kernel: a row per block, or several if a row needs few threads.
pub(crate) fn rows(
    e: &mut Emitter<'_>,
    symbol: &str,
    globals: &mut String,
) -> Result<Shape, Unsupported> {
    let program = e.program;
    let tile = Tile::of(program, e.width);
    let (thread, block) = thread_and_block(e);
    let (thread, own) = tile.place(e, thread);
    let size = e.t.index(tile.rows);
    let first = e.t.same("arith.muli", &[block, size]);
    let inside = tile.set_row(e, first, own);
    let mut parts = tile.parts(e, thread);
    let shared = shared_memory(e, symbol, globals, tile)?;
    if parts.is_empty() {
        KeptRow::declare(e, symbol, globals);
    }
    reduce(e, tile, thread, &mut parts, &shared);
    store(e, tile, thread, inside, &mut parts);
    Ok((tile.block(), [program.rows().div_ceil(tile.rows), 1]))
}

/// Shared memory for every reduction of every level; none where one warp reduces the whole row.
pub(crate) fn shared_memory(
    e: &mut Emitter<'_>,
    symbol: &str,
    globals: &mut String,
    tile: Tile,
) -> Result<Vec<Vec<Shared>>, Unsupported> {
    let mut shared = Vec::new();
    for (k, level) in levels(e.program).iter().enumerate() {
        let mut of_level = Vec::new();
        for (i, &id) in level.iter().enumerate().filter(|_| tile.threads > WARP) {
            let name = format!("{symbol}_shared_{k}_{i}");
            of_level.push(Shared::new(e, globals, name, id, tile.threads / WARP)?);
        }
        shared.push(of_level);
    }
    Ok(shared)
}

/// Computes the reductions of a row, level by level, and binds their values.
pub(crate) fn reduce(
    e: &mut Emitter<'_>,
    tile: Tile,
    thread: Val,
    parts: &mut [Part],
    shared: &[Vec<Shared>],
) {
    let threads = tile.threads;
    for (level, shared) in levels(e.program).iter().zip(shared) {
        let operands: Vec<Id> = level.iter().map(|&id| e.reduction(id).1).collect();
        e.prepare(&operands, |d| !d.col);
        let mut sums: Vec<Val> = level.iter().map(|&id| e.identity(id, e.width)).collect();
        for part in &mut *parts {
            let inside = part.inside;
            sums = e.resume(part.col, &mut part.scope, |e| accumulate(e, level, &sums, inside));
        }
        if parts.is_empty() {
            sums = tile.each_vector(e, thread, READ_AT_ONCE, &sums, |e, sums| {
                accumulate(e, level, sums, None)
            });
        }
        cuda_kept_row::fill(e, &operands);
        for (i, (&id, sum)) in level.iter().zip(sums).enumerate() {
            let (f, _) = e.reduction(id);
            let mut value = e.across_lanes(f, sum);
            value = butterfly(e, f, value, 0..threads.min(WARP).ilog2());
            if let Some(shared) = shared.get(i) {
                value = across_warps(e, f, value, thread, shared);
            }
            e.bind(id, value);
        }
    }
}

/// Writes the results of a row, if it is inside.
pub(crate) fn store(
    e: &mut Emitter<'_>,
    tile: Tile,
    thread: Val,
    inside: Option<Val>,
    parts: &mut [Part],
) {
    let program = e.program;
    let of_row = program.stores.iter().filter(|s| !program.is_of_column(s)).cloned();
    let (full_stores, row_stores): (Vec<Store>, Vec<Store>) =
        of_row.partition(|s| s.at.strides.last() != Some(&0));
    let guarded = |e: &mut Emitter<'_>, write: &mut dyn FnMut(&mut Emitter<'_>)| {
        if let Some(inside) = inside {
            e.t.open_if(inside);
        }
        write(e);
        if inside.is_some() {
            e.t.close();
        }
    };
    if !row_stores.is_empty() {
        guarded(e, &mut |e| store_of_row(e, thread, &row_stores));
    }
    if !full_stores.is_empty() {
        if picks_of_row(program, &row_stores) {
            // One thread reads an element of the row that another may overwrite.
            e.t.line(format_args!("nvvm.barrier0"));
        }
        guarded(e, &mut |e| store_elements(e, tile, thread, &full_stores, parts));
    }
}

/// Whether a result of a row reads an element at an index computed at run time.
fn picks_of_row(program: &Program, row_stores: &[Store]) -> bool {
    let mut stack: Vec<Id> = row_stores.iter().map(|store| store.value).collect();
    while let Some(id) = stack.pop() {
        if let Expr::Pick { .. } = program.dag.get(id) {
            return true;
        }
        stack.extend(program.dag.operands(id));
    }
    false
}

/// Writes the per-row results, by the row's first thread.
fn store_of_row(e: &mut Emitter<'_>, thread: Val, stores: &[Store]) {
    let zero = e.t.index(0);
    let first = e.t.cmpi("eq", thread, zero);
    e.t.open_if(first);
    e.scope(|e| e.store_all(stores));
    e.t.close();
}

/// Writes the results that have an element per column.
fn store_elements(
    e: &mut Emitter<'_>,
    tile: Tile,
    thread: Val,
    stores: &[Store],
    parts: &mut [Part],
) {
    e.prepare(&stores.iter().map(|s| s.value).collect::<Vec<_>>(), |d| !d.col);
    for part in &mut *parts {
        if let Some(inside) = part.inside {
            e.t.open_if(inside);
        }
        e.resume(part.col, &mut part.scope, |e| e.scope(|e| e.store_all(stores)));
        if part.inside.is_some() {
            e.t.close();
        }
    }
    if parts.is_empty() {
        tile.each_vector(e, thread, WRITTEN_AT_ONCE, &[], |e, _| {
            e.store_all(stores);
            vec![]
        });
    }
}

/// Accumulates the values at the current columns into each reduction.
pub(crate) fn accumulate(
    e: &mut Emitter<'_>,
    level: &[Id],
    sums: &[Val],
    inside: Option<Val>,
) -> Vec<Val> {
    level.iter().zip(sums).map(|(&id, &sum)| e.accumulate(id, sum, inside)).collect()
}

/// The vector `first + thread` of a row of `vectors`.
fn part(e: &mut Emitter<'_>, thread: Val, first: usize, vectors: usize, partial: bool) -> Part {
    let (first, last, width) = (e.t.index(first), e.t.index(vectors - 1), e.t.index(e.width));
    let mut index = e.t.same("arith.addi", &[thread, first]);
    let inside = partial.then(|| e.t.cmpi("ule", index, last));
    if partial {
        index = e.t.same("arith.minui", &[index, last]);
    }
    Part { col: e.t.same("arith.muli", &[index, width]), inside, scope: Scope::default() }
}

fn across_warps(e: &mut Emitter<'_>, f: ReduceFn, value: Val, thread: Val, shared: &Shared) -> Val {
    let (size, zero, n) = (e.t.index(WARP), e.t.index(0), e.t.index(shared.len));
    let warp = e.t.same("arith.divui", &[thread, size]);
    let lane = e.t.same("arith.remui", &[thread, size]);
    let first = e.t.cmpi("eq", lane, zero);
    e.t.open_if(first);
    shared.write(e, warp, value);
    e.t.close();
    e.t.line(format_args!("nvvm.barrier0"));
    let slot = e.t.same("arith.remui", &[lane, n]);
    let value = shared.read(e, slot, 1);
    butterfly(e, f, value, 0..shared.len.ilog2())
}
