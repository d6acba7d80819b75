//! Element types of reductions: f32, f16 or bf16, with f32 arithmetic.

use crate::CommError;
use frit_ir::DType;
use half::{bf16, f16};

/// The elements in f32.
///
/// # Errors
/// If the type is not combined.
pub(super) fn widen(bytes: &[u8], dtype: DType) -> Result<Vec<f32>, CommError> {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        DType::F32 => Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()),
        DType::F16 => Ok(pairs().map(|b| f16::from_ne_bytes(*b).to_f32()).collect()),
        DType::BF16 => Ok(pairs().map(|b| bf16::from_ne_bytes(*b).to_f32()).collect()),
        dtype => Err(CommError::Exchange { dtype }),
    }
}

/// The values as elements, rounded once.
///
/// # Errors
/// If the type is not combined.
pub(super) fn narrow(values: &[f32], dtype: DType) -> Result<Vec<u8>, CommError> {
    match dtype {
        DType::F32 => Ok(values.iter().flat_map(|x| x.to_ne_bytes()).collect()),
        DType::F16 => Ok(values.iter().flat_map(|x| f16::from_f32(*x).to_ne_bytes()).collect()),
        DType::BF16 => Ok(values.iter().flat_map(|x| bf16::from_f32(*x).to_ne_bytes()).collect()),
        dtype => Err(CommError::Exchange { dtype }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_precision_goes_there_and_back() {
        let values = [0.5, -2.0, 1.0 / 3.0, f32::INFINITY];
        for (dtype, error) in [(DType::F32, 0.0), (DType::F16, 1e-3), (DType::BF16, 1e-2)] {
            let bytes = narrow(&values, dtype).unwrap();
            assert_eq!(bytes.len(), 4 * dtype.size());
            let found = widen(&bytes, dtype).unwrap();
            assert!((found[2] - values[2]).abs() <= error, "{dtype}");
            assert_eq!((found[0], found[1], found[3]), (0.5, -2.0, f32::INFINITY));
            assert_eq!(narrow(&found, dtype).unwrap(), bytes, "{dtype}");
        }
        assert!(widen(&[0; 8], DType::I64).is_err() && narrow(&[0.0], DType::I64).is_err());
    }
}
