//! Selection for the parts of an Adafactor step, each of which needs a whole parameter.

use crate::assembler::Assembler;
use crate::source::SourceKernel;
use frit_ir::ops::AdafactorPart;
use frit_ir::plan::{Launch, Pointer};
use frit_ir::{Node, Op, TensorType};
use frit_kernels::routine::{self, Routine};

/// Rows of a chunk of columns, as in `adafactor.cu`.
const CHUNK: usize = 64;
/// Bytes of a sum.
const SUM: usize = 8;

/// A parameter as its kernels see it.
struct Shape {
    matrices: usize,
    rows: usize,
    cols: usize,
    /// Rows of all matrices in the state; 0 for a vector.
    state_lines: usize,
    /// Rows of all matrices; 1 for a vector.
    lines: usize,
    numel: usize,
    /// Elements of the flat tensor's part.
    len: usize,
    share: f64,
}

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let Op::Adafactor(op) = &node.op else { return None };
    let (matrices, rows, cols) = op.matrices();
    let shape = Shape {
        matrices,
        rows,
        cols,
        state_lines: matrices * rows,
        lines: matrices * rows.max(1),
        numel: op.shape.numel(),
        len: a.ty(node.inputs[1]).shape.numel(),
        share: op.share,
    };
    let mut at = Vec::with_capacity(node.inputs.len());
    for value in &node.inputs {
        at.push(a.read(*value)?);
    }
    let to: Vec<Pointer> = node.outputs.iter().map(|v| a.write(*v)).collect();
    match op.part {
        AdafactorPart::Sums => sums(a, &shape, &at, to[0], op.state_len()),
        AdafactorPart::Moments => {
            // No copy where the state is updated in place.
            a.copy_bytes(to[0], at[3], op.state_len() * 4);
            moments(a, &shape, &at, &to);
        }
        AdafactorPart::Step => {
            a.copy_bytes(to[0], at[2], shape.len * 4);
            step(a, &shape, &at, to[0]);
        }
    }
    Some(())
}

fn kernel(entry: &'static str) -> SourceKernel {
    SourceKernel::new("adafactor", entry)
}

fn sums(a: &mut Assembler<'_>, s: &Shape, at: &[Pointer], to: Pointer, state_len: usize) {
    if s.numel == 0 {
        a.launch(Launch::Zero { at: to, bytes: (state_len + 1) * 4 });
        return;
    }
    let of_matrix = s.rows.max(1);
    let chunks = of_matrix.div_ceil(CHUNK);
    let total = s.matrices * chunks * s.cols;
    let [of_grad, of_param, parts] = [s.lines, s.lines, total].map(|n| a.scratch(n * SUM));
    let [begin, grad, param, clip, factor] = [0, 1, 2, 3, 4].map(|i| at[i]);
    a.run(
        kernel("adafactor_lines")
            .blocks(s.lines)
            .pointers([of_grad, of_param, begin, grad, param, clip, factor])
            .i64(s.lines)
            .i64(s.cols)
            .i64(s.len),
    );
    a.run(
        kernel("adafactor_columns")
            .threads(total)
            .pointers([parts, begin, grad, clip, factor])
            .i64(of_matrix)
            .i64(s.cols)
            .i64(chunks)
            .i64(total)
            .i64(s.numel)
            .i64(s.len),
    );
    a.run(
        kernel("adafactor_sums")
            .threads(state_len)
            .pointers([to, of_grad, parts])
            .i64(s.state_lines)
            .i64(s.cols)
            .i64(chunks)
            .i64(state_len)
            .f64(s.share),
    );
    total_of(a, s, to.offset(state_len * 4), of_param);
}

fn total_of(a: &mut Assembler<'_>, s: &Shape, to: Pointer, of_lines: Pointer) {
    a.run(kernel("adafactor_total").pointers([to, of_lines]).i64(s.lines).f64(s.share));
}

/// Computes the mean of each matrix's row moments.
fn means(a: &mut Assembler<'_>, s: &Shape, state: Pointer) -> Pointer {
    let means = a.scratch(s.matrices * SUM);
    if s.rows > 0 {
        a.run(
            kernel("adafactor_means")
                .blocks(s.matrices)
                .pointers([means, state])
                .i64(s.matrices)
                .i64(s.rows),
        );
    }
    means
}

fn moments(a: &mut Assembler<'_>, s: &Shape, at: &[Pointer], to: &[Pointer]) {
    if s.numel == 0 {
        a.launch(Launch::Zero { at: to[1], bytes: 4 });
        return;
    }
    let [begin, grad, sums, _, exponent, clip, step, factor, skip] =
        [0, 1, 2, 3, 4, 5, 6, 7, 8].map(|i| at[i]);
    let (state, total) = (to[0], s.state_lines + s.matrices * s.cols);
    a.run(
        kernel("adafactor_moments")
            .threads(total)
            .pointers([state, sums, exponent, step, skip])
            .i64(s.state_lines)
            .i64(s.rows)
            .i64(s.cols)
            .i64(total),
    );
    let means = means(a, s, state);
    let of_update = a.scratch(s.lines * SUM);
    a.run(
        kernel("adafactor_updates")
            .blocks(s.lines)
            .pointers([of_update, begin, grad, state, means, clip, factor, skip])
            .i64(s.lines)
            .i64(s.state_lines)
            .i64(s.rows)
            .i64(s.cols)
            .i64(s.len),
    );
    total_of(a, s, to[1], of_update);
}

fn step(a: &mut Assembler<'_>, s: &Shape, at: &[Pointer], param: Pointer) {
    if s.numel == 0 {
        return;
    }
    let [begin, grad, state, of_param, of_update] = [0, 1, 3, 4, 5].map(|i| at[i]);
    let means = means(a, s, state);
    a.run(
        kernel("adafactor_step")
            .threads(s.numel.min(s.len))
            .pointers([param, begin, grad, state, means, of_param, of_update])
            // Rates, limits and flags, in the order of the operands.
            .pointers([6, 7, 8, 9, 10, 11, 12, 13].map(|i| at[i]))
            .i64(s.state_lines)
            .i64(s.rows)
            .i64(s.cols)
            .i64(s.numel)
            .i64(s.len),
    );
}

pub(super) fn cpu(op: &Op, _: &[&TensorType], _: &[&TensorType]) -> Option<Routine> {
    let Op::Adafactor(op) = op else { return None };
    let (matrices, rows, cols) = op.matrices();
    let part = match op.part {
        AdafactorPart::Sums => routine::AdafactorPart::Sums,
        AdafactorPart::Moments => routine::AdafactorPart::Moments,
        AdafactorPart::Step => routine::AdafactorPart::Step,
    };
    let param =
        frit_kernels::routine::adafactor::Adafactor { matrices, rows, cols, share: op.share };
    Some(Routine::Adafactor { part, param, empty: op.shape.numel() == 0 })
}
