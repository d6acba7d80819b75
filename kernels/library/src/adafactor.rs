//! A step of Adafactor (Shazeer & Stern 2018), as `torch.optim.Adafactor`.
//!
//! The second moment of a matrix is kept as the mean squares of its rows and of its columns, that of a
//! vector whole. Sums are taken in f64, per chunk of rows and then in the order of chunks.

use crate::pool::{Pool, Shareable};

/// Rows of a chunk.
const ROWS: usize = 64;
/// What squares and their means are at least: f32's epsilon, as PyTorch takes it.
const EPS: f64 = f32::EPSILON as f64;

/// The scalars of a step.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Learning rate: the largest relative step.
    pub lr: f64,
    /// The second moment of step t is averaged with the weight t to the power of minus this.
    pub exponent: f64,
    /// The least root mean square that a parameter counts with.
    pub eps: f64,
    /// The largest root mean square of an update.
    pub threshold: f64,
    /// Weight decay.
    pub decay: f64,
    /// Limit of the gradient's elements; 0 is none.
    pub clip_value: f64,
    /// Steps taken before this one.
    pub step: f64,
    /// The gradient is multiplied by this.
    pub factor: f64,
}

/// Adafactor for one parameter: `batch` matrices of `rows` × `cols`, or, without rows, a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adafactor {
    batch: usize,
    rows: usize,
    cols: usize,
    /// Elements of the parameter.
    numel: usize,
}

impl Adafactor {
    /// For a parameter of these dimensions; its last two are factored.
    pub fn new(dims: &[usize]) -> Self {
        let numel = dims.iter().product();
        match dims {
            [batch @ .., rows, cols] => {
                Adafactor { batch: batch.iter().product(), rows: *rows, cols: *cols, numel }
            }
            _ => Adafactor { batch: 1, rows: 0, cols: numel, numel },
        }
    }

    /// Elements of the state: the rows of all matrices, then their columns.
    pub fn state_len(&self) -> usize {
        self.batch * (self.rows + self.cols)
    }

