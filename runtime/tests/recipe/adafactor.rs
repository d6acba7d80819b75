//! Steps of Adafactor.

use crate::check::{check, random};
use frit_ir::ops::{OptimizerKind, OptimizerStep};
use frit_ir::{DType, Op, Tensor};

fn scalar(value: f64) -> Tensor {
    Tensor::floats(DType::F32, [], vec![value])
}

fn step(shape: &[usize], clip: f64, steps: f64, skip: f64) {
    let op = OptimizerStep { kind: OptimizerKind::Adafactor };
    let param = random(DType::F32, shape, 1);
    let state = op.kind.state_shape(&param.ty.shape);
    // Second moments are never negative.
    let squares = random(DType::F32, state.dims(), 3).to_f64s().iter().map(|x| x * x).collect();
    let mut operands =
        vec![param, random(DType::F32, shape, 2), Tensor::floats(DType::F32, state, squares)];
    // lr, exponent, eps, threshold, decay, clip, step, factor, found_inf.
    operands.extend([0.1, 0.8, 1e-3, 1.0, 0.01, clip, steps, 0.5, skip].map(scalar));
    check(Op::OptimizerStep(op), &operands, 1e-5);
}

#[test]
fn matrices_vectors_and_stacks_of_matrices() {
    step(&[70, 33], 0.0, 0.0, 0.0);
    step(&[3, 150, 5], 0.0, 4.0, 0.0);
    step(&[1000], 0.0, 2.0, 0.0);
    step(&[], 0.0, 1.0, 0.0);
}

#[test]
fn gradients_are_clipped_and_steps_skipped() {
    step(&[9, 300], 0.25, 3.0, 0.0);
    step(&[9, 300], 0.0, 3.0, 1.0);
    step(&[0, 4], 0.0, 3.0, 0.0);
}
