//! Convolutions of images of two axes whose taps read the image at offsets, without unfolding it.
//!
//! A block of rows of the image is written once in the words of the micro-kernels, with its padding: a plane for every word of channels,
//! in which each position of a row of positions is followed by the next and each row by the next. Then what a tap reads for all
//! positions lies side by side from an offset on, and a tile of the result is a sum over channels and taps. With strides there is
//! a plane for every *phase*, the rows and columns that are alike modulo the strides.
//!
//! Behind every row of positions there are some of no meaning, which are computed and dropped. The input gradient is a convolution
//! without strides for each phase of its result.

use super::interleave::{self, Kernel};
use super::{Conv, dense};
use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::routine::gemm::Gemm;
use crate::routine::gemm::planes::{self, Planes};
use std::ops::Range;

/// Most bytes of the planes of a block: a part of the L2 cache.
const BLOCK_BYTES: usize = 3 << 17;
/// Columns of which tiles are made, and as how many more of them a block counts.
const TILE_COLUMNS: usize = 16;
const BLOCK_COST: usize = 16;
/// Most columns computed for each that is kept, in percent: beyond, images are unfolded.
pub(super) const MAX_PERCENT: usize = 128;
/// Channels below which images of f32 are read at offsets, too.
const FEW_CHANNELS: usize = 16;
/// Minimum filters of a chunk, each of which writes its planes again.
const MIN_FILTERS: usize = 96;
/// Words behind the planes that tiles at their end read.
const SLACK: usize = 64;

/// What a convolution reads for each of its positions, along both axes.
pub(super) struct Reads {
    /// Sizes of the image.
    pub(super) input: [usize; 2],
    /// Positions.
    pub(super) output: [usize; 2],
    /// Elements between two positions.
    pub(super) strides: [usize; 2],
    /// Padding before the image.
    pub(super) low: [usize; 2],
    /// Taps: the elements before each in the window, and its number in the kernel.
    taps: Vec<([usize; 2], usize)>,
    /// Sizes of the result, its first element that is written, and the elements between those of two positions.
    result: [usize; 2],
    place: [usize; 2],
    steps: [usize; 2],
}

/// The planes of a block of rows of positions.
pub(super) struct Layout {
    /// Words between two rows.
    pub(super) pitch: usize,
    /// Words that a row has: more than the pitch if its last zeros are the first of the next row.
    pub(super) words: usize,
    /// Rows of a plane.
    pub(super) rows: usize,
    /// First row and column of each phase that a tap reads.
    pub(super) phases: Vec<[usize; 2]>,
}

impl Layout {
    /// Words of a plane.
    pub(super) fn phase_words(&self) -> usize {
        self.rows * self.pitch
    }
}

impl Reads {
    /// The planes of `rows` rows of positions.
    pub(super) fn layout(&self, rows: usize) -> Layout {
        let reach = |axis: usize| {
            let of_taps = self.taps.iter().map(|(at, _)| at[axis] / self.strides[axis]);
            of_taps.max().unwrap_or(0)
        };
        let mut phases: Vec<[usize; 2]> = self.taps.iter().map(|(at, _)| self.phase(*at)).collect();
        phases.sort_unstable();
        phases.dedup();
        let words = self.output[1] + reach(1);
        let zeros = phases.iter().map(|phase| {
            let stride = self.strides[1];
            let before = self.low[1].saturating_sub(phase[1]).div_ceil(stride);
            let end = (self.input[1] + self.low[1]).saturating_sub(phase[1]).div_ceil(stride);
            before.min(words.saturating_sub(end))
        });
        let shared = zeros.min().unwrap_or(0).min(reach(1));
        Layout { pitch: words - shared, words, rows: rows + reach(0), phases }
    }

    fn phase(&self, at: [usize; 2]) -> [usize; 2] {
        [at[0] % self.strides[0], at[1] % self.strides[1]]
    }

