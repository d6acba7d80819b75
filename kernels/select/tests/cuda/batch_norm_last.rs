//! Batch normalization of images that lie channels last.

use crate::check::{Body, check_body, random, results, selected};
use frit_ir::interpret::{Options, eval_op};
use frit_ir::ops::{BatchNorm, BatchNormGrad, BinaryFn, Transpose, UnaryFn};
use frit_ir::plan::Launch;
use frit_ir::{DType, Graph, Op, Tensor, TensorType, ValueId};

const EPS: f64 = 1e-5;
const ADD: Op = Op::Binary(BinaryFn::Add);
const GATE: Op = Op::Binary(BinaryFn::ReluGrad);
const RELU: Op = Op::Unary(UnaryFn::Relu);

/// What is around a normalization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Around {
    Nothing,
    Relu,
    /// A sum of which the normalization is this term, and a ReLU.
    Sum(usize),
}

const EVERY: [Around; 4] = [Around::Nothing, Around::Relu, Around::Sum(0), Around::Sum(1)];

fn statistics(dtype: DType) -> DType {
    if dtype == DType::F64 { dtype } else { DType::F32 }
}

fn to_first(rank: usize) -> Op {
    Op::Transpose(Transpose::channels_first(rank))
}

fn to_last(rank: usize) -> Op {
    Op::Transpose(Transpose::channels_last(rank))
}

fn sum(body: &mut Body, around: Around, term: ValueId, other: ValueId) -> ValueId {
    match around {
        Around::Sum(0) => body.add(ADD, &[term, other])[0],
        _ => body.add(ADD, &[other, term])[0],
    }
}

/// The normalization of `[N, …, C]`, with operands x, scale, bias and the other term of a sum; the results are the last
/// image, mean and variance in the order of `order`.
pub(crate) fn forward(dtype: DType, x: &[usize], around: Around, order: [usize; 3]) -> Graph {
    let (mut body, rank) = (Body::new(), x.len());
    let image = TensorType::new(dtype, x);
    let vector = TensorType::new(statistics(dtype), &x[rank - 1..]);
    let [x, scale, bias] = [&image, &vector, &vector].map(|ty| body.input(ty));
    let first = body.add(to_first(rank), &[x])[0];
    let norm = body.add(Op::BatchNorm(BatchNorm { eps: EPS }), &[first, scale, bias]);
    let mut y = body.add(to_last(rank), &norm[..1])[0];
    if let Around::Sum(_) = around {
        let other = body.input(&image);
        y = sum(&mut body, around, y, other);
    }
    if around != Around::Nothing {
        y = body.add(RELU, &[y])[0];
    }
    let all = [y, norm[1], norm[2]];
    body.outputs(&order.map(|i| all[i]))
}

/// The gradient of the same with operands dy, x, scale, mean, variance, the result of the ReLU and the other term of a
/// sum. What passes the ReLU is a result with `is_kept`; `x_first` transposes x before anything else.
pub(crate) fn gradient(
    dtype: DType,
    x: &[usize],
    around: Around,
    is_kept: bool,
    x_first: bool,
) -> Graph {
    let (mut body, rank) = (Body::new(), x.len());
    let image = TensorType::new(dtype, x);
    let vector = TensorType::new(statistics(dtype), &x[rank - 1..]);
    let types = [&image, &image, &vector, &vector, &vector];
    let [dy, x, scale, mean, var] = types.map(|ty| body.input(ty));
    let early = x_first.then(|| body.add(to_first(rank), &[x])[0]);
    let mut passed = dy;
    if around != Around::Nothing {
        let y = body.input(&image);
        if let Around::Sum(_) = around {
            let other = body.input(&image);
            passed = sum(&mut body, around, passed, other);
        }
        passed = body.add(GATE, &[passed, y])[0];
    }
    let of_y = body.add(to_first(rank), &[passed])[0];
    let of_x = early.unwrap_or_else(|| body.add(to_first(rank), &[x])[0]);
    let op = Op::BatchNormGrad(BatchNormGrad { eps: EPS });
    let norm = body.add(op, &[of_y, of_x, scale, mean, var]);
    let dx = body.add(to_last(rank), &norm[..1])[0];
    let mut all = vec![dx, norm[1], norm[2]];
    if is_kept {
        all.insert(1, passed);
    }
    body.outputs(&all)
}

/// The kernels that a body launches.
fn entries(body: &Graph) -> Vec<String> {
    let launches = selected(body).launches;
    let entry = |launch: &Launch| match launch {
        Launch::Source(kernel) => kernel.entry.clone(),
        other => format!("{other:?}"),
    };
    launches.iter().map(entry).collect()
}

struct Operands {
    dtype: DType,
    shape: Vec<usize>,
}

