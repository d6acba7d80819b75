//! GEMM through the crate `gemm`, block by block.
//!
//! f32 operands are used in place; others are converted to f32 blocks. The result block is written directly if C is f32, else
//! accumulated in f32 and rounded once. Blocks are chosen by shape alone, so results do not depend on the number of threads.

use super::{Buffers, Gemm, Operand, shareable};
use crate::dtype::Elem;
use crate::pool::{Pool, Scratch};
use crate::routine::convert::{block_to_f32, from_f32, to_f32};

/// Rows and columns of a block that is converted on the way in or out.
const BLOCK: usize = 256;
/// Depth of a converted block.
const DEPTH: usize = 512;
/// Minimum length of a part of the longer side of an f32 GEMM.
const MIN_PART: usize = 128;
/// Maximum parts of an f32 GEMM.
const MAX_PARTS: usize = 32;

/// Runs all GEMMs of the batch on the pool.
///
/// # Safety
/// As for [`Gemm::run`].
pub(super) unsafe fn run(shape: &Gemm, pool: &Pool, at: Buffers) {
    let (mb, nb) = block_size(shape);
    let (rows, cols) = (shape.m.div_ceil(mb), shape.n.div_ceil(nb));
    let at = shareable(at);
    pool.run_workers(shape.batch * rows * cols, &|chunk, worker| {
        let at = shape.of_batch(at.get(), chunk / (rows * cols));
        let (i, j) = (chunk / cols % rows * mb, chunk % cols * nb);
        // SAFETY: blocks of C are disjoint; the caller vouches for the rest.
        unsafe {
            let size = (mb.min(shape.m - i), nb.min(shape.n - j));
            block(shape, &mut worker.packing, at, (i, j), size);
        }
    });
}

/// Runs one GEMM on the calling thread.
///
/// # Safety
/// As for [`Gemm::run`].
pub(super) unsafe fn run_serial(shape: &Gemm, packing: &mut Scratch, at: Buffers) {
    let (mb, nb) = block_size(shape);
    for i in (0..shape.m).step_by(mb) {
        for j in (0..shape.n).step_by(nb) {
            let size = (mb.min(shape.m - i), nb.min(shape.n - j));
            // SAFETY: the caller vouches for the buffers.
            unsafe { block(shape, packing, at, (i, j), size) };
        }
    }
}

/// Rows and columns of the blocks of a GEMM.
fn block_size(shape: &Gemm) -> (usize, usize) {
    if shape.a.elem != Elem::F32 || shape.c.elem != Elem::F32 {
        return (BLOCK, BLOCK);
    }
    let longer = shape.m.max(shape.n);
    let part = longer.div_ceil(MAX_PARTS).next_multiple_of(16).max(MIN_PART);
    if shape.m > shape.n { (part, shape.n) } else { (shape.m, part) }
}

/// Computes the block of C that begins at `(i, j)`.
unsafe fn block(
    shape: &Gemm,
    packing: &mut Scratch,
    at: Buffers,
    (i, j): (usize, usize),
    (rows, cols): (usize, usize),
) {
    let a = shape.a.elem.at(at.a, i as isize * shape.a.row);
    let b = shape.b.elem.at(at.b, j as isize * shape.b.col);
    let c = shape.c.elem.at_mut(at.c, i as isize * shape.c.row + j as isize * shape.c.col);
    let in_place = shape.a.elem == Elem::F32;
    let direct = shape.c.elem == Elem::F32;
    let depth = if in_place { shape.k } else { DEPTH.min(shape.k) };
    let bytes = |yes: bool, n: usize| if yes { n * size_of::<f32>() } else { 0 };
    let [a_block, b_block, sum, bias, line] = packing.split([
        bytes(!in_place, rows * depth),
        bytes(!in_place, cols * depth),
        bytes(!direct || shape.k == 0, rows * cols),
        bytes(shape.bias.is_some(), cols),
        bytes(true, cols),
    ]);
    let (dst, dst_row, dst_col) =
        if direct { (c.cast(), shape.c.row, shape.c.col) } else { (sum.cast(), cols as isize, 1) };
    // SAFETY: the caller vouches for the buffers; the scratch parts hold the blocks.
    unsafe {
        for p in (0..shape.k).step_by(depth.max(1)) {
            let d = depth.min(shape.k - p);
            let a = shape.a.elem.at(a, p as isize * shape.a.col);
            let b = shape.b.elem.at(b, p as isize * shape.b.row);
            let (lhs, (lhs_row, lhs_col), rhs, (rhs_row, rhs_col)) = if in_place {
                (a.cast(), (shape.a.row, shape.a.col), b.cast(), (shape.b.row, shape.b.col))
            } else {
                let (a_strides, b_strides) =
                    ((shape.a.row, shape.a.col), (shape.b.row, shape.b.col));
                let lhs = block_to_f32(a, shape.a.elem, a_strides, (rows, d), a_block.cast());
                let rhs = block_to_f32(b, shape.b.elem, b_strides, (d, cols), b_block.cast());
                (a_block.cast::<f32>().cast_const(), lhs, b_block.cast::<f32>().cast_const(), rhs)
            };
            gemm::gemm::<f32>(
                rows,
                cols,
                d,
                dst,
                dst_col,
                dst_row,
                p > 0 || (direct && shape.accumulate),
                lhs,
                lhs_col,
                lhs_row,
                rhs,
                rhs_col,
                rhs_row,
                1.0,
                shape.alpha,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
        if direct && shape.bias.is_none() && (shape.k > 0 || shape.accumulate) {
            return;
        }
        if shape.k == 0 {
            sum.cast::<f32>().write_bytes(0, rows * cols);
        }
        let bias = shape.bias.map(|elem| {
            let values = std::slice::from_raw_parts_mut(bias.cast::<f32>(), cols);
            to_f32(elem.at(at.bias, j as isize), elem, values);
            &*values
        });
        let line = std::slice::from_raw_parts_mut(line.cast::<f32>(), cols);
        for row in 0..rows {
            let sum = (shape.k == 0 || !direct)
                .then(|| std::slice::from_raw_parts(sum.cast::<f32>().add(row * cols), cols));
            let c = shape.c.elem.at_mut(c, row as isize * shape.c.row);
            finish_row(shape, c, sum, bias, line);
        }
    }
}

/// Completes a row of C: adds the former contents and rounds a C that is not f32 (its GEMM result is in `sum`), adds
/// the bias, and clears C if the depth is empty. `line` is scratch memory.
unsafe fn finish_row(
    shape: &Gemm,
    c: *mut u8,
    sum: Option<&[f32]>,
    bias: Option<&[f32]>,
    line: &mut [f32],
) {
    let Operand { elem, col, .. } = shape.c;
    // SAFETY: the row of C has as many elements as `line`.
    unsafe {
        if sum.is_some() && !shape.accumulate {
            line.fill(0.0);
        } else if col == 1 {
            to_f32(c, elem, line);
        } else {
            for (j, value) in line.iter_mut().enumerate() {
                *value = elem.load(c, j as isize * col);
            }
        }
        for term in [sum, bias].into_iter().flatten() {
            for (value, term) in line.iter_mut().zip(term) {
                *value += term;
            }
        }
        if col == 1 {
            from_f32(line, c, elem);
        } else {
            for (j, &value) in line.iter().enumerate() {
                elem.store(c, j as isize * col, value);
            }
        }
    }
}
