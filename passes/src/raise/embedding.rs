//! Rows of a parameter table from the general gather.

use super::matcher::Matcher;
use super::{Raised, Step};
use frit_ir::ops::Embedding;
use frit_ir::{Op, ValueId};

/// An embedding whose node defines `y`: a gather along axis 0 of a parameter of two axes.
pub(super) fn raise(m: &Matcher<'_>, y: ValueId) -> Option<Raised> {
    let node = m.graph.def(y);
    let Op::Gather(op) = &node.op else { return None };
    let (table, ids) = (node.inputs[0], node.inputs[1]);
    let is_table = matches!(m.graph.def(table).op, Op::Param(_))
        && m.graph.ty(table).shape.rank() == 2
        && op.axis == 0;
    is_table.then(|| {
        let mut raised = Raised::new();
        raised.push(Op::Embedding(Embedding::default()), vec![Step::Old(table), Step::Old(ids)]);
        raised
    })
}
