//! Convolutions of 3 × 3 taps side by side, computed in tiles of 2 × 2 positions with 16 multiplications instead of 36: the minimal
//! filtering F(2 × 2, 3 × 3) of Winograd (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015).
//!
//! With the tile of the image `d`, 4 × 4, and the kernel `g`, 3 × 3, the positions are `Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A`: for each of the 16
//! elements of a transformed tile, one GEMM of `[filters, channels]` and `[channels, tiles]`. Both gradients are the transposes of
//! these maps. All factors are 0, ±1 and ½, so that transforms round like the sums that they replace; larger tiles
//! would save more and lose digits.

use super::Conv;
use super::tiles::{self, Matrices, POINTS, Planes, Tiles, of_gradients, of_images, to_positions};
use crate::dtype::Elem;
use crate::pool::{Pool, Scratch, Shareable};
use crate::routine::gemm::{Gemm, Operand};
use crate::window::Window;
use std::ops::Range;

/// Least channels and filters: transforms cost as much as a few of them.
const MIN_DEPTH: usize = 16;
/// Approximate bytes of the transformed tiles of a block and of their results.
const BLOCK_BYTES: usize = 1 << 21;
/// Fewest tiles per block: as many columns as the GEMM's tiles need to be full.
const MIN_TILES: usize = 128;
/// Fewest tiles for which the forward convolution transforms its kernels, which takes the longer beside the products the faster these
/// are: with AVX2, and with wider vectors. The gradient for the input would have to turn the kernels anyway.
const MIN_FORWARD_TILES: [usize; 2] = [16, 96];
/// Fewest tiles for which the weight gradient is summed in them: fewer are too short sums for a GEMM.
const MIN_GRADIENT_TILES: usize = 48;
/// Approximate bytes of the transformed tiles of a step of the weight gradient.
const WEIGHT_BYTES: usize = 2 << 20;
/// Fewest tiles of such a step, which a GEMM sums over.
const MIN_WEIGHT_TILES: usize = 128;
/// Minimum filters per chunk, each of which transforms its tiles again.
const MIN_FILTERS: usize = 48;
/// Least filters and channels of a part of the weight gradient, and what a part of them transforms for, counted in products.
const LEAST: usize = 16;
const TRANSFORM: usize = 16;
/// Alignment of packed kernels.
const ALIGN: usize = 64;

/// Whether vectors are wider than those of AVX2.
#[cfg(target_arch = "x86_64")]
use crate::simd::has_avx512 as is_wide;

