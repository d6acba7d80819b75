//! Lemmas of operations that rearrange elements: their cotangents go back where the elements were.

use super::super::term::Term;
use super::super::{Cotangents, Site};
use frit_ir::ops::{Concat, Op, Slice, Split, Transpose};

/// Axis `i` of the result is axis `perm[i]` of the operand, so that is where it goes.
pub(super) fn transpose<'w>(op: &Transpose, dy: Term<'w>) -> Cotangents<'w> {
    let place = |axis| op.perm.iter().position(|p| *p == axis).unwrap_or(axis);
    vec![Some(dy.transpose((0..op.perm.len()).map(place).collect()))]
}

/// Each operand was a box of the result.
pub(super) fn concat<'w>(op: &Concat, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let mut before = 0;
    let part = |x: &Term<'w>| {
        let size = x.dims();
        let mut start = vec![0; size.len()];
        start[op.axis] = before;
        before += size[op.axis];
        Some(dy.part(start, size))
    };
    at.x.iter().map(part).collect()
}

/// The parts one after the other, zeros for those that the loss does not depend on.
pub(super) fn split<'w>(op: &Split, at: &Site<'w>) -> Cotangents<'w> {
    let whole = at.dy.iter().zip(&at.y).map(|(dy, y)| dy.unwrap_or_else(|| y.zeros(y.dims())));
    let parts: Vec<Term<'w>> = whole.collect();
    vec![Some(Term::of(Op::Concat(Concat { axis: op.axis }), &parts))]
}

/// Along each axis in ascending order, `|step| − 1` zeros between neighbors, then zeros before and after.
pub(super) fn slice<'w>(op: &Slice, at: &Site<'w>, mut dy: Term<'w>) -> Cotangents<'w> {
    let dims = at.x[0].dims();
    if op.size.contains(&0) {
        return vec![Some(dy.zeros(dims))];
    }
    let axes = 0..dims.len();
    if axes.clone().any(|i| op.step[i] < 0 && op.size[i] > 1) {
        let last = |i: usize| if op.step[i] < 0 { op.size[i] - 1 } else { 0 };
        let start = axes.clone().map(last).collect();
        let step = op.step.iter().map(|step| step.signum()).collect();
        dy = Term::of(Op::Slice(Slice { start, size: op.size.clone(), step }), &[dy]);
    }
    let (mut low, mut high, mut sizes) = (Vec::new(), Vec::new(), op.size.clone());
    for axis in axes {
        let (n, step) = (op.size[axis], op.step[axis].unsigned_abs());
        dy = spread(dy, &sizes, axis, step);
        let reach = (n - 1) * step;
        sizes[axis] = reach + 1;
        let first = if op.step[axis] < 0 { op.start[axis] - reach } else { op.start[axis] };
        low.push(first);
        high.push(dims[axis] - first - sizes[axis]);
    }
    vec![Some(dy.padded(low, high))]
}

/// Elements of sizes `sizes`, `step` apart along an axis, with zeros between.
fn spread<'w>(x: Term<'w>, sizes: &[usize], axis: usize, step: usize) -> Term<'w> {
    if step == 1 || sizes[axis] == 1 {
        return x;
    }
    let (mut each, mut zeros) = (sizes.to_vec(), vec![0; sizes.len() + 1]);
    each.insert(axis + 1, 1);
    zeros[axis + 1] = step - 1;
    let followed = x.reshape(each).padded(vec![0; zeros.len()], zeros);
    let (mut joined, mut size) = (sizes.to_vec(), sizes.to_vec());
    joined[axis] *= step;
    size[axis] = joined[axis] - (step - 1);
    followed.reshape(joined).part(vec![0; size.len()], size)
}
