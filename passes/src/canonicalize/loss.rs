//! Cross-entropy of logits whose class axis is cut: it reads the uncut rows and leaves their further columns out, so that neither
//! the logits nor their gradient are copied.

use super::{Rewrite, Rewritten, add};
use frit_ir::ops::{CrossEntropy, Slice};
use frit_ir::{Graph, GraphError, NodeId, Op};

/// `cross_entropy(slice(x))` → `cross_entropy {classes}(x)` where the slice has the first columns of `x`.
pub(super) fn simplify(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let Op::CrossEntropy(CrossEntropy { ignore_index, classes }) = node.op else {
        return Ok(Rewrite::None);
    };
    let cut = graph.def(node.inputs[0]);
    let Op::Slice(slice) = &cut.op else { return Ok(Rewrite::None) };
    let (x, last) = (cut.inputs[0], slice.size.len() - 1);
    let shape = graph.ty(x).shape.clone();
    if slice.start[last] != 0 || slice.step[last] != 1 || slice.size[last] == shape.0[last] {
        return Ok(Rewrite::None);
    }
    let classes = Some(classes.unwrap_or(slice.size[last]));
    // The cut of other axes stays.
    let rest = Slice {
        size: slice.size[..last].iter().chain([&shape.0[last]]).copied().collect(),
        ..slice.clone()
    };
    let logits = match rest.size == shape.0 && rest.step.iter().all(|step| *step == 1) {
        true => x,
        false => add(graph, id, Op::Slice(rest), &[x])?,
    };
    let node = graph.node_mut(id);
    node.op = Op::CrossEntropy(CrossEntropy { ignore_index, classes });
    node.inputs[0] = logits;
    Ok(Rewrite::Edited)
}

/// Applies the rule to all cross-entropies; the order of nodes and dead ones are left to the caller.
pub(crate) fn read_padded_logits(graph: &mut Graph) -> Result<(), GraphError> {
    for id in graph.order().to_vec() {
        simplify(graph, id)?;
    }
    Ok(())
}
