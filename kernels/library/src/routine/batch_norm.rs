//! Batch normalization and its gradient. The unit of work is a channel; sums are f64.

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable, Worker};
use crate::routine::conv::plane;
use crate::routine::convert::from_f32;
use serde::{Deserialize, Serialize};

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
        pool.run_workers(self.channels, &|c, worker: &mut Worker| {
            let (x, scale, bias, y, mean_out, var_out) = at.get();
            let [copy, result] = worker.tiles.split([self.size * 4; 2]);
            let n = (self.batch * self.size) as f64;
            // SAFETY: channels are disjoint and inside the tensors.
            unsafe {
                let rows = || (0..self.batch).map(|i| self.row(x, i, c, copy));
                let mean = rows().flatten().map(|x| f64::from(*x)).sum::<f64>() / n;
                let squares = rows().flatten().map(|x| (f64::from(*x) - mean).powi(2));
                let var = squares.sum::<f64>() / n;
                let factor = f64::from(*scale.add(c)) / (var + self.eps).sqrt();
                let (mean_32, factor, bias) = (mean as f32, factor as f32, *bias.add(c));
                let result = std::slice::from_raw_parts_mut(result.cast::<f32>(), self.size);
                for (i, row) in rows().enumerate() {
                    for (y, x) in result.iter_mut().zip(row) {
                        *y = (x - mean_32) * factor + bias;
                    }
                    from_f32(result, self.elem.at_mut(y, self.first(i, c)), self.elem);
                }
                *mean_out.add(c) = mean_32;
                *var_out.add(c) = var as f32;
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
        pool.run_workers(self.channels, &|c, worker: &mut Worker| {
            let (dy, x, scale, mean, var, dx, dscale, dbias) = at.get();
            let [dy_copy, x_copy, result] = worker.tiles.split([self.size * 4; 3]);
            let n = (self.batch * self.size) as f64;
            // SAFETY: channels are disjoint and inside the tensors.
            unsafe {
                let mean = *mean.add(c);
                let rstd = (1.0 / (f64::from(*var.add(c)) + self.eps).sqrt()) as f32;
                let rows = || {
                    (0..self.batch)
                        .map(|i| (self.row(dy, i, c, dy_copy), self.row(x, i, c, x_copy)))
                };
                let (mut sum, mut product) = (0.0, 0.0);
                for (dy, x) in rows() {
                    for (dy, x) in dy.iter().zip(x) {
                        sum += f64::from(*dy);
                        product += f64::from(*dy) * f64::from((x - mean) * rstd);
                    }
                }
                let factor = *scale.add(c) * rstd;
                let (mean_dy, mean_product) = ((sum / n) as f32, (product / n) as f32);
                let result = std::slice::from_raw_parts_mut(result.cast::<f32>(), self.size);
                for (i, (dy, x)) in rows().enumerate() {
                    for ((dx, dy), x) in result.iter_mut().zip(dy).zip(x) {
                        *dx = factor * (dy - mean_dy - (x - mean) * rstd * mean_product);
                    }
                    from_f32(result, self.elem.at_mut(dx, self.first(i, c)), self.elem);
                }
                *dscale.add(c) = product as f32;
                *dbias.add(c) = sum as f32;
            }
        });
    }

    /// The first element of a channel of an image.
    fn first(&self, image: usize, channel: usize) -> isize {
        ((image * self.channels + channel) * self.size) as isize
    }

    /// A channel of an image in f32, valid until `copy` is used again.
    unsafe fn row<'a>(&self, x: *const u8, i: usize, c: usize, copy: *mut u8) -> &'a [f32] {
        // SAFETY: the caller vouches for the tensor and the scratch memory.
        unsafe {
            let from = plane(self.elem, self.elem.at(x, self.first(i, c)), self.size, copy);
            std::slice::from_raw_parts(from, self.size)
        }
    }
}
