//! Convolution, pooling and batch normalization as library kernels.

use super::operand::elem;
use frit_ir::ops::Window as Sliding;
use frit_ir::{DType, Op, TensorType};
use frit_kernels::batch_norm::BatchNorm;
use frit_kernels::conv::Conv;
use frit_kernels::pooling::Pooling;
use frit_kernels::window::Window;

/// Three axes of sizes, with leading sizes of `fill`; `None` for more than three.
fn three(sizes: &[usize], fill: usize) -> Option<[usize; 3]> {
    let mut all = [fill; 3];
    all.get_mut(3usize.checked_sub(sizes.len())?..)?.copy_from_slice(sizes);
    Some(all)
}

fn window(sliding: &Sliding, input: &[usize], taps: &[usize]) -> Option<Window> {
    let output = sliding.positions(input, taps).ok()?;
    Some(Window {
        input: three(input, 1)?,
        output: three(&output, 1)?,
        taps: three(taps, 1)?,
        strides: three(&sliding.strides, 1)?,
        dilations: three(&sliding.dilations, 1)?,
        low: three(&sliding.low, 0)?,
    })
}

/// The convolution whose `x`, `w` and `y` have these types, written in `out`'s element type.
fn conv_of(
    (sliding, groups): (&Sliding, usize),
    (x, w): (&[usize], &[usize]),
    (from, out): (DType, DType),
) -> Option<Conv> {
    Some(Conv {
        elem: elem(from)?,
        out: elem(out)?,
        batch: x[0],
        groups,
        channels: w[1],
        filters: w[0].checked_div(groups)?,
        window: window(sliding, &x[2..], &w[2..])?,
    })
}

/// The convolution of a `conv`, `conv_grad_input` or `conv_grad_weight`.
pub(super) fn conv(op: &Op, ins: &[&TensorType], out: &TensorType) -> Option<Conv> {
    let dims = |ty: &TensorType| ty.shape.0.clone();
    let ((sliding, groups), x, w) = match op {
        Op::Conv(op) => ((&op.window, op.groups), dims(ins[0]), dims(ins[1])),
        Op::ConvGradInput(op) => ((&op.window, op.groups), dims(out), dims(ins[1])),
        Op::ConvGradWeight(op) => ((&op.window, op.groups), dims(ins[1]), dims(out)),
        _ => return None,
    };
    conv_of((sliding, groups), (&x, &w), (ins[0].dtype, out.dtype))
}

/// The pooling of a `max_pool`, `sum_pool` or one of their gradients.
pub(super) fn pooling(op: &Op, ins: &[&TensorType], out: &TensorType) -> Option<Pooling> {
    let (sliding, taps, x) = match op {
        Op::MaxPool(op) => (&op.window, &op.taps, ins[0]),
        Op::SumPool(op) => (&op.window, &op.taps, ins[0]),
        Op::MaxPoolGrad(op) => (&op.window, &op.taps, out),
        Op::SumPoolGrad(op) => (&op.window, &op.taps, out),
        _ => return None,
    };
    let dims = x.shape.dims();
    Some(Pooling {
        elem: elem(x.dtype)?,
        images: dims[0] * dims[1],
        window: window(sliding, &dims[2..], taps)?,
    })
}

/// The normalization of an `x` of this type by vectors of these types.
pub(super) fn batch_norm(eps: f64, x: &TensorType, vectors: &[&TensorType]) -> Option<BatchNorm> {
    if vectors.iter().any(|ty| ty.dtype != DType::F32) {
        return None;
    }
    let dims = x.shape.dims();
    let (elem, size) = (elem(x.dtype)?, dims[2..].iter().product());
    Some(BatchNorm { elem, batch: dims[0], channels: dims[1], size, eps })
}

#[cfg(test)]
mod tests;
