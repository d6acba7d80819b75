//! Which hand-written kernel executes a body: chosen once, when the plan is loaded.

use super::adafactor;
use super::attention::AttentionRoutine;
use super::operand::{Operand, elem};
use super::{index, order, reduce, window};
use frit_ir::ops::{MatMul, Pad, RandomFn};
use frit_ir::{DType, Graph, Node, Op, Tensor, TensorType, ValueId};
use frit_kernels::batch_norm::BatchNorm;
use frit_kernels::conv::Conv;
use frit_kernels::copy::StridedCopy;
use frit_kernels::cum_sum::CumSum;
use frit_kernels::dtype::Elem;
use frit_kernels::embedding::{Embedding, IndexElem};
use frit_kernels::gemm::{Gemm, Operand as Matrix};
use frit_kernels::index::{Combine, Indexed};
use frit_kernels::order::TopK;
use frit_kernels::pool::Pool;
use frit_kernels::pooling::Pooling;
use frit_kernels::quantize::{Format, quantize};
use frit_kernels::random::{Random, RandomMask};
use frit_kernels::reduce_axes::ReduceAxes;
use frit_kernels::{convert::convert, reduce::sum_squares};
use frit_select::batches::{Batches, batches};
use frit_select::places;

/// A library kernel with its parameters.
pub(super) enum Routine {
    /// A matrix product, with the positions of `a`, `b` and the bias among the operands.
    Gemm { gemm: Gemm, runs: Vec<[usize; 3]>, a: usize, b: usize, bias: Option<usize> },
    /// A convolution.
    Conv(Conv),
    /// Its gradient for the operand, or a transposed convolution.
    ConvGradInput(Conv),
    /// Its gradient for the kernel.
    ConvGradWeight(Conv),
    /// The largest element of each window.
    MaxPool(Pooling),
    /// Its gradient.
    MaxPoolGrad(Pooling),
    /// The sum of each window.
    SumPool(Pooling),
    /// Its gradient.
    SumPoolGrad(Pooling),
    /// Batch normalization.
    BatchNorm(BatchNorm),
    /// Its gradient.
    BatchNormGrad(BatchNorm),
    /// Attention, or its gradient.
    Attention(Box<AttentionRoutine>),
    /// Rows of a table.
    Embedding(Embedding),
    /// The gradient for the table.
    EmbeddingGrad(Embedding),
    /// Strided copies from an operand to a result, each with byte offsets into both.
    Copies(Vec<(usize, usize, StridedCopy, usize, usize)>),
    /// A strided copy of the operand into a result filled with one element.
    Pad { element: Vec<u8>, copy: StridedCopy, to: usize },
    /// Elements of the first operand at the places that the second names.
    Gather(Indexed),
    /// Updates written into a copy of the data, or into a result of one element.
    Scatter { indexed: Indexed, combine: Combine, elem: Elem, fill: Option<Vec<u8>> },
    /// The first elements in sorted order with their indices, or the indices alone.
    TopK { top: TopK, values: bool },
    /// Random numbers for the generator's state.
    Random(Random),
    /// A random mask for it.
    RandomMask(RandomMask),
    /// Running sums.
    CumSum(CumSum),
    /// A reduction over axes.
    Reduce(ReduceAxes),
    /// A conversion between float types.
    Convert { len: usize },
    /// Number of non-finite elements and sum of squares of all operands.
    GradStats,
    /// Rounding to an 8-bit float, by the magnitude at this index.
    Quantize { format: Format, index: usize },
    /// A part of a step of Adafactor.
    Adafactor(frit_ir::ops::Adafactor),
}

