//! A typed address, as library routines take it.

use frit_ir::{DType, TensorType};
use frit_kernels::dtype::Elem;

/// A dense operand or result.
pub(super) struct Operand {
    /// First byte.
    pub(super) pointer: *mut u8,
    /// Its type.
    pub(super) ty: TensorType,
}

/// The element type of the kernel library.
pub(super) fn elem(dtype: DType) -> Option<Elem> {
    match dtype {
        DType::F32 => Some(Elem::F32),
        DType::BF16 => Some(Elem::BF16),
        DType::F16 => Some(Elem::F16),
        _ => None,
    }
}
