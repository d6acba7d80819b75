//! Lemmas of normalizations, from the statistics that they give.

use super::super::term::Term;
use super::super::{Cotangents, Site};
use frit_ir::ops::{
    BatchNorm, BatchNormGrad, LayerNorm, LayerNormGradAffine, LayerNormGradInput, Op, RmsNorm,
    RmsNormGradInput, RmsNormGradScale,
};

/// Operands `(x, scale, bias)`, results `(y, mean, var)`.
pub(super) fn batch_norm<'w>(op: &BatchNorm, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let (x, y) = (&at.x, &at.y);
    let grad = Op::BatchNormGrad(BatchNormGrad { eps: op.eps });
    Term::all(grad, &[dy, x[0], x[1], y[1], y[2]]).into_iter().map(Some).collect()
}

/// Operands `(x, scale[, bias])`, results `(y, mean, rstd)`.
pub(super) fn layer_norm<'w>(op: &LayerNorm, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let (x, y) = (&at.x, &at.y);
    let (axis, mean, rstd) = (op.axis, y[1], y[2]);
    let input = Op::LayerNormGradInput(LayerNormGradInput { axis });
    let affine = Op::LayerNormGradAffine(LayerNormGradAffine { axis });
    let dx = Term::of(input, &[dy, x[0], x[1], mean, rstd]);
    let affine = Term::all(affine, &[dy, x[0], mean, rstd]);
    vec![Some(dx), Some(affine[0]), Some(affine[1])]
}

/// Operands `(x, scale)`, results `(y, rstd)`.
pub(super) fn rms_norm<'w>(op: &RmsNorm, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let (x, y) = (&at.x, &at.y);
    let (axis, rstd) = (op.axis, y[1]);
    let input = Op::RmsNormGradInput(RmsNormGradInput { axis });
    let scale = Op::RmsNormGradScale(RmsNormGradScale { axis });
    let dx = Term::of(input, &[dy, x[0], x[1], rstd]);
    vec![Some(dx), Some(Term::of(scale, &[dy, x[0], rstd]))]
}
