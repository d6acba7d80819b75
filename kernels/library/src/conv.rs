//! Convolution and its two gradients: matrix products over unfolded images ("im2col"), a block of rows
//! of positions at a time. Groups of one channel (depthwise) are computed directly, tap by tap.
//!
//! Sums are f32. Work is split by shape alone, so the bits do not depend on the pool.

use crate::convert::{from_f32, to_f32};
use crate::dtype::Elem;
use crate::gemm::{Gemm, Operand};
use crate::pool::{Pool, Shareable};
use crate::window::{Span, Window};

/// Bytes of an unfolded block, about: a part of the second-level cache.
const BLOCK_BYTES: usize = 1 << 19;
/// The most parts into which the channels of a group are split for the gradient of the kernel.
const CHANNEL_PARTS: usize = 8;

/// A convolution of dense operands `x[N, G·C, …]`, `w[G·M, C, …]`, `y[N, G·M, …]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv {
    /// Element type of the operands.
    pub elem: Elem,
    /// Element type of the result.
    pub out: Elem,
    /// Images (N).
    pub batch: usize,
    /// Groups (G).
    pub groups: usize,
    /// Channels of a group (C).
    pub channels: usize,
    /// Filters of a group (M).
    pub filters: usize,
    /// How the kernel slides.
    pub window: Window,
}

impl Conv {
    /// `y = x ∗ w`.
    ///
    /// # Safety
    /// The pointers must be aligned and valid for tensors of these shapes; `y` overlaps no operand.
    pub unsafe fn forward(&self, pool: &Pool, x: *const u8, w: *const u8, y: *mut u8) {
        if self.channels == 1 {
            // SAFETY: passed on.
            return unsafe { self.depthwise(pool, x, w, y) };
        }
        let Conv { elem, out, groups, channels, filters, window, .. } = *self;
        let (depth, positions) = (channels * window.taps_len(), window.output_len());
        let (step, blocks) = self.blocks(depth);
        let at = Shareable::new((x, w, y));
        pool.run_workers(self.batch * groups * blocks, &|chunk, worker| {
            let (x, w, y) = at.get();
            let (image, block) = (chunk / blocks, chunk % blocks);
            let (rows, len) = self.block(block, step);
            // SAFETY: blocks of y are disjoint; all offsets are inside the tensors.
            unsafe {
                let x = elem.at(x, (image * channels * window.input_len()) as isize);
                let w = elem.at(w, (image % groups * filters * depth) as isize);
                let first = image * filters * positions + rows.start * window.output[2];
                let b = if window.is_identity() {
                    Operand { row: positions as isize, ..Operand::row_major(elem, depth, len) }
                } else {
                    Operand::row_major(elem, depth, len)
                };
                let column = if window.is_identity() {
                    elem.at(x, (rows.start * window.output[2]) as isize)
                } else {
                    let [column] = worker.tiles.split([depth * len * elem.size()]);
                    self.unfold(x, 0..channels, rows, column);
                    column.cast_const()
                };
                let c =
                    Operand { row: positions as isize, ..Operand::row_major(out, filters, len) };
                let gemm = Gemm { b, c, ..Gemm::row_major(elem, out, filters, len, depth) };
                let y = out.at_mut(y, first as isize);
                gemm.run_serial(&mut worker.packing, w, column, y, std::ptr::null());
            }
        });
    }

