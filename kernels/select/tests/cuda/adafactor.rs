//! The parts of Adafactor's steps.

use crate::check::{check, random};
use frit_ir::ops::{Adafactor, AdafactorPart};
use frit_ir::{DType, Op, Tensor};

fn scalar(value: f64) -> Tensor {
    Tensor::floats(DType::F32, [], vec![value])
}

/// Every part of a step of a parameter, of which `len` elements from `begin` on are in the part.
fn step(shape: &[usize], (len, begin): (usize, i64), clip: f64, steps: f64, skip: f64) {
    let op = |part| Adafactor { part, shape: shape.into(), share: 0.25 };
    let n = op(AdafactorPart::Sums).state_len();
    // Sums and second moments are never negative.
    let squares = |n: usize, seed| {
        let squares = random(DType::F32, &[n], seed).to_f64s().iter().map(|x| x * x).collect();
        Tensor::floats(DType::F32, [n], squares)
    };
    let (begin, grad) = (Tensor::ints(DType::I64, [1], vec![begin]), random(DType::F32, &[len], 2));
    let param = random(DType::F32, &[len], 1);
    let [clip, steps, factor, skip] = [clip, steps, 0.5, skip].map(scalar);
    let run = |part, operands: &[&Tensor]| {
        let operands: Vec<Tensor> = operands.iter().map(|t| (*t).clone()).collect();
        check(Op::Adafactor(op(part)), &operands, 1e-5);
    };
    run(AdafactorPart::Sums, &[&begin, &grad, &param, &clip, &factor]);
    let (sums, state) = (squares(n + 1, 3), squares(n, 4));
    let moments = [&begin, &grad, &sums, &state, &scalar(0.8), &clip, &steps, &factor, &skip];
    run(AdafactorPart::Moments, &moments);
    let [of_param, of_update] = [3.0, 70.0].map(scalar);
    let [lr, eps, threshold, decay] = [0.1, 1e-3, 1.0, 0.01].map(scalar);
    let operands = [
        &begin, &grad, &param, &state, &of_param, &of_update, &lr, &eps, &threshold, &decay, &clip,
        &steps, &factor, &skip,
    ];
    run(AdafactorPart::Step, &operands);
}

#[test]
fn matrices_vectors_and_stacks_of_matrices() {
    step(&[70, 33], (70 * 33, 0), 0.0, 0.0, 0.0);
    step(&[3, 150, 5], (3 * 150 * 5 + 9, 4), 0.0, 4.0, 0.0);
    step(&[1000], (1000, 0), 0.0, 2.0, 0.0);
    step(&[], (3, 1), 0.0, 1.0, 0.0);
}

#[test]
fn parts_of_parameters() {
    for begin in [-1000, -170, -5, 600, 900, -9000] {
        step(&[3, 150, 5], (900, begin), 0.0, 4.0, 0.0);
        step(&[1000], (900, begin), 0.0, 2.0, 0.0);
    }
}

#[test]
fn gradients_are_clipped_and_steps_skipped() {
    step(&[9, 300], (2000, -50), 0.25, 3.0, 0.0);
    step(&[9, 300], (2000, -50), 0.0, 3.0, 1.0);
    step(&[0, 4], (8, 2), 0.0, 3.0, 0.0);
}
