//! The weight gradient of convolutions whose taps read the image at offsets: sums of products of `dy` and `x` over positions.
//!
//! A block of rows of positions is a GEMM for each tap, of the rows of filters of `dy` and the columns of channels of `x`. The planes of
//! the image are packed once for all taps; in bf16 twice, as a word has two positions, the first even or odd. Positions behind a
//! row count as zeros of `dy`.

use super::Conv;
use super::direct::{Layout, MAX_PERCENT, Reads};
use super::interleave::copy;
use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::routine::convert::from_f32;
use crate::routine::gemm::Gemm;
use crate::routine::gemm::planes::{self, COLUMNS, Planes};
use std::ops::Range;

/// Approximate bytes of the packed planes of a block.
const BLOCK_BYTES: usize = 1 << 18;
/// Fewest positions of an image: the sums of fewer are in registers for too short a time.
const MIN_POSITIONS: usize = 200;
/// Columns of which tiles are made.
const TILE_COLUMNS: usize = 16;
/// Chunks of work per call, if it is large enough.
const CHUNKS: usize = 16;
/// Maximum elements of a weight gradient: its sums are kept several times, and stay in the L2 cache.
const MAX_SUMS: usize = 1 << 18;
/// Zeros behind the planes of a channel, which the last words of positions may read.
const SLACK: usize = 4;

/// The packed planes of a panel of channels: elements of a channel, and words of a panel.
struct Panel {
    len: usize,
    words: usize,
}

impl Panel {
    fn new(layout: &Layout, elem: Elem) -> Panel {
        let len = (layout.phase_words() * layout.phases.len() + layout.words + SLACK) & !1;
        Panel { len, words: len * elem.size() / size_of::<u32>() * COLUMNS }
    }

    /// Packings of a panel.
    fn count(elem: Elem) -> usize {
        size_of::<u32>() / elem.size()
    }
}

/// How the work is divided: parts of the channels, and of the blocks, which are summed apart.
struct Parts {
    channels: usize,
    sums: usize,
    /// Channels and blocks of a part.
    steps: [usize; 2],
}

impl Parts {
    fn new(conv: &Conv, blocks: usize) -> Parts {
        let panels = conv.channels.div_ceil(COLUMNS);
        let sums = (CHUNKS / 2 / conv.groups).clamp(1, (blocks / 2).max(1));
        let channels = (CHUNKS / (conv.groups * sums)).clamp(1, panels);
        let steps = [panels.div_ceil(channels) * COLUMNS, blocks.div_ceil(sums).max(1)];
        let channels = conv.channels.div_ceil(steps[0]);
        Parts { channels, sums: blocks.div_ceil(steps[1]).max(1), steps }
    }
}

