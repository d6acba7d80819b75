//! Sums that do not depend on how a step is divided into ranks and micro-steps: in a binary tree, or exact.

use super::Operand;
use crate::pool::{Pool, Shareable};
use crate::simd::vectorized;

/// Elements of a chunk: as many squares of 48 bits as a sum of 64 bits holds.
const CHUNK: usize = 1 << 16;

/// Sums by exponent: one for every exponent of a finite f32, and one of what is not finite.
const EXPONENTS: usize = 256;

/// Independent sums, so that elements with equal exponents do not wait for one another.
const LANES: usize = 4;

/// Digits of an exact sum of squares, each of 16 bits, the first of weight 2⁻³⁰⁴.
pub const DIGITS: usize = 40;

/// By exponent, sums of the squares of integers, of which element `i` has the weight 2^(2i − 300); the last one is a count.
type Squares = [u64; EXPONENTS];

/// Squares of some elements, added by exponent.
fn squares(values: &[f32]) -> Squares {
    let mut lanes = [[0u64; EXPONENTS]; LANES];
    let mut add = |lane: usize, value: f32| {
        let bits = value.to_bits();
        let exponent = (bits >> 23 & 0xff) as usize;
        // A subnormal number has the exponent of the least normal one, without its leading bit.
        let normal = u64::from(exponent > 0);
        let m = u64::from(bits & 0x7f_ffff) | normal << 23;
        let square = if exponent == EXPONENTS - 1 { 1 } else { m * m };
        lanes[lane][exponent + usize::from(exponent == 0)] += square;
    };
    let (groups, rest) = values.as_chunks::<LANES>();
    for group in groups {
        for (lane, &value) in group.iter().enumerate() {
            add(lane, value);
        }
    }
    rest.iter().for_each(|&value| add(0, value));
    std::array::from_fn(|i| lanes.iter().map(|lane| lane[i]).sum())
}

/// Writes the number of non-finite elements, and the digits of the exact sum of the squares of all others.
///
/// # Safety
/// The operands are of f32, aligned and readable; `out` has room for `1 + DIGITS`.
pub(super) unsafe fn exact_stats(pool: &Pool, reads: &[Operand], out: *mut f32) {
    let mut total = [0u128; EXPONENTS];
    for operand in reads {
        let len = operand.bytes / size_of::<f32>();
        let n_chunks = len.div_ceil(CHUNK);
        let [parts] = pool.common([n_chunks * size_of::<Squares>()]);
        let (from, parts) =
            (Shareable::new(operand.pointer), Shareable::new(parts.cast::<Squares>()));
        pool.run(n_chunks, &|chunk| {
            let count = CHUNK.min(len - chunk * CHUNK);
            // SAFETY: chunks are parts of the operand; each writes its own sums.
            unsafe {
                let first = from.get().cast::<f32>().add(chunk * CHUNK);
                let values = std::slice::from_raw_parts(first, count);
                parts.get().add(chunk).write(squares(values));
            }
        });
        for chunk in 0..n_chunks {
            // SAFETY: written above.
            let part = unsafe { parts.get().add(chunk).read() };
            total.iter_mut().zip(part).for_each(|(sum, x)| *sum += u128::from(x));
        }
    }
    let bad = total[EXPONENTS - 1];
    let digits = digits(&total[..EXPONENTS - 1]);
    // SAFETY: as for the caller.
    unsafe {
        out.write(bad as f32);
        for (i, digit) in digits.into_iter().enumerate() {
            out.add(1 + i).write(digit as f32);
        }
    }
}

/// The digits of sums by exponent.
fn digits(sums: &[u128]) -> [u64; DIGITS] {
    let mut digits = [0u64; DIGITS];
    for (i, &sum) in sums.iter().enumerate() {
        // 2i − 300 = −304 + 16 · place + shift
        let (place, shift) = ((2 * i + 4) / 16, (2 * i + 4) % 16);
        let mut left = sum << shift;
        for digit in &mut digits[place..] {
            *digit += (left & 0xffff) as u64;
            left >>= 16;
        }
    }
    carried(&mut digits);
    digits
}

