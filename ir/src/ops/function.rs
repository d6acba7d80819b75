//! The boundaries of functions that state their own gradient or precision.
//!
//! A function is inlined by the front ends; these operations keep what its nodes do not say. All are the identity, but for
//! [`Cotangent`], whose value differentiation puts in. The pass `strip_functions` removes them.
//!
//! Of `y = f(x)` with a gradient function `g`, the graph has `dy = cotangent(y)`, `dx = g(x, y, dy)`, and what reads `y` outside reads
//! `custom_gradient(y, x, dx)`: nothing else of `f` is differentiated.

use super::{Inferred, Linear, OpError, Operation, Precision, arity, float};
use crate::{DType, TensorType};
use serde::{Deserialize, Serialize};

/// `(y…, x…, dx…)` → `y…`: results of a function with the gradients of its inputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CustomGradient {
    /// The call, which its cotangents name too.
    pub call: u32,
    /// The number of results.
    pub results: usize,
    /// The model's name of the function.
    pub function: String,
}

impl CustomGradient {
    /// The positions of the inputs and of their gradients among so many operands.
    pub fn pairs(&self, operands: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (begin, n) = (self.results, operands.saturating_sub(self.results) / 2);
        (begin..begin + n).map(move |i| (i, i + n))
    }
}

impl Operation for CustomGradient {
    fn examples() -> Vec<Self> {
        vec![CustomGradient { call: 3, results: 1, function: "ai.example::round".into() }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        let n = inputs.len();
        if self.results == 0 || n < self.results || !(n - self.results).is_multiple_of(2) {
            let results = self.results;
            return Err(OpError::new(format!("{n} operands of a function of {results} results")));
        }
        for ty in inputs {
            float(ty, "results, inputs and gradients")?;
        }
        for (x, dx) in self.pairs(n) {
            if inputs[x].shape != inputs[dx].shape {
                let (x, dx) = (inputs[x], inputs[dx]);
                return Err(OpError::new(format!("the gradient of an input {x} is {dx}")));
            }
        }
        Ok(inputs[..self.results].iter().map(|ty| (*ty).clone()).collect())
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::BOUNDARY
    }

    fn linear(&self) -> Linear {
        // It is gone before there is a loss scale.
        Linear::No
    }
}

/// `(y)` → the cotangent of result `result` of a call; zero until the graph is differentiated.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cotangent {
    /// The call.
    pub call: u32,
    /// Which of its results.
    pub result: usize,
}

impl Operation for Cotangent {
    fn examples() -> Vec<Self> {
        vec![Cotangent { call: 3, result: 0 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        same(inputs)
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::BOUNDARY
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(x)` → `x`: an operand of a function that runs in a dtype of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnterPrecision {
    /// The call.
    pub call: u32,
    /// The dtype.
    pub dtype: DType,
}

impl Operation for EnterPrecision {
    fn examples() -> Vec<Self> {
        vec![EnterPrecision { call: 3, dtype: DType::F32 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        if !matches!(self.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(OpError::new(format!("a function that runs in {}", self.dtype)));
        }
        same(inputs)
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::BOUNDARY
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// `(y)` → `y`: a result of a function that runs in a dtype of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeavePrecision {
    /// The call.
    pub call: u32,
}

impl Operation for LeavePrecision {
    fn examples() -> Vec<Self> {
        vec![LeavePrecision { call: 3 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        same(inputs)
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::BOUNDARY
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

fn same(inputs: &[&TensorType]) -> Inferred {
    arity(inputs, 1)?;
    float(inputs[0], "the operand")?;
    Ok(vec![inputs[0].clone()])
}
