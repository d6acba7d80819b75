//! Selection for matmul, alone or fused with a bias and a cast.

pub(super) mod epilogue;

use crate::assembler::{Assembler, choice};
use crate::batches::{Batches, batches};
use crate::convert;
use crate::generated::Generated;
use crate::routine::{Access, Call, elem};
use frit_ir::ops::{BinaryFn, FusionKind, MatMul};
use frit_ir::plan::{CandidateName, Epilogue, Gemm, Launch, Matrix, Pointer};
use frit_ir::{DType, Graph, Node, Op, TensorType, ValueId};
use frit_kernels::routine::Routine;
use frit_kernels::routine::gemm as cpu;

/// Selects the matmul of the first node, with as many of the following nodes as its epilogue covers. Returns the number
/// of nodes covered, 0 if the first is not a matmul.
pub(super) fn cuda(a: &mut Assembler<'_>, nodes: &[&Node]) -> Option<usize> {
    let Some((matmul, followers)) = nodes.split_first() else { return Some(0) };
    let Op::MatMul(op) = &matmul.op else { return Some(0) };
    let (mut last, mut taken, mut bias) = (matmul.outputs[0], 1, None);
    let mut rest = followers.iter();
    let mut next = rest.next();
    let is_one = is_one_batch(op, a.ty(matmul.inputs[0]), a.ty(matmul.inputs[1]));
    if let Some(vector) = next.filter(|_| is_one).and_then(|node| bias_of(a, node, last)) {
        (last, taken, bias) = (followers[0].outputs[0], 2, Some(vector));
        next = rest.next();
    }
    let narrows = |node: &&&Node| {
        matches!(node.op, Op::Cast(_))
            && node.inputs == [last]
            && !a.is_read_elsewhere(last, node)
            && a.ty(node.outputs[0]).dtype.is_low_precision()
            && a.ty(last).dtype == DType::F32
    };
    if let Some(cast) = next.filter(narrows) {
        (last, taken) = (cast.outputs[0], taken + 1);
    }
    gemm(a, op, matmul, bias, last)?;
    Some(taken)
}

/// Whether one launch computes the whole matmul.
fn is_one_batch(op: &MatMul, left: &TensorType, right: &TensorType) -> bool {
    op.dims(left, right).batch == 1 || batches(left, right).is_some_and(|b| b.runs.len() == 1)
}

/// The vector along the last axis that `node` adds to `matmul`, provided that nothing else reads the GEMM.
fn bias_of(a: &Assembler<'_>, node: &Node, matmul: ValueId) -> Option<ValueId> {
    let ty = a.ty(matmul);
    let at = node.inputs.iter().position(|v| *v != matmul)?;
    let bias = a.ty(node.inputs[at]);
    let n = *ty.shape.0.last()?;
    let fits = matches!(node.op, Op::Binary(BinaryFn::Add))
        && node.inputs[1 - at] == matmul
        && bias.shape.0.last() == Some(&n)
        && bias.shape.numel() == n
        && a.ty(node.outputs[0]) == ty
        && ty.dtype != DType::F64
        && !a.is_read_elsewhere(matmul, node);
    fits.then_some(node.inputs[at])
}

/// Whether the library multiplies `operands` into `result`.
pub(super) fn is_direct(operands: DType, result: DType) -> bool {
    operands == result || (operands.is_low_precision() && result == DType::F32)
}

fn gemm(
    a: &mut Assembler<'_>,
    op: &MatMul,
    matmul: &Node,
    bias: Option<ValueId>,
    result: ValueId,
) -> Option<()> {
    let (left, right) = (a.ty(matmul.inputs[0]), a.ty(matmul.inputs[1]));
    let out = a.ty(result);
    if !matches!(left.dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
        return None;
    }
    let dims = op.dims(left, right);
    let at = [a.read(matmul.inputs[0])?, a.read(matmul.inputs[1])?];
    let epilogue = match bias {
        Some(bias) => Epilogue::Bias(a.read(bias)?),
        None => Epilogue::None,
    };
    let to = a.write(result);
    let sum_type = a.ty(matmul.outputs[0]).dtype;
    // A bias is added in its own type; a result type that the library does not write is converted afterwards.
    let direct = is_direct(left.dtype, out.dtype) && (bias.is_none() || sum_type == out.dtype);
    let wide = if left.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let (dtype, sum) = match direct {
        true => (out.dtype, to),
        false => (wide, a.scratch(out.shape.numel() * wide.size())),
    };
    if bias.is_some() && sum_type != dtype {
        return None;
    }
    let n = out.shape.numel();
    if n == 0 {
        return Some(());
    }
    if dims.k == 0 {
        return empty_sum(a, (epilogue, sum_type), (to, out));
    }
    let one = Gemm {
        m: dims.m,
        n: dims.n,
        k: dims.k,
        batch: 1,
        a: matrix(at[0], left.dtype, (dims.m, dims.k), op.trans_a),
        b: matrix(at[1], right.dtype, (dims.k, dims.n), op.trans_b),
        d: matrix(sum, dtype, (dims.m, dims.n), false),
        epilogue,
    };
    let gemms = if dims.batch == 1 { vec![one] } else { batched(&one, left, right)? };
    if let ([gemm], Some(_)) = (&gemms[..], bias) {
        return biased(a, gemm, (to, out.dtype));
    }
    gemms.into_iter().for_each(|gemm| a.launch(Launch::Gemm(gemm)));
    if direct { Some(()) } else { convert::convert(a, (sum, dtype), (to, out.dtype), n) }
}

