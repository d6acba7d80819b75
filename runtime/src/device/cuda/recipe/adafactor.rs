//! A step of Adafactor, which looks at a whole parameter several times.

use super::assembler::Assembler;
use super::{Pointer, SourceKernel};
use frit_ir::ops::{OptimizerKind, OptimizerStep};
use frit_ir::{DType, Node};

/// Rows of a chunk of columns, as in `adafactor.cu`.
const CHUNK: usize = 64;
/// Bytes of a sum.
const SUM: usize = 8;
const SCALARS: usize = 9;

pub(super) fn assemble(a: &mut Assembler<'_>, node: &Node, op: &OptimizerStep) -> Option<()> {
    if op.kind != OptimizerKind::Adafactor {
        return None;
    }
    let tensors = &node.inputs[..3];
    let scalars = &node.inputs[3..];
    let one = |v: &frit_ir::ValueId| a.ty(*v).shape.numel() == 1 && a.ty(*v).dtype == DType::F32;
    if tensors.iter().any(|v| a.ty(*v).dtype != DType::F32)
        || scalars.len() != SCALARS
        || !scalars.iter().all(one)
    {
        return None;
    }
    let dims = a.ty(tensors[0]).shape.dims();
    let (matrices, rows, cols) = match dims {
        [matrices @ .., rows, cols] => (matrices.iter().product(), *rows, *cols),
        // No rows say that it is a vector.
        _ => (1, 0, dims.iter().product()),
    };
    let (state_lines, of_matrix) = (matrices * rows, rows.max(1));
    let (lines, chunks) = (matrices * of_matrix, of_matrix.div_ceil(CHUNK));
    let [param_bytes, state_bytes] = [0, 2].map(|i| a.ty(tensors[i]).bytes());
    let mut at = [Pointer::Scratch(0); SCALARS];
    for (at, value) in at.iter_mut().zip(scalars) {
        *at = a.read(*value)?;
    }
    let [lr, exponent, eps, threshold, decay, clip, step, factor, skip] = at;
    let [param, grad, state] = [a.read(tensors[0])?, a.read(tensors[1])?, a.read(tensors[2])?];
    let [to, state_to] = [a.write(node.outputs[0]), a.write(node.outputs[1])];
    // Usually the same places.
    a.copy_bytes(to, param, param_bytes);
    a.copy_bytes(state_to, state, state_bytes);
    let numel = a.ty(tensors[0]).shape.numel();
    if numel == 0 {
        return Some(());
    }
    let mut sums = |n: usize| a.scratch(n * SUM);
    let (of_grad, of_param, of_update) = (sums(lines), sums(lines), sums(lines));
    let (parts, means, size) = (sums(matrices * chunks * cols), sums(matrices), sums(1));
    let kernel = |entry| SourceKernel::new("adafactor", entry);
    a.run(
        kernel("adafactor_lines")
            .blocks(lines)
            .pointer(of_grad)
            .pointer(of_param)
            .pointer(to)
            .pointer(grad)
            .pointer(factor)
            .pointer(clip)
            .i64(lines)
            .i64(cols),
    );
    let total = matrices * chunks * cols;
    a.run(
        kernel("adafactor_columns")
            .threads(total)
            .pointer(parts)
            .pointer(grad)
            .pointer(factor)
            .pointer(clip)
            .i64(of_matrix)
            .i64(cols)
            .i64(chunks)
            .i64(total),
    );
    let total = state_lines + matrices * cols;
    a.run(
        kernel("adafactor_moments")
            .threads(total)
            .pointer(state_to)
            .pointer(of_grad)
            .pointer(parts)
            .pointer(exponent)
            .pointer(step)
            .pointer(skip)
            .i64(state_lines)
            .i64(rows)
            .i64(cols)
            .i64(chunks)
            .i64(total),
    );
    if rows > 0 {
        a.run(
            kernel("adafactor_means")
                .blocks(matrices)
                .pointer(means)
                .pointer(state_to)
                .i64(matrices)
                .i64(rows),
        );
    }
    a.run(
        kernel("adafactor_updates")
            .blocks(lines)
            .pointer(of_update)
            .pointer(grad)
            .pointer(state_to)
            .pointer(means)
            .pointer(factor)
            .pointer(clip)
            .i64(lines)
            .i64(state_lines)
            .i64(rows)
            .i64(cols),
    );
    a.run(
        kernel("adafactor_size")
            .pointer(size)
            .pointer(of_param)
            .pointer(of_update)
            .pointer(lr)
            .pointer(eps)
            .pointer(threshold)
            .pointer(step)
            .i64(lines)
            .i64(numel),
    );
    a.run(
        kernel("adafactor_apply")
            .threads(numel)
            .pointer(to)
            .pointer(grad)
            .pointer(state_to)
            .pointer(means)
            .pointer(size)
            .pointer(lr)
            .pointer(decay)
            .pointer(factor)
            .pointer(clip)
            .pointer(skip)
            .i64(state_lines)
            .i64(rows)
            .i64(cols)
            .i64(numel),
    );
    Some(())
}
