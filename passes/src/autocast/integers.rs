//! Integers that become floats, such as positions: a low dtype does not hold them from some size on (256 in bf16, 2048 in f16).
//!
//! A contraction that reads them, as the one of positions and frequencies in rotary embeddings does, computes in f32, and so does, where a
//! model is all in low precision, everything that is computed of nothing else.

use super::constants::is_fill;
use frit_ir::ops::precision::Class;
use frit_ir::ops::{ScatterElements, ScatterFn};
use frit_ir::{DType, Graph, Node, NodeId, Op, ValueId};
use std::collections::HashSet;

/// Whether a value consists of integers of which any may be large, perhaps cast and rearranged.
pub(super) fn are_large(graph: &Graph, mut v: ValueId) -> bool {
    loop {
        let node = graph.def(v);
        match &node.op {
            Op::Cast(_) if !graph.ty(node.inputs[0]).dtype.is_float() => {
                return !are_small(graph, node.inputs[0]);
            }
            Op::Cast(_) => v = node.inputs[0],
            op if op.precision().class == Class::Layout && node.inputs.len() == 1 => {
                v = node.inputs[0];
            }
            _ => return false,
        }
    }
}

/// Whether every low dtype holds these integers, by how they are made.
fn are_small(graph: &Graph, v: ValueId) -> bool {
    let is_held = |x: f64| DType::BF16.round(x) == x && DType::F16.round(x) == x;
    let node = graph.def(v);
    let all = |of: &[ValueId]| of.iter().all(|v| are_small(graph, *v));
    match &node.op {
        _ if matches!(graph.ty(v).dtype, DType::Bool | DType::U8) => true,
        Op::Constant(constant) => constant.value.to_f64s().into_iter().all(is_held),
        Op::Cast(_) => all(&node.inputs),
        Op::Select => all(&node.inputs[1..]),
        Op::ScatterElements(ScatterElements { f: ScatterFn::Replace, .. }) => {
            all(&[node.inputs[0], node.inputs[2]])
        }
        op if op.precision().class == Class::Layout => all(&node.inputs),
        _ => false,
    }
}

/// The nodes whose floats are computed of large integers and constants alone, none of them the fill of a mask.
pub(super) fn made_of_large(graph: &Graph, low: DType) -> HashSet<NodeId> {
    let mut made = HashSet::new();
    let is_large = |node: &Node| {
        let [x] = node.inputs[..] else { return false };
        matches!(node.op, Op::Cast(_)) && !graph.ty(x).dtype.is_float() && !are_small(graph, x)
    };
    for (id, node) in graph.nodes() {
        let mut floats = node.inputs.iter().filter(|v| graph.ty(**v).dtype.is_float());
        let is_made = |v: &ValueId| made.contains(&graph.value(*v).def);
        let follows = node.inputs.iter().any(is_made)
            && floats.all(|v| is_made(v) || graph.constant(*v).is_some_and(|c| !is_fill(c, low)));
        if follows || is_large(node) {
            made.insert(id);
        }
    }
    made
}
