//! Elements of float tensors, from their bytes.

use frit_ir::DType;
use half::{bf16, f16};

/// Calls `f` with every element.
pub(super) fn each(dtype: DType, bytes: &[u8], mut f: impl FnMut(f64)) {
    match dtype {
        DType::F64 => bytes.as_chunks::<8>().0.iter().for_each(|b| f(f64::from_le_bytes(*b))),
        DType::F32 => {
            bytes.as_chunks::<4>().0.iter().for_each(|b| f(f64::from(f32::from_le_bytes(*b))))
        }
        DType::F16 => {
            bytes.as_chunks::<2>().0.iter().for_each(|b| f(f16::from_le_bytes(*b).to_f64()))
        }
        DType::BF16 => {
            bytes.as_chunks::<2>().0.iter().for_each(|b| f(bf16::from_le_bytes(*b).to_f64()))
        }
        _ => {}
    }
}

/// All elements; empty for types other than floats.
pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let mut values = Vec::with_capacity(bytes.len() / dtype.size());
    each(dtype, bytes, |x| values.push(x));
    values
}
