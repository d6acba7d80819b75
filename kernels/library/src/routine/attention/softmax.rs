//! Row functions of the softmax: masking, maximum, exponentials.

use super::{Attention, Mask, MaskKind, Tile};
use crate::dtype::Elem;
use crate::routine::convert::to_f32;
use crate::simd::vectorized;

/// Independent partial results within a row.
const LANES: usize = 16;

/// Below this, `lse` may be so coarse that the exponentials of a row do not add up to 1: `frit_ir::ops::attention::COARSE`.
pub const COARSE: f32 = -64.0;

/// The `lse` of a row of which every score was replaced by a low number, and has no gradient:
/// `frit_ir::ops::attention::FILLED`.
pub const FILLED: f32 = -1.267_650_6e30;

/// Elements of a mask that are widened to f32 at a time.
const WIDENED: usize = 64;

/// Adds the mask to row `row` of a tile of scores.
///
/// # Safety
/// `mask` must be valid for the shape.
pub(super) unsafe fn apply_mask(
    layout: &Mask,
    mask: *const u8,
    tile: &Tile,
    row: usize,
    scores: &mut [f32],
) {
    let at = layout.row(tile, row);
    // SAFETY: the caller vouches for the mask.
    unsafe {
        match layout.kind {
            MaskKind::Additive(elem) => {
                let mask = mask.offset(at * elem.size() as isize);
                if layout.key == 1 && elem == Elem::F32 {
                    add(scores, std::slice::from_raw_parts(mask.cast(), scores.len()));
                } else if layout.key == 1 {
                    let mut wide = [0.0; WIDENED];
                    for (i, part) in scores.chunks_mut(WIDENED).enumerate() {
                        let wide = &mut wide[..part.len()];
                        to_f32(mask.add(i * WIDENED * elem.size()), elem, wide);
                        add(part, wide);
                    }
                } else {
                    for (key, score) in scores.iter_mut().enumerate() {
                        *score += elem.load(mask, key as isize * layout.key);
                    }
                }
            }
            MaskKind::Keep => {
                let mask = mask.offset(at);
                for (key, score) in scores.iter_mut().enumerate() {
                    if *mask.offset(key as isize * layout.key) == 0 {
                        *score = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// Adds the gradient of row `row` of a tile of scores to the gradient of the mask.
///
/// # Safety
/// `d_mask` must be valid for the shape, and nothing else may write the row's elements meanwhile.
pub(super) unsafe fn add_to_mask(
    layout: &Mask,
    d_mask: *mut f32,
    tile: &Tile,
    row: usize,
    scores: &[f32],
) {
    let at = layout.row(tile, row);
    // SAFETY: the caller vouches for the gradient.
    unsafe {
        let d_mask = d_mask.offset(at);
        if layout.key == 1 {
            add(std::slice::from_raw_parts_mut(d_mask, scores.len()), scores);
        } else {
            for (key, score) in scores.iter().enumerate() {
                *d_mask.offset(key as isize * layout.key) += score;
            }
        }
    }
}

impl Mask {
    /// The first element for row `row` of a tile.
    fn row(&self, tile: &Tile, row: usize) -> isize {
        tile.batch as isize * self.batch
            + tile.head as isize * self.head
            + (tile.first + row) as isize * self.query
    }
}

/// Turns a row of masked scores into exponentials relative to the maximum; returns their sum and
/// `lse`. A row without any finite or NaN score becomes zero, with sum 0 and lse -inf.
pub(super) fn exponentials(scores: &mut [f32]) -> (f32, f32) {
    let max = maximum(scores);
    if max == f32::NEG_INFINITY && !scores.iter().any(|s| s.is_nan()) {
        scores.fill(0.0);
        return (0.0, f32::NEG_INFINITY);
    }
    let sum = exp_shifted(scores, max);
    (sum, max + sum.ln())
}

/// Turns a row of masked scores into probabilities, given its `lse`.
pub(super) fn probabilities(scores: &mut [f32], lse: f32) {
    if lse == f32::NEG_INFINITY {
        scores.fill(0.0);
        return;
    }
    let sum = exp_shifted(scores, lse);
    if lse < COARSE {
        scale(scores, 1.0 / sum);
    }
}

/// A row of scores, prepared for the functions above.
pub(super) struct Row<'a> {
    /// The scores, up to the keys of the tile rounded up to whole lanes: no function has to compute a rest.
    pub(super) line: &'a mut [f32],
    /// End of the keys visible to the row.
    pub(super) seen: usize,
    /// Hidden keys before the visible ones.
    pub(super) hidden: usize,
    /// `seen`, rounded up to whole lanes; the gap is -inf.
    pub(super) padded: usize,
}

impl<'a> Row<'a> {
    /// Row `row` of a tile.
    ///
    /// # Safety
    /// `scores` must hold the computed tile, with rows of whole lanes, and no other reference to
    /// the row may exist.
    pub(super) unsafe fn new(shape: &Attention, tile: &Tile, scores: *mut f32, row: usize) -> Self {
        let visible = shape.visible(tile.first + row);
        let (hidden, seen) = (visible.start.min(tile.keys), visible.end.min(tile.keys));
        let padded = seen.next_multiple_of(LANES);
        // SAFETY: the row has room for whole lanes; the gap is written before it is borrowed.
        unsafe {
            let start = scores.add(row * tile.stride);
            for key in seen..padded {
                start.add(key).write(f32::NEG_INFINITY);
            }
            let line = std::slice::from_raw_parts_mut(start, tile.lanes());
            Row { line, seen, hidden, padded }
        }
    }
}

impl Tile {
    /// The keys rounded up to whole lanes.
    pub(super) fn lanes(&self) -> usize {
        self.keys.next_multiple_of(LANES)
    }
}

/// `e^x` within 2 ulp for `x` up to 88, beyond which it stays at `e^88`; 0 below the normal range,
/// NaN for NaN. Cephes' polynomial after a two-step reduction by ln 2.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    const MIN: f32 = -87.336_55;
    const MAX: f32 = 88.0;
    let low = x < MIN;
    // Comparisons instead of `clamp`, so that NaN propagates.
    let c = if low { MIN } else { x };
    let c = if c > MAX { MAX } else { c };
    let shifted = c.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, c);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_1e-4;
    let p = r.mul_add(p, 1.398_2e-3);
    let p = r.mul_add(p, 8.333_452e-3);
    let p = r.mul_add(p, 4.166_579_6e-2);
    let p = r.mul_add(p, 1.666_666_5e-1);
    let p = r.mul_add(p, 5e-1);
    let p = (r * r).mul_add(p, r) + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits() - 127);
    let value = p * f32::from_bits(exponent << 23);
    if low { 0.0 } else { value }
}

/// The sum of the lanes, in pairs.
#[inline(always)]
fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

vectorized! {
    fn add(scores: &mut [f32], mask: &[f32]) {
        for (score, mask) in scores.iter_mut().zip(mask) {
            *score += mask;
        }
    }
}

vectorized! {
    /// The maximum of the scores that are not NaN.
    fn maximum(scores: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (groups, rest) = scores.as_chunks::<LANES>();
        for group in groups {
            for (lane, &score) in lanes.iter_mut().zip(group) {
                *lane = if score > *lane { score } else { *lane };
            }
        }
        for (lane, &score) in lanes.iter_mut().zip(rest) {
            *lane = if score > *lane { score } else { *lane };
        }
        let mut width = LANES;
        while width > 1 {
            width /= 2;
            for lane in 0..width {
                let other = lanes[lane + width];
                lanes[lane] = if other > lanes[lane] { other } else { lanes[lane] };
            }
        }
        lanes[0]
    }
}

vectorized! {
    /// Replaces each score by `e^(score - shift)` and returns their sum.
    fn exp_shifted(scores: &mut [f32], shift: f32) -> f32 {
        let mut lanes = [0f32; LANES];
        let (groups, rest) = scores.as_chunks_mut::<LANES>();
        for group in groups {
            for (lane, score) in lanes.iter_mut().zip(group) {
                *score = exp(*score - shift);
                *lane += *score;
            }
        }
        for (lane, score) in lanes.iter_mut().zip(rest) {
            *score = exp(*score - shift);
            *lane += *score;
        }
        total(lanes)
    }
}

vectorized! {
    /// The sum of products of two rows.
    pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0f32; LANES];
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (a, b) in a.iter().zip(b) {
            for lane in 0..LANES {
                lanes[lane] = a[lane].mul_add(b[lane], lanes[lane]);
            }
        }
        for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
            lanes[lane] = a.mul_add(*b, lanes[lane]);
        }
        total(lanes)
    }
}

