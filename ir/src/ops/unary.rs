//! Elementwise operations of one operand.

use super::number::by_bits;
use super::{Inferred, Linear, OpError, Operation, Precision, arity, float, float_result};
use crate::{DType, TensorType};
use serde::{Deserialize, Serialize};

/// Declares an enum of functions whose text names are the snake case of the variants.
macro_rules! functions {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$doc])* #[serde(rename = $text)] $variant,)*
        }

        impl $name {
            /// Every function of the family.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// Name in the text form.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }
        }
    };
}
pub(crate) use functions;

functions! {
    /// A real function of one float operand (`neg`, `abs` and `sign` also take integers, `not` only them and bools).
    UnaryFn {
        /// −x
        Neg = "neg",
        /// |x|
        Abs = "abs",
        /// −1, 0 or 1
        Sign = "sign",
        /// eˣ
        Exp = "exp",
        /// eˣ − 1
        Expm1 = "expm1",
        /// ln x
        Log = "log",
        /// ln(1 + x)
        Log1p = "log1p",
        /// √x
        Sqrt = "sqrt",
        /// 1/√x
        Rsqrt = "rsqrt",
        /// 1/x
        Reciprocal = "reciprocal",
        /// Largest integer not above x.
        Floor = "floor",
        /// Smallest integer not below x.
        Ceil = "ceil",
        /// Nearest integer, ties to even (ONNX Round).
        Round = "round",
        /// sin x
        Sin = "sin",
        /// cos x
        Cos = "cos",
        /// tan x
        Tan = "tan",
        /// arcsin x, in [−π/2, π/2]
        Asin = "asin",
        /// arccos x, in [0, π]
        Acos = "acos",
        /// arctan x, in (−π/2, π/2)
        Atan = "atan",
        /// sinh x
        Sinh = "sinh",
        /// cosh x
        Cosh = "cosh",
        /// arsinh x
        Asinh = "asinh",
        /// arcosh x, at least 0
        Acosh = "acosh",
        /// artanh x
        Atanh = "atanh",
        /// tanh x
        Tanh = "tanh",
        /// Gauss's error function.
        Erf = "erf",
        /// 1/(1 + e⁻ˣ)
        Sigmoid = "sigmoid",
        /// ln(1 + eˣ)
        Softplus = "softplus",
        /// max(x, 0)
        Relu = "relu",
        /// x·sigmoid(x)
        Silu = "silu",
        /// x·Φ(x), by the error function (Hendrycks & Gimpel 2016).
        Gelu = "gelu",
        /// The tanh approximation of `gelu`, as PyTorch's `approximate="tanh"`.
        GeluTanh = "gelu_tanh",
        /// Logical negation of a bool; of an integer, that of its bits.
        Not = "not",
        /// x, through which no gradient flows (PyTorch's `detach`).
        Detach = "detach",
    }
}

impl UnaryFn {
    /// Whether processors have no instruction for it.
    pub fn is_transcendental(self) -> bool {
        use UnaryFn::*;
        !matches!(
            self,
            Neg | Abs
                | Sign
                | Sqrt
                | Rsqrt
                | Reciprocal
                | Floor
                | Ceil
                | Round
                | Relu
                | Not
                | Detach
        )
    }
}

impl Operation for UnaryFn {
    fn examples() -> Vec<Self> {
        UnaryFn::ALL.to_vec()
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        let ty = inputs[0];
        match self {
            UnaryFn::Not if !ty.dtype.is_float() => {}
            UnaryFn::Not => return Err(OpError::new(format!("not of {}", ty.dtype))),
            UnaryFn::Neg | UnaryFn::Abs | UnaryFn::Sign if ty.dtype != DType::Bool => {}
            _ => float(ty, "the operand")?,
        }
        Ok(vec![ty.clone()])
    }

