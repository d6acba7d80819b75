//! Pooling. Averages are sums divided by the number of counted elements.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::convolution::{per_axis, spatial, window};
use super::{Operator, one, op};
use frit_ir::ops::{ArgReduce, BinaryFn, Gather, MaxPool, Pad, Reduce, ReduceFn, ScatterElements};
use frit_ir::ops::{ScatterFn, SumPool, UnaryFn, Window};
use frit_ir::shape::product;
use frit_ir::{DType, Op, Tensor, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op(
        "AveragePool",
        &[
            "auto_pad",
            "ceil_mode",
            "count_include_pad",
            "dilations",
            "kernel_shape",
            "pads",
            "strides",
        ],
        average,
    ),
    op("GlobalAveragePool", &[], |cx| global(cx, ReduceFn::Mean)),
    op("GlobalMaxPool", &[], |cx| global(cx, ReduceFn::Max)),
    op(
        "LpPool",
        &["auto_pad", "ceil_mode", "dilations", "kernel_shape", "p", "pads", "strides"],
        power,
    ),
    op(
        "MaxPool",
        &["auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "storage_order", "strides"],
        max,
    ),
    op("MaxUnpool", &["kernel_shape", "pads", "strides"], unpool),
];

fn global(cx: &mut NodeContext<'_>, f: ReduceFn) -> Outcome {
    let x = cx.input(0)?;
    let axes = (2..spatial(cx, x)? + 2).collect();
    one(cx.emit(Op::Reduce(Reduce { f, axes, keep_dims: true }), &[x])?)
}

/// The window and its taps, with the border that `pads` asks for; `ceil_mode` may enlarge it at the end
/// so that a last, partial window fits.
struct Pool {
    window: Window,
    taps: Vec<usize>,
    /// End of the border before `ceil_mode`.
    declared_high: Vec<usize>,
}

fn pool(cx: &NodeContext<'_>, x: ValueId) -> Result<Pool, Fault> {
    let rank = spatial(cx, x)?;
    let sizes = cx.dims(x)[2..].to_vec();
    let taps = per_axis(cx, "kernel_shape", rank, 1)?;
    let mut window = window(cx, &sizes, &taps)?;
    let declared_high = window.high.clone();
    if cx.int("ceil_mode", 0) != 0 {
        for i in 0..rank {
            let stride = window.strides[i].max(1);
            let extent = window.dilations[i] * (taps[i].max(1) - 1) + 1;
            let padded = sizes[i] + window.low[i] + window.high[i];
            let mut positions = padded.saturating_sub(extent).div_ceil(stride) + 1;
            // A window that would begin in the end border is dropped, as PyTorch and onnxruntime do.
            if (positions - 1) * stride >= sizes[i] + window.low[i] {
                positions -= 1;
            }
            let needed = (positions.max(1) - 1) * stride + extent;
            window.high[i] = needed.saturating_sub(sizes[i] + window.low[i]);
        }
    }
    Ok(Pool { window, taps, declared_high })
}

fn max(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let pool = pool(cx, x)?;
    let op = MaxPool { window: pool.window.clone(), taps: pool.taps.clone() };
    // The integers of images are exact in f32.
    let dtype = cx.ty(x).dtype;
    let is_byte = dtype == DType::U8;
    let x = if is_byte { cx.cast(x, DType::F32)? } else { x };
    let y = cx.emit(Op::MaxPool(op), &[x])?;
    let result = if is_byte { cx.cast(y, dtype)? } else { y };
    if cx.node.output.iter().skip(1).all(String::is_empty) {
        return one(result);
    }
    let indices = largest(cx, x, &pool, y)?;
    Ok(vec![result.into(), indices.into()])
}

/// The place of the largest element of each window, the first of equal ones, counted over the whole
/// operand; in column-major order within a plane if `storage_order` says so.
fn largest(
    cx: &mut NodeContext<'_>,
    x: ValueId,
    pool: &Pool,
    y: ValueId,
) -> Result<ValueId, Fault> {
    let column_major = cx.int("storage_order", 0) != 0;
    let (dims, window) = (cx.dims(x), &pool.window);
    let (planes, sizes) = (dims[0] * dims[1], &dims[2..]);
    // All elements of a window beside each other, those of the border −∞.
    let border = |of: &[usize]| [&[0, 0], of].concat();
    let pad =
        Pad { low: border(&window.low), high: border(&window.high), value: f64::NEG_INFINITY };
    let padded = cx.emit(Op::Pad(pad), &[x])?;
    let padded_sizes = cx.dims(padded)[2..].to_vec();
    let (positions, taps) = (cx.dims(y)[2..].to_vec(), &pool.taps);
    let n_positions: usize = positions.iter().product();
    let n_taps: usize = taps.iter().product();
    cx.room(&[2, n_positions, n_taps])?;
    cx.work(&[n_positions, n_taps, sizes.len()])?;
    let (mut reads, mut places) = (Vec::new(), Vec::new());
    for position in 0..n_positions {
        for tap in 0..n_taps {
            let (p, t) = (coordinates(position, &positions), coordinates(tap, taps));
            let at = |i: usize| p[i] * window.strides[i] + t[i] * window.dilations[i];
            let read = (0..sizes.len()).fold(0, |n, i| n * padded_sizes[i] + at(i));
            let place = |n: usize, i: usize| {
                // Those of the border are never the largest.
                n * sizes[i] + at(i).saturating_sub(window.low[i]).min(sizes[i].max(1) - 1)
            };
            let place = if column_major {
                (0..sizes.len()).rev().fold(0, place)
            } else {
                (0..sizes.len()).fold(0, place)
            };
            reads.push(read as i64);
            places.push(place as i64);
        }
    }
    let flat = cx.reshape(padded, vec![planes, padded_sizes.iter().product()])?;
    let reads = cx.constant(Tensor::ints(DType::I64, [n_positions, n_taps], reads))?;
    let windows = cx.emit(Op::Gather(Gather { axis: 1 }), &[flat, reads])?;
    let arg = ArgReduce { axis: 2, largest: true, last: false };
    let tap = cx.emit(Op::ArgReduce(arg), &[windows])?;
    let tap = cx.reshape(tap, vec![planes, n_positions])?;
    let first = cx.integers(DType::I64, &[n_positions], |p| (p * n_taps) as i64)?;
    let entry = cx.emit(Op::Binary(BinaryFn::Add), &[tap, first])?;
    let places = cx.constant(Tensor::ints(DType::I64, [n_positions * n_taps], places))?;
    let place = cx.emit(Op::Gather(Gather { axis: 0 }), &[places, entry])?;
    let plane = sizes.iter().product::<usize>();
    let starts = cx.integers(DType::I64, &[planes, 1], |n| (n * plane) as i64)?;
    let place = cx.emit(Op::Binary(BinaryFn::Add), &[place, starts])?;
    let shape = cx.dims(y);
    cx.reshape(place, shape)
}

/// The coordinates of the `flat`-th element of a box of these sizes.
fn coordinates(mut flat: usize, sizes: &[usize]) -> Vec<usize> {
    let mut found = vec![0; sizes.len()];
    for (at, &size) in found.iter_mut().zip(sizes).rev() {
        *at = flat % size;
        flat /= size;
    }
    found
}

/// Puts every element where `indices` says, zeros elsewhere.
fn unpool(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, indices) = (cx.input(0)?, cx.input(1)?);
    let rank = spatial(cx, x)?;
    let dims = cx.dims(x);
    let taps = per_axis(cx, "kernel_shape", rank, 1)?;
    let window = window(cx, &dims[2..], &taps)?;
    // Indices count the elements of the operand that was pooled, which need not be the result.
    let grown = |i: usize| {
        let covered = dims[2 + i].max(1) * window.strides[i] + taps[i];
        covered.saturating_sub(window.strides[i] + window.low[i] + window.high[i])
    };
    let pooled = [&dims[..2], &(0..rank).map(grown).collect::<Vec<_>>()].concat();
    let shape = match cx.known_ints(2, "the output shape")? {
        Some(sizes) => cx.sizes(&sizes, "the output shape")?,
        None => pooled.clone(),
    };
    if shape.len() != dims.len() || shape.iter().zip(&pooled).any(|(a, b)| a < b) {
        return misfit(format!("{pooled:?} elements in an output of shape {shape:?}"));
    }
    let zero = cx.scalar_like(x, 0.0)?;
    let zeros = cx.expand(zero, vec![product(&pooled)])?;
    let (n, indices_n) = (product(&dims), product(&cx.dims(indices)));
    let (x, indices) = (cx.reshape(x, vec![n])?, cx.reshape(indices, vec![indices_n])?);
    let scatter = ScatterElements { axis: 0, f: ScatterFn::Replace };
    let y = cx.emit(Op::ScatterElements(scatter), &[zeros, indices, x])?;
    let y = cx.reshape(y, pooled.clone())?;
    let high: Vec<usize> = shape.iter().zip(&pooled).map(|(a, b)| a - b).collect();
    if high.iter().all(|n| *n == 0) {
        return one(y);
    }
    one(cx.emit(Op::Pad(Pad { low: vec![0; high.len()], high, value: 0.0 }), &[y])?)
}

