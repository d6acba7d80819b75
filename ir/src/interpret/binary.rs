//! Elementwise operations of two and three operands.

use super::call::{Call, broadcast, max, min};
use super::special::{gelu_tanh_inner, normal_cdf, normal_density, sigmoid};
use super::{EvalError, Evaluate, Evaluated};
use crate::ops::{BinaryFn, CompareFn, LogicalFn, Select};
use crate::{Tensor, TensorData};
use std::borrow::Cow;

/// Applies `f` to the elements of both slices after broadcasting.
fn zip<T: Copy, R>(call: &Call<'_>, a: &[T], b: &[T], mut f: impl FnMut(T, T) -> R) -> Vec<R> {
    let to = &call.results[0].shape;
    let a = broadcast(a, call.inputs[0].shape(), to);
    let b = broadcast(b, call.inputs[1].shape(), to);
    a.iter().zip(b.iter()).map(|(&a, &b)| f(a, b)).collect()
}

impl Evaluate for BinaryFn {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let result = match (call.inputs[0].data(), call.inputs[1].data()) {
            (TensorData::Int(a), TensorData::Int(b)) => {
                let data: Result<Vec<i64>, EvalError> =
                    zip(call, a, b, |a, b| integer(*self, a, b)).into_iter().collect();
                call.integer(0, data?)
            }
            _ => {
                call.real(0, zip(call, &call.floats(0), &call.floats(1), |a, b| real(*self, a, b)))
            }
        };
        Ok(vec![result])
    }
}

fn real(f: BinaryFn, a: f64, b: f64) -> f64 {
    match f {
        BinaryFn::Add => a + b,
        BinaryFn::Sub => a - b,
        BinaryFn::Mul => a * b,
        BinaryFn::Div => a / b,
        BinaryFn::Pow => a.powf(b),
        BinaryFn::Max => max(a, b),
        BinaryFn::Min => min(a, b),
        BinaryFn::Mod => {
            let r = a % b;
            if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }
        }
        BinaryFn::Fmod => a % b,
        BinaryFn::GeluGrad => a * (normal_cdf(b) + b * normal_density(b)),
        BinaryFn::GeluTanhGrad => {
            let (inner, slope) = gelu_tanh_inner(b);
            let t = inner.tanh();
            a * (0.5 * (1.0 + t) + 0.5 * b * (1.0 - t * t) * slope)
        }
        BinaryFn::SiluGrad => {
            let s = sigmoid(b);
            a * (s + b * s * (1.0 - s))
        }
        BinaryFn::TanhGrad => a * (1.0 - b * b),
        BinaryFn::SigmoidGrad => a * b * (1.0 - b),
        BinaryFn::ReluGrad => {
            if b > 0.0 {
                a
            } else {
                0.0
            }
        }
    }
}

fn integer(f: BinaryFn, a: i64, b: i64) -> Result<i64, EvalError> {
    let divisor = || if b == 0 { Err(EvalError::DivisionByZero) } else { Ok(b) };
    Ok(match f {
        BinaryFn::Add => a.wrapping_add(b),
        BinaryFn::Sub => a.wrapping_sub(b),
        BinaryFn::Mul => a.wrapping_mul(b),
        BinaryFn::Div => a.wrapping_div(divisor()?),
        BinaryFn::Pow => power(a, b)?,
        BinaryFn::Max => a.max(b),
        BinaryFn::Min => a.min(b),
        BinaryFn::Mod => {
            let r = a.wrapping_rem(divisor()?);
            if r != 0 && (r < 0) != (b < 0) { r + b } else { r }
        }
        BinaryFn::Fmod => a.wrapping_rem(divisor()?),
        _ => unreachable!("invariant: {} takes floats only", f.name()),
    })
}

/// aᵇ, wrapping; a negative exponent gives the reciprocal, truncated.
fn power(a: i64, b: i64) -> Result<i64, EvalError> {
    if b < 0 {
        return match a {
            0 => Err(EvalError::DivisionByZero),
            1 => Ok(1),
            -1 => Ok(if b % 2 == 0 { 1 } else { -1 }),
            _ => Ok(0),
        };
    }
    let (mut base, mut exponent, mut product) = (a, b, 1i64);
    while exponent > 0 {
        if exponent & 1 == 1 {
            product = product.wrapping_mul(base);
        }
        base = base.wrapping_mul(base);
        exponent >>= 1;
    }
    Ok(product)
}

impl Evaluate for CompareFn {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        fn test<T: PartialOrd>(f: CompareFn, a: T, b: T) -> i64 {
            i64::from(match f {
                CompareFn::Eq => a == b,
                CompareFn::Ne => a != b,
                CompareFn::Lt => a < b,
                CompareFn::Le => a <= b,
                CompareFn::Gt => a > b,
                CompareFn::Ge => a >= b,
            })
        }
        let data = match (call.inputs[0].data(), call.inputs[1].data()) {
            (TensorData::Int(a), TensorData::Int(b)) => zip(call, a, b, |a, b| test(*self, a, b)),
            _ => zip(call, &call.floats(0), &call.floats(1), |a, b| test(*self, a, b)),
        };
        Ok(vec![call.integer(0, data)])
    }
}

impl Evaluate for LogicalFn {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let data = zip(call, call.ints(0), call.ints(1), |a, b| match *self {
            LogicalFn::And => a & b,
            LogicalFn::Or => a | b,
            LogicalFn::Xor => a ^ b,
        });
        Ok(vec![call.integer(0, data)])
    }
}

impl Evaluate for Select {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let to = &call.results[0].shape;
        let condition = broadcast(call.ints(0), call.inputs[0].shape(), to);
        fn choose<T: Copy>(condition: &[i64], a: Cow<'_, [T]>, b: Cow<'_, [T]>) -> Vec<T> {
            condition
                .iter()
                .zip(a.iter().zip(b.iter()))
                .map(|(&c, (&a, &b))| if c != 0 { a } else { b })
                .collect()
        }
        let (x, y) = (call.inputs[1], call.inputs[2]);
        let data = match (x.data(), y.data()) {
            (TensorData::Int(a), TensorData::Int(b)) => TensorData::Int(choose(
                &condition,
                broadcast(a, x.shape(), to),
                broadcast(b, y.shape(), to),
            )),
            _ => TensorData::Float(choose(
                &condition,
                broadcast(&call.floats(1), x.shape(), to),
                broadcast(&call.floats(2), y.shape(), to),
            )),
        };
        Ok(vec![Tensor::exact(call.results[0].clone(), data)])
    }
}
