//! Decomposes reductions, softmax, normalization and cross-entropy into plain reductions and elementwise expressions.
//!
//! Variances take two passes: the mean first, then the squared deviations.

use super::composite::{both, rsqrt};
use super::expr::{Expr, Id, Over, Ty};
use super::math::Un;
use super::region::{Lowering, unsupported};
use super::view::{DimView, Stop, View};
use crate::error::Unsupported;
use frit_ir::ops::{
    CompareFn, CrossEntropy, CrossEntropyGrad, FusionKind, LogSoftmax, LogSoftmaxGrad, ReduceFn,
    Softmax, SoftmaxGrad,
};
use frit_ir::{DType, Node, Op, Shape, TensorType};

/// The shape that an operation reduces, the axis that separates rows from columns, and whether it reduces rows or
/// columns; `None` if regions of this kind have no such reduction.
pub(crate) fn reduced(
    op: &Op,
    types: &[&TensorType],
    kind: FusionKind,
) -> Option<(Shape, usize, Over)> {
    let of = |over: Over| {
        let (shape, split) = reduced_over(op, types, over)?;
        Some((shape, split, over))
    };
    match kind {
        FusionKind::ColReduce => of(Over::Rows),
        FusionKind::RowColReduce if trivial_axes(op, &types.first()?.shape).is_some() => None,
        FusionKind::RowColReduce => of(Over::Cols).or_else(|| of(Over::Rows)),
        _ => of(Over::Cols),
    }
}

fn reduced_over(op: &Op, types: &[&TensorType], over: Over) -> Option<(Shape, usize)> {
    let shape = types.first()?.shape.clone();
    let cols = over == Over::Rows;
    let split = |axes: &[usize]| split(&shape, axes, cols);
    match op {
        Op::Reduce(r) => split(&r.axes).map(|s| (shape.clone(), s)),
        Op::SumTo(s) => split(&s.axes(&shape)).map(|s| (shape.clone(), s)),
        Op::LayerNormGradAffine(op) if cols => Some((shape, op.axis)),
        Op::RmsNormGradScale(op) if cols => Some((shape, op.axis)),
        _ if cols => None,
        Op::Softmax(Softmax { axis })
        | Op::LogSoftmax(LogSoftmax { axis })
        | Op::SoftmaxGrad(SoftmaxGrad { axis })
        | Op::LogSoftmaxGrad(LogSoftmaxGrad { axis }) => {
            split(&[*axis]).map(|s| (shape.clone(), s))
        }
        Op::LayerNorm(op) => Some((shape, op.axis)),
        Op::LayerNormGradInput(op) => Some((shape, op.axis)),
        Op::RmsNorm(op) => Some((shape, op.axis)),
        Op::RmsNormGradInput(op) => Some((shape, op.axis)),
        Op::CrossEntropy(_) => Some((shape.clone(), shape.rank() - 1)),
        Op::CrossEntropyGrad(_) => {
            let shape = types.get(1)?.shape.clone();
            Some((shape.clone(), shape.rank() - 1))
        }
        _ => None,
    }
}

/// The axes of a reduction that all have size 1; `None` if one is larger, or for other operations.
fn trivial_axes(op: &Op, shape: &Shape) -> Option<Vec<usize>> {
    let axes = match op {
        Op::Reduce(r) => r.axes.clone(),
        Op::SumTo(s) => s.axes(shape),
        _ => return None,
    };
    axes.iter().all(|&a| shape.0[a] == 1).then_some(axes)
}

/// The axis at which a reduction over `axes` separates rows from columns: all trailing axes (all leading ones, if
/// `cols`) are reduced or of size 1.
fn split(shape: &Shape, axes: &[usize], cols: bool) -> Option<usize> {
    let (first, last) = (*axes.iter().min()?, *axes.iter().max()?);
    let split = if cols { last + 1 } else { first };
    let range = if cols { 0..split } else { split..shape.rank() };
    range.into_iter().all(|i| axes.contains(&i) || shape.0[i] == 1).then_some(split)
}

