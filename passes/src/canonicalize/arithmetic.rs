//! Simplifies arithmetic, logic and selection with neutral constants, and orders commutative operands.

use super::{Rewrite, Rewritten, add, constant};
use frit_ir::ops::{BinaryFn, CompareFn, Expand, LogicalFn, Reduce, ReduceFn};
use frit_ir::{DType, Graph, GraphError, NodeId, Op, Tensor, ValueId};

/// Simplifies one node.
pub(super) fn simplify(graph: &mut Graph, id: NodeId) -> Rewritten {
    match graph.node(id).op.clone() {
        Op::Binary(f) => match neutral(graph, id, f) {
            Some(value) => Ok(Rewrite::To(value)),
            None if matches!(f, BinaryFn::Add | BinaryFn::Mul) => constant_last(graph, id),
            None => Ok(Rewrite::None),
        },
        Op::Compare(CompareFn::Eq | CompareFn::Ne) => constant_last(graph, id),
        Op::Logical(f) => logical(graph, id, f),
        Op::Select => select(graph, id).map(Rewrite::from),
        Op::Reduce(op) => Ok(reduce(graph, id, &op)),
        _ => Ok(Rewrite::None),
    }
}

/// The operand that the result equals bit for bit, if the other is neutral.
fn neutral(graph: &Graph, id: NodeId, f: BinaryFn) -> Option<ValueId> {
    let node = graph.node(id);
    let (a, b) = (node.inputs[0], node.inputs[1]);
    let ty = graph.ty(node.outputs[0]);
    let float = ty.dtype.is_float();
    // −0 is the neutral element of float addition, +0 that of subtraction.
    let is_neutral = |v: ValueId, right: bool| {
        let Some(c) = graph.constant(v).and_then(Tensor::as_splat) else { return false };
        match f {
            BinaryFn::Mul => c == 1.0,
            BinaryFn::Div | BinaryFn::Pow => right && c == 1.0,
            BinaryFn::Add => c == 0.0 && (!float || c.is_sign_negative()),
            BinaryFn::Sub => right && c == 0.0 && (!float || c.is_sign_positive()),
            _ => false,
        }
    };
    if is_neutral(b, true) && graph.ty(a) == ty {
        return Some(a);
    }
    (is_neutral(a, false) && graph.ty(b) == ty).then_some(b)
}

/// Puts a constant first operand of a commutative operation second, which rules rely on.
fn constant_last(graph: &mut Graph, id: NodeId) -> Rewritten {
    let inputs = &graph.node(id).inputs;
    let (a, b) = (inputs[0], inputs[1]);
    if graph.constant(a).is_none() || graph.constant(b).is_some() {
        return Ok(Rewrite::None);
    }
    graph.set_inputs(id, vec![b, a])?;
    Ok(Rewrite::Edited)
}

fn logical(graph: &mut Graph, id: NodeId, f: LogicalFn) -> Rewritten {
    let node = graph.node(id);
    let (a, b, y) = (node.inputs[0], node.inputs[1], node.outputs[0]);
    let is_bool = graph.ty(y).dtype == DType::Bool;
    for (x, other) in [(b, a), (a, b)] {
        let known = graph.constant(x).filter(|_| is_bool).and_then(Tensor::as_splat);
        let Some(c) = known else { continue };
        match (f, c != 0.0) {
            (LogicalFn::And, true) | (LogicalFn::Or | LogicalFn::Xor, false) => {
                return to_shape_of(graph, id, other, y).map(Rewrite::To);
            }
            (LogicalFn::And, false) | (LogicalFn::Or, true) => {
                let value = Tensor::splat(graph.ty(x).with_shape([]), c);
                let value = constant(graph, id, value)?;
                return to_shape_of(graph, id, value, y).map(Rewrite::To);
            }
            (LogicalFn::Xor, true) => {}
        }
    }
    if a == b && f != LogicalFn::Xor {
        return Ok(Rewrite::To(a));
    }
    constant_last(graph, id)
}

fn select(graph: &mut Graph, id: NodeId) -> Result<Option<ValueId>, GraphError> {
    let node = graph.node(id);
    let (condition, a, b, y) = (node.inputs[0], node.inputs[1], node.inputs[2], node.outputs[0]);
    let taken = match graph.constant(condition).and_then(Tensor::as_splat) {
        Some(c) => {
            if c != 0.0 {
                a
            } else {
                b
            }
        }
        None if a == b => a,
        None => return Ok(None),
    };
    to_shape_of(graph, id, taken, y).map(Some)
}

fn to_shape_of(
    graph: &mut Graph,
    id: NodeId,
    value: ValueId,
    like: ValueId,
) -> Result<ValueId, GraphError> {
    let shape = graph.ty(like).shape.clone();
    if graph.ty(value).shape == shape {
        return Ok(value);
    }
    add(graph, id, Op::Expand(Expand { shape }), &[value])
}

/// A largest or smallest of one element. Sums stay: the sum of −0 alone is 0.
fn reduce(graph: &Graph, id: NodeId, op: &Reduce) -> Rewrite {
    let x = graph.node(id).inputs[0];
    let trivial = |axis: &usize| graph.ty(x).shape.0[*axis] == 1;
    let selects = matches!(op.f, ReduceFn::Max | ReduceFn::Min);
    let same_shape = op.keep_dims || op.axes.is_empty();
    if same_shape && selects && op.axes.iter().all(trivial) {
        return Rewrite::To(x);
    }
    Rewrite::None
}
