//! Values worked out by hand, and gradients against finite differences.

mod attention;
mod binary;
mod index;
mod layout;
mod norm;
mod quantize;
mod reduce;
mod run;
mod softmax;
mod training;
mod unary;

use super::{EvalError, Options, eval_op};
use crate::{DType, Op, Tensor};

/// An f32 tensor.
fn f32s(dims: &[usize], values: &[f64]) -> Tensor {
    Tensor::floats(DType::F32, dims, values.to_vec())
}

/// An f64 tensor.
fn f64s(dims: &[usize], values: &[f64]) -> Tensor {
    Tensor::floats(DType::F64, dims, values.to_vec())
}

/// An i64 tensor.
fn i64s(dims: &[usize], values: &[i64]) -> Tensor {
    Tensor::ints(DType::I64, dims, values.to_vec())
}

/// A bool tensor.
fn bools(dims: &[usize], values: &[i64]) -> Tensor {
    Tensor::ints(DType::Bool, dims, values.to_vec())
}

fn try_eval(op: Op, inputs: &[Tensor]) -> Result<Vec<Tensor>, EvalError> {
    eval_op(&op, &inputs.iter().collect::<Vec<_>>(), Options::default())
}

fn eval(op: Op, inputs: &[Tensor]) -> Vec<Tensor> {
    try_eval(op, inputs).expect("the operation has a value")
}

fn eval1(op: Op, inputs: &[Tensor]) -> Tensor {
    let mut results = eval(op, inputs);
    assert_eq!(results.len(), 1);
    results.remove(0)
}

#[track_caller]
fn assert_close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{found:?} and {expected:?}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        let close = (a - b).abs() <= tolerance * b.abs().max(1.0);
        assert!(close || a == b || (a.is_nan() && b.is_nan()), "element {i}: {a}, not {b}");
    }
}

/// Numbers between −1 and 1 that look random, the same for the same seed.
fn noise(seed: u64, n: usize) -> Vec<f64> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| 2.0 * random.f64() - 1.0).collect()
}

/// The gradient, for operand `which`, of Σ dy·(first result), by central differences.
fn numeric_gradient(op: &Op, inputs: &[Tensor], which: usize, dy: &Tensor) -> Vec<f64> {
    let objective = |x: &[f64]| -> f64 {
        let mut inputs = inputs.to_vec();
        inputs[which] = f64s(inputs[which].shape().dims(), x);
        let y = eval(op.clone(), &inputs).remove(0);
        y.to_f64s().iter().zip(dy.to_f64s()).map(|(y, dy)| y * dy).sum()
    };
    let x = inputs[which].to_f64s();
    let h = 1e-5;
    (0..x.len())
        .map(|i| {
            let (mut above, mut below) = (x.clone(), x.clone());
            above[i] += h;
            below[i] -= h;
            (objective(&above) - objective(&below)) / (2.0 * h)
        })
        .collect()
}
