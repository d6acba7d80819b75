//! Cross-entropy per row from its parts: `−log_softmax(logits)[label]`.

use super::matcher::Matcher;
use super::{Raised, Rule, Step};
use crate::rule::Statement;
use frit_ir::ops::{CrossEntropy, Reshape, UnaryFn};
use frit_ir::{Op, Shape, ValueId};

/// The rule.
pub(super) const RULE: Rule = Rule {
    statement: Statement::reals(
        "cross_entropy",
        "−log_softmax(x)[i, l(i)] = cross_entropy(x, l) of labels that are classes",
        &[
            "neg(gather_elements{axis=1}(log_softmax{axis=1}(x:f32[a,b]),l:i64[a,1]))",
            "neg(reshape{shape=[a,b]}(gather_elements{axis=2}(log_softmax{axis=2}(x:f32[a,b,c]),l:i64[a,b,1])))",
        ],
    ),
    apply: raise,
};

/// Losses whose last node defines `y`. No label is ignored: none was.
fn raise(m: &Matcher<'_>, y: ValueId) -> Option<Raised> {
    let mut picked = m.graph.def(m.unary(y, UnaryFn::Neg)?);
    if let Op::Reshape(_) = picked.op {
        picked = m.graph.def(picked.inputs[0]);
    }
    let Op::GatherElements(gather) = &picked.op else { return None };
    let (log, labels) = (picked.inputs[0], picked.inputs[1]);
    let softmax = m.graph.def(log);
    let Op::LogSoftmax(op) = &softmax.op else { return None };
    let (classes, picks) = (m.graph.ty(log).shape.dims(), m.graph.ty(labels).shape.dims());
    let (last, rows) = picks.split_last()?;
    let fits = op.axis + 1 == classes.len()
        && gather.axis == op.axis
        && *last == 1
        && classes[..op.axis] == *rows;
    if !fits {
        return None;
    }
    let mut raised = Raised::new();
    let reshape = |shape: Shape| Op::Reshape(Reshape { shape });
    let labels = raised.push(reshape(Shape::from(rows)), vec![Step::Old(labels)]);
    let op = Op::CrossEntropy(CrossEntropy::ignoring(i64::MIN));
    let losses = raised.push(op, vec![Step::Old(softmax.inputs[0]), labels]);
    raised.push(reshape(m.graph.ty(y).shape.clone()), vec![losses]);
    Some(raised)
}