vectorized! {
    /// The gradient of the scores, into `dp`: `p * (dp - d)`.
    pub(super) fn score_gradient(p: &[f32], dp: &mut [f32], d: f32) {
        for (dp, p) in dp.iter_mut().zip(p) {
            *dp = p * (*dp - d);
        }
    }
}

vectorized! {
    /// Multiplies each element of a row by its own factor.
    pub(super) fn multiply(row: &mut [f32], factors: &[f32]) {
        for (value, factor) in row.iter_mut().zip(factors) {
            *value *= factor;
        }
    }
}

vectorized! {
    /// Multiplies a row by a factor.
    pub(super) fn scale(row: &mut [f32], factor: f32) {
        for value in row {
            *value *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_and_keeps_the_special_values() {
        let mut worst = 0f64;
        for i in 0..400_000 {
            let x = -87.3 + i as f32 * (175.3 / 400_000.0);
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - want).abs() / want);
        }
        assert!(worst < 2.5e-7, "{worst:e}");
        assert_eq!((exp(0.0), exp(-100.0), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert_eq!((exp(f32::INFINITY), exp(200.0)), (exp(88.0), exp(88.0)));
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn exponentials_of_special_rows() {
        let mut masked = [f32::NEG_INFINITY; 19];
        assert_eq!(exponentials(&mut masked), (0.0, f32::NEG_INFINITY));
        assert!(masked.iter().all(|&p| p == 0.0));
        let mut nan = [f32::NEG_INFINITY; 19];
        nan[17] = f32::NAN;
        assert!(exponentials(&mut nan).0.is_nan());
        let mut nan = [1.0; 19];
        nan[3] = f32::NAN;
        assert!(exponentials(&mut nan).0.is_nan());
    }
}
