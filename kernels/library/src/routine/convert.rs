//! Casts between element types, rounding to nearest even; a NaN stays a NaN.

use half::{bf16, f16, slice::HalfFloatSliceExt};

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::simd::vectorized;

/// Elements per chunk of a parallel cast.
const CHUNK: usize = 1 << 15;

/// Casts `len` contiguous elements.
///
/// # Safety
/// `src` must be readable and `dst` writable for `len` elements of their types, aligned to the
/// element, and the ranges must not overlap (except that `src == dst` is allowed for equal types).
pub unsafe fn convert(
    pool: &Pool,
    src: *const u8,
    src_elem: Elem,
    dst: *mut u8,
    dst_elem: Elem,
    len: usize,
) {
    let (src, dst) = (Shareable::new(src), Shareable::new(dst));
    pool.run(len.div_ceil(CHUNK), &|chunk| {
        let first = chunk * CHUNK;
        let count = CHUNK.min(len - first);
        // SAFETY: chunks are disjoint parts of the caller's ranges.
        unsafe {
            convert_range(
                src.get().add(first * src_elem.size()),
                src_elem,
                dst.get().add(first * dst_elem.size()),
                dst_elem,
                count,
            );
        }
    });
}

/// [`convert`] on the calling thread.
///
/// # Safety
/// As for [`convert`].
pub(crate) unsafe fn convert_range(
    src: *const u8,
    src_elem: Elem,
    dst: *mut u8,
    dst_elem: Elem,
    len: usize,
) {
    // SAFETY: the caller vouches for both ranges.
    unsafe {
        match (src_elem, dst_elem) {
            (from, to) if from == to => {
                std::ptr::copy(src, dst, len * from.size());
            }
            (from, Elem::F32) => to_f32(src, from, slice_mut(dst.cast(), len)),
            (Elem::F32, to) => from_f32(slice(src.cast(), len), dst, to),
            (from, to) => {
                let mut block = [0f32; 256];
                for first in (0..len).step_by(block.len()) {
                    let count = block.len().min(len - first);
                    to_f32(src.add(first * 2), from, &mut block[..count]);
                    from_f32(&block[..count], dst.add(first * 2), to);
                }
            }
        }
    }
}

/// Reads contiguous elements of any type as f32.
///
/// # Safety
/// `src` must be readable for `dst.len()` elements.
pub(crate) unsafe fn to_f32(src: *const u8, elem: Elem, dst: &mut [f32]) {
    let len = dst.len();
    // SAFETY: the caller vouches for the range.
    unsafe {
        match elem {
            Elem::F32 => dst.copy_from_slice(slice(src.cast(), len)),
            Elem::BF16 => widen_bf16(slice(src.cast(), len), dst),
            Elem::F16 => slice::<f16>(src.cast(), len).convert_to_f32_slice(dst),
        }
    }
}

/// Writes f32 values as contiguous elements of any type.
///
/// # Safety
/// `dst` must be writable for `src.len()` elements.
pub(crate) unsafe fn from_f32(src: &[f32], dst: *mut u8, elem: Elem) {
    let len = src.len();
    // SAFETY: the caller vouches for the range.
    unsafe {
        match elem {
            Elem::F32 => slice_mut(dst.cast(), len).copy_from_slice(src),
            Elem::BF16 => narrow_bf16(src, slice_mut(dst.cast(), len)),
            Elem::F16 => slice_mut::<f16>(dst.cast(), len).convert_from_f32_slice(src),
        }
    }
}

/// Reads a strided block as f32 into `dst`, which holds `rows * cols` elements, and returns the
/// row and column stride of the result: the dimension that is contiguous in the source stays so.
///
/// # Safety
/// Each element of the block must be readable, and `dst` writable.
pub(crate) unsafe fn block_to_f32(
    src: *const u8,
    elem: Elem,
    (row_stride, col_stride): (isize, isize),
    (rows, cols): (usize, usize),
    dst: *mut f32,
) -> (isize, isize) {
    // SAFETY: the caller vouches for the block.
    unsafe {
        if row_stride == 1 && col_stride != 1 {
            for col in 0..cols {
                let from = elem.at(src, col as isize * col_stride);
                to_f32(from, elem, slice_mut(dst.add(col * rows), rows));
            }
            return (1, rows as isize);
        }
        for row in 0..rows {
            let from = elem.at(src, row as isize * row_stride);
            let to = slice_mut(dst.add(row * cols), cols);
            if col_stride == 1 {
                to_f32(from, elem, to);
            } else {
                for (col, value) in to.iter_mut().enumerate() {
                    *value = elem.load(from, col as isize * col_stride);
                }
            }
        }
        (cols as isize, 1)
    }
}

