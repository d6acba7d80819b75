//! Dense convolutions as GEMMs, one block of positions at a time.
//!
//! The filter is packed once per call; small blocks of positions, as in late layers, span several images. The input gradient with
//! stride 1 is a convolution by the flipped filter; otherwise col2im.

use super::Conv;
use super::unfold::Unfold;
use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::routine::convert::from_f32;
use crate::routine::gemm::{Gemm, Operand};
use crate::window::Window;
use std::ops::Range;

/// Approximate bytes of an unfolded block: a part of the L2 cache.
const COLUMN_BYTES: usize = 1 << 18;
/// Minimum and maximum positions per block: fewer fill GEMM tiles badly.
const POSITIONS: [usize; 2] = [256, 512];
/// Fewest positions of an image that is read in place: more images side by side fill the columns of tiles better.
const MIN_IN_PLACE: usize = 128;
/// Approximate positions per step of the weight gradient.
const WEIGHT_POSITIONS: usize = 512;
/// Approximate rows of the GEMM of a chunk whose results are added to the image.
const FOLD_ROWS: usize = 256;
/// Minimum chunks of work per call, if it is large enough.
const CHUNKS: usize = 16;
/// Minimum rows of a kernel for which positions are unfolded repeatedly.
const MIN_ROWS: usize = 192;
/// The same where threads would have nothing to do.
const MIN_ROWS_IDLE: usize = 48;
/// Approximate columns of the weight gradient per chunk.
const WEIGHT_COLUMNS: usize = 256;
/// Maximum elements of a weight gradient that is summed in several parts.
const MAX_PARTIAL: usize = 1 << 18;
/// Filters whose kernels are turned side by side: together they are whole lines of the cache.
const TURNED_FILTERS: usize = 16;
/// Rows of a kernel that a chunk packs, a multiple of [`Gemm::left_rows`].
const PACKED_ROWS: usize = 96;
/// Alignment of packed kernels.
const ALIGN: usize = 64;

/// A kernel `[filters, depth]` per group as a left operand.
#[derive(Clone, Copy)]
struct Kernel {
    at: *const u8,
    operand: Operand,
    /// Elements between the kernels of two groups.
    group: usize,
}

/// How the positions of all images are divided into blocks: several whole images, or several rows of one.
struct Blocks {
    /// Images per block.
    images: usize,
    /// Rows of positions per block.
    rows: usize,
    /// Blocks along the images, and within one.
    count: [usize; 2],
}

impl Blocks {
    /// Blocks of about `most` positions.
    fn new(conv: &Conv, most: usize) -> Blocks {
        let (all, rows) = (conv.window.output_len(), conv.window.rows());
        if all == 0 || 2 * all <= most {
            let n = conv.batch.div_ceil((most / all.max(1)).max(1));
            return Blocks { images: conv.batch.div_ceil(n.max(1)), rows, count: [n, 1] };
        }
        let n = rows.div_ceil((most / conv.window.output[2]).max(1));
        let rows = rows.div_ceil(n);
        Blocks { images: 1, rows, count: [conv.batch, conv.window.rows().div_ceil(rows)] }
    }

    /// Whole images, which are read in place, or as large parts of them as make enough chunks.
    fn of_images(conv: &Conv) -> Blocks {
        let parts = CHUNKS.div_ceil(conv.groups * conv.batch.max(1));
        let parts = parts.min(conv.window.output_len() / POSITIONS[0]).max(1);
        let rows = conv.window.rows().div_ceil(parts);
        Blocks { images: 1, rows, count: [conv.batch, conv.window.rows().div_ceil(rows)] }
    }

    fn len(&self) -> usize {
        self.count[0] * self.count[1]
    }

    /// Images and rows of positions of a block.
    fn get(&self, conv: &Conv, index: usize) -> (Range<usize>, Range<usize>) {
        let (image, row) = (index / self.count[1], index % self.count[1]);
        let part = |i: usize, step: usize, end: usize| i * step..end.min((i + 1) * step);
        (part(image, self.images, conv.batch), part(row, self.rows, conv.window.rows()))
    }
}