/// Result `index` of the node at `view`.
pub(crate) fn lower(
    cx: &mut Lowering<'_>,
    node: &Node,
    index: usize,
    view: &View,
) -> Result<Id, Stop> {
    let types: Vec<&TensorType> = node.inputs.iter().map(|v| cx.body.ty(*v)).collect();
    // The gradient of cross-entropy takes the log-sum-exp as an operand and reduces nothing.
    if let Op::CrossEntropyGrad(op) = &node.op {
        return cross_entropy_grad(cx, node, op, view);
    }
    if let Some(axes) = trivial_axes(&node.op, &types[0].shape) {
        // Each reduction has one element, which is its result.
        let rank = types[0].shape.rank();
        let kept = rank - axes.len() == view.0.len();
        let at = (0..rank).map(|i| match (axes.contains(&i), kept) {
            (true, _) => DimView::first(),
            (false, true) => view.0[i - axes.iter().filter(|&&a| a < i).count()].clone(),
            (false, false) => view.0[i + view.0.len() - rank].clone(),
        });
        let at = View(at.collect());
        return cx.lower(node.inputs[0], &at);
    }
    if cx.kind == FusionKind::Pointwise {
        return Err(unsupported(&node.op, "it does not fit a pointwise region").into());
    }
    let Some((_, _, along)) = reduced(&node.op, &types, cx.kind) else {
        return Err(unsupported(&node.op, "it does not reduce the region's axes").into());
    };
    match &node.op {
        Op::Reduce(op) => {
            let dtype = types[0].dtype;
            if dtype == DType::U8 || (op.f == ReduceFn::Mean && !dtype.is_float()) {
                return Err(unsupported(&node.op, "its element type").into());
            }
            let keep = op.keep_dims;
            let at = reduction_view(cx, along, &types[0].shape, &op.axes, |i, before| {
                view.0[if keep { i } else { i - before }].clone()
            })?;
            let x = cx.lower(node.inputs[0], &at)?;
            let n = op.axes.iter().map(|&a| types[0].shape.0[a]).product();
            Ok(match op.f {
                ReduceFn::Mean => cx.dag.mean(along, x, n),
                f => cx.dag.reduce(f, along, x),
            })
        }
        Op::SumTo(op) => {
            if types[0].dtype == DType::U8 {
                return Err(unsupported(&node.op, "its element type").into());
            }
            let (shape, axes) = (&types[0].shape, op.axes(&types[0].shape));
            let missing = shape.rank() - op.shape.rank();
            let at = reduction_view(cx, along, shape, &axes, |i, _| {
                view.0.get(i.wrapping_sub(missing)).cloned().unwrap_or(DimView {
                    atoms: vec![],
                    start: 0,
                    step: 1,
                })
            })?;
            let x = cx.lower(node.inputs[0], &at)?;
            Ok(cx.dag.reduce(ReduceFn::Sum, along, x))
        }
        Op::Softmax(Softmax { axis }) | Op::LogSoftmax(LogSoftmax { axis }) => {
            let over = trailing(cx, view, *axis, &types[0].shape)?;
            let xs = cx.lower(node.inputs[0], &over)?;
            let exps = shifted_exp(cx, xs);
            let shifted = {
                let x = cx.lower(node.inputs[0], view)?;
                cx.dag.minus(x, exps.max)
            };
            if let Op::Softmax(_) = node.op {
                let (e, one) = (cx.dag.un(Un::Exp, shifted), cx.dag.float(1.0));
                let inverse = cx.dag.over(one, exps.sum);
                return Ok(cx.dag.times(e, inverse));
            }
            let log = cx.dag.un(Un::Log, exps.sum);
            Ok(cx.dag.minus(shifted, log))
        }
        Op::SoftmaxGrad(SoftmaxGrad { axis }) | Op::LogSoftmaxGrad(LogSoftmaxGrad { axis }) => {
            let over = trailing(cx, view, *axis, &types[0].shape)?;
            let (dys, ys) = (cx.lower(node.inputs[0], &over)?, cx.lower(node.inputs[1], &over)?);
            let (dy, y) = (cx.lower(node.inputs[0], view)?, cx.lower(node.inputs[1], view)?);
            if let Op::SoftmaxGrad(_) = node.op {
                let products = cx.dag.times(dys, ys);
                let sum = cx.dag.reduce_row(ReduceFn::Sum, products);
                let rest = cx.dag.minus(dy, sum);
                return Ok(cx.dag.times(y, rest));
            }
            let sum = cx.dag.reduce_row(ReduceFn::Sum, dys);
            let e = cx.dag.un(Un::Exp, y);
            let minus = cx.dag.un(Un::Neg, e);
            Ok(cx.dag.fma(minus, sum, dy))
        }
        Op::LayerNorm(op) => layer_norm(cx, node, op.axis, op.eps, index, view),
        Op::LayerNormGradInput(op) => {
            let shape = &types[1].shape;
            let over = trailing(cx, view, op.axis, shape)?;
            let (lead, n) = (leading(view, op.axis), size_after(shape, op.axis));
            let (mean, rstd) = (cx.lower(node.inputs[3], &lead)?, cx.lower(node.inputs[4], &lead)?);
            let mut at = |v: &View| -> Result<(Id, Id), Stop> {
                let (dy, x) = (cx.lower(node.inputs[0], v)?, cx.lower(node.inputs[1], v)?);
                let scale = cx.lower(node.inputs[2], &View(v.0[op.axis..].to_vec()))?;
                let deviation = cx.dag.minus(x, mean);
                Ok((cx.dag.times(dy, scale), cx.dag.times(deviation, rstd)))
            };
            let ((gs, hats), (g, hat)) = (at(&over)?, at(view)?);
            let products = cx.dag.times(gs, hats);
            let (a, b) = (cx.dag.row_mean(gs, n), cx.dag.row_mean(products, n));
            let centered = cx.dag.minus(g, a);
            let minus = cx.dag.un(Un::Neg, b);
            let dx = cx.dag.fma(hat, minus, centered);
            Ok(cx.dag.times(dx, rstd))
        }
        Op::RmsNorm(op) => {
            let over = match index {
                0 => trailing(cx, view, op.axis, &types[0].shape)?,
                _ => with_columns(cx, view, op.axis, &types[0].shape)?,
            };
            let xs = cx.lower(node.inputs[0], &over)?;
            let squares = cx.dag.times(xs, xs);
            let mean = cx.dag.row_mean(squares, size_after(&types[0].shape, op.axis));
            let eps = cx.dag.float(op.eps as f32);
            let sum = cx.dag.plus(mean, eps);
            let rstd = rsqrt(&mut cx.dag, sum);
            if index == 1 {
                return Ok(rstd);
            }
            let x = cx.lower(node.inputs[0], view)?;
            let scale = cx.lower(node.inputs[1], &View(view.0[op.axis..].to_vec()))?;
            let hat = cx.dag.times(x, rstd);
            Ok(cx.dag.times(hat, scale))
        }
        Op::RmsNormGradInput(op) => {
            let shape = &types[1].shape;
            let over = trailing(cx, view, op.axis, shape)?;
            let n = size_after(shape, op.axis);
            let rstd = cx.lower(node.inputs[3], &leading(view, op.axis))?;
            let mut at = |v: &View| -> Result<(Id, Id), Stop> {
                let (dy, x) = (cx.lower(node.inputs[0], v)?, cx.lower(node.inputs[1], v)?);
                let scale = cx.lower(node.inputs[2], &View(v.0[op.axis..].to_vec()))?;
                Ok((cx.dag.times(dy, scale), cx.dag.times(x, rstd)))
            };
            let ((gs, hats), (g, hat)) = (at(&over)?, at(view)?);
            let products = cx.dag.times(gs, hats);
            let mean = cx.dag.row_mean(products, n);
            let minus = cx.dag.un(Un::Neg, mean);
            let dx = cx.dag.fma(hat, minus, g);
            Ok(cx.dag.times(dx, rstd))
        }
        Op::LayerNormGradAffine(_) | Op::RmsNormGradScale(_) => affine_grad(cx, node, index, view),
        Op::CrossEntropy(op) => cross_entropy(cx, node, op, index, view),
        op => Err(unsupported(op, "kernels do not compute it").into()),
    }
}

