//! Lemmas of bits: an operation is a function without laws of what it reads, and its dtypes.
//!
//! What only moves elements is written out as for real numbers. Of an operation that combines elements, the indices along which it does
//! are bound, in the order of the operand's axes, and the others are where an element of the result is: so rows are independent, and
//! a flag that transposes an operand is the transpose.

use super::layout::between;
use super::{Operand, exact};
use crate::index::{Ix, Var};
use crate::term::{Function, Term, TermId, Terms};
use frit_ir::ops::{
    CrossEntropy, CrossEntropyGrad, EmbeddingGrad, LayerNorm, LayerNormGradAffine,
    LayerNormGradInput, LogSoftmax, LogSoftmaxGrad, MatMul, Reduce, ReduceFn, RmsNorm,
    RmsNormGradInput, RmsNormGradScale, Softmax, SoftmaxGrad, SumTo,
};
use frit_ir::{DType, Op, Shape, TensorType};

/// What an operation that combines elements is of its operands.
struct Combined {
    /// The operation, without attributes that say where its operands are.
    op: Op,
    /// The indices along which it combines, in order.
    over: Vec<Var>,
    /// Elements of its operands, of these dtypes.
    elements: Vec<(TermId, DType)>,
    /// Where an element of the first result is along the axes that are combined, if it has them.
    at: Option<Ix>,
}

/// The results of an operation, over their axes.
pub(super) fn results(
    t: &mut Terms,
    op: &Op,
    operands: &[Operand],
    types: &[&TensorType],
) -> Vec<TermId> {
    let axes = types.first().map_or(vec![], |ty| t.axes(ty.shape.dims()));
    if moves(op, operands) {
        return exact(t, op, operands, types);
    }
    if is_by_element(op) {
        return without_laws(t, op, operands, types, &axes);
    }
    let Some(combined) = combined(t, op, operands, &axes) else {
        return without_laws(t, op, operands, types, &axes);
    };
    let Combined { op: alike, over, elements, at } = combined;
    let (mut elements, dtypes): (Vec<TermId>, Vec<DType>) = elements.into_iter().unzip();
    let is_extreme =
        |op: &Op| matches!(op, Op::Reduce(r) if matches!(r.f, ReduceFn::Max | ReduceFn::Min));
    if over.is_empty() && is_extreme(&alike) {
        return elements;
    }
    let whole = combination(t, &alike, &over, &dtypes, &mut elements);
    let result = |t: &mut Terms, k: usize| {
        let mut of = vec![whole];
        of.extend(at.filter(|_| k == 0).map(|ix| t.index_term(ix)));
        t.function(Function { name: "result", attributes: [k as u64, 0] }, &of)
    };
    let mut results: Vec<TermId> = (0..types.len()).map(|k| result(t, k)).collect();
    // The gradient of logits that are no classes is 0.
    if let Op::CrossEntropyGrad(CrossEntropyGrad { classes: Some(n), .. }) = op {
        let is_class = between(t, axes[axes.len() - 1], *n as i64);
        results[0] = t.mul(is_class, results[0]);
    }
    results
}

/// The results of an operation as those of a function of its operands and their dtypes; of single elements, if it is of those.
pub(super) fn without_laws(
    t: &mut Terms,
    op: &Op,
    operands: &[Operand],
    types: &[&TensorType],
    axes: &[Ix],
) -> Vec<TermId> {
    if is_by_element(op) {
        let dtypes: Vec<DType> = operands.iter().map(|x| x.ty.dtype).collect();
        let elements: Vec<TermId> = operands.iter().map(|x| x.broadcast(t, axes)).collect();
        return vec![t.operation(op, &dtypes, &elements)];
    }
    let typed = |t: &mut Terms, x: &Operand| {
        let function = Function { name: "of", attributes: [x.ty.dtype as u64, 0] };
        (t.function(function, &[x.term]), x.sizes().to_vec())
    };
    let typed: Vec<_> = operands.iter().map(|x| typed(t, x)).collect();
    types.iter().enumerate().map(|(k, ty)| t.opaque(op, k, &typed, ty)).collect()
}