    fn precision(&self) -> Precision {
        match self {
            UnaryFn::Exp
            | UnaryFn::Expm1
            | UnaryFn::Log
            | UnaryFn::Log1p
            | UnaryFn::Rsqrt
            | UnaryFn::Reciprocal
            | UnaryFn::Tan
            | UnaryFn::Asin
            | UnaryFn::Acos
            | UnaryFn::Sinh
            | UnaryFn::Cosh
            | UnaryFn::Softplus => Precision::F32,
            // Not in PyTorch's lists, and exact or bounded: they keep the dtype of their operand.
            UnaryFn::Neg
            | UnaryFn::Detach
            | UnaryFn::Abs
            | UnaryFn::Sign
            | UnaryFn::Sqrt
            | UnaryFn::Floor
            | UnaryFn::Ceil
            | UnaryFn::Round
            | UnaryFn::Sin
            | UnaryFn::Cos
            | UnaryFn::Tanh
            | UnaryFn::Atan
            | UnaryFn::Asinh
            | UnaryFn::Acosh
            | UnaryFn::Atanh
            | UnaryFn::Erf
            | UnaryFn::Sigmoid
            | UnaryFn::Relu
            | UnaryFn::Silu
            | UnaryFn::Gelu
            | UnaryFn::GeluTanh => Precision::UNLISTED,
            UnaryFn::Not => Precision::INTEGER,
        }
    }

    fn linear(&self) -> Linear {
        match self {
            UnaryFn::Neg | UnaryFn::Detach => Linear::FIRST,
            UnaryFn::Abs
            | UnaryFn::Sign
            | UnaryFn::Sqrt
            | UnaryFn::Rsqrt
            | UnaryFn::Reciprocal
            | UnaryFn::Exp
            | UnaryFn::Expm1
            | UnaryFn::Log
            | UnaryFn::Log1p
            | UnaryFn::Floor
            | UnaryFn::Ceil
            | UnaryFn::Round
            | UnaryFn::Sin
            | UnaryFn::Cos
            | UnaryFn::Tan
            | UnaryFn::Asin
            | UnaryFn::Acos
            | UnaryFn::Atan
            | UnaryFn::Sinh
            | UnaryFn::Cosh
            | UnaryFn::Asinh
            | UnaryFn::Acosh
            | UnaryFn::Atanh
            | UnaryFn::Tanh
            | UnaryFn::Erf
            | UnaryFn::Sigmoid
            | UnaryFn::Softplus
            | UnaryFn::Relu
            | UnaryFn::Silu
            | UnaryFn::Gelu
            | UnaryFn::GeluTanh
            | UnaryFn::Not => Linear::No,
        }
    }
}

functions! {
    /// A test of one float operand, to `bool`.
    PredicateFn {
        /// Whether x is not a number.
        IsNan = "is_nan",
        /// Whether x is plus or minus infinity.
        IsInf = "is_inf",
    }
}

impl Operation for PredicateFn {
    fn examples() -> Vec<Self> {
        PredicateFn::ALL.to_vec()
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        float(inputs[0], "the operand")?;
        Ok(vec![inputs[0].with_dtype(DType::Bool)])
    }

    fn precision(&self) -> Precision {
        Precision::UNLISTED
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// Conversion of the element type.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cast {
    /// The element type of the result.
    pub to: DType,
}

impl Operation for Cast {
    fn examples() -> Vec<Self> {
        vec![Cast { to: DType::BF16 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        Ok(vec![inputs[0].with_dtype(self.to)])
    }

    fn precision(&self) -> Precision {
        Precision::GIVEN
    }

    fn linear(&self) -> Linear {
        if self.to.is_float() { Linear::FIRST } else { Linear::No }
    }
}

/// Each element times `factor`, rounded once to the element type `to`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaledCast {
    /// The element type of the result.
    pub to: DType,
    /// The factor.
    #[serde(with = "super::number")]
    pub factor: f64,
}

by_bits!(ScaledCast { factor } { to });

impl Operation for ScaledCast {
    fn examples() -> Vec<Self> {
        vec![ScaledCast { to: DType::F16, factor: 0.25 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        float(inputs[0], "the operand")?;
        Ok(vec![inputs[0].with_dtype(float_result(Some(self.to), self.to)?)])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        // Rounding keeps the factor.
        Linear::FIRST
    }
}

/// Limits each element to `[min, max]`; a missing bound is none. NaN stays NaN.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clip {
    /// Lower bound.
    #[serde(default, with = "super::number::option")]
    pub min: Option<f64>,
    /// Upper bound.
    #[serde(default, with = "super::number::option")]
    pub max: Option<f64>,
}

by_bits!(Clip { min, max } {  });

impl Operation for Clip {
    fn examples() -> Vec<Self> {
        vec![Clip { min: Some(f64::NEG_INFINITY), max: Some(3.5) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        if inputs[0].dtype == DType::Bool {
            return Err(OpError::new("clip of bool"));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn precision(&self) -> Precision {
        Precision::UNLISTED
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}
