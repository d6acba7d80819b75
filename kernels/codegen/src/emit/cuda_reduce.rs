//! Reductions on CUDA.
//!
//! A block reduces one row: each thread over its own columns, then a butterfly of shuffles within
//! each warp, then one through shared memory. Where a thread has few vectors of a row, they stay in
//! registers from level to level; longer rows are read again for each level. A block of a column
//! reduction takes 32 columns, and its warps take turns at the rows. Where the columns alone would
//! leave most of the GPU idle, the rows are split over blocks too: a first kernel writes each block's
//! sums to scratch memory, a second adds them in order, so that the result is the same on every run.

use super::cuda_function::{Shape, register, thread_and_block};
use super::expr::{Id, Ty};
use super::point::{Emitter, Scope};
use super::region::{Program, Store, levels};
use super::text::{Elem, Type, Val};
use crate::error::Unsupported;
use frit_ir::ops::ReduceFn;
use std::fmt::Write;

const WARP: usize = 32;
const MAX_THREADS: usize = 512;
/// Most vectors of a row that a thread keeps in registers.
const MAX_VECTORS: usize = 4;
/// Warps of a block of a column reduction.
const COL_WARPS: usize = 16;
/// Blocks that keep a large GPU busy: four for each of the 132 multiprocessors of an H100.
const BUSY_BLOCKS: usize = 528;
/// Fewest rows of a warp of a split column reduction.
const MIN_ROWS: usize = 8;

/// What a kernel of a column reduction does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stage {
    /// All of it.
    Whole,
    /// Sums of this many parts of the rows, to scratch memory.
    Parts(usize),
    /// The results, from the sums of this many parts.
    Total(usize),
}

/// Parts into which the rows of a column reduction are split.
pub(crate) fn row_splits(program: &Program) -> usize {
    let wanted = BUSY_BLOCKS.div_ceil(program.cols().div_ceil(WARP));
    wanted.min(program.rows() / (COL_WARPS * MIN_ROWS)).max(1)
}

/// Elements of the scratch memory of a column reduction in this many parts.
pub(crate) fn scratch_len(program: &Program, splits: usize) -> usize {
    levels(program).first().map_or(0, Vec::len) * splits * program.cols()
}

/// One vector of the row that belongs to a thread.
struct Part {
    col: Val,
    /// Whether the vector is inside the row; `None` if it always is. Outside, `col` is the last one.
    inside: Option<Val>,
    scope: Scope,
}

/// Shared memory for the partial results of warps.
struct Shared {
    memref: Val,
    elem: Elem,
    len: usize,
}

impl Shared {
    fn new(
        e: &mut Emitter<'_>,
        globals: &mut String,
        symbol: String,
        elem: Elem,
        len: usize,
    ) -> Self {
        let ty = format!("memref<{len}x{}, 3>", elem.name());
        writeln!(
            globals,
            "memref.global \"private\" @{symbol} : {ty} = uninitialized {{alignment = 16}}"
        )
        .expect("invariant: a String takes all text");
        let get = format!("memref.get_global @{symbol} : {ty}");
        let memref = e.t.def(Type(elem, 1), format_args!("{get}"));
        Shared { memref, elem, len }
    }

    fn ty(&self) -> String {
        format!("memref<{}x{}, 3>", self.len, self.elem.name())
    }

    fn write(&self, e: &mut Emitter<'_>, index: Val, value: Val) {
        let (m, ty) = (self.memref, self.ty());
        e.t.line(format_args!("memref.store {value}, {m}[{index}] : {ty}"));
    }

    fn read(&self, e: &mut Emitter<'_>, index: Val) -> Val {
        let (m, ty) = (self.memref, self.ty());
        e.t.def(Type(self.elem, 1), format_args!("memref.load {m}[{index}] : {ty}"))
    }
}

fn element(program: &Program, reduction: Id) -> Result<Elem, Unsupported> {
    match program.dag.ty(reduction) {
        Ty::F32 => Ok(Elem::F32),
        Ty::I32 => Ok(Elem::I32),
        Ty::I64 | Ty::Bool => {
            Err(Unsupported::new("reduce", "64-bit integers are not reduced on CUDA"))
        }
    }
}

