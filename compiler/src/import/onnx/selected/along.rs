//! Reductions of, and writes at, places of which only the first count.

use super::adds::Adds;
use super::{Outcome, Selected};
use crate::import::onnx::context::Fault;
use frit_ir::ops::{BinaryFn, Cast, Pad, Reduce, ReduceFn, ScatterFn, Slice};
use frit_ir::{DType, Op, Tensor, ValueId};

/// The lowest number of a type, or the highest.
pub(super) fn extreme(dtype: DType, lowest: bool) -> f64 {
    match (dtype, lowest) {
        (DType::Bool | DType::U8, true) => 0.0,
        (DType::Bool, false) => 1.0,
        (DType::U8, false) => 255.0,
        (DType::I32, true) => f64::from(i32::MIN),
        (DType::I32, false) => f64::from(i32::MAX),
        (DType::I64, true) => i64::MIN as f64,
        (DType::I64, false) => i64::MAX as f64,
        (_, true) => f64::NEG_INFINITY,
        (_, false) => f64::INFINITY,
    }
}

/// A reduction.
pub(super) fn reduced(
    to: &mut Adds<'_>,
    x: ValueId,
    s: Selected,
    op: &Reduce,
) -> Result<Outcome, Fault> {
    if !op.axes.contains(&s.axis) {
        let gone = if op.keep_dims { 0 } else { op.axes.iter().filter(|a| **a < s.axis).count() };
        return Ok(Outcome::Of(vec![x], Some(Selected { axis: s.axis - gone, ..s })));
    }
    let ty = to.graph.ty(x).clone();
    let neutral = match op.f {
        ReduceFn::Sum | ReduceFn::Mean => 0.0,
        ReduceFn::Prod => 1.0,
        ReduceFn::Max => extreme(ty.dtype, true),
        ReduceFn::Min => extreme(ty.dtype, false),
    };
    let filled = to.filled(x, s, neutral)?;
    if op.f != ReduceFn::Mean {
        return Ok(Outcome::Of(vec![filled], None));
    }
    let sum = to.op(Op::Reduce(Reduce { f: ReduceFn::Sum, ..op.clone() }), &[filled])?;
    // In f32, which f16 and bf16 have not the digits for.
    let places = to.number_of(s.counts, DType::F32)?;
    let places = to.reshape(places, &[])?;
    let others = op.axes.iter().filter(|a| **a != s.axis).map(|a| ty.shape.dims()[*a]);
    let each = to.number(DType::F32, others.product::<usize>() as f64)?;
    let count = to.op(Op::Binary(BinaryFn::Mul), &[places, each])?;
    let count = to.op(Op::Cast(Cast { to: ty.dtype }), &[count])?;
    Ok(Outcome::Instead(to.op(Op::Binary(BinaryFn::Div), &[sum, count])?, None))
}

/// A write at indices, the first of which are along this axis: what does not count changes nothing, or is written behind the end.
pub(super) fn written(
    to: &mut Adds<'_>,
    inputs: &[ValueId],
    s: Selected,
    f: ScatterFn,
    axis: usize,
    op: &Op,
) -> Result<Outcome, Fault> {
    let &[data, ids, updates] = inputs else {
        return Err(Fault::Misfit("a write without updates".into()));
    };
    let dtype = to.graph.ty(updates).dtype;
    let neutral = match f {
        ScatterFn::Replace => None,
        ScatterFn::Add => Some(0.0),
        ScatterFn::Mul => Some(1.0),
        ScatterFn::Max => Some(extreme(dtype, true)),
        ScatterFn::Min => Some(extreme(dtype, false)),
    };
    if let Some(neutral) = neutral {
        let updates = to.filled(updates, s, neutral)?;
        // What is written nowhere may have an index that is none.
        let ids = to.filled(ids, s, 0.0)?;
        return Ok(Outcome::Of(vec![data, ids, updates], None));
    }
    let (dims, of_ids) = (to.dims(data), to.graph.ty(ids).clone());
    // Sizes of the axes that an index, or a row of indices, is into.
    let sizes = match op {
        Op::ScatterNd(_) => dims[..of_ids.shape.dims().last().copied().unwrap_or(0)].to_vec(),
        _ => vec![dims[axis]],
    };
    if sizes.is_empty() {
        return Err(Fault::Dynamic("how much is written".into()));
    }
    let row = |to: &mut Adds<'_>, values: Vec<i64>| {
        let n = values.len();
        to.constant(Tensor::ints(of_ids.dtype, [n], values))
    };
    let behind = row(to, [&[sizes[0] as i64][..], &vec![0; sizes.len() - 1]].concat())?;
    let ends = row(to, sizes.iter().map(|n| *n as i64).collect())?;
    let positive = to.made_positive(ids, ends)?;
    let counts = to.mask_over(ids, s)?;
    let ids = to.op(Op::Select, &[counts, positive, behind])?;
    let (low, mut high) = (vec![0; dims.len()], vec![0; dims.len()]);
    high[axis] = 1;
    let longer = to.op(Op::Pad(Pad { low, high, value: 0.0 }), &[data])?;
    let longer = to.op(op.clone(), &[longer, ids, updates])?;
    let n = dims.len();
    let part = Slice { start: vec![0; n], size: dims, step: vec![1; n] };
    Ok(Outcome::Instead(to.op(Op::Slice(part), &[longer])?, None))
}
