//! Sums of terms for vectors of results, a few at a time in registers.

use crate::simd::vectorized;

/// Results of a vector.
pub(super) const LANES: usize = 16;
/// Sums that are in registers: as many hide the latency of multiply-adds, and with AVX2 leave one for the other factor.
const SUMS: usize = 7;

/// A vector of results.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    /// Where the first one reads a term at 0.
    pub(super) from: usize,
    /// Where it is written.
    pub(super) to: usize,
}

/// What is added to each result: an element at this distance times a weight.
#[derive(Clone, Copy)]
pub(super) struct Term {
    pub(super) at: usize,
    pub(super) weight: f32,
}

/// Calls a function of a number of sums, at most [`SUMS`], as a constant.
macro_rules! with_sums {
    ($n:expr, $run:ident($($arg:expr),*)) => {
        match $n {
            1 => $run::<1>($($arg),*),
            2 => $run::<2>($($arg),*),
            3 => $run::<3>($($arg),*),
            4 => $run::<4>($($arg),*),
            5 => $run::<5>($($arg),*),
            6 => $run::<6>($($arg),*),
            _ => $run::<SUMS>($($arg),*),
        }
    };
}

vectorized! {
    /// Writes the sums of terms of all strips. The caller vouches for what they read and write.
    pub(super) fn sum(x: *const f32, terms: &[Term], strips: &[Strip], to: *mut f32) {
        for strips in strips.chunks(SUMS) {
            // SAFETY: passed on.
            unsafe { with_sums!(strips.len(), sum_some(x, terms, strips, to)) };
        }
    }
}

#[inline(always)]
unsafe fn sum_some<const N: usize>(x: *const f32, terms: &[Term], strips: &[Strip], to: *mut f32) {
    let from: [*const f32; N] = std::array::from_fn(|i| x.wrapping_add(strips[i].from));
    let mut sums = [[0.0; LANES]; N];
    for term in terms {
        for i in 0..N {
            // SAFETY: the caller vouches for what the strips read.
            let x = unsafe { from[i].add(term.at).cast::<[f32; LANES]>().read_unaligned() };
            for lane in 0..LANES {
                sums[i][lane] = term.weight.mul_add(x[lane], sums[i][lane]);
            }
        }
    }
    for i in 0..N {
        // SAFETY: the caller vouches for where the strips are written.
        unsafe { to.add(strips[i].to).cast::<[f32; LANES]>().write_unaligned(sums[i]) };
    }
}

vectorized! {
    /// Adds to each sum the products of its elements, which lie at a distance from what the strips read, with those of `dy`, which lie
    /// where the strips are written. The caller vouches for what is read.
    pub(super) fn add_products(
        x: (*const f32, &[usize]),
        dy: *const f32,
        strips: &[Strip],
        sums: &mut [[f32; LANES]],
    ) {
        let (x, at) = x;
        // Parts of one size, of which the last may have less: as many as must be.
        let size = at.len().div_ceil(at.len().div_ceil(SUMS).max(1)).max(1);
        for (at, sums) in at.chunks(size).zip(sums.chunks_mut(size)) {
            // SAFETY: passed on.
            unsafe { with_sums!(at.len(), add_some((x, at), dy, strips, sums)) };
        }
    }
}

#[inline(always)]
unsafe fn add_some<const N: usize>(
    (x, at): (*const f32, &[usize]),
    dy: *const f32,
    strips: &[Strip],
    to: &mut [[f32; LANES]],
) {
    let from: [*const f32; N] = std::array::from_fn(|i| x.wrapping_add(at[i]));
    // Sums of an image begin anew: they round less.
    let mut sums = [[0.0; LANES]; N];
    for strip in strips {
        // SAFETY: the caller vouches for what the strips read.
        let dy = unsafe { dy.add(strip.to).cast::<[f32; LANES]>().read_unaligned() };
        for i in 0..N {
            // SAFETY: as above.
            let x = unsafe { from[i].add(strip.from).cast::<[f32; LANES]>().read_unaligned() };
            for lane in 0..LANES {
                sums[i][lane] = dy[lane].mul_add(x[lane], sums[i][lane]);
            }
        }
    }
    for (to, sums) in to.iter_mut().zip(sums) {
        for (to, sum) in to.iter_mut().zip(sums) {
            *to += sum;
        }
    }
}

/// The sum of all lanes, in one order.
pub(super) fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}
