//! Max and sum pooling, and their gradients. The unit of work is an image.

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable, Worker};
use crate::routine::columns::{join_row, split_row};
use crate::routine::conv::plane;
use crate::routine::convert::from_f32;
use crate::simd::vectorized;
use crate::window::Window;
use serde::{Deserialize, Serialize};
use std::ops::Range;

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
        let (size, positions) = (self.window.input_len(), self.window.output_len());
        let (columns, taps) = (Columns::new(&self.window), self.window.taps_len());
        let at = Shareable::new((x, y));
        pool.run_workers(self.images, &|image, worker: &mut Worker| {
            let (x, y) = at.get();
            // SAFETY: images are disjoint and inside the tensors.
            unsafe {
                let sizes = [size * 4, columns.len() * 4, positions * 4];
                let [copy, split, result] = worker.tiles.split(sizes);
                let x = plane(self.elem, self.at(x, image, size), size, copy);
                let x = columns.split(std::slice::from_raw_parts(x, size), split.cast());
                let result = std::slice::from_raw_parts_mut(result.cast::<f32>(), positions);
                result.fill(f32::NEG_INFINITY);
                columns.each_row(&self.window, 0..taps, |_, from, to| {
                    keep_max(&x[from], &mut result[to])
                });
                from_f32(result, self.elem.at_mut(y, (image * positions) as isize), self.elem);
            }
        });
    }

    /// The gradient of [`Pooling::max`]: to the first largest element of each window.
    ///
    /// # Safety
    /// As for [`Pooling::max`].
    pub unsafe fn max_grad(&self, pool: &Pool, dy: *const u8, x: *const u8, dx: *mut u8) {
        let (size, positions) = (self.window.input_len(), self.window.output_len());
        let (columns, taps) = (Columns::new(&self.window), self.window.taps_len());
        let at = Shareable::new((dy, x, dx));
        pool.run_workers(self.images, &|image, worker: &mut Worker| {
            let (dy, x, dx) = at.get();
            // SAFETY: images are disjoint and inside the tensors; all parts have these sizes.
            unsafe {
                let [dy_copy, x_copy, split, sum, best, largest] = worker.tiles.split([
                    positions * 4,
                    size * 4,
                    columns.len() * 4,
                    columns.len() * 4,
                    positions * 4,
                    positions * 4,
                ]);
                let dy = plane(self.elem, self.at(dy, image, positions), positions, dy_copy);
                let dy = std::slice::from_raw_parts(dy, positions);
                let x = plane(self.elem, self.at(x, image, size), size, x_copy);
                let x = columns.split(std::slice::from_raw_parts(x, size), split.cast());
                let sum = std::slice::from_raw_parts_mut(sum.cast::<f32>(), columns.len());
                let best = std::slice::from_raw_parts_mut(best.cast::<u32>(), positions);
                let largest = std::slice::from_raw_parts_mut(largest.cast::<f32>(), positions);
                sum.fill(0.0);
                best.fill(NO_TAP);
                largest.fill(f32::NEG_INFINITY);
                columns.each_row(&self.window, 0..taps, |tap, from, to| {
                    keep_best(tap, &x[from], &mut best[to.clone()], &mut largest[to]);
                });
                // In the order of positions.
                columns.each_row(&self.window, (0..taps).rev(), |tap, from, to| {
                    add_where(tap, &dy[to.clone()], &best[to], &mut sum[from]);
                });
                let result = std::slice::from_raw_parts_mut(x_copy.cast::<f32>(), size);
                columns.join(sum, result);
                from_f32(result, self.elem.at_mut(dx, (image * size) as isize), self.elem);
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

/// No tap of any window.
const NO_TAP: u32 = u32::MAX;

/// Rows of an image with the columns that are alike modulo the stride side by side, so that a tap reads neighbors.
#[derive(Clone, Copy)]
struct Columns {
    stride: usize,
    rows: usize,
    width: usize,
    /// Columns of a remainder, some of them behind the image.
    count: usize,
}

impl Columns {
    fn new(window: &Window) -> Columns {
        let ([depth, height, width], stride) = (window.input, window.strides[2]);
        Columns { stride, rows: depth * height, width, count: width.div_ceil(stride) }
    }

    /// Elements of an image.
    fn len(&self) -> usize {
        self.rows * self.stride * self.count
    }

    /// The image in this order, in place or in `to`.
    unsafe fn split<'x>(&self, x: &'x [f32], to: *mut f32) -> &'x [f32] {
        if self.stride == 1 {
            return x;
        }
        // SAFETY: the caller vouches for as many elements.
        let to = unsafe { std::slice::from_raw_parts_mut(to, self.len()) };
        let lines = to.chunks_exact_mut((self.stride * self.count).max(1));
        for (row, line) in x.chunks_exact(self.width.max(1)).zip(lines) {
            if self.stride == 2 {
                let (even, odd) = line.split_at_mut(self.count);
                split_row(row, even, odd);
                continue;
            }
            for (first, line) in line.chunks_exact_mut(self.count.max(1)).enumerate() {
                let found = row.iter().skip(first).step_by(self.stride);
                line.iter_mut().zip(found).for_each(|(to, from)| *to = *from);
            }
        }
        to
    }

    /// The image `from` this order.
    fn join(&self, from: &[f32], x: &mut [f32]) {
        let lines = from.chunks_exact((self.stride * self.count).max(1));
        for (row, line) in x.chunks_exact_mut(self.width.max(1)).zip(lines) {
            if self.stride == 2 {
                let (even, odd) = line.split_at(self.count);
                join_row(even, odd, row);
                continue;
            }
            for (first, line) in line.chunks_exact(self.count.max(1)).enumerate() {
                let to = row.iter_mut().skip(first).step_by(self.stride);
                to.zip(line).for_each(|(to, from)| *to = *from);
            }
        }
    }

    /// Calls `each(tap, elements, positions)` for every row of positions and every tap: what the tap reads, in this order.
    fn each_row(
        &self,
        window: &Window,
        taps: impl Iterator<Item = usize>,
        mut each: impl FnMut(u32, Range<usize>, Range<usize>),
    ) {
        for tap in taps {
            let mut column = None;
            for (row, span) in window.spans(tap, 0).take(window.rows()).enumerate() {
                let (len, first) = (span.last - span.first, row * window.output[2] + span.first);
                if len > 0 {
                    // All rows begin in the same column; dividing would take as long as a row.
                    let (column, within) = *column.get_or_insert_with(|| {
                        let column = span.from % self.width;
                        (column, column % self.stride * self.count + column / self.stride)
                    });
                    let line = (span.from - column) / self.width;
                    let from = line * self.stride * self.count + within;
                    each(tap as u32, from..from + len, first..first + len);
                }
            }
        }
    }
}

vectorized! {
    fn keep_max(x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = if *x > *y || x.is_nan() { *x } else { *y };
        }
    }
}

vectorized! {
    /// Where an element is larger than the largest so far, keeps it and its tap; the first NaN is the largest.
    fn keep_best(tap: u32, x: &[f32], best: &mut [u32], largest: &mut [f32]) {
        let n = x.len();
        let (best, largest) = (&mut best[..n], &mut largest[..n]);
        for i in 0..n {
            let (new, old) = (x[i], largest[i]);
            let is_better = (best[i] == NO_TAP) | (new > old) | (new.is_nan() & !old.is_nan());
            best[i] = if is_better { tap } else { best[i] };
            largest[i] = if is_better { new } else { old };
        }
    }
}

vectorized! {
    fn add_where(tap: u32, dy: &[f32], best: &[u32], sum: &mut [f32]) {
        let n = sum.len();
        let (dy, best) = (&dy[..n], &best[..n]);
        for i in 0..n {
            sum[i] += if best[i] == tap { dy[i] } else { 0.0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few different values, so that windows have several largest ones, and some NaN.
    fn values(n: usize) -> Vec<f32> {
        (0..n).map(|i| if i % 41 == 7 { f32::NAN } else { ((i * 7919) % 5) as f32 - 2.0 }).collect()
    }

    /// Height and width, taps, stride, dilation, border.
    const CASES: [([usize; 2], usize, usize, usize, usize); 6] = [
        ([9, 70], 3, 2, 1, 1),
        ([8, 33], 2, 2, 1, 0),
        ([7, 40], 3, 1, 2, 1),
        ([11, 35], 3, 3, 1, 1),
        ([5, 21], 2, 4, 3, 1),
        ([6, 6], 6, 1, 1, 0),
    ];

    #[test]
    fn the_first_largest_element_of_each_window_gets_its_gradient() {
        for ([height, width], taps, stride, dilation, border) in CASES {
            let out = |n: usize| (n + 2 * border - dilation * (taps - 1) - 1) / stride + 1;
            let window = Window {
                input: [1, height, width],
                output: [1, out(height), out(width)],
                taps: [1, taps, taps],
                strides: [1, stride, stride],
                dilations: [1, dilation, dilation],
                low: [0, border, border],
            };
            let (images, size, positions) = (3, window.input_len(), window.output_len());
            let x = values(images * size);
            let dy: Vec<f32> = (0..images * positions).map(|i| (i % 13) as f32 - 5.0).collect();
            let (mut y, mut dx) = (vec![f32::NEG_INFINITY; dy.len()], vec![0.0; x.len()]);
            for image in 0..images {
                let mut best = vec![None; positions];
                for tap in 0..window.taps_len() {
                    for row in 0..window.rows() {
                        let span = window.spans(tap, row).next().expect("without end");
                        for i in 0..span.last - span.first {
                            let position = row * window.output[2] + span.first + i;
                            let at = image * size + span.from + i * stride;
                            let y = &mut y[image * positions + position];
                            let is_larger = x[at] > *y || (x[at].is_nan() && !y.is_nan());
                            if best[position].is_none() || is_larger {
                                (best[position], *y) = (Some(at), x[at]);
                            }
                        }
                    }
                }
                for (position, at) in best.into_iter().enumerate() {
                    dx[at.expect("windows have elements")] += dy[image * positions + position];
                }
            }
            let (mut got_y, mut got_dx) = (vec![9.0_f32; y.len()], vec![9.0_f32; x.len()]);
            for threads in [1, 3] {
                let (pool, pooling) =
                    (Pool::new(threads), Pooling { elem: Elem::F32, images, window });
                let at = |v: &[f32]| v.as_ptr().cast::<u8>();
                // SAFETY: the tensors have these shapes.
                unsafe {
                    pooling.max(&pool, at(&x), got_y.as_mut_ptr().cast());
                    pooling.max_grad(&pool, at(&dy), at(&x), got_dx.as_mut_ptr().cast());
                }
                let same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
                assert!(y.iter().zip(&got_y).all(same), "{window:?}");
                assert_eq!(dx, got_dx, "{window:?}");
            }
        }
    }
}
