//! The boundaries of functions.

use super::call::Call;
use super::{Evaluate, Evaluated};
use crate::Tensor;
use crate::ops::{Cotangent, CustomGradient, EnterPrecision, LeavePrecision};

impl Evaluate for CustomGradient {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        Ok(call.inputs[..self.results].iter().map(|y| (*y).clone()).collect())
    }
}

impl Evaluate for Cotangent {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        Ok(vec![Tensor::splat(call.results[0].clone(), 0.0)])
    }
}

impl Evaluate for EnterPrecision {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        Ok(vec![call.inputs[0].clone()])
    }
}

impl Evaluate for LeavePrecision {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        Ok(vec![call.inputs[0].clone()])
    }
}
