//! Quantization to the values of an 8-bit float, stored in the original element type.
//!
//! With s the largest power of two such that s × amax is representable: y = round(s × x) / s. A power-of-two scale
//! changes no significand, so bf16 represents y exactly, and GEMMs of such values equal those of 8-bit tensor cores.

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::routine::convert::{from_f32, to_f32};

/// Elements per chunk.
const CHUNK: usize = 4096;

/// An 8-bit float.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// Explicit significand bits.
    bits: i32,
    /// The exponent of the smallest normal number.
    least: i32,
    /// The largest number.
    largest: f32,
    /// The value to which infinity is rounded.
    infinity: f32,
}

impl Format {
    /// 1 sign, 4 exponent and 3 significand bits; no infinity.
    pub const E4M3: Format = Format { bits: 3, least: -6, largest: 448.0, infinity: f32::NAN };
    /// 1 sign, 5 exponent and 2 significand bits.
    pub const E5M2: Format =
        Format { bits: 2, least: -14, largest: 57344.0, infinity: f32::INFINITY };

    /// The nearest value to `x` times `scale`, ties to even, divided by `scale`. Finite values saturate; NaN stays NaN.
    fn round(self, x: f32, scale: f32) -> f32 {
        if x.is_infinite() {
            return self.infinity.copysign(x);
        }
        let x = (x * scale).clamp(-self.largest, self.largest);
        let exponent = ((x.to_bits() >> 23) & 0xff) as i32 - 127;
        let unit = power(exponent.clamp(self.least, 127) - self.bits);
        (x / unit).round_ties_even() * unit / scale
    }

    /// The largest power of two that brings `amax` to at most the largest value, within normal numbers; 1
    /// if `amax` is zero or not finite.
    fn scale(self, amax: f32) -> f32 {
        if !(amax > 0.0 && amax.is_finite()) {
            return 1.0;
        }
        let ratio = f64::from(self.largest) / f64::from(amax);
        power((((ratio.to_bits() >> 52) & 0x7ff) as i32 - 1023).clamp(-126, 100))
    }
}

/// 2 to the power of `e`, which must be that of a normal number.
fn power(e: i32) -> f32 {
    f32::from_bits(((e + 127) as u32) << 23)
}

/// Rounds `len` elements with the scale of `recent`, the recent amax, or, if that is zero, of their own amax. Returns
/// their amax.
///
/// # Safety
/// `x` must be readable and `y` writable for `len` elements of type `elem`; they must be equal or not overlap.
pub unsafe fn quantize(
    pool: &Pool,
    x: *const u8,
    y: *mut u8,
    (len, elem): (usize, Elem),
    format: Format,
    recent: f32,
) -> f32 {
    let n_chunks = len.div_ceil(CHUNK);
    let [largest] = pool.common([n_chunks * size_of::<f32>()]);
    let largest = Shareable::new(largest.cast::<f32>());
    let (x, y) = (Shareable::new(x.cast_mut()), Shareable::new(y));
    let part = |i: usize| (i * CHUNK, CHUNK.min(len - i * CHUNK));
    pool.run(n_chunks, &|i| {
        let (first, count) = part(i);
        let mut wide = [0.0_f32; CHUNK];
        let wide = &mut wide[..count];
        // SAFETY: within the caller's elements; every chunk has its own maximum.
        unsafe {
            to_f32(elem.at(x.get().cast_const(), first as isize), elem, wide);
            let finite = wide.iter().filter(|x| x.is_finite());
            largest.get().add(i).write(finite.fold(0.0, |m, x| m.max(x.abs())));
        }
    });
    // SAFETY: written above.
    let amax = (0..n_chunks).map(|i| unsafe { largest.get().add(i).read() }).fold(0.0, f32::max);
    let scale = format.scale(if recent > 0.0 { recent } else { amax });
    pool.run(n_chunks, &|i| {
        let (first, count) = part(i);
        let mut wide = [0.0_f32; CHUNK];
        let wide = &mut wide[..count];
        // SAFETY: as above; chunks are disjoint.
        unsafe {
            to_f32(elem.at(x.get().cast_const(), first as isize), elem, wide);
            wide.iter_mut().for_each(|x| *x = format.round(*x, scale));
            from_f32(wide, y.get().add(first * elem.size()), elem);
        }
    });
    amax
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn values_of_the_formats_are_their_own_rounding() {
        for (format, least) in [(Format::E4M3, power(-9)), (Format::E5M2, power(-16))] {
            let round = |x| format.round(x, 1.0);
            let mut x = least;
            let mut count = 0;
            while x <= format.largest {
                assert_eq!(round(x), x);
                // Halfway to the next is even.
                let exponent = ((x.to_bits() >> 23) as i32 - 127).max(format.least);
                let next = x + power(exponent - format.bits);
                let even = if ((x / (next - x)) as u32).is_multiple_of(2) { x } else { next };
                assert_eq!(round((x + next) / 2.0), even.min(format.largest));
                assert_eq!(round(-x), -x);
                x = next;
                count += 1;
            }
            // All positive encodings but zero and those that are not finite.
            assert_eq!(count, if format.bits == 3 { 126 } else { 123 });
            assert_eq!(round(2.0 * format.largest), format.largest);
            assert_eq!(round(least * 0.49), 0.0);
            assert!(round(f32::NAN).is_nan());
        }
        assert!(Format::E4M3.round(f32::INFINITY, 1.0).is_nan());
        assert_eq!(Format::E5M2.round(f32::NEG_INFINITY, 1.0), f32::NEG_INFINITY);
    }

    #[test]
    fn scales_are_powers_of_two_that_fit() {
        for amax in [1e-6, 0.02, 1.0, 447.0, 448.0, 449.0, 1e6, 1e38] {
            let scale = Format::E4M3.scale(amax);
            assert!(amax * scale <= 448.0 && amax * scale * 2.0 > 448.0, "{amax}: {scale}");
            assert_eq!(scale.to_bits() & 0x7f_ffff, 0);
        }
        assert_eq!((Format::E4M3.scale(0.0), Format::E4M3.scale(f32::INFINITY)), (1.0, 1.0));
        // Subnormal amax values are scaled as far as the inverse is exact.
        assert_eq!(Format::E5M2.scale(1e-45), power(100));
    }

    #[test]
    fn is_the_same_for_any_thread_count_and_within_half_a_step() {
        let x: Vec<bf16> =
            (0..10_000).map(|i| bf16::from_f32(((i * 7919) % 1009) as f32 / 1e4 - 0.04)).collect();
        let mut found = Vec::new();
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            let mut y = vec![bf16::ZERO; x.len()];
            let (from, to) = (x.as_ptr().cast(), y.as_mut_ptr().cast());
            let elements = (x.len(), Elem::BF16);
            // SAFETY: sizes fit.
            let amax = unsafe { quantize(&pool, from, to, elements, Format::E4M3, 0.0) };
            assert_eq!(amax, x.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max));
            for (x, y) in x.iter().zip(&y) {
                let (x, y) = (x.to_f32(), y.to_f32());
                assert!((x - y).abs() <= (x.abs() / 16.0).max(amax / 224.0 / 1024.0), "{x}: {y}");
            }
            found.push(y);
        }
        assert_eq!(found[0], found[1]);
    }
}
