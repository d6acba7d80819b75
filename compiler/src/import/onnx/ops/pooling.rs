//! Pooling. Averages are sums divided by the number of elements that count.

use super::super::context::{Fault, NodeContext, Outcome};
use super::convolution::{per_axis, spatial, window};
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, MaxPool, Reduce, ReduceFn, SumPool, UnaryFn, Window};
use frit_ir::{Op, Tensor, ValueId};

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
    let Pool { window, taps, .. } = pool(cx, x)?;
    if cx.node.output.iter().skip(1).any(|name| !name.is_empty()) {
        return Err(Fault::Attribute("its second output, the indices".into()));
    }
    one(cx.emit(Op::MaxPool(MaxPool { window, taps }), &[x])?)
}

fn average(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let pool = pool(cx, x)?;
    let sizes = cx.dims(x)[2..].to_vec();
    let include = cx.int("count_include_pad", 0) != 0;
    let counts = counts(&pool, &sizes, include);
    let Pool { window, taps, .. } = pool;
    let sum = cx.emit(Op::SumPool(SumPool { window, taps }), &[x])?;
    let ty = cx.ty(sum);
    let divisor = if counts.windows(2).all(|w| w[0] == w[1]) {
        cx.scalar_like(sum, counts.first().copied().unwrap_or(1.0))?
    } else {
        let shape = [&[1, 1], &ty.shape.dims()[2..]].concat();
        cx.constant(Tensor::floats(ty.dtype, shape, counts))?
    };
    one(cx.emit(Op::Binary(BinaryFn::Div), &[sum, divisor])?)
}

/// The number of elements of each window that count, in row-major order.
fn counts(pool: &Pool, sizes: &[usize], include_border: bool) -> Vec<f64> {
    let window = &pool.window;
    let mut all = vec![1.0];
    for (i, &size) in sizes.iter().enumerate() {
        let extent = window.dilations[i] * (pool.taps[i].max(1) - 1) + 1;
        let padded = size + window.low[i] + window.high[i];
        let positions = padded.saturating_sub(extent) / window.strides[i].max(1) + 1;
        let end = size + window.low[i] + if include_border { pool.declared_high[i] } else { 0 };
        let begin = if include_border { 0 } else { window.low[i] };
        let counted = |p: usize| {
            let at = |t: usize| p * window.strides[i] + t * window.dilations[i];
            (0..pool.taps[i]).filter(|t| (begin..end).contains(&at(*t))).count() as f64
        };
        let along: Vec<f64> = (0..positions).map(counted).collect();
        all = all.iter().flat_map(|n| along.iter().map(move |m| n * m)).collect();
    }
    all
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
