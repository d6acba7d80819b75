//! Rules for transposes and reshapes: they compose, cancel, and move into matmuls.

use super::{Expr, Match, Rule};
use crate::rule::Statement;
use frit_ir::ops::{MatMul, Op, Reshape, Transpose};

/// Rules about the arrangement of elements.
pub(super) const RULES: &[Rule] = &[
    exact(
        "transpose-identity",
        "transpose(x) = x if every axis stays",
        &["transpose{perm=<identity>}(x:f32[*])"],
        identity,
    ),
    exact(
        "transpose-compose",
        "transpose(transpose(x)) = transpose(x)",
        &["transpose{perm=<perm>}(transpose{perm=<perm>}(x:f32[*]))"],
        compose,
    ),
    exact(
        "transpose-is-reshape",
        "transpose(x) = reshape(x) if axes larger than 1 keep their order",
        &[
            "transpose{perm=<[0,1,2]|[1,0,2]|[1,2,0]>}(x:f32[1,a,b])",
            "transpose{perm=<[0,2,1]|[1,0,2]>}(x:f32[a,1,b])",
            "transpose{perm=<[3,0,1,2]|[0,3,2,1]|[0,2,3,1]|[2,3,0,1]>}(x:f32[a,1,b,1])",
        ],
        is_reshape,
    ),
    exact(
        "reshape-same",
        "reshape(x) = x if the shape stays",
        &["reshape{shape=[<dims>]}(x:f32[*])"],
        reshape_same,
    ),
    exact(
        "reshape-compose",
        "reshape(reshape(x)) = reshape(x)",
        &[
            "reshape{shape=[c,a*b]}(reshape{shape=[b*c,a]}(x:f32[a,b,c]))",
            "reshape{shape=[a*b*c]}(reshape{shape=[a,b*c]}(x:f32[a*b,c]))",
            "reshape{shape=[a,b,c]}(reshape{shape=[a*b*c]}(x:f32[a*b,1,c]))",
        ],
        reshape_compose,
    ),
    exact(
        "matmul-trans-a",
        "matmul(transpose(a), b) = matmul{trans_a}(a, b)",
        &[
            "matmul{trans_a=false,trans_b=false}(transpose{perm=[1,0]}(x:f32[a,b]),y:f32[a,c])",
            "matmul{trans_a=true,trans_b=true}(transpose{perm=[1,0]}(x:f32[a,b]),y:f32[c,b])",
            "matmul{trans_a=false,trans_b=false}(transpose{perm=[0,2,1]}(x:f32[d,a,b]),y:f32[<d,|>a,c])",
        ],
        |m| operand(m, 0),
    ),
    exact(
        "matmul-trans-b",
        "matmul(a, transpose(b)) = matmul{trans_b}(a, b)",
        &[
            "matmul{trans_a=false,trans_b=false}(x:f32[<|d,>a,b],transpose{perm=[1,0]}(y:f32[c,b]))",
            "matmul{trans_a=true,trans_b=true}(x:f32[b,a],transpose{perm=[1,0]}(y:f32[b,c]))",
            "matmul{trans_a=false,trans_b=true}(x:f32[d,a,b],transpose{perm=[0,2,1]}(y:f32[d,b,c]))",
        ],
        |m| operand(m, 1),
    ),
    exact(
        "matmul-transposed",
        "transpose(matmul(a, b)) = matmul{trans_a, trans_b}(b, a) of matrices",
        &[
            "transpose{perm=[1,0]}(matmul{trans_a=false,trans_b=<G=false|true>}(x:f32[a,b],y:f32[b,b]))",
            "transpose{perm=[1,0]}(matmul{trans_a=true,trans_b=false}(x:f32[b,a],y:f32[b,c]))",
            "transpose{perm=[1,0]}(matmul{trans_a=false,trans_b=true}(x:f32[a,b],y:f32[c,b]))",
        ],
        transposed,
    ),
    exact(
        "pointwise-of-transposes",
        "f(transpose(x), …) = transpose(f(x, …))",
        &[
            "exp(transpose{perm=<perm>}(x:f32[*]))",
            "<add|sub>(transpose{perm=<p=perm>}(x:f32[*]),transpose{perm=<p>}(y:f32[*]))",
            "div(transpose{perm=<perm>}(x:f32[*]),s:f32[])",
            "select(transpose{perm=[1,0]}(c:bool[a,b]),transpose{perm=[1,0]}(x:f32[a,b]),s:f32[])",
        ],
        out_of_pointwise,
    ),
    exact(
        "transpose-of-pointwise",
        "transpose(f(x, …)) = f(transpose(x), …)",
        &[
            "transpose{perm=<perm>}(exp(x:f32[*]))",
            "transpose{perm=<perm>}(<add|sub>(x:f32[*],y:f32[*]))",
            "transpose{perm=[1,0]}(div(s:f32[],x:f32[a,b]))",
            "transpose{perm=[1,0]}(select(c:bool[a,b],x:f32[a,b],s:f32[]))",
        ],
        into_pointwise,
    ),
];

const fn exact(
    name: &'static str,
    equation: &'static str,
    before: &'static [&'static str],
    apply: fn(&Match<'_>) -> Option<Expr>,
) -> Rule {
    Rule { statement: Statement::bits(name, equation, before), topic: "layout", apply }
}

