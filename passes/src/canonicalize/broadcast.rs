//! Removes broadcasts that the consumer performs itself.
//!
//! A pointwise node broadcasts its operands, so an `expand` before it is removed if the result keeps its shape, or moved behind it
//! otherwise; a constant of equal elements becomes a scalar.

use super::{Rewrite, Rewritten, add, constant};
use frit_ir::ops::Expand;
use frit_ir::{Graph, NodeId, Op, Shape, Tensor, ValueId};

/// Simplifies the operands of one pointwise node.
pub(super) fn simplify(graph: &mut Graph, id: NodeId) -> Rewritten {
    if !graph.node(id).op.is_pointwise() {
        return Ok(Rewrite::None);
    }
    if drop_expands(graph, id)? || shrink_constants(graph, id)? {
        return Ok(Rewrite::Edited);
    }
    hoist(graph, id)
}

/// The shape that these operands broadcast to.
fn joint_shape(graph: &Graph, inputs: &[ValueId]) -> Option<Shape> {
    inputs.iter().try_fold(Shape::scalar(), |shape, v| shape.broadcast(&graph.ty(*v).shape))
}

fn drop_expands(graph: &mut Graph, id: NodeId) -> Result<bool, frit_ir::GraphError> {
    let node = graph.node(id);
    let shape = graph.ty(node.outputs[0]).shape.clone();
    let mut inputs = node.inputs.clone();
    let mut changed = false;
    for i in 0..inputs.len() {
        if !matches!(graph.def(inputs[i]).op, Op::Expand(_)) {
            continue;
        }
        let wide = inputs[i];
        inputs[i] = graph.def(wide).inputs[0];
        if joint_shape(graph, &inputs).as_ref() == Some(&shape) {
            changed = true;
        } else {
            inputs[i] = wide;
        }
    }
    if changed {
        graph.set_inputs(id, inputs)?;
    }
    Ok(changed)
}

fn shrink_constants(graph: &mut Graph, id: NodeId) -> Result<bool, frit_ir::GraphError> {
    let node = graph.node(id);
    let shape = graph.ty(node.outputs[0]).shape.clone();
    let inputs = node.inputs.clone();
    for (i, &input) in inputs.iter().enumerate() {
        let Some(value) = graph.constant(input) else { continue };
        if value.shape().rank() == 0 || value.as_splat().is_none() {
            continue;
        }
        let others: Vec<ValueId> = inputs.iter().copied().filter(|v| *v != input).collect();
        if joint_shape(graph, &others).as_ref() != Some(&shape) {
            continue;
        }
        let scalar = first_element(value);
        let scalar = constant(graph, id, scalar)?;
        let mut inputs = inputs.clone();
        inputs[i] = scalar;
        graph.set_inputs(id, inputs)?;
        return Ok(true);
    }
    Ok(false)
}

fn first_element(tensor: &Tensor) -> Tensor {
    let ty = tensor.ty.with_shape(Shape::scalar());
    match (tensor.as_floats(), tensor.as_ints()) {
        (Some(v), _) => Tensor::floats(ty.dtype, ty.shape, vec![v[0]]),
        (_, v) => Tensor::ints(ty.dtype, ty.shape, v.map_or(vec![0], |v| vec![v[0]])),
    }
}

/// Computes before broadcasting: `f(expand(x), c)` is `expand(f(x, c))`.
fn hoist(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let y = graph.ty(node.outputs[0]).shape.clone();
    let mut found = false;
    let mut inputs = node.inputs.clone();
    for input in &mut inputs {
        if matches!(graph.def(*input).op, Op::Expand(_)) {
            *input = graph.def(*input).inputs[0];
            found = true;
        }
    }
    let Some(shape) = joint_shape(graph, &inputs).filter(|s| found && s.numel() < y.numel()) else {
        return Ok(Rewrite::None);
    };
    debug_assert!(shape.broadcast(&y).as_ref() == Some(&y));
    let op = node.op.clone();
    let small = add(graph, id, op, &inputs)?;
    add(graph, id, Op::Expand(Expand { shape: y }), &[small]).map(Rewrite::To)
}
