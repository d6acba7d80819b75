//! Dropout of attention weights: each is kept and divided by the probability of that, or replaced by 0.

use super::{Attention, Tile};
use crate::routine::random::RandomMask;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Which weights are kept, and what becomes of those.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// Factor of kept weights.
    pub factor: f32,
    /// The mask of the weights `[batch, heads, q_len, kv_len]` if it is drawn, from the state of the generator; otherwise it is stored, as
    /// bytes.
    pub drawn: Option<RandomMask>,
}

impl Dropout {
    /// Writes the factors of weights of the keys `keys` in a row of a tile.
    ///
    /// # Safety
    /// `kept` must be the state of the generator, or the mask.
    pub(super) unsafe fn factors(
        &self,
        shape: &Attention,
        kept: *const u8,
        (tile, row): (&Tile, usize),
        keys: Range<usize>,
        out: &mut [f32],
    ) {
        let row = (tile.batch * shape.heads + tile.head) * shape.q_len + tile.first + row;
        let first = row * shape.kv_len + keys.start;
        let out = &mut out[keys];
        match &self.drawn {
            Some(mask) => {
                // SAFETY: the caller vouches for the state.
                let state = unsafe { kept.cast::<[i64; 5]>().read() };
                mask.factors(state, first, self.factor, out);
            }
            None => {
                for (i, out) in out.iter_mut().enumerate() {
                    // SAFETY: the caller vouches for the mask.
                    let kept = unsafe { *kept.add(first + i) } != 0;
                    *out = if kept { self.factor } else { 0.0 };
                }
            }
        }
    }
}
