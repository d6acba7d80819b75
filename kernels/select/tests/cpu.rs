//! CPU routines against the interpreter, on windows with unusual strides, dilations and padding.

use frit_ir::interpret::{Options, eval_op, run};
use frit_ir::ops::*;
use frit_ir::plan::{self, Source};
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, Tensor, TensorType, ValueId};
use frit_kernels::pool::Pool;
use frit_kernels::routine::{Operand, Routine};
use std::collections::HashMap;

/// Distinct numbers that f32 and bf16 hold exactly.
fn operand(dtype: DType, shape: &[usize], seed: usize) -> Tensor {
    let n = shape.iter().product();
    let value = |i: usize| ((i * 37 + seed * 11) % 61) as f64 / 8.0 - 3.5;
    Tensor::floats(dtype, shape, (0..n).map(value).collect())
}

fn bytes(tensor: &Tensor) -> Vec<u64> {
    let raw = tensor.to_bytes();
    raw.chunks(8).map(|c| c.iter().rev().fold(0, |word, b| word << 8 | u64::from(*b))).collect()
}

/// The name and the value of an operand.
fn fed(i: usize) -> String {
    format!("x{i}")
}

/// A graph with these operands, and their values.
fn graph_of(operands: &[Tensor]) -> (Graph, Vec<ValueId>) {
    let mut body = Graph::new("body");
    let inputs = operands.iter().enumerate().map(|(i, t)| {
        let input = Op::Input(Input { name: fed(i), ty: t.ty.clone() });
        body.add1(input, &[], Origin::none(), Region::Forward).expect("input")
    });
    let inputs = inputs.collect();
    (body, inputs)
}

/// Runs the routine of the operation on two pools and compares with the interpreter.
fn check(op: Op, operands: &[Tensor]) {
    let (mut body, inputs) = graph_of(operands);
    let outputs = body.add(op.clone(), &inputs, Origin::none(), Region::Forward);
    let outputs = outputs.unwrap_or_else(|e| panic!("{op:?}: {e}"));
    for (i, value) in outputs.iter().enumerate() {
        body.add_output(&i.to_string(), *value, OutputKind::Result);
    }
    let selected = check_body(&body, operands);
    assert_eq!((selected.reads, selected.writes), (None, None));
}

/// Runs the routine of a body on two pools and compares with the interpreter.
fn check_body(body: &Graph, operands: &[Tensor]) -> plan::Routine {
    let selected = frit_select::cpu(body).unwrap_or_else(|| panic!("no routine for\n{body}"));
    let routine = serde_json::to_value(&selected.call).and_then(serde_json::from_value::<Routine>);
    let routine = routine.expect("a routine of the library");
    let feeds: HashMap<String, Tensor> =
        operands.iter().enumerate().map(|(i, t)| (fed(i), t.clone())).collect();
    let expected = run(body, &feeds, Options::default()).expect("values");
    let outputs: Vec<ValueId> = body.outputs.iter().map(|o| o.value).collect();
    for threads in [1, 3] {
        let pool = Pool::new(threads);
        let mut reads: Vec<Vec<u64>> = operands.iter().map(bytes).collect();
        let mut writes: Vec<Vec<u64>> =
            outputs.iter().map(|v| vec![u64::MAX; body.ty(*v).bytes().div_ceil(8)]).collect();
        let at = |words: &mut Vec<u64>, ty: &TensorType| Operand {
            pointer: words.as_mut_ptr().cast(),
            bytes: ty.bytes(),
        };
        let from: Vec<_> = reads.iter_mut().zip(operands).map(|(w, t)| at(w, &t.ty)).collect();
        let to: Vec<_> = writes.iter_mut().zip(&outputs).map(|(w, v)| at(w, body.ty(*v))).collect();
        let from = match &selected.reads {
            None => from,
            Some(sources) => {
                let operand = |source: &Source| match source {
                    Source::Operand(i, 0) => from[*i],
                    other => panic!("{other}"),
                };
                sources.iter().map(operand).collect()
            }
        };
        let to = match &selected.writes {
            None => to,
            Some(places) => places.iter().map(|(i, _)| to[*i]).collect(),
        };
        // SAFETY: the words are as many as the types ask for.
        unsafe { routine.run(&pool, &from, &to) }.expect("runs");
        for ((words, v), (_, expected)) in writes.iter().zip(&outputs).zip(&expected) {
            let raw: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let ty = body.ty(*v).clone();
            let found = Tensor::from_bytes(ty.clone(), &raw[..ty.bytes()]).expect("a tensor");
            let tolerance = if ty.dtype == DType::F32 { 1e-5 } else { 1e-2 };
            for (a, b) in found.to_f64s().iter().zip(expected.to_f64s()) {
                let error = (a - b).abs() / b.abs().max(1.0);
                assert!(error < tolerance, "{threads} threads: {a} for {b} of\n{body}");
            }
        }
    }
    selected
}

