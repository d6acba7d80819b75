//! Rules for casts: removal, and commuting with other operations.

use super::{Exactness, Expr, Match, Rule};
use frit_ir::ops::{Cast, Op};

/// Rules about casts.
pub(super) const RULES: &[Rule] = &[
    exact("cast-same", "cast[T](x: T) = x", same),
    exact(
        "cast-widen-twice",
        "cast[C](cast[B](x: A)) = cast[C](x) if B holds every A",
        widen_twice,
    ),
    Rule {
        name: "cast-twice",
        topic: "cast",
        exactness: Exactness::Approximate,
        summary: "cast[C](cast[B](x)) = cast[C](x): rounded once instead of twice",
        apply: twice,
    },
    exact("cast-into-layout", "cast(layout(x)) = layout(cast(x))", into_layout),
    exact("cast-out-of-layout", "layout(cast(x)) = cast(layout(x))", out_of_layout),
    exact("cast-into-concat", "cast(concat(x, …)) = concat(cast(x), …)", into_concat),
    exact("cast-out-of-concat", "concat(cast(x), …) = cast(concat(x, …))", out_of_concat),
    exact(
        "cast-into-rows",
        "cast(embedding(t, i)) = embedding(cast(t), i); gather alike",
        into_rows,
    ),
    exact(
        "cast-out-of-rows",
        "embedding(cast(t), i) = cast(embedding(t, i)); gather alike",
        out_of_rows,
    ),
];

const fn exact(
    name: &'static str,
    summary: &'static str,
    apply: fn(&Match<'_>) -> Option<Expr>,
) -> Rule {
    Rule { name, topic: "cast", exactness: Exactness::Exact, summary, apply }
}

fn cast_of<'a>(m: &Match<'a>) -> Option<&'a Cast> {
    match m.op {
        Op::Cast(cast) => Some(cast),
        _ => None,
    }
}

fn same(m: &Match<'_>) -> Option<Expr> {
    let cast = cast_of(m)?;
    (m.ty(m.inputs[0]).dtype == cast.to).then_some(Expr::Class(m.inputs[0]))
}

fn widen_twice(m: &Match<'_>) -> Option<Expr> {
    let cast = cast_of(m)?;
    // The outer cast keeps its region: the inner may be of an earlier one.
    m.operand(0).find_map(|(op, _, inputs)| match op {
        Op::Cast(inner) if m.ty(inputs[0]).dtype.widens_to(inner.to) => {
            Some(m.make(Op::Cast(cast.clone()), inputs))
        }
        _ => None,
    })
}

fn twice(m: &Match<'_>) -> Option<Expr> {
    let cast = cast_of(m)?;
    m.operand(0).find_map(|(op, _, inputs)| match op {
        Op::Cast(inner) if inner.to.is_float() && m.ty(inputs[0]).dtype.is_float() => {
            Some(m.make(Op::Cast(cast.clone()), inputs))
        }
        _ => None,
    })
}

/// Whether the operation only rearranges the elements of one operand.
fn is_unary_layout(op: &Op) -> bool {
    matches!(op, Op::Reshape(_) | Op::Transpose(_) | Op::Expand(_) | Op::Slice(_))
}

fn into_layout(m: &Match<'_>) -> Option<Expr> {
    let cast = cast_of(m)?;
    m.inner(0, |op, inputs| {
        let inside = m.make(Op::Cast(cast.clone()), inputs);
        is_unary_layout(op).then(|| Expr::one(op.clone(), m.region, inside))
    })
}

fn out_of_layout(m: &Match<'_>) -> Option<Expr> {
    if !is_unary_layout(m.op) {
        return None;
    }
    m.inner(0, |op, inputs| match op {
        Op::Cast(_) => Some(Expr::one(op.clone(), m.region, m.make(m.op.clone(), inputs))),
        _ => None,
    })
}

fn into_concat(m: &Match<'_>) -> Option<Expr> {
    let cast = cast_of(m)?;
    m.inner(0, |op, inputs| match op {
        Op::Concat(_) => {
            let cast = |i| m.make(Op::Cast(cast.clone()), &[i]);
            Some(Expr::Make(op.clone(), m.region, inputs.iter().map(|i| cast(*i)).collect()))
        }
        _ => None,
    })
}

fn out_of_concat(m: &Match<'_>) -> Option<Expr> {
    let Op::Concat(_) = m.op else { return None };
    let mut inputs = Vec::with_capacity(m.inputs.len());
    for i in 0..m.inputs.len() {
        inputs.push(m.inner(i, |op, inputs| matches!(op, Op::Cast(_)).then_some(inputs[0]))?);
    }
    let cast = Op::Cast(Cast { to: m.ty(m.inputs[0]).dtype });
    // Operands of different types do not concatenate; the check of the result's type finds that.
    Some(Expr::one(cast, m.region, m.make(m.op.clone(), &inputs)))
}

fn into_rows(m: &Match<'_>) -> Option<Expr> {
    let cast = cast_of(m)?;
    m.inner(0, |op, inputs| match op {
        Op::Embedding(_) | Op::Gather(_) => {
            let table = m.make(Op::Cast(cast.clone()), &inputs[..1]);
            Some(Expr::Make(op.clone(), m.region, vec![table, Expr::Class(inputs[1])]))
        }
        _ => None,
    })
}

fn out_of_rows(m: &Match<'_>) -> Option<Expr> {
    let (Op::Embedding(_) | Op::Gather(_)) = m.op else { return None };
    m.inner(0, |op, inputs| match op {
        Op::Cast(_) => {
            let rows = m.make(m.op.clone(), &[inputs[0], m.inputs[1]]);
            Some(Expr::one(op.clone(), m.region, rows))
        }
        _ => None,
    })
}
