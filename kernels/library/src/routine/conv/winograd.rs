//! Convolutions of 3 × 3 taps side by side, computed in tiles of 2 × 2 positions with 16 multiplications instead of 36: the minimal
//! filtering F(2 × 2, 3 × 3) of Winograd (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015).
//!
//! With the tile of the image `d`, 4 × 4, and the kernel `g`, 3 × 3, the positions are `Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A`: for each of the 16
//! elements of a transformed tile, one GEMM of `[filters, channels]` and `[channels, tiles]`. Both gradients are the transposes of
//! these maps. All factors are 0, ±1 and ½, so that transforms round like the sums that they replace; larger tiles
//! would save more and lose digits.

use super::Conv;
use super::tile::{
    LANES, POINTS, across, along, spread, transform_kernels, untransform, untransform_kernels,
};
use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::routine::gemm::{Gemm, Operand};
use std::ops::Range;

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

/// How images are cut into tiles: `rows` of `cols` tiles each.
#[derive(Clone, Copy)]
struct Tiles {
    rows: usize,
    cols: usize,
}

/// The side of a convolution that is read: images of planes `[height, width]`, padded.
#[derive(Clone, Copy)]
struct Planes {
    at: *const u8,
    /// Elements between two images.
    image: usize,
    /// Height and width.
    size: [usize; 2],
    /// Padding above and to the left.
    low: [usize; 2],
}

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
        let Conv { batch, groups, channels, filters, window, .. } = *self;
        let tiles = self.tiles();
        let [_, height, width] = window.output;
        let all_rows = batch * tiles.rows;
        let most = BLOCK_BYTES / (POINTS * 4 * (channels + filters));
        let step = most.max(MIN_TILES).div_ceil(tiles.cols).min(all_rows.max(1));
        let n = step * tiles.cols;
        let stored = if is_turned { [channels, filters] } else { [filters, channels] };
        let operand = Operand::row_major(Elem::F32, stored[0], stored[1]);
        let a = if is_turned { operand.transposed() } else { operand };
        let gemm = Gemm { a, ..Gemm::row_major(Elem::F32, Elem::F32, filters, n, channels) };
        let kernels = groups * filters * channels;
        let left_bytes = gemm.packed_left_bytes();
        let packed_bytes = left_bytes.next_multiple_of(ALIGN) + ALIGN;
        let is_packed = left_bytes > 0;
        let point_bytes = if is_packed { 0 } else { POINTS * kernels * 4 };
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
                    transform_kernels(taps, points.cast::<f32>().add(place), kernels);
                    return;
                }
                transform_kernels(taps, own.cast(), len);
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
            let at = source(point) * kernels + group * filters * channels;
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
            let pitch = pitch_of(n);
            let sizes = [
                POINTS * channels * pitch * 4,
                POINTS * filter.len() * pitch * 4,
                Lines::bytes(tiles),
            ];
            let [transformed, found, lines] = worker.tiles.split(sizes);
            let plane = window.input_len();
            let planes = Planes {
                at: Elem::F32.at(x, (group * channels * plane) as isize),
                image: groups * channels * plane,
                size: [window.input[1], window.input[2]],
                low: [window.low[1], window.low[2]],
            };
            // SAFETY: the parts of the scratch memory have these sizes; blocks of y are disjoint.
            unsafe {
                let mut lines = Lines::new(lines, tiles);
                let transformed = transformed.cast::<f32>();
                for channel in 0..channels {
                    let planes = Planes {
                        at: Elem::F32.at(planes.at, (channel * plane) as isize),
                        ..planes
                    };
                    let to = (transformed.add(channel * pitch), channels * pitch);
                    transform_image(&planes, tiles, rows.clone(), &mut lines, to);
                }
                let whole = Gemm {
                    c: Operand::row_major(Elem::F32, filters, pitch),
                    b: Operand::row_major(Elem::F32, channels, pitch),
                    ..gemm
                };
                for point in 0..POINTS {
                    let kernel = group * POINTS + point;
                    let w = (
                        kernel_of(points, group, point),
                        packed.add(kernel * packed_bytes).cast_const(),
                    );
                    let b = transformed.add(point * channels * pitch).cast::<u8>().cast_const();
                    let c = found.cast::<f32>().add(point * filter.len() * pitch).cast();
                    whole.run_packed_left((filter.clone(), n), &mut worker.packing, w, b, c);
                }
                let found = found.cast::<f32>().cast_const();
                for (i, m) in filter.clone().enumerate() {
                    for (k, row) in rows.clone().enumerate() {
                        let (image, row) = (row / tiles.rows, row % tiles.rows);
                        let from = std::array::from_fn(|point| {
                            found.add((point * filter.len() + i) * pitch + k * tiles.cols)
                        });
                        let [above, below] = &mut lines.pair;
                        untransform(from, tiles.cols, above, below);
                        let plane = (image * groups + group) * filters + m;
                        let to = y.cast::<f32>().add((plane * height + 2 * row) * width);
                        to.copy_from_nonoverlapping(above.as_ptr(), width);
                        if 2 * row + 1 < height {
                            to.add(width).copy_from_nonoverlapping(below.as_ptr(), width);
                        }
                    }
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
        let Conv { batch, groups, channels, filters, window, .. } = *self;
        let tiles = self.tiles();
        let all_rows = batch * tiles.rows;
        let most = WEIGHT_BYTES / (POINTS * 4 * (channels + filters));
        let step = most.max(MIN_WEIGHT_TILES).div_ceil(tiles.cols).min(all_rows.max(1));
        let pitch = pitch_of(step * tiles.cols);
        let of_x = POINTS * channels * pitch * 4;
        let of_dy = POINTS * filters * pitch * 4;
        let kernel = filters * channels;
        let [images, gradients, sums] = pool.common([of_x, of_dy, POINTS * kernel * 4]);
        let at = Shareable::new((dy, x, dw, images, gradients, sums));
        let (input, output) = (window.input_len(), window.output_len());
        let parts = CHUNKS.div_ceil(POINTS).max(filters / 256);
        let part = filters.div_ceil(parts).next_multiple_of(Gemm::ROWS);
        let parts = filters.div_ceil(part);
        for group in 0..groups {
            for first in (0..all_rows).step_by(step) {
                let rows = first..all_rows.min(first + step);
                let n = rows.len() * tiles.cols;
                pool.run_workers(channels + filters, &|plane, worker| {
                    let (dy, x, _, images, gradients, _) = at.get();
                    let [lines] = worker.tiles.split([Lines::bytes(tiles)]);
                    // SAFETY: the parts of the scratch memory have these sizes; planes are disjoint.
                    unsafe {
                        let mut lines = Lines::new(lines, tiles);
                        if plane < channels {
                            let planes = Planes {
                                at: Elem::F32.at(x, ((group * channels + plane) * input) as isize),
                                image: groups * channels * input,
                                size: [window.input[1], window.input[2]],
                                low: [window.low[1], window.low[2]],
                            };
                            let to = (images.cast::<f32>().add(plane * pitch), channels * pitch);
                            transform_image(&planes, tiles, rows.clone(), &mut lines, to);
                        } else {
                            let plane = plane - channels;
                            let planes = Planes {
                                at: Elem::F32.at(dy, ((group * filters + plane) * output) as isize),
                                image: groups * filters * output,
                                size: [window.output[1], window.output[2]],
                                low: [0; 2],
                            };
                            let to = (gradients.cast::<f32>().add(plane * pitch), filters * pitch);
                            transform_gradient(&planes, tiles, rows.clone(), &mut lines, to);
                        }
                    }
                });
                let a = Operand::row_major(Elem::F32, filters, pitch);
                let b = Operand::row_major(Elem::F32, channels, pitch).transposed();
                pool.run_workers(POINTS * parts, &|chunk, worker| {
                    let (.., images, gradients, sums) = at.get();
                    let (point, m) = (chunk / parts, chunk % parts * part);
                    let gemm = Gemm {
                        a,
                        b,
                        accumulate: first > 0,
                        ..Gemm::row_major(Elem::F32, Elem::F32, part.min(filters - m), channels, n)
                    };
                    let place = |base: *mut u8, at: usize| Elem::F32.at_mut(base, at as isize);
                    let a = place(gradients, (point * filters + m) * pitch);
                    let b = place(images, point * channels * pitch);
                    let c = place(sums, point * kernel + m * channels);
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
                        _ => untransform_kernels(&from, to),
                    }
                }
            });
        }
    }
}