    /// Where each tap reads in the planes of a word of channels.
    pub(super) fn offsets(&self, layout: &Layout) -> Vec<usize> {
        let offset = |at: [usize; 2]| {
            let phase = layout.phases.iter().position(|phase| *phase == self.phase(at));
            let row = at[0] / self.strides[0];
            phase.unwrap_or(0) * layout.phase_words() + row * layout.pitch + at[1] / self.strides[1]
        };
        self.taps.iter().map(|(at, _)| offset(*at)).collect()
    }

    /// Columns computed for `rows` rows of positions.
    fn columns(&self, rows: usize, pitch: usize) -> usize {
        ((rows - 1) * pitch + self.output[1]).next_multiple_of(TILE_COLUMNS)
    }

    /// Rows of positions of a block, for so many words of channels, and the columns that are computed in all.
    fn block(&self, words: usize) -> (usize, usize) {
        let all = self.output[0];
        let pitch = self.layout(1).pitch;
        let cost = |rows: usize| {
            let last = if all.is_multiple_of(rows) { 0 } else { self.columns(all % rows, pitch) };
            all / rows * self.columns(rows, pitch) + last
        };
        let bytes = |rows: usize| {
            let layout = self.layout(rows);
            layout.phase_words() * layout.phases.len() * words * size_of::<u32>()
        };
        let sizes = (1..=all).take_while(|rows| *rows == 1 || bytes(*rows) <= BLOCK_BYTES);
        let best = sizes.min_by_key(|rows| cost(*rows) + BLOCK_COST * all.div_ceil(*rows));
        let rows = best.unwrap_or(1);
        (rows, cost(rows))
    }

    /// Copies rows of positions, `pitch` elements apart, to where they belong in an image.
    unsafe fn place_rows(
        &self,
        out: Elem,
        (from, pitch): (*const u8, usize),
        rows: &Range<usize>,
        to: *mut u8,
    ) {
        let step = self.steps[1];
        for (i, row) in rows.clone().enumerate() {
            let place = (self.place[0] + row * self.steps[0]) * self.result[1] + self.place[1];
            let from = out.at(from, (i * pitch) as isize);
            let to = out.at_mut(to, place as isize);
            // SAFETY: the positions lie inside the image.
            unsafe {
                match out {
                    _ if step == 1 => interleave::copy(from, to, self.output[1] * out.size()),
                    Elem::F32 => spread::<u32>(from.cast(), self.output[1], to.cast(), step),
                    _ => spread::<u16>(from.cast(), self.output[1], to.cast(), step),
                }
            }
        }
    }

    /// Whether few enough columns are computed in vain.
    fn is_dense(&self, words: usize) -> bool {
        let kept = self.output[0] * self.output[1];
        kept > 0 && 100 * self.block(words).1 <= MAX_PERCENT * kept
    }
}

impl Conv {
    /// `y = x ∗ w`, and whether this way is taken.
    pub(super) unsafe fn direct(
        &self,
        pool: &Pool,
        x: *const u8,
        w: *const u8,
        y: *mut u8,
    ) -> bool {
        let Conv { elem, channels, window, .. } = *self;
        let taps = window.taps_len();
        let reads = self.reads();
        // Unfolding f32 images costs no more than their planes, but for few channels.
        let pays = elem == Elem::BF16 || channels < FEW_CHANNELS;
        if !pays || !self.is_fit() || !reads.is_dense(self.words()) {
            return false;
        }
        let kernel = Kernel { elem, filter: channels * taps, channel: taps, channels, taps };
        // SAFETY: passed on.
        unsafe { self.of_reads(pool, x, (w, &kernel), y, &reads) };
        true
    }

