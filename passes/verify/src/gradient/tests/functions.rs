//! Functions that state their own gradient.

use super::{add, add_loss, param};
use crate::gradient::differentiated;
use frit_ir::interpret::{Options, run};
use frit_ir::ops::*;
use frit_ir::verify::verify;
use frit_ir::{DType, Graph, OutputKind, Region, Tensor, TensorType, ValueId};
use std::collections::HashMap;

const WEIGHTS: [f64; 4] = [1.0, -2.0, 0.25, 8.0];

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

/// Results `y` of a function of `x` whose gradient is what `gradient` makes of their cotangents.
fn call(
    g: &mut Graph,
    number: u32,
    (y, x): (&[ValueId], ValueId),
    gradient: impl Fn(&mut Graph, &[ValueId]) -> ValueId,
) -> Vec<ValueId> {
    let of = |g: &mut Graph, (result, y): (usize, &ValueId)| {
        add(g, Op::Cotangent(Cotangent { call: number, result }), &[*y])[0]
    };
    let dy: Vec<ValueId> = y.iter().enumerate().map(|y| of(g, y)).collect();
    let dx = gradient(g, &dy);
    let op = CustomGradient { call: number, results: y.len(), function: "f".into() };
    add(g, Op::CustomGradient(op), &[y, &[x, dx]].concat())
}

/// The gradient of the sum of weighted values of `x`, times the loss scale over the capacity, and the graph with it.
fn gradient(
    x: [f64; 4],
    (scale, capacity): (f64, f64),
    build: impl Fn(&mut Graph, ValueId) -> Vec<ValueId>,
) -> (Vec<f64>, Graph) {
    let mut g = Graph::new("g");
    let ty = TensorType::new(DType::F32, [4]);
    let leaf = add(&mut g, param("x", ty, ParamKind::Trainable), &[])[0];
    let values = build(&mut g, leaf);
    let weighted: Vec<_> = values.iter().map(|y| (*y, WEIGHTS.to_vec())).collect();
    add_loss(&mut g, &weighted);
    let found = differentiated(&g, 1, capacity).unwrap_or_else(|e| panic!("{e}"));
    verify(&found).unwrap_or_else(|broken| panic!("{broken:?}\n{found}"));
    let feeds = HashMap::from([
        ("x".to_string(), Tensor::floats(DType::F32, [4], x.to_vec())),
        ("loss_scale".to_string(), Tensor::scalar(scale)),
    ]);
    let results = run(&found, &feeds, Options::EXACT).unwrap_or_else(|e| panic!("{e}\n{found}"));
    let named = |kind| found.outputs.iter().position(|o| o.kind == kind);
    let at = named(OutputKind::Gradient);
    (at.map_or(vec![0.0; 4], |at| results[at].1.to_f64s()), found)
}

/// How often the seed is read.
fn scales(graph: &Graph) -> usize {
    let seeds = graph.nodes().filter(|(_, node)| matches!(node.op, Op::LossScale(_)));
    let seed = seeds.map(|(_, node)| node.outputs[0]).next().expect("a seed");
    graph.nodes().filter(|(_, node)| node.inputs.contains(&seed)).count()
}

#[test]
fn the_stated_gradient_takes_the_place_of_the_functions_own() {
    let (found, graph) = gradient([0.2, 1.7, -3.5, 9.0], (1.0, 1.0), |g, x| {
        let y = unary(g, UnaryFn::Round, x);
        call(g, 0, (&[y], x), |_, dy| dy[0])
    });
    assert_eq!((found, scales(&graph)), (WEIGHTS.to_vec(), 1));
    // Two calls with one result, and what reads the operand itself.
    let (found, _) = gradient([1.0; 4], (1.0, 1.0), |g, x| {
        let by = |g: &mut Graph, number_of: u32, factor| {
            call(g, number_of, (&[x], x), |g, dy| {
                let factor = number(g, factor);
                binary(g, BinaryFn::Mul, dy[0], factor)
            })[0]
        };
        let (a, b) = (by(g, 0, -0.5), by(g, 1, -3.0));
        let sum = binary(g, BinaryFn::Add, a, b);
        vec![binary(g, BinaryFn::Add, sum, x)]
    });
    assert_eq!(found, WEIGHTS.map(|w| -2.5 * w));
}