impl Conv {
    /// `dw`, and whether this way is taken.
    pub(super) unsafe fn direct_grad_weight(
        &self,
        pool: &Pool,
        dy: *const u8,
        x: *const u8,
        dw: *mut u8,
    ) -> bool {
        let Conv { elem, out, batch, groups, channels, filters, window } = *self;
        let is_large = window.output_len() >= MIN_POSITIONS && window.strides == [1; 3];
        let is_small = filters * channels * window.taps_len() <= MAX_SUMS;
        if self.elem != Elem::BF16 || !self.is_fit() || !is_large || !is_small {
            return false;
        }
        let reads = self.reads();
        let computed = reads.layout(1).pitch * channels.next_multiple_of(TILE_COLUMNS);
        if 100 * computed > MAX_PERCENT * channels * window.output[2] {
            return false;
        }
        let step = self.rows_of_block(&reads);
        let blocks = reads.output[0].div_ceil(step);
        let parts = Parts::new(self, batch * blocks);
        let taps = window.taps_len();
        let size = groups * filters * taps * channels;
        let [partial] = pool.common([parts.sums * size * size_of::<f32>()]);
        let at = Shareable::new((dy, x, partial.cast::<f32>()));
        let chunks = groups * parts.channels * parts.sums;
        pool.run_workers(chunks, &|chunk, worker| {
            let (dy, x, sum) = at.get();
            let (chunk, number) = (chunk / parts.sums, chunk % parts.sums);
            let (group, of_channels) = (chunk / parts.channels, chunk % parts.channels);
            let part = |i: usize, step: usize, end: usize| i * step..end.min((i + 1) * step);
            let channel = part(of_channels, parts.steps[0], channels);
            let block = part(number, parts.steps[1], batch * blocks);
            let largest = reads.layout(step);
            let (panel, positions) = (Panel::new(&largest, elem), step * largest.pitch);
            let panels = channel.len().div_ceil(COLUMNS) * Panel::count(elem);
            let rows = filters.next_multiple_of(Gemm::ROWS);
            let [lines, columns, packed] = worker.tiles.split([
                (COLUMNS * panel.len).max(Gemm::ROWS * positions) * elem.size(),
                panels * panel.words * size_of::<u32>(),
                rows * (positions + 1) * elem.size(),
            ]);
            let (columns, packed) = (columns.cast::<u32>(), packed.cast::<u32>());
            let sum = sum.wrapping_add(number * size + group * filters * taps * channels);
            // SAFETY: the parts of the scratch memory have these sizes; chunks write disjoint sums.
            unsafe {
                for m in (0..filters).filter(|_| block.is_empty()) {
                    for tap in 0..taps {
                        let first = (m * taps + tap) * channels + channel.start;
                        sum.add(first).write_bytes(0, channel.len());
                    }
                }
                for index in block.clone() {
                    let rows = part(index % blocks, step, reads.output[0]);
                    let layout = reads.layout(rows.len());
                    let image = index / blocks * groups + group;
                    let from = (image * channels + channel.start) * window.input_len();
                    let from = elem.at(x, from as isize);
                    self.pack_image(
                        &reads,
                        &layout,
                        (from, channel.len()),
                        &rows,
                        (lines, columns),
                    );
                    let from = image * filters * window.output_len();
                    let from = elem.at(dy, from as isize);
                    self.pack_dy(from, layout.pitch, &rows, (lines, packed));
                    let is_first = index == block.start;
                    let of_rows = (&layout, rows.len());
                    self.add_products(
                        &reads,
                        of_rows,
                        &channel,
                        (packed, columns),
                        (sum, is_first),
                    );
                }
            }
        });
        let at = Shareable::new((partial.cast::<f32>(), dw));
        pool.run_workers(groups * filters, &|row, worker| {
            let (partial, dw) = at.get();
            let len = taps * channels;
            let [line] = worker.tiles.split([len * size_of::<f32>()]);
            // SAFETY: rows are disjoint, and inside both.
            unsafe {
                let from = std::slice::from_raw_parts_mut(partial.add(row * len), len);
                for number in 1..parts.sums {
                    let other = partial.add(number * size + row * len);
                    let other = std::slice::from_raw_parts(other, len);
                    from.iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
                }
                let line = std::slice::from_raw_parts_mut(line.cast::<f32>(), len);
                for (channel, line) in line.chunks_exact_mut(taps).enumerate() {
                    for (tap, to) in line.iter_mut().enumerate() {
                        *to = *from.get_unchecked(tap * channels + channel);
                    }
                }
                from_f32(line, out.at_mut(dw, (row * len) as isize), out);
            }
        });
        true
    }

    /// Rows of positions of a block.
    fn rows_of_block(&self, reads: &Reads) -> usize {
        let channels = self.channels.next_multiple_of(COLUMNS).min(4 * COLUMNS);
        let bytes = |rows: usize| {
            let panel = Panel::new(&reads.layout(rows), self.elem);
            Panel::count(self.elem) * panel.words * channels / COLUMNS * size_of::<u32>()
        };
        let all = reads.output[0];
        let most = (1..=all).take_while(|rows| bytes(*rows) <= BLOCK_BYTES).last().unwrap_or(1);
        all.div_ceil(all.div_ceil(most))
    }

    /// Packs the planes of some channels of an image, from `from` on. `lines` is scratch memory for a panel.
    unsafe fn pack_image(
        &self,
        reads: &Reads,
        layout: &Layout,
        (from, channels): (*const u8, usize),
        rows: &Range<usize>,
        (lines, columns): (*mut u8, *mut u32),
    ) {
        let elem = self.elem;
        let panel = Panel::new(layout, elem);
        let packings = Panel::count(elem);
        for first in (0..channels).step_by(COLUMNS) {
            let count = COLUMNS.min(channels - first);
            // SAFETY: the caller vouches for the image and for both parts of scratch memory.
            unsafe {
                for i in 0..count {
                    let from = elem.at(from, ((first + i) * self.window.input_len()) as isize);
                    let to = elem.at_mut(lines, (i * panel.len) as isize);
                    match elem {
                        Elem::F32 => {
                            copy_planes::<u32>(reads, layout, from, rows.start, (to, panel.len))
                        }
                        _ => copy_planes::<u16>(reads, layout, from, rows.start, (to, panel.len)),
                    }
                }
                for odd in 0..packings {
                    let from = elem.at(lines, odd as isize);
                    let to = columns.add((first / COLUMNS * packings + odd) * panel.words);
                    let size = (count, panel.len - odd);
                    planes::pack_lines(elem, (from, panel.len), size, false, to);
                }
            }
        }
    }

