//! Batch normalization and its gradient. The unit of work is some channels, whose elements of an image lie side by side; sums are f64, of
//! [`LANES`] partial sums.

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable, Worker};
use crate::routine::conv::plane;
use crate::routine::convert::from_f32;
use crate::simd::vectorized;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Partial sums, so that additions need not wait for each other; the same on every CPU.
const LANES: usize = 32;
/// Elements side by side that a unit of work should have, and the most in all: a part of the L2 cache.
const RUN: usize = 4096;
const MAX_ELEMENTS: usize = 1 << 16;
/// Minimum units of work, if there are as many channels.
const CHUNKS: usize = 16;

/// Batch normalization of a dense `x[N, C, size]`. Scale, bias and statistics are f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchNorm {
    /// Element type of `x`, `y` and their gradients.
    pub elem: Elem,
    /// Images (N).
    pub batch: usize,
    /// Channels (C).
    pub channels: usize,
    /// Elements of one channel of one image.
    pub size: usize,
    /// Added to the variance.
    pub eps: f64,
}

impl BatchNorm {
    /// `y`, and the mean and biased variance of each channel.
    ///
    /// # Safety
    /// The pointers must be aligned and valid for tensors of these shapes; results overlap no operand.
    pub unsafe fn forward(
        &self,
        pool: &Pool,
        x: *const u8,
        [scale, bias]: [*const f32; 2],
        y: *mut u8,
        [mean_out, var_out]: [*mut f32; 2],
    ) {
        let at = Shareable::new((x, scale, bias, y, mean_out, var_out));
        let (step, n) = (self.step(), (self.batch * self.size) as f64);
        pool.run_workers(self.channels.div_ceil(step), &|chunk, worker: &mut Worker| {
            let (x, scale, bias, y, mean_out, var_out) = at.get();
            let range = chunk * step..self.channels.min((chunk + 1) * step);
            let run = range.len() * self.size;
            let [copy, result, factors] =
                worker.tiles.split([self.copy_bytes(run), run * 4, range.len() * 12]);
            // SAFETY: channels are disjoint and inside the tensors.
            unsafe {
                let runs = self.runs(x, &range, copy);
                let factors = factors.cast::<[f32; 3]>();
                let factors = std::slice::from_raw_parts_mut(factors, range.len());
                for (k, c) in range.clone().enumerate() {
                    let rows = || runs.iter().map(|run| &run[k * self.size..][..self.size]);
                    let mut sums = [0.0; LANES];
                    rows().for_each(|row| add_elements(row, &mut sums));
                    let mean = sums.iter().sum::<f64>() / n;
                    let mut squares = [0.0; LANES];
                    rows().for_each(|row| add_squares(row, mean, &mut squares));
                    let var = squares.iter().sum::<f64>() / n;
                    let factor = f64::from(*scale.add(c)) / (var + self.eps).sqrt();
                    factors[k] = [mean as f32, factor as f32, *bias.add(c)];
                    *mean_out.add(c) = mean as f32;
                    *var_out.add(c) = var as f32;
                }
                let result = std::slice::from_raw_parts_mut(result.cast::<f32>(), run);
                for (i, run) in runs.into_iter().enumerate() {
                    let rows = run
                        .chunks_exact(self.size.max(1))
                        .zip(result.chunks_exact_mut(self.size.max(1)));
                    for ((row, result), factors) in rows.zip(&*factors) {
                        normalize(row, *factors, result);
                    }
                    from_f32(result, self.elem.at_mut(y, self.first(i, range.start)), self.elem);
                }
            }
        });
    }

    /// `dx`, `dscale` and `dbias`.
    ///
    /// # Safety
    /// As for [`BatchNorm::forward`].
    pub unsafe fn backward(
        &self,
        pool: &Pool,
        [dy, x]: [*const u8; 2],
        [scale, mean, var]: [*const f32; 3],
        dx: *mut u8,
        [dscale, dbias]: [*mut f32; 2],
    ) {
        let at = Shareable::new((dy, x, scale, mean, var, dx, dscale, dbias));
        let (step, n) = (self.step(), (self.batch * self.size) as f64);
        pool.run_workers(self.channels.div_ceil(step), &|chunk, worker: &mut Worker| {
            let (dy, x, scale, mean, var, dx, dscale, dbias) = at.get();
            let range = chunk * step..self.channels.min((chunk + 1) * step);
            let run = range.len() * self.size;
            let copy = self.copy_bytes(run);
            let [dy_copy, x_copy, result, factors] =
                worker.tiles.split([copy, copy, run * 4, range.len() * 20]);
            // SAFETY: channels are disjoint and inside the tensors.
            unsafe {
                let (dys, xs) = (self.runs(dy, &range, dy_copy), self.runs(x, &range, x_copy));
                let factors = factors.cast::<[f32; 5]>();
                let factors = std::slice::from_raw_parts_mut(factors, range.len());
                for (k, c) in range.clone().enumerate() {
                    let mean = *mean.add(c);
                    let rstd = (1.0 / (f64::from(*var.add(c)) + self.eps).sqrt()) as f32;
                    let (mut sums, mut products) = ([0.0; LANES], [0.0; LANES]);
                    for (dy, x) in dys.iter().zip(&xs) {
                        let [dy, x] = [dy, x].map(|run| &run[k * self.size..][..self.size]);
                        add_products(dy, x, [mean, rstd], &mut sums, &mut products);
                    }
                    let [sum, product] = [sums, products].map(|lanes| lanes.iter().sum::<f64>());
                    let factor = *scale.add(c) * rstd;
                    factors[k] = [factor, (sum / n) as f32, mean, rstd, (product / n) as f32];
                    *dscale.add(c) = product as f32;
                    *dbias.add(c) = sum as f32;
                }
                let result = std::slice::from_raw_parts_mut(result.cast::<f32>(), run);
                for (i, (dy, x)) in dys.into_iter().zip(xs).enumerate() {
                    let rows =
                        dy.chunks_exact(self.size.max(1)).zip(x.chunks_exact(self.size.max(1)));
                    let rows = rows.zip(result.chunks_exact_mut(self.size.max(1)));
                    for (((dy, x), result), factors) in rows.zip(&*factors) {
                        differentiate(dy, x, *factors, result);
                    }
                    from_f32(result, self.elem.at_mut(dx, self.first(i, range.start)), self.elem);
                }
            }
        });
    }

