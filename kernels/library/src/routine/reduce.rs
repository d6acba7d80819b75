//! Sums over ranges in a fixed order: blocks of a fixed size, each in f64 lanes, whose results are summed in sequence. The result does
//! not depend on the number of threads.

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::routine::convert::to_f32;
use crate::simd::vectorized;

/// Elements per block.
const BLOCK: usize = 4096;
/// Blocks per chunk of work.
const BLOCKS_PER_CHUNK: usize = 16;
/// Independent partial sums within a block.
const LANES: usize = 16;

/// A sum and how many of its elements were infinite or NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sum {
    /// The sum; infinite or NaN if an element is.
    pub value: f64,
    /// Number of infinite and NaN elements.
    pub n_non_finite: u64,
}

/// The sum of squares of `len` contiguous elements.
///
/// # Safety
/// `src` must be aligned and readable for `len` elements.
pub unsafe fn sum_squares(pool: &Pool, src: *const u8, elem: Elem, len: usize) -> Sum {
    // SAFETY: passed on.
    unsafe { blocks(pool, src, elem, len, block_squares) }
}

/// The sum of `len` contiguous elements.
///
/// # Safety
/// `src` must be aligned and readable for `len` elements.
pub unsafe fn sum(pool: &Pool, src: *const u8, elem: Elem, len: usize) -> Sum {
    // SAFETY: passed on.
    unsafe { blocks(pool, src, elem, len, block_sum) }
}

unsafe fn blocks(
    pool: &Pool,
    src: *const u8,
    elem: Elem,
    len: usize,
    reduce: fn(&[f32]) -> Sum,
) -> Sum {
    let n_blocks = len.div_ceil(BLOCK);
    let [partial] = pool.common([n_blocks * size_of::<Sum>()]);
    let (src, partial) = (Shareable::new(src), Shareable::new(partial.cast::<Sum>()));
    pool.run(n_blocks.div_ceil(BLOCKS_PER_CHUNK), &|chunk| {
        let first = chunk * BLOCKS_PER_CHUNK;
        for block in first..n_blocks.min(first + BLOCKS_PER_CHUNK) {
            let start = elem.at(src.get(), (block * BLOCK) as isize);
            let count = BLOCK.min(len - block * BLOCK);
            // SAFETY: blocks are parts of the caller's range; each writes its own partial sum.
            unsafe {
                let value = if elem == Elem::F32 {
                    reduce(std::slice::from_raw_parts(start.cast(), count))
                } else {
                    let mut wide = [0f32; BLOCK];
                    to_f32(start, elem, &mut wide[..count]);
                    reduce(&wide[..count])
                };
                partial.get().add(block).write(value);
            }
        }
    });
    let mut total = Sum::default();
    for block in 0..n_blocks {
        // SAFETY: written above.
        let part = unsafe { partial.get().add(block).read() };
        total.value += part.value;
        total.n_non_finite += part.n_non_finite;
    }
    total
}

vectorized! {
    fn block_squares(values: &[f32]) -> Sum {
        lanes(values, |x| x * x)
    }
}

vectorized! {
    fn block_sum(values: &[f32]) -> Sum {
        lanes(values, |x| x)
    }
}

#[inline(always)]
fn lanes(values: &[f32], term: impl Fn(f64) -> f64) -> Sum {
    let mut sums = [0f64; LANES];
    let mut bad = [0u32; LANES];
    let (groups, rest) = values.as_chunks::<LANES>();
    for group in groups {
        for lane in 0..LANES {
            sums[lane] += term(f64::from(group[lane]));
            bad[lane] += u32::from(group[lane].to_bits() & 0x7fff_ffff >= 0x7f80_0000);
        }
    }
    for (lane, &value) in rest.iter().enumerate() {
        sums[lane] += term(f64::from(value));
        bad[lane] += u32::from(!value.is_finite());
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    Sum { value: sums[0], n_non_finite: bad.iter().map(|&n| u64::from(n)).sum() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    fn values(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 % 1009) as f32 - 500.0) * 0.013).collect()
    }

    #[test]
    fn equals_the_exact_sum_for_any_thread_count() {
        for len in [0, 1, 15, 17, 4095, 4096, 4097, 300_001] {
            let x = values(len);
            let squares: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            let total: f64 = x.iter().map(|&v| f64::from(v)).sum();
            let mut first = None;
            for threads in [1, 2, 3] {
                let pool = Pool::new(threads);
                // SAFETY: the vector has `len` elements.
                let (s, t) = unsafe {
                    let src = x.as_ptr().cast();
                    (sum_squares(&pool, src, Elem::F32, len), sum(&pool, src, Elem::F32, len))
                };
                assert!((s.value - squares).abs() <= 1e-12 * squares, "{len}");
                assert!((t.value - total).abs() <= 1e-12 * squares.max(1.0), "{len}");
                assert_eq!((s.n_non_finite, t.n_non_finite), (0, 0));
                let bits = (s.value.to_bits(), t.value.to_bits());
                assert_eq!(*first.get_or_insert(bits), bits);
            }
        }
    }

    #[test]
    fn counts_what_is_not_finite_in_each_type() {
        let pool = Pool::new(2);
        let mut x = values(10_000);
        x[3] = f32::NAN;
        x[9_999] = f32::NEG_INFINITY;
        x[5_000] = f32::INFINITY;
        let narrow: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
        // SAFETY: both vectors have 10,000 elements.
        let (wide, narrow) = unsafe {
            (
                sum_squares(&pool, x.as_ptr().cast(), Elem::F32, x.len()),
                sum_squares(&pool, narrow.as_ptr().cast(), Elem::BF16, x.len()),
            )
        };
        assert!(wide.value.is_nan() && narrow.value.is_nan());
        assert_eq!((wide.n_non_finite, narrow.n_non_finite), (3, 3));
    }
}
