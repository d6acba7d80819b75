//! Selection for layout operations, as strided copies.

use crate::assembler::Assembler;
use crate::source::SourceKernel;
use crate::source::c_bytes;
use frit_ir::ops::Pad;
use frit_ir::plan::Pointer;
use frit_ir::{Node, Op, Shape, Tensor, TensorType};
use frit_kernels::routine::copy::StridedCopy;
use frit_kernels::routine::{Part, Routine};

/// An axis of a copy: its size, and its strides in the target and the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    size: usize,
    to: isize,
    from: isize,
}

/// Side length of the tiles of `copy_transposed`.
const TILE: usize = 32;
/// Below this many elements along an axis, tiles are mostly empty.
const MIN_TILE: usize = 8;

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    if !node.op.is_layout() {
        return None;
    }
    let ins: Vec<&TensorType> = node.inputs.iter().map(|v| a.ty(*v)).collect();
    let outs: Vec<&TensorType> = node.outputs.iter().map(|v| a.ty(*v)).collect();
    let size = outs[0].dtype.size();
    let from: Vec<Pointer> = node.inputs.iter().map(|v| a.read(*v)).collect::<Option<_>>()?;
    let to: Vec<Pointer> = node.outputs.iter().map(|v| a.write(*v)).collect();
    let (x, y) = (ins[0], outs[0]);
    let mut run = |to: Pointer, from: Pointer, dims: &[usize], strides: [Vec<isize>; 2]| {
        copy(a, (to, from), dims, strides, size)
    };
    match &node.op {
        Op::Reshape(_) => {
            let n = x.shape.numel();
            run(to[0], from[0], &[n], [vec![1], vec![1]])
        }
        Op::Transpose(op) => {
            let own = dense(&x.shape);
            let source = op.perm.iter().map(|&p| own[p]).collect();
            run(to[0], from[0], y.shape.dims(), [dense(&y.shape), source])
        }
        Op::Expand(_) => {
            let source = signed(x.shape.broadcast_strides(&y.shape)?);
            run(to[0], from[0], y.shape.dims(), [dense(&y.shape), source])
        }
        Op::Slice(op) => {
            let own = dense(&x.shape);
            let source = own.iter().zip(&op.step).map(|(stride, step)| stride * step).collect();
            let first: usize = op.start.iter().zip(x.shape.strides()).map(|(a, b)| a * b).sum();
            let first = if y.shape.numel() == 0 { 0 } else { first * size };
            run(to[0], from[0].offset(first), y.shape.dims(), [dense(&y.shape), source])
        }
        Op::Concat(op) => {
            let step = y.shape.strides()[op.axis] * size;
            let mut at = 0;
            for (part, from) in ins.iter().zip(&from) {
                let to = to[0].offset(at * step);
                run(to, *from, part.shape.dims(), [dense(&y.shape), dense(&part.shape)])?;
                at += part.shape.0[op.axis];
            }
            Some(())
        }
        Op::Split(op) => {
            let step = x.shape.strides()[op.axis] * size;
            let mut at = 0;
            for (part, to) in outs.iter().zip(&to) {
                let from = from[0].offset(at * step);
                run(*to, from, part.shape.dims(), [dense(&part.shape), dense(&x.shape)])?;
                at += part.shape.0[op.axis];
            }
            Some(())
        }
        Op::Pad(op) => {
            let first: usize = op.low.iter().zip(y.shape.strides()).map(|(a, b)| a * b).sum();
            if op.low.iter().chain(&op.high).any(|n| *n > 0) {
                a.fill(to[0], y, op.value)?;
            }
            let target = if x.shape.numel() == 0 { to[0] } else { to[0].offset(first * size) };
            let strides = [dense(&y.shape), dense(&x.shape)];
            copy(a, (target, from[0]), x.shape.dims(), strides, size)
        }
        _ => None,
    }
}

impl Assembler<'_> {
    /// Copies a grid of elements of `size` bytes, with these strides in the target and the source.
    pub(super) fn copy(
        &mut self,
        ends: (Pointer, Pointer),
        dims: &[usize],
        strides: [Vec<usize>; 2],
        size: usize,
    ) -> Option<()> {
        copy(self, ends, dims, strides.map(signed), size)
    }
}

