//! Softmax, its logarithm, and their gradients. Low-precision operands are computed in f32 inside.

use super::{Inferred, Linear, Operation, Precision, arity, axis_of, elements, float, same_shape};
use crate::TensorType;
use serde::{Deserialize, Serialize};

/// Declares an operation on the lines along an axis, with its number of operands.
macro_rules! along_axis {
    ($(#[$doc:meta])* $name:ident, $operands:literal, $precision:ident, $linear:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            /// The axis.
            pub axis: usize,
        }

        impl Operation for $name {
            fn examples() -> Vec<Self> {
                vec![$name { axis: 1 }]
            }

            fn infer(&self, inputs: &[&TensorType]) -> Inferred {
                arity(inputs, $operands)?;
                axis_of(inputs[0], self.axis)?;
                for ty in inputs {
                    float(ty, "the operand")?;
                    same_shape(inputs[0], ty, "the operands")?;
                }
                Ok(vec![inputs[0].clone()])
            }

            fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
                5 * elements(inputs)
            }

            fn precision(&self) -> Precision {
                Precision::$precision
            }

            fn linear(&self) -> Linear {
                $linear
            }
        }
    };
}

// F32 for probabilities too: a router picks its experts by them, and rounded ones tie.
along_axis!(
    /// `x` → `y`; elements sum to one along the axis.
    Softmax, 1, F32, Linear::No
);
along_axis!(
    /// `x` → `y`, the logarithm of the softmax along the axis.
    LogSoftmax, 1, F32, Linear::No
);
along_axis!(
    /// Gradient of `softmax`: `(dy, y)` → `dx`.
    SoftmaxGrad, 2, AFTER, Linear::FIRST
);
along_axis!(
    /// Gradient of `log_softmax`: `(dy, y)` → `dx`.
    LogSoftmaxGrad, 2, AFTER, Linear::FIRST
);
