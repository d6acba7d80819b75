//! Operations that only move elements, and those that are not written out.

use super::{Operand, constant, linear_in, without_dtypes};
use crate::index::{Atom, Ix};
use crate::integer::WHOLE;
use crate::term::{Term, TermId, Terms};
use frit_ir::ops::{Pad, Slice, Split};
use frit_ir::{DType, Op, Tensor, TensorType};

pub(super) fn reshape(t: &mut Terms, x: &Operand, sizes: &[usize]) -> TermId {
    let axes = t.axes(sizes);
    let place = t.place(sizes, &axes);
    let at = t.at_place(x.sizes(), place);
    x.at(t, &at)
}

pub(super) fn transpose(t: &mut Terms, x: &Operand, perm: &[usize], axes: &[Ix]) -> TermId {
    let mut at = axes.to_vec();
    for (to, &from) in perm.iter().enumerate() {
        at[from] = axes[to];
    }
    x.at(t, &at)
}

pub(super) fn slice(t: &mut Terms, x: &Operand, op: &Slice, axes: &[Ix]) -> TermId {
    let at: Vec<Ix> = (0..axes.len())
        .map(|k| {
            let stepped = t.times(axes[k], op.step[k] as i64);
            t.offset(stepped, op.start[k] as i64)
        })
        .collect();
    x.at(t, &at)
}

/// Σ of the operands, each where its part is.
pub(super) fn concat(t: &mut Terms, parts: &[Operand], axis: usize, axes: &[Ix]) -> TermId {
    let mut start = 0;
    let mut sum = vec![];
    for part in parts {
        let n = part.sizes()[axis] as i64;
        let mut at = axes.to_vec();
        at[axis] = t.offset(axes[axis], -start);
        let inside = between(t, at[axis], n);
        let element = part.at(t, &at);
        sum.push((t.mul(inside, element), 1.0));
        start += n;
    }
    t.sum(&sum, 0.0)
}

/// The truth of 0 ≤ index < n.
pub(super) fn between(t: &mut Terms, ix: Ix, n: i64) -> TermId {
    let last = t.times(ix, -1);
    let last = t.offset(last, n - 1);
    let (low, high) = (t.index_not_negative(ix), t.index_not_negative(last));
    t.mul(low, high)
}

pub(super) fn split(t: &mut Terms, x: &Operand, op: &Split) -> Vec<TermId> {
    let mut start = 0;
    let mut results = vec![];
    for &n in &op.sizes {
        let mut sizes = x.sizes().to_vec();
        sizes[op.axis] = n;
        let mut at = t.axes(&sizes);
        at[op.axis] = t.offset(at[op.axis], start);
        results.push(x.at(t, &at));
        start += n as i64;
    }
    results
}

pub(super) fn pad(t: &mut Terms, x: &Operand, op: &Pad, axes: &[Ix]) -> TermId {
    let mut inside = t.constant(1.0);
    let mut at = vec![];
    for (k, &n) in x.sizes().iter().enumerate() {
        let ix = t.offset(axes[k], -(op.low[k] as i64));
        let here = between(t, ix, n as i64);
        inside = t.mul(inside, here);
        at.push(ix);
    }
    let element = x.at(t, &at);
    let border = match x.ty.dtype {
        dtype if dtype.is_float() => t.literal(op.value),
        dtype => {
            let value = dtype.round(op.value).trunc();
            if value.abs() < WHOLE {
                t.constant(value)
            } else {
                let leaf = t.typed_leaf(&format!("border {value:e}"), dtype);
                t.term(Term::Leaf(leaf, [].into()))
            }
        }
    };
    t.select(inside, element, border)
}

/// (data, indices): the indices stand in place of an axis of the data.
pub(super) fn gather(t: &mut Terms, operands: &[Operand], axis: usize, axes: &[Ix]) -> TermId {
    let (data, indices) = (&operands[0], &operands[1]);
    let rank = indices.sizes().len();
    let row = from_start(t, indices, data.sizes()[axis]);
    let row = t.at(row, indices.sizes(), &axes[axis..axis + rank]);
    let zero = t.constant_index(0);
    let at = [&axes[..axis], &[zero], &axes[axis + rank..]].concat();
    at_data(t, data, &at, axis, row, data.sizes()[axis])
}

/// Indices of `n` elements, of which those that are known count from the start.
fn from_start(t: &mut Terms, indices: &Operand, n: usize) -> TermId {
    let Some(value) = &indices.value else { return indices.term };
    let values = value.to_i64s();
    if values.iter().all(|ix| *ix >= 0) {
        return indices.term;
    }
    let values = values.into_iter().map(|ix| if ix < 0 { ix + n as i64 } else { ix });
    constant(t, &Tensor::ints(DType::I64, indices.sizes().to_vec(), values.collect()))
}