/// The view of a reduction's operand: reduced axes run over the reduced atoms, the others are `kept(axis, number of
/// reduced axes before it)`.
fn reduction_view(
    cx: &Lowering<'_>,
    over: Over,
    shape: &Shape,
    axes: &[usize],
    kept: impl Fn(usize, usize) -> DimView,
) -> Result<View, Stop> {
    let dims: Vec<usize> = axes.iter().map(|&a| shape.0[a]).collect();
    let mut reduced = cx.space.group(&cx.atoms(over), &dims, "reduce")?.0.into_iter();
    let mut view = Vec::with_capacity(shape.rank());
    for i in 0..shape.rank() {
        let before = axes.iter().filter(|&&a| a < i).count();
        view.push(match axes.contains(&i) {
            true => reduced.next().expect("invariant: one view per reduced axis"),
            false => kept(i, before),
        });
    }
    Ok(View(view))
}

/// `view` with the axes from `axis` on running over all columns.
fn trailing(cx: &Lowering<'_>, view: &View, axis: usize, shape: &Shape) -> Result<View, Stop> {
    with_columns(cx, &leading(view, axis), axis, shape)
}

/// A view of the axes before `axis`, continued over all columns.
fn with_columns(cx: &Lowering<'_>, lead: &View, axis: usize, shape: &Shape) -> Result<View, Stop> {
    let cols = cx.space.cols();
    if lead.0.iter().flat_map(|dim| &dim.atoms).any(|atom| cols.contains(atom)) {
        return Err(Unsupported::new(
            "reduce",
            "the rows that it reduces are columns of the region",
        )
        .into());
    }
    let tail = cx.space.group(&cols, &shape.0[axis..], "reduce")?;
    Ok(View(lead.0.iter().cloned().chain(tail.0).collect()))
}