impl Routine {
    /// The routine of a body; `None` if there is none.
    pub(super) fn of(body: &Graph) -> Option<Routine> {
        let nodes: Vec<&Node> = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf()).collect();
        let inputs: Vec<ValueId> = body
            .nodes()
            .filter(|(_, n)| matches!(n.op, Op::Input(_)))
            .map(|(_, n)| n.outputs[0])
            .collect();
        let position = |v: ValueId| inputs.iter().position(|i| *i == v);
        if let Some(routine) = gemm(body, &nodes, &position) {
            return Some(routine);
        }
        if nodes.iter().any(|n| matches!(n.op, Op::Attention(_) | Op::AttentionGrad(_))) {
            return AttentionRoutine::of(body).map(|a| Routine::Attention(Box::new(a)));
        }
        let [node] = nodes[..] else { return None };
        if matches!(node.op, Op::ScatterElements(_) | Op::ScatterNd(_)) {
            return index::scatter(body, node, &position);
        }
        // Other routines take their operands in order, all of them from memory.
        if node.inputs.iter().enumerate().any(|(i, v)| position(*v) != Some(i)) {
            return None;
        }
        let ins: Vec<&TensorType> = node.inputs.iter().map(|v| body.ty(*v)).collect();
        let outs: Vec<&TensorType> = node.outputs.iter().map(|v| body.ty(*v)).collect();
        match &node.op {
            Op::Conv(_) => window::conv(&node.op, &ins, outs[0]).map(Routine::Conv),
            Op::ConvGradInput(_) => {
                window::conv(&node.op, &ins, outs[0]).map(Routine::ConvGradInput)
            }
            Op::ConvGradWeight(_) => {
                window::conv(&node.op, &ins, outs[0]).map(Routine::ConvGradWeight)
            }
            Op::MaxPool(_) => window::pooling(&node.op, &ins, outs[0]).map(Routine::MaxPool),
            Op::MaxPoolGrad(_) => {
                window::pooling(&node.op, &ins, outs[0]).map(Routine::MaxPoolGrad)
            }
            Op::SumPool(_) => window::pooling(&node.op, &ins, outs[0]).map(Routine::SumPool),
            Op::SumPoolGrad(_) => {
                window::pooling(&node.op, &ins, outs[0]).map(Routine::SumPoolGrad)
            }
            Op::BatchNorm(op) => {
                window::batch_norm(op.eps, ins[0], &ins[1..]).map(Routine::BatchNorm)
            }
            Op::BatchNormGrad(op) => {
                window::batch_norm(op.eps, ins[1], &ins[2..]).map(Routine::BatchNormGrad)
            }
            Op::Embedding(_) => embedding(ins[0], ins[1], ins[0], outs[0]).map(Routine::Embedding),
            Op::EmbeddingGrad(_) => {
                embedding(outs[0], ins[1], outs[0], ins[0]).map(Routine::EmbeddingGrad)
            }
            Op::GradStats if ins.iter().all(|t| t.dtype == DType::F32) => Some(Routine::GradStats),
            Op::Quantize(op) => {
                elem(ins[0].dtype)?;
                let format = if op.to == DType::F8E4M3 { Format::E4M3 } else { Format::E5M2 };
                Some(Routine::Quantize { format, index: op.index })
            }
            Op::Adafactor(op) => Some(Routine::Adafactor(op.clone())),
            Op::Cast(_) => {
                elem(ins[0].dtype)?;
                elem(outs[0].dtype)?;
                Some(Routine::Convert { len: ins[0].shape.numel() })
            }
            Op::Gather(_) | Op::GatherElements(_) | Op::GatherNd(_) => {
                places::gather(&node.op, ins[0], ins[1]).map(Routine::Gather)
            }
            Op::Pad(op) => Some(pad(op, ins[0], outs[0])),
            Op::Random(op) => Some(Routine::Random(Random {
                len: op.shape.numel(),
                normal: op.f == RandomFn::Normal,
                offset: op.offset as f32,
                scale: op.scale as f32,
                most: op.most(),
                id: op.id,
            })),
            Op::RandomMask(op) => {
                let (keep, id) = (op.keep, op.id);
                Some(Routine::RandomMask(RandomMask { len: op.shape.numel(), keep, id }))
            }
            Op::TopK(op) => {
                let top = order::top_k(ins[0], op.axis, op.k, (op.largest, false))?;
                Some(Routine::TopK { top, values: true })
            }
            Op::ArgReduce(op) => {
                let top = order::top_k(ins[0], op.axis, 1, (op.largest, op.last))?;
                Some(Routine::TopK { top, values: false })
            }
            Op::CumSum(op) => reduce::cum_sum(op, ins[0]).map(Routine::CumSum),
            Op::Reduce(_) | Op::SumTo(_) => {
                reduce::axes(&node.op, ins[0], outs[0]).map(Routine::Reduce)
            }
            op => copies(op, &ins, &outs).map(Routine::Copies),
        }
    }

    /// Runs it on dense operands of the body's types.
    pub(super) fn run(
        &self,
        pool: &Pool,
        reads: &[Operand],
        writes: &[Operand],
    ) -> Result<(), String> {
        let read = |i: usize| reads[i].pointer.cast_const();
        // SAFETY: operands are dense, of the types the routine was made from, inside the arenas;
        // verify_plan proves that results overlap no operand.
        unsafe {
            match self {
                Routine::Gemm { gemm, runs, a, b, bias } => {
                    let bias = bias.map_or(std::ptr::null(), read);
                    let Gemm { m, n, k, .. } = *gemm;
                    for at in runs {
                        let a = read(*a).add(at[0] * m * k * gemm.a.elem.size());
                        let b = read(*b).add(at[1] * k * n * gemm.b.elem.size());
                        let c = writes[0].pointer.add(at[2] * m * n * gemm.c.elem.size());
                        gemm.run(pool, a, b, c, bias);
                    }
                }
                Routine::Conv(conv) => conv.forward(pool, read(0), read(1), writes[0].pointer),
                Routine::ConvGradInput(conv) => {
                    conv.grad_input(pool, read(0), read(1), writes[0].pointer);
                }
                Routine::ConvGradWeight(conv) => {
                    conv.grad_weight(pool, read(0), read(1), writes[0].pointer);
                }
                Routine::MaxPool(pooling) => pooling.max(pool, read(0), writes[0].pointer),
                Routine::MaxPoolGrad(pooling) => {
                    pooling.max_grad(pool, read(0), read(1), writes[0].pointer);
                }
                Routine::SumPool(pooling) => pooling.sum(pool, read(0), writes[0].pointer),
                Routine::SumPoolGrad(pooling) => {
                    pooling.sum_grad(pool, read(0), writes[0].pointer);
                }
                Routine::BatchNorm(norm) => norm.forward(
                    pool,
                    read(0),
                    [read(1).cast(), read(2).cast()],
                    writes[0].pointer,
                    [writes[1].pointer.cast(), writes[2].pointer.cast()],
                ),
                Routine::BatchNormGrad(norm) => norm.backward(
                    pool,
                    [read(0), read(1)],
                    [read(2).cast(), read(3).cast(), read(4).cast()],
                    writes[0].pointer,
                    [writes[1].pointer.cast(), writes[2].pointer.cast()],
                ),
                Routine::Attention(attention) => attention.run(pool, reads, writes),
                Routine::Embedding(embedding) => embedding
                    .forward(pool, read(0), read(1), writes[0].pointer)
                    .map_err(|e| e.to_string())?,
                Routine::EmbeddingGrad(embedding) => embedding
                    .backward(pool, read(1), read(0), writes[0].pointer)
                    .map_err(|e| e.to_string())?,
                Routine::Copies(copies) => {
                    for (from, to, copy, src, dst) in copies {
                        copy.run(pool, read(*from).add(*src), writes[*to].pointer.add(*dst));
                    }
                }
                Routine::Pad { element, copy, to } => {
                    let out = writes[0].pointer;
                    fill_with(out, writes[0].ty.bytes(), element);
                    copy.run(pool, read(0), out.add(*to));
                }
                Routine::Gather(indexed) => indexed
                    .gather(pool, read(0), read(1), writes[0].pointer)
                    .map_err(|e| e.to_string())?,
                Routine::Scatter { indexed, combine, elem, fill } => {
                    let out = writes[0].pointer;
                    let operand = match fill {
                        Some(element) => {
                            fill_with(out, writes[0].ty.bytes(), element);
                            0
                        }
                        None => {
                            std::ptr::copy_nonoverlapping(read(0), out, writes[0].ty.bytes());
                            1
                        }
                    };
                    let (ids, updates) = (read(operand), read(operand + 1));
                    indexed
                        .scatter(updates, ids, out, *combine, *elem)
                        .map_err(|e| e.to_string())?;
                }
                Routine::TopK { top, values: true } => {
                    top.run(pool, read(0), writes[0].pointer, writes[1].pointer.cast());
                }
                Routine::TopK { top, values: false } => {
                    top.run(pool, read(0), std::ptr::null_mut(), writes[0].pointer.cast());
                }
                Routine::RandomMask(mask) => {
                    mask.run(pool, read(0).cast::<[i64; 5]>().read(), writes[0].pointer);
                }
                Routine::Random(draws) => {
                    draws.run(pool, read(0).cast::<[i64; 5]>().read(), writes[0].pointer.cast());
                }
                Routine::CumSum(sums) => sums.run(pool, read(0), writes[0].pointer),
                Routine::Reduce(reduce) => reduce.run(pool, read(0), writes[0].pointer),
                Routine::Convert { len } => {
                    let (from, to) = (elem(reads[0].ty.dtype), elem(writes[0].ty.dtype));
                    let (Some(from), Some(to)) = (from, to) else {
                        return Err("conversion of a type without kernels".into());
                    };
                    convert(pool, read(0), from, writes[0].pointer, to, *len);
                }
                Routine::GradStats => {
                    let (mut squares, mut bad) = (0.0, 0);
                    for operand in reads {
                        let len = operand.ty.shape.numel();
                        let sum =
                            sum_squares(pool, operand.pointer, frit_kernels::dtype::Elem::F32, len);
                        squares += sum.value;
                        bad += sum.n_non_finite;
                    }
                    let out = writes[0].pointer.cast::<f32>();
                    out.write(bad as f32);
                    out.add(1).write(squares as f32);
                }
                Routine::Quantize { format, index } => {
                    let (len, dtype) = (reads[0].ty.shape.numel(), reads[0].ty.dtype);
                    let elem = elem(dtype).ok_or("rounding of a type without kernels")?;
                    let recent = match reads.len() {
                        1 => 0.0,
                        _ => read(1).cast::<f32>().add(*index).read(),
                    };
                    let (x, y) = (read(0), writes[0].pointer);
                    let amax = quantize(pool, x, y, (len, elem), *format, recent);
                    writes[1].pointer.cast::<f32>().write(amax);
                }
                Routine::Adafactor(op) => adafactor::run(op, pool, reads, writes),
            }
        }
        Ok(())
    }
}

