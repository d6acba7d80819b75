//! Elementwise operations.

use super::super::draw::{Case, Draw, Kind};
use frit_ir::DType;
use frit_ir::ops::{BinaryFn, Cast, Clip, EnterPrecision, LeavePrecision, Op, UnaryFn};

pub(super) fn cases(draw: &mut Draw) -> Vec<Case> {
    let mut all = Vec::new();
    for f in UnaryFn::ALL.iter().filter(|f| **f != UnaryFn::Not) {
        use UnaryFn::*;
        let (from, to) = match f {
            Log | Sqrt | Rsqrt | Reciprocal => (0.6, 3.0),
            Log1p | Asin | Acos | Atanh => (-0.8, 0.8),
            Acosh => (1.3, 3.0),
            Tan => (-1.1, 1.1),
            _ => (-2.0, 2.0),
        };
        let shape = draw.shape(2);
        let x = draw.between(from, to, shape);
        let n = if *f == Detach { x.0.numel() } else { 0 };
        all.push(draw.case(Op::Unary(*f), vec![x]).flat(0..n));
    }
    let bounds = [(None, None), (Some(-0.5), None), (None, Some(1.0)), (Some(-1.0), Some(0.5))];
    let same = [
        Op::Cast(Cast { to: draw.one_of(&[DType::F64, DType::F32, DType::F16]) }),
        Op::EnterPrecision(EnterPrecision { call: 0, dtype: DType::F32 }),
        Op::LeavePrecision(LeavePrecision { call: 0 }),
    ];
    let clips = bounds.map(|(min, max)| Op::Clip(Clip { min, max }));
    for op in clips.into_iter().chain(same) {
        let x = draw.floats([3, 4]);
        all.push(draw.case(op, vec![x]));
    }
    binary(draw, &mut all);
    all
}

fn binary(draw: &mut Draw, all: &mut Vec<Case>) {
    use BinaryFn::*;
    for f in [Add, Sub, Mul, Div, Max, Min, Add, Sub, Mul, Div, Max, Min] {
        let (a, b) = draw.broadcast();
        let (a, b) = (draw.floats(a), if f == Div { draw.nonzero(b) } else { draw.floats(b) });
        // Elements of both may be near each other.
        let apart = |a: &[f64], b: &[f64]| a.iter().all(|a| b.iter().all(|b| (a - b).abs() > 5e-3));
        if apart(&a.0.to_f64s(), &b.0.to_f64s()) {
            all.push(draw.case(Op::Binary(f), vec![a, b]));
        }
    }
    for f in [Max, Min] {
        let a = draw.floats([2, 3]);
        all.push(draw.case(Op::Binary(f), vec![a.clone(), a]));
    }
    for f in [Mod, Fmod] {
        let b = draw.nonzero([3, 3]);
        let quotient = |_| draw.one_of(&[-3.0, -2.0, -1.0, 0.0, 1.0, 2.0]) + draw.uniform(0.2, 0.8);
        let quotients: Vec<f64> = (0..9).map(quotient).collect();
        let a = quotients.iter().zip(b.0.to_f64s()).map(|(q, b)| q * b).collect();
        let a = draw.tensor([3, 3], a);
        all.push(draw.case(Op::Binary(f), vec![a, b]));
    }
    let (a, b) = draw.broadcast();
    let (a, b) = (draw.between(0.6, 2.0, a), draw.floats(b));
    all.push(draw.case(Op::Binary(Pow), vec![a, b]));
    for exponent in [2.0, 3.0, -1.0, 0.0] {
        let a = draw.nonzero([2, 3]);
        let (b, _) = draw.tensor([], vec![exponent]);
        all.push(draw.case(Op::Binary(Pow), vec![a, (b, Kind::Constant)]));
    }
    // Zeros: of the base, where the exponents are whole numbers, and of the exponent.
    let a = draw.tensor([4], vec![0.0, 0.0, 0.0, -1.25]);
    let b = draw.tensor([4], vec![0.0, 1.0, 2.0, 0.0]);
    all.push(draw.case(Op::Binary(Pow), vec![a, b]).given(1));
    let a = draw.tensor([4], vec![0.0, 0.75, 0.0, 1.5]);
    let b = draw.tensor([4], vec![0.5, 0.0, 2.0, -1.0]);
    all.push(draw.case(Op::Binary(Pow), vec![a, b]).given(0));
    for _ in 0..3 {
        let (a, b) = draw.broadcast();
        let condition = if a.len() > b.len() { a.clone() } else { b.clone() };
        let (condition, a, b) = (draw.bools(condition), draw.floats(a), draw.floats(b));
        all.push(draw.case(Op::Select, vec![condition, a, b]));
    }
}
