//! Convolutions of few channels per group, depthwise ones foremost: sums over taps and channels for vectors of positions.
//!
//! An image is first copied with zeros around it ([`Frame`]), so that every position is a vector's lane like any other and each tap reads
//! at one distance from all of them. Then the result is a sum of a few terms per vector, in registers ([`strips`]), whatever the window.

mod frame;
mod strips;

use super::Conv;
use super::unfold::plane;
use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::routine::convert::from_f32;
use crate::window::Window;
use frame::{Frame, Rows};
use strips::{LANES, Strip, Term};

/// Vectors of results that sum the same taps.
struct Pass {
    /// Numbers of the taps, and where each reads in the frame, counted from where a strip reads.
    taps: Vec<(usize, usize)>,
    strips: Vec<Strip>,
}

/// Taps as indices along the axes, each with its number.
fn taps(window: &Window) -> impl Iterator<Item = (usize, [usize; 3])> {
    let [_, height, width] = window.taps;
    (0..window.taps_len()).map(move |t| (t, [t / (height * width), t / width % height, t % width]))
}

/// The frame of the image, and the sums of all positions, in rows of a multiple of [`LANES`].
fn forward(window: &Window) -> (Frame, Rows, Pass) {
    let Window { input, output, strides, dilations, low, .. } = *window;
    let reach = [0, 1, 2].map(|i| (window.taps[i] - 1) * dilations[i]);
    let last = [0, 1].map(|i| output[i].saturating_sub(1) * strides[i] + reach[i]);
    let width = output[2].next_multiple_of(LANES);
    let frame = Frame {
        sizes: input,
        low,
        extent: last.map(|last| last + 1),
        parts: strides[2],
        pitch: width + reach[2] / strides[2],
    };
    let rows = Rows { count: window.rows(), width: output[2], parts: 1, pitch: width };
    let at = |t: [usize; 3]| frame.at([0, 1, 2].map(|i| t[i] * dilations[i]));
    let taps = taps(window).map(|(number, t)| (number, at(t))).collect();
    let places = (0..rows.count).flat_map(|row| (0..width).step_by(LANES).map(move |c| (row, c)));
    let strip = |(row, column): (usize, usize)| {
        let place = [row / output[1], row % output[1], column];
        let from = frame.at([0, 1, 2].map(|i| place[i] * strides[i]));
        Strip { from, to: row * width + column }
    };
    let strips = places.map(strip).collect();
    (frame, rows, Pass { taps, strips })
}

/// The frame of the gradient, and the sums of all elements of the image: the taps that read an element depend on its remainder by the
/// strides, so each remainder is a pass.
fn backward(window: &Window) -> (Frame, Rows, Vec<Pass>) {
    let Window { input, strides, dilations, low, .. } = *window;
    let reach = [0, 1, 2].map(|i| (window.taps[i] - 1) * dilations[i] / strides[i]);
    let extent = [0, 1, 2].map(|i| reach[i] + (input[i].max(1) - 1 + low[i]) / strides[i] + 1);
    let frame = Frame {
        sizes: window.output,
        low: reach,
        extent: [extent[0], extent[1]],
        parts: 1,
        pitch: extent[2] + LANES,
    };
    let pitch = input[2].div_ceil(strides[2]).next_multiple_of(LANES);
    let rows = Rows { count: input[0] * input[1], width: input[2], parts: strides[2], pitch };
    let firsts = (0..strides.iter().product::<usize>())
        .map(|i| [i / (strides[1] * strides[2]), i / strides[2] % strides[1], i % strides[2]]);
    let pass = |first: [usize; 3]| {
        // Position o reads element a by tap t where o · stride + t · dilation = a + low.
        let remainder = [0, 1, 2].map(|i| (first[i] + low[i]) % strides[i]);
        let reads =
            |t: &[usize; 3]| (0..3).all(|i| t[i] * dilations[i] % strides[i] == remainder[i]);
        let at = |t: [usize; 3]| {
            frame.at([0, 1, 2].map(|i| reach[i] - t[i] * dilations[i] / strides[i]))
        };
        let taps = taps(window).filter(|(_, t)| reads(t)).map(|(number, t)| (number, at(t)));
        let place = |i: usize, a: usize| (a + low[i]) / strides[i];
        let mut strips = Vec::new();
        for d in (first[0]..input[0]).step_by(strides[0]) {
            for h in (first[1]..input[1]).step_by(strides[1]) {
                let row = ((d * input[1] + h) * strides[2] + first[2]) * pitch;
                for column in (0..pitch).step_by(LANES) {
                    let from = frame.at([place(0, d), place(1, h), place(2, first[2]) + column]);
                    strips.push(Strip { from, to: row + column });
                }
            }
        }
        Pass { taps: taps.collect(), strips }
    };
    let passes = firsts.map(pass).collect();
    (frame, rows, passes)
}

