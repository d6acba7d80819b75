//! Layer and root-mean-square normalization from their parts.
//!
//! `(x − mean(x)) / √(mean((x − mean(x))²) + ε)`, respectively `x / √(mean(x²) + ε)`, with the root in
//! any spelling, then optionally `· scale` and `+ bias` of the shape of the normalized axes.

use super::matcher::Matcher;
use super::{Raised, Rule, Step};
use crate::rule::Statement;
use frit_ir::ops::{BinaryFn, Constant, LayerNorm, ReduceFn, Reshape, RmsNorm};
use frit_ir::{Op, Shape, Tensor, ValueId};

/// Maximum number of elements of a scale of ones.
const MAX_ONES: usize = 1 << 24;

/// Which values make a normalization.
struct Norm {
    x: ValueId,
    axis: usize,
    eps: f64,
    centered: bool,
}

/// The rule.
pub(super) const RULE: Rule = Rule {
    statement: Statement::reals(
        "norm",
        "(x − mean x) / √(mean (x − mean x)² + ε) · s + b = layer_norm(x, s, b); x / √(mean x² + ε) · s = rms_norm(x, s)",
        NORMS,
    ),
    apply: raise,
};

/// The root in each spelling, then scale and bias on either side and in each shape.
const NORMS: &[&str] = &[
    "c=sub(x:f32[a,b],reduce{f=\"mean\",axes=[1],keep_dims=true}(x));r=add(reduce{f=\"mean\",axes=[1],keep_dims=true}(mul(c,c)),0.00001:f32[]);<div(c,sqrt(r))|mul(c,rsqrt(r))|mul(reciprocal(sqrt(r)),c)|div(c,pow(r,0.5:f32[]))|mul(c,pow(r,-0.5:f32[]))|mul(c,div(1:f32[],sqrt(r)))>",
    "c=sub(x:f32[a,b,c],reshape{shape=[a,1,1]}(reduce{f=\"mean\",axes=[1,2],keep_dims=false}(x)));r=add(0.00001:f32[],reduce{f=\"mean\",axes=[1,2],keep_dims=true}(pow(c,2:f32[])));n=div(c,sqrt(r));<n|mul(n,s:f32[b,c])|mul(s:f32[1,b,c],n)>",
    "c=sub(x:f32[a,b],reduce{f=\"mean\",axes=[1],keep_dims=true}(x));r=add(reduce{f=\"mean\",axes=[1],keep_dims=true}(mul(c,c)),0.00001:f32[]);n=mul(div(c,sqrt(r)),s:f32[b]);<add(n,t:f32[b])|add(t:f32[1,b],n)>",
    "r=add(reduce{f=\"mean\",axes=[1],keep_dims=true}(<mul(x:f32[a,b],x)|pow(x:f32[a,b],2:f32[])>),0.00001:f32[]);n=<div(x,sqrt(r))|mul(x,rsqrt(r))|mul(pow(r,-0.5:f32[]),x)>;<n|mul(n,s:f32[b])|mul(s:f32[1,b],n)>",
];

/// A normalization whose last node defines `y`.
fn raise(m: &Matcher<'_>, y: ValueId) -> Option<Raised> {
    with_bias(m, y).or_else(|| with_scale(m, y, None)).or_else(|| {
        let norm = normalized(m, y)?;
        build(m, norm, None, None)
    })
}

fn with_bias(m: &Matcher<'_>, y: ValueId) -> Option<Raised> {
    let [a, b] = m.binary(y, BinaryFn::Add)?;
    with_scale(m, a, Some(b)).or_else(|| with_scale(m, b, Some(a)))
}

fn with_scale(m: &Matcher<'_>, y: ValueId, bias: Option<ValueId>) -> Option<Raised> {
    let [a, b] = m.binary(y, BinaryFn::Mul)?;
    [(a, b), (b, a)].into_iter().find_map(|(inner, scale)| {
        let norm = normalized(m, inner)?;
        let fits = is_affine(m, &norm, scale) && bias.is_none_or(|b| is_affine(m, &norm, b));
        // The RMS operation has no bias.
        (fits && (norm.centered || bias.is_none()))
            .then(|| build(m, norm, Some(scale), bias))
            .flatten()
    })
}

fn normalized(m: &Matcher<'_>, y: ValueId) -> Option<Norm> {
    let (numerator, radicand) = m.over_root(y)?;
    let numerator = numerator?;
    let (variance, eps) = m.plus_scalar(radicand).filter(|(_, eps)| *eps > 0.0)?;
    let (squares, axis) = m.trailing(variance, ReduceFn::Mean)?;
    let base = m.square(squares)?;
    if base != numerator || m.graph.ty(y) != m.graph.ty(numerator) {
        return None;
    }
    let centered = m.binary(numerator, BinaryFn::Sub).and_then(|[x, mean]| {
        let of = m.trailing(mean, ReduceFn::Mean)?;
        (of == (x, axis)).then_some(x)
    });
    match centered {
        Some(x) => Some(Norm { x, axis, eps, centered: true }),
        None => Some(Norm { x: numerator, axis, eps, centered: false }),
    }
}

/// Whether the value has one element per normalized position and nothing else.
fn is_affine(m: &Matcher<'_>, norm: &Norm, v: ValueId) -> bool {
    let (x, v) = (m.graph.ty(norm.x), m.graph.ty(v));
    let tail = &x.shape.0[norm.axis..];
    let Some(lead) = v.shape.rank().checked_sub(tail.len()) else { return false };
    v.dtype == x.dtype && v.shape.0[lead..] == *tail && v.shape.0[..lead].iter().all(|&d| d == 1)
}

/// `None` if a scale of ones would have to be made and is too large.
fn build(
    m: &Matcher<'_>,
    norm: Norm,
    scale: Option<ValueId>,
    bias: Option<ValueId>,
) -> Option<Raised> {
    let ty = m.graph.ty(norm.x);
    let tail = Shape::from(&ty.shape.0[norm.axis..]);
    let mut raised = Raised::new();
    let affine = |raised: &mut Raised, v: ValueId| {
        if m.graph.ty(v).shape == tail {
            return Step::Old(v);
        }
        raised.push(Op::Reshape(Reshape { shape: tail.clone() }), vec![Step::Old(v)])
    };
    let scale = match scale {
        Some(v) => affine(&mut raised, v),
        None if tail.numel() > MAX_ONES => return None,
        None => {
            let value = Tensor::splat(ty.with_shape(tail.clone()), 1.0);
            raised.push(Op::Constant(Constant { value }), vec![])
        }
    };
    let (axis, eps) = (norm.axis, norm.eps);
    let mut operands = vec![Step::Old(norm.x), scale];
    if let Some(bias) = bias {
        operands.push(affine(&mut raised, bias));
    }
    let op = if norm.centered {
        Op::LayerNorm(LayerNorm { axis, eps })
    } else {
        Op::RmsNorm(RmsNorm { axis, eps })
    };
    raised.push(op, operands);
    Some(raised)
}
