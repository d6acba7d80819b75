//! Depthwise convolutions: each filter slides over its own image, tap by tap.

use super::Conv;
use super::unfold::{add_spread, plane};
use crate::pool::{Pool, Shareable};
use crate::routine::convert::from_f32;

impl Conv {
    pub(super) unsafe fn depthwise(&self, pool: &Pool, x: *const u8, w: *const u8, y: *mut u8) {
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

    pub(super) unsafe fn depthwise_grad_input(
        &self,
        pool: &Pool,
        dy: *const u8,
        w: *const u8,
        dx: *mut u8,
    ) {
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

    pub(super) unsafe fn depthwise_grad_weight(
        &self,
        pool: &Pool,
        dy: *const u8,
        x: *const u8,
        dw: *mut u8,
    ) {
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
