//! Reductions.

use crate::check::{check, random};
use frit_ir::{DType, Op, Tensor};

#[test]
fn gradient_statistics_of_many_operands() {
    let operands = [
        random(DType::F32, &[40_003], 1),
        random(DType::F32, &[0], 2),
        random(DType::F32, &[3, 5], 3),
    ];
    check(Op::GradStats, &operands, 1e-6);
    let bad = vec![1.0, f64::NAN, f64::INFINITY, -2.0];
    check(Op::GradStats, &[Tensor::floats(DType::F32, [4], bad)], 0.0);
}
