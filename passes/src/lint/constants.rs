//! L18 and L21: values that their dtype cannot represent: masks, weights, and integers stored as floats.

use super::range::Ranges;
use super::{Findings, source};
use frit_ir::ops::BinaryFn;
use frit_ir::{DType, Graph, Node, Op, ValueId};
use std::collections::HashSet;

/// Numbers this large only exclude, as the fill of a mask; how exact they are does not matter.
const FILL: f64 = 1e9;

pub(super) fn lint(graph: &Graph, ranges: &Ranges, found: &mut Findings) {
    let (users, fills) = (graph.users(), fills(graph));
    for (_, node) in graph.nodes() {
        if node.op == Op::Binary(BinaryFn::Add) {
            masks(graph, &users, &fills, node, found);
        }
        weights(graph, ranges, node, found);
        integers(graph, ranges, node, found);
        unbounded(graph, ranges, node, found);
    }
}

/// Two masks that both reach the end of the range: their sum is −∞, and a row of them is not a number.
fn masks(
    graph: &Graph,
    users: &[Vec<frit_ir::NodeId>],
    fills: &[f64],
    node: &Node,
    found: &mut Findings,
) {
    let y = node.outputs[0];
    let dtype = graph.ty(y).dtype;
    let saturated = |v: &ValueId| fills[v.0 as usize] <= lowest(dtype) / 2.0;
    if node.inputs.iter().all(saturated) && reaches_softmax(graph, users, y) {
        let message =
            format!("two masks of {:.1e} are added in {dtype}: their sum is -inf", lowest(dtype));
        found.add("L18", &node.origin, "masks", message);
    }
}

/// The most negative finite number.
fn lowest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => -65504.0,
        DType::F64 => f64::MIN,
        _ => f64::from(f32::MIN),
    }
}

/// For every value the lowest finite constant in it, as a mask has it; infinity for what a model computes.
fn fills(graph: &Graph) -> Vec<f64> {
    let mut fills = vec![f64::INFINITY; graph.n_values()];
    for (_, node) in graph.nodes() {
        let lowest_of = |inputs: &[ValueId]| {
            inputs.iter().map(|v| fills[v.0 as usize]).fold(f64::INFINITY, f64::min)
        };
        let fill = match &node.op {
            Op::Constant(c) => {
                let finite = c.value.as_floats().unwrap_or_default().iter().copied();
                finite.filter(|x| x.is_finite()).fold(f64::INFINITY, f64::min)
            }
            Op::Select => lowest_of(&node.inputs[1..]),
            Op::Binary(BinaryFn::Mul | BinaryFn::Add) => lowest_of(&node.inputs),
            Op::Cast(_) | Op::Reshape(_) | Op::Expand(_) | Op::Transpose(_) | Op::Slice(_) => {
                lowest_of(&node.inputs[..1])
            }
            _ => continue,
        };
        fills[node.outputs[0].0 as usize] = fill;
    }
    fills
}

/// Whether the value goes into a softmax, through additions and rearrangements.
fn reaches_softmax(graph: &Graph, users: &[Vec<frit_ir::NodeId>], v: ValueId) -> bool {
    let (mut stack, mut seen) = (vec![v], HashSet::new());
    while let Some(v) = stack.pop() {
        for id in &users[v.0 as usize] {
            let node = graph.node(*id);
            match &node.op {
                Op::Softmax(_) | Op::LogSoftmax(_) => return true,
                Op::Attention(op) if op.masks(&node.inputs)[0] == Some(&v) => return true,
                Op::Binary(BinaryFn::Add) | Op::Cast(_) | Op::Select => {}
                op if op.is_layout() => {}
                _ => continue,
            }
            stack.extend(node.outputs.iter().copied().filter(|v| seen.insert(*v)));
        }
    }
    false
}

/// Weights that are infinite, or all zero, in the dtype they are cast to.
fn weights(graph: &Graph, ranges: &Ranges, node: &Node, found: &mut Findings) {
    let (Op::Cast(cast), [x]) = (&node.op, &node.inputs[..]) else { return };
    let (Op::Param(param), Some(spread)) = (&graph.def(*x).op, ranges.spread(*x)) else { return };
    let most = spread.lo.abs().max(spread.hi.abs());
    let rounded = cast.to.round(most);
    if cast.to.is_float()
        && most.is_finite()
        && (rounded.is_infinite() || (rounded == 0.0 && most > 0.0))
    {
        let message =
            format!("`{}` reaches {most:.3e}, which is {rounded} in {}", param.name, cast.to);
        found.add("L18", &node.origin, "weight", message);
    }
}

/// Integers beyond those that a low-precision float tells apart.
fn integers(graph: &Graph, ranges: &Ranges, node: &Node, found: &mut Findings) {
    if node.op.is_leaf() {
        return;
    }
    for &v in &node.outputs {
        let dtype = graph.ty(v).dtype;
        let exact = |dtype: DType| (1_u64 << (dtype.mantissa_bits() + 1)) as f64;
        let range = ranges.get(v);
        let most = range.max_abs();
        if !dtype.is_low_precision() || !range.whole || !most.is_finite() || most <= exact(dtype) {
            continue;
        }
        // Only where they become inexact.
        let inexact = |v: &ValueId| {
            let from = graph.ty(*v).dtype;
            from.is_low_precision()
                && ranges.get(*v).whole
                && ranges.get(*v).max_abs() > exact(from)
        };
        if node.inputs.iter().any(inexact) || most >= FILL {
            continue;
        }
        let message = format!(
            "{} gives integers up to {most} in {dtype}, which is exact up to {} only",
            node.op.name(),
            exact(dtype)
        );
        found.add("L21", &node.origin, node.op.name(), message);
    }
}

/// Matmuls of integers that the model is fed, such as positions by the frequencies of rotations, if nothing bounds these.
fn unbounded(graph: &Graph, ranges: &Ranges, node: &Node, found: &mut Findings) {
    if !matches!(node.op, Op::MatMul(_)) {
        return;
    }
    for &v in &node.inputs {
        let dtype = graph.ty(v).dtype;
        let (fed, id) = source(graph, v);
        let Op::Input(input) = &graph.node(id).op else { continue };
        let counts = !input.ty.dtype.is_float() && input.ty.dtype != DType::Bool;
        if !dtype.is_low_precision() || !counts || ranges.get(fed).max_abs().is_finite() {
            continue;
        }
        let message = format!(
            "a matmul reads the integers of `{}` in {dtype}, which is exact up to {} only; declare their range in data.ranges",
            input.name,
            1_u64 << (dtype.mantissa_bits() + 1)
        );
        found.add("L21", &node.origin, &input.name, message);
    }
}
