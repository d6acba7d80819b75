//! Pointwise regions on the host. The unit of work is a row, or a block of a long row.

use super::host_function::LANES;
use super::point::Emitter;
use super::region::Program;
use super::text::Val;

/// Columns per block; rows longer than two blocks are split.
const BLOCK: usize = 4096;

/// Blocks per row and the columns of each.
pub(crate) fn blocks(program: &Program) -> (usize, usize) {
    let cols = program.cols();
    if cols > 2 * BLOCK { (cols.div_ceil(BLOCK), BLOCK) } else { (1, cols) }
}

pub(crate) fn emit(e: &mut Emitter<'_>, begin: Val, end: Val) {
    let program = e.program;
    let (n_blocks, block_cols) = blocks(program);
    let (full, tail) = (program.cols() / LANES * LANES, program.cols() % LANES);
    let one = e.t.index(1);
    e.for_loop([begin, end, one], &[], |e, unit, _| {
        let per_row = e.t.index(n_blocks);
        let (row, block) = match n_blocks {
            1 => (unit, e.t.index(0)),
            _ => (
                e.t.same("arith.divui", &[unit, per_row]),
                e.t.same("arith.remui", &[unit, per_row]),
            ),
        };
        e.set_row(row);
        let results: Vec<_> = program.stores.iter().map(|s| s.value).collect();
        e.prepare(&results, |d| !d.col);
        let (size, limit, step) = (e.t.index(block_cols), e.t.index(full), e.t.index(LANES));
        let from = e.t.same("arith.muli", &[block, size]);
        let to = e.t.same("arith.addi", &[from, size]);
        let to = e.t.same("arith.minui", &[to, limit]);
        if full > 0 {
            e.for_loop([from, to, step], &[], |e, col, _| {
                e.at_col(col, None, |e| e.store_all(&program.stores));
                vec![]
            });
        }
        if tail > 0 {
            let last = e.t.index(n_blocks - 1);
            let is_last = e.t.cmpi("eq", block, last);
            e.t.open_if(is_last);
            let mask = e.t.mask(tail, LANES);
            e.at_col(limit, Some(mask), |e| e.store_all(&program.stores));
            e.t.close();
        }
        vec![]
    });
}