/// A matrix product, alone or followed by the addition of a vector along its last axis.
fn gemm(
    body: &Graph,
    nodes: &[&Node],
    position: &impl Fn(ValueId) -> Option<usize>,
) -> Option<Routine> {
    let (product, bias) = match nodes {
        [product] => (product, None),
        [product, add] if matches!(add.op, Op::Binary(frit_ir::ops::BinaryFn::Add)) => {
            let other = add.inputs.iter().position(|v| *v != product.outputs[0])?;
            let n = *body.ty(product.outputs[0]).shape.0.last()?;
            let bias = add.inputs[other];
            let fits = body.ty(bias).shape.numel() == n
                && body.ty(bias).shape.0.last() == Some(&n)
                && add.inputs[1 - other] == product.outputs[0]
                && body.ty(add.outputs[0]) == body.ty(product.outputs[0]);
            (product, Some(fits.then_some(bias)?))
        }
        _ => return None,
    };
    if body.outputs.len() != 1 {
        return None;
    }
    let Op::MatMul(op) = &product.op else { return None };
    let (a, b) = (body.ty(product.inputs[0]), body.ty(product.inputs[1]));
    let out = body.ty(product.outputs[0]);
    let (gemm, runs) = gemm_of(op, a, b, out)?;
    let bias_elem = match bias {
        Some(bias) => Some(elem(body.ty(bias).dtype)?),
        None => None,
    };
    Some(Routine::Gemm {
        gemm: Gemm { bias: bias_elem, ..gemm },
        runs,
        a: position(product.inputs[0])?,
        b: position(product.inputs[1])?,
        bias: match bias {
            Some(bias) => Some(position(bias)?),
            None => None,
        },
    })
}