/// As if they were: thresholds of other processors were not measured.
#[cfg(not(target_arch = "x86_64"))]
fn is_wide() -> bool {
    true
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
        self.is_winograd() && self.all_tiles() >= MIN_FORWARD_TILES[usize::from(is_wide())]
    }

    /// Whether they compute the weight gradient faster.
    pub(super) fn is_winograd_grad_weight(&self) -> bool {
        self.is_winograd() && self.all_tiles() >= MIN_GRADIENT_TILES
    }

    /// The tiles of all images.
    fn all_tiles(&self) -> usize {
        let tiles = self.tiles();
        self.batch * tiles.rows * tiles.cols
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
        let count = groups * filters * channels;
        let left_bytes = gemm.packed_left_bytes();
        let packed_bytes = left_bytes.next_multiple_of(ALIGN) + ALIGN;
        let is_packed = left_bytes > 0;
        let kernel_bytes =
            if is_packed { groups * POINTS * packed_bytes } else { POINTS * count * 4 };
        let [kernels] = pool.common([kernel_bytes]);
        let kernels = Kernels { at: kernels, gemm, count, packed_bytes, is_packed, is_turned };
        // SAFETY: passed on; the parts have these sizes.
        unsafe {
            self.transform_kernels(pool, w, &kernels);
            self.multiply_blocks(pool, x, &kernels, y, step);
        }
    }

    /// Transforms the kernels and packs them.
    unsafe fn transform_kernels(&self, pool: &Pool, w: *const u8, kernels: &Kernels) {
        let Conv { groups, channels, filters, .. } = *self;
        let stored = if kernels.is_turned { [channels, filters] } else { [filters, channels] };
        // Panels of rows begin at multiples of their size, and so do depths that are packed as such.
        let panel = kernels.gemm.left_rows();
        let parts = stored[0].div_ceil(panel);
        let at = Shareable::new((w, *kernels));
        pool.run_workers(groups * parts, &|chunk, worker| {
            let (w, kernels) = at.get();
            let (group, first) = (chunk / parts, chunk % parts * panel);
            let rows = first..stored[0].min(first + panel);
            let len = rows.len() * stored[1];
            let [own] = worker.tiles.split([if kernels.is_packed { POINTS * len * 4 } else { 0 }]);
            let place = group * filters * channels + first * stored[1];
            // SAFETY: rows of kernels are disjoint; all parts have these sizes.
            unsafe {
                let taps = Elem::F32.at(w, (place * 9) as isize).cast();
                let taps = std::slice::from_raw_parts(taps, len * 9);
                if !kernels.is_packed {
                    let to = kernels.at.cast::<f32>().add(place);
                    return tiles::kernels::transform(taps, to, kernels.count);
                }
                tiles::kernels::transform(taps, own.cast(), len);
                let (rows, depths) =
                    if kernels.is_turned { (0..filters, rows) } else { (rows, 0..channels) };
                for point in 0..POINTS {
                    let from = own.add(kernels.source(point) * len * 4);
                    let to = kernels.packed(group, point);
                    kernels.gemm.pack_left(rows.clone(), depths.clone(), from, to);
                }
            }
        });
    }

    /// Blocks of rows of tiles, each transformed, multiplied and brought back by one thread in its cache.
    unsafe fn multiply_blocks(
        &self,
        pool: &Pool,
        x: *const u8,
        kernels: &Kernels,
        y: *mut u8,
        step: usize,
    ) {
        let Conv { batch, groups, channels, filters, .. } = *self;
        let tiles = self.tiles();
        let all_rows = batch * tiles.rows;
        let chunks = groups * all_rows.div_ceil(step);
        // Each part transforms the tiles again. Threads share nothing that they write, as exchanging it may be slower than computing
        // it twice.
        let parts = self.parts(pool, chunks);
        let part =
            filters.div_ceil(parts).max(MIN_FILTERS).next_multiple_of(kernels.gemm.left_rows());
        let parts = filters.div_ceil(part);
        let at = Shareable::new((x, *kernels, y));
        pool.run_workers(chunks * parts, &|chunk, worker| {
            let (x, kernels, y) = at.get();
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
                for point in 0..POINTS {
                    let b = (read.row, read.matrix(transformed, point, 0).cast_const());
                    let c = (written.row, written.matrix(found, point, 0));
                    let size = (filter.clone(), n);
                    kernels.multiply((group, point), size, &mut worker.packing, b, c);
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
        let parts = split(self.threads(pool).div_ceil(groups.max(1)), [filters, channels]);
        let part =
            [0, 1].map(|i| [filters, channels][i].div_ceil(parts[i]).next_multiple_of(LEAST));
        let parts = [filters.div_ceil(part[0]), channels.div_ceil(part[1])];
        let at = Shareable::new((dy, x, dw));
        pool.run_workers(groups * parts[0] * parts[1], &|chunk, worker| {
            let (dy, x, dw) = at.get();
            let (group, chunk) = (chunk / (parts[0] * parts[1]), chunk % (parts[0] * parts[1]));
            let of = |i: usize, step: usize, end: usize| i * step..end.min((i + 1) * step);
            let filter = of(chunk % parts[0], part[0], filters);
            let channel = of(chunk / parts[0], part[1], channels);
            let (of_x, of_dy) = (Matrices::new(channel.len(), n), Matrices::new(filter.len(), n));
            let kernels = filter.len() * channel.len();
            let sizes = [of_x.bytes(), of_dy.bytes(), POINTS * kernels * 4];
            let [images, gradients, sums] = worker.tiles.split(sizes);
            // SAFETY: the parts of the scratch memory have these sizes; parts of dw are disjoint.
            unsafe {
                for first in (0..all_rows).step_by(step) {
                    let rows = first..all_rows.min(first + step);
                    for (i, channel) in channel.clone().enumerate() {
                        let planes = self.input_planes(x, group * channels + channel);
                        of_images(&planes, tiles, rows.clone(), of_x.channel(images, i));
                    }
                    for (i, m) in filter.clone().enumerate() {
                        let planes = self.output_planes(dy, group * filters + m);
                        of_gradients(&planes, tiles, rows.clone(), of_dy.channel(gradients, i));
                    }
                    let n = rows.len() * tiles.cols;
                    let (elem, m) = (Elem::F32, filter.len());
                    let gemm = Gemm {
                        a: Operand::row_major(elem, m, of_dy.row),
                        b: Operand::row_major(elem, channel.len(), of_x.row).transposed(),
                        accumulate: first > 0,
                        ..Gemm::row_major(elem, elem, m, channel.len(), n)
                    };
                    let whole = Gemm { m: filters, n: channels, k: step * tiles.cols, ..gemm };
                    for point in 0..POINTS {
                        let a = of_dy.matrix(gradients, point, 0);
                        let b = of_x.matrix(images, point, 0);
                        let c = elem.at_mut(sums, (point * kernels) as isize);
                        gemm.run_part(&whole, &mut worker.packing, (a, b), c);
                    }
                }
                for (i, m) in filter.enumerate() {
                    let from = std::array::from_fn(|point| {
                        let at = point * kernels + i * channel.len();
                        std::slice::from_raw_parts(sums.cast::<f32>().add(at), channel.len())
                    });
                    let place = (group * filters + m) * channels + channel.start;
                    let to = dw.cast::<f32>().add(9 * place);
                    let to = std::slice::from_raw_parts_mut(to, 9 * channel.len());
                    match all_rows {
                        0 => to.fill(0.0),
                        _ => tiles::kernels::restore(&from, to),
                    }
                }
            }
        });
    }
}

/// Into how many parts filters and channels are split for so many threads, each of which transforms its filters and its channels.
fn split(threads: usize, sizes: [usize; 2]) -> [usize; 2] {
    let most = sizes.map(|size| (size / LEAST).clamp(1, threads));
    let ways = (1..=most[0]).map(|i| [i, threads.div_ceil(i).min(most[1])]);
    // The slowest thread's products, and what all transform.
    let cost = |parts: &[usize; 2]| {
        let [m, c] = [0, 1].map(|i| sizes[i].div_ceil(parts[i]));
        let rounds = (parts[0] * parts[1]).div_ceil(threads);
        rounds * (m * c + TRANSFORM * (m + c))
    };
    ways.min_by_key(cost).unwrap_or([1, 1])
}

/// The kernels of all groups at all points, `[filters, channels]` or, if turned, `[channels, filters]`.
#[derive(Clone, Copy)]
struct Kernels {
    at: *mut u8,
    /// The GEMM of a point.
    gemm: Gemm,
    /// Kernels of all groups.
    count: usize,
    /// Bytes of the packed kernels of a point.
    packed_bytes: usize,
    /// Whether they are packed.
    is_packed: bool,
    /// Whether they are those of the opposite direction.
    is_turned: bool,
}

impl Kernels {
    /// At which point of a kernel the flipped one has what it has at this point: 0 and 3 are exchanged.
    fn source(&self, point: usize) -> usize {
        match self.is_turned {
            true => [3, 1, 2, 0][point / 4] * 4 + [3, 1, 2, 0][point % 4],
            false => point,
        }
    }

    /// The packed kernels of a group at a point.
    fn packed(&self, group: usize, point: usize) -> *mut u8 {
        self.at.wrapping_add((group * POINTS + point) * self.packed_bytes)
    }

    /// Multiplies some filters at a point of a group by `n` tiles, the rows of the matrices so far apart.
    ///
    /// # Safety
    /// The matrices must be valid.
    unsafe fn multiply(
        &self,
        (group, point): (usize, usize),
        (filters, n): (Range<usize>, usize),
        packing: &mut Scratch,
        b: (usize, *const u8),
        c: (usize, *mut u8),
    ) {
        let gemm = Gemm {
            b: Operand::row_major(Elem::F32, self.gemm.k, b.0),
            c: Operand::row_major(Elem::F32, self.gemm.m, c.0),
            ..self.gemm
        };
        let kernel = match self.is_packed {
            true => (self.at.cast_const(), self.packed(group, point).cast_const()),
            false => {
                let skip = self.source(point) * self.count + group * gemm.m * gemm.k;
                let at = self.at.cast::<f32>().wrapping_add(skip).cast::<u8>().cast_const();
                (at, at)
            }
        };
        // SAFETY: passed on.
        unsafe { gemm.run_packed_left((filters, n), packing, kernel, b.1, c.1) };
    }
}