    /// `dx`, the gradient for `x`; also the transposed convolution of `dy`.
    ///
    /// # Safety
    /// As for [`Conv::forward`].
    pub unsafe fn grad_input(&self, pool: &Pool, dy: *const u8, w: *const u8, dx: *mut u8) {
        if self.channels == 1 {
            // SAFETY: passed on.
            return unsafe { self.depthwise_grad_input(pool, dy, w, dx) };
        }
        let Conv { elem, out, groups, channels, filters, window, .. } = *self;
        let (depth, positions) = (channels * window.taps_len(), window.output_len());
        let size = channels * window.input_len();
        let (step, blocks) = self.blocks(depth);
        let at = Shareable::new((dy, w, dx));
        pool.run_workers(self.batch * groups, &|image, worker| {
            let (dy, w, dx) = at.get();
            // SAFETY: images of dx are disjoint; all offsets are inside the tensors.
            unsafe {
                let w = elem.at(w, (image % groups * filters * depth) as isize);
                let largest = depth * step.min(window.rows()) * window.output[2];
                let sums = if out == Elem::F32 { 0 } else { size };
                let [column, sum] = worker.tiles.split([largest * 4, sums * 4]);
                let place = out.at_mut(dx, (image * size) as isize);
                let sum = if out == Elem::F32 { place.cast::<f32>() } else { sum.cast() };
                sum.write_bytes(0, size);
                for block in 0..blocks {
                    let (rows, len) = self.block(block, step);
                    let first = image * filters * positions + rows.start * window.output[2];
                    let dy = elem.at(dy, first as isize);
                    let gemm = Gemm {
                        a: Operand::row_major(elem, filters, depth).transposed(),
                        b: Operand {
                            row: positions as isize,
                            ..Operand::row_major(elem, filters, len)
                        },
                        ..Gemm::row_major(elem, Elem::F32, depth, len, filters)
                    };
                    gemm.run_serial(&mut worker.packing, w, dy, column, std::ptr::null());
                    self.fold(column.cast(), rows, sum);
                }
                if out != Elem::F32 {
                    from_f32(std::slice::from_raw_parts(sum, size), place, out);
                }
            }
        });
    }

    /// `dw`, the gradient for `w`.
    ///
    /// # Safety
    /// As for [`Conv::forward`].
    pub unsafe fn grad_weight(&self, pool: &Pool, dy: *const u8, x: *const u8, dw: *mut u8) {
        if self.channels == 1 {
            // SAFETY: passed on.
            return unsafe { self.depthwise_grad_weight(pool, dy, x, dw) };
        }
        let Conv { elem, out, groups, channels, filters, window, .. } = *self;
        let (taps, positions) = (window.taps_len(), window.output_len());
        let part = channels.div_ceil(CHANNEL_PARTS);
        let parts = channels.div_ceil(part);
        let (step, blocks) = self.blocks(part * taps);
        let at = Shareable::new((dy, x, dw));
        pool.run_workers(groups * parts, &|chunk, worker| {
            let (dy, x, dw) = at.get();
            let (group, first) = (chunk / parts, chunk % parts * part);
            let range = first..channels.min(first + part);
            let width = range.len() * taps;
            // SAFETY: chunks write disjoint columns of dw; all offsets are inside the tensors.
            unsafe {
                let largest = width * step.min(window.rows()) * window.output[2];
                let sizes = [largest * elem.size(), filters * width * 4];
                let [column, sum] = worker.tiles.split(sizes);
                sum.cast::<f32>().write_bytes(0, filters * width);
                for image in (0..self.batch).map(|n| n * groups + group) {
                    let x = elem.at(x, (image * channels * window.input_len()) as isize);
                    for block in 0..blocks {
                        let (rows, len) = self.block(block, step);
                        let at = image * filters * positions + rows.start * window.output[2];
                        self.unfold(x, range.clone(), rows, column);
                        let gemm = Gemm {
                            a: Operand {
                                row: positions as isize,
                                ..Operand::row_major(elem, filters, len)
                            },
                            b: Operand::row_major(elem, width, len).transposed(),
                            accumulate: true,
                            ..Gemm::row_major(elem, Elem::F32, filters, width, len)
                        };
                        let dy = elem.at(dy, at as isize);
                        gemm.run_serial(&mut worker.packing, dy, column, sum, std::ptr::null());
                    }
                }
                for m in 0..filters {
                    let row = std::slice::from_raw_parts(sum.cast::<f32>().add(m * width), width);
                    let place = ((group * filters + m) * channels + first) * taps;
                    from_f32(row, out.at_mut(dw, place as isize), out);
                }
            }
        });
    }

    /// Rows of positions of a block, and the number of blocks, for columns of this depth.
    fn blocks(&self, depth: usize) -> (usize, usize) {
        let row = depth * self.window.output[2] * self.elem.size();
        let step = (BLOCK_BYTES / row.max(1)).clamp(1, self.window.rows().max(1));
        (step, self.window.rows().div_ceil(step))
    }

