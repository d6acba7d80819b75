//! The parts of an Adafactor step (Shazeer & Stern 2018), as in `torch.optim.Adafactor`, for the elements of a parameter that lie in
//! one part of a flat tensor.
//!
//! The second moment of a matrix is stored as the mean squares of its rows and of its columns, that of a vector per element. Sums are
//! f64, per chunk of rows and then in chunk order.

use crate::pool::{Pool, Shareable};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Rows per chunk.
const ROWS: usize = 64;
/// Minimum of squares and their means: f32's epsilon, as in PyTorch.
const EPS: f64 = f32::EPSILON as f64;

/// A parameter: matrices of `rows` × `cols`, or, without rows, a vector.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adafactor {
    /// Number of matrices.
    pub matrices: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each, or elements of the vector.
    pub cols: usize,
    /// Factor of sums over the elements in the part.
    pub share: f64,
}

/// Scaling of gradients.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Factor of gradients.
    pub factor: f64,
    /// Limit of the elements' magnitude; 0 is none.
    pub clip_value: f64,
}

/// A part of a flat tensor of gradients, and the offset of the parameter in it.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Offset of the parameter's first element, which may be outside the part.
    pub begin: i64,
    /// The gradients.
    pub grads: &'a [f32],
    /// Their scaling.
    pub scale: Scale,
}

/// Scalars that determine a step.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Sum of the parameter's squares.
    pub of_param: f64,
    /// Sum of the update's squares.
    pub of_update: f64,
    /// Learning rate: the maximum relative step.
    pub lr: f64,
    /// Minimum of a parameter's root mean square.
    pub eps: f64,
    /// Maximum root mean square of an update.
    pub threshold: f64,
    /// Weight decay.
    pub decay: f64,
    /// Steps taken before this one.
    pub step: f64,
}

/// Rows of one matrix, counted over all matrices; a vector is one row.
struct Chunk {
    matrix: usize,
    lines: Range<usize>,
}

impl Part<'_> {
    fn gradient(&self, at: usize) -> f64 {
        let Scale { factor, clip_value } = self.scale;
        let limit = if clip_value == 0.0 { f64::INFINITY } else { clip_value };
        (f64::from(self.grads[at]) * factor).max(-limit).min(limit)
    }

    /// The index of an element of the parameter in this part.
    fn at(&self, element: usize) -> usize {
        (self.begin + element as i64) as usize
    }
}

impl Adafactor {
    fn numel(&self) -> usize {
        self.matrices * self.rows.max(1) * self.cols
    }

    /// Elements of the state: the rows of all matrices, then their columns.
    pub fn state_len(&self) -> usize {
        self.matrices * (self.rows + self.cols)
    }

    /// Sums of squares of the part's gradients per entry of the state, then of its parameters.
    ///
    /// `params` is the part of the parameters; `sums` has one more element than the state.
    pub fn sums(&self, pool: &Pool, part: Part<'_>, params: &[f32], sums: &mut [f32]) {
        let (chunks, cols, lines) = (self.chunks(&part), self.cols, self.matrices * self.rows);
        let n = chunks.len();
        let [by_col, by_row, of_param] = pool.common([n * cols * 8, lines * 8, n * 8]);
        let [by_col, by_row, of_param] =
            [by_col, by_row, of_param].map(|p| Shareable::new(p.cast::<f64>()));
        // SAFETY: of this size.
        unsafe { by_row.get().write_bytes(0, lines) };
        pool.run(n, &|i| {
            // SAFETY: each chunk has its own sums, and its own rows.
            let sums = unsafe {
                let sums = by_col.get().add(i * cols);
                sums.write_bytes(0, cols);
                std::slice::from_raw_parts_mut(sums, cols)
            };
            let mut of_parameter = 0.0;
            for line in chunks[i].lines.clone() {
                let mut of_row = 0.0;
                for col in self.columns(&part, line) {
                    let at = part.at(line * cols + col);
                    let square = part.gradient(at).powi(2);
                    sums[col] += square;
                    of_row += square;
                    of_parameter += f64::from(params[at]).powi(2);
                }
                if self.rows > 0 {
                    // SAFETY: as above.
                    unsafe { by_row.get().add(line).write(of_row) };
                }
            }
            // SAFETY: as above.
            unsafe { of_param.get().add(i).write(of_parameter) };
        });
        let shared = |sum: f64| (sum * self.share) as f32;
        for (line, sum) in sums[..lines].iter_mut().enumerate() {
            // SAFETY: written above.
            *sum = shared(unsafe { by_row.get().add(line).read() });
        }
        sums[lines..].fill(0.0);
        for same in chunk_by_matrix(&chunks) {
            let first = lines + chunks[same.start].matrix * cols;
            for (col, sum) in sums[first..first + cols].iter_mut().enumerate() {
                // SAFETY: every chunk wrote its sums.
                let of_chunk = |i: usize| unsafe { by_col.get().add(i * cols + col).read() };
                *sum = shared(same.clone().map(of_chunk).sum());
            }
        }
        // SAFETY: as above.
        let total = (0..n).map(|i| unsafe { of_param.get().add(i).read() }).sum();
        sums[self.state_len()] = shared(total);
    }

