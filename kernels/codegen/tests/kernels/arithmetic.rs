//! Powers, remainders, and integer division and bytes, on the host and on the PTX machine.

use crate::harness::{Body, Case, check, check_everywhere};
use frit_ir::ops::{BinaryFn, Cast, FusionKind, UnaryFn};
use frit_ir::{DType, Op, Tensor};

/// `f` of every pair of `a` and `b`.
fn every_pair(f: BinaryFn, a: &[f64], b: &[f64], tolerance: f64, is: fn(f64, f64) -> f64) -> Case {
    let [a, b] = [a, b].map(|x| x.iter().map(|x| f64::from(*x as f32)).collect::<Vec<f64>>());
    let mut body = Body::new();
    let x = body.input(DType::F32, &[a.len(), 1]);
    let y = body.input(DType::F32, &[b.len()]);
    let z = body.one(Op::Binary(f), &[x, y]);
    let round = |x: f64| f64::from(x as f32);
    Case {
        name: f.name().into(),
        body: body.done(&[z]),
        kind: FusionKind::Pointwise,
        expected: vec![a.iter().flat_map(|&a| b.iter().map(move |&b| round(is(a, b)))).collect()],
        inputs: vec![
            Tensor::floats(DType::F32, [a.len(), 1], a),
            Tensor::floats(DType::F32, [b.len()], b),
        ],
        tolerance,
        floor: 0.0,
    }
}

const INF: f64 = f64::INFINITY;
/// The smallest normal f32 and the smallest subnormal one.
const TINY: [f64; 2] = [1.175_494_350_822_287_5e-38, 1.401_298_464_324_817e-45];

#[test]
fn powers_are_those_of_c() {
    let special =
        [0.0, -0.0, 1.0, -1.0, INF, -INF, f64::NAN, TINY[0], TINY[1], -TINY[1], 3e38, -3e38];
    let bases = [0.5, 0.999_999, 1.000_001, 2.0, 3.7, 10.0, 1e-20, 1e20, -0.3, -2.0, -3.5, -1e10];
    let exponents =
        [0.75, 1.5, -0.25, 2.0, 3.0, -1.0, -3.0, 17.0, 0.1, 30.5, -38.2, 16_777_215.0, 1e30, 1e-30];
    let with = |x: &[f64]| [x, &special].concat();
    // Half an ulp, and what f64 loses.
    let tolerance = 1.0 / 16_777_216.0 * 1.01;
    let mut case =
        every_pair(BinaryFn::Pow, &with(&bases), &with(&exponents), tolerance, f64::powf);
    // Subnormal results are rounded to a multiple of the smallest.
    case.floor = TINY[0];
    check_everywhere(&[case], 1.0);
}

#[test]
fn powers_between_zero_and_four_are_rounded_once() {
    let bases: Vec<f64> = (1..400).map(|i| f64::from(i) * 0.01).collect();
    let exponents: Vec<f64> = (-40..40).map(|i| f64::from(i) * 0.37).collect();
    let tolerance = 1.0 / 16_777_216.0 * 1.01;
    check(&[every_pair(BinaryFn::Pow, &bases, &exponents, tolerance, f64::powf)]);
}

#[test]
fn remainders_are_exact() {
    let numbers = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.1,
        -0.3,
        7.25,
        -7.25,
        1e-30,
        1e30,
        3.4e38,
        -3.4e38,
        5.0,
        TINY[0],
        TINY[1],
        -TINY[1],
        16_777_217.0,
        0.333_333_34,
        INF,
        -INF,
        f64::NAN,
        2e-38,
        123_456.79,
    ];
    // Rust's remainder of f64 is exact.
    check_everywhere(
        &[
            every_pair(BinaryFn::Fmod, &numbers, &numbers, 0.0, |a, b| a % b),
            every_pair(BinaryFn::Mod, &numbers, &numbers, 0.0, |a, b| {
                let r = a % b;
                if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }
            }),
        ],
        1.0,
    );
}

/// Operations on integers that have results for every operand.
const INTEGER: [BinaryFn; 8] = {
    use BinaryFn::*;
    [Add, Sub, Mul, Div, Mod, Fmod, Max, Pow]
};

