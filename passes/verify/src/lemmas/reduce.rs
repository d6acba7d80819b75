//! Reductions, matmuls, and composites of them by definition.

use super::layout::at_data;
use super::{Operand, constant};
use crate::index::{Ix, Var};
use crate::term::{TermId, Terms};
use frit_ir::ops::{
    CrossEntropy, CrossEntropyGrad, GradStats, LayerNorm, MatMul, Reduce, ReduceFn, RmsNorm,
};
use frit_ir::{DType, Shape, Tensor};

pub(super) fn reduce(t: &mut Terms, x: &Operand, op: &Reduce) -> TermId {
    let kept: Vec<usize> = (0..x.sizes().len()).filter(|k| !op.axes.contains(k)).collect();
    let mut over = vec![];
    let mut at = vec![];
    for (k, &n) in x.sizes().iter().enumerate() {
        at.push(match op.axes.contains(&k) {
            true => {
                let (var, ix) = t.fresh_index(n);
                over.extend(var);
                ix
            }
            false => {
                let axis =
                    if op.keep_dims { k } else { kept.iter().position(|o| *o == k).unwrap_or(k) };
                t.var(crate::index::Kind::Axis, axis, n as u64)
            }
        });
    }
    let element = x.at(t, &at);
    match op.f {
        ReduceFn::Sum => t.sum_over(element, &over),
        ReduceFn::Mean => {
            let n: usize = op.axes.iter().map(|k| x.sizes()[*k]).product();
            let sum = t.sum_over(element, &over);
            t.scale(sum, 1.0 / n as f64)
        }
        ReduceFn::Max => t.reduction("max", element, &over),
        ReduceFn::Min => t.reduction("min", element, &over),
        // An axis that the elements do not depend on still multiplies.
        ReduceFn::Prod => {
            let marks: Vec<TermId> = over
                .iter()
                .map(|v| {
                    let ix = t.atom(crate::index::Atom::Var(*v));
                    let ix = t.index_term(ix);
                    t.apply("along", &[ix])
                })
                .collect();
            let all = t.apply("factor", &[&[element][..], &marks].concat());
            t.reduction("prod", all, &over)
        }
    }
}

/// Sums over the axes along which `sizes` was broadcast.
pub(super) fn sum_to(t: &mut Terms, x: &Operand, sizes: &[usize]) -> TermId {
    let more = x.sizes().len() - sizes.len();
    let mut over = vec![];
    let mut at = vec![];
    for (k, &n) in x.sizes().iter().enumerate() {
        let own = k.checked_sub(more).map(|k| (k, sizes[k]));
        at.push(match own {
            Some((axis, size)) if size == n => t.var(crate::index::Kind::Axis, axis, n as u64),
            _ => {
                let (var, ix) = t.fresh_index(n);
                over.extend(var);
                ix
            }
        });
    }
    let element = x.at(t, &at);
    t.sum_over(element, &over)
}

pub(super) fn matmul(t: &mut Terms, op: &MatMul, operands: &[Operand], axes: &[Ix]) -> TermId {
    let (a, b) = (&operands[0], &operands[1]);
    let rank = axes.len();
    let (batch, row, column) = (&axes[..rank - 2], axes[rank - 2], axes[rank - 1]);
    let depth = a.sizes()[a.sizes().len() - if op.trans_a { 2 } else { 1 }];
    let (var, k) = t.fresh_index(depth);
    let place = |x: Ix, y: Ix, swapped: bool| if swapped { [y, x] } else { [x, y] };
    let left = a.broadcast(t, &[batch, &place(row, k, op.trans_a)].concat());
    let right = b.broadcast(t, &[batch, &place(k, column, op.trans_b)].concat());
    let product = t.mul(left, right);
    t.sum_over(product, var.as_slice())
}

