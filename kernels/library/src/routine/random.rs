//! Random numbers and masks by Philox4x32-10 (Salmon et al. 2011).
//!
//! Number `i` is word `i mod 4` of the block whose counter is `i div 4` and the number of the tensor. Element `e` of `n` is number
//! `position · n + e`, with the position from the generator's state. Results depend on nothing else.
//!
//! Uniform numbers are exact. Normal ones use polynomials without fused multiply-add, so that `cuda/random.cu`, which does the same, is
//! bit-identical.

use crate::pool::{Pool, Shareable};
use crate::simd::vectorized;
use serde::{Deserialize, Serialize};

/// Elements per chunk of work.
const CHUNK: usize = 1 << 14;
/// Blocks that are computed side by side, if more than a few are needed.
const BLOCKS: usize = 16;
const FEW: usize = 2;

/// A mask of `len` elements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RandomMask {
    /// Number of elements.
    pub len: usize,
    /// The probability that an element is 1.
    pub keep: f64,
    /// The number of this mask.
    pub id: u32,
}

/// `len` numbers `offset + scale · z`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Random {
    /// Number of elements.
    pub len: usize,
    /// Whether `z` is normal; else it is uniform.
    pub normal: bool,
    /// The offset.
    pub offset: f32,
    /// The factor.
    pub scale: f32,
    /// The maximum of the numbers, if any.
    pub most: Option<f32>,
    /// The number of this tensor.
    pub id: u32,
}

impl RandomMask {
    /// Writes the mask, one byte per element, for the state `[seed, rank, count, ranks, accumulation]`.
    ///
    /// # Safety
    /// `out` must be writable for `len` bytes.
    pub unsafe fn run(&self, pool: &Pool, state: [i64; 5], out: *mut u8) {
        let kept = self.kept();
        let mask = |words: [u32; 4]| words.map(|word| u8::from(kept(word)));
        // SAFETY: as the caller says.
        unsafe { draw(pool, self.len, self.id, state, mask, out) }
    }

    /// Writes a number for each element of the mask from `first` on: `factor` if it is 1, otherwise 0.
    pub fn factors(&self, state: [i64; 5], first: usize, factor: f32, out: &mut [f32]) {
        let kept = self.kept();
        let of = |words: [u32; 4]| words.map(|word| if kept(word) { factor } else { 0.0 });
        let number = position(state).wrapping_mul(self.len as u64).wrapping_add(first as u64);
        fill(out, number, self.id, key_of(state), of);
    }

    /// Whether the element of a word is 1.
    fn kept(&self) -> impl Fn(u32) -> bool + Copy + Sync {
        let limit = (self.keep * 4_294_967_296.0) as u64;
        // The largest word of an element that is kept, if any is.
        let last = limit.saturating_sub(1).min(u64::from(u32::MAX)) as u32;
        move |word| word <= last && limit > 0
    }
}

impl Random {
    /// Writes the numbers for the state `[seed, rank, count, ranks, accumulation]`.
    ///
    /// # Safety
    /// `out` must be writable for `len` elements.
    pub unsafe fn run(&self, pool: &Pool, state: [i64; 5], out: *mut f32) {
        let Random { offset, scale, most, .. } = *self;
        let most = most.unwrap_or(f32::INFINITY);
        let affine = |z: f32| (offset + scale * z).min(most);
        // SAFETY: as the caller says.
        unsafe {
            match self.normal {
                true => draw(pool, self.len, self.id, state, |w| normal(w).map(affine), out),
                false => {
                    let uniform = |w: [u32; 4]| w.map(|w| affine(uniform(w)));
                    draw(pool, self.len, self.id, state, uniform, out);
                }
            }
        }
    }
}

/// The position of a state's micro-step in the order of the data.
fn position([_, rank, count, ranks, accumulation]: [i64; 5]) -> u64 {
    let accumulation = accumulation.max(1) as u64;
    let (step, micro_step) = (count as u64 / accumulation, count as u64 % accumulation);
    let part = step.wrapping_mul(ranks as u64).wrapping_add(rank as u64);
    part.wrapping_mul(accumulation).wrapping_add(micro_step)
}

/// Writes `of` applied to the words of `len` elements.
///
/// # Safety
/// `out` must be writable for `len` elements.
unsafe fn draw<T: Copy>(
    pool: &Pool,
    len: usize,
    id: u32,
    state: [i64; 5],
    of: impl Fn([u32; 4]) -> [T; 4] + Sync,
    out: *mut T,
) {
    let start = position(state).wrapping_mul(len as u64);
    let out = Shareable::new(out);
    pool.run(len.div_ceil(CHUNK), &|chunk| {
        let (first, last) = (chunk * CHUNK, len.min((chunk + 1) * CHUNK));
        // SAFETY: each chunk writes its own part.
        let part = unsafe { std::slice::from_raw_parts_mut(out.get().add(first), last - first) };
        fill(part, start.wrapping_add(first as u64), id, key_of(state), &of);
    });
}

