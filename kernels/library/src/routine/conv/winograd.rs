//! Convolutions of 3 × 3 taps side by side, computed in tiles of 2 × 2 positions with 16 multiplications instead of 36: the minimal
//! filtering F(2 × 2, 3 × 3) of Winograd (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015).
//!
//! With the tile of the image `d`, 4 × 4, and the kernel `g`, 3 × 3, the positions are `Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A`: for each of the 16
//! elements of a transformed tile, one GEMM of `[filters, channels]` and `[channels, tiles]`. Both gradients are the transposes of
//! these maps. All factors are 0, ±1 and ½, so that transforms round like the sums that they replace; larger tiles
//! would save more and lose digits.

use super::Conv;
use super::tiles::{
    Matrices, POINTS, Planes, Tiles, kernels, of_gradients, of_images, to_positions,
};
use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::routine::gemm::{Gemm, Operand};
use crate::window::Window;

/// Least channels and filters: transforms cost as much as a few of them.
const MIN_DEPTH: usize = 16;
/// Approximate bytes of the transformed tiles of a block and of their results.
const BLOCK_BYTES: usize = 1 << 21;
/// Fewest tiles per block: as many columns as the GEMM's tiles need to be full.
const MIN_TILES: usize = 128;
/// Fewest tiles for which the forward convolution transforms its kernels; the gradient for the input would have to turn them anyway.
const MIN_FORWARD_TILES: usize = 256;
/// Approximate bytes of the transformed tiles of a step of the weight gradient.
const WEIGHT_BYTES: usize = 2 << 20;
/// Fewest tiles of such a step, which a GEMM sums over.
const MIN_WEIGHT_TILES: usize = 128;
/// Minimum chunks of work per call, if it is large enough.
const CHUNKS: usize = 16;
/// Minimum filters per chunk, each of which transforms its tiles again.
const MIN_FILTERS: usize = 128;
/// Alignment of packed kernels.
const ALIGN: usize = 64;

impl Conv {
    /// Whether transformed tiles compute this convolution.
    pub(super) fn is_winograd(&self) -> bool {
        let window = &self.window;
        let shape = window.taps == [1, 3, 3]
            && window.strides == [1; 3]
            && window.dilations[1..] == [1; 2]
            && (window.input[0], window.output[0], window.low[0]) == (1, 1, 0)
            && window.low.iter().all(|low| *low < 3);
        shape
            && (self.elem, self.out) == (Elem::F32, Elem::F32)
            && self.channels.min(self.filters) >= MIN_DEPTH
            && window.output_len() > 0
    }

    /// Whether they compute it faster forward, too.
    pub(super) fn is_winograd_forward(&self) -> bool {
        let tiles = self.tiles();
        self.is_winograd() && self.batch * tiles.rows * tiles.cols >= MIN_FORWARD_TILES
    }

    /// A channel of all images, counted through the groups.
    fn input_planes(&self, x: *const u8, channel: usize) -> Planes {
        let Window { input, low, .. } = self.window;
        let len = self.window.input_len();
        Planes {
            at: x.cast::<f32>().cast_mut().wrapping_add(channel * len),
            image: self.groups * self.channels * len,
            size: [input[1], input[2]],
            low: [low[1], low[2]],
        }
    }

    /// A filter's positions in all images, counted through the groups.
    fn output_planes(&self, y: *const u8, filter: usize) -> Planes {
        let output = self.window.output;
        let len = self.window.output_len();
        Planes {
            at: y.cast::<f32>().cast_mut().wrapping_add(filter * len),
            image: self.groups * self.filters * len,
            size: [output[1], output[2]],
            low: [0; 2],
        }
    }

    fn tiles(&self) -> Tiles {
        let [_, height, width] = self.window.output;
        Tiles { rows: height.div_ceil(2), cols: width.div_ceil(2) }
    }