fn average(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let pool = pool(cx, x)?;
    let sizes = cx.dims(x)[2..].to_vec();
    let include = cx.int("count_include_pad", 0) != 0;
    let Pool { window, taps, .. } = &pool;
    let sum = SumPool { window: window.clone(), taps: taps.clone() };
    let sum = cx.emit(Op::SumPool(sum), &[x])?;
    let ty = cx.ty(sum);
    let positions = &ty.shape.dims()[2..];
    let along: Vec<Vec<f64>> = (0..sizes.len())
        .map(|i| {
            cx.room(&[positions[i]])?;
            cx.work(&[positions[i], taps[i]])?;
            Ok(counts(&pool, i, sizes[i], positions[i], include))
        })
        .collect::<Result<_, Fault>>()?;
    let uniform = along.iter().all(|n| n.windows(2).all(|w| w[0] == w[1]));
    let divisor = if uniform {
        let first = |n: &Vec<f64>| n.first().copied().unwrap_or(1.0);
        cx.scalar_like(sum, along.iter().map(first).product())?
    } else {
        let shape = [&[1, 1], positions].concat();
        let count = |i: usize| {
            let place = coordinates(i, positions);
            place.iter().zip(&along).map(|(p, n)| n[*p]).product()
        };
        cx.floats(ty.dtype, &shape, count)?
    };
    one(cx.emit(Op::Binary(BinaryFn::Div), &[sum, divisor])?)
}