impl Conv {
    pub(super) unsafe fn dense(&self, pool: &Pool, x: *const u8, w: *const u8, y: *mut u8) {
        let depth = self.channels * self.window.taps_len();
        let operand = Operand::row_major(self.elem, self.filters, depth);
        let kernel = Kernel { at: w, operand, group: self.filters * depth };
        // SAFETY: passed on.
        unsafe { self.correlate(pool, x, (kernel, 0), y) };
    }

    pub(super) unsafe fn dense_grad_input(
        &self,
        pool: &Pool,
        dy: *const u8,
        w: *const u8,
        dx: *mut u8,
    ) {
        let Conv { elem, groups, channels, filters, window, .. } = *self;
        let Some(window) = turned(&window) else {
            // SAFETY: passed on.
            return unsafe { self.fold_gemm(pool, dy, w, dx) };
        };
        let taps = window.taps_len();
        let conv = Conv { channels: filters, filters: channels, window, ..*self };
        if conv.is_winograd() {
            // SAFETY: passed on.
            return unsafe { conv.winograd(pool, dy, (w, true), dx) };
        }
        let group = filters * channels * taps;
        if taps == 1 {
            let operand = Operand::row_major(elem, filters, channels).transposed();
            // SAFETY: passed on.
            return unsafe { conv.correlate(pool, dy, (Kernel { at: w, operand, group }, 0), dx) };
        }
        let operand = Operand::row_major(elem, channels, filters * taps);
        let kernel = Kernel { at: w, operand, group };
        // SAFETY: passed on.
        unsafe { conv.correlate(pool, dy, (kernel, groups * group * elem.size()), dx) };
    }

