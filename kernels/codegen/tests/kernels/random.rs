//! Random regions of every kind against the interpreter, on the host and on the PTX machine.

use crate::harness::{Body, Case, check, compare, normal};
use crate::ptx_machine;
use frit_codegen::compile_cuda;
use frit_ir::interpret::{Options, run};
use frit_ir::ops::{
    BinaryFn, Clip, CompareFn, FusionKind, LayerNorm, Reduce, ReduceFn, Reshape, RmsNorm, Softmax,
    UnaryFn,
};
use frit_ir::{DType, Op, Shape, Tensor, ValueId};

struct Choice(fastrand::Rng);

impl Choice {
    fn below(&mut self, n: usize) -> usize {
        self.0.usize(..n)
    }

    fn of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
}

const UNARY: [UnaryFn; 12] = [
    UnaryFn::Tanh,
    UnaryFn::Sigmoid,
    UnaryFn::Gelu,
    UnaryFn::GeluTanh,
    UnaryFn::Silu,
    UnaryFn::Relu,
    UnaryFn::Abs,
    UnaryFn::Neg,
    UnaryFn::Erf,
    UnaryFn::Softplus,
    UnaryFn::Expm1,
    UnaryFn::Exp,
];
const BINARY: [BinaryFn; 5] =
    [BinaryFn::Add, BinaryFn::Sub, BinaryFn::Mul, BinaryFn::Max, BinaryFn::Min];

/// A region of this kind: a chain of random operations on values of one shape, and its operands.
fn region(kind: FusionKind, seed: u64) -> Case {
    let mut choose = Choice(fastrand::Rng::with_seed(seed));
    let (mut a, b, mut c) =
        (choose.of(&[1, 2, 3]), choose.of(&[1, 4, 9]), choose.of(&[1, 5, 16, 33, 150]));
    if kind == FusionKind::RowColReduce {
        // Several rows of several columns.
        (a, c) = (a + 1, c + 2);
    }
    let shape = [a, b, c];
    let mut body = Body::new();
    let mut inputs: Vec<Tensor> = Vec::new();
    let mut input = |body: &mut Body, shape: &[usize], dtype| {
        inputs.push(normal(dtype, shape, seed + 77 * inputs.len() as u64, 1.0));
        body.input(dtype, shape)
    };
    let scale = input(&mut body, &[c], DType::F32);
    let mut values: Vec<ValueId> = vec![input(&mut body, &shape, DType::F32)];
    for _ in 0..choose.below(3) + 1 {
        let own = [a, b, c].map(|d| if choose.below(3) == 0 { 1 } else { d });
        let narrow = input(&mut body, &own, DType::F32);
        let full = body.one(Op::Binary(BinaryFn::Add), &[values[0], narrow]);
        values.push(full);
    }
    for _ in 0..choose.below(8) + 3 {
        let (x, y) = (choose.of(&values), choose.of(&values));
        let bounded = body.one(Op::Clip(Clip { min: Some(-4.0), max: Some(4.0) }), &[x]);
        let rows = matches!(kind, FusionKind::RowReduce | FusionKind::RowColReduce);
        let next = match choose.below(if rows { 9 } else { 5 }) {
            0 | 1 => body.one(Op::Unary(choose.of(&UNARY)), &[bounded]),
            2 => body.one(Op::Binary(choose.of(&BINARY)), &[bounded, y]),
            3 => {
                let f = choose.of(CompareFn::ALL);
                let condition = body.one(Op::Compare(f), &[values[0], values[1]]);
                body.one(Op::Select, &[condition, bounded, y])
            }
            4 => {
                let flat = Op::Reshape(Reshape { shape: Shape::from([a * b, c]) });
                let flat = body.one(flat, &[bounded]);
                let flat = body.one(Op::Unary(choose.of(&UNARY)), &[flat]);
                body.one(Op::Reshape(Reshape { shape: Shape::from(shape) }), &[flat])
            }
            5 => body.one(Op::Softmax(Softmax { axis: 2 }), &[bounded]),
            6 => {
                let f = choose.of(&[ReduceFn::Mean, ReduceFn::Max, ReduceFn::Min]);
                let r =
                    body.one(Op::Reduce(Reduce { f, axes: vec![2], keep_dims: true }), &[bounded]);
                body.one(Op::Binary(choose.of(&BINARY)), &[y, r])
            }
            // A large epsilon: normalizing a constant row would only amplify rounding errors.
            7 => body.all(Op::LayerNorm(LayerNorm { axis: 2, eps: 0.1 }), &[bounded, scale])[0],
            _ => body.all(Op::RmsNorm(RmsNorm { axis: 2, eps: 0.1 }), &[bounded, scale])[0],
        };
        values.push(next);
    }
    let last = values[values.len() - 1];
    let other = choose.of(&values);
    let mut reduce = |f, axes: &[usize], value| {
        body.one(Op::Reduce(Reduce { f, axes: axes.to_vec(), keep_dims: false }), &[value])
    };
    let outputs = match kind {
        FusionKind::ColReduce => {
            vec![reduce(ReduceFn::Sum, &[0, 1], last), reduce(ReduceFn::Max, &[0, 1], other)]
        }
        FusionKind::RowReduce => vec![last, reduce(ReduceFn::Sum, &[2], last)],
        FusionKind::RowColReduce => vec![
            reduce(ReduceFn::Mean, &[0, 1], last),
            last,
            reduce(ReduceFn::Sum, &[2], last),
            reduce(ReduceFn::Max, &[0, 1], other),
        ],
        _ => vec![last, other],
    };
    let body = body.done(&outputs);
    let feeds = body
        .nodes()
        .filter_map(|(_, n)| match &n.op {
            Op::Input(input) => Some(input.name.clone()),
            _ => None,
        })
        .zip(inputs.iter().cloned())
        .collect();
    let expected: Vec<Vec<f64>> =
        run(&body, &feeds, Options::EXACT).unwrap().iter().map(|(_, t)| t.to_f64s()).collect();
    let largest = expected.iter().flatten().fold(1.0, |m: f64, x| m.max(x.abs()));
    Case {
        name: format!("{} region {seed} of {shape:?}", kind.name()),
        body,
        kind,
        inputs,
        expected,
        tolerance: 2e-5,
        floor: largest,
    }
}

/// The kinds that the host compiles.
const KINDS: [FusionKind; 3] =
    [FusionKind::Pointwise, FusionKind::RowReduce, FusionKind::ColReduce];

fn cases(kinds: &[FusionKind], seeds: std::ops::Range<u64>) -> Vec<Case> {
    seeds.flat_map(|seed| kinds.iter().map(move |kind| region(*kind, 1 + seed * 7919))).collect()
}

#[test]
fn random_regions_agree_with_the_interpreter() {
    check(&cases(&KINDS, 0..60));
}

#[test]
fn random_regions_agree_with_the_interpreter_on_the_ptx_machine() {
    let both = cases(&[FusionKind::RowColReduce], 0..40);
    for case in cases(&KINDS, 60..75).iter().chain(&both) {
        let module = compile_cuda(&[("k", &case.body, case.kind)], "sm_80").unwrap();
        let results = ptx_machine::run(&module, &case.inputs);
        for (r, (result, expected)) in results.iter().zip(&case.expected).enumerate() {
            let what = format!("{}, result {r}", case.name);
            compare(&what, result, expected, case.tolerance, case.floor);
        }
    }
}
