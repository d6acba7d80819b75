//! Column reductions on CUDA.
//!
//! A block covers as many columns as fit in 128 bytes of the narrowest operand: in each warp, eight threads with a vector each times
//! four rows; or 32 columns, one per thread, where vectors would be misaligned. Warps alternate over the rows; partial results
//! are combined by shuffles within a warp, then through shared memory. If the columns alone would leave most of the GPU idle, rows
//! are split over blocks as well: a first kernel writes each block's sums to scratch memory, a second adds them in order, so that
//! the result is deterministic.

use super::cuda_block::{Shared, WARP, butterfly};
use super::cuda_function::{Shape, register, thread_and_block};
use super::expr::Id;
use super::point::Emitter;
use super::region::{Program, Store, col_reductions};
use super::text::{Elem, Type, Val};
use crate::error::Unsupported;

/// Warps of a block.
const WARPS: usize = 16;
/// Threads of a warp that share a row, if each has a vector of it.
const VECTORS: usize = 8;
/// Blocks that occupy a large GPU: four for each of the 132 multiprocessors of an H100.
const BUSY_BLOCKS: usize = 528;
/// Minimum rows per thread if they are split.
const MIN_ROWS: usize = 4;

/// What a kernel does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stage {
    /// All of it.
    Whole,
    /// Sums of this many parts of the rows, to scratch memory.
    Parts(usize),
    /// The results, from the sums of this many parts.
    Total(usize),
}

/// How a block's threads map to rows and columns.
#[derive(Clone, Copy)]
struct Tile {
    /// Columns per thread.
    width: usize,
    /// Threads per row.
    lanes: usize,
}

impl Tile {
    fn of(width: usize) -> Tile {
        Tile { width, lanes: if width == 1 { WARP } else { VECTORS } }
    }

    /// Columns per block.
    fn cols(self) -> usize {
        self.width * self.lanes
    }

    /// Rows that a block processes at a time.
    fn rows(self) -> usize {
        WARPS * WARP / self.lanes
    }
}

/// Number of parts into which the rows are split, with `width` columns per thread.
pub(crate) fn row_splits(program: &Program, width: usize) -> usize {
    let tile = Tile::of(width);
    let wanted = BUSY_BLOCKS.div_ceil(program.cols().div_ceil(tile.cols()));
    wanted.min(program.rows() / (tile.rows() * MIN_ROWS)).max(1)
}

/// Elements of the scratch memory for this many parts.
pub(crate) fn scratch_len(program: &Program, splits: usize) -> usize {
    col_reductions(program).len() * splits * program.cols()
}

