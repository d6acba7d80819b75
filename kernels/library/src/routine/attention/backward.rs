//! Backward attention. The unit of work is one key head with all query heads that share it, so that the gradients of keys and values
//! have one writer and one summation order.
//!
//! With `D = rowsum(dO * O)`: `dV = (F * P)^T dO`, `dP = F * dO V^T`, `dS = P * (dP - D)`, `dQ = scale * dS K`, `dK = scale * dS^T Q`;
//! the gradient of an added mask is the sum of `dS` over the axes along which the mask was broadcast, in ascending order of batches,
//! heads and queries.

use super::{
    Attention, BackwardInputs, BackwardOutputs, GradientStrides, Tile, rows, score_stride, softmax,
    tile_gemm,
};
use crate::dtype::Elem;
use crate::pool::{Pool, Shareable, Worker};
use crate::routine::convert::{from_f32, to_f32};
use crate::routine::gemm::{Gemm, Operand};

/// Scratch memory of one thread.
#[derive(Clone, Copy)]
struct Parts {
    /// Scores, then probabilities, of a tile.
    p: *mut f32,
    /// Gradient of the probabilities, then of the scores.
    dp: *mut f32,
    /// Either of them converted to the element type, if that is not f32.
    narrow: *mut u8,
    /// Two rows of outputs.
    lines: *mut f32,
    /// Factors of a row of weights.
    factors: *mut f32,
    d_k: *mut f32,
    d_v: *mut f32,
    /// Packed `K^T`, `V^T` and `K`.
    packed: [*mut u8; 3],
}

/// GEMMs whose right operand all tiles of a key head share; smaller tiles use a part of them.
struct TileGemms {
    /// `S = scale * Q K^T`.
    scores: Gemm,
    /// `dP = dO V^T`.
    d_p: Gemm,
    /// `dQ = scale * dS K`.
    d_q: Gemm,
}

impl Attention {
    /// Writes the gradients of queries, keys and values, from those of the output and what the
    /// forward pass read and wrote.
    ///
    /// # Panics
    /// If `heads` is not a multiple of `kv_heads`.
    ///
    /// # Safety
    /// The pointers must be aligned and valid for the shapes; the outputs must not overlap anything
    /// else.
    pub unsafe fn backward(
        &self,
        pool: &Pool,
        strides: &GradientStrides,
        inputs: &BackwardInputs,
        outputs: &BackwardOutputs,
    ) {
        self.check();
        let at = Shareable::new((*inputs, *outputs));
        // Batches or heads that add to the same elements of the mask's gradient form one chunk.
        let (mut batches, mut heads) = (1, 1);
        if let Some(mask) = self.mask.filter(|_| !outputs.d_mask.is_null()) {
            // SAFETY: the caller vouches for the gradient of the mask.
            unsafe { outputs.d_mask.write_bytes(0, mask.len(self)) };
            batches = if mask.batch == 0 { self.batch } else { 1 };
            heads = if mask.head == 0 { self.kv_heads } else { 1 };
        }
        let columns = self.kv_heads / heads;
        pool.run_workers(self.batch / batches.max(1) * columns, &|chunk, worker| {
            let (row, column) = (chunk / columns, chunk % columns);
            for batch in row * batches..(row + 1) * batches {
                for kv_head in column * heads..(column + 1) * heads {
                    let (inputs, outputs) = at.get();
                    // SAFETY: each chunk writes the gradients of its own heads.
                    unsafe {
                        self.backward_head(strides, &inputs, &outputs, batch, kv_head, worker);
                    };
                }
            }
        });
    }