    /// Updates parameter and state in place.
    ///
    /// # Safety
    /// `param` and `grad` have the parameter's elements, `state` has [`Adafactor::state_len`]; none overlap.
    pub unsafe fn run(
        &self,
        pool: &Pool,
        param: *mut f32,
        grad: *const f32,
        state: *mut f32,
        s: &Settings,
    ) {
        let n = self.numel;
        if n == 0 {
            return;
        }
        let limit = if s.clip_value == 0.0 { f64::INFINITY } else { s.clip_value };
        let scaled = |g: f32| (f64::from(g) * s.factor).max(-limit).min(limit);
        let t = s.step + 1.0;
        let weight = t.powf(-s.exponent);
        // SAFETY: by the contract of this function.
        let moments = unsafe { std::slice::from_raw_parts_mut(state, self.state_len()) };
        let lerp = |old: &mut f32, new: f64| {
            *old = (f64::from(*old) + (new - f64::from(*old)) * weight) as f32;
        };
        let chunks = self.chunks();
        let cols = self.cols;
        let (param, grad) = (Shareable::new(param), Shareable::new(grad.cast_mut()));
        // Per chunk: sums by column, by row, of the parameter, of the update.
        let [by_col, by_row, of_param, of_update] = pool.common([
            chunks.len() * cols * 8,
            self.batch * self.rows * 8,
            chunks.len() * 8,
            chunks.len() * 8,
        ]);
        let [by_col, by_row, of_param, of_update] =
            [by_col, by_row, of_param, of_update].map(|p| Shareable::new(p.cast::<f64>()));
        pool.run(chunks.len(), &|i| {
            let (_, first, count) = chunks[i];
            // SAFETY: chunks are disjoint rows, and each has its own sums.
            unsafe {
                let sums = std::slice::from_raw_parts_mut(by_col.get().add(i * cols), cols);
                sums.fill(0.0);
                let mut of_parameter = 0.0;
                for row in first..first + count {
                    let p = std::slice::from_raw_parts(param.get().add(row * cols), cols);
                    let g = std::slice::from_raw_parts(grad.get().add(row * cols), cols);
                    let mut of_row = 0.0;
                    for ((sum, g), p) in sums.iter_mut().zip(g).zip(p) {
                        let square = scaled(*g).powi(2);
                        *sum += square;
                        of_row += square;
                        of_parameter += f64::from(*p).powi(2);
                    }
                    if self.rows > 0 {
                        by_row.get().add(row).write(of_row);
                    }
                }
                of_param.get().add(i).write(of_parameter);
            }
        });
        let total = |sums: &Shareable<*mut f64>| -> f64 {
            // SAFETY: every chunk wrote its sum before this is called.
            (0..chunks.len()).map(|i| unsafe { sums.get().add(i).read() }).sum()
        };
        let (row_moments, col_moments) = moments.split_at_mut(self.batch * self.rows);
        for (row, moment) in row_moments.iter_mut().enumerate() {
            // SAFETY: as above.
            lerp(moment, unsafe { by_row.get().add(row).read() } / cols as f64);
        }
        for (at, moment) in col_moments.iter_mut().enumerate() {
            let (batch, col) = (at / cols, at % cols);
            let of_batch = chunks.iter().enumerate().filter(|(_, c)| c.0 == batch);
            // SAFETY: as above.
            let sum: f64 =
                of_batch.map(|(i, _)| unsafe { by_col.get().add(i * cols + col).read() }).sum();
            lerp(moment, sum / self.rows.max(1) as f64);
        }
        // The mean over the rows of each matrix; a vector's moments are taken as they are.
        let means: Vec<f64> = row_moments
            .chunks(self.rows.max(1))
            .map(|m| m.iter().map(|x| f64::from(*x)).sum::<f64>() / m.len() as f64)
            .collect();
        let (row_moments, col_moments) = (&*row_moments, &*col_moments);
        let update = |batch: usize, row: usize, col: usize, g: f32| {
            let of_col = f64::from(col_moments[batch * cols + col]);
            let variance = match self.rows {
                0 => of_col,
                _ => f64::from(row_moments[row]) * of_col / means[batch].max(EPS),
            };
            scaled(g) / variance.max(EPS * EPS).sqrt()
        };
        pool.run(chunks.len(), &|i| {
            let (batch, first, count) = chunks[i];
            let mut sum = 0.0;
            for row in first..first + count {
                for col in 0..cols {
                    // SAFETY: within the gradient.
                    let g = unsafe { grad.get().add(row * cols + col).read() };
                    sum += update(batch, row, col, g).powi(2);
                }
            }
            // SAFETY: each chunk has its own sum.
            unsafe { of_update.get().add(i).write(sum) };
        });
        let rms = |sum: f64| (sum / n as f64).sqrt();
        let alpha = rms(total(&of_param)).max(s.eps) * s.lr.min(1.0 / t.sqrt());
        let step = alpha / (rms(total(&of_update)) / s.threshold).max(1.0);
        let keep = 1.0 - s.lr * s.decay;
        pool.run(chunks.len(), &|i| {
            let (batch, first, count) = chunks[i];
            for row in first..first + count {
                for col in 0..cols {
                    // SAFETY: chunks are disjoint rows of parameter and gradient.
                    unsafe {
                        let at = row * cols + col;
                        let g = grad.get().add(at).read();
                        let p = param.get().add(at);
                        let new = f64::from(p.read()) * keep - step * update(batch, row, col, g);
                        p.write(new as f32);
                    }
                }
            }
        });
    }

