//! Forward attention. The unit of work is one tile of queries of one head.

use super::{Attention, Tile, rows, score_stride, softmax, tile_gemm};
use crate::dtype::Elem;
use crate::pool::{Pool, Scratch, Shareable};
use crate::routine::convert::from_f32;
use crate::routine::gemm::Gemm;

#[derive(Clone, Copy)]
struct Buffers {
    q: *const u8,
    k: *const u8,
    v: *const u8,
    mask: *const u8,
    kept: *const u8,
    o: *mut u8,
    lse: *mut f32,
}

/// Chunks per thread, to balance uneven ones.
const CHUNKS_PER_THREAD: usize = 4;

/// What the tiles of one head share: its keys and values, and the scratch memory of the thread.
struct Work {
    at: Buffers,
    k: *const u8,
    v: *const u8,
    packed_k: *mut u8,
    packed_v: *mut u8,
    scores: *mut f32,
    narrow: *mut u8,
    out: *mut u8,
    factors: *mut f32,
}

impl Attention {
    /// Writes `o` and `lse` (`[batch, heads, q_len]`, contiguous).
    ///
    /// # Panics
    /// If `heads` is not a multiple of `kv_heads`.
    ///
    /// # Safety
    /// The pointers must be aligned and valid for the shapes (`mask` may be null without a mask, `kept` without dropout);
    /// `o` and `lse` must not overlap anything else.
    #[expect(clippy::too_many_arguments, reason = "one pointer for each tensor")]
    pub unsafe fn forward(
        &self,
        pool: &Pool,
        q: *const u8,
        k: *const u8,
        v: *const u8,
        [mask, kept]: [*const u8; 2],
        o: *mut u8,
        lse: *mut f32,
    ) {
        self.check();
        if self.q_len == 0 {
            return;
        }
        let at = Shareable::new(Buffers { q, k, v, mask, kept, o, lse });
        let step = self.tile_rows();
        let tiles = self.q_len.div_ceil(step);
        let heads = self.batch * self.heads;
        // Tiles of one head share its packed keys and values, unless there are too few heads.
        let parts = (CHUNKS_PER_THREAD * pool.threads()).div_ceil(heads.max(1)).min(tiles);
        let per_part = tiles.div_ceil(parts);
        let parts = tiles.div_ceil(per_part);
        let (keys, values) = (self.score_gemm(step), self.value_gemm(step));
        pool.run_workers(heads * parts, &|chunk, worker| {
            let (batch, head) = (chunk / parts / self.heads, chunk / parts % self.heads);
            let score = step * score_stride(self);
            let narrow = if self.elem == Elem::F32 { 0 } else { score * self.elem.size() };
            let out = step * self.value_dim * size_of::<f32>();
            let [scores, narrow, out, packed_k, packed_v, factors] = worker.tiles.split([
                score * size_of::<f32>(),
                narrow,
                out,
                keys.packed_bytes(),
                values.packed_bytes(),
                self.factor_bytes(),
            ]);
            let at = at.get();
            let kv_head = self.kv_head(head);
            let k = self.elem.at(at.k, self.k.offset(batch, kv_head, 0));
            let v = self.elem.at(at.v, self.v.offset(batch, kv_head, 0));
            // SAFETY: each tile writes its own rows; the caller vouches for the tensors.
            unsafe {
                keys.pack(k, packed_k);
                values.pack(v, packed_v);
                let (scores, factors) = (scores.cast(), factors.cast());
                let work = Work { at, k, v, packed_k, packed_v, scores, narrow, out, factors };
                let first = chunk % parts * per_part;
                for index in first..tiles.min(first + per_part) {
                    let tile = Tile::new(self, batch, head, index * step);
                    self.forward_tile(&tile, &work, (&keys, &values), &mut worker.packing);
                }
            }
        });
    }

    /// The GEMM `P V` of a tile with all values; smaller tiles use a part of it.
    fn value_gemm(&self, tile_rows: usize) -> Gemm {
        tile_gemm(
            (tile_rows, self.value_dim, self.kv_len),
            rows(self.elem, score_stride(self) as isize),
            rows(self.elem, self.v.time),
            rows(Elem::F32, self.value_dim as isize),
            1.0,
        )
    }

    unsafe fn forward_tile(
        &self,
        tile: &Tile,
        work: &Work,
        (keys, values): (&Gemm, &Gemm),
        packing: &mut Scratch,
    ) {
        let Work { at, scores, narrow, out, factors, .. } = *work;
        // SAFETY: the parts hold a tile; the caller vouches for the tensors.
        unsafe {
            let q = self.elem.at(at.q, self.q.offset(tile.batch, tile.head, tile.first));
            let size = (tile.rows, tile.keys, self.head_dim);
            keys.run_packed(size, packing, q, (work.k, work.packed_k), scores.cast());
            let mut inverse = [0f32; super::MAX_ROWS];
            let lse = at.lse.add((tile.batch * self.heads + tile.head) * self.q_len + tile.first);
            for (row, inverse) in inverse.iter_mut().enumerate().take(tile.rows) {
                let softmax::Row { line, seen, hidden, padded } =
                    softmax::Row::new(self, tile, scores, row);
                if let Some(mask) = &self.mask {
                    softmax::apply_mask(mask, at.mask, tile, row, &mut line[..seen]);
                }
                line[..hidden].fill(f32::NEG_INFINITY);
                let (sum, row_lse) = softmax::exponentials(&mut line[..padded]);
                line[seen..].fill(0.0);
                if let Some(dropout) = &self.dropout {
                    let factors = std::slice::from_raw_parts_mut(factors, self.kv_len);
                    dropout.factors(self, at.kept, (tile, row), hidden..seen, factors);
                    softmax::multiply(&mut line[hidden..seen], &factors[hidden..seen]);
                }
                if self.elem != Elem::F32 {
                    let to = self.elem.at_mut(narrow, (row * tile.stride) as isize);
                    from_f32(line, to, self.elem);
                }
                *inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
                lse.add(row).write(row_lse);
            }
            let p = if self.elem == Elem::F32 { scores.cast() } else { narrow };
            let size = (tile.rows, self.value_dim, tile.keys);
            values.run_packed(size, packing, p, (work.v, work.packed_v), out);
            for (row, &inverse) in inverse.iter().enumerate().take(tile.rows) {
                let line = out.cast::<f32>().add(row * self.value_dim);
                let line = std::slice::from_raw_parts_mut(line, self.value_dim);
                softmax::scale(line, inverse);
                let to = self.o.offset(tile.batch, tile.head, tile.first + row);
                from_f32(line, self.elem.at_mut(at.o, to), self.elem);
            }
        }
    }
}