/// A GEMM with a bias, or without it and followed by a kernel that adds it. Either way the sum is converted to `to`, if
/// the GEMM does not write there.
pub(super) fn biased(a: &mut Assembler<'_>, gemm: &Gemm, to: (Pointer, DType)) -> Option<()> {
    let (bias, epilogue) = match gemm.epilogue {
        Epilogue::Bias(bias) => (bias, Epilogue::None),
        Epilogue::Add { matrix, bias } => (bias?, Epilogue::Add { matrix, bias: None }),
        _ => return None,
    };
    let &Gemm { batch, m, n, .. } = gemm;
    let (at, dtype) = (gemm.d.at, gemm.d.dtype);
    let finish = |a: &mut Assembler<'_>, bias: Option<Pointer>| {
        let mut kernel = Generated::new();
        let mut y = kernel.read(at, dtype, &[batch * m, n])?;
        if let Some(bias) = bias {
            let bias = kernel.read(bias, dtype, &[n])?;
            y = kernel.binary(BinaryFn::Add, y, bias)?;
        }
        let y = kernel.cast(y, to.1)?;
        kernel.write(y, to.0);
        Some(kernel.launch(a, FusionKind::Pointwise))
    };
    let mut fused = vec![Launch::Gemm(gemm.clone())];
    if at != to.0 {
        fused.push(finish(a, None)?);
    }
    let plain = Launch::Gemm(Gemm { epilogue, ..gemm.clone() });
    let unfused = vec![plain, finish(a, Some(bias))?];
    a.launch(with_epilogue(fused, unfused));
    Some(())
}

/// A GEMM with an epilogue, which cuBLASLt may have no algorithm for, and without.
pub(super) fn with_epilogue(fused: Vec<Launch>, unfused: Vec<Launch>) -> Launch {
    choice((CandidateName::Cublaslt, fused), (CandidateName::Unfused, unfused))
}

/// A contiguous matrix.
pub(super) fn matrix(
    at: Pointer,
    dtype: DType,
    (rows, columns): (usize, usize),
    transposed: bool,
) -> Matrix {
    let row_stride = if transposed { rows } else { columns };
    Matrix { at, dtype, row_stride, batch_stride: 0, transposed, scale: None }
}

/// An empty sum: zeros, or the bias in every row.
fn empty_sum(
    a: &mut Assembler<'_>,
    (epilogue, bias_type): (Epilogue, DType),
    (to, out): (Pointer, &TensorType),
) -> Option<()> {
    let Epilogue::Bias(bias) = epilogue else { return a.fill(to, out, 0.0) };
    let n = *out.shape.0.last()?;
    for row in 0..out.shape.numel() / n {
        let at = to.offset(row * n * out.dtype.size());
        convert::convert(a, (bias, bias_type), (at, out.dtype), n)?;
    }
    Some(())
}

/// The GEMMs of all leading axes, one launch for each batch of equal strides.
fn batched(one: &Gemm, left: &TensorType, right: &TensorType) -> Option<Vec<Gemm>> {
    let Batches { len, steps, runs } = batches(left, right)?;
    let [ma, mb, md] = [one.m * one.k, one.k * one.n, one.m * one.n];
    let moved = |matrix: &Matrix, first: usize, size: usize, step: usize| Matrix {
        at: matrix.at.offset(first * size * matrix.dtype.size()),
        batch_stride: step * size,
        ..matrix.clone()
    };
    let all = runs.into_iter().map(|at| Gemm {
        batch: len,
        a: moved(&one.a, at[0], ma, steps[0]),
        b: moved(&one.b, at[1], mb, steps[1]),
        d: moved(&one.d, at[2], md, steps[2]),
        ..one.clone()
    });
    Some(all.collect())
}

