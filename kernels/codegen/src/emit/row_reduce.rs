//! Row reductions on the host. The unit of work is a row.
//!
//! Each level of reductions is one loop over the columns; a last loop writes the results. An expensive value, such as
//! an exponential, that a later loop reuses is stored in a row buffer.

use super::expr::{Id, Ty};
use super::host_function::LANES;
use super::point::{Emitter, RowBuffer};
use super::region::{Program, Store, levels};
use super::text::{Elem, Type, Val};
use std::collections::HashSet;

/// Accumulators per reduction, to hide the latency of additions.
const UNROLL: usize = 4;
/// Maximum bytes of row buffers, which are on the stack.
const MAX_BUFFER_BYTES: usize = 256 << 10;

pub(crate) fn emit(e: &mut Emitter<'_>, begin: Val, end: Val) {
    let program = e.program;
    let levels = levels(program);
    let (full_stores, row_stores): (Vec<Store>, Vec<Store>) =
        program.stores.iter().cloned().partition(|s| s.at.strides.last() != Some(&0));
    let loops = loop_roots(program, &levels, &full_stores);
    for id in kept_values(program, &loops) {
        let n = e.row_buffer_len();
        let memref = e.t.def(
            Type(Elem::Index, 1),
            format_args!("memref.alloca() {{alignment = 64 : i64}} : memref<{n}xf32>"),
        );
        e.row_buffers.insert(id, RowBuffer { memref, filled: false });
    }
    let one = e.t.index(1);
    e.for_loop([begin, end, one], &[], |e, row, _| {
        e.set_row(row);
        for (level, roots) in levels.iter().zip(&loops) {
            e.prepare(roots, |d| !d.col);
            reduce(e, level);
            fill(e, roots);
        }
        if let Some(roots) = loops.get(levels.len()) {
            e.prepare(roots, |d| !d.col);
        }
        e.store_all(&row_stores);
        if !full_stores.is_empty() {
            write(e, &full_stores);
        }
        e.row_buffers.values_mut().for_each(|b| b.filled = false);
        vec![]
    });
}

/// What each loop over the columns evaluates: the operands of each level, then the written values.
pub(crate) fn loop_roots(
    program: &Program,
    levels: &[Vec<Id>],
    full_stores: &[Store],
) -> Vec<Vec<Id>> {
    let mut loops: Vec<Vec<Id>> = levels
        .iter()
        .map(|level| level.iter().flat_map(|&id| program.dag.operands(id)).collect())
        .collect();
    if !full_stores.is_empty() {
        loops.push(full_stores.iter().map(|s| s.value).collect());
    }
    loops
}

/// The values to store: the outermost expensive ones that a loop needs and an earlier loop has computed.
fn kept_values(program: &Program, loops: &[Vec<Id>]) -> Vec<Id> {
    let (mut seen, mut kept) = (HashSet::new(), Vec::new());
    for roots in loops {
        let mut stack = roots.clone();
        let mut visited = HashSet::new();
        while let Some(id) = stack.pop() {
            if !program.depends(id).col || !visited.insert(id) {
                continue;
            }
            if seen.contains(&id) && is_expensive(program, id) {
                let bytes = (kept.len() + 1) * 4 * program.cols().next_multiple_of(LANES);
                if !kept.contains(&id) && bytes <= MAX_BUFFER_BYTES {
                    kept.push(id);
                }
                continue;
            }
            stack.extend(program.dag.operands(id));
        }
        seen.extend(reachable(program, roots));
    }
    kept.sort();
    kept
}

/// The column-dependent values that evaluating `roots` computes.
pub(crate) fn reachable(program: &Program, roots: &[Id]) -> HashSet<Id> {
    let (mut found, mut stack) = (HashSet::new(), roots.to_vec());
    while let Some(id) = stack.pop() {
        if program.depends(id).col && found.insert(id) {
            stack.extend(program.dag.operands(id));
        }
    }
    found
}

/// Whether the value is the f32 result of an expensive function.
fn is_expensive(program: &Program, id: Id) -> bool {
    program.dag.ty(id) == Ty::F32
        && reachable(program, &[id]).into_iter().any(|id| program.dag.is_expensive(id))
}

/// Marks the row buffers that a loop over `roots` has written.
fn fill(e: &mut Emitter<'_>, roots: &[Id]) {
    for id in reachable(e.program, roots) {
        if let Some(buffer) = e.row_buffers.get_mut(&id) {
            buffer.filled = true;
        }
    }
}

/// Computes the reductions of one level over all columns and binds their values.
fn reduce(e: &mut Emitter<'_>, level: &[Id]) {
    let cols = e.program.cols();
    let (full, tail) = (cols / LANES * LANES, cols % LANES);
    let wide_step = LANES * UNROLL;
    let wide = if full >= 2 * wide_step { full / wide_step * wide_step } else { 0 };
    let mut sums: Vec<Val> = level.iter().map(|&id| e.identity(id, LANES)).collect();
    if wide > 0 {
        let starts: Vec<Val> = (0..UNROLL).flat_map(|_| sums.clone()).collect();
        let range = [e.t.index(0), e.t.index(wide), e.t.index(wide_step)];
        let parts = e.for_loop(range, &starts, |e, col, parts| {
            let mut next = Vec::with_capacity(parts.len());
            for (k, parts) in parts.chunks(level.len()).enumerate() {
                let offset = e.t.index(k * LANES);
                let col = e.t.same("arith.addi", &[col, offset]);
                next.extend(step(e, level, parts, col, None));
            }
            next
        });
        sums = parts[..level.len()].to_vec();
        for part in parts.chunks(level.len()).skip(1) {
            for ((sum, &part), &id) in sums.iter_mut().zip(part).zip(level) {
                let (f, _) = e.reduction(id);
                *sum = e.combine(f, *sum, part);
            }
        }
    }
    if full > wide {
        let range = [e.t.index(wide), e.t.index(full), e.t.index(LANES)];
        sums = e.for_loop(range, &sums, |e, col, sums| step(e, level, sums, col, None));
    }
    if tail > 0 {
        let (col, mask) = (e.t.index(full), e.t.mask(tail, LANES));
        sums = step(e, level, &sums, col, Some(mask));
    }
    for (&id, sum) in level.iter().zip(sums) {
        let (f, _) = e.reduction(id);
        let value = e.across_lanes(f, sum);
        e.bind(id, value);
    }
}

fn step(e: &mut Emitter<'_>, level: &[Id], sums: &[Val], col: Val, mask: Option<Val>) -> Vec<Val> {
    e.at_col(col, mask, |e| {
        level.iter().zip(sums).map(|(&id, &sum)| e.accumulate(id, sum, mask)).collect()
    })
}

fn write(e: &mut Emitter<'_>, stores: &[Store]) {
    let cols = e.program.cols();
    let (full, tail) = (cols / LANES * LANES, cols % LANES);
    if full > 0 {
        let range = [e.t.index(0), e.t.index(full), e.t.index(LANES)];
        e.for_loop(range, &[], |e, col, _| {
            e.at_col(col, None, |e| e.store_all(stores));
            vec![]
        });
    }
    if tail > 0 {
        let (col, mask) = (e.t.index(full), e.t.mask(tail, LANES));
        e.at_col(col, Some(mask), |e| e.store_all(stores));
    }
}