    unsafe fn backward_head(
        &self,
        strides: &GradientStrides,
        inputs: &BackwardInputs,
        outputs: &BackwardOutputs,
        batch: usize,
        kv_head: usize,
        worker: &mut Worker,
    ) {
        let step = self.tile_rows();
        let score = step * score_stride(self);
        let narrow = if self.elem == Elem::F32 { 0 } else { score * self.elem.size() };
        let float = size_of::<f32>();
        let (d_k_len, d_v_len) = (self.kv_len * self.head_dim, self.kv_len * self.value_dim);
        let gemms = self.gemms(strides, step);
        let [p, dp, narrow, lines, factors, d_k, d_v, packed @ ..] = worker.tiles.split([
            score * float,
            score * float,
            narrow,
            2 * self.value_dim * float,
            self.factor_bytes(),
            d_k_len * float,
            d_v_len * float,
            gemms.scores.packed_bytes(),
            gemms.d_p.packed_bytes(),
            gemms.d_q.packed_bytes(),
        ]);
        let parts = Parts {
            p: p.cast(),
            dp: dp.cast(),
            narrow,
            lines: lines.cast(),
            factors: factors.cast(),
            d_k: d_k.cast(),
            d_v: d_v.cast(),
            packed,
        };
        let k = self.elem.at(inputs.k, self.k.offset(batch, kv_head, 0));
        let v = self.elem.at(inputs.v, self.v.offset(batch, kv_head, 0));
        // SAFETY: the parts are as large as asked for; the caller vouches for the tensors.
        unsafe {
            parts.d_k.write_bytes(0, d_k_len);
            parts.d_v.write_bytes(0, d_v_len);
            gemms.scores.pack(k, packed[0]);
            gemms.d_p.pack(v, packed[1]);
            gemms.d_q.pack(k, packed[2]);
            let group = self.heads / self.kv_heads;
            for head in kv_head * group..(kv_head + 1) * group {
                for first in (0..self.q_len).step_by(step) {
                    let tile = Tile::new(self, batch, head, first);
                    self.backward_tile(strides, (inputs, outputs), &gemms, &tile, parts, worker);
                }
            }
            for time in 0..self.kv_len {
                let (d, dv) = (self.head_dim, self.value_dim);
                let line = std::slice::from_raw_parts(parts.d_k.add(time * d), d);
                let to = strides.d_k.offset(batch, kv_head, time);
                from_f32(line, self.elem.at_mut(outputs.d_k, to), self.elem);
                let line = std::slice::from_raw_parts(parts.d_v.add(time * dv), dv);
                let to = strides.d_v.offset(batch, kv_head, time);
                from_f32(line, self.elem.at_mut(outputs.d_v, to), self.elem);
            }
        }
    }

    fn gemms(&self, strides: &GradientStrides, tile_rows: usize) -> TileGemms {
        let wide = rows(Elem::F32, score_stride(self) as isize);
        TileGemms {
            scores: self.score_gemm(tile_rows),
            d_p: tile_gemm(
                (tile_rows, self.kv_len, self.value_dim),
                rows(self.elem, strides.d_o.time),
                rows(self.elem, self.v.time).transposed(),
                wide,
                1.0,
            ),
            d_q: tile_gemm(
                (tile_rows, self.head_dim, self.kv_len),
                Operand { elem: self.elem, ..wide },
                rows(self.elem, self.k.time),
                rows(self.elem, strides.d_q.time),
                self.scale,
            ),
        }
    }

    unsafe fn backward_tile(
        &self,
        strides: &GradientStrides,
        (inputs, outputs): (&BackwardInputs, &BackwardOutputs),
        gemms: &TileGemms,
        tile: &Tile,
        parts: Parts,
        worker: &mut Worker,
    ) {
        let Tile { batch, head, first, .. } = *tile;
        let kv_head = self.kv_head(head);
        let elem = self.elem;
        let packing = &mut worker.packing;
        let q = elem.at(inputs.q, self.q.offset(batch, head, first));
        let k = elem.at(inputs.k, self.k.offset(batch, kv_head, 0));
        let v = elem.at(inputs.v, self.v.offset(batch, kv_head, 0));
        let d_o = elem.at(inputs.d_o, strides.d_o.offset(batch, head, first));
        let d_q = elem.at_mut(outputs.d_q, strides.d_q.offset(batch, head, first));
        let tile_of = |wide: *mut f32| if elem == Elem::F32 { wide.cast() } else { parts.narrow };
        let scores = rows(elem, tile.stride as isize);
        let null = std::ptr::null();
        // SAFETY: the parts hold a tile; the caller vouches for the tensors.
        unsafe {
            let size = (tile.rows, tile.keys, self.head_dim);
            let packed = (k, parts.packed[0].cast_const());
            gemms.scores.run_packed(size, packing, q, packed, parts.p.cast());
            // dP = dO V^T
            let size = (tile.rows, tile.keys, self.value_dim);
            let packed = (v, parts.packed[1].cast_const());
            gemms.d_p.run_packed(size, packing, d_o, packed, parts.dp.cast());
            for row in 0..tile.rows {
                self.backward_row(strides, (inputs, outputs), (tile, row), parts);
                self.narrow(tile.line(parts.p, row), tile, row, parts.narrow);
            }
            // dV += (F * P)^T dO
            let shape = (tile.keys, self.value_dim, tile.rows);
            let d_o_rows = rows(elem, strides.d_o.time);
            let sums = rows(Elem::F32, self.value_dim as isize);
            accumulate(tile_gemm(shape, scores.transposed(), d_o_rows, sums, 1.0)).run_serial(
                packing,
                tile_of(parts.p),
                d_o,
                parts.d_v.cast(),
                null,
            );
            for row in 0..tile.rows {
                self.narrow(tile.line(parts.dp, row), tile, row, parts.narrow);
            }
            // dQ = scale * dS K
            let size = (tile.rows, self.head_dim, tile.keys);
            let packed = (k, parts.packed[2].cast_const());
            gemms.d_q.run_packed(size, packing, tile_of(parts.dp), packed, d_q);
            // dK += scale * dS^T Q
            let shape = (tile.keys, self.head_dim, tile.rows);
            let sums = rows(Elem::F32, self.head_dim as isize);
            let q_rows = rows(elem, self.q.time);
            accumulate(tile_gemm(shape, scores.transposed(), q_rows, sums, self.scale)).run_serial(
                packing,
                tile_of(parts.dp),
                q,
                parts.d_k.cast(),
                null,
            );
        }
    }