/// Spatial sizes, taps, stride, dilation, borders.
type Case = (&'static [usize], &'static [usize], usize, usize, [usize; 2]);

const WINDOWS: [Case; 7] = [
    (&[5], &[3], 1, 1, [1, 1]),
    (&[9], &[2], 3, 2, [0, 1]),
    (&[6, 7], &[3, 3], 1, 1, [1, 1]),
    (&[6, 7], &[1, 1], 1, 1, [0, 0]),
    (&[7, 6], &[3, 2], 2, 1, [1, 0]),
    (&[1, 8], &[1, 5], 1, 1, [0, 0]),
    (&[3, 4, 5], &[2, 2, 3], 2, 1, [1, 1]),
];

fn window(taps: &[usize], stride: usize, dilation: usize, [low, high]: [usize; 2]) -> Window {
    let of = |n: usize| taps.iter().map(|t| if *t > 1 { n } else { 0 }).collect();
    let rank = taps.len();
    Window {
        strides: vec![stride; rank],
        dilations: vec![dilation; rank],
        low: of(low),
        high: of(high),
    }
}

#[test]
fn convolutions() {
    for (sizes, taps, stride, dilation, borders) in WINDOWS {
        for (groups, channels, filters) in [(1, 3, 5), (2, 4, 6), (3, 3, 6), (4, 4, 4)] {
            for dtype in [DType::F32, DType::BF16] {
                let window = window(taps, stride, dilation, borders);
                let positions = window.positions(sizes, taps).expect("fits");
                let x = operand(dtype, &[&[2, channels], sizes].concat(), 1);
                let w = operand(dtype, &[&[filters, channels / groups], taps].concat(), 2);
                let dy = operand(dtype, &[&[2, filters], &positions[..]].concat(), 3);
                let out = Some(DType::F32);
                let conv = Conv { window: window.clone(), groups, out: None };
                check(Op::Conv(conv), &[x.clone(), w.clone()]);
                let conv = Conv { window: window.clone(), groups, out };
                check(Op::Conv(conv), &[x.clone(), w.clone()]);
                let size = sizes.to_vec();
                let grad = ConvGradInput { window: window.clone(), groups, size, out: None };
                check(Op::ConvGradInput(grad), &[dy.clone(), w]);
                let grad = ConvGradWeight { window, groups, taps: taps.to_vec(), out };
                check(Op::ConvGradWeight(grad), &[dy, x]);
            }
        }
    }
}

#[test]
fn pooling() {
    for (sizes, taps, stride, dilation, borders) in WINDOWS {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let (window, taps) = (window(taps, stride, dilation, borders), taps.to_vec());
            let positions = window.positions(sizes, &taps).expect("fits");
            let x = operand(dtype, &[&[2, 3], sizes].concat(), 1);
            let dy = operand(dtype, &[&[2, 3], &positions[..]].concat(), 3);
            let pool = MaxPool { window: window.clone(), taps: taps.clone() };
            check(Op::MaxPool(pool), std::slice::from_ref(&x));
            let grad = MaxPoolGrad { window: window.clone(), taps: taps.clone() };
            check(Op::MaxPoolGrad(grad), &[dy.clone(), x.clone()]);
            let pool = SumPool { window: window.clone(), taps: taps.clone() };
            check(Op::SumPool(pool), &[x]);
            let size = sizes.to_vec();
            check(Op::SumPoolGrad(SumPoolGrad { window, taps, size }), &[dy]);
        }
    }
}