/// The product, and where its runs over the leading axes begin, in matrices.
fn gemm_of(
    op: &MatMul,
    a: &TensorType,
    b: &TensorType,
    out: &TensorType,
) -> Option<(Gemm, Vec<[usize; 3]>)> {
    let dims = op.dims(a, b);
    let (elem_in, elem_out) = (elem(a.dtype)?, elem(out.dtype)?);
    let matrix = |transposed: bool, rows: usize, cols: usize| {
        // Dense as stored; read the other way round if transposed.
        if transposed {
            Matrix::row_major(elem_in, cols, rows).transposed()
        } else {
            Matrix::row_major(elem_in, rows, cols)
        }
    };
    // Leading axes of `a` that count as rows leave one product.
    let Batches { len, steps, runs } = match dims.batch {
        1 => Batches { len: 1, steps: [0; 3], runs: vec![[0; 3]] },
        _ => batches(a, b)?,
    };
    let step = |i: usize, rows: usize, cols: usize| (steps[i] * rows * cols) as isize;
    let gemm = Gemm {
        m: dims.m,
        n: dims.n,
        k: dims.k,
        batch: len,
        a: Matrix { batch: step(0, dims.m, dims.k), ..matrix(op.trans_a, dims.m, dims.k) },
        b: Matrix { batch: step(1, dims.k, dims.n), ..matrix(op.trans_b, dims.k, dims.n) },
        c: Matrix { batch: step(2, dims.m, dims.n), ..Matrix::row_major(elem_out, dims.m, dims.n) },
        bias: None,
        accumulate: false,
        alpha: 1.0,
    };
    Some((gemm, runs))
}