/// [elements that are not finite, Σ x²] of all operands, or instead of the sum its digits.
pub(super) fn grad_stats(t: &mut Terms, op: GradStats, operands: &[Operand], axis: Ix) -> TermId {
    let (mut bad, mut squares) = (vec![], vec![]);
    for x in operands {
        let indices: Vec<_> = x.sizes().iter().map(|n| t.fresh_index(*n)).collect();
        let over: Vec<Var> = indices.iter().filter_map(|(var, _)| *var).collect();
        let at: Vec<Ix> = indices.iter().map(|(_, ix)| *ix).collect();
        let element = x.at(t, &at);
        let counted = t.apply("is not finite", &[element]);
        bad.push((t.sum_over(counted, &over), 1.0));
        let square = t.power(element, 2.0);
        squares.push((t.sum_over(square, &over), 1.0));
    }
    let (bad, mut squares) = (t.sum(&bad, 0.0), t.sum(&squares, 0.0));
    if op.exact {
        let place = t.index_term(axis);
        squares = t.apply("digit", &[squares, place]);
    }
    let last = t.offset(axis, -1);
    let first = t.times(axis, -1);
    let (first, others) = (t.index_not_negative(first), t.index_not_negative(last));
    let (bad, squares) = (t.mul(first, bad), t.mul(others, squares));
    t.add(bad, squares)
}

/// The indices with another along an axis.
fn along(axes: &[Ix], axis: usize, ix: Ix) -> Vec<Ix> {
    let mut at = axes.to_vec();
    at[axis] = ix;
    at
}

/// eˣ / Σ eˣ
pub(super) fn softmax(t: &mut Terms, x: &Operand, axis: usize, axes: &[Ix]) -> TermId {
    let total = exp_sum(t, x, axis, axes, x.sizes()[axis]);
    let exp = t.exp(x.term);
    t.product(&[(exp, 1.0), (total, -1.0)])
}

/// Σ eˣ over the first `n` elements along an axis.
fn exp_sum(t: &mut Terms, x: &Operand, axis: usize, axes: &[Ix], n: usize) -> TermId {
    let (var, ix) = t.fresh_index(n);
    let element = x.at(t, &along(axes, axis, ix));
    let exp = t.exp(element);
    t.sum_over(exp, var.as_slice())
}

/// (dy, y): y·(dy − Σ dy·y)
pub(super) fn softmax_grad(
    t: &mut Terms,
    operands: &[Operand],
    axis: usize,
    axes: &[Ix],
) -> TermId {
    let (dy, y) = (&operands[0], &operands[1]);
    let (var, ix) = t.fresh_index(y.sizes()[axis]);
    let at = along(axes, axis, ix);
    let (dys, ys) = (dy.at(t, &at), y.at(t, &at));
    let product = t.mul(dys, ys);
    let sum = t.sum_over(product, var.as_slice());
    let difference = t.sub(dy.term, sum);
    t.mul(y.term, difference)
}

/// (dy, y): dy − eʸ·Σ dy
pub(super) fn log_softmax_grad(
    t: &mut Terms,
    operands: &[Operand],
    axis: usize,
    axes: &[Ix],
) -> TermId {
    let (dy, y) = (&operands[0], &operands[1]);
    let (var, ix) = t.fresh_index(y.sizes()[axis]);
    let dys = dy.at(t, &along(axes, axis, ix));
    let sum = t.sum_over(dys, var.as_slice());
    let exp = t.exp(y.term);
    let product = t.mul(exp, sum);
    t.sub(dy.term, product)
}

/// Statistics are over the axes from `axis` on: indices before it, variables of the sum, and the number of elements.
fn rows(t: &mut Terms, sizes: &[usize], axis: usize, axes: &[Ix]) -> (Vec<Ix>, Vec<Var>, f64) {
    let (mut at, mut over) = (axes[..axis].to_vec(), vec![]);
    for &n in &sizes[axis..] {
        let (var, ix) = t.fresh_index(n);
        over.extend(var);
        at.push(ix);
    }
    (at, over, sizes[axis..].iter().product::<usize>() as f64)
}