fn is_by_element(op: &Op) -> bool {
    op.is_pointwise() || matches!(op, Op::ScaledCast(_))
}

/// An operation that combines these elements. Where an operand is padded beside what is combined, it is one of the operand, and one of 0.
fn combination(
    t: &mut Terms,
    op: &Op,
    over: &[Var],
    dtypes: &[DType],
    elements: &mut [TermId],
) -> TermId {
    for k in 0..elements.len() {
        let Term::Product(factors) = t.get(elements[k]).clone() else { continue };
        let is_place = |f: &TermId| {
            t.is_truth(*f) && !over.iter().any(|v| t.vars_of(*f).binary_search(v).is_ok())
        };
        let factors = factors.iter().map(|(f, _)| *f);
        let (places, rest): (Vec<TermId>, Vec<TermId>) = factors.partition(is_place);
        if places.is_empty() {
            continue;
        }
        let all = |of: Vec<TermId>| of.into_iter().map(|f| (f, 1.0)).collect::<Vec<_>>();
        let (places, rest) = (t.product(&all(places)), t.product(&all(rest)));
        elements[k] = rest;
        let inside = combination(t, op, over, dtypes, elements);
        elements[k] = t.constant(0.0);
        let outside = combination(t, op, over, dtypes, elements);
        return t.choice(places, inside, outside);
    }
    let body = t.operation(op, dtypes, elements);
    t.reduction("combined", body, over)
}

/// Whether results have the bits of elements of the operands.
fn moves(op: &Op, operands: &[Operand]) -> bool {
    match op {
        Op::GatherNd(_) => operands[1].value.is_some(),
        Op::Embedding(_) | Op::Gather(_) | Op::GatherElements(_) => true,
        Op::EnterPrecision(_) | Op::LeavePrecision(_) | Op::CustomGradient(_) => true,
        op => op.is_layout(),
    }
}