/// Scratch memory of the transforms: padded lines, and the rows that tiles below each other share.
struct Lines<'a> {
    /// A padded row of an image.
    line: &'a mut [f32],
    /// Rows transformed along their width, by row modulo 4 and element of a tile.
    rows: [[&'a mut [f32]; 4]; 4],
    /// Two rows of positions.
    pair: [&'a mut [f32]; 2],
}

impl<'a> Lines<'a> {
    /// Elements of a line: all that whole vectors of tiles read.
    fn len(tiles: Tiles) -> usize {
        2 * tiles.cols.next_multiple_of(LANES) + 2
    }

    fn bytes(tiles: Tiles) -> usize {
        4 * (3 * Lines::len(tiles) + 16 * tiles.cols.next_multiple_of(LANES))
    }

    /// # Safety
    /// `at` must be writable for [`Lines::bytes`] and outlive the result.
    unsafe fn new(at: *mut u8, tiles: Tiles) -> Lines<'a> {
        let mut rest = at.cast::<f32>();
        let mut take = |len: usize| {
            // SAFETY: parts are disjoint, and together as long as was asked for.
            unsafe {
                rest.write_bytes(0, len);
                let part = std::slice::from_raw_parts_mut(rest, len);
                rest = rest.add(len);
                part
            }
        };
        let [line, above, below] = std::array::from_fn(|_| take(Lines::len(tiles)));
        let cols = tiles.cols.next_multiple_of(LANES);
        let rows = std::array::from_fn(|_| std::array::from_fn(|_| take(cols)));
        Lines { line, rows, pair: [above, below] }
    }
}

/// Elements between two rows of `n` transformed tiles: whole vectors, and one that begins at the last tile.
fn pitch_of(n: usize) -> usize {
    n.next_multiple_of(LANES) + LANES
}

/// Writes `Bᵀ d B` of the tiles of some rows of tiles, counted through all images: one row of tiles after the other to `to`, the elements
/// of a tile `pitch` apart, for which [`pitch_of`] the tiles leaves room.
unsafe fn transform_image(
    planes: &Planes,
    tiles: Tiles,
    rows: Range<usize>,
    lines: &mut Lines<'_>,
    (to, pitch): (*mut f32, usize),
) {
    let [height, width] = planes.size;
    let [top, left] = planes.low;
    let len = width.min(lines.line.len() - left);
    // Only these elements of the line are ever written.
    lines.line.fill(0.0);
    for (k, row) in rows.clone().enumerate() {
        let (image, row) = (row / tiles.rows, row % tiles.rows);
        // The tile above has read half of the rows.
        let known = if k > 0 && row > 0 { 2 } else { 0 };
        for i in known..4 {
            let at = (2 * row + i).checked_sub(top).filter(|at| *at < height);
            let slot = &mut lines.rows[(2 * row + i) % 4];
            let Some(at) = at else {
                slot.iter_mut().for_each(|part| part.fill(0.0));
                continue;
            };
            // SAFETY: the row lies inside the image.
            unsafe {
                let from = planes.at.cast::<f32>().add(image * planes.image + at * width);
                let from = std::slice::from_raw_parts(from, len);
                lines.line[left..left + len].copy_from_slice(from);
            }
            along(lines.line, slot);
        }
        for j in 0..4 {
            let four = [0, 1, 2, 3].map(|i| &*lines.rows[(2 * row + i) % 4][j]);
            // SAFETY: the caller vouches for whole vectors of tiles at each point.
            unsafe {
                across(four, [0, 1, 2, 3].map(|i| to.add((4 * i + j) * pitch + k * tiles.cols)));
            }
        }
    }
}

/// Writes `A dy Aᵀ` of tiles, as [`transform_image`] does.
unsafe fn transform_gradient(
    planes: &Planes,
    tiles: Tiles,
    rows: Range<usize>,
    lines: &mut Lines<'_>,
    (to, pitch): (*mut f32, usize),
) {
    let [height, width] = planes.size;
    let Lines { pair: [above, below], .. } = lines;
    above.fill(0.0);
    for (k, row) in rows.enumerate() {
        let (image, row) = (row / tiles.rows, row % tiles.rows);
        // SAFETY: the rows lie inside the image; the caller vouches for the elements of these tiles.
        unsafe {
            let from = planes.at.cast::<f32>().add(image * planes.image + 2 * row * width);
            above[..width].copy_from_slice(std::slice::from_raw_parts(from, width));
            below.fill(0.0);
            if 2 * row + 1 < height {
                let from = std::slice::from_raw_parts(from.add(width), width);
                below[..width].copy_from_slice(from);
            }
            let to = std::array::from_fn(|point| to.add(point * pitch + k * tiles.cols));
            spread(above, below, tiles.cols, to);
        }
    }
}
