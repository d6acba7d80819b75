//! An estimate of the work to evaluate an operation.

use crate::ops::Op;
use crate::{Shape, TensorType};

/// Elements accessed in the time of one tap of a window, which is addressed by coordinates.
const TAP: u64 = 64;

/// Approximate number of elements that the evaluation of an operation accesses; repeated reads are counted. An empty
/// axis counts as one element, since it is still iterated.
pub fn operations(op: &Op, inputs: &[&TensorType], outputs: &[&TensorType]) -> u64 {
    let (inputs, outputs) = (walked(inputs), walked(outputs));
    let (inputs, outputs): (Vec<_>, Vec<_>) = (inputs.iter().collect(), outputs.iter().collect());
    let elements = |types: &[&TensorType]| -> u64 {
        types.iter().map(|t| t.shape.numel() as u64).fold(0, u64::saturating_add)
    };
    let windows = |types: &[&TensorType], taps: &[usize]| {
        taps.iter().fold(TAP * elements(types), |n, &t| n.saturating_mul(t as u64))
    };
    let own = match op {
        Op::MaxPool(op) => windows(&outputs, &op.taps),
        Op::SumPool(op) => windows(&outputs, &op.taps),
        Op::MaxPoolGrad(op) => windows(&inputs, &op.taps),
        Op::SumPoolGrad(op) => windows(&inputs, &op.taps),
        Op::Conv(_) | Op::ConvGradInput(_) | Op::ConvGradWeight(_) => {
            op.flops(&inputs, &outputs).saturating_mul(TAP)
        }
        _ => op.flops(&inputs, &outputs),
    };
    own.max(elements(&inputs)).max(elements(&outputs))
}

fn walked(types: &[&TensorType]) -> Vec<TensorType> {
    let full = |ty: &&TensorType| {
        let dims: Vec<usize> = ty.shape.dims().iter().map(|d| (*d).max(1)).collect();
        ty.with_shape(Shape(dims))
    };
    types.iter().map(full).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::ops::{MatMul, SumPool, Window};

    #[test]
    fn work_is_counted_where_elements_are_few() {
        let ty = |dims: &[usize]| TensorType::new(DType::F32, dims);
        let pool = SumPool { window: Window::plain(1), taps: vec![1 << 30] };
        let (x, y) = (ty(&[1, 1, 1 << 31]), ty(&[1, 1, (1 << 30) + 1]));
        assert!(operations(&Op::SumPool(pool), &[&x], &[&y]) > 1 << 60);
        let (a, b) = (ty(&[64, 1 << 30]), ty(&[1 << 30, 64]));
        assert!(operations(&Op::MatMul(MatMul::default()), &[&a, &b], &[&ty(&[64, 64])]) > 1 << 42);
        let empty = ty(&[1 << 30, 0, 4]);
        assert!(
            operations(&Op::Concat(crate::ops::Concat { axis: 1 }), &[&empty], &[&empty]) > 1 << 30
        );
    }
}