impl Operands {
    fn image(&self, seed: u64) -> Tensor {
        random(self.dtype, &self.shape, seed)
    }

    fn vector(&self, seed: u64) -> Tensor {
        random(statistics(self.dtype), &self.shape[self.shape.len() - 1..], seed)
    }

    fn forward(&self, around: Around) -> Vec<Tensor> {
        let mut all = vec![self.image(1), self.vector(2), self.vector(3), self.image(4)];
        all.truncate(if let Around::Sum(_) = around { 4 } else { 3 });
        all
    }

    fn gradient(&self, around: Around) -> Vec<Tensor> {
        let var = self.vector(7);
        let values = var.to_f64s().into_iter().map(|v| 0.25 + v.abs()).collect();
        let var = Tensor::floats(var.ty.dtype, var.ty.shape.dims(), values);
        let mut all = vec![self.image(4), self.image(1), self.vector(5), self.vector(6), var];
        all.extend([self.image(5), self.image(6)]);
        all.truncate(match around {
            Around::Nothing => 5,
            Around::Relu => 6,
            Around::Sum(_) => 7,
        });
        all
    }
}

fn eval(op: &Op, inputs: &[&Tensor]) -> Tensor {
    eval_op(op, inputs, Options::default()).unwrap().remove(0)
}

fn same(found: &[Tensor], expected: &[Tensor], body: &Graph) {
    let bytes = |all: &[Tensor]| all.iter().map(Tensor::to_bytes).collect::<Vec<_>>();
    assert!(bytes(found) == bytes(expected), "{body}");
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        _ => 4e-2,
    }
}

/// All bodies of one type.
fn regions(dtype: DType, shape: &[usize]) {
    let operands = Operands { dtype, shape: shape.to_vec() };
    for around in EVERY {
        check_forward(&operands, around);
        check_gradient(&operands, around, false, true);
        check_gradient(&operands, around, around != Around::Nothing, false);
    }
}

/// A body against the interpreter, and with equal bits against the normalization alone with the other operations
/// interpreted.
fn check_forward(operands: &Operands, around: Around) {
    let (dtype, shape) = (operands.dtype, &operands.shape);
    let body = forward(dtype, shape, around, [1, 0, 2]);
    let all = operands.forward(around);
    check_body(&body, &all, tolerance(dtype));
    let alone = forward(dtype, shape, Around::Nothing, [1, 0, 2]);
    let mut expected = results(&alone, &all[..3]);
    match around {
        Around::Nothing => {}
        Around::Relu => expected[1] = eval(&RELU, &[&expected[1]]),
        Around::Sum(_) => expected[1] = eval(&RELU, &[&eval(&ADD, &[&expected[1], &all[3]])]),
    }
    same(&results(&body, &all), &expected, &body);
}

/// The same of a gradient.
fn check_gradient(operands: &Operands, around: Around, is_kept: bool, x_first: bool) {
    let (dtype, shape) = (operands.dtype, &operands.shape);
    let body = gradient(dtype, shape, around, is_kept, x_first);
    let all = operands.gradient(around);
    check_body(&body, &all, tolerance(dtype));
    let passed = match around {
        Around::Nothing => all[0].clone(),
        Around::Relu => eval(&GATE, &[&all[0], &all[5]]),
        Around::Sum(_) => eval(&GATE, &[&eval(&ADD, &[&all[0], &all[6]]), &all[5]]),
    };
    let alone = gradient(dtype, shape, Around::Nothing, false, x_first);
    let mut expected = results(&alone, &[std::slice::from_ref(&passed), &all[1..5]].concat());
    if is_kept {
        expected.insert(1, passed);
    }
    same(&results(&body, &all), &expected, &body);
}

#[test]
fn images_of_every_type_and_rank() {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        regions(dtype, &[3, 5, 2, 16]);
        regions(dtype, &[2, 7, 6]);
        regions(dtype, &[2, 3, 2, 2, 5]);
    }
}

#[test]
fn few_channels_and_few_rows() {
    regions(DType::BF16, &[3, 700, 1]);
    regions(DType::F32, &[2, 19, 23, 3]);
    regions(DType::F16, &[1, 1, 1, 24]);
    // Threads that have no column.
    regions(DType::BF16, &[2, 3, 3, 40]);
}

#[test]
fn rows_of_many_blocks() {
    regions(DType::BF16, &[5, 33, 17, 64]);
    regions(DType::F32, &[3, 31, 29, 12]);
    regions(DType::F64, &[2, 700, 2]);
    // Several blocks beside each other, of which the last one is not full.
    regions(DType::F16, &[2, 7, 5, 520]);
}