fn signed(strides: Vec<usize>) -> Vec<isize> {
    strides.into_iter().map(|s| s as isize).collect()
}

fn dense(shape: &Shape) -> Vec<isize> {
    signed(shape.strides())
}

/// Copies a grid of elements of `size` bytes.
fn copy(
    a: &mut Assembler<'_>,
    (to, from): (Pointer, Pointer),
    dims: &[usize],
    [to_strides, from_strides]: [Vec<isize>; 2],
    size: usize,
) -> Option<()> {
    let all = dims.iter().zip(to_strides).zip(from_strides);
    let axes = merged(all.map(|((&size, to), from)| Axis { size, to, from }));
    let n: usize = axes.iter().map(|axis| axis.size).product();
    if n == 0 {
        return Some(());
    }
    if axes.iter().all(|axis| (axis.to, axis.from) == (1, 1)) {
        a.copy_bytes(to, from, n * size);
        return Some(());
    }
    if let Some(kernel) = transposed(to, from, &axes, size) {
        a.run(kernel);
        return Some(());
    }
    let (unit, axes) = widened(axes, [to, from], size);
    let (n, list) = (axes.iter().map(|axis| axis.size).product(), |f: fn(&Axis) -> isize| {
        axes.iter().map(|axis| (axis.size, f(axis))).collect::<Vec<_>>()
    });
    let kernel = SourceKernel::new("copy", "copy_strided")
        .define("T", c_bytes(unit)?)
        .define("E", c_bytes(size)?)
        .threads(n)
        .pointer(to)
        .pointer(from)
        .axes(&list(|axis| axis.to))?
        .axes(&list(|axis| axis.from))?
        .i64(n);
    a.run(kernel);
    Some(())
}

/// Drops axes of one element, and merges neighbors that are contiguous on both sides.
fn merged(axes: impl Iterator<Item = Axis>) -> Vec<Axis> {
    let mut all: Vec<Axis> = Vec::new();
    for axis in axes.filter(|axis| axis.size != 1) {
        let size = axis.size as isize;
        match all.last_mut() {
            Some(last) if last.to == axis.to * size && last.from == axis.from * size => {
                *last = Axis { size: last.size * axis.size, ..axis };
            }
            _ => all.push(axis),
        }
    }
    all
}

/// The widest possible access in bytes, and the axes in units of it.
fn widened(mut axes: Vec<Axis>, ends: [Pointer; 2], size: usize) -> (usize, Vec<Axis>) {
    let Some((inner, outer)) = axes.split_last_mut() else { return (size, axes) };
    if (inner.to, inner.from) != (1, 1) {
        return (size, axes);
    }
    let fits = |unit: usize| {
        let whole = |stride: isize| (stride.unsigned_abs() * size).is_multiple_of(unit);
        (inner.size * size).is_multiple_of(unit)
            && outer.iter().all(|axis| whole(axis.to) && whole(axis.from))
            && ends.iter().all(|end| end.offset_bytes().is_multiple_of(unit))
    };
    let unit = [16, 8, 4, 2].into_iter().find(|unit| *unit > size && fits(*unit)).unwrap_or(size);
    let times = (unit / size) as isize;
    inner.size /= times as usize;
    outer.iter_mut().for_each(|axis| {
        axis.to /= times;
        axis.from /= times;
    });
    (unit, axes)
}

