//! Integer division, remainder and power, defined for every operand: results wrap, and division by 0 gives 0.

use super::expr::{Bin, Dag, Expr, Id, Ty};
use super::text::{Elem, Text, Val};

/// Whether an integer may be divided by 0: the divisor, or the base of a power whose exponent may be negative, is not a
/// nonzero constant.
pub(crate) fn may_divide_by_zero(dag: &Dag, id: Id) -> bool {
    let constant = |id: Id| match *dag.get(id) {
        Expr::Int(x, _) => Some(x),
        _ => None,
    };
    match *dag.get(id) {
        _ if dag.ty(id) == Ty::F32 => false,
        Expr::Bin(Bin::Div | Bin::Mod | Bin::Rem, _, b) => constant(b).is_none_or(|b| b == 0),
        Expr::Bin(Bin::Pow, a, b) => {
            constant(a).is_none_or(|a| a == 0) && constant(b).is_none_or(|b| b < 0)
        }
        _ => false,
    }
}

/// A divisor that is neither 0 nor −1, and masks of where it was replaced: dividing by 0, or the minimum by −1, traps.
fn safe(t: &mut Text, b: Val) -> (Val, Val, Val) {
    let [zero, one, minus] = [0, 1, -1].map(|x| t.int(x, b.elem, b.width));
    let (nothing, negated) = (t.cmpi("eq", b, zero), t.cmpi("eq", b, minus));
    let replaced = t.same("arith.ori", &[nothing, negated]);
    (t.select(replaced, one, b), nothing, negated)
}

/// `a / b`, rounded toward zero.
pub(crate) fn divide(t: &mut Text, a: Val, b: Val) -> Val {
    let (divisor, nothing, negated) = safe(t, b);
    let zero = t.int(0, a.elem, a.width);
    let quotient = t.same("arith.divsi", &[a, divisor]);
    let minus = t.same("arith.subi", &[zero, a]);
    let quotient = t.select(negated, minus, quotient);
    t.select(nothing, zero, quotient)
}

/// The remainder with the sign of `a`.
pub(crate) fn remainder(t: &mut Text, a: Val, b: Val) -> Val {
    // The remainder by 1, which replaces 0 and −1, is 0.
    let (divisor, ..) = safe(t, b);
    t.same("arith.remsi", &[a, divisor])
}

/// The remainder with the sign of `b`.
pub(crate) fn floored_remainder(t: &mut Text, a: Val, b: Val) -> Val {
    let r = remainder(t, a, b);
    let zero = t.int(0, a.elem, a.width);
    let signs = t.same("arith.xori", &[r, b]);
    let (differs, some) = (t.cmpi("slt", signs, zero), t.cmpi("ne", r, zero));
    let moved = t.same("arith.andi", &[differs, some]);
    let other = t.same("arith.addi", &[r, b]);
    t.select(moved, other, r)
}

/// `aᵇ` by squaring.
pub(crate) fn power(t: &mut Text, a: Val, b: Val) -> Val {
    let (elem, width) = (a.elem, a.width);
    let [zero, one, minus] = [0, 1, -1].map(|x| t.int(x, elem, width));
    let bits = if elem == Elem::I64 { 63 } else { 31 };
    let range = [0, bits, 1].map(|i| t.index(i));
    let open = t.open_for(range, &[one, a, b]);
    let [product, base, exponent] = [open.carried[0], open.carried[1], open.carried[2]];
    let low = t.same("arith.andi", &[exponent, one]);
    let taken = t.cmpi("ne", low, zero);
    let larger = t.same("arith.muli", &[product, base]);
    let product = t.select(taken, larger, product);
    let base = t.same("arith.muli", &[base, base]);
    let exponent = t.same("arith.shrui", &[exponent, one]);
    let result = t.close_for(open, &[product, base, exponent])[0];
    // 1/aⁿ is truncated to 0 unless a is 1 or −1.
    let low = t.same("arith.andi", &[b, one]);
    let (odd, of_one) = (t.cmpi("ne", low, zero), t.cmpi("eq", a, one));
    let of_minus = t.cmpi("eq", a, minus);
    let alternating = t.select(odd, minus, one);
    let reciprocal = t.select(of_one, one, zero);
    let reciprocal = t.select(of_minus, alternating, reciprocal);
    let negative = t.cmpi("slt", b, zero);
    t.select(negative, reciprocal, result)
}
