//! The residual stream: sums of a value and what contractions make of it.
//!
//! Where it is to be narrow, these sums run in the low dtype, and what the first of them adds to is rounded where it is computed. Sums
//! of values of which neither is computed from the other, as in rotary positions, or without a contraction, as in activation functions,
//! are no residual sums.

use super::assign::{Precision, subject};
use frit_ir::ops::BinaryFn;
use frit_ir::ops::precision::Class;
use frit_ir::{Graph, Node, NodeId, Op, ValueId};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The precision of the nodes that write the residual stream.
pub(super) fn stream(graph: &Graph) -> HashMap<NodeId, Precision> {
    let position: HashMap<NodeId, usize> =
        graph.order().iter().enumerate().map(|(i, id)| (*id, i)).collect();
    let mut stream = HashMap::new();
    // Nodes that are contractions or depend on one.
    let mut contracted: HashSet<NodeId> = HashSet::new();
    for &id in graph.order() {
        let node = graph.node(id);
        let class = |node: &Node| node.op.precision().class;
        let follows = |v: &ValueId| contracted.contains(&graph.value(*v).def);
        if class(node) == Class::Lower || node.inputs.iter().any(follows) {
            contracted.insert(id);
        }
        let Some(from) = sum_to(graph, &position, id) else { continue };
        stream.insert(id, Precision::Low);
        let start = graph.value(from).def;
        let is_made = !graph.node(start).op.is_leaf() && class(graph.node(start)) != Class::Fixed;
        if is_made && !contracted.contains(&start) {
            stream.insert(start, Precision::F32ToLow);
        }
    }
    stream
}

/// The value to which a node adds what contractions make of it, if it is such a sum.
fn sum_to(graph: &Graph, position: &HashMap<NodeId, usize>, id: NodeId) -> Option<ValueId> {
    let node = graph.node(id);
    let (Op::Binary(BinaryFn::Add), [a, b]) = (&node.op, &node.inputs[..]) else { return None };
    let ty = graph.ty(node.outputs[0]);
    if !subject(graph, node.outputs[0]) || [a, b].into_iter().any(|v| graph.ty(*v) != ty) {
        return None;
    }
    let at = |v: &ValueId| position[&graph.value(*v).def];
    let (from, branch) = if at(a) < at(b) { (a, b) } else { (b, a) };
    is_contracted(graph, position, *from, *branch).then_some(*from)
}

/// Whether some path from one value to another leads through a contraction.
fn is_contracted(
    graph: &Graph,
    position: &HashMap<NodeId, usize>,
    from: ValueId,
    to: ValueId,
) -> bool {
    let begin = position[&graph.value(from).def];
    // What may lie between, by position.
    let mut between: BTreeSet<usize> = BTreeSet::new();
    let mut open = vec![to];
    while let Some(value) = open.pop() {
        let id = graph.value(value).def;
        if position[&id] > begin && between.insert(position[&id]) {
            open.extend(&graph.node(id).inputs);
        }
    }
    // For each value that depends on the first, whether through a contraction.
    let mut reached: HashMap<ValueId, bool> = HashMap::from([(from, false)]);
    for at in between {
        let node = graph.node(graph.order()[at]);
        let through =
            node.inputs.iter().filter_map(|v| reached.get(v)).copied().reduce(|a, b| a | b);
        if let Some(through) = through {
            let contracts = through || node.op.precision().class == Class::Lower;
            reached.extend(node.outputs.iter().map(|v| (*v, contracts)));
        }
    }
    reached.get(&to) == Some(&true)
}
