//! Rules for casts: removal, and commuting with other operations.

use super::{Expr, Match, Rule};
use crate::canonicalize::layout::{CASTS, is_one_cast};
use crate::rule::{Claim, Statement};
use frit_ir::ops::{Cast, Op};

/// Rules about casts.
pub(super) const RULES: &[Rule] = &[
    Rule {
        statement: Statement::bits(
            "cast-same",
            "cast[T](x: T) = x",
            &[r#"cast{to="<T=f32|bf16|i64|bool>"}(x:<T>[*])"#],
        ),
        topic: "cast",
        apply: same,
    },
    Rule {
        statement: Statement::floats(
            "cast-widen-twice",
            "cast[C](cast[B](x: A)) = cast[C](x) if B holds every A, and C does or is a float or bool, or neither A nor B is a float",
            CASTS,
        ),
        topic: "cast",
        apply: widen_twice,
    },
    Rule {
        statement: Statement {
            name: "cast-twice",
            equation: "cast[C](cast[B](x)) = cast[C](x): rounded once instead of twice",
            claim: Claim::Approximate,
        },
        topic: "cast",
        apply: twice,
    },
    exact("cast-into-layout", "cast(layout(x)) = layout(cast(x))", CAST_OF_LAYOUT, into_layout),
    exact("cast-out-of-layout", "layout(cast(x)) = cast(layout(x))", LAYOUT_OF_CAST, out_of_layout),
    exact(
        "cast-into-concat",
        "cast(concat(x, …)) = concat(cast(x), …)",
        &[
            r#"cast{to="bf16"}(concat{axis=0}(x:f32[a,b],y:f32[c,b],z:f32[d,b]))"#,
            r#"cast{to="f64"}(concat{axis=1}(x:f32[a,b],x))"#,
        ],
        into_concat,
    ),
    exact(
        "cast-out-of-concat",
        "concat(cast(x), …) = cast(concat(x, …))",
        &[
            r#"concat{axis=0}(cast{to="bf16"}(x:f32[a,b]),cast{to="bf16"}(y:f32[c,b]),cast{to="bf16"}(z:f32[d,b]))"#,
            r#"concat{axis=1}(cast{to="f32"}(x:bf16[a,b]),cast{to="f32"}(y:bf16[a,c]))"#,
        ],
        out_of_concat,
    ),
    exact(
        "cast-into-rows",
        "cast(embedding(t, i)) = embedding(cast(t), i); likewise gather",
        &[
            r#"cast{to="bf16"}(embedding(%t:f32[a,b],i:i64[c,d]))"#,
            r#"cast{to="bf16"}(gather{axis=<0|1|2>}(x:f32[a,b,c],i:i64[<|d|d,e>]))"#,
        ],
        into_rows,
    ),
    exact(
        "cast-out-of-rows",
        "embedding(cast(t), i) = cast(embedding(t, i)); likewise gather",
        &[
            r#"embedding(cast{to="bf16"}(%t:f32[a,b]),i:i64[c,d])"#,
            r#"gather{axis=<0|1|2>}(cast{to="bf16"}(x:f32[a,b,c]),i:i64[<|d|d,e>])"#,
        ],
        out_of_rows,
    ),
];

const CAST_OF_LAYOUT: &[&str] = &[
    r#"cast{to="bf16"}(transpose{perm=<perm>}(x:f32[*]))"#,
    r#"cast{to="f64"}(reshape{shape=[<c,a*b|a*b*c|b,a,c>]}(x:f32[a,b,c]))"#,
    r#"cast{to="bf16"}(expand{shape=[a,b]}(x:f32[<a,1|b||1,1>]))"#,
    r#"cast{to="bf16"}(slice{start=[c,1],size=[b,b],step=[-1,3]}(x:f32[d,d]))"#,
];

const LAYOUT_OF_CAST: &[&str] = &[
    r#"transpose{perm=<perm>}(cast{to="bf16"}(x:f32[*]))"#,
    r#"reshape{shape=[<c,a*b|a*b*c|b,a,c>]}(cast{to="f64"}(x:f32[a,b,c]))"#,
    r#"expand{shape=[a,b]}(cast{to="bf16"}(x:f32[<a,1|b||1,1>]))"#,
    r#"slice{start=[c,1],size=[b,b],step=[-1,3]}(cast{to="bf16"}(x:f32[d,d]))"#,
];

const fn exact(
    name: &'static str,
    equation: &'static str,
    before: &'static [&'static str],
    apply: fn(&Match<'_>) -> Option<Expr>,
) -> Rule {
    Rule { statement: Statement::bits(name, equation, before), topic: "cast", apply }
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
        Op::Cast(inner) if is_one_cast(m.ty(inputs[0]).dtype, inner.to, cast.to) => {
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