/// A copy whose contiguous axes differ, through tiles.
fn transposed(to: Pointer, from: Pointer, axes: &[Axis], size: usize) -> Option<SourceKernel> {
    let rows = axes.iter().position(|axis| axis.to == 1 && axis.from > 1)?;
    let columns = axes.iter().position(|axis| axis.from == 1 && axis.to > 1)?;
    let (r, c) = (axes[rows], axes[columns]);
    if r.size < MIN_TILE || c.size < MIN_TILE {
        return None;
    }
    let rest: Vec<Axis> =
        (0..axes.len()).filter(|i| *i != rows && *i != columns).map(|i| axes[i]).collect();
    let batches: usize = rest.iter().map(|axis| axis.size).product();
    let list =
        |f: fn(&Axis) -> isize| rest.iter().map(|axis| (axis.size, f(axis))).collect::<Vec<_>>();
    Some(
        SourceKernel::new("copy", "copy_transposed")
            .define("T", c_bytes(size)?)
            .define("E", c_bytes(size)?)
            .blocks(batches * r.size.div_ceil(TILE) * c.size.div_ceil(TILE))
            .pointer(to)
            .pointer(from)
            .axes(&list(|axis| axis.to))?
            .axes(&list(|axis| axis.from))?
            .i64(r.size)
            .i64(c.size)
            .i64(c.to as usize)
            .i64(r.from as usize)
            .i64(batches),
    )
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], outs: &[&TensorType]) -> Option<Routine> {
    let size = outs.first()?.dtype.size();
    let dense = |t: &TensorType| dense(&t.shape);
    let copy =
        |shape: &[usize], src: &[isize], dst: &[isize]| StridedCopy::new(shape, src, dst, size);
    let one = |copy: StridedCopy, from: usize| Part { from: (0, from), to: (0, 0), copy };
    let parts = match op {
        Op::Pad(op) => return Some(cpu_pad(op, ins[0], outs[0])),
        Op::Reshape(_) => {
            let shape = [ins[0].shape.numel()];
            vec![one(copy(&shape, &[1], &[1]), 0)]
        }
        Op::Transpose(t) => {
            let from = dense(ins[0]);
            let src: Vec<isize> = t.perm.iter().map(|&p| from[p]).collect();
            vec![one(copy(outs[0].shape.dims(), &src, &dense(outs[0])), 0)]
        }
        Op::Expand(_) => {
            let src = signed(ins[0].shape.broadcast_strides(&outs[0].shape)?);
            vec![one(copy(outs[0].shape.dims(), &src, &dense(outs[0])), 0)]
        }
        Op::Slice(s) => {
            let from = dense(ins[0]);
            let src: Vec<isize> = from.iter().zip(&s.step).map(|(f, step)| f * step).collect();
            let first: usize = s.start.iter().zip(ins[0].shape.strides()).map(|(a, b)| a * b).sum();
            let dst = dense(outs[0]);
            vec![one(copy(outs[0].shape.dims(), &src, &dst), first * size)]
        }
        Op::Concat(c) => {
            let step = outs[0].shape.strides()[c.axis] * size;
            let mut at = 0;
            let mut all = Vec::new();
            for (i, ty) in ins.iter().enumerate() {
                let part = copy(ty.shape.dims(), &dense(ty), &dense(outs[0]));
                all.push(Part { from: (i, 0), to: (0, at * step), copy: part });
                at += ty.shape.0[c.axis];
            }
            all
        }
        Op::Split(s) => {
            let step = ins[0].shape.strides()[s.axis] * size;
            let mut at = 0;
            let mut all = Vec::new();
            for (i, ty) in outs.iter().enumerate() {
                let part = copy(ty.shape.dims(), &dense(ins[0]), &dense(ty));
                all.push(Part { from: (0, at * step), to: (i, 0), copy: part });
                at += ty.shape.0[s.axis];
            }
            all
        }
        _ => return None,
    };
    Some(Routine::Copy(parts))
}

/// A border of one value around the operand.
fn cpu_pad(op: &Pad, x: &TensorType, out: &TensorType) -> Routine {
    let size = out.dtype.size();
    let (from, to) = (dense(&x.shape), dense(&out.shape));
    let first: usize = op.low.iter().zip(out.shape.strides()).map(|(a, b)| a * b).sum();
    let element = Tensor::splat(TensorType::scalar(out.dtype), op.value).to_bytes();
    Routine::Pad {
        element,
        copy: StridedCopy::new(x.shape.dims(), &from, &to, size),
        to: if x.shape.numel() == 0 { 0 } else { first * size },
    }
}
