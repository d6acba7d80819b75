//! Max and sum pooling, and their gradients. The unit of work is an image.

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable, Worker};
use crate::routine::conv::plane;
use crate::routine::convert::from_f32;
use crate::window::Window;
use serde::{Deserialize, Serialize};

/// Pooling of dense images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pooling {
    /// Element type of operands and results.
    pub elem: Elem,
    /// Number of images, channels counted.
    pub images: usize,
    /// How the window slides.
    pub window: Window,
}

impl Pooling {
    /// The largest element of each window; NaN if any is.
    ///
    /// # Safety
    /// The pointers must be aligned and valid for tensors of these shapes; results overlap no operand.
    pub unsafe fn max(&self, pool: &Pool, x: *const u8, y: *mut u8) {
        // SAFETY: passed on.
        unsafe {
            self.each_image(
                pool,
                (x, self.window.input_len()),
                (y, self.window.output_len()),
                |x, y| {
                    y.fill(f32::NEG_INFINITY);
                    self.each(|element, position| {
                        // SAFETY: spans lie inside images, positions inside rows.
                        let (x, y) = (*x.get_unchecked(element), y.get_unchecked_mut(position));
                        *y = if x > *y || x.is_nan() { x } else { *y };
                    });
                },
            );
        }
    }

    /// The gradient of [`Pooling::max`]: to the first largest element of each window.
    ///
    /// # Safety
    /// As for [`Pooling::max`].
    pub unsafe fn max_grad(&self, pool: &Pool, dy: *const u8, x: *const u8, dx: *mut u8) {
        let (size, positions) = (self.window.input_len(), self.window.output_len());
        let at = Shareable::new((dy, x, dx));
        pool.run_workers(self.images, &|image, worker: &mut Worker| {
            let (dy, x, dx) = at.get();
            // SAFETY: images are disjoint and inside the tensors.
            unsafe {
                let sizes = [positions * 4, size * 4, positions * 8, positions * 4, size * 4];
                let [dy_copy, x_copy, best, largest, sum] = worker.tiles.split(sizes);
                let (dy, x) = (self.at(dy, image, positions), self.at(x, image, size));
                let dy = plane(self.elem, dy, positions, dy_copy);
                let x = plane(self.elem, x, size, x_copy);
                let best = std::slice::from_raw_parts_mut(best.cast::<usize>(), positions);
                let largest = std::slice::from_raw_parts_mut(largest.cast::<f32>(), positions);
                let sum = std::slice::from_raw_parts_mut(sum.cast::<f32>(), size);
                best.fill(usize::MAX);
                largest.fill(f32::NEG_INFINITY);
                sum.fill(0.0);
                self.each(|element, position| {
                    let new = *x.add(element);
                    // Positions lie inside rows.
                    let best = best.get_unchecked_mut(position);
                    let old = largest.get_unchecked_mut(position);
                    let better =
                        *best == usize::MAX || new > *old || (new.is_nan() && !old.is_nan());
                    *best = if better { element } else { *best };
                    *old = if better { new } else { *old };
                });
                for (position, &element) in best.iter().enumerate() {
                    sum[element] += *dy.add(position);
                }
                from_f32(sum, self.elem.at_mut(dx, (image * size) as isize), self.elem);
            }
        });
    }

    /// The sum of each window.
    ///
    /// # Safety
    /// As for [`Pooling::max`].
    pub unsafe fn sum(&self, pool: &Pool, x: *const u8, y: *mut u8) {
        // SAFETY: passed on.
        unsafe {
            self.each_image(
                pool,
                (x, self.window.input_len()),
                (y, self.window.output_len()),
                |x, y| {
                    y.fill(0.0);
                    self.each(|element, position| y[position] += x[element]);
                },
            );
        }
    }

    /// The gradient of [`Pooling::sum`].
    ///
    /// # Safety
    /// As for [`Pooling::max`].
    pub unsafe fn sum_grad(&self, pool: &Pool, dy: *const u8, dx: *mut u8) {
        // SAFETY: passed on.
        unsafe {
            self.each_image(
                pool,
                (dy, self.window.output_len()),
                (dx, self.window.input_len()),
                |dy, dx| {
                    dx.fill(0.0);
                    self.each(|element, position| dx[element] += dy[position]);
                },
            );
        }
    }

    fn at(&self, base: *const u8, image: usize, len: usize) -> *const u8 {
        self.elem.at(base, (image * len) as isize)
    }

    /// Calls `each(element, position)` for every element of every window, tap by tap.
    #[inline(always)]
    fn each(&self, mut each: impl FnMut(usize, usize)) {
        let rows = self.window.rows();
        for tap in 0..self.window.taps_len() {
            for (row, span) in self.window.spans(tap, 0).take(rows).enumerate() {
                let first = row * self.window.output[2] + span.first;
                let mut at = |stride: usize| {
                    for i in 0..span.last - span.first {
                        each(span.from + i * stride, first + i);
                    }
                };
                // Known strides let the loop be vectorized.
                match self.window.strides[2] {
                    1 => at(1),
                    2 => at(2),
                    stride => at(stride),
                }
            }
        }
    }

    /// Runs `body(operand, result)` on every image in f32.
    unsafe fn each_image(
        &self,
        pool: &Pool,
        (from, from_len): (*const u8, usize),
        (to, to_len): (*mut u8, usize),
        body: impl Fn(&[f32], &mut [f32]) + Sync,
    ) {
        let at = Shareable::new((from, to));
        pool.run_workers(self.images, &|image, worker: &mut Worker| {
            let (from, to) = at.get();
            // SAFETY: images are disjoint and inside the tensors.
            unsafe {
                let [copy, result] = worker.tiles.split([from_len * 4, to_len * 4]);
                let from = plane(self.elem, self.at(from, image, from_len), from_len, copy);
                let result = std::slice::from_raw_parts_mut(result.cast::<f32>(), to_len);
                body(std::slice::from_raw_parts(from, from_len), result);
                from_f32(result, self.elem.at_mut(to, (image * to_len) as isize), self.elem);
            }
        });
    }
}
