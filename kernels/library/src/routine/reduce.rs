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

/// Contiguous elements: where they begin, and how many there are.
pub type Elements = (*const u8, usize);

/// The sum of squares of all parts, part by part.
///
/// # Safety
/// Each part must be aligned and readable for its elements.
pub unsafe fn sum_squares(pool: &Pool, parts: &[Elements], elem: Elem) -> Sum {
    // SAFETY: passed on.
    unsafe { blocks(pool, parts, elem, block_squares) }
}

/// The sum of `len` contiguous elements.
///
/// # Safety
/// `src` must be aligned and readable for `len` elements.
pub unsafe fn sum(pool: &Pool, src: *const u8, elem: Elem, len: usize) -> Sum {
    // SAFETY: passed on.
    unsafe { blocks(pool, &[(src, len)], elem, block_sum) }
}

unsafe fn blocks(pool: &Pool, parts: &[Elements], elem: Elem, reduce: fn(&[f32]) -> Sum) -> Sum {
    // The blocks of all parts are one job, as many parts have few. `ends` counts those up to the end of each part.
    let ends: Vec<usize> = parts
        .iter()
        .scan(0, |end, (_, len)| {
            *end += len.div_ceil(BLOCK);
            Some(*end)
        })
        .collect();
    let n_blocks = ends.last().copied().unwrap_or(0);
    let [partial] = pool.common([n_blocks * size_of::<Sum>()]);
    let partial = partial.cast::<Sum>();
    let at = Shareable::new((parts, partial));
    pool.run(n_blocks.div_ceil(BLOCKS_PER_CHUNK), &|chunk| {
        let (parts, partial) = at.get();
        let first = chunk * BLOCKS_PER_CHUNK;
        let mut part = ends.partition_point(|end| *end <= first);
        for block in first..n_blocks.min(first + BLOCKS_PER_CHUNK) {
            while ends[part] <= block {
                part += 1;
            }
            let (src, len) = parts[part];
            let start = (block + len.div_ceil(BLOCK) - ends[part]) * BLOCK;
            let count = BLOCK.min(len - start);
            let src = elem.at(src, start as isize);
            // SAFETY: blocks are parts of the caller's ranges; each writes its own partial sum.
            unsafe {
                let value = if elem == Elem::F32 {
                    reduce(std::slice::from_raw_parts(src.cast(), count))
                } else {
                    let mut wide = [0f32; BLOCK];
                    to_f32(src, elem, &mut wide[..count]);
                    reduce(&wide[..count])
                };
                partial.add(block).write(value);
            }
        }
    });
    let (mut total, mut begin) = (Sum::default(), 0);
    for end in ends {
        let mut value = 0.0;
        for block in begin..end {
            // SAFETY: written above.
            let part = unsafe { partial.add(block).read() };
            value += part.value;
            total.n_non_finite += part.n_non_finite;
        }
        total.value += value;
        begin = end;
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
    let (groups, rest) = values.as_chunks::<LANES>();
    for group in groups {
        // Halves are vectors; the compiler makes worse ones of the whole group.
        for (sums, group) in sums.as_chunks_mut::<8>().0.iter_mut().zip(group.as_chunks::<8>().0) {
            for lane in 0..8 {
                sums[lane] += term(f64::from(group[lane]));
            }
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += term(f64::from(*x));
    }
    let is_bad = |x: &f32| u32::from(x.to_bits() & 0x7fff_ffff >= 0x7f80_0000);
    let bad: u32 = values.iter().map(is_bad).sum();
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    Sum { value: sums[0], n_non_finite: u64::from(bad) }
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
                    (sum_squares(&pool, &[(src, len)], Elem::F32), sum(&pool, src, Elem::F32, len))
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
    fn parts_are_summed_one_after_the_other() {
        let x = values(200_000);
        let lens = [0, 1, 4096, 5000, 0, 130_000, 17];
        let parts: Vec<Elements> = lens
            .iter()
            .scan(0, |begin, len| {
                let part = (x[*begin..].as_ptr().cast(), *len);
                *begin += len;
                Some(part)
            })
            .collect();
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            // SAFETY: the parts lie inside of the vector.
            unsafe {
                let each = parts.iter().map(|part| sum_squares(&pool, &[*part], Elem::F32).value);
                let want = each.fold(0.0, |sum, part| sum + part);
                assert_eq!(sum_squares(&pool, &parts, Elem::F32).value, want);
                assert_eq!(sum_squares(&pool, &[], Elem::F32), Sum::default());
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
                sum_squares(&pool, &[(x.as_ptr().cast(), x.len())], Elem::F32),
                sum_squares(&pool, &[(narrow.as_ptr().cast(), narrow.len())], Elem::BF16),
            )
        };
        assert!(wide.value.is_nan() && narrow.value.is_nan());
        assert_eq!((wide.n_non_finite, narrow.n_non_finite), (3, 3));
    }
}
