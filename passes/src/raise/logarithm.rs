//! Logarithms whose argument overflows or vanishes where the result does not, as softplus.
//!
//! `log(sigmoid(x)) = -softplus(-x)`, `log(1 - sigmoid(x)) = -softplus(x)`, `log(1 + exp(x)) = softplus(x)`. In f32 the left sides are
//! infinite from |x| of about 88 on, and their gradients are not numbers.

use super::matcher::{Matcher, near};
use super::{Raised, Rule, Step};
use crate::rule::Statement;
use frit_ir::ops::{BinaryFn, UnaryFn};
use frit_ir::{Op, ValueId};

/// The rule.
pub(super) const RULE: Rule = Rule {
    statement: Statement::reals(
        "logarithm",
        "ln sigmoid(x) = −softplus(−x); ln(1 − sigmoid(x)) = −softplus(x); ln(1 + exp(x)) = softplus(x)",
        &[
            "log(sigmoid(x:f32[a]))",
            "log(sub(1:f32[],sigmoid(x:f32[a])))",
            "log(add(<1:f32[],exp(x:f32[a])|exp(x:f32[a]),1:f32[]>))",
        ],
    ),
    apply: raise,
};

/// The logarithm that defines `y`.
fn raise(m: &Matcher<'_>, y: ValueId) -> Option<Raised> {
    let argument = m.unary(y, UnaryFn::Log)?;
    let complement = || {
        let [one, gate] = m.binary(argument, BinaryFn::Sub)?;
        m.is_scalar(one, 1.0)?;
        m.unary(gate, UnaryFn::Sigmoid)
    };
    let (x, functions) = if let Some(x) = m.unary(argument, UnaryFn::Sigmoid) {
        (x, &[UnaryFn::Neg, UnaryFn::Softplus, UnaryFn::Neg][..])
    } else if let Some(x) = complement() {
        (x, &[UnaryFn::Softplus, UnaryFn::Neg][..])
    } else {
        let (power, one) = m.plus_scalar(argument)?;
        let x = near(one, 1.0).then(|| m.unary(power, UnaryFn::Exp))??;
        (x, &[UnaryFn::Softplus][..])
    };
    if m.graph.ty(x) != m.graph.ty(y) {
        return None;
    }
    let mut raised = Raised::new();
    functions.iter().fold(Step::Old(x), |x, f| raised.push(Op::Unary(*f), vec![x]));
    Some(raised)
}
