//! How much work it is to evaluate an operation.

use crate::TensorType;
use crate::ops::Op;

/// Elements that the evaluation of an operation touches, about: what it reads and writes, and for operations that
/// read elements many times how often.
pub fn operations(op: &Op, inputs: &[&TensorType], outputs: &[&TensorType]) -> u64 {
    // Places are found axis by axis.
    let elements = |types: &[&TensorType]| -> u64 {
        let of =
            |t: &&TensorType| (t.shape.numel() as u64).saturating_mul(1 + t.shape.rank() as u64);
        types.iter().map(of).fold(0, u64::saturating_add)
    };
    let product = |taps: &[usize]| taps.iter().fold(1u64, |n, &t| n.saturating_mul(t as u64));
    let windows = match op {
        Op::MaxPool(op) => elements(outputs).saturating_mul(product(&op.taps)),
        Op::SumPool(op) => elements(outputs).saturating_mul(product(&op.taps)),
        Op::MaxPoolGrad(op) => elements(inputs).saturating_mul(product(&op.taps)),
        Op::SumPoolGrad(op) => elements(inputs).saturating_mul(product(&op.taps)),
        _ => op.flops(inputs, outputs),
    };
    windows.max(elements(inputs)).max(elements(outputs))
}