    /// The rows of a block, and its positions.
    fn block(&self, block: usize, step: usize) -> (std::ops::Range<usize>, usize) {
        let rows = block * step..self.window.rows().min((block + 1) * step);
        let len = rows.len() * self.window.output[2];
        (rows, len)
    }

    /// Writes `column[channel·taps, positions]` for some channels of the image at `x`.
    unsafe fn unfold(
        &self,
        x: *const u8,
        channels: std::ops::Range<usize>,
        rows: std::ops::Range<usize>,
        column: *mut u8,
    ) {
        // SAFETY: passed on; elements are copied as bits.
        unsafe {
            match self.elem.size() {
                4 => unfold::<u32>(&self.window, x.cast(), channels, rows, column.cast()),
                _ => unfold::<u16>(&self.window, x.cast(), channels, rows, column.cast()),
            }
        }
    }

    /// Adds `column[channel·taps, positions]` to the image at `sum`.
    unsafe fn fold(&self, column: *const f32, rows: std::ops::Range<usize>, sum: *mut f32) {
        let Window { output: [.., width], strides: [.., stride], .. } = self.window;
        let mut from = column;
        for channel in 0..self.channels {
            for tap in 0..self.window.taps_len() {
                for row in rows.clone() {
                    let span = self.window.span(tap, row);
                    // SAFETY: spans lie inside the image, rows inside the column.
                    unsafe {
                        let to = sum.add(channel * self.window.input_len() + span.from);
                        add_spread(span, stride, from, 1.0, to);
                        from = from.add(width);
                    }
                }
            }
        }
    }

    /// Groups of one channel: each filter slides over its own image.
    unsafe fn depthwise(&self, pool: &Pool, x: *const u8, w: *const u8, y: *mut u8) {
        let Conv { elem, out, groups, filters, window, .. } = *self;
        let (taps, size, positions) = (window.taps_len(), window.input_len(), window.output_len());
        let width = window.output[2];
        let at = Shareable::new((x, w, y));
        pool.run_workers(self.batch * groups * filters, &|chunk, worker| {
            let (x, w, y) = at.get();
            let (image, filter) = (chunk / filters, chunk % (groups * filters));
            // SAFETY: results are disjoint; all offsets are inside the tensors.
            unsafe {
                let sizes = [size * 4, positions * 4];
                let [copy, sum] = worker.tiles.split(sizes);
                let x = plane(elem, elem.at(x, (image * size) as isize), size, copy);
                let sum = std::slice::from_raw_parts_mut(sum.cast::<f32>(), positions);
                sum.fill(0.0);
                for tap in 0..taps {
                    let weight = elem.load(w, (filter * taps + tap) as isize);
                    for (row, sum) in sum.chunks_exact_mut(width).enumerate() {
                        let span = window.span(tap, row);
                        let from = x.add(span.from);
                        for (i, sum) in sum[span.first..span.last].iter_mut().enumerate() {
                            *sum += weight * *from.add(i * window.strides[2]);
                        }
                    }
                }
                from_f32(sum, out.at_mut(y, (chunk * positions) as isize), out);
            }
        });
    }

    unsafe fn depthwise_grad_input(&self, pool: &Pool, dy: *const u8, w: *const u8, dx: *mut u8) {
        let Conv { elem, out, groups, filters, window, .. } = *self;
        let (taps, size, positions) = (window.taps_len(), window.input_len(), window.output_len());
        let at = Shareable::new((dy, w, dx));
        pool.run_workers(self.batch * groups, &|image, worker| {
            let (dy, w, dx) = at.get();
            // SAFETY: as in `depthwise`.
            unsafe {
                let [copy, sum] = worker.tiles.split([positions * 4, size * 4]);
                let sum = sum.cast::<f32>();
                sum.write_bytes(0, size);
                for m in 0..filters {
                    let at = ((image * filters + m) * positions) as isize;
                    let dy = plane(elem, elem.at(dy, at), positions, copy);
                    for tap in 0..taps {
                        let filter = image % groups * filters + m;
                        let weight = elem.load(w, (filter * taps + tap) as isize);
                        for row in 0..window.rows() {
                            let span = window.span(tap, row);
                            let from = dy.add(row * window.output[2]);
                            add_spread(span, window.strides[2], from, weight, sum.add(span.from));
                        }
                    }
                }
                let sum = std::slice::from_raw_parts(sum, size);
                from_f32(sum, out.at_mut(dx, (image * size) as isize), out);
            }
        });
    }