impl Conv {
    pub(super) unsafe fn depthwise(&self, pool: &Pool, x: *const u8, w: *const u8, y: *mut u8) {
        let Conv { elem, out, groups, channels, filters, window, .. } = *self;
        let (taps, size, positions) = (window.taps_len(), window.input_len(), window.output_len());
        let (frame, rows, pass) = forward(&window);
        let at = Shareable::new((x, w, y));
        let images = self.batch * groups * filters;
        let step = step(size.max(positions));
        pool.run_workers(images.div_ceil(step), &|chunk, worker| {
            let (x, w, y) = at.get();
            let floats = [size, channels * frame.len(), rows.len(), positions];
            let [copy, frames, sums, y_copy] = worker.tiles.split(floats.map(|n| n * 4));
            let (frames, sums) = (frames.cast::<f32>(), sums.cast::<f32>());
            let mut terms = Vec::with_capacity(channels * taps);
            for image in chunk * step..images.min((chunk + 1) * step) {
                let (group, filter) = (image / filters, image % (groups * filters));
                terms.clear();
                // SAFETY: results are disjoint; all offsets are inside the tensors and parts.
                unsafe {
                    let x = elem.at(x, (group * channels * size) as isize);
                    let w = elem.at(w, (filter * channels * taps) as isize);
                    for channel in 0..channels {
                        let image = plane(elem, elem.at(x, (channel * size) as isize), size, copy);
                        frame.fill(image, frames.add(channel * frame.len()));
                        terms.extend(pass.taps.iter().map(|(tap, at)| Term {
                            at: channel * frame.len() + at,
                            weight: elem.load(w, (channel * taps + tap) as isize),
                        }));
                    }
                    strips::sum(frames, &terms, &pass.strips, sums);
                    let y = out.at_mut(y, (image * positions) as isize);
                    store(&rows, sums, (y, out), y_copy);
                }
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
        let Conv { elem, out, groups, channels, filters, window, .. } = *self;
        let (taps, size, positions) = (window.taps_len(), window.input_len(), window.output_len());
        let (frame, rows, passes) = backward(&window);
        let at = Shareable::new((dy, w, dx));
        let images = self.batch * groups * channels;
        let step = step(size.max(positions));
        pool.run_workers(images.div_ceil(step), &|chunk, worker| {
            let (dy, w, dx) = at.get();
            let floats = [positions, filters * frame.len(), rows.len(), size];
            let [copy, frames, sums, dx_copy] = worker.tiles.split(floats.map(|n| n * 4));
            let (frames, sums) = (frames.cast::<f32>(), sums.cast::<f32>());
            let mut terms = Vec::with_capacity(filters * taps);
            for image in chunk * step..images.min((chunk + 1) * step) {
                let (group, channel) = (image / channels, image % channels);
                // SAFETY: as in `depthwise`.
                unsafe {
                    for m in 0..filters {
                        let dy = elem.at(dy, ((group * filters + m) * positions) as isize);
                        frame.fill(plane(elem, dy, positions, copy), frames.add(m * frame.len()));
                    }
                    for pass in &passes {
                        terms.clear();
                        for m in 0..filters {
                            let filter = group % groups * filters + m;
                            let kernel = (filter * channels + channel) * taps;
                            terms.extend(pass.taps.iter().map(|(tap, at)| Term {
                                at: m * frame.len() + at,
                                weight: elem.load(w, (kernel + tap) as isize),
                            }));
                        }
                        strips::sum(frames, &terms, &pass.strips, sums);
                    }
                    store(&rows, sums, (out.at_mut(dx, (image * size) as isize), out), dx_copy);
                }
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
        let Conv { elem, out, groups, channels, filters, window, .. } = *self;
        let (taps, size, positions) = (window.taps_len(), window.input_len(), window.output_len());
        let (frame, rows, pass) = forward(&window);
        let of_channel = |c: usize| pass.taps.iter().map(move |(_, at)| (c, at));
        let reads: Vec<usize> =
            (0..channels).flat_map(of_channel).map(|(c, at)| c * frame.len() + at).collect();
        let at = Shareable::new((dy, x, dw));
        pool.run_workers(groups * filters, &|filter, worker| {
            let (dy, x, dw) = at.get();
            let floats = [positions.max(size), channels * frame.len(), rows.len()];
            let [copy, frames, of_rows] = worker.tiles.split(floats.map(|n| n * 4));
            let (frames, of_rows) = (frames.cast::<f32>(), of_rows.cast::<f32>());
            let mut sums = vec![[0.0; LANES]; channels * taps];
            // SAFETY: as in `depthwise`.
            unsafe {
                for n in 0..self.batch {
                    let dy = elem.at(dy, ((n * groups * filters + filter) * positions) as isize);
                    rows.spread(plane(elem, dy, positions, copy), of_rows);
                    let image = (n * groups + filter / filters) * channels;
                    for channel in 0..channels {
                        let x = elem.at(x, ((image + channel) * size) as isize);
                        frame.fill(plane(elem, x, size, copy), frames.add(channel * frame.len()));
                    }
                    strips::add_products((frames, &reads), of_rows, &pass.strips, &mut sums);
                }
                let sums: Vec<f32> = sums.into_iter().map(strips::total).collect();
                from_f32(&sums, out.at_mut(dw, (filter * sums.len()) as isize), out);
            }
        });
    }
}

/// Images of a chunk of work, of so many elements.
fn step(size: usize) -> usize {
    /// Elements of a chunk, about.
    const ELEMENTS: usize = 4096;
    (ELEMENTS / size.max(1)).max(1)
}

/// Writes rows without what is behind their ends.
unsafe fn store(rows: &Rows, sums: *const f32, (to, out): (*mut u8, Elem), copy: *mut u8) {
    let len = rows.count * rows.width;
    // SAFETY: the caller vouches for the results and a copy of as many elements.
    unsafe {
        // Of several parts an element and its neighbor are apart, whether there is room or not.
        let dense = match rows.parts == 1 && rows.len() == len {
            true => sums,
            false => {
                rows.join(sums, copy.cast());
                copy.cast::<f32>().cast_const()
            }
        };
        from_f32(std::slice::from_raw_parts(dense, len), to, out);
    }
}
