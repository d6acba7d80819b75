//! GELU in both forms and SiLU from their parts.
//!
//! `½·x·(1 + erf(x/√2))`, `½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))` (Hendrycks & Gimpel 2016) and
//! `x·sigmoid(x)`, with factors in any order and association.

use super::matcher::{Matcher, Product, near};
use super::{Raised, Rule, Step};
use crate::rule::Statement;
use frit_ir::ops::{BinaryFn, UnaryFn};
use frit_ir::{Op, ValueId};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

/// Factor of the cube in the tanh form.
const CUBIC: f64 = 0.044715;

/// The rule.
pub(super) const RULE: Rule = Rule {
    statement: Statement::reals(
        "activation",
        "½·x·(1 + erf(x/√2)) = gelu(x); ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))) = gelu_tanh(x); x·sigmoid(x) = silu(x); scalars up to 1e-5",
        ACTIVATIONS,
    ),
    apply: raise,
};

/// Factors in each order and association that exporters write, and others.
const ACTIVATIONS: &[&str] = &[
    "mul(<x:f32[a],sigmoid(x)|sigmoid(x:f32[a]),x>)",
    "u=<mul(x:f32[a],0.7071067811865476:f32[])|div(x:f32[a],1.4142135623730951:f32[])>;g=add(<erf(u),1:f32[]|1:f32[],erf(u)>);<mul(mul(x,0.5:f32[]),g)|mul(x,mul(g,0.5:f32[]))|mul(0.5:f32[],mul(x,g))|div(mul(g,x),2:f32[])>",
    "s=add(x:f32[a],mul(0.044715:f32[],<pow(x,3:f32[])|mul(x,mul(x,x))|mul(mul(x,x),x)|mul(x,pow(x,2:f32[]))>));mul(mul(x,0.5:f32[]),add(tanh(mul(s,0.7978845608028654:f32[])),1:f32[]))",
    "s=add(mul(0.044715:f32[],<mul(x:f32[a],x)|pow(x:f32[a],2:f32[])>),1:f32[]);mul(x,mul(0.5:f32[],add(1:f32[],tanh(mul(mul(x,0.7978845608028654:f32[]),s)))))",
];

/// An activation whose last node defines `y`.
fn raise(m: &Matcher<'_>, y: ValueId) -> Option<Raised> {
    m.binary(y, BinaryFn::Mul).or_else(|| m.binary(y, BinaryFn::Div))?;
    let (f, x) = m.products(y).iter().find_map(|p| activation(m, p))?;
    (m.graph.ty(x) == m.graph.ty(y)).then(|| {
        let mut raised = Raised::new();
        raised.push(Op::Unary(f), vec![Step::Old(x)]);
        raised
    })
}

fn activation(m: &Matcher<'_>, product: &Product) -> Option<(UnaryFn, ValueId)> {
    let [a, b] = product.factors[..] else { return None };
    [(a, b), (b, a)].into_iter().find_map(|(x, gate)| {
        if near(product.scalar, 1.0) && m.unary(gate, UnaryFn::Sigmoid) == Some(x) {
            return Some((UnaryFn::Silu, x));
        }
        let (inner, one) = m.plus_scalar(gate)?;
        if !near(product.scalar, 0.5) || !near(one, 1.0) {
            return None;
        }
        if let Some(u) = m.unary(inner, UnaryFn::Erf) {
            let scaled = |p: &Product| p.is(FRAC_1_SQRT_2, &[x]);
            return m.products(u).iter().any(scaled).then_some((UnaryFn::Gelu, x));
        }
        let u = m.unary(inner, UnaryFn::Tanh)?;
        let cubic = m.products(u).iter().any(|p| is_cubic(m, p, x));
        cubic.then_some((UnaryFn::GeluTanh, x))
    })
}

/// Whether the product is `√(2/π)·(x + 0.044715·x³)` or `√(2/π)·x·(1 + 0.044715·x²)`.
fn is_cubic(m: &Matcher<'_>, product: &Product, x: ValueId) -> bool {
    if !near(product.scalar, FRAC_2_PI.sqrt()) {
        return false;
    }
    match product.factors[..] {
        [sum] => {
            m.either(sum, BinaryFn::Add, |a| (a == x).then_some(())).is_some_and(|((), cube)| {
                let products = m.products(cube);
                products.iter().any(|p| near(p.scalar, CUBIC) && m.is_cube(p, x))
            })
        }
        [a, b] => [(a, b), (b, a)].into_iter().any(|(first, sum)| {
            first == x
                && m.plus_scalar(sum).is_some_and(|(square, one)| {
                    let is_square = |p: &Product| {
                        let square = matches!(p.factors[..], [s] if m.square(s) == Some(x));
                        near(p.scalar, CUBIC) && (square || p.is(CUBIC, &[x, x]))
                    };
                    near(one, 1.0) && m.products(square).iter().any(is_square)
                })
        }),
        _ => false,
    }
}
