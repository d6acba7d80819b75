//! Scaled dot-product attention, forward and backward, on tiles of query rows.
//!
//! `S = scale * Q K^T + mask`, `P = softmax(S)`, `O = P V`; `lse` is the log-sum-exp of each row of S. With dropout,
//! `O = (F * P) V`, with the factors `F` of [`dropout`]. Scores exist
//! only for one tile of rows at a time; tiles are multiplied by [`crate::routine::gemm`], scores and sums are f32.
//! Results do not depend on the number of threads.
//!
//! A row without visible keys (all masked, or none in its window) gives a zero output, `lse = -inf` and zero gradients.

mod backward;
mod dropout;
mod forward;
mod softmax;

pub use dropout::Dropout;
pub use softmax::{COARSE, FILLED};

use crate::dtype::Elem;
use crate::routine::gemm::{Gemm, Operand};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The largest and the smallest number of query rows of a tile; the largest is a multiple of the rows of all micro-kernels.
const MAX_ROWS: usize = 96;
const MIN_ROWS: usize = 48;
/// Up to this many keys, causal tiles are small, to compute few masked scores.
const SHORT: usize = 512;
/// Scores of a tile, if the smallest number of rows allows it.
const TILE: usize = 1 << 18;

/// Strides, in elements, of batches, heads and time steps; the elements of one head at one time are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Strides {
    /// Between batches.
    pub batch: isize,
    /// Between heads.
    pub head: isize,
    /// Between time steps.
    pub time: isize,
}

impl Strides {
    /// `[batch, head, time, dim]`, contiguous.
    pub fn heads_first(heads: usize, len: usize, dim: usize) -> Strides {
        Strides {
            batch: (heads * len * dim) as isize,
            head: (len * dim) as isize,
            time: dim as isize,
        }
    }

    /// `[batch, time, head, dim]`, contiguous.
    pub fn time_first(heads: usize, len: usize, dim: usize) -> Strides {
        Strides {
            batch: (heads * len * dim) as isize,
            head: dim as isize,
            time: (heads * dim) as isize,
        }
    }

    fn offset(self, batch: usize, head: usize, time: usize) -> isize {
        batch as isize * self.batch + head as isize * self.head + time as isize * self.time
    }
}

/// What the elements of a mask mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskKind {
    /// Added to the score.
    Additive(Elem),
    /// u8; a key is kept where it is not zero.
    Keep,
}

/// A mask over `[batch, head, query, key]`; a stride of 0 broadcasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mask {
    /// Meaning and element type.
    pub kind: MaskKind,
    /// Elements between batches.
    pub batch: isize,
    /// Elements between (query) heads.
    pub head: isize,
    /// Elements between queries.
    pub query: isize,
    /// Elements between keys.
    pub key: isize,
}

/// Shapes and layout of one attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// Batches.
    pub batch: usize,
    /// Query heads, a multiple of `kv_heads`; head `h` uses key head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Queries.
    pub q_len: usize,
    /// Keys.
    pub kv_len: usize,
    /// Elements of a query and of a key.
    pub head_dim: usize,
    /// Elements of a value and of an output.
    pub value_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Query `i` sees key `j` only if `j <= i`.
    pub causal: bool,
    /// Query `i` sees key `j` only if `|i - j| < window`, if there is one.
    pub window: Option<usize>,
    /// Element type of all tensors but `lse` and the mask.
    pub elem: Elem,
    /// Layout of the queries `[batch, heads, q_len, head_dim]`.
    pub q: Strides,
    /// Layout of the keys `[batch, kv_heads, kv_len, head_dim]`.
    pub k: Strides,
    /// Layout of the values `[batch, kv_heads, kv_len, value_dim]`.
    pub v: Strides,
    /// Layout of the output `[batch, heads, q_len, value_dim]`.
    pub o: Strides,
    /// The mask, if there is one.
    pub mask: Option<Mask>,
    /// Dropout of weights, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout: Option<Dropout>,
}

/// Layout of the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GradientStrides {
    /// Gradient of the output.
    pub d_o: Strides,
    /// Gradient of the queries.
    pub d_q: Strides,
    /// Gradient of the keys.
    pub d_k: Strides,
    /// Gradient of the values.
    pub d_v: Strides,
}