/// What is written out of operations that combine elements.
fn combined(t: &mut Terms, op: &Op, operands: &[Operand], axes: &[Ix]) -> Option<Combined> {
    let first = operands.first()?;
    let whole = |x: &Operand| (x.term, x.ty.dtype);
    let all = |t: &mut Terms, at: &[Ix]| -> Vec<(TermId, DType)> {
        operands.iter().map(|x| (x.at(t, at), x.ty.dtype)).collect()
    };
    let along = |axis: usize| {
        move |t: &mut Terms| {
            let (var, ix) = t.fresh_index(first.sizes()[axis]);
            let mut at = axes.to_vec();
            at[axis] = ix;
            (var.into_iter().collect::<Vec<Var>>(), at, Some(axes[axis]))
        }
    };
    Some(match op {
        Op::MatMul(MatMul { trans_a, trans_b, out }) => {
            let op = Op::MatMul(MatMul { trans_a: false, trans_b: false, out: *out });
            let (a, b) = (&operands[0], &operands[1]);
            let (batch, [row, column]) =
                (&axes[..axes.len() - 2], [axes.len() - 2, axes.len() - 1]);
            let depth = a.sizes().len() - if *trans_a { 2 } else { 1 };
            let (var, k) = t.fresh_index(a.sizes()[depth]);
            let place = |x: Ix, y: Ix, swapped: bool| if swapped { [y, x] } else { [x, y] };
            let left = [batch, &place(axes[row], k, *trans_a)].concat();
            let right = [batch, &place(k, axes[column], *trans_b)].concat();
            let left = (a.broadcast(t, &left), a.ty.dtype);
            let right = (b.broadcast(t, &right), b.ty.dtype);
            Combined { op, over: var.into_iter().collect(), elements: vec![left, right], at: None }
        }
        Op::Reduce(Reduce { f, axes: reduced, keep_dims }) => {
            let kept = (0..first.sizes().len()).filter(|k| !reduced.contains(k));
            let place = |(i, k): (usize, usize)| (k, if *keep_dims { k } else { i });
            let kept: Vec<(usize, usize)> = kept.enumerate().map(place).collect();
            let op = Op::Reduce(Reduce { f: *f, axes: vec![], keep_dims: false });
            sum(t, op, first, &kept, axes)
        }
        Op::SumTo(SumTo { shape, dtype }) => {
            let more = first.sizes().len() - shape.rank();
            let kept = (more..first.sizes().len()).map(|k| (k, k - more));
            let kept: Vec<(usize, usize)> =
                kept.filter(|(from, to)| shape.dims()[*to] == first.sizes()[*from]).collect();
            let op = match dtype.filter(|dtype| *dtype != first.ty.dtype) {
                None => Op::Reduce(Reduce { f: ReduceFn::Sum, axes: vec![], keep_dims: false }),
                dtype => Op::SumTo(SumTo { shape: Shape::scalar(), dtype }),
            };
            sum(t, op, first, &kept, axes)
        }
        Op::Softmax(Softmax { axis })
        | Op::LogSoftmax(LogSoftmax { axis })
        | Op::SoftmaxGrad(SoftmaxGrad { axis })
        | Op::LogSoftmaxGrad(LogSoftmaxGrad { axis }) => {
            let alike = match op {
                Op::Softmax(_) => Op::Softmax(Softmax { axis: 0 }),
                Op::LogSoftmax(_) => Op::LogSoftmax(LogSoftmax { axis: 0 }),
                Op::SoftmaxGrad(_) => Op::SoftmaxGrad(SoftmaxGrad { axis: 0 }),
                _ => Op::LogSoftmaxGrad(LogSoftmaxGrad { axis: 0 }),
            };
            let (over, at, place) = along(*axis)(t);
            Combined { op: alike, over, elements: all(t, &at), at: place }
        }
        Op::LayerNorm(LayerNorm { axis, eps }) => {
            let op = Op::LayerNorm(LayerNorm { axis: 0, eps: *eps });
            rows(t, op, operands, *axis, first.sizes(), axes)
        }
        Op::RmsNorm(RmsNorm { axis, eps }) => {
            let op = Op::RmsNorm(RmsNorm { axis: 0, eps: *eps });
            rows(t, op, operands, *axis, first.sizes(), axes)
        }
        Op::LayerNormGradInput(LayerNormGradInput { axis }) => {
            let op = Op::LayerNormGradInput(LayerNormGradInput { axis: 0 });
            rows(t, op, operands, *axis, first.sizes(), axes)
        }
        Op::RmsNormGradInput(RmsNormGradInput { axis }) => {
            let op = Op::RmsNormGradInput(RmsNormGradInput { axis: 0 });
            rows(t, op, operands, *axis, first.sizes(), axes)
        }
        Op::LayerNormGradAffine(LayerNormGradAffine { axis })
        | Op::RmsNormGradScale(RmsNormGradScale { axis }) => {
            let alike = match op {
                Op::RmsNormGradScale(_) => Op::RmsNormGradScale(RmsNormGradScale { axis: 0 }),
                _ => Op::LayerNormGradAffine(LayerNormGradAffine { axis: 0 }),
            };
            let (var, lead) = flat(t, &first.sizes()[..*axis]);
            let at = [&lead[..], axes].concat();
            let element = |x: &Operand| (x.at(t, &at[..x.sizes().len()]), x.ty.dtype);
            let elements = operands.iter().map(element).collect();
            Combined { op: alike, over: var.into_iter().collect(), elements, at: None }
        }
        Op::CrossEntropy(CrossEntropy { ignore_index, classes }) => {
            let op = Op::CrossEntropy(CrossEntropy::ignoring(*ignore_index));
            let n = classes.unwrap_or(first.sizes()[axes.len()]);
            let (var, class) = t.fresh_index(n);
            let logit = first.at(t, &[axes, &[class]].concat());
            let elements = vec![(logit, first.ty.dtype), whole(&operands[1])];
            Combined { op, over: var.into_iter().collect(), elements, at: None }
        }
        // (dlosses, logits, labels, lse)
        Op::CrossEntropyGrad(CrossEntropyGrad { ignore_index, classes }) => {
            let op = Op::CrossEntropyGrad(CrossEntropyGrad::ignoring(*ignore_index));
            let (rows, class) = axes.split_at(axes.len() - 1);
            let n = classes.unwrap_or(operands[1].sizes()[rows.len()]);
            let (var, other) = t.fresh_index(n);
            let at = [rows, &[other]].concat();
            let element = |x: &Operand| (x.at(t, &at[..x.sizes().len()]), x.ty.dtype);
            let elements = operands.iter().map(element).collect();
            let over = var.into_iter().collect();
            Combined { op, over, elements, at: Some(class[0]) }
        }
        // (dy, indices[, more])
        Op::EmbeddingGrad(EmbeddingGrad { dtype, .. }) => {
            let op = Op::EmbeddingGrad(EmbeddingGrad { rows: 0, dtype: *dtype });
            let (var, at) = flat(t, operands[1].sizes());
            let mut elements = vec![
                (first.at(t, &[&at[..], &axes[1..]].concat()), first.ty.dtype),
                (operands[1].at(t, &at), operands[1].ty.dtype),
                (t.index_term(axes[0]), DType::I64),
            ];
            elements.extend(operands.get(2).map(whole));
            Combined { op, over: var.into_iter().collect(), elements, at: None }
        }
        _ => return None,
    })
}

