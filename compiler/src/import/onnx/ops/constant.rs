//! Operators whose result is known at import: constants, shapes, ranges.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, CompareFn};
use frit_ir::shape::MAX_ELEMENTS;
use frit_ir::{DType, Op, Shape, Tensor, TensorData, TensorType, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("Constant", &["value", "value_float", "value_floats", "value_int", "value_ints"], constant),
    op("ConstantOfShape", &["value"], constant_of_shape),
    op("EyeLike", &["dtype", "k"], eye_like),
    op("OneHot", &["axis"], one_hot),
    op("Range", &[], range),
    op("Shape", &["start", "end"], shape),
    op("Size", &[], size),
    op("Trilu", &["upper"], trilu),
];

fn constant(cx: &mut NodeContext<'_>) -> Outcome {
    let Some(attribute) = cx.node.attribute.first() else {
        return misfit("there is no value");
    };
    let (floats, ints) = (&attribute.floats, &attribute.ints);
    let value = match attribute.name.as_str() {
        "value_float" => Tensor::scalar(f64::from(attribute.f)),
        "value_floats" => {
            let values = floats.iter().map(|x| f64::from(*x)).collect();
            Tensor::floats(DType::F32, [floats.len()], values)
        }
        "value_int" => Tensor::ints(DType::I64, Shape::scalar(), vec![attribute.i]),
        "value_ints" => Tensor::vector_i64(ints.clone()),
        _ => match cx.tensor("value")? {
            Some(value) => value,
            None => return misfit("there is no value"),
        },
    };
    one(cx.constant(value)?)
}

fn constant_of_shape(cx: &mut NodeContext<'_>) -> Outcome {
    let dims = cx.known_shape(0)?;
    let dims = cx.sizes(&dims, "the shape")?;
    let value = cx.tensor("value")?.unwrap_or_else(|| Tensor::scalar(0.0));
    if value.numel() != 1 {
        return misfit(format!("the value has type {}, not one element", value.ty));
    }
    let value = cx.constant(value.reshaped(Shape::scalar()))?;
    let value = cx.expand(value, dims)?;
    cx.shaped(value, 0)
}

fn shape(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let dims = cx.dims(x);
    let rank = dims.len() as i64;
    let clamp = |i: i64| (if i < 0 { i.saturating_add(rank) } else { i }).clamp(0, rank) as usize;
    let (start, end) = (clamp(cx.int("start", 0)), clamp(cx.int("end", rank)));
    let axes = start..end.max(start);
    let dims = dims[axes.clone()].iter().map(|d| *d as i64).collect();
    let sizes = cx.constant(Tensor::vector_i64(dims))?;
    cx.selections.sized(sizes, x, axes);
    one(sizes)
}

fn size(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let n = cx.ty(x).shape.numel() as i64;
    one(cx.constant(Tensor::ints(DType::I64, Shape::scalar(), vec![n]))?)
}

fn range(cx: &mut NodeContext<'_>) -> Outcome {
    let mut bounds = Vec::new();
    for (i, what) in ["start", "limit", "delta"].into_iter().enumerate() {
        let known = if i == 1 { cx.known_size(i, what)? } else { cx.known(i, what)? };
        match known {
            Some(t) if t.numel() == 1 => bounds.push(t),
            _ => return misfit(format!("{what} is not one number")),
        }
    }
    let dtype = bounds[0].dtype();
    if bounds.iter().any(|b| b.dtype() != dtype) || dtype == DType::Bool {
        return misfit("start, limit and delta need one element type");
    }
    let numbers: Vec<f64> = bounds.iter().map(|b| b.to_f64s()[0]).collect();
    if cx.selections.is_size(cx.input(1)?) && [numbers[0], numbers[2]] != [0.0, 1.0] {
        return Err(Fault::Dynamic("the limit".into()));
    }
    let length = |n: f64| if n < MAX_ELEMENTS as f64 { n as usize } else { usize::MAX };
    let range = if dtype.is_float() {
        let v = numbers;
        let n = ((v[1] - v[0]) / v[2]).ceil();
        if n.is_nan() {
            return misfit(format!("a range from {} to {} by {}", v[0], v[1], v[2]));
        }
        cx.floats(dtype, &[length(n.max(0.0))], |i| v[0] + i as f64 * v[2])?
    } else {
        let v: Vec<i128> = bounds.iter().map(|b| i128::from(b.to_i64s()[0])).collect();
        if v[2] == 0 {
            return misfit("delta is 0");
        }
        let distance = if v[2] > 0 { v[1] - v[0] } else { v[0] - v[1] };
        let n = (distance.max(0) as u128).div_ceil(v[2].unsigned_abs());
        cx.integers(dtype, &[length(n as f64)], |i| (v[0] + i as i128 * v[2]) as i64)?
    };
    let limit = cx.input(1)?;
    one(cx.selections.numbered(cx.graph, cx.budget, &cx.origin, range, limit)?)
}

