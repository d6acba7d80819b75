//! Batch normalization and its gradient, with the ReLU and the sum around them. The unit of work is some channels, whose elements of an
//! image lie side by side; sums are f64, of [`LANES`] partial sums. Where they are fewer than that, as in `x[N, C]`, a unit works on copies
//! in which all elements of a channel do.

mod element;
mod narrow;

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
    /// Whether `y` is the ReLU of what is normalized, and `dy` the gradient of that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub relu: bool,
}

/// Where a gradient passes a ReLU.
#[derive(Clone, Copy)]
pub struct Gate {
    /// The result of the ReLU.
    pub y: *const u8,
    /// A gradient that is added to that of the ReLU's result, or null.
    pub added: *const u8,
    /// Where the gradient of its operand is written, or null.
    pub passed: *mut u8,
}

impl BatchNorm {
    /// `y`, and the mean and biased variance of each channel. `added`, or null, is added before the ReLU.
    ///
    /// # Safety
    /// The pointers must be aligned and valid for tensors of these shapes; results overlap no operand.
    pub unsafe fn forward(
        &self,
        pool: &Pool,
        [x, added]: [*const u8; 2],
        factors: [*const f32; 2],
        y: *mut u8,
        statistics: [*mut f32; 2],
    ) {
        // SAFETY: passed on.
        unsafe {
            match self.elem {
                Elem::F32 => self.forward_of::<f32>(pool, [x, added], factors, y, statistics),
                Elem::BF16 => self.forward_of::<bf16>(pool, [x, added], factors, y, statistics),
                Elem::F16 => self.forward_of::<f16>(pool, [x, added], factors, y, statistics),
            }
        }
    }

    unsafe fn forward_of<T: Element>(
        &self,
        pool: &Pool,
        x: [*const u8; 2],
        [scale, bias]: [*const f32; 2],
        y: *mut u8,
        [mean_out, var_out]: [*mut f32; 2],
    ) {
        let [x, added] = x.map(|x| x.cast::<T>());
        let at = Shareable::new((x, added, scale, bias, y.cast::<T>(), mean_out, var_out));
        let step = self.step();
        pool.run_workers(self.channels.div_ceil(step), &|chunk, worker: &mut Worker| {
            let (x, added, scale, bias, y, mean_out, var_out) = at.get();
            let range = chunk * step..self.channels.min((chunk + 1) * step);
            let copies = if self.is_narrow() { range.len() * self.row_bytes::<T>() } else { 0 };
            let sizes = [range.len() * size_of::<[f32; 3]>(), copies, copies, copies];
            let [factors, x_copy, added_copy, y_copy] = worker.tiles.split(sizes);
            // SAFETY: channels are disjoint and inside the tensors, copies as large as they.
            unsafe {
                let factors = factors.cast::<[f32; 3]>();
                let factors = std::slice::from_raw_parts_mut(factors, range.len());
                let by = [scale, bias].map(|of| of.add(range.start));
                let statistics = [mean_out, var_out].map(|of| of.add(range.start));
                if self.is_narrow() {
                    let x = self.gather(x, &range, x_copy);
                    let added = self.gather(added, &range, added_copy);
                    let wide = self.gathered(&range);
                    wide.forward_some([x, added], by, y_copy.cast(), statistics, factors);
                    return self.scatter(y_copy.cast::<T>(), &range, y);
                }
                let first = range.start * self.size;
                let at = |of: *const T| if of.is_null() { of } else { of.add(first) };
                self.forward_some([at(x), at(added)], by, y.add(first), statistics, factors);
            }
        });
    }

    /// The first channels, as many as there is room for factors.
    unsafe fn forward_some<T: Element>(
        &self,
        [x, added]: [*const T; 2],
        [scale, bias]: [*const f32; 2],
        y: *mut T,
        [mean_out, var_out]: [*mut f32; 2],
        factors: &mut [[f32; 3]],
    ) {
        let n = (self.batch * self.size) as f64;
        // SAFETY: passed on.
        unsafe {
            let row = |of: *const T, i: usize, c: usize| {
                std::slice::from_raw_parts(of.add(self.row(i, c)), self.size)
            };
            for (c, factors) in factors.iter_mut().enumerate() {
                let mut sums = [0.0; LANES];
                (0..self.batch).for_each(|i| T::add_elements(row(x, i, c), &mut sums));
                let mean = sums.iter().sum::<f64>() / n;
                let mut squares = [0.0; LANES];
                (0..self.batch).for_each(|i| T::add_squares(row(x, i, c), mean, &mut squares));
                let var = squares.iter().sum::<f64>() / n;
                let factor = f64::from(*scale.add(c)) / (var + self.eps).sqrt();
                *factors = [mean as f32, factor as f32, *bias.add(c)];
                *mean_out.add(c) = mean as f32;
                *var_out.add(c) = var as f32;
            }
            for i in 0..self.batch {
                for (c, factors) in factors.iter().enumerate() {
                    let y = std::slice::from_raw_parts_mut(y.add(self.row(i, c)), self.size);
                    let added = (!added.is_null()).then(|| row(added, i, c));
                    T::normalize((row(x, i, c), added), *factors, self.relu, y);
                }
            }
        }
    }

    /// `dx`, `dscale` and `dbias`. Where there is a ReLU, `dy` is the gradient of its result.
    ///
    /// # Safety
    /// As for [`BatchNorm::forward`].
    pub unsafe fn backward(
        &self,
        pool: &Pool,
        of: [*const u8; 2],
        gate: Option<Gate>,
        of_x: [*const f32; 3],
        dx: *mut u8,
        sums: [*mut f32; 2],
    ) {
        // SAFETY: passed on.
        unsafe {
            match self.elem {
                Elem::F32 => self.backward_of::<f32>(pool, of, gate, of_x, dx, sums),
                Elem::BF16 => self.backward_of::<bf16>(pool, of, gate, of_x, dx, sums),
                Elem::F16 => self.backward_of::<f16>(pool, of, gate, of_x, dx, sums),
            }
        }
    }