fn leading(view: &View, axis: usize) -> View {
    View(view.0[..axis].to_vec())
}

fn size_after(shape: &Shape, axis: usize) -> usize {
    shape.0[axis..].iter().product()
}

struct ShiftedExp {
    max: Id,
    sum: Id,
}

/// The maximum of values over a row and the sum of their exponentials relative to it.
fn shifted_exp(cx: &mut Lowering<'_>, xs: Id) -> ShiftedExp {
    let max = cx.dag.reduce_row(ReduceFn::Max, xs);
    let shifted = cx.dag.minus(xs, max);
    let e = cx.dag.un(Un::Exp, shifted);
    let sum = cx.dag.reduce_row(ReduceFn::Sum, e);
    ShiftedExp { max, sum }
}

fn layer_norm(
    cx: &mut Lowering<'_>,
    node: &Node,
    axis: usize,
    eps: f64,
    index: usize,
    view: &View,
) -> Result<Id, Stop> {
    let shape = &cx.body.ty(node.inputs[0]).shape;
    let n = size_after(shape, axis);
    let over = match index {
        0 => trailing(cx, view, axis, shape)?,
        _ => with_columns(cx, view, axis, shape)?,
    };
    let xs = cx.lower(node.inputs[0], &over)?;
    let mean = cx.dag.row_mean(xs, n);
    if index == 1 {
        return Ok(mean);
    }
    let deviations = cx.dag.minus(xs, mean);
    let squares = cx.dag.times(deviations, deviations);
    let variance = cx.dag.row_mean(squares, n);
    let eps = cx.dag.float(eps as f32);
    let sum = cx.dag.plus(variance, eps);
    let rstd = rsqrt(&mut cx.dag, sum);
    if index == 2 {
        return Ok(rstd);
    }
    let x = cx.lower(node.inputs[0], view)?;
    let tail = View(view.0[axis..].to_vec());
    let scale = cx.lower(node.inputs[1], &tail)?;
    let deviation = cx.dag.minus(x, mean);
    let hat = cx.dag.times(deviation, rstd);
    Ok(match node.inputs.get(2) {
        Some(&bias) => {
            let bias = cx.lower(bias, &tail)?;
            cx.dag.fma(hat, scale, bias)
        }
        None => cx.dag.times(hat, scale),
    })
}