fn key_of(state: [i64; 5]) -> [u32; 2] {
    [state[0] as u32, (state[0] as u64 >> 32) as u32]
}

/// Writes `of` applied to the words from that of `number` on.
fn fill<T: Copy>(
    mut out: &mut [T],
    mut number: u64,
    id: u32,
    key: [u32; 2],
    of: impl Fn([u32; 4]) -> [T; 4],
) {
    while !out.is_empty() {
        let (block, skip) = (number / 4, (number % 4) as usize);
        let mut words = [[0; 4]; BLOCKS];
        if out.len() + skip > 4 * FEW {
            philox_of_blocks(block, id, key, &mut words);
        } else {
            for (i, words) in words.iter_mut().enumerate().take(FEW) {
                let block = block.wrapping_add(i as u64);
                *words = philox([block as u32, (block >> 32) as u32, id, 0], key);
            }
        }
        let made = words.map(&of);
        let made = &made.as_flattened()[skip..];
        let (part, rest) = out.split_at_mut(made.len().min(out.len()));
        part.copy_from_slice(&made[..part.len()]);
        number = number.wrapping_add(part.len() as u64);
        out = rest;
    }
}

/// In the open interval from 0 to 1.
fn uniform(word: u32) -> f32 {
    (2 * (word >> 9) + 1) as f32 * f32::from_bits(0x3380_0000)
}

/// The Box-Muller transform of two pairs of words.
fn normal([a, b, c, d]: [u32; 4]) -> [f32; 4] {
    let ([x, y], [z, w]) = (pair(a, b), pair(c, d));
    [x, y, z, w]
}

fn pair(u: u32, v: u32) -> [f32; 2] {
    let radius = (-2.0 * log((u | 1) as f32)).sqrt();
    // The nearest quarter of a turn, and the remainder, between −1/8 and 1/8 of a turn.
    let quarter = v.wrapping_add(1 << 29) >> 30;
    let rest = v.wrapping_sub(quarter << 30) as i32 as f32 * 1.462_918_1e-9;
    let (sin, cos) = sin_cos(rest);
    let (sin, cos) = match quarter {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    };
    [radius * cos, radius * sin]
}

/// The logarithm of `x` over 2³², for `x` from 1 to 2³².
///
/// With `x = 2ᵉ(1 + f)` and `s = f/(2 + f)`, that is `(e − 32) ln 2 + 2 artanh s`; the terms of the series
/// beyond s⁹ are below f32's precision.
fn log(x: f32) -> f32 {
    let bits = x.to_bits();
    // The power of two that leaves a factor between √½ and √2.
    let exponent = bits.wrapping_sub(0x3f35_04f3) >> 23;
    let f = f32::from_bits(bits.wrapping_sub(exponent << 23)) - 1.0;
    let s = f / (2.0 + f);
    let q = s * s;
    let tail = q * (0.666_666_7 + q * (0.4 + q * (0.285_714_3 + q * 0.222_222_22)));
    let e = exponent as f32 - 32.0;
    // ln 2 in two parts, of which the first times e is exact.
    e * 0.693_359_4 + (2.0 * s + (s * tail + e * -2.121_944_4e-4))
}

/// Sine and cosine between −π/4 and π/4, by their series.
fn sin_cos(x: f32) -> (f32, f32) {
    let q = x * x;
    let sin = q * (-0.166_666_67 + q * (8.333_333e-3 + q * (-1.984_127e-4 + q * 2.755_731_9e-6)));
    let cos =
        q * q * (4.166_666_7e-2 + q * (-1.388_888_9e-3 + q * (2.480_158_7e-5 - q * 2.755_732e-7)));
    (x + x * sin, 1.0 - q * 0.5 + cos)
}

/// Ten rounds of Philox4x32.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        counter = round(counter, key);
        key = next_key(key);
    }
    counter
}

#[inline(always)]
fn round(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let a = u64::from(0xD251_1F53_u32) * u64::from(counter[0]);
    let b = u64::from(0xCD9E_8D57_u32) * u64::from(counter[2]);
    [
        (b >> 32) as u32 ^ counter[1] ^ key[0],
        b as u32,
        (a >> 32) as u32 ^ counter[3] ^ key[1],
        a as u32,
    ]
}

#[inline(always)]
fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)]
}