    /// `y = x ∗ w`, where [`Conv::is_winograd`]. If `is_turned`, `w` is the kernel `[channels, filters, 3, 3]` of the opposite
    /// direction.
    pub(super) unsafe fn winograd(
        &self,
        pool: &Pool,
        x: *const u8,
        (w, is_turned): (*const u8, bool),
        y: *mut u8,
    ) {
        let Conv { batch, groups, channels, filters, .. } = *self;
        let tiles = self.tiles();
        let all_rows = batch * tiles.rows;
        let most = BLOCK_BYTES / (POINTS * 4 * (channels + filters));
        let step = most.max(MIN_TILES).div_ceil(tiles.cols).min(all_rows.max(1));
        let n = step * tiles.cols;
        let stored = if is_turned { [channels, filters] } else { [filters, channels] };
        let operand = Operand::row_major(Elem::F32, stored[0], stored[1]);
        let a = if is_turned { operand.transposed() } else { operand };
        let gemm = Gemm { a, ..Gemm::row_major(Elem::F32, Elem::F32, filters, n, channels) };
        let all_kernels = groups * filters * channels;
        let left_bytes = gemm.packed_left_bytes();
        let packed_bytes = left_bytes.next_multiple_of(ALIGN) + ALIGN;
        let is_packed = left_bytes > 0;
        let point_bytes = if is_packed { 0 } else { POINTS * all_kernels * 4 };
        let [points, packed] = pool.common([point_bytes, groups * POINTS * packed_bytes]);
        let at = Shareable::new((x, w, points, packed, y));
        // What the flipped kernel gives at a point is what the kernel gives where 0 and 3 are exchanged.
        let source = |point: usize| match is_turned {
            true => [3, 1, 2, 0][point / 4] * 4 + [3, 1, 2, 0][point % 4],
            false => point,
        };
        let parts = stored[0].div_ceil(Gemm::ROWS);
        pool.run_workers(groups * parts, &|chunk, worker| {
            let (_, w, points, packed, _) = at.get();
            let (group, first) = (chunk / parts, chunk % parts * Gemm::ROWS);
            let rows = first..stored[0].min(first + Gemm::ROWS);
            let len = rows.len() * stored[1];
            let [own] = worker.tiles.split([if is_packed { POINTS * len * 4 } else { 0 }]);
            let place = group * filters * channels + first * stored[1];
            // SAFETY: rows of kernels are disjoint; all parts have these sizes.
            unsafe {
                let taps = Elem::F32.at(w, (place * 9) as isize).cast();
                let taps = std::slice::from_raw_parts(taps, len * 9);
                if !is_packed {
                    kernels::transform(taps, points.cast::<f32>().add(place), all_kernels);
                    return;
                }
                kernels::transform(taps, own.cast(), len);
                let (rows, depths) =
                    if is_turned { (0..filters, rows) } else { (rows, 0..channels) };
                for point in 0..POINTS {
                    let from = own.add(source(point) * len * 4);
                    let to = packed.add((group * POINTS + point) * packed_bytes);
                    gemm.pack_left(rows.clone(), depths.clone(), from, to);
                }
            }
        });
        // The kernel of a point where kernels are not packed.
        let kernel_of = |points: *mut u8, group: usize, point: usize| {
            let at = source(point) * all_kernels + group * filters * channels;
            Elem::F32.at_mut(points, if is_packed { 0 } else { at as isize }).cast_const()
        };
        let chunks = groups * all_rows.div_ceil(step);
        let parts = (CHUNKS / chunks.max(1)).clamp(1, (filters / MIN_FILTERS).max(1));
        let part = filters.div_ceil(parts).next_multiple_of(Gemm::ROWS);
        let parts = filters.div_ceil(part);
        pool.run_workers(chunks * parts, &|chunk, worker| {
            let (x, _, points, packed, y) = at.get();
            let (chunk, part_of) = (chunk / parts, chunk % parts);
            let (group, block) = (chunk % groups, chunk / groups);
            let filter = part_of * part..filters.min((part_of + 1) * part);
            let rows = block * step..all_rows.min((block + 1) * step);
            let n = rows.len() * tiles.cols;
            let (read, written) = (Matrices::new(channels, n), Matrices::new(filter.len(), n));
            let [transformed, found] = worker.tiles.split([read.bytes(), written.bytes()]);
            // SAFETY: the parts of the scratch memory have these sizes; blocks of y are disjoint.
            unsafe {
                for channel in 0..channels {
                    let planes = self.input_planes(x, group * channels + channel);
                    of_images(&planes, tiles, rows.clone(), read.channel(transformed, channel));
                }
                let whole = Gemm {
                    c: Operand::row_major(Elem::F32, filters, written.row),
                    b: Operand::row_major(Elem::F32, channels, read.row),
                    ..gemm
                };
                for point in 0..POINTS {
                    let kernel = group * POINTS + point;
                    let w = (
                        kernel_of(points, group, point),
                        packed.add(kernel * packed_bytes).cast_const(),
                    );
                    let b = read.matrix(transformed, point, 0).cast_const();
                    let c = written.matrix(found, point, 0);
                    whole.run_packed_left((filter.clone(), n), &mut worker.packing, w, b, c);
                }
                for (i, m) in filter.clone().enumerate() {
                    let planes = self.output_planes(y, group * filters + m);
                    to_positions(&planes, tiles, rows.clone(), written.channel(found, i));
                }
            }
        });
    }