fn embedding(
    shape: &TensorType,
    ids: &TensorType,
    table: &TensorType,
    out: &TensorType,
) -> Option<Embedding> {
    Some(Embedding {
        rows: shape.shape.0[0],
        width: shape.shape.0[1],
        count: ids.shape.numel(),
        index: if ids.dtype == DType::I32 { IndexElem::I32 } else { IndexElem::I64 },
        table: elem(table.dtype)?,
        out: elem(out.dtype)?,
    })
}

/// Writes one element over and over.
///
/// # Safety
/// `out` must be writable for `bytes` bytes.
unsafe fn fill_with(out: *mut u8, bytes: usize, element: &[u8]) {
    // SAFETY: the caller vouches for the range.
    let out = unsafe { std::slice::from_raw_parts_mut(out, bytes) };
    out.chunks_exact_mut(element.len()).for_each(|e| e.copy_from_slice(element));
}

/// A border of one value around the operand.
fn pad(op: &Pad, x: &TensorType, out: &TensorType) -> Routine {
    let size = out.dtype.size();
    let signed = |strides: Vec<usize>| strides.into_iter().map(|s| s as isize).collect::<Vec<_>>();
    let (from, to) = (signed(x.shape.strides()), signed(out.shape.strides()));
    let first: usize = op.low.iter().zip(out.shape.strides()).map(|(a, b)| a * b).sum();
    let element = Tensor::splat(TensorType::scalar(out.dtype), op.value).to_bytes();
    Routine::Pad {
        element,
        copy: StridedCopy::new(x.shape.dims(), &from, &to, size),
        to: if x.shape.numel() == 0 { 0 } else { first * size },
    }
}

type Copy = (usize, usize, StridedCopy, usize, usize);

/// Layout operations as strided copies: (operand, result, copy, source byte, destination byte).
fn copies(op: &Op, ins: &[&TensorType], outs: &[&TensorType]) -> Option<Vec<Copy>> {
    let size = outs.first()?.dtype.size();
    let signed = |strides: Vec<usize>| strides.into_iter().map(|s| s as isize).collect::<Vec<_>>();
    let dense = |t: &TensorType| signed(t.shape.strides());
    let copy =
        |shape: &[usize], src: &[isize], dst: &[isize]| StridedCopy::new(shape, src, dst, size);
    match op {
        Op::Reshape(_) => {
            let shape = [ins[0].shape.numel()];
            Some(vec![(0, 0, copy(&shape, &[1], &[1]), 0, 0)])
        }
        Op::Transpose(t) => {
            let from = dense(ins[0]);
            let src: Vec<isize> = t.perm.iter().map(|&p| from[p]).collect();
            Some(vec![(0, 0, copy(outs[0].shape.dims(), &src, &dense(outs[0])), 0, 0)])
        }
        Op::Expand(_) => {
            let src = signed(ins[0].shape.broadcast_strides(&outs[0].shape)?);
            Some(vec![(0, 0, copy(outs[0].shape.dims(), &src, &dense(outs[0])), 0, 0)])
        }
        Op::Slice(s) => {
            let from = dense(ins[0]);
            let src: Vec<isize> = from.iter().zip(&s.step).map(|(f, step)| f * step).collect();
            let first: usize = s.start.iter().zip(ins[0].shape.strides()).map(|(a, b)| a * b).sum();
            let dst = dense(outs[0]);
            Some(vec![(0, 0, copy(outs[0].shape.dims(), &src, &dst), first * size, 0)])
        }
        Op::Concat(c) => {
            let step = outs[0].shape.strides()[c.axis] * size;
            let mut at = 0;
            let mut all = Vec::new();
            for (i, ty) in ins.iter().enumerate() {
                let part = copy(ty.shape.dims(), &dense(ty), &dense(outs[0]));
                all.push((i, 0, part, 0, at * step));
                at += ty.shape.0[c.axis];
            }
            Some(all)
        }
        Op::Split(s) => {
            let step = ins[0].shape.strides()[s.axis] * size;
            let mut at = 0;
            let mut all = Vec::new();
            for (i, ty) in outs.iter().enumerate() {
                let part = copy(ty.shape.dims(), &dense(ins[0]), &dense(ty));
                all.push((0, i, part, at * step, 0));
                at += ty.shape.0[s.axis];
            }
            Some(all)
        }
        _ => None,
    }
}