/// A GEMM, alone or followed by the addition of a matrix, or of a vector along its last axis.
pub(super) fn cpu(body: &Graph, nodes: &[&Node]) -> Option<Call> {
    let (matmul, bias) = match nodes {
        [matmul] => (matmul, None),
        [matmul, add] if matches!(add.op, Op::Binary(BinaryFn::Add)) => {
            let other = add.inputs.iter().position(|v| *v != matmul.outputs[0])?;
            let n = *body.ty(matmul.outputs[0]).shape.0.last()?;
            let bias = add.inputs[other];
            if body.ty(bias) == body.ty(matmul.outputs[0])
                && add.inputs[1 - other] == matmul.outputs[0]
            {
                return cpu_sum(body, matmul, bias, add.outputs[0]);
            }
            let fits = body.ty(bias).shape.numel() == n
                && body.ty(bias).shape.0.last() == Some(&n)
                && add.inputs[1 - other] == matmul.outputs[0]
                && body.ty(add.outputs[0]) == body.ty(matmul.outputs[0]);
            (matmul, Some(fits.then_some(bias)?))
        }
        _ => return None,
    };
    let Op::MatMul(op) = &matmul.op else { return None };
    let (a, b) = (body.ty(matmul.inputs[0]), body.ty(matmul.inputs[1]));
    let out = body.ty(matmul.outputs[0]);
    let (gemm, runs) = gemm_of(op, a, b, out)?;
    let bias_elem = match bias {
        Some(bias) => Some(elem(body.ty(bias).dtype)?),
        None => None,
    };
    let reads = matmul.inputs.iter().copied().chain(bias).map(Access::Whole).collect();
    let last = nodes.last()?.outputs[0];
    Some(Call {
        routine: Routine::Gemm { gemm: cpu::Gemm { bias: bias_elem, ..gemm }, runs },
        reads,
        writes: vec![Access::Whole(last)],
    })
}

/// A GEMM and the matrix to which it is added: the gradient of a weight, accumulated in place. Elsewhere the kernel that
/// reads the sum adds what it reads anyway, where this would copy the matrix first.
fn cpu_sum(body: &Graph, matmul: &Node, matrix: ValueId, sum: ValueId) -> Option<Call> {
    let Op::MatMul(op) = &matmul.op else { return None };
    if !op.trans_a || op.trans_b {
        return None;
    }
    let [a, b] = [matmul.inputs[0], matmul.inputs[1]];
    let out = body.ty(matmul.outputs[0]);
    let (gemm, runs) = gemm_of(op, body.ty(a), body.ty(b), out)?;
    if gemm.batch != 1 || runs.len() != 1 {
        return None;
    }
    Some(Call {
        routine: Routine::Gemm { gemm: cpu::Gemm { accumulate: true, ..gemm }, runs },
        reads: Access::whole(&[a, b, matrix]),
        writes: vec![Access::Whole(sum)],
    })
}

/// The GEMM, and the first matrices of its batches over the leading axes.
fn gemm_of(
    op: &MatMul,
    a: &TensorType,
    b: &TensorType,
    out: &TensorType,
) -> Option<(cpu::Gemm, Vec<[usize; 3]>)> {
    let dims = op.dims(a, b);
    let (elem_in, elem_out) = (elem(a.dtype)?, elem(out.dtype)?);
    let matrix = |transposed: bool, rows: usize, cols: usize| {
        // Contiguous as stored; rows and columns are exchanged if transposed.
        if transposed {
            cpu::Operand::row_major(elem_in, cols, rows).transposed()
        } else {
            cpu::Operand::row_major(elem_in, rows, cols)
        }
    };
    // Leading axes of `a` that fold into its rows leave one GEMM.
    let Batches { len, steps, runs } = match dims.batch {
        1 => Batches { len: 1, steps: [0; 3], runs: vec![[0; 3]] },
        _ => batches(a, b)?,
    };
    let step = |i: usize, rows: usize, cols: usize| (steps[i] * rows * cols) as isize;
    let gemm = cpu::Gemm {
        m: dims.m,
        n: dims.n,
        k: dims.k,
        batch: len,
        a: cpu::Operand { batch: step(0, dims.m, dims.k), ..matrix(op.trans_a, dims.m, dims.k) },
        b: cpu::Operand { batch: step(1, dims.k, dims.n), ..matrix(op.trans_b, dims.k, dims.n) },
        c: cpu::Operand {
            batch: step(2, dims.m, dims.n),
            ..cpu::Operand::row_major(elem_out, dims.m, dims.n)
        },
        bias: None,
        accumulate: false,
        alpha: 1.0,
    };
    Some((gemm, runs))
}