/// Threads that have more rows than they sum at once.
#[test]
fn rows_of_many_runs() {
    let shape = [4, 50, 12_673];
    let operands = Operands { dtype: DType::F32, shape: shape.to_vec() };
    let body = forward(DType::F32, &shape, Around::Nothing, [0, 1, 2]);
    check_body(&body, &operands.forward(Around::Nothing), 1e-5);
    let body = gradient(DType::F32, &shape, Around::Nothing, false, false);
    check_body(&body, &operands.gradient(Around::Nothing), 1e-5);
}

/// Channels of a large mean, also where the first element is far from all others, have their variance.
#[test]
fn the_variance_does_not_cancel() {
    for (dtype, mean, step) in [(DType::F32, 4096.0, 1.0 / 256.0), (DType::BF16, 128.0, 1.0)] {
        for first in [mean, -1000.0 * mean] {
            let shape = [6, 50, 40, 2];
            let noise = random(DType::F32, &shape, 1).to_f64s();
            let value = |v: f64| mean + (v * 2.0).round() * step;
            let mut values: Vec<f64> = noise.into_iter().map(value).collect();
            values[..2].fill(first);
            let image = Tensor::floats(dtype, shape, values);
            let values = image.to_f64s();
            let vector = random(DType::F32, &[2], 2);
            let body = forward(dtype, &shape, Around::Nothing, [0, 1, 2]);
            let found = results(&body, &[image, vector.clone(), vector]);
            for c in 0..2 {
                let channel: Vec<f64> = values.iter().copied().skip(c).step_by(2).collect();
                let n = channel.len() as f64;
                let mean = channel.iter().sum::<f64>() / n;
                let var = channel.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
                for (found, expected) in [(&found[1], mean), (&found[2], var)] {
                    let found = found.to_f64s()[c];
                    let is_near = (found - expected).abs() <= 2e-6 * expected.abs();
                    assert!(is_near, "{found}, not {expected}, with {first} in {dtype:?}");
                }
            }
        }
    }
}

#[test]
fn no_image_is_transposed() {
    let entries_of = |around| {
        let shape = [2, 4, 4, 8];
        let forward = entries(&forward(DType::BF16, &shape, around, [2, 1, 0]));
        (forward, entries(&gradient(DType::BF16, &shape, around, around != Around::Nothing, true)))
    };
    for (around, relu) in EVERY.into_iter().zip(["", "_relu", "_sum_relu", "_sum_relu"]) {
        let (forward, gradient) = entries_of(around);
        let last = format!("batch_norm_last{relu}");
        assert_eq!(forward, ["batch_norm_last_parts", "batch_norm_last_total", &last]);
        let parts = format!("batch_norm_last{relu}_grad_parts");
        assert_eq!(gradient, [&parts, "batch_norm_last_grad_total", "batch_norm_last_grad"]);
    }
}

/// A normalization by other transposes is computed one operation after the other.
#[test]
fn other_transposes_are_copied() {
    let operands = Operands { dtype: DType::F32, shape: vec![3, 3, 2, 4] };
    let all = operands.forward(Around::Nothing);
    let build = |into: Op, from: Option<Op>| {
        let mut body = Body::new();
        let inputs: Vec<ValueId> = all.iter().map(|t| body.input(&t.ty)).collect();
        let first = body.add(into, &inputs[..1])[0];
        let norm = Op::BatchNorm(BatchNorm { eps: EPS });
        let mut results = body.add(norm, &[first, inputs[1], inputs[2]]);
        if let Some(from) = from {
            results[0] = body.add(from, &results[..1])[0];
        }
        body.outputs(&results)
    };
    let turned = Op::Transpose(Transpose { perm: vec![0, 3, 2, 1] });
    for body in [
        build(turned.clone(), Some(to_last(4))),
        build(to_first(4), Some(turned)),
        build(to_first(4), None),
    ] {
        assert!(entries(&body).iter().all(|entry| !entry.contains("last")), "{body}");
        check_body(&body, &all, 1e-5);
    }
}

/// A NaN stays one, and does not pass backward.
#[test]
fn a_relu_keeps_nans() {
    let operands = Operands { dtype: DType::BF16, shape: vec![2, 5, 8] };
    let mut all = operands.forward(Around::Sum(0));
    let mut values = all[3].to_f64s();
    values[9] = f64::NAN;
    all[3] = Tensor::floats(DType::BF16, [2, 5, 8], values);
    check_body(&forward(DType::BF16, &[2, 5, 8], Around::Sum(0), [0, 1, 2]), &all, 4e-2);
    let mut backward = operands.gradient(Around::Relu);
    backward[5] = all.remove(3);
    let body = gradient(DType::BF16, &[2, 5, 8], Around::Relu, true, false);
    check_body(&body, &backward, 4e-2);
}
