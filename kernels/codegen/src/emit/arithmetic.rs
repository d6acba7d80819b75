//! Emits arithmetic, comparisons and conversions between compute types, on scalars and vectors.

use super::expr::{Bin, Ty};
use super::text::{Elem, Text, Val};
use super::{integer, power, remainder};
use frit_ir::DType;
use frit_ir::ops::CompareFn;

/// A maximum or minimum; zeros of either sign are equal here, which spares an instruction.
pub(crate) fn max(t: &mut Text, op: &str, a: Val, b: Val) -> Val {
    let ty = a.ty();
    t.def(ty, format_args!("{op} {a}, {b} fastmath<nsz> : {ty}"))
}

pub(crate) fn elem(ty: Ty) -> Elem {
    match ty {
        Ty::F32 => Elem::F32,
        Ty::I64 => Elem::I64,
        Ty::I32 => Elem::I32,
        Ty::Bool => Elem::I1,
    }
}

pub(crate) fn binary(t: &mut Text, f: Bin, a: Val, b: Val) -> Val {
    let float = a.elem == Elem::F32;
    let op = match (f, float) {
        (Bin::Add, true) => "arith.addf",
        (Bin::Sub, true) => "arith.subf",
        (Bin::Mul, true) => "arith.mulf",
        (Bin::Div, true) => "arith.divf",
        (Bin::Max, true) => return max(t, "arith.maximumf", a, b),
        (Bin::Min, true) => return max(t, "arith.minimumf", a, b),
        (Bin::Add, false) => "arith.addi",
        (Bin::Sub, false) => "arith.subi",
        (Bin::Mul, false) => "arith.muli",
        (Bin::Div, false) => return integer::divide(t, a, b),
        (Bin::Mod, true) => return remainder::floored(t, a, b),
        (Bin::Mod, false) => return integer::floored_remainder(t, a, b),
        (Bin::Rem, true) => return remainder::truncated(t, a, b),
        (Bin::Rem, false) => return integer::remainder(t, a, b),
        (Bin::Pow, true) => return power::power(t, a, b),
        (Bin::Pow, false) => return integer::power(t, a, b),
        (Bin::Max, false) => "arith.maxsi",
        (Bin::Min, false) => "arith.minsi",
    };
    t.same(op, &[a, b])
}

pub(crate) fn compare(t: &mut Text, f: CompareFn, a: Val, b: Val) -> Val {
    if a.elem == Elem::F32 {
        let predicate = match f {
            CompareFn::Eq => "oeq",
            CompareFn::Ne => "une",
            CompareFn::Lt => "olt",
            CompareFn::Le => "ole",
            CompareFn::Gt => "ogt",
            CompareFn::Ge => "oge",
        };
        return t.cmpf(predicate, a, b);
    }
    // Bools compare as 0 and 1.
    let unsigned = a.elem == Elem::I1;
    let predicate = match (f, unsigned) {
        (CompareFn::Eq, _) => "eq",
        (CompareFn::Ne, _) => "ne",
        (CompareFn::Lt, false) => "slt",
        (CompareFn::Le, false) => "sle",
        (CompareFn::Gt, false) => "sgt",
        (CompareFn::Ge, false) => "sge",
        (CompareFn::Lt, true) => "ult",
        (CompareFn::Le, true) => "ule",
        (CompareFn::Gt, true) => "ugt",
        (CompareFn::Ge, true) => "uge",
    };
    t.cmpi(predicate, a, b)
}

/// Casts as [`frit_ir::Tensor::cast`]: floats truncate toward zero and saturate, NaN becomes 0,
/// anything but 0 is true.
pub(crate) fn convert(t: &mut Text, a: Val, to: Ty) -> Val {
    match (a.elem, to) {
        (Elem::F32, Ty::Bool) => {
            let zero = t.float(0.0, a.width);
            t.cmpf("une", a, zero)
        }
        (Elem::F32, Ty::I64) => saturate(t, a, Elem::I64, DType::I64),
        (Elem::F32, Ty::I32) => saturate(t, a, Elem::I32, DType::I32),
        (Elem::I1, Ty::F32) => t.convert("arith.uitofp", a, Elem::F32),
        (_, Ty::F32) => t.convert("arith.sitofp", a, Elem::F32),
        (Elem::I1, to) => t.convert("arith.extui", a, elem(to)),
        (_, Ty::Bool) => {
            let zero = t.int(0, a.elem, a.width);
            t.cmpi("ne", a, zero)
        }
        (Elem::I64, Ty::I32) => t.convert("arith.trunci", a, Elem::I32),
        (Elem::I32, Ty::I64) => t.convert("arith.extsi", a, Elem::I64),
        _ => a,
    }
}

fn saturate(t: &mut Text, a: Val, elem: Elem, dtype: DType) -> Val {
    let width = a.width;
    let (low, high) = match dtype {
        DType::I64 => (i64::MIN, i64::MAX),
        _ => (i32::MIN.into(), i32::MAX.into()),
    };
    // The conversion is undefined outside; 2⁶³ and 2³¹ are the first floats above.
    let (least, above) = (t.float(low as f32, width), t.float(high as f32, width));
    let zero = t.float(0.0, width);
    let inside = t.cmpf("oge", a, least);
    let below_high = t.cmpf("olt", a, above);
    let inside = t.same("arith.andi", &[inside, below_high]);
    let safe = t.select(inside, a, zero);
    let value = t.convert("arith.fptosi", safe, elem);
    let (low, high) = (t.int(low, elem, width), t.int(high, elem, width));
    let under = t.cmpf("olt", a, least);
    let value = t.select(under, low, value);
    let over = t.cmpf("oge", a, above);
    t.select(over, high, value)
}
