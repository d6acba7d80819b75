//! Column reductions on the host. The unit of work is a group of 16 columns.
//!
//! Where the range allows, four groups are processed together, so that each pass over the rows reads whole cache lines. Rows are
//! summed in chunks whose sums are then added, which keeps the rounding error of long columns small.

use super::expr::Id;
use super::host_function::LANES;
use super::point::Emitter;
use super::region::col_reductions;
use super::text::Val;

/// Groups of columns that are reduced together.
const GROUPS: usize = 4;
/// Rows of a chunk.
const CHUNK: usize = 128;

pub(crate) fn emit(e: &mut Emitter<'_>, begin: Val, end: Val) {
    let program = e.program;
    let level = col_reductions(program);
    let (full, tail) = (program.cols() / LANES, program.cols() % LANES);
    let (one, four, limit) = (e.t.index(1), e.t.index(GROUPS), e.t.index(full));
    let end_full = e.t.same("arith.minui", &[end, limit]);
    if full > 0 {
        // begin + (end − begin) / 4 · 4, or begin if the range is only the last, partial group.
        let start = e.t.same("arith.minui", &[begin, end_full]);
        let n = e.t.same("arith.subi", &[end_full, start]);
        let n = e.t.same("arith.divui", &[n, four]);
        let n = e.t.same("arith.muli", &[n, four]);
        let middle = e.t.same("arith.addi", &[start, n]);
        if full >= GROUPS {
            e.for_loop([start, middle, four], &[], |e, unit, _| {
                groups(e, &level, unit, GROUPS, None);
                vec![]
            });
        }
        e.for_loop([middle, end_full, one], &[], |e, unit, _| {
            groups(e, &level, unit, 1, None);
            vec![]
        });
    }
    if tail > 0 {
        let (reaches, not_empty) = (e.t.cmpi("ugt", end, limit), e.t.cmpi("ult", begin, end));
        let condition = e.t.same("arith.andi", &[reaches, not_empty]);
        e.t.open_if(condition);
        let mask = e.t.mask(tail, LANES);
        e.scope(|e| groups(e, &level, limit, 1, Some(mask)));
        e.t.close();
    }
}

/// Reduces `n` groups of columns from group `unit` on, and writes the results.
fn groups(e: &mut Emitter<'_>, level: &[Id], unit: Val, n: usize, mask: Option<Val>) {
    let lanes = e.t.index(LANES);
    let first = e.t.same("arith.muli", &[unit, lanes]);
    let cols: Vec<Val> = (0..n)
        .map(|k| {
            let offset = e.t.index(k * LANES);
            e.t.same("arith.addi", &[first, offset])
        })
        .collect();
    if level.is_empty() {
        // Rows of size 1 need no reduction.
        for &col in &cols {
            e.at_col(col, mask, |e| e.store_all(&e.program.stores));
        }
        return;
    }
    let starts: Vec<Val> =
        cols.iter().flat_map(|_| level).map(|&id| e.identity(id, LANES)).collect();
    let sizes = e.program.row_sizes().to_vec();
    let sums = over_rows(e, level, (&cols, mask), &sizes, Vec::new(), &starts);
    for (&col, sums) in cols.iter().zip(sums.chunks(level.len())) {
        e.at_col(col, mask, |e| {
            level.iter().zip(sums).for_each(|(&id, &sum)| e.bind(id, sum));
            e.store_all(&e.program.stores);
        });
    }
}

/// Emits the sums over row atoms of these sizes, given the indices of the preceding atoms.
fn over_rows(
    e: &mut Emitter<'_>,
    level: &[Id],
    (cols, mask): (&[Val], Option<Val>),
    sizes: &[usize],
    indices: Vec<Val>,
    starts: &[Val],
) -> Vec<Val> {
    let Some((&size, inner)) = sizes.split_first() else {
        e.rows = indices;
        let operands: Vec<Id> = level.iter().map(|&id| e.reduction(id).1).collect();
        e.prepare(&operands, |d| !d.col);
        let mut next = Vec::with_capacity(starts.len());
        for (&col, sums) in cols.iter().zip(starts.chunks(level.len())) {
            next.extend(e.at_col(col, mask, |e| {
                let one = |(&id, &sum): (&Id, &Val)| e.accumulate(id, sum, None);
                level.iter().zip(sums).map(one).collect::<Vec<_>>()
            }));
        }
        return next;
    };
    let row = |e: &mut Emitter<'_>, index: Val, sums: &[Val]| {
        let mut indices = indices.clone();
        indices.push(index);
        over_rows(e, level, (cols, mask), inner, indices, sums)
    };
    let (zero, one, limit) = (e.t.index(0), e.t.index(1), e.t.index(size));
    if size <= CHUNK || !inner.is_empty() {
        return e.for_loop([zero, limit, one], starts, |e, index, sums| row(e, index, sums));
    }
    let identities: Vec<Val> =
        cols.iter().flat_map(|_| level).map(|&id| e.identity(id, LANES)).collect();
    let chunk = e.t.index(CHUNK);
    e.for_loop([zero, limit, chunk], starts, |e, from, sums| {
        let to = e.t.same("arith.addi", &[from, chunk]);
        let to = e.t.same("arith.minui", &[to, limit]);
        let parts = e.for_loop([from, to, one], &identities, |e, i, parts| row(e, i, parts));
        let ids = level.iter().cycle();
        sums.iter()
            .zip(parts)
            .zip(ids)
            .map(|((&sum, part), &id)| {
                let (f, _) = e.reduction(id);
                e.combine(f, sum, part)
            })
            .collect()
    })
}
