//! Random masks.

use super::call::Call;
use crate::Tensor;
use crate::ops::RandomMask;

pub(super) fn random_mask(op: &RandomMask, call: &Call<'_>) -> Vec<Tensor> {
    let state = call.ints(0);
    let key = [state[0] as u32, state[1] as u32];
    let limit = (op.keep * 4_294_967_296.0) as u64;
    let kept = |e: usize| {
        let block = (e / 4) as u64;
        let counter = [block as u32, (block >> 32) as u32, op.id, state[2] as u32];
        i64::from(u64::from(philox(counter, key)[e % 4]) < limit)
    };
    vec![call.integer(0, (0..op.shape.numel()).map(kept).collect())]
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