vectorized! {
    /// The words of [`BLOCKS`] blocks from number `block` on.
    fn philox_of_blocks(block: u64, id: u32, key: [u32; 2], words: &mut [[u32; 4]; BLOCKS]) {
        let numbers: [u64; BLOCKS] = std::array::from_fn(|i| block.wrapping_add(i as u64));
        let mut a = numbers.map(|number| number as u32);
        let mut b = numbers.map(|number| (number >> 32) as u32);
        let (mut c, mut d) = ([id; BLOCKS], [0; BLOCKS]);
        let mut key = key;
        for _ in 0..10 {
            for (((a, b), c), d) in a.iter_mut().zip(&mut b).zip(&mut c).zip(&mut d) {
                [*a, *b, *c, *d] = round([*a, *b, *c, *d], key);
            }
            key = next_key(key);
        }
        for ((((words, a), b), c), d) in words.iter_mut().zip(a).zip(b).zip(c).zip(d) {
            *words = [a, b, c, d];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(normal: bool, len: usize, id: u32, state: [i64; 5]) -> Vec<f32> {
        let draws = Random { len, normal, offset: 0.0, scale: 1.0, most: None, id };
        let mut out = vec![7.0; len];
        // SAFETY: the vector holds the numbers.
        unsafe { draws.run(&Pool::new(2), state, out.as_mut_ptr()) };
        out
    }

    #[test]
    fn factors_are_those_of_the_mask() {
        for len in [5, 63, 64, 65, 300] {
            let mask = RandomMask { len, keep: 0.5, id: 3 };
            let (state, mut whole) = ([11, 2, 3, 4, 1], vec![9; len]);
            // SAFETY: the vector holds the mask.
            unsafe { mask.run(&Pool::new(1), state, whole.as_mut_ptr()) };
            for first in 0..len.min(9) {
                let mut part = vec![7.0; len - first];
                mask.factors(state, first, 2.0, &mut part);
                let equal = |(f, kept): (&f32, &u8)| *f == 2.0 * f32::from(*kept);
                assert!(part.iter().zip(&whole[first..]).all(equal), "{len}, {first}");
            }
        }
    }

    /// Also behind the end of a word of the counter, and where lengths make parts of blocks.
    #[test]
    fn blocks_side_by_side_are_those_one_by_one() {
        for (len, state) in [
            (1_001, [7, 0, 3, 1, 1]),
            (4 << 20, [5, 0, 1 << 10, 1, 1]),
            (100_000, [1 << 40 | 3, 1, 42_950, 2, 1]),
        ] {
            let mask = RandomMask { len, keep: 0.25, id: 6 };
            let mut found = vec![7; len];
            // SAFETY: the vector holds the mask.
            unsafe { mask.run(&Pool::new(2), state, found.as_mut_ptr()) };
            let key = [state[0] as u32, (state[0] >> 32) as u32];
            let start = position(state) * len as u64;
            for (e, found) in found.iter().enumerate().step_by(if len > 10_000 { 37 } else { 1 }) {
                let number = start + e as u64;
                let block = number / 4;
                let words = philox([block as u32, (block >> 32) as u32, 6, 0], key);
                assert_eq!(
                    *found,
                    u8::from(words[(number % 4) as usize] < 1 << 30),
                    "{e} of {len}"
                );
            }
        }
        for (keep, all) in [(0.0, 0), (1.0, 1)] {
            let mut found = vec![7; 300];
            // SAFETY: the vector holds the mask.
            unsafe {
                let mask = RandomMask { len: 300, keep, id: 1 };
                mask.run(&Pool::new(1), [1; 5], found.as_mut_ptr());
            }
            assert_eq!(found, [all; 300]);
        }
    }

    #[test]
    fn masks_are_likely_enough_and_differ_by_everything() {
        let mask = |id, state| {
            let mask = RandomMask { len: 40_001, keep: 0.9, id };
            let mut out = vec![7; mask.len];
            // SAFETY: the vector holds the mask.
            unsafe { mask.run(&Pool::new(2), state, out.as_mut_ptr()) };
            out
        };
        let first = mask(0, [1, 0, 0, 2, 1]);
        assert_eq!(first, mask(0, [1, 0, 0, 2, 1]));
        assert!(first.iter().all(|&b| b <= 1));
        let kept = first.iter().filter(|b| **b == 1).count() as f64 / first.len() as f64;
        assert!((kept - 0.9).abs() < 0.01, "{kept}");
        let states = [[2, 0, 0, 2, 1], [1 << 32 | 1, 0, 0, 2, 1], [1, 1, 0, 2, 1], [1, 0, 1, 2, 1]];
        let others = states.map(|state| mask(0, state));
        for other in others.iter().chain([&mask(1, [1, 0, 0, 2, 1])]) {
            let differing = first.iter().zip(other).filter(|(a, b)| a != b).count();
            assert!(differing > 6_000, "{differing}");
        }
    }

    /// The largest distance between the distribution of the numbers and the one given, times √n.
    fn kolmogorov_smirnov(mut numbers: Vec<f32>, cdf: impl Fn(f64) -> f64) -> f64 {
        numbers.sort_by(f32::total_cmp);
        let n = numbers.len() as f64;
        let distance = |(i, x): (usize, &f32)| {
            let p = cdf(f64::from(*x));
            (p - i as f64 / n).abs().max((p - (i + 1) as f64 / n).abs())
        };
        numbers.iter().enumerate().map(distance).fold(0.0, f64::max) * n.sqrt()
    }

    /// The normal distribution function, by the series of Marsaglia 2004.
    fn phi(x: f64) -> f64 {
        if x.abs() > 8.0 {
            return f64::from(u8::from(x > 0.0));
        }
        let (mut sum, mut term, mut k) = (x, x, 1.0);
        while sum + term != sum {
            k += 2.0;
            term *= x * x / k;
            sum += term;
        }
        0.5 + sum * (-0.5 * x * x - 0.918_938_533_204_672_7).exp()
    }

    #[test]
    fn numbers_are_distributed_as_they_should_be() {
        // One in a hundred thousand samples of such a distribution is further away than 2.5.
        for (id, len) in [(0, 200_001), (9, 50_000)] {
            let z = numbers(true, len, id, [3, 1, 5, 2, 2]);
            let moment = |k| z.iter().map(|x| f64::from(*x).powi(k)).sum::<f64>() / len as f64;
            let root = (len as f64).sqrt();
            assert!((moment(1) * root).abs() < 4.0, "{}", moment(1));
            assert!(((moment(2) - 1.0) * root).abs() < 6.0, "{}", moment(2));
            assert!((moment(3) * root).abs() < 16.0, "{}", moment(3));
            assert!(((moment(4) - 3.0) * root).abs() < 40.0, "{}", moment(4));
            assert!(kolmogorov_smirnov(z, phi) < 2.5);
            let u = numbers(false, len, id, [3, 1, 5, 2, 2]);
            assert!(u.iter().all(|u| 0.0 < *u && *u < 1.0));
            assert!(kolmogorov_smirnov(u, |x| x) < 2.5);
        }
    }

    #[test]
    fn neighbors_examples_steps_ranks_and_nodes_are_independent() {
        let n = 60_000;
        let z = |id, state| numbers(true, n, id, state);
        let first = z(0, [1, 0, 0, 2, 1]);
        let correlation = |a: &[f32], b: &[f32]| {
            let product = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b);
            a.iter().zip(b).map(product).sum::<f64>() / (a.len() as f64).sqrt()
        };
        for other in [
            z(0, [1, 1, 0, 2, 1]),
            z(0, [1, 0, 1, 2, 1]),
            z(1, [1, 0, 0, 2, 1]),
            z(0, [2, 0, 0, 2, 1]),
        ] {
            assert!(correlation(&first, &other).abs() < 4.5);
        }
        for lag in [1, 2, 3, 4, 100] {
            assert!(correlation(&first[lag..], &first[..n - lag]).abs() < 4.5, "{lag}");
        }
        // Squares too: sine and cosine of one pair share their radius.
        let squares: Vec<f32> = first.iter().map(|x| (x * x - 1.0) / 2f32.sqrt()).collect();
        assert!(correlation(&squares[1..], &squares[..n - 1]).abs() < 4.5);
    }

    #[test]
    fn an_example_has_the_same_numbers_whatever_reads_it() {
        let of = |len, rank, count, ranks, accumulation| {
            numbers(true, len, 3, [9, rank, count, ranks, accumulation])
        };
        // The second step of 12 examples of 5 numbers.
        let whole = of(60, 0, 1, 1, 1);
        let ranks: Vec<f32> = (0..3).flat_map(|rank| of(20, rank, 1, 3, 1)).collect();
        let both: Vec<f32> = (0..2)
            .flat_map(|rank| (0..2).flat_map(move |micro| of(15, rank, 2 + micro, 2, 2)))
            .collect();
        assert!(whole == ranks && whole == both);
    }

    #[test]
    fn polynomials_are_precise() {
        for i in 0..200_000_u32 {
            let word = i.wrapping_mul(0x9E37_79B9) | 1;
            let found = f64::from(log(word as f32));
            let expected = (f64::from(word as f32) / 2f64.powi(32)).ln();
            assert!((found - expected).abs() <= 3e-7 * expected.abs().max(1e-7), "{word}: {found}");
            let x = (f64::from(i) / 1e5 - 1.0) * std::f64::consts::FRAC_PI_4;
            let (sin, cos) = sin_cos(x as f32);
            let (s, c) = f64::from(x as f32).sin_cos();
            assert!((f64::from(sin) - s).abs() <= 1.5e-7 * s.abs().max(1e-30), "{x}");
            assert!((f64::from(cos) - c).abs() <= 1.2e-7, "{x}");
        }
        assert_eq!(log(4_294_967_296.0), 0.0);
    }
}
