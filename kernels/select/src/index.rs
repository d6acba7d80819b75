//! Selection for indexed reads and writes.

use crate::assembler::Assembler;
use crate::places;
use crate::routine::{Access, Call, elem};
use crate::sort;
use crate::source::SourceKernel;
use crate::source::{c_bytes, c_type};
use frit_ir::ops::ScatterFn;
use frit_ir::plan::Pointer;
use frit_ir::{DType, Graph, Node, Op, Tensor, TensorType, ValueId};
use frit_kernels::dtype::Elem;
use frit_kernels::routine::Routine;
use frit_kernels::routine::index::Combine;
use frit_kernels::routine::index::Indexed;

impl SourceKernel {
    /// Adds the axes of the grid with the strides of its index tuples and of its bases, and the axes of a tuple.
    fn places(self, indexed: &Indexed) -> Option<Self> {
        let along = |strides: &[usize]| {
            let strides = strides.iter().map(|s| *s as isize);
            indexed.dims.iter().copied().zip(strides).collect::<Vec<_>>()
        };
        let axes: Vec<_> = indexed.axes.iter().map(|a| (a.size, a.stride as isize)).collect();
        self.axes(&along(&indexed.index_strides))?.axes(&along(&indexed.base_strides))?.axes(&axes)
    }
}

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    match node.op {
        Op::ScatterElements(_) | Op::ScatterNd(_) => scatter(a, node),
        Op::Gather(_) | Op::GatherElements(_) | Op::GatherNd(_) => gather(a, node),
        _ => None,
    }
}

fn gather(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let (data, ids) = (a.ty(node.inputs[0]), a.ty(node.inputs[1]));
    let out = a.ty(node.outputs[0]);
    let indexed = places::gather(&node.op, data, ids)?;
    let (from, at) = (a.read(node.inputs[0])?, a.read(node.inputs[1])?);
    let to = a.write(node.outputs[0]);
    if out.shape.numel() == 0 {
        return Some(());
    }
    let size = out.dtype.size();
    let widest = [16, 8, 4, 2, 1].into_iter().find(|n| indexed.block.is_multiple_of(*n));
    let unit = widest?.max(size);
    let kernel = SourceKernel::new("gather", "gather")
        .define("T", c_bytes(unit)?)
        .define("E", c_bytes(size)?)
        .define("INDEX", c_type(ids.dtype)?)
        .threads(out.bytes() / unit)
        .pointer(to)
        .pointer(from)
        .pointer(at)
        .places(&indexed)?
        .i64(indexed.blocks())
        .i64(indexed.block / unit)
        .pointer(Pointer::Fault);
    a.run(kernel);
    Some(())
}

fn scatter(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let (data, ids) = (a.ty(node.inputs[0]), a.ty(node.inputs[1]));
    let (f, indexed) = places::scattered(&node.op, data, ids)?;
    let to = begin(a, node.inputs[0], node.outputs[0])?;
    let (at, updates) = (a.read(node.inputs[1])?, a.read(node.inputs[2])?);
    let (count, size) = (indexed.blocks(), data.dtype.size());
    if count == 0 || indexed.block == 0 || data.bytes() == 0 {
        return Some(());
    }
    let blocks = data.bytes() / indexed.block;
    let f = match f {
        ScatterFn::Replace => "REPLACE",
        ScatterFn::Add => "ADD",
        ScatterFn::Mul => "MUL",
        ScatterFn::Max => "MAX",
        ScatterFn::Min => "MIN",
    };
    let kernel = |entry| -> Option<SourceKernel> {
        let kernel = SourceKernel::new("scatter", entry)
            .define("T", c_type(data.dtype)?)
            .define("INDEX", c_type(ids.dtype)?)
            .define("F", f);
        Some(kernel)
    };
    let keys = a.scratch(count * DType::I32.size());
    let find = kernel("scatter_keys")?.threads(count).pointer(keys).pointer(at).places(&indexed)?;
    a.run(find.i64(count).i64(blocks).pointer(Pointer::Fault));
    // Indices outside the data are sorted behind its last block.
    let sorted = sort::sort(a, keys, count, blocks)?;
    let block = indexed.block / size;
    let apply = kernel("scatter_apply")?.threads(count * block).pointer(to).pointer(updates);
    let apply = apply.pointer(sorted.keys).pointer(sorted.places);
    a.run(apply.i64(count).i64(blocks).i64(block));
    Some(())
}

/// Copies the data into the result.
fn begin(a: &mut Assembler<'_>, data: ValueId, result: ValueId) -> Option<Pointer> {
    let ty = a.ty(data);
    let to = a.write(result);
    match a.splat(data) {
        Some(element) => a.fill(to, ty, element)?,
        None => {
            let from = a.read(data)?;
            a.copy_bytes(to, from, ty.bytes());
        }
    }
    Some(to)
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], _: &[&TensorType]) -> Option<Routine> {
    match op {
        Op::ScatterElements(_) | Op::ScatterNd(_) => scatter_routine(op, ins, None),
        Op::Gather(_) | Op::GatherElements(_) | Op::GatherNd(_) => {
            places::gather(op, ins[0], ins[1]).map(Routine::Gather)
        }
        _ => None,
    }
}

/// A scatter into its first operand or, with `fill` and only two operands, into a constant.
fn scatter_routine(op: &Op, ins: &[&TensorType], fill: Option<f64>) -> Option<Routine> {
    let (f, indexed) = places::scattered(op, ins[0], ins[1])?;
    let combine = match f {
        ScatterFn::Replace => Combine::Replace,
        ScatterFn::Add => Combine::Add,
        ScatterFn::Mul => Combine::Mul,
        ScatterFn::Max => Combine::Max,
        ScatterFn::Min => Combine::Min,
    };
    let dtype = ins[0].dtype;
    // Elements that are only copied may have any type.
    let elem = match combine {
        Combine::Replace => elem(dtype).unwrap_or(Elem::F32),
        _ => elem(dtype)?,
    };
    let fill = fill.map(|x| Tensor::splat(TensorType::scalar(dtype), x).to_bytes());
    Some(Routine::Scatter { indexed, combine, elem, fill })
}

/// A body that is a scatter into a constant of equal elements.
pub(super) fn cpu_scatter(body: &Graph) -> Option<Call> {
    let mut nodes = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf());
    let (Some(node), None) = (nodes.next(), nodes.next()) else { return None };
    if !matches!(node.op, Op::ScatterElements(_) | Op::ScatterNd(_)) {
        return None;
    }
    let element = body.constant(node.inputs[0]).and_then(Tensor::as_splat)?;
    let types: Vec<&TensorType> = node.inputs.iter().map(|v| body.ty(*v)).collect();
    let routine = scatter_routine(&node.op, &types, Some(element))?;
    let (reads, writes) = (Access::whole(&node.inputs[1..]), Access::whole(&node.outputs));
    Some(Call { routine, reads, writes })
}