/// A row per block.
pub(crate) fn rows(
    e: &mut Emitter<'_>,
    symbol: &str,
    globals: &mut String,
) -> Result<Shape, Unsupported> {
    let program = e.program;
    let (cols, width) = (program.cols(), e.width);
    let vectors = cols / width;
    let threads = vectors.next_power_of_two().clamp(WARP, MAX_THREADS);
    let (thread, row) = thread_and_block(e);
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
            value = butterfly(e, f, value, WARP);
            if threads > WARP {
                let elem = element(program, id)?;
                let name = format!("{symbol}_shared_{k}_{i}");
                let shared = Shared::new(e, globals, name, elem, threads / WARP);
                value = across_warps(e, f, value, thread, &shared);
            }
            e.bind(id, value);
        }
    }
    if !row_stores.is_empty() {
        let zero = e.t.index(0);
        let first = e.t.cmpi("eq", thread, zero);
        e.t.open_if(first);
        e.scope(|e| e.store_all(&row_stores));
        e.t.close();
    }
    if full_stores.is_empty() {
        return Ok((threads, [program.rows(), 1]));
    }
    e.prepare(&full_stores.iter().map(|s| s.value).collect::<Vec<_>>(), |d| !d.col);
    for mut part in parts.drain(..) {
        if let Some(inside) = part.inside {
            e.t.open_if(inside);
        }
        e.resume(part.col, &mut part.scope, |e| e.scope(|e| e.store_all(&full_stores)));
        if part.inside.is_some() {
            e.t.close();
        }
    }
    if n_parts > MAX_VECTORS {
        let range = column_range(e, thread, threads);
        e.for_loop(range, &[], |e, col, _| {
            e.at_col(col, None, |e| e.store_all(&full_stores));
            vec![]
        });
    }
    Ok((threads, [program.rows(), 1]))
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

/// Combines the values of `n` neighboring threads; each gets the result.
fn butterfly(e: &mut Emitter<'_>, f: ReduceFn, mut value: Val, n: usize) -> Val {
    let (all, clamp) = (e.t.int(-1, Elem::I32, 1), e.t.int(31, Elem::I32, 1));
    let mut distance = n / 2;
    while distance > 0 {
        let offset = e.t.int(distance as i64, Elem::I32, 1);
        let ty = value.ty();
        let other = e.t.def(
            ty,
            format_args!("nvvm.shfl.sync bfly {all}, {value}, {offset}, {clamp} : {ty} -> {ty}"),
        );
        value = e.combine(f, value, other);
        distance /= 2;
    }
    value
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
    let value = shared.read(e, slot);
    butterfly(e, f, value, shared.len)
}

/// 32 columns per block, and a part of the rows if they are split.
pub(crate) fn cols(
    e: &mut Emitter<'_>,
    symbol: &str,
    globals: &mut String,
    stage: Stage,
) -> Result<Shape, Unsupported> {
    let program = e.program;
    let level = levels(program).into_iter().next().unwrap_or_default();
    let (thread, block) = thread_and_block(e);
    let (warp_size, zero) = (e.t.index(WARP), e.t.index(0));
    let lane = e.t.same("arith.remui", &[thread, warp_size]);
    let warp = e.t.same("arith.divui", &[thread, warp_size]);
    let first = e.t.same("arith.muli", &[block, warp_size]);
    let col = e.t.same("arith.addi", &[first, lane]);
    let last = e.t.index(program.cols() - 1);
    let inside = e.t.cmpi("ule", col, last);
    let col = e.t.same("arith.minui", &[col, last]);
    let part = match stage {
        Stage::Parts(splits) => Some((register(e, "ctaid.y"), splits)),
        _ => None,
    };
    let sums = partial_sums(e, &level, (warp, col), part, stage);
    let mut shared = Vec::with_capacity(level.len());
    for (i, (&id, sum)) in level.iter().zip(sums).enumerate() {
        let name = format!("{symbol}_shared_{i}");
        let memory = Shared::new(e, globals, name, element(program, id)?, COL_WARPS * WARP);
        memory.write(e, thread, sum);
        shared.push(memory);
    }
    e.t.line(format_args!("nvvm.barrier0"));
    let is_first = e.t.cmpi("eq", warp, zero);
    let writes = e.t.same("arith.andi", &[is_first, inside]);
    e.t.open_if(writes);
    e.at_col(col, None, |e| {
        for (i, (&id, shared)) in level.iter().zip(&shared).enumerate() {
            let (f, _) = e.reduction(id);
            let mut sum = shared.read(e, lane);
            for k in 1..COL_WARPS {
                let offset = e.t.index(k * WARP);
                let slot = e.t.same("arith.addi", &[lane, offset]);
                let part = shared.read(e, slot);
                sum = e.combine(f, sum, part);
            }
            match part {
                Some((part, splits)) => {
                    let index = scratch_index(e, i, splits, part, col);
                    write_scratch(e, level.len() * splits, index, sum);
                }
                None => e.bind(id, sum),
            }
        }
        if part.is_none() {
            e.store_all(&program.stores);
        }
    });
    e.t.close();
    let splits = part.map_or(1, |(_, splits)| splits);
    Ok((COL_WARPS * WARP, [program.cols().div_ceil(WARP), splits]))
}