    unsafe fn depthwise_grad_weight(&self, pool: &Pool, dy: *const u8, x: *const u8, dw: *mut u8) {
        let Conv { elem, out, groups, filters, window, .. } = *self;
        let (taps, size, positions) = (window.taps_len(), window.input_len(), window.output_len());
        let at = Shareable::new((dy, x, dw));
        pool.run_workers(groups * filters, &|filter, worker| {
            let (dy, x, dw) = at.get();
            // SAFETY: as in `depthwise`.
            unsafe {
                let [dy_copy, x_copy, sum] =
                    worker.tiles.split([positions * 4, size * 4, taps * 4]);
                let sum = std::slice::from_raw_parts_mut(sum.cast::<f32>(), taps);
                sum.fill(0.0);
                for n in 0..self.batch {
                    let dy_at = ((n * groups * filters + filter) * positions) as isize;
                    let x_at = ((n * groups + filter / filters) * size) as isize;
                    let dy = plane(elem, elem.at(dy, dy_at), positions, dy_copy);
                    let x = plane(elem, elem.at(x, x_at), size, x_copy);
                    for (tap, sum) in sum.iter_mut().enumerate() {
                        let mut of_image = 0.0;
                        for row in 0..window.rows() {
                            let span = window.span(tap, row);
                            let dy = dy.add(row * window.output[2]);
                            let mut of_row = 0.0;
                            for position in span.first..span.last {
                                let i = (position - span.first) * window.strides[2];
                                of_row += *dy.add(position) * *x.add(span.from + i);
                            }
                            of_image += of_row;
                        }
                        *sum += of_image;
                    }
                }
                from_f32(sum, out.at_mut(dw, (filter * taps) as isize), out);
            }
        });
    }
}

/// `len` elements as f32: in place, or converted into `copy`.
pub(crate) unsafe fn plane(elem: Elem, from: *const u8, len: usize, copy: *mut u8) -> *const f32 {
    if elem == Elem::F32 {
        return from.cast();
    }
    // SAFETY: the caller vouches for both.
    unsafe { to_f32(from, elem, std::slice::from_raw_parts_mut(copy.cast(), len)) };
    copy.cast::<f32>().cast_const()
}

/// Adds `factor ·` the row of positions at `from` to the elements that a span reads, from `to` on.
unsafe fn add_spread(span: Span, stride: usize, from: *const f32, factor: f32, to: *mut f32) {
    // SAFETY: the span lies inside both.
    unsafe {
        for position in span.first..span.last {
            *to.add((position - span.first) * stride) += factor * *from.add(position);
        }
    }
}

unsafe fn unfold<T: Copy + Default>(
    window: &Window,
    x: *const T,
    channels: std::ops::Range<usize>,
    rows: std::ops::Range<usize>,
    column: *mut T,
) {
    let Window { output: [.., width], strides: [.., stride], .. } = *window;
    let mut to = column;
    for channel in channels {
        for tap in 0..window.taps_len() {
            for row in rows.clone() {
                let Span { first, last, from } = window.span(tap, row);
                // SAFETY: spans lie inside the image, rows inside the column.
                unsafe {
                    let line = std::slice::from_raw_parts_mut(to, width);
                    let from = x.add(channel * window.input_len() + from);
                    line[..first].fill(T::default());
                    line[last..].fill(T::default());
                    if stride == 1 {
                        let found = std::slice::from_raw_parts(from, last - first);
                        line[first..last].copy_from_slice(found);
                    } else {
                        for (i, to) in line[first..last].iter_mut().enumerate() {
                            *to = *from.add(i * stride);
                        }
                    }
                    to = to.add(width);
                }
            }
        }
    }
}