#[test]
fn batch_normalization() {
    let few = [&[4, 3][..], &[70, 41], &[9, 37, 1, 3], &[2, 3, 5], &[3, 1, 4, 4], &[5, 40, 7, 7]];
    let many = [&[2, 3, 6, 6][..], &[2, 3, 11, 11], &[2, 3, 12, 12]];
    for shape in few.into_iter().chain(many) {
        for dtype in [DType::F32, DType::BF16] {
            let c = shape[1];
            let vector = |seed| operand(DType::F32, &[c], seed);
            let (x, dy) = (operand(dtype, shape, 1), operand(dtype, shape, 5));
            let op = BatchNorm { eps: 1e-5 };
            let statistics =
                eval_op(&Op::BatchNorm(op), &[&x, &vector(2), &vector(3)], Options::default())
                    .expect("statistics");
            check(Op::BatchNorm(op), &[x.clone(), vector(2), vector(3)]);
            let (mean, var) = (statistics[1].clone(), statistics[2].clone());
            let grad = BatchNormGrad { eps: 1e-5 };
            check(Op::BatchNormGrad(grad), &[dy, x, vector(2), mean, var]);
        }
    }
}

/// A batch normalization, and its gradient, with a ReLU, with and without a sum, of which either term may be the first, and with
/// and without the gradient that passes the ReLU as a result.
#[test]
fn batch_normalization_with_relu() {
    let mut bodies = 0;
    let cases = [
        (&[4, 3][..], DType::F32),
        (&[2, 3, 5], DType::F16),
        (&[3, 2, 8, 8], DType::BF16),
        (&[3, 2, 13, 13], DType::BF16),
        (&[2, 3, 40, 40], DType::F16),
    ];
    for (shape, dtype) in cases {
        let vector = |seed| operand(DType::F32, &[shape[1]], seed);
        let image = |seed| operand(dtype, shape, seed);
        let (x, scale, bias) = (image(1), vector(2), vector(3));
        let norm = Op::BatchNorm(BatchNorm { eps: 1e-5 });
        let statistics = eval_op(&norm, &[&x, &scale, &bias], Options::default());
        let [_, mean, var] = &statistics.expect("statistics")[..] else { panic!("three results") };
        for sum in [None, Some(0), Some(1)] {
            let forward = [x.clone(), scale.clone(), bias.clone(), image(4)];
            let operands = &forward[..if sum.is_some() { 4 } else { 3 }];
            let (mut body, v) = graph_of(operands);
            let mut add = |op: Op, inputs: &[ValueId]| {
                body.add(op, inputs, Origin::none(), Region::Forward).expect("a node")
            };
            let of_norm = add(norm.clone(), &v[..3]);
            let mut y = of_norm[0];
            if let Some(first) = sum {
                let terms = if first == 0 { [y, v[3]] } else { [v[3], y] };
                y = add(Op::Binary(BinaryFn::Add), &terms)[0];
            }
            let y = add(Op::Unary(UnaryFn::Relu), &[y])[0];
            for (i, value) in [of_norm[1], y, of_norm[2]].into_iter().enumerate() {
                body.add_output(&i.to_string(), value, OutputKind::Result);
            }
            check_body(&body, operands);
            for is_kept in [false, true] {
                let all = [
                    x.clone(),
                    scale.clone(),
                    mean.clone(),
                    var.clone(),
                    image(5),
                    image(6),
                    image(7),
                ];
                let operands = &all[..if sum.is_some() { 7 } else { 6 }];
                let (mut body, v) = graph_of(operands);
                let mut add = |op: Op, inputs: &[ValueId]| {
                    body.add(op, inputs, Origin::none(), Region::Backward).expect("a node")
                };
                let mut dy = v[4];
                if let Some(first) = sum {
                    let terms = if first == 0 { [dy, v[6]] } else { [v[6], dy] };
                    dy = add(Op::Binary(BinaryFn::Add), &terms)[0];
                }
                let passed = add(Op::Binary(BinaryFn::ReluGrad), &[dy, v[5]])[0];
                let gradient = Op::BatchNormGrad(BatchNormGrad { eps: 1e-5 });
                let results = add(gradient, &[passed, v[0], v[1], v[2], v[3]]);
                let kept = is_kept.then_some(passed);
                for (i, value) in kept.into_iter().chain(results).enumerate() {
                    body.add_output(&i.to_string(), value, OutputKind::Result);
                }
                check_body(&body, operands);
                bodies += 1;
            }
        }
    }
    assert_eq!(bodies, 6 * cases.len());
}