    /// GEMMs of a kernel with unfolded images. With `turned` bytes the given kernel is that of the opposite direction,
    /// `[channels, filters, taps]`, which is first transposed and flipped.
    unsafe fn correlate(
        &self,
        pool: &Pool,
        x: *const u8,
        (mut kernel, turned): (Kernel, usize),
        y: *mut u8,
    ) {
        let Conv { elem, out, groups, channels, filters, window, .. } = *self;
        let (depth, positions) = (channels * window.taps_len(), window.output_len());
        let blocks = match window.is_identity() && positions >= MIN_IN_PLACE {
            true => Blocks::of_images(self),
            false => {
                let most = COLUMN_BYTES / (depth * elem.size()).max(1);
                Blocks::new(self, most.clamp(POSITIONS[0], POSITIONS[1]))
            }
        };
        let n = blocks.images * blocks.rows * window.output[2];
        let whole = Gemm { a: kernel.operand, ..Gemm::row_major(elem, out, filters, n, depth) };
        let left_bytes = whole.packed_left_bytes();
        let (is_packed, packed_bytes) =
            (left_bytes > 0, left_bytes.next_multiple_of(ALIGN) + ALIGN);
        let [packed, turned_kernel] = pool.common([groups * packed_bytes, turned]);
        if turned > 0 {
            let from = kernel.at;
            kernel.at = turned_kernel.cast_const();
            // SAFETY: the part holds the kernel.
            unsafe { self.turn(pool, from, turned_kernel) };
        }
        let at = Shareable::new((x, kernel.at, packed, y));
        let group_of = |w: *const u8, group: usize| elem.at(w, (group * kernel.group) as isize);
        // SAFETY: the part holds the packed kernels.
        unsafe { pack_kernels(pool, &whole, (kernel, groups), packed, packed_bytes) };
        let chunks = groups * blocks.len();
        let least = if chunks < self.threads(pool) { MIN_ROWS_IDLE } else { MIN_ROWS };
        let row_parts = self.parts(pool, chunks).clamp(1, (filters / least).max(1));
        let row_step = filters.div_ceil(row_parts).next_multiple_of(whole.left_rows());
        let row_parts = filters.div_ceil(row_step);
        pool.run_workers(chunks * row_parts, &|chunk, worker| {
            let (x, w, packed, y) = at.get();
            let (chunk, rows_of) = (chunk / row_parts, chunk % row_parts);
            let (group, block) = (chunk / blocks.len(), chunk % blocks.len());
            let filter = rows_of * row_step..filters.min((rows_of + 1) * row_step);
            let (images, rows) = blocks.get(self, block);
            let len = rows.len() * window.output[2];
            let n = images.len() * len;
            let single = images.len() == 1;
            let in_place = single && window.is_identity();
            let sizes = [
                if in_place || is_packed { 0 } else { depth * n * elem.size() },
                if single { 0 } else { filter.len() * n * out.size() },
            ];
            let [column, result] = worker.tiles.split(sizes);
            let image = |i: usize| i * groups + group;
            let first = rows.start * window.output[2];
            let y_of = |i: usize, m: usize| (image(i) * filters + m) * positions + first;
            // SAFETY: blocks of y are disjoint; all offsets are inside the tensors.
            unsafe {
                let x_of =
                    |i: usize| elem.at(x, (image(i) * channels * window.input_len()) as isize);
                let table = Unfold::new(elem, &window, &rows);
                let unfold = |depths: Range<usize>, to: *mut u8| {
                    for (i, image) in images.clone().enumerate() {
                        let to = elem.at_mut(to, (i * len) as isize);
                        table.run(x_of(image), depths.clone(), (to, n));
                    }
                };
                let row_major = Operand::row_major(elem, depth, n);
                let (pitch, c_at) = match single {
                    true => (positions, out.at_mut(y, y_of(images.start, filter.start) as isize)),
                    false => (n, result),
                };
                let c = Operand { row: pitch as isize, ..Operand::row_major(out, filters, n) };
                let w = (group_of(w, group), packed.add(group * packed_bytes).cast_const());
                let (size, packing) = ((filter.clone(), n), &mut worker.packing);
                if is_packed && !in_place {
                    let gemm = Gemm { b: row_major, c, ..whole };
                    gemm.run_packed_left_by(size, packing, w.1, &unfold, c_at);
                } else {
                    let (b, b_at) = if in_place {
                        let b = Operand { row: positions as isize, ..row_major };
                        (b, elem.at(x_of(images.start), first as isize))
                    } else {
                        unfold(0..depth, column);
                        (row_major, column.cast_const())
                    };
                    let gemm = Gemm { b, c, ..whole };
                    gemm.run_packed_left(size, packing, w, b_at, c_at);
                }
                if !single {
                    for (i, image) in images.enumerate() {
                        for m in filter.clone() {
                            let from = ((m - filter.start) * n + i * len) * out.size();
                            let to = out.at_mut(y, y_of(image, m) as isize);
                            to.copy_from_nonoverlapping(result.add(from), len * out.size());
                        }
                    }
                }
            }
        });
    }

    /// Transposes the kernel `w[G, channels, filters, taps]` of the opposite direction to `[G, filters, channels,
    /// taps]`, and reverses its taps.
    unsafe fn turn(&self, pool: &Pool, w: *const u8, to: *mut u8) {
        // SAFETY: passed on; elements are copied as bits.
        unsafe {
            match self.elem.size() {
                4 => self.turn_elements::<u32>(pool, w.cast(), to.cast()),
                _ => self.turn_elements::<u16>(pool, w.cast(), to.cast()),
            }
        }
    }