    /// `dx`, and whether this way is taken.
    pub(super) unsafe fn direct_grad_input(
        &self,
        pool: &Pool,
        dy: *const u8,
        w: *const u8,
        dx: *mut u8,
    ) -> bool {
        let Conv { elem, channels, filters, window, .. } = *self;
        let turned = Conv { channels: filters, filters: channels, ..*self };
        let is_winograd =
            dense::turned(&window).is_some_and(|window| Conv { window, ..turned }.is_winograd());
        if elem != Elem::BF16 || !self.is_fit() || is_winograd {
            return false;
        }
        let [_, down, across] = window.strides;
        let phases = (0..down * across).map(|i| self.phase_reads([i / across, i % across]));
        let Some(phases) = phases.collect::<Option<Vec<Reads>>>() else {
            return false;
        };
        let phases: Vec<Reads> =
            phases.into_iter().filter(|reads| !reads.output.contains(&0)).collect();
        let words = turned.words();
        if !phases.iter().all(|reads| reads.is_dense(words)) {
            return false;
        }
        let taps = window.taps_len();
        let kernel =
            Kernel { elem, filter: taps, channel: channels * taps, channels: filters, taps };
        for reads in &phases {
            // SAFETY: passed on; phases write different elements.
            unsafe { turned.of_reads(pool, dy, (w, &kernel), dx, reads) };
        }
        true
    }

    /// What the convolution reads of `x`.
    pub(super) fn reads(&self) -> Reads {
        let window = &self.window;
        let axes = |of: &[usize; 3]| [of[1], of[2]];
        Reads {
            input: axes(&window.input),
            output: axes(&window.output),
            strides: axes(&window.strides),
            low: axes(&window.low),
            taps: (0..window.taps_len()).map(|tap| (self.tap(tap), tap)).collect(),
            result: axes(&window.output),
            place: [0; 2],
            steps: [1; 2],
        }
    }

    /// Whether the convolution has two axes at most, windows that overlap, and kernels for its types.
    pub(super) fn is_fit(&self) -> bool {
        let window = &self.window;
        let is_flat = [window.input[0], window.output[0], window.taps[0]] == [1; 3];
        let overlaps = window.taps_len() > window.strides[1] * window.strides[2];
        is_flat && window.low[0] == 0 && overlaps && planes::available(self.elem, self.out)
    }

    /// Words of the channels of a position.
    fn words(&self) -> usize {
        (self.channels * self.elem.size()).div_ceil(size_of::<u32>())
    }

    /// Elements before a tap.
    fn tap(&self, tap: usize) -> [usize; 2] {
        let [_, height, width] = self.window.taps;
        let [_, down, across] = self.window.dilations;
        [tap / width % height * down, tap % width * across]
    }

    /// What a phase of the input gradient reads of `dy`; none if padding is larger than the kernel.
    fn phase_reads(&self, phase: [usize; 2]) -> Option<Reads> {
        let window = &self.window;
        let mut reads = Reads {
            input: [window.output[1], window.output[2]],
            output: [0; 2],
            strides: [1; 2],
            low: [0; 2],
            taps: Vec::new(),
            result: [window.input[1], window.input[2]],
            place: [0; 2],
            steps: [window.strides[1], window.strides[2]],
        };
        let steps = reads.steps;
        let of_phase = |at: [usize; 2]| (0..2).all(|axis| at[axis] % steps[axis] == phase[axis]);
        let taps = (0..window.taps_len()).map(|tap| (self.tap(tap), tap));
        reads.taps = taps.filter(|(at, _)| of_phase(*at)).collect();
        for axis in 0..2 {
            let (size, low) = (window.input[axis + 1], window.low[axis + 1]);
            let step = steps[axis];
            // Element `step · u + phase - low` of dx is what position `u - tap / step` reads with each tap of the phase.
            let first = low.saturating_sub(phase[axis]).div_ceil(step);
            let end = (size + low).saturating_sub(phase[axis]).div_ceil(step);
            let last = reads.taps.iter().map(|(at, _)| at[axis] / step).max().unwrap_or(first);
            reads.low[axis] = last.checked_sub(first)?;
            reads.output[axis] = end.saturating_sub(first);
            reads.place[axis] = step * first + phase[axis] - low;
            for (at, _) in &mut reads.taps {
                at[axis] = last - at[axis] / step;
            }
        }
        Some(reads)
    }