/// The element at these indices, but along an axis at an index that is itself data, of which is assumed that it is from 0 to
/// below `n`.
pub(super) fn at_data(
    t: &mut Terms,
    x: &Operand,
    at: &[Ix],
    axis: usize,
    index: TermId,
    n: usize,
) -> TermId {
    let var = t.fresh(n as u64);
    let mut at = at.to_vec();
    at[axis] = t.atom(Atom::Var(var));
    let element = x.at(t, &at);
    let index = t.as_index(index);
    t.substitute(element, vec![(var, index)])
}

/// (data, indices) with known indices: the last axis of the indices counts axes of the data behind the batch.
pub(super) fn gather_nd(t: &mut Terms, operands: &[Operand], batch: usize, axes: &[Ix]) -> TermId {
    let (data, indices) = (&operands[0], &operands[1]);
    let sizes = indices.sizes();
    let (outer, depth) = (&sizes[..sizes.len() - 1], sizes[sizes.len() - 1]);
    let values = indices.value.as_ref().map_or(vec![], |v| v.to_i64s());
    let mut at = axes[..batch].to_vec();
    for k in 0..depth {
        let n = data.sizes()[batch + k] as i64;
        let own = values.iter().skip(k).step_by(depth).map(|i| if *i < 0 { i + n } else { *i });
        let own = Tensor::ints(DType::I64, outer.to_vec(), own.collect());
        let index = constant(t, &own);
        let index = t.at(index, outer, &axes[..outer.len()]);
        at.push(t.as_index(index));
    }
    at.extend(&axes[outer.len()..]);
    data.at(t, &at)
}

/// (dy, indices[, more]): Σ of the rows of dy whose index is this row, and more.
pub(super) fn embedding_grad(t: &mut Terms, operands: &[Operand], axes: &[Ix]) -> TermId {
    let (dy, indices) = (&operands[0], &operands[1]);
    let (mut over, mut at) = (vec![], vec![]);
    for &n in indices.sizes() {
        let (var, ix) = t.fresh_index(n);
        over.extend(var);
        at.push(ix);
    }
    let index = indices.at(t, &at);
    let row = t.index_term(axes[0]);
    let difference = t.sub(index, row);
    let here = t.is_zero(difference);
    at.push(axes[1]);
    let element = dy.at(t, &at);
    let product = t.mul(here, element);
    let sum = t.sum_over(product, &over);
    match operands.get(2) {
        Some(more) => t.add(sum, more.term),
        None => sum,
    }
}

pub(super) fn gather_elements(
    t: &mut Terms,
    operands: &[Operand],
    axis: usize,
    axes: &[Ix],
) -> TermId {
    let n = operands[0].sizes()[axis];
    let row = from_start(t, &operands[1], n);
    at_data(t, &operands[0], axes, axis, row, n)
}

/// The elements of a short vector, as scalars.
pub(super) fn elements(t: &mut Terms, x: &Operand) -> Vec<Operand> {
    let ty = TensorType::scalar(x.ty.dtype);
    (0..x.sizes()[0])
        .map(|k| {
            let at = t.constant_index(k as i64);
            Operand { term: x.at(t, &[at]), ty: ty.clone(), value: None }
        })
        .collect()
}

/// The results of an operation that is not written out. A factor that has no axis is taken out of operands that it is linear in.
pub(super) fn opaque(
    t: &mut Terms,
    op: &Op,
    operands: &[Operand],
    types: &[&TensorType],
) -> Vec<TermId> {
    let op = without_dtypes(op);
    let mut terms: Vec<(TermId, Vec<usize>)> =
        operands.iter().map(|o| (o.term, o.sizes().to_vec())).collect();
    let mut factors: Vec<(TermId, f64)> = vec![];
    // Quotients of integers would be rounded, and some operations round integers themselves.
    let groups = match types.iter().all(|ty| ty.dtype.is_float()) {
        true => linear_in(&op, operands.len()),
        false => vec![],
    };
    for group in groups {
        let Some(&first) = group.first() else { continue };
        let (number, scalars) = scalar_factors(t, terms[first].0);
        let factor = t.product(&scalars);
        let factor = t.scale(factor, number);
        let shared = group.iter().all(|k| {
            let (n, s) = scalar_factors(t, terms[*k].0);
            let other = t.product(&s);
            t.scale(other, n) == factor
        });
        if !shared || t.as_number(factor) == Some(0.0) {
            continue;
        }
        for k in group {
            terms[k].0 = t.product(&[(terms[k].0, 1.0), (factor, -1.0)]);
        }
        factors.push((factor, 1.0));
    }
    (0..types.len())
        .map(|k| {
            let result = t.opaque(&op, k, &terms, types[k]);
            let all = [&factors[..], &[(result, 1.0)]].concat();
            t.product(&all)
        })
        .collect()
}

/// The number and the factors of a term that do not depend on where it is.
fn scalar_factors(t: &mut Terms, term: TermId) -> (f64, Vec<(TermId, f64)>) {
    let (number, rest) = t.content(term);
    let factors = match t.get(rest) {
        Term::Product(factors) => factors.to_vec(),
        _ => return (number, vec![]),
    };
    let scalar = factors.into_iter().filter(|(f, _)| t.vars_of(*f).is_empty());
    (number, scalar.map(|(f, e)| (f, e.value())).collect())
}
