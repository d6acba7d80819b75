//! Lemma of matmul.

use super::super::term::Term;
use super::super::{Cotangents, Site};
use frit_ir::ops::{MatMul, Op};

/// With A and B as the matmul reads them, Y = A·B: dA = dY·Bᵀ, dB = Aᵀ·dY, each transposed if its operand was.
pub(super) fn matmul<'w>(op: &MatMul, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let (a, b) = (at.x[0], at.x[1]);
    let product = |(left, trans_a), (right, trans_b)| {
        Term::of(Op::MatMul(MatMul { trans_a, trans_b, out: None }), &[left, right])
    };
    let da = match op.trans_a {
        false => product((dy, false), (b, !op.trans_b)),
        true => product((b, op.trans_b), (dy, true)),
    };
    // One matrix for all rows of A: the sum over leading axes is that over rows.
    let (a_dims, b_dims) = (a.dims(), b.dims());
    let (a, dy) = match (op.trans_a, &a_dims[..], &b_dims[..]) {
        (false, [lead @ .., k], [first, second]) => {
            let rows: usize = lead.iter().product();
            let n = if op.trans_b { *first } else { *second };
            (a.reshape([rows, *k]), dy.reshape([rows, n]))
        }
        _ => (a, dy),
    };
    let db = match op.trans_b {
        false => product((a, !op.trans_a), (dy, false)),
        true => product((dy, true), (a, op.trans_a)),
    };
    vec![Some(da), Some(db)]
}
