//! Elementwise operations of two operands, with numpy broadcasting; operands have equal dtypes.

use super::unary::functions;
use super::{Inferred, Linear, OpError, Operation, Precision, arity, float};
use crate::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};

functions! {
    /// A function of two operands of one dtype.
    BinaryFn {
        /// a + b
        Add = "add",
        /// a − b
        Sub = "sub",
        /// a·b
        Mul = "mul",
        /// a/b; integers truncate toward zero. An integer divided by 0, here and in remainders, is an error on the CPU and
        /// gives 0 on CUDA.
        Div = "div",
        /// aᵇ
        Pow = "pow",
        /// The larger; NaN if either is.
        Max = "max",
        /// The smaller; NaN if either is.
        Min = "min",
        /// Remainder with the sign of the divisor (ONNX Mod, `fmod = 0`).
        Mod = "mod",
        /// Remainder with the sign of the dividend (ONNX Mod, `fmod = 1`).
        Fmod = "fmod",
        /// Gradient of `gelu`: `(dy, x)` → dy·(Φ(x) + x·φ(x)).
        GeluGrad = "gelu_grad",
        /// Gradient of `gelu_tanh`: `(dy, x)`.
        GeluTanhGrad = "gelu_tanh_grad",
        /// Gradient of `silu`: `(dy, x)`.
        SiluGrad = "silu_grad",
        /// Gradient of `tanh`: `(dy, y)` → dy·(1 − y²).
        TanhGrad = "tanh_grad",
        /// Gradient of `sigmoid`: `(dy, y)` → dy·y·(1 − y).
        SigmoidGrad = "sigmoid_grad",
        /// Gradient of `relu`: `(dy, y)` → dy where y > 0, else 0.
        ReluGrad = "relu_grad",
    }
}

impl Operation for BinaryFn {
    fn examples() -> Vec<Self> {
        BinaryFn::ALL.to_vec()
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        let shape = broadcast(inputs)?;
        use BinaryFn::*;
        match self {
            Add | Sub | Mul | Div | Pow | Max | Min | Mod | Fmod => {
                if inputs[0].dtype == DType::Bool {
                    return Err(OpError::new("arithmetic on bool"));
                }
            }
            _ => float(inputs[0], "the operand")?,
        }
        Ok(vec![TensorType::new(inputs[0].dtype, shape)])
    }

    fn precision(&self) -> Precision {
        match self {
            BinaryFn::Pow => Precision::F32,
            BinaryFn::Add
            | BinaryFn::Sub
            | BinaryFn::Mul
            | BinaryFn::Div
            | BinaryFn::Max
            | BinaryFn::Min
            | BinaryFn::Mod
            | BinaryFn::Fmod => Precision::UNLISTED,
            BinaryFn::GeluGrad
            | BinaryFn::GeluTanhGrad
            | BinaryFn::SiluGrad
            | BinaryFn::TanhGrad
            | BinaryFn::SigmoidGrad
            | BinaryFn::ReluGrad => Precision::AFTER,
        }
    }

    fn linear(&self) -> Linear {
        match self {
            BinaryFn::Add | BinaryFn::Sub => Linear::InAll,
            BinaryFn::Mul => Linear::InEach,
            BinaryFn::Div
            | BinaryFn::GeluGrad
            | BinaryFn::GeluTanhGrad
            | BinaryFn::SiluGrad
            | BinaryFn::TanhGrad
            | BinaryFn::SigmoidGrad
            | BinaryFn::ReluGrad => Linear::FIRST,
            BinaryFn::Pow | BinaryFn::Max | BinaryFn::Min | BinaryFn::Mod | BinaryFn::Fmod => {
                Linear::No
            }
        }
    }
}

functions! {
    /// A comparison; false if either operand is NaN, except `ne`.
    CompareFn {
        /// a = b
        Eq = "eq",
        /// a ≠ b
        Ne = "ne",
        /// a < b
        Lt = "lt",
        /// a ≤ b
        Le = "le",
        /// a > b
        Gt = "gt",
        /// a ≥ b
        Ge = "ge",
    }
}

impl Operation for CompareFn {
    fn examples() -> Vec<Self> {
        CompareFn::ALL.to_vec()
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        Ok(vec![TensorType::new(DType::Bool, broadcast(inputs)?)])
    }

    fn precision(&self) -> Precision {
        Precision::UNLISTED
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

functions! {
    /// Logic on bools; on integers, that of their bits.
    LogicalFn {
        /// Both.
        And = "and",
        /// Either.
        Or = "or",
        /// Exactly one.
        Xor = "xor",
    }
}

impl Operation for LogicalFn {
    fn examples() -> Vec<Self> {
        LogicalFn::ALL.to_vec()
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        let shape = broadcast(inputs)?;
        if inputs[0].dtype.is_float() {
            return Err(OpError::new(format!("logic on {}", inputs[0].dtype)));
        }
        Ok(vec![TensorType::new(inputs[0].dtype, shape)])
    }

    fn precision(&self) -> Precision {
        Precision::INTEGER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

fn broadcast(inputs: &[&TensorType]) -> Result<Shape, OpError> {
    arity(inputs, 2)?;
    if inputs[0].dtype != inputs[1].dtype {
        let (a, b) = (inputs[0].dtype, inputs[1].dtype);
        return Err(OpError::new(format!("operands of different dtypes {a} and {b}")));
    }
    broadcast_shapes(&inputs[0].shape, &inputs[1].shape)
}

fn broadcast_shapes(a: &Shape, b: &Shape) -> Result<Shape, OpError> {
    a.broadcast(b).ok_or_else(|| OpError::new(format!("shapes {a} and {b} do not broadcast")))
}

/// `select(condition: bool, a, b)`, with broadcasting.
#[derive(Clone, Copy, Debug)]
pub struct Select;

impl Operation for Select {
    fn examples() -> Vec<Self> {
        vec![Select]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 3)?;
        if inputs[0].dtype != DType::Bool {
            return Err(OpError::new(format!(
                "the condition must be bool, not {}",
                inputs[0].dtype
            )));
        }
        let shape = broadcast(&inputs[1..])?;
        Ok(vec![TensorType::new(inputs[1].dtype, broadcast_shapes(&inputs[0].shape, &shape)?)])
    }

    fn precision(&self) -> Precision {
        Precision::UNLISTED
    }

    fn linear(&self) -> Linear {
        Linear::In(&[1, 2])
    }
}
