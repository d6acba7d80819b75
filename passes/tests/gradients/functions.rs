//! Functions with a gradient or a precision of their own.

use super::{add, check, trainable};
use frit_ir::interpret::{Options, run};
use frit_ir::ops::*;
use frit_ir::{
    DType, Graph, Op, Origin, OutputKind, Region, Tensor, TensorType, ValueId, text, verify,
};
use frit_passes::differentiate::Differentiate;
use frit_passes::strip_functions::StripFunctions;
use frit_passes::{Changed, Pass, PassContext};
use std::collections::HashMap;

fn unary(g: &mut Graph, f: UnaryFn, x: ValueId) -> ValueId {
    add(g, Op::Unary(f), &[x])[0]
}

fn binary(g: &mut Graph, f: BinaryFn, a: ValueId, b: ValueId) -> ValueId {
    add(g, Op::Binary(f), &[a, b])[0]
}

fn number(g: &mut Graph, value: f64) -> ValueId {
    let value = Tensor::splat(TensorType::scalar(DType::F32), value);
    add(g, Op::Constant(Constant { value }), &[])[0]
}

/// What `gradient` makes of the cotangent of `y` is the gradient of `x`.
fn custom(
    g: &mut Graph,
    call: u32,
    (y, x): (ValueId, ValueId),
    gradient: impl Fn(&mut Graph, ValueId) -> ValueId,
) -> ValueId {
    let dy = add(g, Op::Cotangent(Cotangent { call, result: 0 }), &[y])[0];
    let dx = gradient(g, dy);
    let op = CustomGradient { call, results: 1, function: "f".into() };
    add(g, Op::CustomGradient(op), &[y, x, dx])[0]
}

/// Gradients of Σ wᵢ·yᵢ for the parameter `x` of some values, with the loss scaled by `scale` / `capacity`.
fn gradient(
    values: &[f64],
    weights: &[f64],
    (scale, capacity): (f64, f64),
    build: impl Fn(&mut Graph, ValueId) -> ValueId,
) -> Vec<f64> {
    let mut g = Graph::new("g");
    let ty = TensorType::new(DType::F32, [values.len()]);
    let x = add(&mut g, Op::Param(trainable("x", ty)), &[])[0];
    let y = build(&mut g, x);
    let weights = Tensor::floats(DType::F32, [weights.len()], weights.to_vec());
    let w = add(&mut g, Op::Constant(Constant { value: weights }), &[])[0];
    let product = binary(&mut g, BinaryFn::Mul, y, w);
    let sum = Op::Reduce(Reduce { f: ReduceFn::Sum, axes: vec![0], keep_dims: false });
    let loss = add(&mut g, sum, &[product])[0];
    g.add_output("loss", loss, OutputKind::LossSum);
    verify::verify(&g).unwrap_or_else(|broken| panic!("{broken:?}\n{g}"));
    let pass = Differentiate { accumulation: 1, capacity };
    pass.run(&mut g, &mut PassContext::default()).unwrap_or_else(|e| panic!("{e}"));
    verify::verify(&g).unwrap_or_else(|broken| panic!("{broken:?}\n{g}"));
    StripFunctions::default().run(&mut g, &mut PassContext::default()).expect("strips");
    verify::verify(&g).unwrap_or_else(|broken| panic!("{broken:?}\n{g}"));
    let boundary = |op: &Op| matches!(op, Op::CustomGradient(_) | Op::Cotangent(_));
    assert!(g.nodes().all(|(_, n)| !boundary(&n.op)), "{g}");
    let feeds = HashMap::from([
        ("x".to_string(), Tensor::floats(DType::F32, [values.len()], values.to_vec())),
        ("loss_scale".to_string(), Tensor::scalar(scale)),
    ]);
    let results = run(&g, &feeds, Options::EXACT).unwrap_or_else(|e| panic!("{e}\n{g}"));
    let found = results.iter().find(|(name, _)| name == "x");
    found.map(|(_, t)| t.to_f64s()).unwrap_or_default()
}

