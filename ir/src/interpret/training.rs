//! Loss scale, statistics of gradients, unscaling.

use super::call::Call;
use super::{Evaluate, Evaluated};
use crate::ops::reproducible::{DIGIT_BITS, DIGITS, LEAST_EXPONENT};
use crate::ops::{GradStats, LossScale, RoundStats, TreeSum, Unscale, UpdateLossScale, UpdateStep};
use crate::{DType, Tensor};

impl Evaluate for LossScale {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        Ok(vec![call.real(0, vec![call.scalar(0) * self.factor])])
    }
}

impl Evaluate for GradStats {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        if self.exact {
            return Ok(vec![exact_stats(call)]);
        }
        let (mut bad, mut squares) = (0u64, 0.0);
        for i in 0..call.inputs.len() {
            for g in call.floats(i).iter() {
                bad += u64::from(!g.is_finite());
                squares += g * g;
            }
        }
        Ok(vec![call.real(0, vec![bad as f64, squares])])
    }
}

/// The number of non-finite elements, and the digits of the exact sum of squares.
fn exact_stats(call: &Call<'_>) -> Tensor {
    let (mut bad, mut digits) = (0u64, vec![0u64; DIGITS]);
    for i in 0..call.inputs.len() {
        for &g in call.floats(i).iter() {
            if !g.is_finite() {
                bad += 1;
                continue;
            }
            // |g| = m · 2^e with an integer m below 2²⁴.
            let bits = (g as f32).to_bits();
            let (exponent, fraction) = (bits >> 23 & 0xff, u64::from(bits & 0x7f_ffff));
            let m = fraction | u64::from(exponent > 0) << 23;
            let e = exponent.max(1) as i32 - 150;
            let at = (2 * e - LEAST_EXPONENT) as u32;
            let mut left = u128::from(m * m) << (at % DIGIT_BITS);
            let mut place = (at / DIGIT_BITS) as usize;
            while left > 0 {
                left += u128::from(digits[place]);
                digits[place] = (left & 0xffff) as u64;
                left >>= DIGIT_BITS;
                place += 1;
            }
        }
    }
    let values = [bad].into_iter().chain(digits).map(|x| x as f64).collect();
    call.real(0, values)
}

impl Evaluate for RoundStats {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let stats = call.floats(0);
        // Equal sums have equal digits once every digit is below 2¹⁶.
        let (mut digits, mut carry) = ([0u64; DIGITS], 0);
        for (digit, x) in digits.iter_mut().zip(&stats[1..]) {
            let sum = *x as u64 + carry;
            (*digit, carry) = (sum & 0xffff, sum >> DIGIT_BITS);
        }
        let first = carry as f64;
        let whole = digits.iter().rev().fold(first, |sum, d| sum * 65536.0 + *d as f64);
        let squares = whole * 2f64.powi(LEAST_EXPONENT);
        let squares = if stats[0] == 0.0 { squares } else { f64::INFINITY };
        let [count, loss] = [stats[1 + DIGITS], stats[2 + DIGITS]];
        Ok(vec![call.real(0, vec![stats[0], squares, count, loss])])
    }
}

impl Evaluate for TreeSum {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let levels = call.inputs.len() - 2;
        let (merged, to) = TreeSum::place(call.ints(1)[0], levels);
        let mut sum = call.floats(0).into_owned();
        for level in 0..merged {
            let waiting = call.floats(2 + level);
            let both = sum.iter_mut().zip(waiting.iter());
            both.for_each(|(x, s)| *x = DType::F32.round(s + *x));
        }
        let result = |level| match level == to {
            true => call.real(level, sum.clone()),
            false => call.inputs[2 + level].clone(),
        };
        Ok((0..levels).map(result).collect())
    }
}

impl Evaluate for Unscale {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let stats = call.floats(0);
        let [bad, squares, count, loss_sum] = [stats[0], stats[1], stats[2], stats[3]];
        let (scale, clip) = (call.scalar(1), call.scalar(2));
        let count = count.max(1.0);
        let unscale = self.capacity / count / scale;
        let norm = squares.sqrt() * unscale;
        let limit = if clip == 0.0 { 1.0 } else { (clip / (norm + 1e-6)).min(1.0) };
        let found_inf = if bad == 0.0 { 0.0 } else { 1.0 };
        Ok([unscale * limit, found_inf, norm, loss_sum / count]
            .into_iter()
            .enumerate()
            .map(|(i, x)| call.real(i, vec![x]))
            .collect())
    }
}

impl Evaluate for UpdateLossScale {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let [scale, tracker, found_inf, growth, backoff, interval] =
            [0, 1, 2, 3, 4, 5].map(|i| call.scalar(i));
        let (scale, tracker) = if found_inf != 0.0 {
            (scale * backoff, 0.0)
        } else if tracker + 1.0 >= interval {
            let grown = scale * growth;
            (if DType::F32.round(grown).is_finite() { grown } else { scale }, 0.0)
        } else {
            (scale, tracker + 1.0)
        };
        Ok(vec![call.real(0, vec![scale]), call.real(1, vec![tracker])])
    }
}

impl Evaluate for UpdateStep {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (step, found_inf) = (call.scalar(0), call.scalar(1));
        Ok(vec![call.real(0, vec![if found_inf != 0.0 { step } else { step + 1.0 }])])
    }
}