    /// Packs some rows of positions of `dy`, from `from` on, each row padded with zeros up to `pitch`.
    unsafe fn pack_dy(
        &self,
        from: *const u8,
        pitch: usize,
        rows: &Range<usize>,
        (lines, packed): (*mut u8, *mut u32),
    ) {
        let (elem, filters, width) = (self.elem, self.filters, self.window.output[2]);
        let positions = rows.len() * pitch;
        let words = (positions * elem.size()).div_ceil(size_of::<u32>());
        for first in (0..filters).step_by(Gemm::ROWS) {
            let count = Gemm::ROWS.min(filters - first);
            // SAFETY: the caller vouches for `dy` and for both parts of scratch memory.
            unsafe {
                for i in 0..count {
                    for (number, row) in rows.clone().enumerate() {
                        let place = (first + i) * self.window.output_len() + row * width;
                        let from = elem.at(from, place as isize);
                        let to = elem.at_mut(lines, (i * positions + number * pitch) as isize);
                        copy(from, to, width * elem.size());
                        let rest = elem.at_mut(to, width as isize);
                        rest.write_bytes(0, (pitch - width) * elem.size());
                    }
                }
                let to = packed.add(first * words);
                planes::pack_lines(elem, (lines, positions), (count, positions), true, to);
            }
        }
    }

    /// Adds the products of the packed positions of a block to the sums `[filter, tap, channel]`, or begins them.
    unsafe fn add_products(
        &self,
        reads: &Reads,
        (layout, rows): (&Layout, usize),
        channel: &Range<usize>,
        (packed, columns): (*const u32, *const u32),
        (sum, is_first): (*mut f32, bool),
    ) {
        let Conv { elem, channels, filters, window, .. } = *self;
        let (panel, packings, taps) =
            (Panel::new(layout, elem), Panel::count(elem), window.taps_len());
        let words = (rows * layout.pitch).div_ceil(packings);
        let offsets = reads.offsets(layout);
        for c in (0..channel.len()).step_by(COLUMNS) {
            for m in (0..filters).step_by(Gemm::ROWS) {
                let size = (Gemm::ROWS.min(filters - m), COLUMNS.min(channel.len() - c));
                for (tap, offset) in offsets.iter().enumerate() {
                    let packing = c / COLUMNS * packings + offset % packings;
                    let first = (m * taps + tap) * channels + channel.start + c;
                    let offset = offset / packings * COLUMNS;
                    let planes = Planes { count: words, words: COLUMNS, offsets: &[offset] };
                    // SAFETY: offsets stay inside the planes and their slack; the caller vouches for the sums.
                    unsafe {
                        let b = columns.add(packing * panel.words);
                        let to = (sum.add(first).cast(), Elem::F32, taps * channels);
                        let a = packed.add(m * words);
                        planes::multiply(elem, &planes, a, b, size, to, !is_first);
                    }
                }
            }
        }
    }
}

/// Copies the planes of a block of rows of positions, from row `first` on, of a channel of the image, and `len` elements with zeros behind.
unsafe fn copy_planes<T: Copy + Default>(
    reads: &Reads,
    layout: &Layout,
    from: *const u8,
    first: usize,
    (to, len): (*mut u8, usize),
) {
    let [height, width] = reads.input;
    let stride = reads.strides[1];
    let (from, to) = (from.cast::<T>(), to.cast::<T>());
    // SAFETY: rows lie inside the image, and the planes inside the elements.
    unsafe {
        let to = std::slice::from_raw_parts_mut(to, len);
        to.fill(T::default());
        for (number, phase) in layout.phases.iter().enumerate() {
            // The words of a row from `begin` to `end` are elements from `column` on.
            let begin = reads.low[1].saturating_sub(phase[1]).div_ceil(stride);
            let end = (width + reads.low[1]).saturating_sub(phase[1]).div_ceil(stride);
            let end = end.min(layout.words).max(begin);
            let column = begin * stride + phase[1] - reads.low[1];
            for row in 0..layout.rows {
                let at = ((first + row) * reads.strides[0] + phase[0]).wrapping_sub(reads.low[0]);
                if at >= height || begin == end {
                    continue;
                }
                let line = number * layout.phase_words() + row * layout.pitch;
                let line = &mut to[line + begin..line + end];
                let from = from.add(at * width + column);
                if stride == 1 {
                    copy(from.cast(), line.as_mut_ptr().cast(), size_of_val(line));
                } else {
                    for (i, to) in line.iter_mut().enumerate() {
                        *to = *from.add(i * stride);
                    }
                }
            }
        }
    }
}
