//! Removes casts and layout operations that do nothing, and merges layout operations with the layout before them.

use super::{Rewrite, Rewritten, add};
use frit_ir::ops::{Cast, Concat, Expand, MatMul, Reshape, Slice, Transpose, UnaryFn};
use frit_ir::{Graph, GraphError, NodeId, Op, Shape, ValueId};

/// Simplifies one cast, layout operation or matmul.
pub(super) fn simplify(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let Some(&x) = node.inputs.first() else { return Ok(Rewrite::None) };
    let same_type = graph.ty(x) == graph.ty(node.outputs[0]);
    match node.op.clone() {
        Op::Cast(op) if same_type => {
            debug_assert_eq!(op.to, graph.ty(x).dtype);
            Ok(Rewrite::To(x))
        }
        Op::Cast(op) => cast_of_cast(graph, id, x, &op).map(Rewrite::from),
        Op::Reshape(_) | Op::Expand(_) | Op::Slice(_) | Op::Pad(_) if same_type => {
            // A slice of the full size may still reverse an axis.
            match &graph.node(id).op {
                Op::Slice(op) if op.step.iter().zip(&op.size).any(|(s, n)| *s < 0 && *n > 1) => {
                    Ok(Rewrite::None)
                }
                _ => Ok(Rewrite::To(x)),
            }
        }
        Op::Split(op) if op.sizes.len() == 1 => Ok(Rewrite::To(x)),
        Op::Concat(op) => concat(graph, id, &op),
        Op::Reshape(op) => reshape(graph, id, x, &op).map(Rewrite::from),
        Op::Transpose(op) => transpose(graph, id, x, &op).map(Rewrite::from),
        Op::Expand(op) => expand(graph, id, x, &op).map(Rewrite::from),
        Op::Slice(op) => slice(graph, id, x, &op).map(Rewrite::from),
        Op::MatMul(op) => matmul(graph, id, &op),
        Op::Unary(f @ (UnaryFn::Neg | UnaryFn::Not)) => match &graph.def(x).op {
            Op::Unary(inner) if *inner == f => Ok(Rewrite::To(graph.def(x).inputs[0])),
            _ => Ok(Rewrite::None),
        },
        _ => Ok(Rewrite::None),
    }
}

/// `cast(cast(x))` is one cast if the inner one loses nothing.
fn cast_of_cast(
    graph: &mut Graph,
    id: NodeId,
    x: ValueId,
    op: &Cast,
) -> Result<Option<ValueId>, GraphError> {
    let Op::Cast(inner) = &graph.def(x).op else { return Ok(None) };
    let source = graph.def(x).inputs[0];
    let from = graph.ty(source).dtype;
    if !from.widens_to(inner.to) {
        return Ok(None);
    }
    if from == op.to {
        return Ok(Some(source));
    }
    add(graph, id, Op::Cast(Cast { to: op.to }), &[source]).map(Some)
}

fn concat(graph: &mut Graph, id: NodeId, op: &Concat) -> Rewritten {
    let inputs = graph.node(id).inputs.clone();
    let kept: Vec<ValueId> =
        inputs.iter().copied().filter(|v| graph.ty(*v).shape.0[op.axis] > 0).collect();
    match kept[..] {
        [only] => Ok(Rewrite::To(only)),
        [] => Ok(Rewrite::None),
        _ if kept.len() < inputs.len() => {
            graph.set_inputs(id, kept)?;
            Ok(Rewrite::Edited)
        }
        _ => Ok(Rewrite::None),
    }
}

fn reshape(
    graph: &mut Graph,
    id: NodeId,
    x: ValueId,
    op: &Reshape,
) -> Result<Option<ValueId>, GraphError> {
    match graph.def(x).op.clone() {
        Op::Reshape(_) => {
            let source = graph.def(x).inputs[0];
            add(graph, id, Op::Reshape(op.clone()), &[source]).map(Some)
        }
        Op::Transpose(inner) => unmerge(graph, id, graph.def(x).inputs[0], &inner, op),
        _ => Ok(None),
    }
}

