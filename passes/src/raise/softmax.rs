//! Softmax and its logarithm from their parts.
//!
//! `exp(x − max(x)) / Σ exp(x − max(x))` and `(x − max(x)) − ln Σ exp(x − max(x))` over one axis, and
//! `ln(softmax(x))`, which the single operation computes without underflow.

use super::matcher::Matcher;
use super::{Raised, Rule, Step};
use crate::rule::Statement;
use frit_ir::ops::{BinaryFn, LogSoftmax, ReduceFn, Softmax, UnaryFn};
use frit_ir::{Op, ValueId};

/// The rule.
pub(super) const RULE: Rule = Rule {
    statement: Statement::reals(
        "softmax",
        "exp(x − max x) / Σ exp(x − max x) = softmax(x); (x − max x) − ln Σ exp(x − max x) = ln softmax(x) = log_softmax(x)",
        &[
            "e=exp(sub(x:f32[a,b,c],reduce{f=\"max\",axes=[<A=0|1|2>],keep_dims=true}(x)));div(e,reduce{f=\"sum\",axes=[<A>],keep_dims=true}(e))",
            "e=exp(sub(x:f32[a,b],reduce{f=\"max\",axes=[1],keep_dims=true}(x)));r=reciprocal(reduce{f=\"sum\",axes=[1],keep_dims=true}(e));mul(<e,r|r,e>)",
            "s=sub(x:f32[a,b],reduce{f=\"max\",axes=[<A=0|1>],keep_dims=true}(x));sub(s,log(reduce{f=\"sum\",axes=[<A>],keep_dims=true}(exp(s))))",
            "log(softmax{axis=<0|1>}(x:f32[a,b]))",
        ],
    ),
    apply: raise,
};

/// A softmax whose last node defines `y`.
fn raise(m: &Matcher<'_>, y: ValueId) -> Option<Raised> {
    let op = |(x, axis): (ValueId, usize), log: bool| {
        let op = match log {
            true => Op::LogSoftmax(LogSoftmax { axis }),
            false => Op::Softmax(Softmax { axis }),
        };
        let mut raised = Raised::new();
        raised.push(op, vec![Step::Old(x)]);
        raised
    };
    quotient(m, y)
        .map(|found| op(found, false))
        .or_else(|| difference(m, y).map(|found| op(found, true)))
        .or_else(|| {
            let inner = m.graph.def(m.unary(y, UnaryFn::Log)?);
            let Op::Softmax(softmax) = &inner.op else { return None };
            Some(op((inner.inputs[0], softmax.axis), true))
        })
}

fn quotient(m: &Matcher<'_>, y: ValueId) -> Option<(ValueId, usize)> {
    let (e, sum) = match m.binary(y, BinaryFn::Div) {
        Some([e, sum]) => (e, sum),
        None => {
            let inverse = |v| m.unary(v, UnaryFn::Reciprocal);
            let (sum, e) = m.either(y, BinaryFn::Mul, inverse)?;
            (e, sum)
        }
    };
    let axis = reduced(m, sum, ReduceFn::Sum, e)?;
    let shifted = m.unary(e, UnaryFn::Exp)?;
    shift(m, shifted, axis).map(|x| (x, axis))
}

fn difference(m: &Matcher<'_>, y: ValueId) -> Option<(ValueId, usize)> {
    let [shifted, log] = m.binary(y, BinaryFn::Sub)?;
    let sum = m.unary(log, UnaryFn::Log)?;
    let e = *m.graph.def(sum).inputs.first()?;
    if m.unary(e, UnaryFn::Exp) != Some(shifted) {
        return None;
    }
    let axis = reduced(m, sum, ReduceFn::Sum, e)?;
    shift(m, shifted, axis).map(|x| (x, axis))
}

/// `x` of `x − max(x)`.
fn shift(m: &Matcher<'_>, v: ValueId, axis: usize) -> Option<ValueId> {
    let [x, max] = m.binary(v, BinaryFn::Sub)?;
    (reduced(m, max, ReduceFn::Max, x)? == axis).then_some(x)
}

/// The only axis over which `v` reduces `x`, kept with size 1.
fn reduced(m: &Matcher<'_>, v: ValueId, f: ReduceFn, x: ValueId) -> Option<usize> {
    let node = m.graph.def(v);
    let Op::Reduce(op) = &node.op else { return None };
    match op.axes[..] {
        [axis] if op.f == f && op.keep_dims && node.inputs[0] == x => Some(axis),
        _ => None,
    }
}