/// The gradients of scale and bias: sums over the rows.
fn affine_grad(cx: &mut Lowering<'_>, node: &Node, index: usize, view: &View) -> Result<Id, Stop> {
    let shape = &cx.body.ty(node.inputs[1]).shape;
    let axis = shape.rank() - view.0.len();
    let lead = cx.space.group(&cx.space.rows(), &shape.0[..axis], "reduce")?;
    let at = View(lead.0.iter().cloned().chain(view.0.iter().cloned()).collect());
    let dy = cx.lower(node.inputs[0], &at)?;
    if index == 1 {
        return Ok(cx.dag.reduce(ReduceFn::Sum, Over::Rows, dy));
    }
    let x = cx.lower(node.inputs[1], &at)?;
    let rstd = cx.lower(*node.inputs.last().expect("invariant: rstd is an operand"), &lead)?;
    let hat = if let Op::LayerNormGradAffine(_) = node.op {
        let mean = cx.lower(node.inputs[2], &lead)?;
        let deviation = cx.dag.minus(x, mean);
        cx.dag.times(deviation, rstd)
    } else {
        cx.dag.times(x, rstd)
    };
    let product = cx.dag.times(dy, hat);
    Ok(cx.dag.reduce(ReduceFn::Sum, Over::Rows, product))
}

/// Loss and log-sum-exp of a row. A label that is neither a class nor ignored gives loss NaN.
fn cross_entropy(
    cx: &mut Lowering<'_>,
    node: &Node,
    op: &CrossEntropy,
    index: usize,
    view: &View,
) -> Result<Id, Stop> {
    let shape = &cx.body.ty(node.inputs[0]).shape;
    let axis = shape.rank() - 1;
    let over = with_columns(cx, view, axis, shape)?;
    let mut xs = cx.lower(node.inputs[0], &over)?;
    if let Some(inside) = inside(cx, op.classes, &over.0[axis], shape.0[axis]) {
        let none = cx.dag.float(f32::NEG_INFINITY);
        xs = cx.dag.select(inside, xs, none);
    }
    let exps = shifted_exp(cx, xs);
    let log = cx.dag.un(Un::Log, exps.sum);
    let lse = cx.dag.plus(exps.max, log);
    // With an infinite logit the sum relative to the maximum is undefined; the maximum is the result.
    let (size, inf) = (cx.dag.un(Un::Abs, exps.max), cx.dag.float(f32::INFINITY));
    let infinite = cx.dag.compare(CompareFn::Eq, size, inf);
    let lse = cx.dag.select(infinite, exps.max, lse);
    if index == 1 {
        return Ok(lse);
    }
    let label = cx.lower(node.inputs[1], view)?;
    let label = cx.dag.convert(Ty::I64, label);
    let classes = op.classes.unwrap_or(shape.0[axis]);
    let (is_class, zero) = (is_class(cx, label, classes), cx.dag.int(0, Ty::I64));
    let class = cx.dag.select(is_class, label, zero);
    let mut first = View(view.0.clone());
    first.0.push(DimView::first());
    let Some((operand, at)) = cx.address(node.inputs[0], &first) else {
        return Err(unsupported(&node.op, "its logits are not an operand of the region").into());
    };
    let logit = cx.dag.add(Expr::Pick { operand, at, stride: 1, index: class }, Ty::F32);
    let loss = cx.dag.minus(lse, logit);
    let (nan, none) = (cx.dag.float(f32::NAN), cx.dag.float(0.0));
    let loss = cx.dag.select(is_class, loss, nan);
    let ignore = cx.dag.int(op.ignore_index, Ty::I64);
    let ignored = cx.dag.compare(CompareFn::Eq, label, ignore);
    Ok(cx.dag.select(ignored, none, loss))
}