/// Bodies that are nearly such regions have no routine.
#[test]
fn other_operations_around_a_batch_normalization_have_no_routine() {
    let operands = [
        operand(DType::F32, &[2, 3, 4], 1),
        operand(DType::F32, &[3], 2),
        operand(DType::F32, &[3], 3),
        operand(DType::F32, &[4], 4),
    ];
    let norm = Op::BatchNorm(BatchNorm { eps: 1e-5 });
    type Sum = fn(ValueId, ValueId) -> [ValueId; 2];
    // Twice itself; a vector.
    let sums: [Sum; 2] = [|y, _| [y, y], |y, other| [y, other]];
    for sum in sums {
        let (mut body, v) = graph_of(&operands);
        let mut add = |op: Op, inputs: &[ValueId]| {
            body.add(op, inputs, Origin::none(), Region::Forward).expect("a node")
        };
        let of_norm = add(norm.clone(), &v[..3]);
        let y = add(Op::Binary(BinaryFn::Add), &sum(of_norm[0], v[3]))[0];
        let y = add(Op::Unary(UnaryFn::Relu), &[y])[0];
        for (i, value) in [y, of_norm[1], of_norm[2]].into_iter().enumerate() {
            body.add_output(&i.to_string(), value, OutputKind::Result);
        }
        assert!(frit_select::cpu(&body).is_none(), "{body}");
    }
}

#[test]
fn reproducible_sums() {
    let stats = |seed| operand(DType::F32, &[300], seed);
    check(Op::GradStats(GradStats { exact: true }), &[stats(1), stats(2)]);
    let digits =
        eval_op(&Op::GradStats(GradStats { exact: true }), &[&stats(3)], Options::default());
    let mut values = digits.expect("digits")[0].to_f64s();
    values.extend([4.0, 5.0]);
    let n = values.len();
    check(Op::RoundStats, &[Tensor::floats(DType::F32, [n], values)]);
    for k in 0..8 {
        let number = Tensor::ints(DType::I64, frit_ir::Shape::scalar(), vec![k]);
        let operands = [stats(1), number, stats(2), stats(3), stats(4)];
        check(Op::TreeSum, &operands);
    }
}

/// A body with these operands and operations, which returns each of some lists of values in turn.
fn returning<const N: usize>(
    operands: &[Tensor],
    build: impl Fn(&mut dyn FnMut(Op, &[ValueId]) -> Vec<ValueId>, &[ValueId]) -> [Vec<ValueId>; N],
) -> [Graph; N] {
    std::array::from_fn(|i| {
        let (mut body, v) = graph_of(operands);
        let mut add = |op: Op, inputs: &[ValueId]| {
            body.add(op, inputs, Origin::none(), Region::Forward).expect("a node")
        };
        let results = build(&mut add, &v)[i].clone();
        for (i, value) in results.into_iter().enumerate() {
            body.add_output(&i.to_string(), value, OutputKind::Result);
        }
        body
    })
}

/// A routine is selected for the first body only.
fn check_first<const N: usize>(bodies: &[Graph; N], operands: &[Tensor]) {
    let [first, others @ ..] = &bodies[..] else { panic!("no body") };
    check_body(first, operands);
    for other in others {
        assert!(frit_select::cpu(other).is_none(), "a routine for\n{other}");
    }
}

fn matmul(trans_a: bool) -> Op {
    Op::MatMul(MatMul { trans_a, trans_b: false, out: None })
}