    /// Matrix, first row and number of rows of each chunk; a vector is one row.
    fn chunks(&self) -> Vec<(usize, usize, usize)> {
        let rows = self.rows.max(1);
        let of_batch = |batch: usize| {
            let firsts = (0..rows).step_by(ROWS);
            firsts.map(move |first| (batch, batch * rows + first, ROWS.min(rows - first)))
        };
        (0..self.batch).flat_map(of_batch).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same, element by element and on one thread.
    fn by_hand(dims: &[usize], p: &mut [f64], g: &[f64], state: &mut [f64], s: &Settings) {
        let (rows, cols) = (dims[dims.len() - 2], dims[dims.len() - 1]);
        let (batch, t) = (p.len() / (rows * cols), s.step + 1.0);
        let weight = t.powf(-s.exponent);
        let mut update = vec![0.0; p.len()];
        for b in 0..batch {
            let at = |r: usize, c: usize| (b * rows + r) * cols + c;
            for r in 0..rows {
                let mean = (0..cols).map(|c| g[at(r, c)].powi(2)).sum::<f64>() / cols as f64;
                let v = &mut state[b * rows + r];
                *v += (mean - *v) * weight;
            }
            for c in 0..cols {
                let mean = (0..rows).map(|r| g[at(r, c)].powi(2)).sum::<f64>() / rows as f64;
                let v = &mut state[batch * rows + b * cols + c];
                *v += (mean - *v) * weight;
            }
            let row_mean = (0..rows).map(|r| state[b * rows + r]).sum::<f64>() / rows as f64;
            for r in 0..rows {
                for c in 0..cols {
                    let v = state[b * rows + r] * state[batch * rows + b * cols + c] / row_mean;
                    update[at(r, c)] = g[at(r, c)] / v.sqrt();
                }
            }
        }
        let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        let alpha = rms(p).max(s.eps) * s.lr.min(1.0 / t.sqrt());
        let step = alpha / (rms(&update) / s.threshold).max(1.0);
        for (p, u) in p.iter_mut().zip(&update) {
            *p = *p * (1.0 - s.lr * s.decay) - step * u;
        }
    }

    #[test]
    fn follows_the_formula_for_any_thread_count() {
        for dims in [vec![3, 5], vec![130, 7], vec![2, 3, 70, 9]] {
            let n: usize = dims.iter().product();
            let value = |i: usize, k: usize| ((i * 7919 + k) % 1009) as f64 / 1009.0 - 0.49;
            let plan = Adafactor::new(&dims);
            let mut bits = Vec::new();
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                let mut p: Vec<f32> = (0..n).map(|i| value(i, 1) as f32).collect();
                let mut state = vec![0.0_f32; plan.state_len()];
                let mut exact: Vec<f64> = p.iter().map(|x| f64::from(*x)).collect();
                let mut exact_state = vec![0.0; state.len()];
                for step in 0..4 {
                    let g: Vec<f32> = (0..n).map(|i| value(i, 50 * step + 7) as f32).collect();
                    let settings = Settings {
                        lr: 0.05,
                        exponent: 0.8,
                        eps: 1e-3,
                        threshold: 1.0,
                        decay: 0.1,
                        clip_value: 0.0,
                        step: step as f64,
                        factor: 1.0,
                    };
                    let (to, from) = (p.as_mut_ptr(), g.as_ptr());
                    // SAFETY: sizes fit.
                    unsafe { plan.run(&pool, to, from, state.as_mut_ptr(), &settings) };
                    let g: Vec<f64> = g.iter().map(|x| f64::from(*x)).collect();
                    by_hand(&dims, &mut exact, &g, &mut exact_state, &settings);
                }
                for (a, b) in p.iter().zip(&exact) {
                    assert!((f64::from(*a) - b).abs() < 1e-6, "{dims:?}: {a} for {b}");
                }
                bits.push(p);
            }
            assert_eq!(bits[0], bits[1]);
        }
    }

    #[test]
    fn nothing_is_a_parameter_too() {
        let plan = Adafactor::new(&[0, 3]);
        assert_eq!((plan.numel, Adafactor::new(&[5]).state_len()), (0, 5));
        assert_eq!(Adafactor::new(&[]).state_len(), 1);
    }
}