/// (x, scale[, bias]): (x − mean)·rstd·scale + bias, mean, and rstd = (mean (x − mean)² + ε)^−½
pub(super) fn layer_norm(
    t: &mut Terms,
    op: &LayerNorm,
    operands: &[Operand],
    axes: &[Ix],
) -> Vec<TermId> {
    let x = &operands[0];
    let (at, over, n) = rows(t, x.sizes(), op.axis, axes);
    let element = x.at(t, &at);
    let mean = t.sum_over(element, &over);
    let mean = t.scale(mean, 1.0 / n);
    let difference = t.sub(element, mean);
    let square = t.power(difference, 2.0);
    let square = t.sum_over(square, &over);
    let variance = t.sum(&[(square, 1.0 / n)], op.eps);
    let rstd = t.power(variance, -0.5);
    let centered = t.sub(x.term, mean);
    let scale = operands[1].at(t, &axes[op.axis..]);
    let mut y = t.product(&[(centered, 1.0), (rstd, 1.0), (scale, 1.0)]);
    if let Some(bias) = operands.get(2) {
        let bias = bias.at(t, &axes[op.axis..]);
        y = t.add(y, bias);
    }
    vec![y, mean, rstd]
}

/// (x, scale): x·rstd·scale, and rstd = (mean x² + ε)^−½
pub(super) fn rms_norm(
    t: &mut Terms,
    op: &RmsNorm,
    operands: &[Operand],
    axes: &[Ix],
) -> Vec<TermId> {
    let x = &operands[0];
    let (at, over, n) = rows(t, x.sizes(), op.axis, axes);
    let element = x.at(t, &at);
    let square = t.power(element, 2.0);
    let square = t.sum_over(square, &over);
    let mean = t.sum(&[(square, 1.0 / n)], op.eps);
    let rstd = t.power(mean, -0.5);
    let scale = operands[1].at(t, &axes[op.axis..]);
    vec![t.product(&[(x.term, 1.0), (rstd, 1.0), (scale, 1.0)]), rstd]
}

/// (logits, labels): where the label is not ignored lse − logits[label], and lse = ln Σ e^logits
pub(super) fn cross_entropy(
    t: &mut Terms,
    op: &CrossEntropy,
    operands: &[Operand],
    rows: &[Ix],
) -> Vec<TermId> {
    let (logits, labels) = (&operands[0], &operands[1]);
    let last = rows.len();
    let n = op.classes.unwrap_or(logits.sizes()[last]);
    let zero = t.constant_index(0);
    let at = [rows, &[zero]].concat();
    let (var, ix) = t.fresh_index(n);
    let element = logits.at(t, &along(&at, last, ix));
    let exp = t.exp(element);
    let total = t.sum_over(exp, var.as_slice());
    let lse = t.log(total);
    let chosen = at_data(t, logits, &at, last, labels.term, n);
    let loss = t.sub(lse, chosen);
    let ignored = is_ignored(t, labels, labels.term, op.ignore_index);
    let none = t.constant(0.0);
    vec![t.select(ignored, none, loss), lse]
}

/// Whether an element of the labels is this index; the least of all stands for none.
fn is_ignored(t: &mut Terms, labels: &Operand, label: TermId, index: i64) -> TermId {
    let known = labels.value.as_ref().map(|value| value.to_i64s());
    if index == i64::MIN || known.is_some_and(|known| !known.contains(&index)) {
        return t.constant(0.0);
    }
    let index = constant(t, &Tensor::ints(DType::I64, Shape::scalar(), vec![index]));
    let difference = t.sub(label, index);
    t.is_zero(difference)
}

/// (dlosses, logits, labels, lse): where the label is not ignored, dloss·(e^(logit − lse) − [class is the label]), of classes
pub(super) fn cross_entropy_grad(
    t: &mut Terms,
    op: &CrossEntropyGrad,
    operands: &[Operand],
    axes: &[Ix],
) -> TermId {
    let (rows, class) = (&axes[..axes.len() - 1], axes[axes.len() - 1]);
    let [dloss, label, lse] = [0, 2, 3].map(|k| operands[k].at(t, rows));
    let difference = t.sub(operands[1].term, lse);
    let weight = t.exp(difference);
    let index = t.index_term(class);
    let difference = t.sub(label, index);
    let chosen = t.is_zero(difference);
    let slope = t.sub(weight, chosen);
    let ignored = is_ignored(t, &operands[2], label, op.ignore_index);
    let kept = t.not(ignored);
    let mut factors = vec![(dloss, 1.0), (slope, 1.0), (kept, 1.0)];
    if let Some(n) = op.classes {
        let minus = t.times(class, -1);
        let last = t.offset(minus, n as i64 - 1);
        factors.push((t.index_not_negative(last), 1.0));
    }
    t.product(&factors)
}