/// A GEMM with and without a vector or a matrix added computes nothing but its last value.
#[test]
fn a_gemm_is_selected_for_its_last_value_only() {
    let add_op = Op::Binary(BinaryFn::Add);
    let operands = [operand(DType::F32, &[4, 4], 1), operand(DType::F32, &[4, 9], 2)];
    let bodies = returning(&operands, |add, v| {
        let y = add(matmul(false), v)[0];
        [vec![y], vec![y, y], vec![v[0]], vec![v[1]], vec![v[0], y], vec![y, v[1]], vec![]]
    });
    check_first(&bodies, &operands);
    for (added, trans_a) in [(&[9][..], false), (&[4, 9], true)] {
        let operands = [&operands[..], &[operand(DType::F32, added, 3)]].concat();
        let bodies = returning(&operands, |add, v| {
            let product = add(matmul(trans_a), &v[..2])[0];
            let y = add(add_op.clone(), &[product, v[2]])[0];
            [vec![y], vec![product], vec![y, product], vec![product, y], vec![y, y], vec![v[2]]]
        });
        check_first(&bodies, &operands);
    }
}

/// Routines of one operation compute all its results, and nothing else.
#[test]
fn routines_of_one_operation_fill_the_results_of_the_body() {
    let operands = [operand(DType::F32, &[4, 6], 1)];
    let sums = Op::CumSum(CumSum { axis: 1, exclusive: false, reverse: false });
    let bodies = returning(&operands, |add, v| {
        let y = add(sums.clone(), v)[0];
        [vec![y], vec![y, y], vec![v[0]], vec![y, v[0]], vec![v[0], y]]
    });
    check_first(&bodies, &operands);
    let top = Op::TopK(TopK { axis: 1, k: 2, largest: true });
    let bodies = returning(&operands, |add, v| {
        let y = add(top.clone(), v);
        [vec![y[1], y[0]], vec![y[0]], vec![y[0], y[1], y[1]], vec![y[0], y[1], v[0]]]
    });
    check_first(&bodies, &operands);
}

/// Some routines read as many operands as they are given: none that the operation does not read.
#[test]
fn operands_that_nothing_reads_are_not_those_of_a_routine() {
    let operands = [1, 2].map(|seed| operand(DType::F32, &[300], seed));
    let bodies =
        returning(&operands, |add, v| [add(Op::GradStats(GradStats { exact: false }), &v[..1])]);
    let selected = check_body(&bodies[0], &operands);
    assert_eq!(selected.reads, Some(vec![Source::Operand(0, 0)]));
}

/// Constants are read from memory, or known to the routine; neither makes them results.
#[test]
fn a_constant_is_no_result_of_a_routine() {
    let indices = Tensor::ints(DType::I64, [5, 1], vec![3, 0, 3, 2, 1]);
    let operands = [indices, operand(DType::F32, &[5, 7], 1)];
    let scatter = Op::ScatterNd(ScatterNd { batch_dims: 0, f: ScatterFn::Add });
    let zeros = Tensor::splat(TensorType::new(DType::F32, [4, 7]), 0.0);
    let bodies = returning(&operands, |add, v| {
        let zeros = add(Op::Constant(Constant { value: zeros.clone() }), &[])[0];
        let y = add(scatter.clone(), &[zeros, v[0], v[1]])[0];
        [vec![y], vec![zeros], vec![y, y], vec![y, zeros], vec![y, v[1]]]
    });
    check_first(&bodies, &operands);
    let operands = [operand(DType::F32, &[4, 5], 1)];
    let weights = operand(DType::F32, &[5, 7], 2);
    let bodies = returning(&operands, |add, v| {
        let weights = add(Op::Constant(Constant { value: weights.clone() }), &[])[0];
        let y = add(matmul(false), &[v[0], weights])[0];
        [vec![y], vec![weights], vec![y, weights], vec![weights, y]]
    });
    assert!(frit_select::cpu(&bodies[0]).is_some_and(|selected| selected.reads.is_some()));
    assert!(bodies[1..].iter().all(|body| frit_select::cpu(body).is_none()));
}

