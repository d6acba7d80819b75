//! Random masks by Philox4x32-10 (Salmon et al. 2011): element `e` is word `e mod 4` of the block whose
//! counter is `e div 4`, the number of the mask and the count of its uses. Bits depend on nothing else.

use crate::pool::{Pool, Shareable};

/// Elements per chunk of work, a multiple of 4.
const CHUNK: usize = 1 << 14;

/// A mask of `len` elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomMask {
    /// Number of elements.
    pub len: usize,
    /// How likely an element is 1.
    pub keep: f64,
    /// The number of this mask.
    pub id: u32,
}

impl RandomMask {
    /// Writes the mask, one byte per element, for the state `[seed, rank, count]`.
    ///
    /// # Safety
    /// `out` must be writable for `len` bytes.
    pub unsafe fn run(&self, pool: &Pool, state: [i64; 3], out: *mut u8) {
        let key = [state[0] as u32, state[1] as u32];
        let limit = (self.keep * 4_294_967_296.0) as u64;
        let out = Shareable::new(out);
        pool.run(self.len.div_ceil(CHUNK), &|chunk| {
            let first = chunk * CHUNK;
            let last = self.len.min(first + CHUNK);
            for block in (first..last).step_by(4) {
                let index = (block / 4) as u64;
                let counter = [index as u32, (index >> 32) as u32, self.id, state[2] as u32];
                let words = philox(counter, key);
                for (i, word) in words.into_iter().enumerate().take(last - block) {
                    // SAFETY: each chunk writes its own part of the mask.
                    unsafe { out.get().add(block + i).write(u8::from(u64::from(word) < limit)) };
                }
            }
        });
    }
}

/// Ten rounds of Philox4x32.
#[inline(always)]
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(0xD251_1F53_u32) * u64::from(counter[0]);
        let b = u64::from(0xCD9E_8D57_u32) * u64::from(counter[2]);
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
    use super::*;

    #[test]
    fn masks_are_likely_enough_and_differ_by_everything() {
        let mask = |id, state| {
            let mask = RandomMask { len: 40_001, keep: 0.9, id };
            let mut out = vec![7; mask.len];
            // SAFETY: the vector holds the mask.
            unsafe { mask.run(&Pool::new(2), state, out.as_mut_ptr()) };
            out
        };
        let first = mask(0, [1, 0, 0]);
        assert_eq!(first, mask(0, [1, 0, 0]));
        assert!(first.iter().all(|&b| b <= 1));
        let kept = first.iter().filter(|b| **b == 1).count() as f64 / first.len() as f64;
        assert!((kept - 0.9).abs() < 0.01, "{kept}");
        for other in
            [mask(1, [1, 0, 0]), mask(0, [2, 0, 0]), mask(0, [1, 1, 0]), mask(0, [1, 0, 1])]
        {
            let differing = first.iter().zip(&other).filter(|(a, b)| a != b).count();
            assert!(differing > 6_000, "{differing}");
        }
    }
}
