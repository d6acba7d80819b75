//! The declarations that every operation makes.

use super::{Inferred, Linear, Precision};
use crate::TensorType;

/// Implemented by the attributes of every operation, and by every family of functions.
pub(crate) trait Operation: Sized {
    /// Attributes for tests that cover all operations: one of each kind, every function of a family.
    fn examples() -> Vec<Self>;

    /// Types of the results for operands of these types, or the mismatch.
    fn infer(&self, inputs: &[&TensorType]) -> Inferred;

    /// Floating-point operations for operands and results of these types, which fit; a multiply-add counts two. By
    /// default one for each element of the largest operand or result.
    fn flops(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> u64 {
        elements(inputs).max(elements(outputs))
    }

    /// In which precision autocast runs it.
    fn precision(&self) -> Precision;

    /// How its results scale with its operands.
    fn linear(&self) -> Linear;
}

/// Elements of the largest of these tensors.
pub(crate) fn elements(types: &[&TensorType]) -> u64 {
    types.iter().map(|t| t.shape.numel() as u64).max().unwrap_or(0)
}
