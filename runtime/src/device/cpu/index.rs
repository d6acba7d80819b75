//! Indexed operations of the graph as parameters of the library's kernel.

use super::library::Routine;
use super::operand::elem;
use frit_ir::ops::{Gather, GatherElements, GatherNd, ScatterElements, ScatterFn, ScatterNd};
use frit_ir::{DType, Graph, Node, Op, Tensor, TensorType, ValueId};
use frit_kernels::dtype::Elem;
use frit_kernels::index::{Axis, Combine, IndexElem, Indexed};

fn index_elem(ids: &TensorType) -> Option<IndexElem> {
    match ids.dtype {
        DType::I64 => Some(IndexElem::I64),
        DType::I32 => Some(IndexElem::I32),
        _ => None,
    }
}

/// Where a gather of `data` by `ids` reads.
pub(in crate::device) fn gather(op: &Op, data: &TensorType, ids: &TensorType) -> Option<Indexed> {
    match op {
        Op::Gather(Gather { axis }) => along(*axis, data, ids),
        Op::GatherElements(GatherElements { axis }) => elements(*axis, data, ids),
        Op::GatherNd(GatherNd { batch_dims }) => tuples(*batch_dims, data, ids),
        _ => None,
    }
}

/// Slices along an axis: the grid is what lies before the axis times the indices.
fn along(axis: usize, data: &TensorType, ids: &TensorType) -> Option<Indexed> {
    let dims = data.shape.dims();
    let inner: usize = dims[axis + 1..].iter().product();
    Some(Indexed {
        dims: vec![dims[..axis].iter().product(), ids.shape.numel()],
        index_strides: vec![0, 1],
        base_strides: vec![dims[axis], 0],
        axes: vec![Axis { size: dims[axis], stride: 1 }],
        block: inner * data.dtype.size(),
        index: index_elem(ids)?,
    })
}

/// Single elements: the grid is that of the indices.
fn elements(axis: usize, data: &TensorType, ids: &TensorType) -> Option<Indexed> {
    let mut base_strides = data.shape.strides();
    let stride = std::mem::replace(&mut base_strides[axis], 0);
    Some(Indexed {
        dims: ids.shape.0.clone(),
        index_strides: ids.shape.strides(),
        base_strides,
        axes: vec![Axis { size: data.shape.0[axis], stride }],
        block: data.dtype.size(),
        index: index_elem(ids)?,
    })
}

/// Slices named by tuples of indices.
fn tuples(batch_dims: usize, data: &TensorType, ids: &TensorType) -> Option<Indexed> {
    let (depth, outer) = ids.shape.0.split_last()?;
    let (batches, grid) = outer.split_at(batch_dims);
    let (indexed, slice) = data.shape.0[batch_dims..].split_at(*depth);
    let strides = frit_ir::Shape::from(indexed).strides();
    let grid: usize = grid.iter().product();
    Some(Indexed {
        dims: vec![batches.iter().product(), grid],
        index_strides: vec![grid * depth, *depth],
        base_strides: vec![indexed.iter().product(), 0],
        axes: indexed.iter().zip(strides).map(|(&size, stride)| Axis { size, stride }).collect(),
        block: slice.iter().product::<usize>() * data.dtype.size(),
        index: index_elem(ids)?,
    })
}

/// Where a scatter into `data` by `ids` writes, and what an update does there.
pub(in crate::device) fn scattered(
    op: &Op,
    data: &TensorType,
    ids: &TensorType,
) -> Option<(ScatterFn, Indexed)> {
    match op {
        Op::ScatterElements(ScatterElements { axis, f }) => Some((*f, elements(*axis, data, ids)?)),
        Op::ScatterNd(ScatterNd { batch_dims, f }) => Some((*f, tuples(*batch_dims, data, ids)?)),
        _ => None,
    }
}

/// The routine of a scatter whose indices and updates are operands; its data are one, or all one
/// element.
pub(super) fn scatter(
    body: &Graph,
    node: &Node,
    position: &impl Fn(ValueId) -> Option<usize>,
) -> Option<Routine> {
    let (data, ids, updates) = (node.inputs[0], node.inputs[1], node.inputs[2]);
    let constant = body.constant(data).and_then(Tensor::as_splat);
    let first = usize::from(constant.is_none());
    let in_order = [(ids, first), (updates, first + 1)];
    let in_order = in_order.iter().all(|(v, i)| position(*v) == Some(*i));
    if !in_order || (constant.is_none() && position(data) != Some(0)) {
        return None;
    }
    let (ty, ids) = (body.ty(data), body.ty(ids));
    let (f, indexed) = scattered(&node.op, ty, ids)?;
    let combine = match f {
        ScatterFn::Replace => Combine::Replace,
        ScatterFn::Add => Combine::Add,
        ScatterFn::Mul => Combine::Mul,
        ScatterFn::Max => Combine::Max,
        ScatterFn::Min => Combine::Min,
    };
    // What is only moved may be of any type.
    let elem = match combine {
        Combine::Replace => elem(ty.dtype).unwrap_or(Elem::F32),
        _ => elem(ty.dtype)?,
    };
    let fill = constant.map(|x| Tensor::splat(TensorType::scalar(ty.dtype), x).to_bytes());
    Some(Routine::Scatter { indexed, combine, elem, fill })
}