/// `reshape(transpose(reshape(x)))` where the transpose leaves the first axis, which the inner reshape
/// merged, in front, and the outer reshape splits it again: `x` split, then transposed. Exporters emit
/// it for batched transposes.
fn unmerge(
    graph: &mut Graph,
    id: NodeId,
    merged: ValueId,
    inner: &Transpose,
    outer: &Reshape,
) -> Result<Option<ValueId>, GraphError> {
    let Op::Reshape(_) = &graph.def(merged).op else { return Ok(None) };
    let middle = graph.ty(merged).shape.dims();
    let Some(lead) = (outer.shape.rank() + 1).checked_sub(middle.len()) else { return Ok(None) };
    if lead == 0 || inner.perm.first() != Some(&0) {
        return Ok(None);
    }
    let (front, tail) = outer.shape.dims().split_at(lead);
    let permuted = inner.perm[1..].iter().map(|&p| middle[p]);
    if front.iter().product::<usize>() != middle[0] || !permuted.eq(tail.iter().copied()) {
        return Ok(None);
    }
    let perm = (0..lead).chain(inner.perm[1..].iter().map(|p| p - 1 + lead)).collect();
    let split = Shape([front, &middle[1..]].concat());
    let split = add(graph, id, Op::Reshape(Reshape { shape: split }), &[merged])?;
    add(graph, id, Op::Transpose(Transpose { perm }), &[split]).map(Some)
}

fn transpose(
    graph: &mut Graph,
    id: NodeId,
    x: ValueId,
    op: &Transpose,
) -> Result<Option<ValueId>, GraphError> {
    if op.perm.iter().copied().eq(0..op.perm.len()) {
        return Ok(Some(x));
    }
    let Op::Transpose(inner) = &graph.def(x).op else { return Ok(None) };
    let perm = op.perm.iter().map(|&p| inner.perm[p]).collect();
    let source = graph.def(x).inputs[0];
    add(graph, id, Op::Transpose(Transpose { perm }), &[source]).map(Some)
}

fn expand(
    graph: &mut Graph,
    id: NodeId,
    x: ValueId,
    op: &Expand,
) -> Result<Option<ValueId>, GraphError> {
    let Op::Expand(_) = &graph.def(x).op else { return Ok(None) };
    let source = graph.def(x).inputs[0];
    add(graph, id, Op::Expand(op.clone()), &[source]).map(Some)
}

fn slice(
    graph: &mut Graph,
    id: NodeId,
    x: ValueId,
    op: &Slice,
) -> Result<Option<ValueId>, GraphError> {
    let Op::Slice(inner) = &graph.def(x).op else { return Ok(None) };
    if op.size.contains(&0) {
        return Ok(None);
    }
    let source = graph.def(x).inputs[0];
    let axes = 0..op.start.len();
    let start = |i: usize| inner.start[i] as isize + op.start[i] as isize * inner.step[i];
    let both = Slice {
        start: axes.clone().map(|i| start(i) as usize).collect(),
        size: op.size.clone(),
        step: axes.map(|i| op.step[i] * inner.step[i]).collect(),
    };
    add(graph, id, Op::Slice(both), &[source]).map(Some)
}

/// A transpose of an operand's last two axes becomes a flag of the matmul.
fn matmul(graph: &mut Graph, id: NodeId, op: &MatMul) -> Rewritten {
    let swapped = |v: ValueId| match &graph.def(v).op {
        Op::Transpose(t) if swaps_last_two(&t.perm) => Some(graph.def(v).inputs[0]),
        _ => None,
    };
    let inputs = &graph.node(id).inputs;
    let (a, b) = (inputs[0], inputs[1]);
    let (new_a, new_b) = (swapped(a), swapped(b));
    if new_a.is_none() && new_b.is_none() {
        return Ok(Rewrite::None);
    }
    let op = MatMul {
        trans_a: op.trans_a != new_a.is_some(),
        trans_b: op.trans_b != new_b.is_some(),
        out: op.out,
    };
    let operands = [new_a.unwrap_or(a), new_b.unwrap_or(b)];
    add(graph, id, Op::MatMul(op), &operands).map(Rewrite::To)
}

/// Whether the permutation only swaps the last two axes.
fn swaps_last_two(perm: &[usize]) -> bool {
    let n = perm.len();
    n >= 2 && perm[n - 2..] == [n - 1, n - 2] && perm[..n - 2].iter().copied().eq(0..n - 2)
}