/// What the backward pass reads. `mask` may be null without a mask, `kept` without dropout.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in the formulas above")]
pub struct BackwardInputs {
    pub q: *const u8,
    pub k: *const u8,
    pub v: *const u8,
    pub mask: *const u8,
    pub kept: *const u8,
    pub o: *const u8,
    pub lse: *const f32,
    pub d_o: *const u8,
}

/// What the backward pass writes.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in the formulas above")]
pub struct BackwardOutputs {
    pub d_q: *mut u8,
    pub d_k: *mut u8,
    pub d_v: *mut u8,
    /// Gradient of an added mask, f32 and dense in the shape of the mask; null if it is not wanted.
    pub d_mask: *mut f32,
}

impl Mask {
    /// Elements of a dense mask for this attention.
    fn len(&self, shape: &Attention) -> usize {
        let axes = [
            (self.batch, shape.batch),
            (self.head, shape.heads),
            (self.query, shape.q_len),
            (self.key, shape.kv_len),
        ];
        if axes.iter().any(|(_, size)| *size == 0) {
            return 0;
        }
        1 + axes.iter().map(|(stride, size)| stride.unsigned_abs() * (size - 1)).sum::<usize>()
    }
}

impl Attention {
    /// Gradients laid out as the tensors they belong to.
    pub fn gradient_strides(&self) -> GradientStrides {
        GradientStrides { d_o: self.o, d_q: self.q, d_k: self.k, d_v: self.v }
    }

    /// Query rows of a tile: whole panels of the micro-kernel.
    fn tile_rows(&self) -> usize {
        let panel = Gemm::rows(self.elem);
        let least = MIN_ROWS.next_multiple_of(panel);
        let most = if self.causal && self.kv_len <= SHORT { least } else { MAX_ROWS };
        let rows = (TILE / self.kv_len.max(1)).clamp(least, most) / panel * panel;
        rows.min(self.q_len.max(1))
    }

    /// The keys that query `i` may see.
    fn visible(&self, i: usize) -> Range<usize> {
        let ahead = if self.causal { Some(1) } else { self.window };
        let end = ahead.map_or(self.kv_len, |n| i.saturating_add(n).min(self.kv_len));
        let begin = self.window.map_or(0, |n| (i + 1).saturating_sub(n));
        begin.min(end)..end
    }

    /// The key head of a query head.
    fn kv_head(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    /// The GEMM `Q K^T` of a tile with all keys; smaller tiles use a part of it.
    fn score_gemm(&self, tile_rows: usize) -> Gemm {
        tile_gemm(
            (tile_rows, self.kv_len, self.head_dim),
            rows(self.elem, self.q.time),
            rows(self.elem, self.k.time).transposed(),
            rows(Elem::F32, score_stride(self) as isize),
            self.scale,
        )
    }

    /// Scratch bytes for the factors of a row of weights.
    fn factor_bytes(&self) -> usize {
        if self.dropout.is_some() { self.kv_len * size_of::<f32>() } else { 0 }
    }

    fn check(&self) {
        assert!(
            self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads),
            "{} query heads cannot share {} key heads",
            self.heads,
            self.kv_heads
        );
    }
}

/// One head and the tile of its queries that is computed at a time.
#[derive(Clone, Copy)]
struct Tile {
    batch: usize,
    head: usize,
    /// First query.
    first: usize,
    /// Number of queries.
    rows: usize,
    /// Keys visible to the last query; the others are not computed.
    keys: usize,
    /// Distance between two rows of scores.
    stride: usize,
}

impl Tile {
    fn new(shape: &Attention, batch: usize, head: usize, first: usize) -> Tile {
        let rows = shape.tile_rows().min(shape.q_len - first);
        let keys = shape.visible(first + rows - 1).end;
        Tile { batch, head, first, rows, keys, stride: score_stride(shape) }
    }
}

/// Distance between two rows of scores: whole cache lines.
fn score_stride(shape: &Attention) -> usize {
    shape.kv_len.next_multiple_of(32)
}

/// A GEMM of tiles, `C[m, n] = alpha * A[m, k] @ B[k, n]`.
fn tile_gemm(
    (m, n, k): (usize, usize, usize),
    a: Operand,
    b: Operand,
    c: Operand,
    alpha: f32,
) -> Gemm {
    Gemm { m, n, k, batch: 1, a, b, c, bias: None, accumulate: false, alpha }
}

/// A matrix with contiguous rows.
fn rows(elem: Elem, stride: isize) -> Operand {
    Operand { elem, row: stride, col: 1, batch: 0 }
}

#[cfg(test)]
mod tests;