/// The number of elements along one spatial axis that count, of the window at each of its positions.
fn counts(pool: &Pool, i: usize, size: usize, positions: usize, include_border: bool) -> Vec<f64> {
    let window = &pool.window;
    let end = size + window.low[i] + if include_border { pool.declared_high[i] } else { 0 };
    let begin = if include_border { 0 } else { window.low[i] };
    let counted = |p: usize| {
        let at = |t: usize| p * window.strides[i] + t * window.dilations[i];
        (0..pool.taps[i]).filter(|t| (begin..end).contains(&at(*t))).count() as f64
    };
    (0..positions).map(counted).collect()
}

/// `(Σ |x|ᵖ)^(1/p)`
fn power(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let Pool { window, taps, .. } = pool(cx, x)?;
    let p = cx.int("p", 2) as f64;
    let exponent = cx.scalar_like(x, p)?;
    let size = cx.emit(Op::Unary(UnaryFn::Abs), &[x])?;
    let powers = cx.emit(Op::Binary(BinaryFn::Pow), &[size, exponent])?;
    let sum = cx.emit(Op::SumPool(SumPool { window, taps }), &[powers])?;
    let root = cx.scalar_like(sum, 1.0 / p)?;
    one(cx.emit(Op::Binary(BinaryFn::Pow), &[sum, root])?)
}