    unsafe fn turn_elements<T: Copy>(&self, pool: &Pool, w: *const T, to: *mut T) {
        let Conv { groups, channels, filters, window, .. } = *self;
        let taps = window.taps_len();
        let at = Shareable::new((w, to));
        let parts = filters.div_ceil(TURNED_FILTERS);
        pool.run(groups * parts, &|chunk| {
            let (w, to) = at.get();
            let (group, first) = (chunk / parts, chunk % parts * TURNED_FILTERS);
            for c in 0..channels {
                for m in first..filters.min(first + TURNED_FILTERS) {
                    let from = ((group * channels + c) * filters + m) * taps;
                    let place = ((group * filters + m) * channels + c) * taps;
                    // SAFETY: both hold the kernel; rows of the result are disjoint.
                    unsafe {
                        let from = std::slice::from_raw_parts(w.add(from), taps);
                        let to = std::slice::from_raw_parts_mut(to.add(place), taps);
                        to.iter_mut().zip(from.iter().rev()).for_each(|(to, x)| *to = *x);
                    }
                }
            }
        });
    }

    /// The input gradient by GEMM and col2im: a chunk is some channels of all positions of some images.
    unsafe fn fold_gemm(&self, pool: &Pool, dy: *const u8, w: *const u8, dx: *mut u8) {
        let Conv { elem, out, groups, channels, filters, window, .. } = *self;
        let (taps, positions) = (window.taps_len(), window.output_len());
        let (depth, input) = (channels * taps, window.input_len());
        let blocks = Blocks::new(self, POSITIONS[1]);
        let a = Operand::row_major(elem, filters, depth).transposed();
        let n = blocks.images * blocks.rows * window.output[2];
        let whole = Gemm { a, ..Gemm::row_major(elem, Elem::F32, depth, n, filters) };
        // Rows of packed kernels begin at multiples.
        let part =
            (FOLD_ROWS / taps.max(1)).next_multiple_of(whole.left_rows()).min(channels).max(1);
        let parts = channels.div_ceil(part);
        let packed_bytes = whole.packed_left_bytes().next_multiple_of(ALIGN) + ALIGN;
        let [packed] = pool.common([groups * packed_bytes]);
        let at = Shareable::new((dy, w, packed, dx));
        let kernel = Kernel { at: w, operand: a, group: filters * depth };
        // SAFETY: the part holds the packed kernels.
        unsafe { pack_kernels(pool, &whole, (kernel, groups), packed, packed_bytes) };
        pool.run_workers(groups * blocks.count[0] * parts, &|chunk, worker| {
            let (dy, w, packed, dx) = at.get();
            let (chunk, first) = (chunk / parts, chunk % parts * part);
            let (group, of_images) = (chunk / blocks.count[0], chunk % blocks.count[0]);
            let count = part.min(channels - first);
            let (images, _) = blocks.get(self, of_images * blocks.count[1]);
            let (single, wide) = (images.len() == 1, out == Elem::F32);
            let first_image = images.start;
            let [column, gathered, sums] = worker.tiles.split([
                count * taps * n * size_of::<f32>(),
                if single { 0 } else { filters * n * elem.size() },
                if wide { 0 } else { images.len() * count * input * size_of::<f32>() },
            ]);
            let place = |image: usize| {
                let plane = (image * groups + group) * channels + first;
                out.at_mut(dx, (plane * input) as isize)
            };
            let sum = |i: usize| match wide {
                true => place(first_image + i).cast::<f32>(),
                false => sums.cast::<f32>().wrapping_add(i * count * input),
            };
            // SAFETY: chunks write disjoint channels of images; all offsets are inside the tensors.
            unsafe {
                (0..images.len()).for_each(|i| sum(i).write_bytes(0, count * input));
                for block in 0..blocks.count[1] {
                    let (_, rows) = blocks.get(self, of_images * blocks.count[1] + block);
                    let len = rows.len() * window.output[2];
                    let n = images.len() * len;
                    let dy_of = |image: usize, m: usize| {
                        let row = (image * groups + group) * filters + m;
                        let at = row * positions + rows.start * window.output[2];
                        elem.at(dy, at as isize)
                    };
                    let b = Operand::row_major(elem, filters, n);
                    let (b, b_at) = if single {
                        (Operand { row: positions as isize, ..b }, dy_of(images.start, 0))
                    } else {
                        for m in 0..filters {
                            for (i, image) in images.clone().enumerate() {
                                let to = elem.at_mut(gathered, (m * n + i * len) as isize);
                                to.copy_from_nonoverlapping(dy_of(image, m), len * elem.size());
                            }
                        }
                        (b, gathered.cast_const())
                    };
                    let w = elem.at(w, (group * filters * depth) as isize);
                    let w = (w, packed.add(group * packed_bytes).cast_const());
                    let gemm = Gemm { b, c: Operand::row_major(Elem::F32, depth, n), ..whole };
                    let size = (first * taps..(first + count) * taps, n);
                    gemm.run_packed_left(size, &mut worker.packing, w, b_at, column);
                    let table = Unfold::new(elem, &window, &rows);
                    for i in 0..images.len() {
                        let from = column.cast::<f32>().cast_const().wrapping_add(i * len);
                        table.fold((from, n), count, sum(i));
                    }
                }
                for (i, image) in images.enumerate().filter(|_| !wide) {
                    let sum = std::slice::from_raw_parts(sum(i), count * input);
                    from_f32(sum, place(image), out);
                }
            }
        });
    }