    /// Moves the state towards the means of `sums` by `weight`; returns the sum of squares of the part's following
    /// update.
    pub fn moments(
        &self,
        pool: &Pool,
        part: Part<'_>,
        sums: &[f32],
        state: &mut [f32],
        weight: f64,
    ) -> f32 {
        if self.numel() == 0 {
            return 0.0;
        }
        for (i, (moment, sum)) in state.iter_mut().zip(sums).enumerate() {
            let terms = match self.rows {
                0 => 1,
                _ if i < self.matrices * self.rows => self.cols,
                _ => self.rows,
            };
            let (old, mean) = (f64::from(*moment), f64::from(*sum) / terms as f64);
            *moment = (old + (mean - old) * weight) as f32;
        }
        let (chunks, state) = (self.chunks(&part), &*state);
        let means = self.means(state);
        let [squares] = pool.common([chunks.len() * 8]);
        let squares = Shareable::new(squares.cast::<f64>());
        pool.run(chunks.len(), &|i| {
            let mut sum = 0.0;
            self.updates(&part, state, &means, &chunks[i], |_, update| sum += update * update);
            // SAFETY: each chunk has its own sum.
            unsafe { squares.get().add(i).write(sum) };
        });
        // SAFETY: every chunk wrote its sum.
        let total: f64 = (0..chunks.len()).map(|i| unsafe { squares.get().add(i).read() }).sum();
        (total * self.share) as f32
    }

    /// Updates the elements of `params`, the part of the parameters.
    pub fn step(
        &self,
        pool: &Pool,
        part: Part<'_>,
        params: &mut [f32],
        state: &[f32],
        s: &Settings,
    ) {
        let rms = |squares: f64| (squares / self.numel() as f64).sqrt();
        let alpha = rms(s.of_param).max(s.eps) * s.lr.min(1.0 / (s.step + 1.0).sqrt());
        let rate = alpha / (rms(s.of_update) / s.threshold).max(1.0);
        let keep = 1.0 - s.lr * s.decay;
        let (chunks, means) = (self.chunks(&part), self.means(state));
        let len = params.len();
        let params = Shareable::new(params.as_mut_ptr());
        pool.run(chunks.len(), &|i| {
            self.updates(&part, state, &means, &chunks[i], |at, update| {
                assert!(at < len, "a step leaves its part");
                // SAFETY: inside, and chunks are of different rows.
                unsafe {
                    let p = params.get().add(at);
                    p.write((f64::from(p.read()) * keep - rate * update) as f32);
                }
            });
        });
    }

    /// For each element of a chunk, its index and its gradient divided by the root of its second moment.
    fn updates(
        &self,
        part: &Part<'_>,
        state: &[f32],
        means: &[f64],
        chunk: &Chunk,
        mut each: impl FnMut(usize, f64),
    ) {
        let of_cols = &state[self.matrices * self.rows + chunk.matrix * self.cols..][..self.cols];
        for line in chunk.lines.clone() {
            for col in self.columns(part, line) {
                let of_col = f64::from(of_cols[col]);
                let variance = match self.rows {
                    0 => of_col,
                    _ => f64::from(state[line]) * of_col / means[chunk.matrix].max(EPS),
                };
                let at = part.at(line * self.cols + col);
                each(at, part.gradient(at) / variance.max(EPS * EPS).sqrt());
            }
        }
    }

