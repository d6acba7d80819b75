//! Row reductions on CUDA.
//!
//! A block reduces one row: each thread reduces its own columns, then a butterfly of shuffles each warp, then one through shared
//! memory the block. Rows that fit a warp or a part of one share a block. If a thread has few vectors of a row, they stay in registers
//! between levels; longer rows are read again at each level.

use super::cuda_block::{Shared, WARP, butterfly};
use super::cuda_function::{Shape, thread_and_block};
use super::expr::{Expr, Id};
use super::point::{Emitter, Scope};
use super::region::{Program, Store, levels};
use super::text::Val;
use crate::error::Unsupported;
use frit_ir::ops::ReduceFn;

const MAX_THREADS: usize = 512;
/// Threads of a block whose rows take a warp or less.
const FEW_THREADS: usize = 128;
/// Most vectors of a row that a thread keeps in registers.
const MAX_VECTORS: usize = 4;

/// One vector of the row that belongs to a thread.
struct Part {
    col: Val,
    /// Whether the vector is inside the row; `None` if it always is. Outside, `col` is the last one.
    inside: Option<Val>,
    scope: Scope,
}

/// A row per block, or several if few threads take a row.
pub(crate) fn rows(
    e: &mut Emitter<'_>,
    symbol: &str,
    globals: &mut String,
) -> Result<Shape, Unsupported> {
    let program = e.program;
    let (rows, cols, width) = (program.rows(), program.cols(), e.width);
    let vectors = cols / width;
    // Threads of a row; a power of two, so that a warp's rows are whole.
    let threads = vectors.next_power_of_two().min(MAX_THREADS);
    let rows_of_block = match threads {
        1..=WARP => (FEW_THREADS / threads).min(rows.next_power_of_two()).max(WARP / threads),
        _ => 1,
    };
    let block = threads * rows_of_block;
    let (mut thread, mut row) = thread_and_block(e);
    let mut row_inside = None;
    if rows_of_block > 1 {
        let (by, size) = (e.t.index(threads), e.t.index(rows_of_block));
        let first = e.t.same("arith.muli", &[row, size]);
        let own = e.t.same("arith.divui", &[thread, by]);
        row = e.t.same("arith.addi", &[first, own]);
        thread = e.t.same("arith.remui", &[thread, by]);
        if !rows.is_multiple_of(rows_of_block) {
            // All threads of a warp take part in its shuffles.
            let last = e.t.index(rows - 1);
            row_inside = Some(e.t.cmpi("ule", row, last));
            row = e.t.same("arith.minui", &[row, last]);
        }
    }
    e.set_row(row);
    let n_parts = vectors.div_ceil(threads);
    let mut parts = Vec::new();
    if n_parts <= MAX_VECTORS {
        for k in 0..n_parts {
            parts.push(part(e, thread, k * threads, vectors, (k + 1) * threads > vectors));
        }
    }
    let (full_stores, row_stores): (Vec<Store>, Vec<Store>) =
        program.stores.iter().cloned().partition(|s| s.at.strides.last() != Some(&0));
    for (k, level) in levels(program).iter().enumerate() {
        let operands: Vec<Id> = level.iter().map(|&id| e.reduction(id).1).collect();
        e.prepare(&operands, |d| !d.col);
        let mut sums: Vec<Val> = level.iter().map(|&id| e.identity(id, width)).collect();
        for part in &mut parts {
            let inside = part.inside;
            sums = e.resume(part.col, &mut part.scope, |e| accumulate(e, level, &sums, inside));
        }
        if parts.is_empty() {
            let range = column_range(e, thread, threads);
            sums = e.for_loop(range, &sums, |e, col, sums| {
                e.at_col(col, None, |e| accumulate(e, level, sums, None))
            });
        }
        for (i, (&id, sum)) in level.iter().zip(sums).enumerate() {
            let (f, _) = e.reduction(id);
            let mut value = e.across_lanes(f, sum);
            value = butterfly(e, f, value, 0..threads.min(WARP).ilog2());
            if threads > WARP {
                let name = format!("{symbol}_shared_{k}_{i}");
                let shared = Shared::new(e, globals, name, id, threads / WARP)?;
                value = across_warps(e, f, value, thread, &shared);
            }
            e.bind(id, value);
        }
    }
    let guarded = |e: &mut Emitter<'_>, write: &mut dyn FnMut(&mut Emitter<'_>)| {
        if let Some(inside) = row_inside {
            e.t.open_if(inside);
        }
        write(e);
        if row_inside.is_some() {
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
        guarded(e, &mut |e| store_elements(e, (thread, threads), &full_stores, &mut parts));
    }
    Ok((block, [rows.div_ceil(rows_of_block), 1]))
}

/// Whether a result of a row reads an element at an index that only the kernel knows.
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

/// Writes the results of a row: its first thread does.
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
    (thread, threads): (Val, usize),
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
        let range = column_range(e, thread, threads);
        e.for_loop(range, &[], |e, col, _| {
            e.at_col(col, None, |e| e.store_all(stores));
            vec![]
        });
    }
}

fn accumulate(e: &mut Emitter<'_>, level: &[Id], sums: &[Val], inside: Option<Val>) -> Vec<Val> {
    level.iter().zip(sums).map(|(&id, &sum)| e.accumulate(id, sum, inside)).collect()
}

/// The vector number `first + thread` of a row of `vectors`.
fn part(e: &mut Emitter<'_>, thread: Val, first: usize, vectors: usize, partial: bool) -> Part {
    let (first, last, width) = (e.t.index(first), e.t.index(vectors - 1), e.t.index(e.width));
    let mut index = e.t.same("arith.addi", &[thread, first]);
    let inside = partial.then(|| e.t.cmpi("ule", index, last));
    if partial {
        index = e.t.same("arith.minui", &[index, last]);
    }
    Part { col: e.t.same("arith.muli", &[index, width]), inside, scope: Scope::default() }
}

/// The columns of a thread, a vector each.
fn column_range(e: &mut Emitter<'_>, thread: Val, threads: usize) -> [Val; 3] {
    let (width, step) = (e.t.index(e.width), e.t.index(threads * e.width));
    [e.t.same("arith.muli", &[thread, width]), e.t.index(e.program.cols()), step]
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
