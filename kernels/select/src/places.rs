//! Element positions that indexed operations read and write, for every device.

use frit_ir::ops::{Gather, GatherElements, GatherNd, ScatterElements, ScatterFn, ScatterNd};
use frit_ir::{DType, Op, TensorType};
use frit_kernels::routine::index::{Axis, IndexElem, Indexed};

fn index_elem(ids: &TensorType) -> Option<IndexElem> {
    match ids.dtype {
        DType::I64 => Some(IndexElem::I64),
        DType::I32 => Some(IndexElem::I32),
        _ => None,
    }
}

/// Where a gather of `data` by `ids` reads.
pub(super) fn gather(op: &Op, data: &TensorType, ids: &TensorType) -> Option<Indexed> {
    match op {
        Op::Gather(Gather { axis }) => along(*axis, data, ids),
        Op::GatherElements(GatherElements { axis }) => elements(*axis, data, ids),
        Op::GatherNd(GatherNd { batch_dims }) => tuples(*batch_dims, data, ids),
        _ => None,
    }
}

/// Slices along an axis: the grid is the axes before it times the indices.
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

/// Slices addressed by tuples of indices.
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

/// Where a scatter into `data` by `ids` writes, and how an update is combined.
pub(super) fn scattered(
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