/// One index through all places of these sizes, in order, and those along each of them.
fn flat(t: &mut Terms, sizes: &[usize]) -> (Option<Var>, Vec<Ix>) {
    let (var, place) = t.fresh_index(sizes.iter().product());
    (var, t.at_place(sizes, place))
}

/// A reduction over the axes that are not kept; of those that are, the axis of the result.
fn sum(t: &mut Terms, op: Op, x: &Operand, kept: &[(usize, usize)], axes: &[Ix]) -> Combined {
    let to = |k: usize| kept.iter().find(|(from, _)| *from == k).map(|(_, to)| *to);
    let reduced: Vec<usize> = (0..x.sizes().len()).filter(|k| to(*k).is_none()).collect();
    let sizes: Vec<usize> = reduced.iter().map(|k| x.sizes()[*k]).collect();
    let (var, inner) = flat(t, &sizes);
    let at: Vec<Ix> = (0..x.sizes().len())
        .map(|k| match to(k) {
            Some(axis) => axes[axis],
            None => inner[reduced.iter().position(|r| *r == k).unwrap_or(0)],
        })
        .collect();
    let element = x.at(t, &at);
    let elements = vec![(element, x.ty.dtype)];
    Combined { op, over: var.into_iter().collect(), elements, at: None }
}

/// An operation on the rows of values of these sizes, from an axis on. Operands have the whole shape, or only the axes before or from this
/// one.
fn rows(
    t: &mut Terms,
    op: Op,
    operands: &[Operand],
    axis: usize,
    sizes: &[usize],
    axes: &[Ix],
) -> Combined {
    let (var, tail) = flat(t, &sizes[axis..]);
    let at = [&axes[..axis], &tail[..]].concat();
    // The operand of the same place in each operation: scale and bias have the axes of a row, statistics have those before.
    let scale = match op {
        Op::LayerNorm(_) | Op::RmsNorm(_) => 1..operands.len(),
        _ => 2..3,
    };
    let mut elements = vec![];
    for (k, x) in operands.iter().enumerate() {
        let at = match scale.contains(&k) {
            true => &at[axis..],
            false => &at[..x.sizes().len()],
        };
        elements.push((x.at(t, at), x.ty.dtype));
    }
    let place = t.place(&sizes[axis..], &axes[axis..]);
    Combined { op, over: var.into_iter().collect(), elements, at: Some(place) }
}
