//! Convolution and its two gradients: GEMMs over unfolded images ([`dense`]), over images that taps read at offsets (`direct`), or over
//! transformed tiles ([`winograd`], for 3 × 3 taps in f32), and sums for vectors of positions for groups of few channels ([`depthwise`]).
//!
//! Sums are f32. Work is split by shape alone, so results do not depend on the number of threads.

mod dense;
mod depthwise;
#[cfg(target_arch = "x86_64")]
mod direct;
#[cfg(target_arch = "x86_64")]
mod direct_weight;
#[cfg(target_arch = "x86_64")]
mod interleave;
#[cfg(test)]
mod tests;
mod tiles;
mod unfold;
mod winograd;

use crate::dtype::Elem;
use crate::pool::Pool;
use crate::routine::gemm::Gemm;
use crate::window::Window;
use serde::{Deserialize, Serialize};
pub(crate) use unfold::plane;

/// Channels and filters of a group that are few.
const FEW: usize = 4;

/// A convolution of dense operands `x[N, G·C, …]`, `w[G·M, C, …]`, `y[N, G·M, …]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conv {
    /// Element type of the operands.
    pub elem: Elem,
    /// Element type of the result.
    pub out: Elem,
    /// Images (N).
    pub batch: usize,
    /// Groups (G).
    pub groups: usize,
    /// Channels of a group (C).
    pub channels: usize,
    /// Filters of a group (M).
    pub filters: usize,
    /// How the kernel slides.
    pub window: Window,
}

impl Conv {
    /// The threads among which channels and filters are divided: those of the pool, unless sums of a part of them could be in another
    /// order.
    fn threads(&self, pool: &Pool) -> usize {
        /// As for so many threads on every pool.
        const ANY: usize = 8;
        if Gemm::sums_by_depth(self.elem) { pool.threads() } else { ANY }
    }

    /// The fewest parts into which each of so many equal chunks is cut for all threads to have the same work. Many chunks level out by
    /// themselves.
    fn parts(&self, pool: &Pool, chunks: usize) -> usize {
        /// Chunks per thread that are many.
        const MANY: usize = 8;
        let threads = self.threads(pool);
        if chunks >= MANY * threads { 1 } else { threads / gcd(chunks.max(1), threads) }
    }

    /// Whether gradients are sums for vectors of positions: GEMMs would have tiles that so few channels don't fill. Forward, GEMMs of a few
    /// filters take less time.
    fn has_few_channels(&self) -> bool {
        self.channels == 1 || self.groups > 1 && self.channels.max(self.filters) <= FEW
    }

    /// `y = x ∗ w`.
    ///
    /// # Safety
    /// The pointers must be aligned and valid for tensors of these shapes; `y` overlaps no operand.
    pub unsafe fn forward(&self, pool: &Pool, x: *const u8, w: *const u8, y: *mut u8) {
        // SAFETY: passed on.
        unsafe {
            match self.channels {
                1 => self.depthwise(pool, x, w, y),
                _ if self.is_winograd_forward() => self.winograd(pool, x, (w, false), y),
                #[cfg(target_arch = "x86_64")]
                _ if self.direct(pool, x, w, y) => {}
                _ => self.dense(pool, x, w, y),
            }
        }
    }

    /// `dx`, the gradient for `x`; also the transposed convolution of `dy`.
    ///
    /// # Safety
    /// As for [`Conv::forward`].
    pub unsafe fn grad_input(&self, pool: &Pool, dy: *const u8, w: *const u8, dx: *mut u8) {
        // SAFETY: passed on.
        unsafe {
            match self.has_few_channels() {
                true => self.depthwise_grad_input(pool, dy, w, dx),
                #[cfg(target_arch = "x86_64")]
                _ if self.direct_grad_input(pool, dy, w, dx) => {}
                _ => self.dense_grad_input(pool, dy, w, dx),
            }
        }
    }

    /// `dw`, the gradient for `w`.
    ///
    /// # Safety
    /// As for [`Conv::forward`].
    pub unsafe fn grad_weight(&self, pool: &Pool, dy: *const u8, x: *const u8, dw: *mut u8) {
        // SAFETY: passed on.
        unsafe {
            match self.has_few_channels() {
                true => self.depthwise_grad_weight(pool, dy, x, dw),
                _ if self.is_winograd_grad_weight() => self.winograd_grad_weight(pool, dy, x, dw),
                #[cfg(target_arch = "x86_64")]
                _ if self.direct_grad_weight(pool, dy, x, dw) => {}
                _ => self.dense_grad_weight(pool, dy, x, dw),
            }
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