    pub(super) unsafe fn dense_grad_weight(
        &self,
        pool: &Pool,
        dy: *const u8,
        x: *const u8,
        dw: *mut u8,
    ) {
        let Conv { elem, out, groups, channels, filters, window, .. } = *self;
        let (taps, positions) = (window.taps_len(), window.output_len());
        let width = channels * taps;
        let part = channels.div_ceil((width / WEIGHT_COLUMNS).clamp(1, CHUNKS));
        let parts = channels.div_ceil(part);
        let blocks = Blocks::new(self, WEIGHT_POSITIONS);
        // Positions are split into several sums where there is no other parallelism.
        let wanted = match filters * width <= MAX_PARTIAL {
            true => (CHUNKS / 2 / (groups * parts)).clamp(1, (blocks.len() / 2).max(1)),
            false => 1,
        };
        let block_step = blocks.len().div_ceil(wanted);
        let sums = blocks.len().div_ceil(block_step.max(1)).max(1);
        let direct = sums == 1 && out == Elem::F32;
        let size = groups * filters * width;
        let [partial] = pool.common([if direct { 0 } else { sums * size * 4 }]);
        let at = Shareable::new((dy, x, if direct { dw } else { partial }));
        pool.run_workers(groups * parts * sums, &|chunk, worker| {
            let (dy, x, sum) = at.get();
            let (chunk, number) = (chunk / sums, chunk % sums);
            let (group, first) = (chunk / parts, chunk % parts * part);
            let range = first..channels.min(first + part);
            let columns = range.len() * taps;
            let of_blocks = number * block_step..blocks.len().min((number + 1) * block_step);
            let n = blocks.images * blocks.rows * window.output[2];
            let gathered = if blocks.images == 1 { 0 } else { filters * n * elem.size() };
            let [column, rows_of_dy] = worker.tiles.split([columns * n * elem.size(), gathered]);
            let place = number * size + group * filters * width + first * taps;
            // SAFETY: chunks write disjoint columns; all offsets are inside the tensors.
            unsafe {
                let sum = Elem::F32.at_mut(sum, place as isize);
                if of_blocks.is_empty() {
                    for m in 0..filters {
                        sum.cast::<f32>().add(m * width).write_bytes(0, columns);
                    }
                }
                for block in of_blocks.clone() {
                    let (images, rows) = blocks.get(self, block);
                    let len = rows.len() * window.output[2];
                    let n = images.len() * len;
                    let at_row = rows.start * window.output[2];
                    let single = images.len() == 1;
                    let dy_of = |i: usize, m: usize| {
                        let row = (i * groups + group) * filters + m;
                        elem.at(dy, (row * positions + at_row) as isize)
                    };
                    let x_of = |i: usize, channel: usize| {
                        let plane = (i * groups + group) * channels + channel;
                        elem.at(x, (plane * window.input_len()) as isize)
                    };
                    let in_rows = |rows| Operand::row_major(elem, rows, n);
                    let strided = |operand| Operand { row: positions as isize, ..operand };
                    let (b, b_at) = if single && window.is_identity() {
                        let from = elem.at(x_of(images.start, range.start), at_row as isize);
                        (strided(in_rows(columns)), from)
                    } else {
                        let table = Unfold::new(elem, &window, &rows);
                        for (i, image) in images.clone().enumerate() {
                            let to = elem.at_mut(column, (i * len) as isize);
                            let depths = range.start * taps..range.end * taps;
                            table.run(x_of(image, 0), depths, (to, n));
                        }
                        (in_rows(columns), column.cast_const())
                    };
                    let (a, a_at) = if single {
                        (strided(in_rows(filters)), dy_of(images.start, 0))
                    } else {
                        for m in 0..filters {
                            for (i, image) in images.clone().enumerate() {
                                let to = elem.at_mut(rows_of_dy, (m * n + i * len) as isize);
                                let bytes = len * elem.size();
                                to.copy_from_nonoverlapping(dy_of(image, m), bytes);
                            }
                        }
                        (in_rows(filters), rows_of_dy.cast_const())
                    };
                    let c = Operand::row_major(Elem::F32, filters, columns);
                    let gemm = Gemm {
                        a,
                        b: b.transposed(),
                        c: Operand { row: width as isize, ..c },
                        accumulate: block > of_blocks.start,
                        ..Gemm::row_major(elem, Elem::F32, filters, columns, n)
                    };
                    let all = blocks.images * blocks.rows * window.output[2];
                    let whole = Gemm { n: width, k: all, ..gemm };
                    gemm.run_part(&whole, &mut worker.packing, (a_at, b_at), sum);
                }
            }
        });
        if direct {
            return;
        }
        let at = Shareable::new((partial, dw));
        pool.run(groups * filters, &|row| {
            let (partial, dw) = at.get();
            // SAFETY: rows are disjoint, and inside both.
            unsafe {
                let partial = partial.cast::<f32>();
                let total = std::slice::from_raw_parts_mut(partial.add(row * width), width);
                for number in 1..sums {
                    let from = partial.add(number * size + row * width);
                    let from = std::slice::from_raw_parts(from, width);
                    total.iter_mut().zip(from).for_each(|(sum, x)| *sum += x);
                }
                from_f32(total, out.at_mut(dw, (row * width) as isize), out);
            }
        });
    }
}