fn permutation<'a>(m: &Match<'a>) -> Option<&'a Transpose> {
    match m.op {
        Op::Transpose(transpose) => Some(transpose),
        _ => None,
    }
}

fn identity(m: &Match<'_>) -> Option<Expr> {
    let outer = permutation(m)?;
    outer.perm.iter().enumerate().all(|(i, &p)| i == p).then_some(Expr::Class(m.inputs[0]))
}

fn compose(m: &Match<'_>) -> Option<Expr> {
    let outer = permutation(m)?;
    // The outer one keeps its region: the inner may be of an earlier one.
    m.operand(0).find_map(|(op, _, inputs)| match op {
        Op::Transpose(inner) => {
            let perm = outer.perm.iter().map(|&p| inner.perm[p]).collect();
            Some(m.make(Op::Transpose(Transpose { perm }), inputs))
        }
        _ => None,
    })
}

fn is_reshape(m: &Match<'_>) -> Option<Expr> {
    let outer = permutation(m)?;
    let from = &m.ty(m.inputs[0]).shape;
    let large: Vec<usize> = outer.perm.iter().copied().filter(|&p| from.0[p] != 1).collect();
    let shape = outer.perm.iter().map(|&p| from.0[p]).collect::<Vec<_>>().into();
    large.is_sorted().then(|| m.make(Op::Reshape(Reshape { shape }), m.inputs))
}

fn reshape_same(m: &Match<'_>) -> Option<Expr> {
    let Op::Reshape(reshape) = m.op else { return None };
    (m.ty(m.inputs[0]).shape == reshape.shape).then_some(Expr::Class(m.inputs[0]))
}

fn reshape_compose(m: &Match<'_>) -> Option<Expr> {
    let Op::Reshape(_) = m.op else { return None };
    m.operand(0).find_map(|(op, _, inputs)| match op {
        Op::Reshape(_) => Some(m.make(m.op.clone(), inputs)),
        _ => None,
    })
}

/// A swap of the last two axes of operand `i` becomes a flag.
fn operand(m: &Match<'_>, i: usize) -> Option<Expr> {
    let Op::MatMul(matmul) = m.op else { return None };
    let inside = m.operand(i).find_map(|(op, _, inputs)| match op {
        Op::Transpose(t) if swaps_last(&t.perm) => Some(inputs[0]),
        _ => None,
    })?;
    let (mut inputs, mut matmul): (_, MatMul) = (m.inputs.to_vec(), matmul.clone());
    inputs[i] = inside;
    match i {
        0 => matmul.trans_a = !matmul.trans_a,
        _ => matmul.trans_b = !matmul.trans_b,
    }
    Some(m.make(Op::MatMul(matmul), &inputs))
}

/// Multiplication commutes, and the sums keep their order.
fn transposed(m: &Match<'_>) -> Option<Expr> {
    if permutation(m)?.perm != [1, 0] {
        return None;
    }
    m.inner(0, |op, inputs| match (op, inputs) {
        (Op::MatMul(matmul), &[a, b]) => {
            let matmul =
                MatMul { trans_a: !matmul.trans_b, trans_b: !matmul.trans_a, out: matmul.out };
            Some(m.make(Op::MatMul(matmul), &[b, a]))
        }
        _ => None,
    })
}

fn swaps_last(perm: &[usize]) -> bool {
    let n = perm.len();
    n >= 2
        && perm[n - 2..] == [n - 1, n - 2]
        && perm[..n - 2].iter().enumerate().all(|(i, &p)| i == p)
}

fn out_of_pointwise(m: &Match<'_>) -> Option<Expr> {
    // A cast has rules of its own.
    if !m.op.is_pointwise() || matches!(m.op, Op::Cast(_)) {
        return None;
    }
    let full = m.ty(*m.inputs.first()?).shape.clone();
    let perm = m.inner(0, |op, _| match op {
        Op::Transpose(t) => Some(t.perm.clone()),
        _ => None,
    })?;
    let mut inputs = Vec::with_capacity(m.inputs.len());
    for (i, &input) in m.inputs.iter().enumerate() {
        let shape = &m.ty(input).shape;
        if shape.rank() == 0 {
            inputs.push(input);
            continue;
        }
        let inside = m.inner(i, |op, inputs| match op {
            Op::Transpose(t) if t.perm == perm => Some(inputs[0]),
            _ => None,
        })?;
        if *shape != full {
            return None;
        }
        inputs.push(inside);
    }
    let inside = m.make(m.op.clone(), &inputs);
    Some(Expr::one(Op::Transpose(Transpose { perm }), m.region, inside))
}

fn into_pointwise(m: &Match<'_>) -> Option<Expr> {
    let outer = permutation(m)?;
    let shape = &m.ty(m.inputs[0]).shape;
    m.inner(0, |op, inputs| {
        let fits = |i| *shape == m.ty(i).shape || m.ty(i).shape.rank() == 0;
        if !op.is_pointwise() || matches!(op, Op::Cast(_)) || !inputs.iter().all(|i| fits(*i)) {
            return None;
        }
        let moved = inputs.iter().map(|&i| match m.ty(i).shape.rank() {
            0 => Expr::Class(i),
            _ => m.make(Op::Transpose(outer.clone()), &[i]),
        });
        Some(Expr::Make(op.clone(), m.region, moved.collect()))
    })
}
