//! Removes broadcasts that the consumer performs itself.
//!
//! A pointwise node broadcasts its operands, so an `expand` before it is removed if the result keeps its shape, or moved behind it
//! otherwise; a constant of equal elements becomes a scalar.

use super::{Rewrite, Rewritten, Rule, add, constant};
use crate::rule::Statement;
use frit_ir::ops::Expand;
use frit_ir::{Graph, NodeId, Op, Shape, Tensor, ValueId};

/// Rules about operands of pointwise operations.
pub(super) const RULES: &[Rule] = &[
    Rule {
        statement: Statement::bits(
            "pointwise-of-expand",
            "f(expand(x), …) = f(x, …) if the result keeps its shape",
            &[
                "add(expand{shape=[a,b]}(x:f32[<b|a,1|1,1|>]),y:f32[a,b])",
                "add(y:f32[a,b],expand{shape=[<1,b|a,b>]}(x:f32[b]))",
                "select(expand{shape=[a,b]}(c:bool[a,1]),x:f32[a,b],expand{shape=[a,b]}(y:f32[]))",
                "mul(expand{shape=[a,b]}(x:f32[a,1]),expand{shape=[a,b]}(y:f32[b]))",
            ],
        ),
        apply: drop_expands,
    },
    Rule {
        statement: Statement::bits(
            "constant-of-equal-elements",
            "f(x, [c, c, …]) = f(x, c) if the result keeps its shape",
            &["add(x:f32[a,b],@c:f32[<b|a,b|a,1>])", "sub(@c:f32[a,b],x:f32[a,b])"],
        ),
        apply: shrink_constants,
    },
    Rule {
        statement: Statement::bits(
            "expand-out-of-pointwise",
            "f(expand(x), …) = expand(f(x, …)) if f computes fewer elements",
            &[
                "<exp|neg|is_nan>(expand{shape=[a,b]}(x:f32[<b|a,1|>]))",
                "cast{to=\"bf16\"}(expand{shape=[a,b]}(x:f32[b]))",
                "sub(expand{shape=[a,b,c]}(x:f32[b,1]),expand{shape=[a,b,c]}(y:f32[c]))",
                "select(expand{shape=[a,b]}(c:bool[b]),x:f32[b],expand{shape=[a,b]}(y:f32[]))",
            ],
        ),
        apply: hoist,
    },
];

/// The shape that these operands broadcast to.
fn joint_shape(graph: &Graph, inputs: &[ValueId]) -> Option<Shape> {
    inputs.iter().try_fold(Shape::scalar(), |shape, v| shape.broadcast(&graph.ty(*v).shape))
}

fn drop_expands(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    if !node.op.is_pointwise() {
        return Ok(Rewrite::None);
    }
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
    if !changed {
        return Ok(Rewrite::None);
    }
    graph.set_inputs(id, inputs)?;
    Ok(Rewrite::Edited)
}

fn shrink_constants(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    if !node.op.is_pointwise() {
        return Ok(Rewrite::None);
    }
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
        return Ok(Rewrite::Edited);
    }
    Ok(Rewrite::None)
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
    if !node.op.is_pointwise() {
        return Ok(Rewrite::None);
    }
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
