//! Lemmas of reductions.

use super::super::term::Term;
use super::super::{Cotangents, Site};
use frit_ir::ops::{CompareFn, Op, Reduce, ReduceFn};

/// With the reduced axes kept, an element's cotangent is that of its line times the slope of the line's value.
pub(super) fn reduce<'w>(op: &Reduce, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let (x, y) = (at.x[0], at.y[0]);
    let dims = x.dims();
    let mut kept = dims.clone();
    op.axes.iter().for_each(|axis| kept[*axis] = 1);
    let n: usize = op.axes.iter().map(|axis| dims[*axis]).product();
    let dy = dy.reshape(kept.clone());
    let along =
        |f, x| Term::of(Op::Reduce(Reduce { f, axes: op.axes.clone(), keep_dims: true }), &[x]);
    let (zero, one) = (x.number(0.0), x.number(1.0));
    let equals = |a: Term<'w>, b| a.compare(CompareFn::Eq, b);
    vec![Some(match op.f {
        ReduceFn::Sum => dy.expand(dims),
        ReduceFn::Mean => (dy * (n as f64).recip()).expand(dims),
        // Elements that are equal to the extreme share the cotangent.
        ReduceFn::Max | ReduceFn::Min => {
            let hit = equals(x, y.reshape(kept));
            hit.choose(dy / along(ReduceFn::Sum, hit.cast(x.dtype())), zero)
        }
        // The product of the others: zero if one of them is.
        ReduceFn::Prod => {
            let is_zero = equals(x, zero);
            let factors = is_zero.choose(one, x);
            let product = along(ReduceFn::Prod, factors);
            let n_zeros = along(ReduceFn::Sum, is_zero.cast(x.dtype()));
            let of_zero = equals(n_zeros, one).choose(product, zero);
            let of_factor = equals(n_zeros, zero).choose(product / factors, zero);
            dy * is_zero.choose(of_zero, of_factor)
        }
    })]
}