    /// Turns a row of scores into weights `F * P`, and one of `dO V^T` into the gradient of the scores, `P * (F * dO V^T - D)`.
    unsafe fn backward_row(
        &self,
        strides: &GradientStrides,
        (inputs, outputs): (&BackwardInputs, &BackwardOutputs),
        (tile, row): (&Tile, usize),
        parts: Parts,
    ) {
        let Tile { batch, head, first, .. } = *tile;
        let elem = self.elem;
        // SAFETY: the parts hold a tile; the caller vouches for the tensors.
        unsafe {
            let lse = *inputs.lse.add((batch * self.heads + head) * self.q_len + first + row);
            let softmax::Row { line: p, seen, hidden, padded } =
                softmax::Row::new(self, tile, parts.p, row);
            if let Some(mask) = &self.mask {
                softmax::apply_mask(mask, inputs.mask, tile, row, &mut p[..seen]);
            }
            p[..hidden].fill(f32::NEG_INFINITY);
            softmax::probabilities(&mut p[..padded], lse);
            p[seen..].fill(0.0);
            let o_at = self.o.offset(batch, head, first + row);
            let d_o_at = strides.d_o.offset(batch, head, first + row);
            let o = std::slice::from_raw_parts_mut(parts.lines, self.value_dim);
            to_f32(elem.at(inputs.o, o_at), elem, o);
            let line = parts.lines.add(self.value_dim);
            let d_o = std::slice::from_raw_parts_mut(line, self.value_dim);
            to_f32(elem.at(inputs.d_o, d_o_at), elem, d_o);
            let d = softmax::dot(o, d_o);
            let dp = tile.line(parts.dp, row);
            let factors = match &self.dropout {
                None => None,
                Some(dropout) => {
                    let factors = std::slice::from_raw_parts_mut(parts.factors, self.kv_len);
                    dropout.factors(self, inputs.kept, (tile, row), hidden..seen, factors);
                    Some(&factors[hidden..seen])
                }
            };
            if let Some(factors) = factors {
                softmax::multiply(&mut dp[hidden..seen], factors);
            }
            if lse == softmax::FILLED {
                dp.fill(0.0);
            } else {
                softmax::score_gradient(p, dp, d);
            }
            if let (Some(mask), false) = (&self.mask, outputs.d_mask.is_null()) {
                softmax::add_to_mask(mask, outputs.d_mask, tile, row, &dp[..tile.keys]);
            }
            if let Some(factors) = factors {
                softmax::multiply(&mut p[hidden..seen], factors);
            }
        }
    }

    /// Converts a row of a tile to the element type, if that is not f32.
    unsafe fn narrow(&self, line: &[f32], tile: &Tile, row: usize, narrow: *mut u8) {
        if self.elem != Elem::F32 {
            let to = self.elem.at_mut(narrow, (row * tile.stride) as isize);
            // SAFETY: the part holds a tile.
            unsafe { from_f32(line, to, self.elem) };
        }
    }
}

impl Tile {
    /// A row of scores in whole lanes, of which those behind the keys mean nothing.
    ///
    /// # Safety
    /// `scores` must hold the tile, and no other reference to the row may exist.
    unsafe fn line<'a>(&self, scores: *mut f32, row: usize) -> &'a mut [f32] {
        // SAFETY: the caller vouches for the tile.
        unsafe { std::slice::from_raw_parts_mut(scores.add(row * self.stride), self.lanes()) }
    }
}

fn accumulate(gemm: Gemm) -> Gemm {
    Gemm { accumulate: true, ..gemm }
}