/// Reduces a tile's columns per block, over one part of the rows if these are split.
pub(crate) fn cols(
    e: &mut Emitter<'_>,
    symbol: &str,
    globals: &mut String,
    stage: Stage,
) -> Result<Shape, Unsupported> {
    let program = e.program;
    let tile = Tile::of(e.width);
    let level = col_reductions(program);
    let stores: Vec<Store> =
        program.stores.iter().filter(|s| program.is_of_column(s)).cloned().collect();
    let (thread, block) = thread_and_block(e);
    let (lanes, width) = (e.t.index(tile.lanes), e.t.index(tile.width));
    let lane = e.t.same("arith.remui", &[thread, lanes]);
    let row = e.t.same("arith.divui", &[thread, lanes]);
    let first = e.t.same("arith.muli", &[block, lanes]);
    let col = e.t.same("arith.addi", &[first, lane]);
    let col = e.t.same("arith.muli", &[col, width]);
    let last = e.t.index(program.cols() - tile.width);
    let inside = e.t.cmpi("ule", col, last);
    let col = e.t.same("arith.minui", &[col, last]);
    let part = match stage {
        Stage::Parts(splits) => Some((register(e, "ctaid.y"), splits)),
        _ => None,
    };
    let sums = partial_sums(e, &level, tile, (row, col), part, stage);
    let (warp_size, cols) = (e.t.index(WARP), e.t.index(tile.cols()));
    let warp = e.t.same("arith.divui", &[thread, warp_size]);
    let in_warp = e.t.same("arith.remui", &[thread, warp_size]);
    let first_of_warp = e.t.cmpi("ult", in_warp, lanes);
    let at = e.t.same("arith.muli", &[lane, width]);
    let slot = e.t.same("arith.muli", &[warp, cols]);
    let slot = e.t.same("arith.addi", &[slot, at]);
    let mut shared = Vec::with_capacity(level.len());
    for (i, (&id, sum)) in level.iter().zip(sums).enumerate() {
        let (f, _) = e.reduction(id);
        let sum = butterfly(e, f, sum, tile.lanes.ilog2()..WARP.ilog2());
        let name = format!("{symbol}_shared_{i}");
        let memory = Shared::new(e, globals, name, id, WARPS * tile.cols())?;
        e.t.open_if(first_of_warp);
        memory.write(e, slot, sum);
        e.t.close();
        shared.push(memory);
    }
    e.t.line(format_args!("nvvm.barrier0"));
    let is_first = e.t.cmpi("ult", thread, lanes);
    let writes = e.t.same("arith.andi", &[is_first, inside]);
    e.t.open_if(writes);
    e.at_col(col, None, |e| {
        for (i, (&id, shared)) in level.iter().zip(&shared).enumerate() {
            let (f, _) = e.reduction(id);
            let mut sum = shared.read(e, at, tile.width);
            for k in 1..WARPS {
                let offset = e.t.index(k * tile.cols());
                let slot = e.t.same("arith.addi", &[at, offset]);
                let part = shared.read(e, slot, tile.width);
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
            e.store_all(&stores);
        }
    });
    e.t.close();
    let splits = part.map_or(1, |(_, splits)| splits);
    Ok((WARPS * WARP, [program.cols().div_ceil(tile.cols()), splits]))
}

/// Each thread's partial sums of its columns, over every `tile.rows()`-th row of its part or, in the last stage, every
/// `tile.rows()`-th part.
fn partial_sums(
    e: &mut Emitter<'_>,
    level: &[Id],
    tile: Tile,
    (row, col): (Val, Val),
    part: Option<(Val, usize)>,
    stage: Stage,
) -> Vec<Val> {
    let program = e.program;
    let starts: Vec<Val> = level.iter().map(|&id| e.identity(id, tile.width)).collect();
    let step = e.t.index(tile.rows());
    if let Stage::Total(splits) = stage {
        let range = [row, e.t.index(splits), step];
        return e.for_loop(range, &starts, |e, split, sums| {
            let next = level.iter().zip(sums).enumerate().map(|(i, (&id, &sum))| {
                let index = scratch_index(e, i, splits, split, col);
                let part = read_scratch(e, level.len() * splits, index, sum.ty());
                let (f, _) = e.reduction(id);
                e.combine(f, sum, part)
            });
            next.collect()
        });
    }
    let range = match part {
        None => [row, e.t.index(program.rows()), step],
        Some((part, splits)) => {
            let (size, rows) = (e.t.index(program.rows().div_ceil(splits)), program.rows());
            let (begin, rows) = (e.t.same("arith.muli", &[part, size]), e.t.index(rows));
            let end = e.t.same("arith.addi", &[begin, size]);
            let end = e.t.same("arith.minui", &[end, rows]);
            [e.t.same("arith.addi", &[begin, row]), end, step]
        }
    };
    e.for_loop(range, &starts, |e, row, sums| {
        e.set_row(row);
        e.at_col(col, None, |e| {
            level.iter().zip(sums).map(|(&id, &sum)| e.accumulate(id, sum, None)).collect()
        })
    })
}

/// Index in the scratch memory, `[reduction, part, column]`.
pub(crate) fn scratch_index(
    e: &mut Emitter<'_>,
    reduction: usize,
    splits: usize,
    part: Val,
    col: Val,
) -> Val {
    let (first, n_cols) = (e.t.index(reduction * splits), e.t.index(e.program.cols()));
    let row = e.t.same("arith.addi", &[first, part]);
    let row = e.t.same("arith.muli", &[row, n_cols]);
    e.t.same("arith.addi", &[row, col])
}

/// The scratch memory, `rows` × columns of f32; other types are stored as their bits.
fn scratch(e: &Emitter<'_>, rows: usize) -> (usize, String) {
    (e.program.types.len(), format!("memref<{}xf32>", rows * e.program.cols()))
}

/// Writes the sums of some columns; there are `rows` rows of them.
pub(crate) fn write_scratch(e: &mut Emitter<'_>, rows: usize, index: Val, value: Val) {
    let (argument, ty) = scratch(e, rows);
    let value = match value.elem {
        Elem::F32 => value,
        _ => e.t.convert("arith.bitcast", value, Elem::F32),
    };
    let of = value.ty();
    match value.width {
        1 => e.t.line(format_args!("memref.store {value}, %arg{argument}[{index}] : {ty}")),
        _ => e.t.line(format_args!(
            "vector.store {value}, %arg{argument}[{index}] {{alignment = 16 : i64}} : {ty}, {of}"
        )),
    }
}

fn read_scratch(e: &mut Emitter<'_>, rows: usize, index: Val, Type(elem, width): Type) -> Val {
    let (argument, ty) = scratch(e, rows);
    let of = Type(Elem::F32, width);
    let load = match width {
        1 => format!("memref.load %arg{argument}[{index}] : {ty}"),
        _ => format!("vector.load %arg{argument}[{index}] {{alignment = 16 : i64}} : {ty}, {of}"),
    };
    let value = e.t.def(of, format_args!("{load}"));
    if elem == Elem::F32 { value } else { e.t.convert("arith.bitcast", value, elem) }
}