    /// Channels of a unit of work.
    fn step(&self) -> usize {
        let most = MAX_ELEMENTS / (self.batch * self.size).max(1);
        let wanted = RUN.div_ceil(self.size.max(1)).min(self.channels.div_ceil(CHUNKS));
        wanted.min(most).max(1)
    }

    /// The first element of a channel of an image.
    fn first(&self, image: usize, channel: usize) -> isize {
        ((image * self.channels + channel) * self.size) as isize
    }

    /// Scratch memory of runs of all images in f32.
    fn copy_bytes(&self, run: usize) -> usize {
        if self.elem == Elem::F32 { 0 } else { self.batch * run * 4 }
    }

    /// Some channels of all images in f32: in place, or converted into `copy`.
    unsafe fn runs<'a>(
        &self,
        x: *const u8,
        channels: &Range<usize>,
        copy: *mut u8,
    ) -> Vec<&'a [f32]> {
        let len = channels.len() * self.size;
        let run = |i: usize| {
            // SAFETY: the caller vouches for the tensor and the scratch memory.
            unsafe {
                let copy = if self.elem == Elem::F32 { copy } else { copy.add(i * len * 4) };
                let from = self.elem.at(x, self.first(i, channels.start));
                std::slice::from_raw_parts(plane(self.elem, from, len, copy), len)
            }
        };
        (0..self.batch).map(run).collect()
    }
}

vectorized! {
    fn add_elements(row: &[f32], sums: &mut [f64; LANES]) {
        let (chunks, rest) = row.as_chunks::<LANES>();
        for chunk in chunks {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum += f64::from(*x);
            }
        }
        for (sum, x) in sums.iter_mut().zip(rest) {
            *sum += f64::from(*x);
        }
    }
}

vectorized! {
    fn add_squares(row: &[f32], mean: f64, sums: &mut [f64; LANES]) {
        let (chunks, rest) = row.as_chunks::<LANES>();
        let square = |x: f32| (f64::from(x) - mean) * (f64::from(x) - mean);
        for chunk in chunks {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum += square(*x);
            }
        }
        for (sum, x) in sums.iter_mut().zip(rest) {
            *sum += square(*x);
        }
    }
}

vectorized! {
    fn add_products(dy: &[f32], x: &[f32], of_x: [f32; 2], sums: &mut [f64; LANES], products: &mut [f64; LANES]) {
        let [mean, rstd] = of_x;
        let ((dys, dy_rest), (xs, x_rest)) = (dy.as_chunks::<LANES>(), x.as_chunks::<LANES>());
        let normal = |x: f32| f64::from((x - mean) * rstd);
        for (dy, x) in dys.iter().zip(xs) {
            for i in 0..LANES {
                sums[i] += f64::from(dy[i]);
                products[i] += f64::from(dy[i]) * normal(x[i]);
            }
        }
        for (i, (dy, x)) in dy_rest.iter().zip(x_rest).enumerate() {
            sums[i] += f64::from(*dy);
            products[i] += f64::from(*dy) * normal(*x);
        }
    }
}

vectorized! {
    fn normalize(x: &[f32], by: [f32; 3], y: &mut [f32]) {
        let [mean, factor, bias] = by;
        for (y, x) in y.iter_mut().zip(x) {
            *y = (x - mean) * factor + bias;
        }
    }
}

vectorized! {
    fn differentiate(dy: &[f32], x: &[f32], by: [f32; 5], dx: &mut [f32]) {
        let [factor, mean_dy, mean, rstd, mean_product] = by;
        for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
            *dx = factor * (dy - mean_dy - (x - mean) * rstd * mean_product);
        }
    }
}