/// A constant `rows × columns` matrix of zeros and ones.
fn mask(
    cx: &mut NodeContext<'_>,
    dtype: DType,
    [rows, columns]: [usize; 2],
    on: impl Fn(i64, i64) -> bool,
) -> Result<ValueId, Fault> {
    let at = |i: usize| on((i / columns) as i64, (i % columns) as i64);
    match dtype.is_float() {
        true => cx.floats(dtype, &[rows, columns], |i| f64::from(u8::from(at(i)))),
        false => cx.integers(dtype, &[rows, columns], |i| i64::from(at(i))),
    }
}

fn eye_like(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let ty = cx.ty(x);
    let &[rows, columns] = ty.shape.dims() else {
        return misfit(format!("the operand must have 2 axes, not {}", ty.shape));
    };
    let dtype = match cx.int("dtype", 0) {
        0 => ty.dtype,
        code => cx.dtype_attribute("dtype", code)?,
    };
    let k = cx.int("k", 0);
    one(mask(cx, dtype, [rows, columns], |r, c| c.saturating_sub(r) == k)?)
}

fn trilu(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let k = cx.known_ints(1, "k")?.and_then(|k| k.first().copied()).unwrap_or(0);
    let upper = cx.int("upper", 1) != 0;
    let dims = cx.dims(x);
    let &[.., rows, columns] = dims.as_slice() else {
        return misfit("the operand needs at least 2 axes");
    };
    let kept = |r: i64, c: i64| if upper { c - r >= k } else { c - r <= k };
    let kept = mask(cx, DType::Bool, [rows, columns], kept)?;
    let zero = cx.scalar_like(x, 0.0)?;
    one(cx.emit(Op::Select, &[kept, x, zero])?)
}

/// Whether each of `depth` places along an axis is the one that the index names; the axis has size 1 in
/// the indices.
pub(super) fn at_index(
    cx: &mut NodeContext<'_>,
    ids: ValueId,
    axis: usize,
    depth: usize,
) -> Result<ValueId, Fault> {
    let mut along = vec![1; cx.dims(ids).len()];
    along[axis] = depth;
    let places = cx.integers(DType::I64, &along, |i| i as i64)?;
    cx.emit(Op::Compare(CompareFn::Eq), &[ids, places])
}

/// `(indices, depth, values = [off, on])`.
fn one_hot(cx: &mut NodeContext<'_>) -> Outcome {
    let (ids, values) = (cx.input(0)?, cx.known(2, "the values")?);
    let depth = cx.known_scalar(1, "the depth")?.unwrap_or(0.0);
    let values = match values {
        Some(values) if values.numel() == 2 => values,
        _ => return misfit("the values must be two numbers"),
    };
    if !(0.0..=MAX_ELEMENTS as f64).contains(&depth) {
        return misfit(format!("depth {depth}"));
    }
    let depth = depth as usize;
    let ids = cx.cast(ids, DType::I64)?;
    let mut dims = cx.dims(ids);
    let axis = cx.axis_in(dims.len() + 1, cx.int("axis", -1))?;
    // Negative indices count from the end.
    let (zero, n) = (cx.scalar_like(ids, 0.0)?, cx.scalar_like(ids, depth as f64)?);
    let negative = cx.emit(Op::Compare(CompareFn::Lt), &[ids, zero])?;
    let wrapped = cx.emit(Op::Binary(BinaryFn::Add), &[ids, n])?;
    let ids = cx.emit(Op::Select, &[negative, wrapped, ids])?;
    dims.insert(axis, 1);
    let ids = cx.reshape(ids, dims)?;
    let hit = at_index(cx, ids, axis, depth)?;
    let number = |i: usize| {
        let ty = TensorType::scalar(values.dtype());
        let data = match values.data() {
            TensorData::Float(v) => TensorData::Float(vec![v[i]]),
            TensorData::Int(v) => TensorData::Int(vec![v[i]]),
        };
        Tensor::exact(ty, data)
    };
    let (off, on) = (cx.constant(number(0))?, cx.constant(number(1))?);
    one(cx.emit(Op::Select, &[hit, on, off])?)
}
