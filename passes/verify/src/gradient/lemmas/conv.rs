//! Lemmas of convolutions and pools.

use super::super::term::Term;
use super::super::{Cotangents, Site};
use frit_ir::ops::{
    Conv, ConvGradInput, ConvGradWeight, MaxPool, MaxPoolGrad, Op, SumPool, SumPoolGrad, Window,
};

/// The sizes of the spatial axes.
fn spatial(x: Term<'_>) -> Vec<usize> {
    x.dims().split_off(2)
}

/// The gradient for the kernel of a convolution of `x` with the result `y`, of which `dy` is the cotangent.
fn kernel<'w>(
    window: &Window,
    groups: usize,
    w: Term<'w>,
    (dy, x): (Term<'w>, Term<'w>),
) -> Term<'w> {
    let window = window.clone();
    let grad = ConvGradWeight { window, groups, taps: spatial(w), out: None };
    Term::of(Op::ConvGradWeight(grad), &[dy, x])
}

pub(super) fn conv<'w>(op: &Conv, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let (x, w) = (at.x[0], at.x[1]);
    let (window, groups) = (op.window.clone(), op.groups);
    let grad = ConvGradInput { window, groups, size: spatial(x), out: None };
    let dx = Term::of(Op::ConvGradInput(grad), &[dy, w]);
    vec![Some(dx), Some(kernel(&op.window, op.groups, w, (dy, x)))]
}

/// The transposed convolution is the adjoint of a convolution, of which its operand is a cotangent.
pub(super) fn conv_grad_input<'w>(
    op: &ConvGradInput,
    at: &Site<'w>,
    dy: Term<'w>,
) -> Cotangents<'w> {
    let (x, w) = (at.x[0], at.x[1]);
    let forward = Conv { window: op.window.clone(), groups: op.groups, out: None };
    let dx = Term::of(Op::Conv(forward), &[dy, w]);
    vec![Some(dx), Some(kernel(&op.window, op.groups, w, (x, dy)))]
}

/// The first largest element of each window has its cotangent.
pub(super) fn max_pool<'w>(op: &MaxPool, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let grad = MaxPoolGrad { window: op.window.clone(), taps: op.taps.clone() };
    vec![Some(Term::of(Op::MaxPoolGrad(grad), &[dy, at.x[0]]))]
}

pub(super) fn sum_pool<'w>(op: &SumPool, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let (window, taps) = (op.window.clone(), op.taps.clone());
    let grad = SumPoolGrad { window, taps, size: spatial(at.x[0]) };
    vec![Some(Term::of(Op::SumPoolGrad(grad), &[dy]))]
}