/// The column of a row of logits that is seen at `dim`.
fn column(cx: &mut Lowering<'_>, dim: &DimView, columns: usize) -> Id {
    let offset = cx.space.offset(&View(vec![dim.clone()]), &Shape::from([columns]));
    cx.dag.add(Expr::Index(offset), Ty::I64)
}

/// Whether the column seen at `dim` is a class rather than padding; `None` if every column is.
fn inside(
    cx: &mut Lowering<'_>,
    classes: Option<usize>,
    dim: &DimView,
    columns: usize,
) -> Option<Id> {
    let classes = classes.filter(|classes| *classes < columns)?;
    let (column, classes) = (column(cx, dim, columns), cx.dag.int(classes as i64, Ty::I64));
    Some(cx.dag.compare(CompareFn::Lt, column, classes))
}

/// Whether a label is one of so many classes.
fn is_class(cx: &mut Lowering<'_>, label: Id, classes: usize) -> Id {
    let (zero, classes) = (cx.dag.int(0, Ty::I64), cx.dag.int(classes as i64, Ty::I64));
    let from_zero = cx.dag.compare(CompareFn::Ge, label, zero);
    let below = cx.dag.compare(CompareFn::Lt, label, classes);
    both(&mut cx.dag, from_zero, below)
}

/// dloss · (softmax − one-hot), 0 in an ignored row and in padding, NaN where the label is not a class.
fn cross_entropy_grad(
    cx: &mut Lowering<'_>,
    node: &Node,
    op: &CrossEntropyGrad,
    view: &View,
) -> Result<Id, Stop> {
    let axis = view.0.len() - 1;
    let lead = leading(view, axis);
    let dloss = cx.lower(node.inputs[0], &lead)?;
    let x = cx.lower(node.inputs[1], view)?;
    let label = cx.lower(node.inputs[2], &lead)?;
    let lse = cx.lower(node.inputs[3], &lead)?;
    let label = cx.dag.convert(Ty::I64, label);
    let columns = cx.body.ty(node.inputs[1]).shape.0[axis];
    let classes = op.classes.unwrap_or(columns);
    let (is_class, nan) = (is_class(cx, label, classes), cx.dag.float(f32::NAN));
    let dloss = cx.dag.select(is_class, dloss, nan);
    let shifted = cx.dag.minus(x, lse);
    let softmax = cx.dag.un(Un::Exp, shifted);
    // As i32, of which a GPU compares one per instruction. A label that is no class gives NaN or 0 whatever it is equal to.
    let column = column(cx, &view.0[axis], columns);
    let [column, class] = [column, label].map(|x| cx.dag.convert(Ty::I32, x));
    let hit = cx.dag.compare(CompareFn::Eq, column, class);
    let (one, zero) = (cx.dag.float(1.0), cx.dag.float(0.0));
    let target = cx.dag.select(hit, one, zero);
    let slope = cx.dag.minus(softmax, target);
    let grad = cx.dag.times(dloss, slope);
    let ignore = cx.dag.int(op.ignore_index, Ty::I64);
    let ignored = cx.dag.compare(CompareFn::Eq, label, ignore);
    let grad = cx.dag.select(ignored, zero, grad);
    Ok(match inside(cx, op.classes, &view.0[axis], columns) {
        Some(inside) => cx.dag.select(inside, grad, zero),
        None => grad,
    })
}