/// Makes every digit but the last less than 2¹⁶.
fn carried(digits: &mut [u64; DIGITS]) {
    for i in 0..DIGITS - 1 {
        digits[i + 1] += digits[i] >> 16;
        digits[i] &= 0xffff;
    }
}

/// Rounds the exact sum in statistics; two more elements follow it.
///
/// # Safety
/// `stats` has `3 + DIGITS` elements, `out` room for 4.
pub(super) unsafe fn round_stats(stats: *const f32, out: *mut f32) {
    // SAFETY: as for the caller.
    let stats = unsafe { std::slice::from_raw_parts(stats, 3 + DIGITS) };
    let mut digits: [u64; DIGITS] = std::array::from_fn(|i| stats[1 + i] as u64);
    carried(&mut digits);
    let whole = digits.iter().rev().fold(0f64, |sum, digit| sum * 65536.0 + *digit as f64);
    let least = f64::from_bits((1023 - 304) << 52);
    let squares = if stats[0] == 0.0 { (whole * least) as f32 } else { f32::INFINITY };
    let rounded = [stats[0], squares, stats[1 + DIGITS], stats[2 + DIGITS]];
    // SAFETY: as for the caller.
    unsafe { out.cast::<[f32; 4]>().write_unaligned(rounded) };
}

/// Elements of a chunk of a sum in a tree.
const TREE_CHUNK: usize = 1 << 14;
/// Elements that are added in cache.
const BLOCK: usize = 1024;

vectorized! {
    fn add(sum: &mut [f32], waiting: &[f32]) -> () {
        // The earlier operand first, as collectives add: of two NaN the first stays.
        for (x, s) in sum.iter_mut().zip(waiting) {
            let both = *s + *x;
            *x = both;
        }
    }
}

