//! Batch normalization and its gradient. The unit of work is some channels, whose elements of an image lie side by side; sums are f64, of
//! [`LANES`] partial sums.

mod element;

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable, Worker};
use element::{Element, LANES};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

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
        statistics: [*mut f32; 2],
    ) {
        // SAFETY: passed on.
        unsafe {
            match self.elem {
                Elem::F32 => {
                    self.forward_of::<f32>(pool, x.cast(), [scale, bias], y.cast(), statistics)
                }
                Elem::BF16 => {
                    self.forward_of::<bf16>(pool, x.cast(), [scale, bias], y.cast(), statistics)
                }
                Elem::F16 => {
                    self.forward_of::<f16>(pool, x.cast(), [scale, bias], y.cast(), statistics)
                }
            }
        }
    }

    unsafe fn forward_of<T: Element>(
        &self,
        pool: &Pool,
        x: *const T,
        [scale, bias]: [*const f32; 2],
        y: *mut T,
        [mean_out, var_out]: [*mut f32; 2],
    ) {
        let at = Shareable::new((x, scale, bias, y, mean_out, var_out));
        let (step, n) = (self.step(), (self.batch * self.size) as f64);
        pool.run_workers(self.channels.div_ceil(step), &|chunk, worker: &mut Worker| {
            let (x, scale, bias, y, mean_out, var_out) = at.get();
            let range = chunk * step..self.channels.min((chunk + 1) * step);
            let [factors] = worker.tiles.split([range.len() * size_of::<[f32; 3]>()]);
            // SAFETY: channels are disjoint and inside the tensors.
            unsafe {
                let factors = factors.cast::<[f32; 3]>();
                let factors = std::slice::from_raw_parts_mut(factors, range.len());
                let row = |i: usize, c: usize| {
                    std::slice::from_raw_parts(x.add(self.row(i, c)), self.size)
                };
                for (c, factors) in range.clone().zip(&mut *factors) {
                    let mut sums = [0.0; LANES];
                    (0..self.batch).for_each(|i| T::add_elements(row(i, c), &mut sums));
                    let mean = sums.iter().sum::<f64>() / n;
                    let mut squares = [0.0; LANES];
                    (0..self.batch).for_each(|i| T::add_squares(row(i, c), mean, &mut squares));
                    let var = squares.iter().sum::<f64>() / n;
                    let factor = f64::from(*scale.add(c)) / (var + self.eps).sqrt();
                    *factors = [mean as f32, factor as f32, *bias.add(c)];
                    *mean_out.add(c) = mean as f32;
                    *var_out.add(c) = var as f32;
                }
                for i in 0..self.batch {
                    for (c, factors) in range.clone().zip(&*factors) {
                        let y = std::slice::from_raw_parts_mut(y.add(self.row(i, c)), self.size);
                        T::normalize(row(i, c), *factors, y);
                    }
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
        of_x: [*const f32; 3],
        dx: *mut u8,
        sums: [*mut f32; 2],
    ) {
        // SAFETY: passed on.
        unsafe {
            match self.elem {
                Elem::F32 => {
                    self.backward_of::<f32>(pool, [dy.cast(), x.cast()], of_x, dx.cast(), sums)
                }
                Elem::BF16 => {
                    self.backward_of::<bf16>(pool, [dy.cast(), x.cast()], of_x, dx.cast(), sums)
                }
                Elem::F16 => {
                    self.backward_of::<f16>(pool, [dy.cast(), x.cast()], of_x, dx.cast(), sums)
                }
            }
        }
    }

    unsafe fn backward_of<T: Element>(
        &self,
        pool: &Pool,
        [dy, x]: [*const T; 2],
        [scale, mean, var]: [*const f32; 3],
        dx: *mut T,
        [dscale, dbias]: [*mut f32; 2],
    ) {
        let at = Shareable::new((dy, x, scale, mean, var, dx, dscale, dbias));
        let (step, n) = (self.step(), (self.batch * self.size) as f64);
        pool.run_workers(self.channels.div_ceil(step), &|chunk, worker: &mut Worker| {
            let (dy, x, scale, mean, var, dx, dscale, dbias) = at.get();
            let range = chunk * step..self.channels.min((chunk + 1) * step);
            let [factors] = worker.tiles.split([range.len() * size_of::<[f32; 5]>()]);
            // SAFETY: channels are disjoint and inside the tensors.
            unsafe {
                let factors = factors.cast::<[f32; 5]>();
                let factors = std::slice::from_raw_parts_mut(factors, range.len());
                let row = |of: *const T, i: usize, c: usize| {
                    std::slice::from_raw_parts(of.add(self.row(i, c)), self.size)
                };
                for (c, factors) in range.clone().zip(&mut *factors) {
                    let mean = *mean.add(c);
                    let rstd = (1.0 / (f64::from(*var.add(c)) + self.eps).sqrt()) as f32;
                    let (mut sums, mut products) = ([0.0; LANES], [0.0; LANES]);
                    for i in 0..self.batch {
                        let (dy, x) = (row(dy, i, c), row(x, i, c));
                        T::add_products(dy, x, [mean, rstd], &mut sums, &mut products);
                    }
                    let [sum, product] = [sums, products].map(|lanes| lanes.iter().sum::<f64>());
                    let factor = *scale.add(c) * rstd;
                    *factors = [factor, (sum / n) as f32, mean, rstd, (product / n) as f32];
                    *dscale.add(c) = product as f32;
                    *dbias.add(c) = sum as f32;
                }
                for i in 0..self.batch {
                    for (c, factors) in range.clone().zip(&*factors) {
                        let dx = std::slice::from_raw_parts_mut(dx.add(self.row(i, c)), self.size);
                        T::differentiate(row(dy, i, c), row(x, i, c), *factors, dx);
                    }
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
    fn row(&self, image: usize, channel: usize) -> usize {
        (image * self.channels + channel) * self.size
    }
}