    /// The mean over the rows of each matrix; a vector's moments are unchanged.
    fn means(&self, state: &[f32]) -> Vec<f64> {
        let rows = state[..self.matrices * self.rows].chunks(self.rows.max(1));
        rows.map(|m| m.iter().map(|x| f64::from(*x)).sum::<f64>() / m.len() as f64).collect()
    }

    /// The elements of the parameter in this part.
    fn owned(&self, part: &Part<'_>) -> Range<usize> {
        let last = self.numel() as i64;
        let [from, to] = [0, part.grads.len() as i64].map(|x| (x - part.begin).clamp(0, last));
        from as usize..to as usize
    }

    /// The columns of a row in this part.
    fn columns(&self, part: &Part<'_>, line: usize) -> Range<usize> {
        let (owned, first) = (self.owned(part), line * self.cols);
        let [from, to] = [owned.start, owned.end].map(|x| x.clamp(first, first + self.cols));
        from - first..to - first
    }

    /// The chunks with elements in this part.
    fn chunks(&self, part: &Part<'_>) -> Vec<Chunk> {
        let owned = self.owned(part);
        if owned.is_empty() {
            return vec![];
        }
        let (rows, end) = (self.rows.max(1), owned.end.div_ceil(self.cols));
        let mut chunks = Vec::new();
        let mut line = owned.start / self.cols;
        while line < end {
            // Chunks begin at the same rows regardless of the part.
            let matrix = line / rows;
            let next = matrix * rows + ((line - matrix * rows) / ROWS + 1) * ROWS;
            let stop = next.min((matrix + 1) * rows).min(end);
            chunks.push(Chunk { matrix, lines: line..stop });
            line = stop;
        }
        chunks
    }
}

