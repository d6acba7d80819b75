//! The gradient of a cross-entropy in the place of its logits, the largest value of many steps.
//!
//! A region that computes both reads a whole row before it writes the row, so the two may be one buffer if nothing else reads the logits.

use frit_ir::{Graph, Node, NodeId, Op, ValueId};

/// The operand and the result of a kernel body that are logits, read for nothing else, and their gradient, of one type.
pub(super) fn logits_and_gradient(body: &Graph) -> Option<(usize, usize)> {
    let inputs: Vec<ValueId> = body
        .nodes()
        .filter(|(_, node)| matches!(node.op, Op::Input(_)))
        .map(|(_, node)| node.outputs[0])
        .collect();
    body.outputs.iter().enumerate().find_map(|(j, output)| {
        let grad = body.def(output.value);
        if !matches!(grad.op, Op::CrossEntropyGrad(_)) {
            return None;
        }
        let i = inputs.iter().position(|v| *v == grad.inputs[1])?;
        let reads_rows = |node: &Node| {
            let place = node.inputs.iter().position(|v| *v == inputs[i]);
            place.is_none_or(|place| match node.op {
                Op::CrossEntropy(_) => place == 0,
                Op::CrossEntropyGrad(_) => place == 1,
                _ => false,
            })
        };
        let fits = body.ty(inputs[i]) == body.ty(output.value);
        (fits && body.nodes().all(|(_, node)| reads_rows(node))).then_some((i, j))
    })
}

/// Whether one node alone reads this value and what it is a view of, and no output of the graph is any of them.
pub(super) fn is_read_once(graph: &Graph, users: &[Vec<NodeId>], mut value: ValueId) -> bool {
    loop {
        let is_output = graph.outputs.iter().any(|o| o.value == value);
        if users[value.0 as usize].len() != 1 || is_output {
            return false;
        }
        let node = graph.def(value);
        match node.op {
            Op::Reshape(_) => value = node.inputs[0],
            _ => return !node.op.is_leaf(),
        }
    }
}