#[test]
fn a_result_that_is_not_read_has_a_cotangent_of_zero() {
    for (first, second) in [(true, true), (true, false), (false, true)] {
        let (found, _) = gradient([1.0, 2.0, 3.0, 4.0], (2.0, 8.0), |g, x| {
            let (y, z) = (unary(g, UnaryFn::Exp, x), unary(g, UnaryFn::Sin, x));
            // dx = 3·dy·x + dz
            let results = call(g, 0, (&[y, z], x), |g, dy| {
                let three = number(g, 3.0);
                let product = binary(g, BinaryFn::Mul, dy[0], x);
                let product = binary(g, BinaryFn::Mul, product, three);
                binary(g, BinaryFn::Add, product, dy[1])
            });
            let read = [first, second].into_iter().zip(results);
            read.filter_map(|(read, y)| read.then_some(y)).collect()
        });
        let (a, b) = (f64::from(u8::from(first)), f64::from(u8::from(second)));
        let expected = (0..4).map(|i| WEIGHTS[i] * (3.0 * a * (i + 1) as f64 + b) / 4.0);
        assert_eq!(found, expected.collect::<Vec<f64>>(), "{first} {second}");
    }
}

#[test]
fn what_is_not_homogeneous_in_the_cotangents_is_given_them_without_the_scale() {
    type Build = fn(&mut Graph, ValueId, ValueId) -> ValueId;
    let clip: Build =
        |g, dy, _| add(g, Op::Clip(Clip { min: Some(-0.5), max: Some(0.5) }), &[dy])[0];
    let square: Build = |g, dy, _| binary(g, BinaryFn::Mul, dy, dy);
    let shifted: Build = |g, dy, _| {
        let one = number(g, 1.0);
        binary(g, BinaryFn::Add, dy, one)
    };
    let constant: Build = |g, _, x| unary(g, UnaryFn::Neg, x);
    let divisor: Build = |g, dy, x| binary(g, BinaryFn::Div, x, dy);
    let plus_zero: Build = |g, dy, _| {
        let zero = number(g, 0.0);
        binary(g, BinaryFn::Sub, zero, dy)
    };
    // The mean over four elements has a quarter of the gradient of their sum. The seed is read to seed, to divide and to multiply.
    let mean = WEIGHTS.map(|w| w / 4.0);
    let cases: [(Build, [f64; 4], usize); 6] = [
        (clip, [0.25, -0.5, 0.0625, 0.5], 3),
        (square, mean.map(|dy| dy * dy), 3),
        (shifted, mean.map(|dy| dy + 1.0), 3),
        (constant, [-2.0; 4], 1),
        (divisor, mean.map(|dy| 2.0 / dy), 3),
        (plus_zero, mean.map(|dy| -dy), 1),
    ];
    for (at, (build, expected, n_scales)) in cases.into_iter().enumerate() {
        for scale in [1.0, 1024.0, 1.0 / 64.0] {
            let (found, graph) = gradient([2.0; 4], (scale, 4.0), |g, x| {
                call(g, 0, (&[x], x), |g, dy| build(g, dy[0], x))
            });
            assert_eq!(found, expected.map(|dx| dx * scale), "{at}: {scale}");
            assert_eq!(scales(&graph), n_scales, "{at}");
        }
    }
}

#[test]
fn boundaries_of_precision_are_the_identity_in_a_stated_gradient() {
    let (found, graph) = gradient([1.0; 4], (4.0, 1.0), |g, x| {
        call(g, 0, (&[x], x), |g, dy| {
            let enter = EnterPrecision { call: 1, dtype: DType::F32 };
            let inside = add(g, Op::EnterPrecision(enter), &[dy[0]])[0];
            let inside = unary(g, UnaryFn::Neg, inside);
            add(g, Op::LeavePrecision(LeavePrecision { call: 1 }), &[inside])[0]
        })
    });
    assert_eq!(found, WEIGHTS.map(|w| -4.0 * w));
    let boundary = |op: &Op| matches!(op, Op::EnterPrecision(_) | Op::LeavePrecision(_));
    let mut written = graph.nodes().filter(|(_, node)| node.region == Region::Backward);
    assert!(written.all(|(_, node)| !boundary(&node.op)), "{graph}");
}
