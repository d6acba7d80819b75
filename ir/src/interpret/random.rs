//! Random numbers and masks.

use super::call::Call;
use super::{Evaluate, Evaluated};
use crate::ops::random::position;
use crate::ops::{Random, RandomFn, RandomMask};

impl Evaluate for RandomMask {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let limit = (self.keep * 4_294_967_296.0) as u64;
        let words = Words::of(call.ints(0), self.id, self.shape.numel());
        let kept = |e| i64::from(u64::from(words.at(e)) < limit);
        Ok(vec![call.integer(0, (0..self.shape.numel()).map(kept).collect())])
    }
}

impl Evaluate for Random {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let n = self.shape.numel();
        let words = Words::of(call.ints(0), self.id, n);
        let data = match self.f {
            // In f32, so that every device has these bits.
            RandomFn::Uniform => {
                let (offset, scale) = (self.offset as f32, self.scale as f32);
                let number = |e| {
                    let u = (2 * (words.at(e) >> 9) + 1) as f32 * 2f32.powi(-24);
                    f64::from((offset + scale * u).min(self.most()))
                };
                (0..n).map(number).collect()
            }
            RandomFn::Normal => {
                (0..n).map(|e| self.offset + self.scale * words.normal(e)).collect()
            }
        };
        Ok(vec![call.real(0, data)])
    }
}

/// The words of a tensor's elements.
struct Words {
    key: [u32; 2],
    id: u32,
    /// The number of the first element.
    first: u64,
}

impl Words {
    fn of(state: &[i64], id: u32, numel: usize) -> Words {
        let seed = state[0] as u64;
        let first = position(state).wrapping_mul(numel as u64);
        Words { key: [seed as u32, (seed >> 32) as u32], id, first }
    }

    /// The word of element `e`.
    fn at(&self, e: usize) -> u32 {
        self.number(self.first.wrapping_add(e as u64))
    }

    fn number(&self, i: u64) -> u32 {
        let block = i / 4;
        philox([block as u32, (block >> 32) as u32, self.id, 0], self.key)[(i % 4) as usize]
    }

    /// The normal number of element `e`.
    fn normal(&self, e: usize) -> f64 {
        let i = self.first.wrapping_add(e as u64);
        let [u, v] = [self.number(i & !1) | 1, self.number(i | 1)];
        let unit = 2f64.powi(-32);
        let radius = (-2.0 * (f64::from(u as f32) * unit).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * f64::from(v) * unit).sin_cos();
        radius * if i.is_multiple_of(2) { cos } else { sin }
    }
}
/// Ten rounds of Philox4x32.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let product = |m: u32, x: u32| u64::from(m) * u64::from(x);
        let (a, b) = (product(0xD251_1F53, counter[0]), product(0xCD9E_8D57, counter[2]));
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::philox;

    #[test]
    fn the_published_vectors_come_out() {
        let zero = [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
        assert_eq!(philox([0; 4], [0; 2]), zero);
        let ones = [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd];
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), ones);
    }
}