    unsafe fn backward_of<T: Element>(
        &self,
        pool: &Pool,
        of: [*const u8; 2],
        gate: Option<Gate>,
        [scale, mean, var]: [*const f32; 3],
        dx: *mut u8,
        [dscale, dbias]: [*mut f32; 2],
    ) {
        let [dy, x] = of.map(|of| of.cast::<T>());
        let at = Shareable::new((dy, x, gate, scale, mean, var, dx.cast::<T>(), dscale, dbias));
        let step = self.step();
        pool.run_workers(self.channels.div_ceil(step), &|chunk, worker: &mut Worker| {
            let (dy, x, gate, scale, mean, var, dx, dscale, dbias) = at.get();
            let range = chunk * step..self.channels.min((chunk + 1) * step);
            let copies = if self.is_narrow() { range.len() * self.row_bytes::<T>() } else { 0 };
            let [factors, copy] =
                worker.tiles.split([range.len() * size_of::<[f32; 5]>(), 6 * copies]);
            // SAFETY: channels are disjoint and inside the tensors, copies as large as they.
            unsafe {
                let factors = factors.cast::<[f32; 5]>();
                let factors = std::slice::from_raw_parts_mut(factors, range.len());
                let of_x = [scale, mean, var].map(|of| of.add(range.start));
                let sums = [dscale, dbias].map(|of| of.add(range.start));
                if self.is_narrow() {
                    let copy = |i: usize| copy.add(i * copies);
                    let of = [self.gather(dy, &range, copy(0)), self.gather(x, &range, copy(1))];
                    let wide_gate = gate.map(|gate| Gate {
                        y: self.gather(gate.y.cast::<T>(), &range, copy(2)).cast(),
                        added: self.gather(gate.added.cast::<T>(), &range, copy(3)).cast(),
                        passed: if gate.passed.is_null() { gate.passed } else { copy(4) },
                    });
                    let wide = self.gathered(&range);
                    wide.backward_some(of, wide_gate, of_x, copy(5).cast(), sums, factors);
                    if let Some(gate) = gate.filter(|gate| !gate.passed.is_null()) {
                        self.scatter(copy(4).cast::<T>(), &range, gate.passed.cast());
                    }
                    return self.scatter(copy(5).cast::<T>(), &range, dx);
                }
                let first = range.start * self.size;
                let at = |of: *const u8| {
                    if of.is_null() { of } else { of.add(first * size_of::<T>()) }
                };
                let gate = gate.map(|gate| Gate {
                    y: at(gate.y),
                    added: at(gate.added),
                    passed: at(gate.passed).cast_mut(),
                });
                self.backward_some(
                    [dy.add(first), x.add(first)],
                    gate,
                    of_x,
                    dx.add(first),
                    sums,
                    factors,
                );
            }
        });
    }

    /// The first channels, as many as there is room for factors.
    unsafe fn backward_some<T: Element>(
        &self,
        [dy, x]: [*const T; 2],
        gate: Option<Gate>,
        [scale, mean, var]: [*const f32; 3],
        dx: *mut T,
        [dscale, dbias]: [*mut f32; 2],
        factors: &mut [[f32; 5]],
    ) {
        let n = (self.batch * self.size) as f64;
        // What passes the ReLU is kept where it is a result, else in the place of `dx`.
        let passed = gate.map(|gate| gate.passed.cast::<T>()).filter(|at| !at.is_null());
        let passed = passed.unwrap_or(dx);
        let of_norm = if gate.is_some() { passed.cast_const() } else { dy };
        // SAFETY: passed on.
        unsafe {
            let row = |of: *const T, i: usize, c: usize| {
                std::slice::from_raw_parts(of.add(self.row(i, c)), self.size)
            };
            let row_of = |of: *mut T, i: usize, c: usize| {
                std::slice::from_raw_parts_mut(of.add(self.row(i, c)), self.size)
            };
            for (c, factors) in factors.iter_mut().enumerate() {
                let mean = *mean.add(c);
                let rstd = (1.0 / (f64::from(*var.add(c)) + self.eps).sqrt()) as f32;
                let (mut sums, mut products) = ([0.0; LANES], [0.0; LANES]);
                for i in 0..self.batch {
                    if let Some(gate) = gate {
                        let added = gate.added.cast::<T>();
                        let added = (!added.is_null()).then(|| row(added, i, c));
                        let y = row(gate.y.cast(), i, c);
                        T::pass((row(dy, i, c), added), y, row_of(passed, i, c));
                    }
                    let (dy, x) = (row(of_norm, i, c), row(x, i, c));
                    T::add_products(dy, x, [mean, rstd], &mut sums, &mut products);
                }
                let [sum, product] = [sums, products].map(|lanes| lanes.iter().sum::<f64>());
                let factor = *scale.add(c) * rstd;
                *factors = [factor, (sum / n) as f32, mean, rstd, (product / n) as f32];
                *dscale.add(c) = product as f32;
                *dbias.add(c) = sum as f32;
            }
            for i in 0..self.batch {
                for (c, factors) in factors.iter().enumerate() {
                    let (x, to) = (row(x, i, c), row_of(dx, i, c));
                    if of_norm == dx.cast_const() {
                        T::differentiate_in_place(to, x, *factors);
                    } else {
                        T::differentiate(row(of_norm, i, c), x, *factors, to);
                    }
                }
            }
        }
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