/// What each thread has of the sums of its column: every `COL_WARPS`-th row of its part, or every
/// `COL_WARPS`-th part.
fn partial_sums(
    e: &mut Emitter<'_>,
    level: &[Id],
    (warp, col): (Val, Val),
    part: Option<(Val, usize)>,
    stage: Stage,
) -> Vec<Val> {
    let program = e.program;
    let starts: Vec<Val> = level.iter().map(|&id| e.identity(id, 1)).collect();
    let step = e.t.index(COL_WARPS);
    if let Stage::Total(splits) = stage {
        let range = [warp, e.t.index(splits), step];
        return e.for_loop(range, &starts, |e, split, sums| {
            let next = level.iter().zip(sums).enumerate().map(|(i, (&id, &sum))| {
                let index = scratch_index(e, i, splits, split, col);
                let part = read_scratch(e, level.len() * splits, index, sum.elem);
                let (f, _) = e.reduction(id);
                e.combine(f, sum, part)
            });
            next.collect()
        });
    }
    let range = match part {
        None => [warp, e.t.index(program.rows()), step],
        Some((part, splits)) => {
            let (size, rows) = (e.t.index(program.rows().div_ceil(splits)), program.rows());
            let (begin, rows) = (e.t.same("arith.muli", &[part, size]), e.t.index(rows));
            let end = e.t.same("arith.addi", &[begin, size]);
            let end = e.t.same("arith.minui", &[end, rows]);
            [e.t.same("arith.addi", &[begin, warp]), end, step]
        }
    };
    e.for_loop(range, &starts, |e, row, sums| {
        e.set_row(row);
        e.at_col(col, None, |e| accumulate(e, level, sums, None))
    })
}

/// Where the sum of one part and column is: `[reduction, part, column]`.
fn scratch_index(e: &mut Emitter<'_>, reduction: usize, splits: usize, part: Val, col: Val) -> Val {
    let (first, n_cols) = (e.t.index(reduction * splits), e.t.index(e.program.cols()));
    let row = e.t.same("arith.addi", &[first, part]);
    let row = e.t.same("arith.muli", &[row, n_cols]);
    e.t.same("arith.addi", &[row, col])
}

/// The scratch memory: an f32 for each of `rows` rows and each column; other types by their bits.
fn scratch(e: &Emitter<'_>, rows: usize) -> (usize, String) {
    (e.program.types.len(), format!("memref<{}xf32>", rows * e.program.cols()))
}

fn write_scratch(e: &mut Emitter<'_>, rows: usize, index: Val, value: Val) {
    let (argument, ty) = scratch(e, rows);
    let value = match value.elem {
        Elem::F32 => value,
        _ => e.t.convert("arith.bitcast", value, Elem::F32),
    };
    e.t.line(format_args!("memref.store {value}, %arg{argument}[{index}] : {ty}"));
}

fn read_scratch(e: &mut Emitter<'_>, rows: usize, index: Val, elem: Elem) -> Val {
    let (argument, ty) = scratch(e, rows);
    let load = format!("memref.load %arg{argument}[{index}] : {ty}");
    let value = e.t.def(Type(Elem::F32, 1), format_args!("{load}"));
    if elem == Elem::F32 { value } else { e.t.convert("arith.bitcast", value, elem) }
}
