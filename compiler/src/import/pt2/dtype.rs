//! Element types: PyTorch's numbers, ONNX's, and what operands of several are promoted to.

/// An element type, by its number in ONNX.
pub(super) type Dtype = i32;

pub(super) const F32: Dtype = 1;
pub(super) const U8: Dtype = 2;
pub(super) const I8: Dtype = 3;
pub(super) const I16: Dtype = 5;
pub(super) const I32: Dtype = 6;
pub(super) const I64: Dtype = 7;
pub(super) const BOOL: Dtype = 9;
pub(super) const F16: Dtype = 10;
pub(super) const F64: Dtype = 11;
pub(super) const BF16: Dtype = 16;

/// The element type with this number of PyTorch's `ScalarType`.
pub(super) fn of_torch(number: u32) -> Option<Dtype> {
    Some(match number {
        1 => U8,
        2 => I8,
        3 => I16,
        4 => I32,
        5 => I64,
        6 => F16,
        7 => F32,
        8 => F64,
        12 => BOOL,
        13 => BF16,
        28 => 4,
        34 => 12,
        35 => 13,
        _ => return None,
    })
}

/// Bytes of an element.
pub(super) fn size(dtype: Dtype) -> usize {
    match dtype {
        U8 | I8 | BOOL => 1,
        4 | I16 | F16 | BF16 => 2,
        F32 | I32 | 12 => 4,
        _ => 8,
    }
}

pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, F32 | F16 | F64 | BF16)
}

/// Boolean, integer or float.
fn category(dtype: Dtype) -> u8 {
    match dtype {
        BOOL => 0,
        _ if is_float(dtype) => 2,
        _ => 1,
    }
}

/// How much an operand counts for the type of a result.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Weight {
    /// A number of the program.
    Number,
    /// A tensor without axes.
    Scalar,
    /// A tensor with axes.
    Tensor,
}

/// The type that operands are promoted to. Source: PyTorch's `result_type`.
pub(super) fn promoted(operands: &[(Dtype, Weight)]) -> Dtype {
    let highest = operands.iter().map(|(d, _)| category(*d)).max().unwrap_or(2);
    // Within the highest category, tensors with axes decide alone, then those without.
    let deciding = operands.iter().filter(|(d, _)| category(*d) == highest);
    let weight = deciding.clone().map(|(_, w)| *w).max();
    deciding.filter(|(_, w)| Some(*w) == weight).map(|(d, _)| *d).reduce(wider).unwrap_or(F32)
}

/// The narrowest type that holds both, of one category.
fn wider(a: Dtype, b: Dtype) -> Dtype {
    let rank = |d: Dtype| match d {
        BOOL => 0,
        U8 | I8 => 1,
        4 | I16 => 2,
        I32 | 12 => 3,
        F16 | BF16 => 4,
        F32 => 5,
        F64 => 6,
        _ => 4,
    };
    match (a, b) {
        _ if a == b => a,
        (F16, BF16) | (BF16, F16) => F32,
        (U8, I8) | (I8, U8) => I16,
        _ if rank(a) >= rank(b) => a,
        _ => b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promotion_is_pytorchs() {
        use Weight::{Number, Scalar, Tensor};
        for (operands, expected) in [
            (&[(BF16, Tensor), (F32, Number)][..], BF16),
            (&[(BF16, Tensor), (F32, Scalar)], BF16),
            (&[(BF16, Tensor), (F32, Tensor)], F32),
            (&[(F16, Tensor), (BF16, Tensor)], F32),
            (&[(I64, Tensor), (F32, Number)], F32),
            (&[(I64, Tensor), (F64, Scalar)], F64),
            (&[(I32, Tensor), (I64, Number)], I32),
            (&[(BOOL, Tensor), (I64, Number)], I64),
            (&[(F32, Scalar), (I64, Tensor)], F32),
            (&[(U8, Tensor), (I8, Tensor)], I16),
        ] {
            assert_eq!(promoted(operands), expected);
        }
    }
}