    /// `dw`, where [`Conv::is_winograd`].
    pub(super) unsafe fn winograd_grad_weight(
        &self,
        pool: &Pool,
        dy: *const u8,
        x: *const u8,
        dw: *mut u8,
    ) {
        let Conv { batch, groups, channels, filters, .. } = *self;
        let tiles = self.tiles();
        let all_rows = batch * tiles.rows;
        let most = WEIGHT_BYTES / (POINTS * 4 * (channels + filters));
        let step = most.max(MIN_WEIGHT_TILES).div_ceil(tiles.cols).min(all_rows.max(1));
        let n = step * tiles.cols;
        let (of_x, of_dy) = (Matrices::new(channels, n), Matrices::new(filters, n));
        let kernel = filters * channels;
        let [images, gradients, sums] =
            pool.common([of_x.bytes(), of_dy.bytes(), POINTS * kernel * 4]);
        let at = Shareable::new((dy, x, dw, images, gradients, sums));
        let parts = CHUNKS.div_ceil(POINTS).max(filters / 256);
        let part = filters.div_ceil(parts).next_multiple_of(Gemm::ROWS);
        let parts = filters.div_ceil(part);
        for group in 0..groups {
            for first in (0..all_rows).step_by(step) {
                let rows = first..all_rows.min(first + step);
                let n = rows.len() * tiles.cols;
                pool.run(channels + filters, &|plane| {
                    let (dy, x, _, images, gradients, _) = at.get();
                    // SAFETY: the scratch memory has these sizes; planes are disjoint.
                    unsafe {
                        if plane < channels {
                            let planes = self.input_planes(x, group * channels + plane);
                            let to = of_x.channel(images, plane);
                            of_images(&planes, tiles, rows.clone(), to);
                        } else {
                            let plane = plane - channels;
                            let planes = self.output_planes(dy, group * filters + plane);
                            let to = of_dy.channel(gradients, plane);
                            of_gradients(&planes, tiles, rows.clone(), to);
                        }
                    }
                });
                let a = Operand::row_major(Elem::F32, filters, of_dy.row);
                let b = Operand::row_major(Elem::F32, channels, of_x.row).transposed();
                pool.run_workers(POINTS * parts, &|chunk, worker| {
                    let (.., images, gradients, sums) = at.get();
                    let (point, m) = (chunk / parts, chunk % parts * part);
                    let gemm = Gemm {
                        a,
                        b,
                        accumulate: first > 0,
                        ..Gemm::row_major(Elem::F32, Elem::F32, part.min(filters - m), channels, n)
                    };
                    let a = of_dy.matrix(gradients, point, m);
                    let b = of_x.matrix(images, point, 0);
                    let c = Elem::F32.at_mut(sums, (point * kernel + m * channels) as isize);
                    // SAFETY: points and rows of the sums are disjoint.
                    unsafe { gemm.run_serial(&mut worker.packing, a, b, c, std::ptr::null()) };
                });
            }
            pool.run(filters, &|m| {
                let (_, _, dw, _, _, sums) = at.get();
                // SAFETY: rows are disjoint, and inside both.
                unsafe {
                    let from = std::array::from_fn(|point| {
                        let at = point * kernel + m * channels;
                        std::slice::from_raw_parts(sums.cast::<f32>().add(at), channels)
                    });
                    let to = dw.cast::<f32>().add((group * filters + m) * channels * 9);
                    let to = std::slice::from_raw_parts_mut(to, channels * 9);
                    match all_rows {
                        0 => to.fill(0.0),
                        _ => kernels::restore(&from, to),
                    }
                }
            });
        }
    }
}