fn integer(f: BinaryFn, a: i128, b: i128) -> i128 {
    let by = if b == 0 { 1 } else { b };
    let power = |a: i128, n: i128| (0..n).fold(1i128, |p, _| (p * a) as i64 as i128);
    match f {
        BinaryFn::Add => a + b,
        BinaryFn::Sub => a - b,
        BinaryFn::Mul => a * b,
        BinaryFn::Div if b == 0 => 0,
        BinaryFn::Div => a / b,
        BinaryFn::Mod => (a % by + by) % by,
        BinaryFn::Fmod => a % by,
        BinaryFn::Max => a.max(b),
        BinaryFn::Pow if b >= 0 => power(a, b),
        BinaryFn::Pow if a.abs() == 1 => power(a, -b),
        BinaryFn::Pow => 0,
        _ => unreachable!(),
    }
}

#[test]
fn integers_wrap_and_a_divisor_of_zero_gives_zero() {
    let mut cases = Vec::new();
    for (dtype, least) in
        [(DType::I64, i128::from(i64::MIN)), (DType::I32, i128::from(i32::MIN)), (DType::U8, 0)]
    {
        let most = if least == 0 { 255 } else { -least - 1 };
        let numbers: Vec<i128> = [least, most, -17, -5, -2, -1, 0, 1, 2, 3, 7, 11, 40, 64]
            .into_iter()
            .filter(|x| (least..=most).contains(x))
            .collect();
        // Only small exponents: the reference multiplies repeatedly.
        let few: Vec<i128> = numbers.iter().copied().filter(|x| x.abs() < 256).collect();
        let wrap = |x: i128| match dtype {
            DType::I64 => x as i64,
            DType::I32 => i64::from(x as i32),
            _ => i64::from(x as u8),
        };
        let pairs: Vec<(i128, i128)> =
            numbers.iter().flat_map(|&a| few.iter().map(move |&b| (a, b))).collect();
        let mut body = Body::new();
        let (a, b) = (body.input(dtype, &[pairs.len()]), body.input(dtype, &[pairs.len()]));
        let mut outputs: Vec<_> =
            INTEGER.iter().map(|f| body.one(Op::Binary(*f), &[a, b])).collect();
        let mut expected: Vec<Vec<f64>> = INTEGER
            .iter()
            .map(|f| pairs.iter().map(|&(a, b)| wrap(integer(*f, a, b)) as f64).collect())
            .collect();
        outputs.push(body.one(Op::Unary(UnaryFn::Neg), &[a]));
        expected.push(pairs.iter().map(|&(a, _)| wrap(-a) as f64).collect());
        let inputs = [0, 1].map(|k| {
            let x = pairs.iter().map(|p| [p.0, p.1][k] as i64).collect();
            Tensor::ints(dtype, [pairs.len()], x)
        });
        cases.push(Case {
            name: format!("{dtype}"),
            body: body.done(&outputs),
            kind: FusionKind::Pointwise,
            inputs: inputs.into(),
            expected,
            tolerance: 0.0,
            floor: 0.0,
        });
    }
    check_everywhere(&cases, 1.0);
}

#[test]
fn bytes_from_other_types() {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::I64, DType::I32] {
        let numbers = [-1.0, 0.0, 1.0, 200.0, 255.0, 256.0, 300.0, -200.0, 70000.0];
        let input = match dtype.is_float() {
            true => Tensor::floats(dtype, [9], numbers.to_vec()),
            false => Tensor::ints(dtype, [9], numbers.iter().map(|&x| x as i64).collect()),
        };
        let mut body = Body::new();
        let x = body.input(dtype, &[9]);
        let y = body.one(Op::Cast(Cast { to: DType::U8 }), &[x]);
        cases.push(Case {
            name: format!("{dtype} to a byte"),
            body: body.done(&[y]),
            kind: FusionKind::Pointwise,
            expected: vec![input.cast(DType::U8).to_f64s()],
            inputs: vec![input],
            tolerance: 0.0,
            floor: 0.0,
        });
    }
    check_everywhere(&cases, 1.0);
}
