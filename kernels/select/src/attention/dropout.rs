//! Dropout of attention weights: the mask is drawn where the weights are computed, if that is all it is for.

use frit_ir::ops::RandomMask;
use frit_ir::{Graph, Op, ValueId};

/// The draw of a mask inside the body, and the generator's state that it reads.
pub(super) fn drawn(body: &Graph, kept: ValueId) -> Option<(&RandomMask, ValueId)> {
    let mut node = body.def(kept);
    while let Op::Reshape(_) = node.op {
        node = body.def(node.inputs[0]);
    }
    let Op::RandomMask(mask) = &node.op else { return None };
    Some((mask, node.inputs[0]))
}
