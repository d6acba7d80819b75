//! Bodies whose images lie channels last: an operation on images `[N, C, …]` between transposes, which kernels read and write in
//! their place.

use frit_ir::{Graph, Node, Op, ValueId};

/// The only node of a body besides leaves and transposes.
pub(crate) fn between_transposes(body: &Graph) -> Option<&Node> {
    let nodes = body.nodes().map(|(_, n)| n);
    let (transposes, others): (Vec<&Node>, Vec<&Node>) =
        nodes.filter(|n| !n.op.is_leaf()).partition(|n| matches!(n.op, Op::Transpose(_)));
    match others[..] {
        [node] if !transposes.is_empty() && body.outputs.len() == 1 => Some(node),
        _ => None,
    }
}

/// The operand of the body that holds an image, or another operand, of its node.
pub(crate) fn operand(body: &Graph, value: ValueId) -> Option<ValueId> {
    let source = match &body.def(value).op {
        Op::Transpose(op) if op.puts_channels_first() => body.def(value).inputs[0],
        _ => value,
    };
    body.def(source).op.is_leaf().then_some(source)
}

/// Whether an operand or result of the node lies channels last in the operand or result of the body that holds it: behind a
/// transpose, or with one place, where both layouts are one.
pub(crate) fn lies_last(body: &Graph, image: ValueId, held: ValueId) -> bool {
    image != held || body.ty(image).shape.dims()[2..].iter().all(|n| *n == 1)
}

/// The result of the body that holds a result of its node.
pub(crate) fn result(body: &Graph, value: ValueId) -> Option<ValueId> {
    let is_result = |v: &ValueId| body.outputs.iter().any(|o| o.value == *v);
    let behind = body.nodes().map(|(_, n)| n).find(|n| n.inputs.contains(&value));
    match behind.map(|n| (&n.op, n.outputs[0])) {
        Some((Op::Transpose(op), y)) if op.puts_channels_last() => Some(y),
        None => Some(value),
        _ => None,
    }
    .filter(is_result)
}
