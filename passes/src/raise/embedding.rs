//! Rows of a parameter table from the general gather.

use super::matcher::Matcher;
use super::{Raised, Rule, Step};
use crate::rule::Statement;
use frit_ir::ops::Embedding;
use frit_ir::{Op, ValueId};

/// The rule.
pub(super) const RULE: Rule = Rule {
    statement: Statement::bits(
        "embedding",
        "gather(t, i) = embedding(t, i) of a parameter of two axes",
        &["gather{axis=0}(%t:f32[a,b],i:i64[<|c|c,d>])"],
    ),
    apply: raise,
};

/// An embedding whose node defines `y`: a gather along axis 0 of a parameter of two axes.
fn raise(m: &Matcher<'_>, y: ValueId) -> Option<Raised> {
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
