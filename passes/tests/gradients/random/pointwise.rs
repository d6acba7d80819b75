//! Functions of each element.

use super::super::{add, check, constant, domain, mean_over_ranks};
use super::{Random, numel};
use frit_ir::ops::*;
use frit_ir::{DType, Graph, Op, Tensor, ValueId};

/// A parameter times these signs.
fn signed(g: &mut Graph, x: ValueId, signs: &[f64]) -> ValueId {
    let shape = g.ty(x).shape.clone();
    let signs = constant(g, Tensor::floats(DType::F32, shape, signs.to_vec()));
    add(g, Op::Binary(BinaryFn::Mul), &[x, signs])[0]
}

pub(super) fn case(r: &mut Random) {
    let shape = r.shape_or_empty(0, 4);
    let (small, large) = (r.smaller(&shape), shape);
    for &f in UnaryFn::ALL {
        if let Some(place) = domain(f) {
            check(&format!("{} {large:?}", f.name()), &[&large], |g, p| {
                let x = place(g, p[0]);
                add(g, Op::Unary(f), &[x])[0]
            });
        }
    }
    let (a, b) = if r.flag() { (&small, &large) } else { (&large, &small) };
    let (of_a, of_b) = (r.signs(numel(a)), r.signs(numel(b)));
    for &f in BinaryFn::ALL {
        if f.name().ends_with("_grad") {
            continue;
        }
        check(&format!("{} {a:?} {b:?} {of_a:?} {of_b:?}", f.name()), &[a, b], |g, p| {
            // Only whole exponents of negative numbers are real.
            let left = if f == BinaryFn::Pow { p[0] } else { signed(g, p[0], &of_a) };
            let right = signed(g, p[1], &of_b);
            add(g, Op::Binary(f), &[left, right])[0]
        });
    }
    let exponent = r.pick(&[-2.0, -1.0, 0.0, 1.0, 2.0, 3.0]);
    check(&format!("power {exponent} of {a:?} {of_a:?}"), &[a], |g, p| {
        let base = signed(g, p[0], &of_a);
        let exponent = constant(g, Tensor::floats(DType::F32, b.clone(), vec![exponent; numel(b)]));
        add(g, Op::Binary(BinaryFn::Pow), &[base, exponent])[0]
    });
    let mask = r.mask(numel(&small));
    check(&format!("select {small:?} {a:?} {b:?}"), &[a, b], |g, p| {
        let mask = constant(g, Tensor::ints(DType::Bool, small.clone(), mask.clone()));
        add(g, Op::Select, &[mask, p[0], p[1]])[0]
    });
    let (min, max) = (r.pick(&[None, Some(-0.6)]), r.pick(&[None, Some(0.6)]));
    check(&format!("clip {min:?} {max:?} {a:?}"), &[a], |g, p| {
        let x = signed(g, p[0], &of_a);
        add(g, Op::Clip(Clip { min, max }), &[x])[0]
    });
    let to = r.pick(&[DType::F16, DType::BF16, DType::F32, DType::F64]);
    check(&format!("cast to {to} {a:?}"), &[a], |g, p| {
        let x = signed(g, p[0], &of_a);
        let narrow = add(g, Op::Cast(Cast { to }), &[x])[0];
        add(g, Op::Cast(Cast { to: DType::F32 }), &[narrow])[0]
    });
    mean_over_ranks(r.int(1, 3), &large);
}