/// Regions compute the last image and the statistics, and what passes a ReLU only if it is a result.
#[test]
fn a_batch_normalization_with_relu_fills_the_results_of_the_body() {
    let vector = |seed| operand(DType::F32, &[3], seed);
    let image = |seed| operand(DType::F32, &[2, 3, 4], seed);
    let operands = [image(1), vector(2), vector(3)];
    let norm = Op::BatchNorm(BatchNorm { eps: 1e-5 });
    let bodies = returning(&operands, |add, v| {
        let n = add(norm.clone(), v);
        let y = add(Op::Unary(UnaryFn::Relu), &n[..1])[0];
        [
            vec![y, n[1], n[2]],
            vec![n[0], n[1], n[2]],
            vec![y, n[1], n[2], y],
            vec![y, n[1], n[1]],
            vec![y, n[1], n[2], n[0]],
            vec![v[0], n[1], n[2]],
            vec![y, n[1], n[2], v[1]],
        ]
    });
    check_first(&bodies, &operands);
    let statistics =
        eval_op(&norm, &[&operands[0], &operands[1], &operands[2]], Options::default());
    let [_, mean, var] = &statistics.expect("statistics")[..] else { panic!("three results") };
    let operands = [image(1), vector(2), mean.clone(), var.clone(), image(5), image(6)];
    let bodies = returning(&operands, |add, v| {
        let passed = add(Op::Binary(BinaryFn::ReluGrad), &[v[4], v[5]])[0];
        let gradient = Op::BatchNormGrad(BatchNormGrad { eps: 1e-5 });
        let d = add(gradient, &[passed, v[0], v[1], v[2], v[3]]);
        [
            vec![passed, d[0], d[1], d[2]],
            vec![passed, d[0], d[1], d[2], passed],
            vec![passed, d[0], d[1], d[1]],
            vec![passed, d[1], d[2]],
            vec![d[0], d[1], d[2], v[4]],
        ]
    });
    check_first(&bodies, &operands);
}

/// Strides express heads that are written into a packed result, but nothing else that it has.
#[test]
fn attention_fills_the_results_of_the_body() {
    let operands = [1, 2, 3].map(|seed| operand(DType::F32, &[1, 2, 3, 4], seed));
    let op = Op::Attention(Attention { scale: 0.5, causal: true, window: None, keep: None });
    let rows = Op::Transpose(Transpose { perm: vec![0, 2, 1, 3] });
    let bodies = returning(&operands, |add, v| {
        let y = add(op.clone(), v);
        let heads = add(rows.clone(), &y[..1])[0];
        let other = add(rows.clone(), &v[..1])[0];
        [
            vec![heads, y[1]],
            vec![y[1], heads, heads],
            vec![heads, y[0], y[1]],
            vec![heads, y[1], v[0]],
            vec![other, y[1]],
            vec![heads],
        ]
    });
    check_first(&bodies, &operands);
}

/// A region draws the mask itself, reads the state of the generator and stores nothing else.
#[test]
fn attention_with_dropout() {
    let (q, state) = ([2, 3, 5, 4], Tensor::ints(DType::I64, [5], vec![77, 1, 4, 2, 2]));
    let qkv = [1, 2, 3].map(|seed| operand(DType::F32, &q, seed));
    let op = Attention { scale: 0.5, causal: true, window: None, keep: Some(0.75) };
    let draw = Op::RandomMask(RandomMask { shape: [2, 15, 5].into(), keep: 0.75, id: 2 });
    let shape = Op::Reshape(Reshape { shape: [2, 3, 5, 5].into() });
    let results = |op: Op, operands: &[Tensor]| {
        eval_op(&op, &operands.iter().collect::<Vec<_>>(), Options::default()).expect("results")
    };
    let mask = results(draw.clone(), std::slice::from_ref(&state));
    let kept = results(shape.clone(), &mask);
    let forward = [&qkv[..], &kept].concat();
    check(Op::Attention(op.clone()), &forward);
    let found = results(Op::Attention(op.clone()), &forward);
    let backward = [&[operand(DType::F32, &q, 4)], &qkv[..], &found].concat();
    let grad = Op::AttentionGrad(AttentionGrad::of(&op, false));
    check(grad.clone(), &[&backward[..], &kept].concat());
    for (op, operands) in [(Op::Attention(op), qkv.to_vec()), (grad, backward)] {
        let operands = [&operands[..], std::slice::from_ref(&state)].concat();
        let [body] = returning(&operands, |add, v| {
            let (state, others) = v.split_last().expect("a state");
            let mask = add(draw.clone(), &[*state]);
            let kept = add(shape.clone(), &mask);
            [add(op.clone(), &[others, &kept].concat())]
        });
        check_body(&body, &operands);
    }
}
