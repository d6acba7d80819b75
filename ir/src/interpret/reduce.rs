//! Reductions over axes.

use super::call::{Call, broadcast_places, max, min, places};
use super::{EvalError, Evaluate, Evaluated};
use crate::ops::{Reduce, ReduceFn, SumTo};
use crate::{DType, TensorData};

/// Folds each element into the result element at its place.
fn fold<T: Copy>(v: &[T], into: &[usize], n: usize, start: T, f: impl Fn(T, T) -> T) -> Vec<T> {
    let mut out = vec![start; n];
    for (&x, &p) in v.iter().zip(into) {
        out[p] = f(out[p], x);
    }
    out
}

impl Evaluate for Reduce {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let dims = call.dims(0);
        let mut strides = vec![0; dims.len()];
        let mut stride = 1;
        for axis in (0..dims.len()).rev().filter(|axis| !self.axes.contains(axis)) {
            strides[axis] = stride;
            stride *= dims[axis] as isize;
        }
        let into = places(dims, &strides, 0);
        let n = call.results[0].shape.numel();
        let count: usize = self.axes.iter().map(|&a| dims[a]).product();
        let result = match call.inputs[0].data() {
            TensorData::Float(v) => {
                let data = match self.f {
                    ReduceFn::Sum => fold(v, &into, n, 0.0, |a, b| a + b),
                    ReduceFn::Mean => {
                        let sums = fold(v, &into, n, 0.0, |a, b| a + b);
                        sums.into_iter().map(|s| s / count as f64).collect()
                    }
                    ReduceFn::Max => fold(v, &into, n, f64::NEG_INFINITY, max),
                    ReduceFn::Min => fold(v, &into, n, f64::INFINITY, min),
                    ReduceFn::Prod => fold(v, &into, n, 1.0, |a, b| a * b),
                };
                call.real(0, data)
            }
            TensorData::Int(v) => {
                let (least, most) = match call.results[0].dtype {
                    DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
                    DType::U8 => (0, i64::from(u8::MAX)),
                    _ => (i64::MIN, i64::MAX),
                };
                let data = match self.f {
                    ReduceFn::Sum => fold(v, &into, n, 0, i64::wrapping_add),
                    ReduceFn::Mean if count == 0 && n > 0 => return Err(EvalError::DivisionByZero),
                    ReduceFn::Mean => {
                        let sums = fold(v, &into, n, 0, i64::wrapping_add);
                        sums.into_iter().map(|s| s / count as i64).collect()
                    }
                    ReduceFn::Max => fold(v, &into, n, least, i64::max),
                    ReduceFn::Min => fold(v, &into, n, most, i64::min),
                    ReduceFn::Prod => fold(v, &into, n, 1, i64::wrapping_mul),
                };
                call.integer(0, data)
            }
        };
        Ok(vec![result])
    }
}

impl Evaluate for SumTo {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let to = &call.results[0];
        let into = broadcast_places(&to.shape, call.inputs[0].shape());
        let n = to.shape.numel();
        Ok(vec![match call.inputs[0].data() {
            TensorData::Int(v) if !to.dtype.is_float() => {
                call.integer(0, fold(v, &into, n, 0, i64::wrapping_add))
            }
            _ => call.real(0, fold(&call.floats(0), &into, n, 0.0, |a, b| a + b)),
        }])
    }
}