const WEIGHTS: [f64; 4] = [1.0, -2.0, 0.25, 8.0];

#[test]
fn a_straight_through_estimator_passes_the_cotangent_on() {
    let found = gradient(&[0.2, 1.7, -3.5, 9.0], &WEIGHTS, (1.0, 1.0), |g, x| {
        let y = unary(g, UnaryFn::Round, x);
        custom(g, 0, (y, x), |_, dy| dy)
    });
    assert_eq!(found, WEIGHTS);
}

#[test]
fn reversals_of_equal_values_by_different_factors_stay_apart() {
    // The identity: both calls have the same result, which is their operand.
    let found = gradient(&[1.0; 4], &WEIGHTS, (1.0, 1.0), |g, x| {
        let once = |g: &mut Graph, call, factor| {
            custom(g, call, (x, x), |g, dy| {
                let factor = number(g, factor);
                binary(g, BinaryFn::Mul, dy, factor)
            })
        };
        let (a, b) = (once(g, 0, -0.5), once(g, 1, -3.0));
        let sum = binary(g, BinaryFn::Add, a, b);
        // What reads the operand itself is no part of either.
        binary(g, BinaryFn::Add, sum, x)
    });
    assert_eq!(found, WEIGHTS.map(|w| -2.5 * w));
}

#[test]
fn what_is_not_linear_in_the_cotangent_never_sees_the_loss_scale() {
    let clip = |g: &mut Graph, x| {
        custom(g, 0, (x, x), |g, dy| {
            let op = Clip { min: Some(-0.5), max: Some(0.5) };
            add(g, Op::Clip(op), &[dy])[0]
        })
    };
    // The mean over four elements has a quarter of the gradient of their sum.
    let expected = [0.25, -0.5, 0.0625, 0.5];
    for scale in [1.0, 1024.0, 1.0 / 64.0] {
        let found = gradient(&[1.0; 4], &WEIGHTS, (scale, 4.0), clip);
        assert_eq!(found, expected.map(|dx| dx * scale), "{scale}");
    }
    // A gradient that does not depend on the cotangent at all is scaled too.
    let constant = |g: &mut Graph, x| custom(g, 0, (x, x), |g, _| unary(g, UnaryFn::Exp, x));
    let found = gradient(&[0.0; 4], &WEIGHTS, (256.0, 4.0), constant);
    assert_eq!(found, [256.0; 4]);
}

#[test]
fn a_gradient_reads_what_its_function_computed() {
    // log(1 + eˣ), with σ(x)·dy; the naive form of the function overflows.
    let values = [-2.0, 0.0, 3.0, 50.0];
    let stable = gradient(&values, &WEIGHTS, (1.0, 1.0), |g, x| {
        let e = unary(g, UnaryFn::Exp, x);
        let y = unary(g, UnaryFn::Log1p, e);
        custom(g, 0, (y, x), |g, dy| {
            let slope = unary(g, UnaryFn::Sigmoid, x);
            binary(g, BinaryFn::Mul, dy, slope)
        })
    });
    for ((x, w), found) in values.iter().zip(WEIGHTS).zip(&stable) {
        let expected = w / (1.0 + (-x).exp());
        assert!((found - expected).abs() < 1e-12, "{found}, not {expected}");
    }
    // The result itself: y = eˣ, dx = dy·y.
    let of_result = gradient(&[0.5; 4], &WEIGHTS, (1.0, 1.0), |g, x| {
        let y = unary(g, UnaryFn::Exp, x);
        custom(g, 0, (y, x), |g, dy| binary(g, BinaryFn::Mul, dy, y))
    });
    for (w, found) in WEIGHTS.iter().zip(of_result) {
        assert!((found - w * 0.5f64.exp()).abs() < 1e-12);
    }
}

