//! Lemmas of indexed writes, and of the reads whose cotangents are written back.
//!
//! A write names places of the data. Its lemmas read there, and write there by another function.

use super::super::term::Term;
use super::super::{Cotangents, Site};
use frit_ir::ops::{
    CompareFn, GatherElements, GatherNd, Op, ScatterElements, ScatterFn, ScatterNd, TopK,
};

/// Every cotangent is added where its slice was read.
pub(super) fn gather_nd<'w>(op: &GatherNd, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let add = Op::ScatterNd(ScatterNd { batch_dims: op.batch_dims, f: ScatterFn::Add });
    vec![Some(Term::of(add, &[dy.zeros(at.x[0].dims()), at.x[1], dy])), None]
}

/// The cotangents go where the values were, each from a place of its own.
pub(super) fn top_k<'w>(op: &TopK, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let put = Op::ScatterElements(ScatterElements { axis: op.axis, f: ScatterFn::Replace });
    vec![Some(Term::of(put, &[dy.zeros(at.x[0].dims()), at.y[1], dy]))]
}

pub(super) fn scatter_elements<'w>(
    op: &ScatterElements,
    at: &Site<'w>,
    dy: Term<'w>,
) -> Cotangents<'w> {
    let axis = op.axis;
    let read = Op::GatherElements(GatherElements { axis });
    scattered(op.f, read, &|f| Op::ScatterElements(ScatterElements { axis, f }), at, dy)
}

pub(super) fn scatter_nd<'w>(op: &ScatterNd, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let batch_dims = op.batch_dims;
    let read = Op::GatherNd(GatherNd { batch_dims });
    scattered(op.f, read, &|f| Op::ScatterNd(ScatterNd { batch_dims, f }), at, dy)
}

/// Operands `(data, indices, updates)`.
fn scattered<'w>(
    f: ScatterFn,
    read: Op,
    write: &dyn Fn(ScatterFn) -> Op,
    at: &Site<'w>,
    dy: Term<'w>,
) -> Cotangents<'w> {
    let (data, ids, updates, y) = (at.x[0], at.x[1], at.x[2], at.y[0]);
    let at = |whole: Term<'w>| Term::of(read.clone(), &[whole, ids]);
    let put = |f, into, parts| Term::of(write(f), &[into, ids, parts]);
    let (zero, one) = (dy.number(0.0), dy.number(1.0));
    let is_zero = |x: Term<'w>| x.compare(CompareFn::Eq, zero);
    let (dx, du) = match f {
        ScatterFn::Replace => (put(ScatterFn::Replace, dy, dy.zeros(updates.dims())), at(dy)),
        ScatterFn::Add => (dy, at(dy)),
        // Those that are equal to the extreme share the cotangent.
        ScatterFn::Max | ScatterFn::Min => {
            let of_data = data.compare(CompareFn::Eq, y).cast(dy.dtype());
            let of_updates = updates.compare(CompareFn::Eq, at(y)).cast(dy.dtype());
            let share = dy / put(ScatterFn::Add, of_data, of_updates);
            (share * of_data, at(share) * of_updates)
        }
        // The product of the other factors: with 1 in place of a factor that is zero, by division for others.
        ScatterFn::Mul => {
            let divisor = is_zero(data).choose(one, data);
            let dx = dy * (put(ScatterFn::Mul, divisor, updates) / divisor);
            let zeros = is_zero(updates).cast(dy.dtype());
            let n_zeros = at(put(ScatterFn::Add, dy.zeros(data.dims()), zeros));
            let only = is_zero(updates).and(n_zeros.compare(CompareFn::Eq, one));
            let divisor = is_zero(updates).choose(one, updates);
            let of_only = at(dy * put(ScatterFn::Mul, data, only.choose(one, updates))) / divisor;
            (dx, only.choose(of_only, at(dy * y) / divisor))
        }
    };
    vec![Some(dx), None, Some(du)]
}
