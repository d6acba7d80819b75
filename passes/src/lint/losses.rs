//! L20: losses computed from probabilities where logits are available.

use super::{Findings, source};
use frit_ir::ops::{BinaryFn, UnaryFn};
use frit_ir::{Graph, Node, Op, OutputKind, ValueId};

pub(super) fn lint(graph: &Graph, found: &mut Findings) {
    let sums = graph.outputs.iter().filter(|o| o.kind == OutputKind::LossSum);
    let loss = graph.ancestors(sums.map(|o| o.value));
    for (_, node) in graph.nodes().filter(|(id, _)| loss.contains(id)) {
        let (from, message) = match &node.op {
            Op::Unary(UnaryFn::Log) if is_sigmoid(graph, probability(graph, node.inputs[0])) => {
                ("sigmoid", "the loss takes the logarithm of a sigmoid")
            }
            Op::Unary(UnaryFn::Softplus) if is_sigmoid(graph, node.inputs[0]) => {
                ("sigmoid", "binary cross-entropy takes logits, but reads a sigmoid")
            }
            Op::CrossEntropy(_) | Op::LogSoftmax(_) if is_softmax(graph, node.inputs[0]) => {
                ("softmax", "cross-entropy takes logits, but reads a softmax")
            }
            _ => continue,
        };
        found.add("L20", &node.origin, from, message.into());
    }
}

/// The probability before clipping, or before subtraction from one.
fn probability(graph: &Graph, mut of: ValueId) -> ValueId {
    let is_constant = |v: ValueId| matches!(graph.def(source(graph, v).0).op, Op::Constant(_));
    loop {
        let (v, id) = source(graph, of);
        let node = graph.node(id);
        of = match (&node.op, &node.inputs[..]) {
            (Op::Clip(_), [x]) => *x,
            (Op::Binary(BinaryFn::Max | BinaryFn::Min | BinaryFn::Add | BinaryFn::Sub), [a, b]) => {
                match (is_constant(*a), is_constant(*b)) {
                    (true, false) => *b,
                    (false, true) => *a,
                    _ => return v,
                }
            }
            _ => return v,
        };
    }
}

fn defined_by(graph: &Graph, v: ValueId, is: impl Fn(&Node) -> bool) -> bool {
    is(graph.node(source(graph, v).1))
}

fn is_sigmoid(graph: &Graph, v: ValueId) -> bool {
    defined_by(graph, v, |n| n.op == Op::Unary(UnaryFn::Sigmoid))
}

fn is_softmax(graph: &Graph, v: ValueId) -> bool {
    defined_by(graph, v, |n| matches!(n.op, Op::Softmax(_)))
}