/// Packs the kernels of all groups, `bytes` apart, if packing helps.
unsafe fn pack_kernels(
    pool: &Pool,
    whole: &Gemm,
    (kernel, groups): (Kernel, usize),
    packed: *mut u8,
    bytes: usize,
) {
    let parts = whole.m.div_ceil(PACKED_ROWS);
    let at = Shareable::new((kernel.at, packed));
    let Kernel { operand, group: between, .. } = kernel;
    pool.run(groups * parts, &|chunk| {
        let (w, packed) = at.get();
        let (group, first) = (chunk / parts, chunk % parts * PACKED_ROWS);
        let rows = first..whole.m.min(first + PACKED_ROWS);
        let from = (group * between) as isize + first as isize * operand.row;
        // SAFETY: rows of the packed kernels are disjoint.
        unsafe {
            let from = operand.elem.at(w, from);
            whole.pack_left(rows, 0..whole.k, from, packed.add(group * bytes));
        }
    });
}

/// The window of the input gradient, for windows without strides whose padding is smaller than the kernel.
pub(super) fn turned(window: &Window) -> Option<Window> {
    let mut low = [0; 3];
    for (i, low) in low.iter_mut().enumerate() {
        let reach = window.dilations[i] * window.taps[i].checked_sub(1)?;
        *low = reach.checked_sub(window.low[i])?;
    }
    let (input, output) = (window.output, window.input);
    (window.strides == [1; 3]).then_some(Window { input, output, low, ..*window })
}
