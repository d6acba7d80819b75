//! Lemma of attention.

use super::super::term::Term;
use super::super::{Cotangents, Site};
use frit_ir::ops::{Attention, AttentionGrad, Op};

/// Operands `(q, k, v[, mask][, kept])`, results `(y, lse)`; an added mask has a cotangent.
pub(super) fn attention<'w>(op: &Attention, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let mask_grad = at.needed.get(3).copied().unwrap_or(false);
    let Attention { scale, causal, window, keep } = *op;
    let grad = Op::AttentionGrad(AttentionGrad { scale, causal, window, keep, mask_grad });
    let (operands, masks) = at.x.split_at(3);
    let all = [&[dy], operands, &at.y[..], masks].concat();
    Term::all(grad, &all).into_iter().map(Some).collect()
}