/// A slice; if it is empty, the pointer may be invalid.
unsafe fn slice<'a, T>(start: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller vouches for `len` elements.
    unsafe { std::slice::from_raw_parts(start, len) }
}

/// As [`slice`], for writing.
unsafe fn slice_mut<'a, T>(start: *mut T, len: usize) -> &'a mut [T] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: the caller vouches for `len` elements.
    unsafe { std::slice::from_raw_parts_mut(start, len) }
}

vectorized! {
    fn widen_bf16(src: &[bf16], dst: &mut [f32]) {
        for (to, from) in dst.iter_mut().zip(src) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }
}

vectorized! {
    fn narrow_bf16(src: &[f32], dst: &mut [bf16]) {
        for (to, from) in dst.iter_mut().zip(src) {
            *to = to_bf16(*from);
        }
    }
}

/// Rounds to nearest even; a loop over this is vectorized.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    let nan = bits & 0x7fff_ffff > 0x7f80_0000;
    bf16::from_bits(if nan { quiet } else { rounded } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<f32> {
        let mut values: Vec<f32> =
            (0..200_000u32).map(|i| f32::from_bits(i.wrapping_mul(21_474_833))).collect();
        values.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN]);
        values.extend([f32::MAX, f32::MIN, 1e-40, -1e-40, 65504.0, 65520.0, 6e-8, 3e-8]);
        values.extend([f32::from_bits(0x7f80_0001), f32::from_bits(0x3f80_8000)]);
        values
    }

    #[test]
    fn narrowing_equals_the_scalar_rounding() {
        let values = samples();
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            let mut b = vec![bf16::ZERO; values.len()];
            let mut h = vec![f16::ZERO; values.len()];
            let src = values.as_ptr().cast();
            // SAFETY: the vectors have equal lengths.
            unsafe {
                convert(&pool, src, Elem::F32, b.as_mut_ptr().cast(), Elem::BF16, b.len());
                convert(&pool, src, Elem::F32, h.as_mut_ptr().cast(), Elem::F16, h.len());
            }
            for (i, &value) in values.iter().enumerate() {
                if value.is_nan() {
                    assert!(b[i].is_nan() && h[i].is_nan());
                } else {
                    assert_eq!(b[i].to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
                    assert_eq!(h[i].to_bits(), f16::from_f32(value).to_bits(), "{value:e}");
                }
            }
        }
    }

    #[test]
    fn widening_and_crossing_are_exact() {
        let pool = Pool::new(2);
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let mut wide = vec![0f32; all.len()];
        let mut crossed = vec![0u16; all.len()];
        for elem in [Elem::BF16, Elem::F16] {
            // SAFETY: the vectors have equal lengths.
            unsafe {
                let src = all.as_ptr().cast();
                convert(&pool, src, elem, wide.as_mut_ptr().cast(), Elem::F32, all.len());
            }
            for (&bits, &value) in all.iter().zip(&wide) {
                let want = match elem {
                    Elem::BF16 => bf16::from_bits(bits).to_f32(),
                    _ => f16::from_bits(bits).to_f32(),
                };
                assert!(value == want || value.is_nan() && want.is_nan());
            }
        }
        // SAFETY: the vectors have equal lengths.
        unsafe {
            let dst = crossed.as_mut_ptr().cast();
            convert(&pool, all.as_ptr().cast(), Elem::F16, dst, Elem::BF16, all.len());
        }
        for (&from, &to) in all.iter().zip(&crossed) {
            let want = bf16::from_f32(f16::from_bits(from).to_f32());
            let got = bf16::from_bits(to);
            assert!(got == want || got.is_nan() && want.is_nan());
        }
    }
}