    /// The convolution of `x` that `reads` says, into its part of `y`.
    unsafe fn of_reads(
        &self,
        pool: &Pool,
        x: *const u8,
        (w, kernel): (*const u8, &Kernel),
        y: *mut u8,
        reads: &Reads,
    ) {
        let Conv { elem, out, batch, groups, channels, filters, .. } = *self;
        let channel_words = self.words();
        let taps: Vec<usize> = reads.taps.iter().map(|(_, tap)| *tap).collect();
        let depth = channel_words * taps.len();
        let panels = filters.div_ceil(Gemm::ROWS);
        let panel = Gemm::ROWS * depth;
        let [packed] = pool.common([groups * panels * panel * size_of::<u32>()]);
        let at = Shareable::new((x, w, packed.cast::<u32>(), y));
        pool.run_workers(groups * panels, &|chunk, worker| {
            let (_, w, packed, _) = at.get();
            let (group, first) = (chunk / panels, chunk % panels * Gemm::ROWS);
            let count = Gemm::ROWS.min(filters - first);
            let [rows] = worker.tiles.split([panel * size_of::<u32>()]);
            let rows = rows.cast::<u32>();
            // SAFETY: the parts hold the panel; panels are disjoint.
            unsafe {
                for i in 0..count {
                    let place = group * filters * channels * kernel.taps;
                    let from = elem.at(w, (place + (first + i) * kernel.filter) as isize);
                    interleave::filter(kernel, from, &taps, rows.add(i * depth));
                }
                planes::pack_panel(rows, count, depth, packed.add(chunk * panel));
            }
        });
        let step = reads.block(channel_words).0;
        let blocks = reads.output[0].div_ceil(step);
        let chunks = batch * groups * blocks;
        let parts = self.parts(pool, chunks).clamp(1, (filters / MIN_FILTERS).max(1));
        let part = panels.div_ceil(parts);
        let parts = panels.div_ceil(part);
        let [image, result] = [reads.input, reads.result].map(|[height, width]| height * width);
        pool.run_workers(chunks * parts, &|chunk, worker| {
            let (x, _, packed, y) = at.get();
            let (chunk, part_of) = (chunk / parts, chunk % parts);
            let (number, block) = (chunk / blocks, chunk % blocks);
            let rows = block * step..reads.output[0].min((block + 1) * step);
            let layout = reads.layout(rows.len());
            let plane = layout.phase_words() * layout.phases.len();
            let columns = reads.columns(rows.len(), layout.pitch);
            let [words, found] = worker.tiles.split([
                (plane * channel_words + SLACK + layout.words) * size_of::<u32>(),
                Gemm::ROWS * columns * out.size(),
            ]);
            let offsets = reads.offsets(&layout);
            let planes = Planes { count: channel_words, words: plane, offsets: &offsets };
            // SAFETY: the parts of the scratch memory have these sizes; blocks of y are disjoint.
            unsafe {
                let from = elem.at(x, (number * channels * image) as isize);
                let words = words.cast::<u32>();
                interleave::image(reads, &layout, (elem, channels), from, rows.start, words);
                for panel_of in part_of * part..panels.min((part_of + 1) * part) {
                    let first = panel_of * Gemm::ROWS;
                    let count = Gemm::ROWS.min(filters - first);
                    let a = packed.add((number % groups * panels + panel_of) * panel);
                    let size = (count, columns);
                    planes::multiply(elem, &planes, a, words, size, (found, out, columns), false);
                    for i in 0..count {
                        let from = out.at(found, (i * columns) as isize);
                        let to = (number * filters + first + i) * result;
                        let to = out.at_mut(y, to as isize);
                        reads.place_rows(out, (from, layout.pitch), &rows, to);
                    }
                }
            }
        });
    }
}

/// Copies elements, `step` elements apart.
unsafe fn spread<T: Copy>(from: *const T, len: usize, to: *mut T, step: usize) {
    for i in 0..len {
        // SAFETY: the caller vouches for both.
        unsafe { *to.add(i * step) = *from.add(i) };
    }
}
