//! Gradient rules of convolution, pooling and batch normalization, by their gradient operations.

use super::super::builder::{Builder, Gradients};
use frit_ir::ValueId;
use frit_ir::ops::{
    BatchNorm, BatchNormGrad, Conv, ConvGradInput, ConvGradWeight, MaxPool, MaxPoolGrad, Op,
    SumPool, SumPoolGrad,
};

pub(super) fn conv(b: &mut Builder<'_>, op: &Conv, x: &[ValueId], dy: ValueId) -> Gradients {
    // Gradients run in the dtype of the operands.
    let ty = b.ty(x[0]);
    let dy = b.cast(dy, ty.dtype)?;
    let (window, groups) = (op.window.clone(), op.groups);
    let mut gradients = vec![None; 2];
    if b.needs(0) {
        let size = ty.shape.dims()[2..].to_vec();
        let grad = ConvGradInput { window: window.clone(), groups, size, out: None };
        gradients[0] = Some(b.emit(Op::ConvGradInput(grad), &[dy, x[1]])?);
    }
    if b.needs(1) {
        let taps = b.ty(x[1]).shape.dims()[2..].to_vec();
        let out = Some(b.grad_dtype(x[1])).filter(|d| *d != ty.dtype);
        let grad = ConvGradWeight { window, groups, taps, out };
        gradients[1] = Some(b.emit(Op::ConvGradWeight(grad), &[dy, x[0]])?);
    }
    Ok(gradients)
}

/// The transposed convolution is the gradient of a convolution, so a convolution is its gradient.
pub(super) fn conv_transposed(
    b: &mut Builder<'_>,
    op: &ConvGradInput,
    x: &[ValueId],
    dy: ValueId,
) -> Gradients {
    let dtype = b.ty(x[0]).dtype;
    let dy = b.cast(dy, dtype)?;
    let (window, groups) = (op.window.clone(), op.groups);
    let mut gradients = vec![None; 2];
    if b.needs(0) {
        let grad = Conv { window: window.clone(), groups, out: None };
        gradients[0] = Some(b.emit(Op::Conv(grad), &[dy, x[1]])?);
    }
    if b.needs(1) {
        let taps = b.ty(x[1]).shape.dims()[2..].to_vec();
        let out = Some(b.grad_dtype(x[1])).filter(|d| *d != dtype);
        let grad = ConvGradWeight { window, groups, taps, out };
        gradients[1] = Some(b.emit(Op::ConvGradWeight(grad), &[x[0], dy])?);
    }
    Ok(gradients)
}

pub(super) fn max_pool(b: &mut Builder<'_>, op: &MaxPool, x: ValueId, dy: ValueId) -> Gradients {
    let grad = MaxPoolGrad { window: op.window.clone(), taps: op.taps.clone() };
    Ok(vec![Some(b.emit(Op::MaxPoolGrad(grad), &[dy, x])?)])
}

pub(super) fn sum_pool(b: &mut Builder<'_>, op: &SumPool, x: ValueId, dy: ValueId) -> Gradients {
    let size = b.ty(x).shape.dims()[2..].to_vec();
    let grad = SumPoolGrad { window: op.window.clone(), taps: op.taps.clone(), size };
    Ok(vec![Some(b.emit(Op::SumPoolGrad(grad), &[dy])?)])
}

pub(super) fn batch_norm(
    b: &mut Builder<'_>,
    op: &BatchNorm,
    x: &[ValueId],
    y: &[ValueId],
    dy: ValueId,
) -> Gradients {
    let dtype = b.ty(x[0]).dtype;
    let dy = b.cast(dy, dtype)?;
    let grad = Op::BatchNormGrad(BatchNormGrad { eps: op.eps });
    let found = b.emit_all(grad, &[dy, x[0], x[1], y[1], y[2]])?;
    let mut gradients = vec![None; 3];
    for i in 0..3 {
        if b.needs(i) {
            let dtype = b.grad_dtype(x[i]);
            gradients[i] = Some(b.cast(found[i], dtype)?);
        }
    }
    Ok(gradients)
}