/// Adds the operand `reads[0]` with the number `reads[1]` to a sum in a binary tree whose levels are the other operands and, after
/// it, the results; these may be where the operands are.
///
/// # Safety
/// All have equal sizes and are of f32, but the number, which is an i64; results are where their operands are or apart from them.
pub(super) unsafe fn tree_sum(pool: &Pool, reads: &[Operand], writes: &[Operand]) {
    let [value, number, levels @ ..] = reads else { return };
    // SAFETY: as for the caller.
    let k = unsafe { number.pointer.cast::<i64>().read_unaligned() };
    let merged = (k.trailing_ones() as usize).min(levels.len());
    let to = if merged == levels.len() { 0 } else { merged };
    let len = value.bytes / size_of::<f32>();
    let at = |operand: &Operand| Shareable::new(operand.pointer.cast::<f32>());
    let (value, out) = (at(value), at(&writes[to]));
    let waiting: Vec<_> = levels[..merged].iter().map(at).collect();
    pool.run(len.div_ceil(TREE_CHUNK), &|chunk| {
        let end = len.min((chunk + 1) * TREE_CHUNK);
        let mut sum = [0f32; BLOCK];
        for first in (chunk * TREE_CHUNK..end).step_by(BLOCK) {
            let n = BLOCK.min(end - first);
            // SAFETY: blocks are parts of the operands, and are read before they are written.
            unsafe {
                sum[..n].copy_from_slice(std::slice::from_raw_parts(value.get().add(first), n));
                for level in &waiting {
                    add(&mut sum[..n], std::slice::from_raw_parts(level.get().add(first), n));
                }
                std::ptr::copy_nonoverlapping(sum.as_ptr(), out.get().add(first), n);
            }
        }
    });
    for (level, (from, to_level)) in levels.iter().zip(writes).enumerate() {
        if level != to && from.pointer != to_level.pointer {
            // SAFETY: they are apart.
            unsafe {
                std::ptr::copy_nonoverlapping(from.pointer, to_level.pointer, from.bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(values: &[&[f32]], threads: usize) -> [f32; 1 + DIGITS] {
        let operand = |v: &&[f32]| Operand { pointer: v.as_ptr() as *mut u8, bytes: v.len() * 4 };
        let reads: Vec<_> = values.iter().map(operand).collect();
        let mut out = [f32::NAN; 1 + DIGITS];
        // SAFETY: sizes fit.
        unsafe { exact_stats(&Pool::new(threads), &reads, out.as_mut_ptr()) };
        out
    }

    fn rounded(stats: &[f32]) -> f32 {
        let all: Vec<f32> = stats.iter().copied().chain([7.0, 8.0]).collect();
        let mut out = [0f32; 4];
        // SAFETY: sizes fit.
        unsafe { round_stats(all.as_ptr(), out.as_mut_ptr()) };
        assert_eq!(&out[2..], [7.0, 8.0]);
        out[1]
    }

    #[test]
    fn sums_are_exact_in_any_order_and_division() {
        // From the least number to 2³³, with numbers on both sides of zero.
        let value = |i: usize| {
            let bits = (i as u32).wrapping_mul(2_654_435_761);
            f32::from_bits((bits % 0x5000_0000) | ((i as u32 & 1) << 31))
        };
        let mut values: Vec<f32> = (0..200_003).map(value).collect();
        values.extend([0.0, -0.0, f32::from_bits(1), f32::MIN_POSITIVE]);
        let whole = stats(&[&values], 1);
        values.reverse();
        assert_eq!(whole, stats(&[&values], 3));
        let (a, b) = values.split_at(70_001);
        assert_eq!(whole, stats(&[a, b], 2));
        // As ranks add them: without carries.
        let sum: Vec<f32> = stats(&[a], 1).iter().zip(stats(&[b], 1)).map(|(x, y)| x + y).collect();
        assert_eq!(rounded(&sum), rounded(&whole));
        let close: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        assert!((f64::from(rounded(&whole)) / close - 1.0).abs() < 1e-6);
    }

    #[test]
    fn sums_of_what_no_float_adds_exactly() {
        for (values, sum) in [
            (&[1.0, 1e-20, -3.0][..], 10.0),
            (&[f32::from_bits(1)], 0.0),
            (&[], 0.0),
            (&[1e-20, 1e-19], 1.01e-38),
            (&[f32::MAX, 1.0], f32::INFINITY),
            (&[2f32.powi(63), 2f32.powi(63)], 2f32.powi(127)),
        ] {
            let found = stats(&[values], 1);
            assert!(
                found[0] == 0.0
                    && (rounded(&found) == sum || (rounded(&found) / sum - 1.0).abs() < 1e-6)
            );
        }
        // 2⁻²⁹⁸ beside 1, in the digits alone.
        let both = stats(&[&[1.0, f32::from_bits(1)]], 1);
        assert!(both.iter().filter(|d| **d != 0.0).count() == 2);
        let bad = stats(&[&[1.0, f32::NAN, f32::NEG_INFINITY]], 1);
        assert!(bad[0] == 2.0 && rounded(&bad) == f32::INFINITY);
    }

    #[test]
    fn a_tree_adds_neighbors_first() {
        let n = 20_000;
        let value = |k: usize, i: usize| ((k * 7919 + i * 31) % 1009) as f32 * 0.37 - 180.0;
        for levels in 1..=4usize {
            let mut sums = vec![vec![f32::NAN; n]; levels];
            for mut k in 0..1i64 << levels {
                let mut x: Vec<f32> = (0..n).map(|i| value(k as usize, i)).collect();
                let operand =
                    |v: &mut Vec<f32>| Operand { pointer: v.as_mut_ptr().cast(), bytes: n * 4 };
                let number = Operand { pointer: (&raw mut k).cast(), bytes: 8 };
                let writes: Vec<_> = sums.iter_mut().map(operand).collect();
                let reads = [&[operand(&mut x), number], &writes[..]].concat();
                // SAFETY: sizes fit.
                unsafe { tree_sum(&Pool::new(1 + levels % 2), &reads, &writes) };
            }
            let tree = |i: usize| {
                let mut all: Vec<f32> = (0..1 << levels).map(|k| value(k, i)).collect();
                while all.len() > 1 {
                    all = all.chunks(2).map(|pair| pair[0] + pair[1]).collect();
                }
                all[0]
            };
            assert!((0..n).all(|i| sums[0][i].to_bits() == tree(i).to_bits()), "{levels}");
        }
    }
}
