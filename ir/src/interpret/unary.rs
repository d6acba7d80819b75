//! Elementwise operations of one operand.

use super::call::{Call, max, min};
use super::special::{erf, gelu_tanh_inner, normal_cdf, sigmoid};
use super::{Evaluate, Evaluated};
use crate::ops::{Cast, Clip, PredicateFn, ScaledCast, UnaryFn};
use crate::{DType, TensorData};

impl Evaluate for UnaryFn {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let result = match call.inputs[0].data() {
            TensorData::Float(v) => call.real(0, v.iter().map(|&x| real(*self, x)).collect()),
            TensorData::Int(v) => {
                let is_bool = call.inputs[0].ty.dtype == DType::Bool;
                call.integer(0, v.iter().map(|&x| integer(*self, x, is_bool)).collect())
            }
        };
        Ok(vec![result])
    }
}

fn real(f: UnaryFn, x: f64) -> f64 {
    match f {
        UnaryFn::Neg => -x,
        UnaryFn::Abs => x.abs(),
        UnaryFn::Sign if x == 0.0 => 0.0,
        UnaryFn::Sign => x.signum(),
        UnaryFn::Exp => x.exp(),
        UnaryFn::Expm1 => x.exp_m1(),
        UnaryFn::Log => x.ln(),
        UnaryFn::Log1p => x.ln_1p(),
        UnaryFn::Sqrt => x.sqrt(),
        UnaryFn::Rsqrt => 1.0 / x.sqrt(),
        UnaryFn::Reciprocal => 1.0 / x,
        UnaryFn::Floor => x.floor(),
        UnaryFn::Ceil => x.ceil(),
        UnaryFn::Round => x.round_ties_even(),
        UnaryFn::Sin => x.sin(),
        UnaryFn::Cos => x.cos(),
        UnaryFn::Tan => x.tan(),
        UnaryFn::Asin => x.asin(),
        UnaryFn::Acos => x.acos(),
        UnaryFn::Atan => x.atan(),
        UnaryFn::Sinh => x.sinh(),
        UnaryFn::Cosh => x.cosh(),
        UnaryFn::Asinh => x.asinh(),
        UnaryFn::Acosh => x.acosh(),
        UnaryFn::Atanh => x.atanh(),
        UnaryFn::Tanh => x.tanh(),
        UnaryFn::Erf => erf(x),
        UnaryFn::Sigmoid => sigmoid(x),
        UnaryFn::Softplus => max(x, 0.0) + (-x.abs()).exp().ln_1p(),
        UnaryFn::Relu => max(x, 0.0),
        UnaryFn::Silu => x * sigmoid(x),
        UnaryFn::Gelu => x * normal_cdf(x),
        UnaryFn::GeluTanh => 0.5 * x * (1.0 + gelu_tanh_inner(x).0.tanh()),
        UnaryFn::Not => f64::from(u8::from(x == 0.0)),
        UnaryFn::Detach => x,
    }
}

/// The functions that inference admits for integers and bools.
fn integer(f: UnaryFn, x: i64, is_bool: bool) -> i64 {
    match f {
        UnaryFn::Neg => x.wrapping_neg(),
        UnaryFn::Abs => x.wrapping_abs(),
        UnaryFn::Sign => x.signum(),
        UnaryFn::Not if is_bool => i64::from(x == 0),
        UnaryFn::Not => !x,
        _ => unreachable!("invariant: {} takes floats only", f.name()),
    }
}

impl Evaluate for PredicateFn {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let test = |&x: &f64| match *self {
            PredicateFn::IsNan => x.is_nan(),
            PredicateFn::IsInf => x.is_infinite(),
        };
        Ok(vec![call.integer(0, call.floats(0).iter().map(|x| i64::from(test(x))).collect())])
    }
}

impl Evaluate for Cast {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let to = call.results[0].dtype;
        let result = match call.inputs[0].data() {
            TensorData::Float(v) if call.exact && to.is_float() => call.real(0, v.clone()),
            _ => call.inputs[0].cast(to),
        };
        Ok(vec![result])
    }
}

impl Evaluate for ScaledCast {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        Ok(vec![call.real(0, call.floats(0).iter().map(|x| x * self.factor).collect())])
    }
}

impl Evaluate for Clip {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (low, high) =
            (self.min.unwrap_or(f64::NEG_INFINITY), self.max.unwrap_or(f64::INFINITY));
        let result = match call.inputs[0].data() {
            TensorData::Float(v) => {
                call.real(0, v.iter().map(|&x| min(max(x, low), high)).collect())
            }
            TensorData::Int(v) => {
                let (low, high) = (DType::I64.round(low.ceil()), DType::I64.round(high.floor()));
                let (low, high) = (low as i64, high as i64);
                call.integer(0, v.iter().map(|&x| x.max(low).min(high)).collect())
            }
        };
        Ok(vec![result])
    }
}
