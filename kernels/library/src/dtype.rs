//! Floating-point element types of the kernels.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// A floating-point element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Elem {
    /// IEEE single precision.
    F32,
    /// The upper half of a single-precision number.
    BF16,
    /// IEEE half precision.
    F16,
}

impl Elem {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Elem::F32 => 4,
            Elem::BF16 | Elem::F16 => 2,
        }
    }

    /// Reads element `index` (in elements, may be negative) of `base` as f32.
    ///
    /// # Safety
    /// The element must be readable and aligned.
    #[inline(always)]
    pub(crate) unsafe fn load(self, base: *const u8, index: isize) -> f32 {
        // SAFETY: the caller vouches for the element.
        unsafe {
            match self {
                Elem::F32 => *base.cast::<f32>().offset(index),
                Elem::BF16 => (*base.cast::<bf16>().offset(index)).to_f32(),
                Elem::F16 => (*base.cast::<f16>().offset(index)).to_f32(),
            }
        }
    }

    /// Writes `value`, rounded to nearest even, to element `index` of `base`.
    ///
    /// # Safety
    /// The element must be writable and aligned.
    #[inline(always)]
    pub(crate) unsafe fn store(self, base: *mut u8, index: isize, value: f32) {
        // SAFETY: the caller vouches for the element.
        unsafe {
            match self {
                Elem::F32 => *base.cast::<f32>().offset(index) = value,
                Elem::BF16 => *base.cast::<bf16>().offset(index) = bf16::from_f32(value),
                Elem::F16 => *base.cast::<f16>().offset(index) = f16::from_f32(value),
            }
        }
    }

    /// The address of element `index` of `base`.
    #[inline(always)]
    pub(crate) fn at(self, base: *const u8, index: isize) -> *const u8 {
        base.wrapping_offset(index * self.size() as isize)
    }

    /// The address of element `index` of `base`, for writing.
    #[inline(always)]
    pub(crate) fn at_mut(self, base: *mut u8, index: isize) -> *mut u8 {
        base.wrapping_offset(index * self.size() as isize)
    }
}