#[test]
fn results_that_nobody_reads_have_a_cotangent_of_zeros() {
    let found = gradient(&[1.0, 2.0, 3.0, 4.0], &WEIGHTS, (1.0, 1.0), |g, x| {
        let (y, z) = (unary(g, UnaryFn::Neg, x), unary(g, UnaryFn::Exp, x));
        let cotangent = |g: &mut Graph, result, y| {
            add(g, Op::Cotangent(Cotangent { call: 0, result }), &[y])[0]
        };
        let (dy, dz) = (cotangent(g, 0, y), cotangent(g, 1, z));
        let dz = binary(g, BinaryFn::Mul, dz, z);
        let dx = binary(g, BinaryFn::Add, dy, dz);
        let op = CustomGradient { call: 0, results: 2, function: "f".into() };
        add(g, Op::CustomGradient(op), &[y, z, x, dx])[0]
    });
    assert_eq!(found, WEIGHTS);
}

#[test]
fn an_input_without_a_gradient_ends_the_gradient_there() {
    let found = gradient(&[1.0; 4], &WEIGHTS, (1.0, 1.0), |g, x| {
        let y = unary(g, UnaryFn::Exp, x);
        let op = CustomGradient { call: 0, results: 1, function: "f".into() };
        add(g, Op::CustomGradient(op), &[y])[0]
    });
    assert_eq!(found, [0.0; 0]);
}

/// A call between boundaries of a precision, with its own gradient or with that of its operations.
fn product(g: &mut Graph, a: ValueId, b: ValueId, own: bool) -> ValueId {
    let enter = |g: &mut Graph, v| {
        add(g, Op::EnterPrecision(EnterPrecision { call: 0, dtype: DType::F32 }), &[v])[0]
    };
    let (x, z) = (enter(g, a), enter(g, b));
    let mut y = binary(g, BinaryFn::Mul, x, z);
    if own {
        let dy = add(g, Op::Cotangent(Cotangent { call: 0, result: 0 }), &[y])[0];
        let (dx, dz) = (binary(g, BinaryFn::Mul, dy, z), binary(g, BinaryFn::Mul, dy, x));
        let op = CustomGradient { call: 0, results: 1, function: "f".into() };
        y = add(g, Op::CustomGradient(op), &[y, a, b, dx, dz])[0];
    }
    add(g, Op::LeavePrecision(LeavePrecision { call: 0 }), &[y])[0]
}

#[test]
fn a_precision_does_not_change_a_gradient() {
    for own in [false, true] {
        check("a product in a precision of its own", &[&[3], &[3]], |g, p| {
            product(g, p[0], p[1], own)
        });
    }
}

#[test]
fn boundaries_are_stripped_and_nothing_else() {
    let mut g = text::parse(
        r#"graph @g world=1 {
  %x: f32[2] = input {name = "x", ty = {"dtype": "f32", "shape": [2]}}
  %y: f32[2] = exp %x
  return %y as "y"
}"#,
    )
    .expect("parses");
    let before = g.clone();
    let pass = StripFunctions::default();
    assert_eq!(pass.run(&mut g, &mut PassContext::default()), Ok(Changed::No));
    assert_eq!(g, before);
    let enter = Op::EnterPrecision(EnterPrecision { call: 0, dtype: DType::BF16 });
    let (x, y) = (g.nodes().next().map(|(_, n)| n.outputs[0]), g.outputs[0].value);
    let inside = g.add1(enter, &[y], Origin::none(), Region::Forward).expect("fits");
    let leave = Op::LeavePrecision(LeavePrecision { call: 0 });
    g.outputs[0].value = g.add1(leave, &[inside], Origin::none(), Region::Forward).expect("fits");
    assert!(x.is_some());
    let eighth = StripFunctions { fp8: true };
    let refused = eighth.run(&mut g.clone(), &mut PassContext::default()).expect_err("refused");
    assert_eq!(refused.code, "E057");
    assert_eq!(pass.run(&mut g, &mut PassContext::default()), Ok(Changed::Yes));
    assert_eq!(g.to_string(), before.to_string());
}