/// The ranges of chunks that are of one matrix.
fn chunk_by_matrix(chunks: &[Chunk]) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut first = 0;
    chunks.chunk_by(|a, b| a.matrix == b.matrix).map(move |same| {
        first += same.len();
        first - same.len()..first
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reference implementation of the whole step.
    fn by_hand(dims: [usize; 3], p: &mut [f64], g: &[f64], state: &mut [f64], t: f64) {
        let [matrices, rows, cols] = dims;
        let weight = t.powf(-0.8);
        let mut update = g.to_vec();
        for b in 0..matrices {
            let at = |r: usize, c: usize| (b * rows + r) * cols + c;
            for r in 0..rows {
                let mean = (0..cols).map(|c| g[at(r, c)].powi(2)).sum::<f64>() / cols as f64;
                let v = &mut state[b * rows + r];
                *v += (mean - *v) * weight;
            }
            for c in 0..cols {
                let mean = (0..rows).map(|r| g[at(r, c)].powi(2)).sum::<f64>() / rows as f64;
                let v = &mut state[matrices * rows + b * cols + c];
                *v += (mean - *v) * weight;
            }
            let row_mean = (0..rows).map(|r| state[b * rows + r]).sum::<f64>() / rows as f64;
            for r in 0..rows {
                for c in 0..cols {
                    let v = state[b * rows + r] * state[matrices * rows + b * cols + c] / row_mean;
                    update[at(r, c)] = g[at(r, c)] / v.sqrt();
                }
            }
        }
        let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        let alpha = rms(p).max(1e-3) * 0.05_f64.min(1.0 / t.sqrt());
        let step = alpha / rms(&update).max(1.0);
        for (p, u) in p.iter_mut().zip(&update) {
            *p = *p * (1.0 - 0.05 * 0.1) - step * u;
        }
    }

    fn value(i: usize, k: usize) -> f32 {
        ((i * 7919 + k) % 1009) as f32 / 1009.0 - 0.49
    }

    /// Four steps of a parameter that lies in parts of `len` elements, from element `offset` on.
    fn steps(adafactor: Adafactor, (len, offset): (usize, usize), pool: &Pool) -> Vec<f32> {
        let n = adafactor.numel();
        let parts = (offset + n).div_ceil(len);
        let flat = |k: usize| -> Vec<f32> {
            let inside = |i: usize| (offset..offset + n).contains(&i);
            (0..parts * len).map(|i| if inside(i) { value(i - offset, k) } else { 9.0 }).collect()
        };
        let mut params = flat(1);
        let mut state = vec![0.0_f32; adafactor.state_len()];
        for step in 0..4 {
            let grads = flat(50 * step + 7);
            let part = |r: usize| Part {
                begin: offset as i64 - (r * len) as i64,
                grads: &grads[r * len..(r + 1) * len],
                scale: Scale { factor: 1.0, clip_value: 0.0 },
            };
            let mut all = vec![0.0; state.len() + 1];
            for r in 0..parts {
                let mut sums = all.clone();
                adafactor.sums(pool, part(r), &params[r * len..(r + 1) * len], &mut sums);
                all.iter_mut().zip(sums).for_each(|(a, b)| *a += b);
            }
            let (before, weight) = (state.clone(), (step as f64 + 1.0).powf(-0.8));
            let mut of_update = 0.0;
            for r in 0..parts {
                state.clone_from(&before);
                let squares = adafactor.moments(pool, part(r), &all, &mut state, weight);
                of_update += f64::from(squares);
            }
            let settings = Settings {
                of_param: f64::from(all[state.len()]),
                of_update,
                lr: 0.05,
                eps: 1e-3,
                threshold: 1.0,
                decay: 0.1,
                step: step as f64,
            };
            for r in 0..parts {
                let own = &mut params[r * len..(r + 1) * len];
                adafactor.step(pool, part(r), own, &state, &settings);
            }
        }
        let (before, rest) = params.split_at(offset);
        assert!(
            before.iter().chain(&rest[n..]).all(|x| *x == 9.0),
            "elements outside the part changed"
        );
        rest[..n].to_vec()
    }

    #[test]
    fn follows_the_formula_for_any_thread_count_and_parts() {
        for dims in [[1, 3, 5], [1, 130, 7], [6, 70, 9], [40, 3, 3]] {
            let [matrices, rows, cols] = dims;
            let adafactor = Adafactor { matrices, rows, cols, share: 1.0 };
            let n = adafactor.numel();
            let mut exact: Vec<f64> = (0..n).map(|i| f64::from(value(i, 1))).collect();
            let mut state = vec![0.0; adafactor.state_len()];
            for step in 0..4 {
                let g: Vec<f64> = (0..n).map(|i| f64::from(value(i, 50 * step + 7))).collect();
                by_hand(dims, &mut exact, &g, &mut state, step as f64 + 1.0);
            }
            for part in [(n, 0), (n + 5, 2), (n / 3 + 1, 0), (n / 4 + 1, 6)] {
                let found = steps(adafactor, part, &Pool::new(1));
                for (a, b) in found.iter().zip(&exact) {
                    assert!((f64::from(*a) - b).abs() < 1e-6, "{dims:?} in {part:?}: {a} for {b}");
                }
                assert_eq!(steps(adafactor, part, &Pool::new(3)), found);
            }
        }
    }

    #[test]
    fn vectors_keep_every_square() {
        let adafactor = Adafactor { matrices: 1, rows: 0, cols: 7, share: 1.0 };
        let whole = steps(adafactor, (7, 0), &Pool::new(1));
        let parts = steps(adafactor, (3, 1), &Pool::new(2));
        for (a, b) in parts.iter().zip(&whole) {
            assert!((a - b).abs() < 1e-6, "{a} for {b}");
        }
    }

    #[test]
    fn nothing_is_a_parameter_too() {
        let adafactor = Adafactor { matrices: 1, rows: 0, cols: 0, share: 1.0 };
        assert_eq!(steps(adafactor, (4, 2), &Pool::new(1)), [0.0; 0]);
        let empty = Adafactor { matrices: 1, rows: 0, cols: 3, share: 0.5 };
        let part =
            Part { begin: 9, grads: &[1.0; 4], scale: Scale { factor: 1.0, clip_value: 0.0 } };
        let mut sums = [5.0; 4];
        empty.sums(&Pool::new(1), part, &[1.0; 4], &mut sums);
        assert_eq!(sums, [0.0; 4]);
    }
}
