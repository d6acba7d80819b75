//! Which matrices Muon steps: those of hidden layers.
//!
//! A parameter of two axes is such a matrix if matmuls alone read it, as it is or cast, transposed, reshaped or split, and the results of
//! all of these reach the loss only through other matmuls or convolutions by a parameter.

use frit_ir::ops::ParamKind;
use frit_ir::{Graph, Node, Op, OutputKind, Region, ValueId};
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};

/// The names of the parameters of a graph with a loss that are matrices of hidden layers.
pub fn matrices(graph: &Graph) -> BTreeSet<String> {
    let graph = &without_boundaries(graph);
    let views = views(graph);
    let params = |node: &Node| -> Vec<ValueId> {
        node.inputs.iter().filter_map(|v| views.get(v).copied()).collect()
    };
    let forward: Vec<&Node> =
        graph.nodes().map(|(_, n)| n).filter(|n| n.region == Region::Forward).collect();
    // Values from which the loss is reached without another layer.
    let ends = graph.outputs.iter().filter(|o| o.kind == OutputKind::LossSum);
    let mut near: HashSet<ValueId> = ends.map(|o| o.value).collect();
    for node in forward.iter().rev() {
        let is_near = node.outputs.iter().any(|v| near.contains(v));
        let multiplies = matches!(node.op, Op::MatMul(_) | Op::Conv(_) | Op::ConvGradInput(_));
        let is_layer = multiplies && !params(node).is_empty();
        if is_near && !is_layer {
            near.extend(&node.inputs);
        }
    }
    let (mut by_hidden_matmuls, mut otherwise) = (HashSet::new(), HashSet::new());
    for node in forward.into_iter().filter(|n| !is_view(&n.op)) {
        let is_near = node.outputs.iter().any(|v| near.contains(v));
        let hidden = matches!(node.op, Op::MatMul(_)) && !is_near;
        if hidden { &mut by_hidden_matmuls } else { &mut otherwise }.extend(params(node));
    }
    let is_matrix = |v: ValueId| {
        let shape = &graph.ty(v).shape;
        shape.rank() == 2 && shape.numel() > 0
    };
    let hidden = |v: ValueId| by_hidden_matmuls.contains(&v) && !otherwise.contains(&v);
    let matrices = graph.params().filter(|(v, _)| is_matrix(*v) && hidden(*v));
    matrices.map(|(_, param)| param.name.clone()).collect()
}

/// The graph without the boundaries of functions and what only their gradients read: none of it is computed forward.
fn without_boundaries(graph: &Graph) -> Cow<'_, Graph> {
    let mut map = HashMap::new();
    for (_, node) in graph.nodes() {
        if let Op::CustomGradient(_) | Op::EnterPrecision(_) | Op::LeavePrecision(_) = node.op {
            map.extend(node.outputs.iter().copied().zip(node.inputs.iter().copied()));
        }
    }
    if map.is_empty() {
        return Cow::Borrowed(graph);
    }
    let mut graph = graph.clone();
    graph.substitute(&map);
    graph.remove_dead();
    Cow::Owned(graph)
}

/// The parameter that a value has the elements of.
fn views(graph: &Graph) -> HashMap<ValueId, ValueId> {
    let params = graph.params().filter(|(_, p)| p.kind != ParamKind::Buffer);
    let mut views: HashMap<ValueId, ValueId> = params.map(|(v, _)| (v, v)).collect();
    for (_, node) in graph.nodes().filter(|(_, n)| n.region == Region::Forward && is_view(&n.op)) {
        if let Some(&param) = views.get(&node.inputs[0]) {
            views.extend(node.outputs.iter().map(|v| (*v, param)));
        }
    }
    views
}

fn is_view(op: &Op) -> bool {
    matches!(op, Op::Cast(_)) || op.is_layout() && !matches!(op, Op::Concat(_))
}
