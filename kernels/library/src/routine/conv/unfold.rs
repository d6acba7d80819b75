//! im2col and col2im: for every channel and tap one row, its *depth*, with the element that each position reads.

use crate::dtype::Elem;
use crate::routine::convert::to_f32;
use crate::window::{Span, Window};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

/// What the taps of a window read for some rows of positions: the same for each channel of each image.
pub(super) struct Unfold {
    elem: Elem,
    window: Window,
    /// Rows of positions.
    rows: usize,
    /// For each tap, for each row of positions.
    lines: Vec<Line>,
    /// The same as vectors, as many for each tap; none if they cannot be.
    #[cfg(target_arch = "x86_64")]
    vectors: Vec<Vector>,
}

/// The positions of a row that read an element, and where position 0 would read, counted from the first element of the image.
#[derive(Clone, Copy)]
struct Line {
    first: usize,
    last: usize,
    from: isize,
}

impl Unfold {
    pub(super) fn new(elem: Elem, window: &Window, rows: &Range<usize>) -> Unfold {
        let line = |span: Span| Line {
            first: span.first,
            last: span.last,
            from: span.from as isize - (span.first * window.strides[2]) as isize,
        };
        let of_tap = |tap| window.spans(tap, rows.start).take(rows.len()).map(line);
        let lines: Vec<Line> = (0..window.taps_len()).flat_map(of_tap).collect();
        Unfold {
            elem,
            window: *window,
            rows: rows.len(),
            #[cfg(target_arch = "x86_64")]
            vectors: match window.strides[2] <= 2 && crate::simd::has_avx512() {
                true => vectors(elem, window, &lines, rows.len()),
                false => Vec::new(),
            },
            lines,
        }
    }

    /// Writes `column[depths, positions]`, whose rows are `pitch` apart, for some depths `channel·taps + tap` of the image at `x`.
    pub(super) unsafe fn run(
        &self,
        x: *const u8,
        depths: Range<usize>,
        (column, pitch): (*mut u8, usize),
    ) {
        let (elem, taps) = (self.elem, self.window.taps_len());
        let mut to = column;
        for depth in depths {
            let (channel, tap) = (depth / taps, depth % taps);
            let from = elem.at(x, (channel * self.window.input_len()) as isize);
            // SAFETY: passed on; elements are copied as bits.
            unsafe {
                match elem.size() {
                    4 => self.depth::<u32>(tap, from.cast(), to.cast()),
                    _ => self.depth::<u16>(tap, from.cast(), to.cast()),
                }
            }
            to = elem.at_mut(to, pitch as isize);
        }
    }

    /// Adds `column[channel·taps, positions]`, whose rows are `pitch` apart, to the image of so many channels at `sum`.
    pub(super) unsafe fn fold(
        &self,
        (column, pitch): (*const f32, usize),
        channels: usize,
        sum: *mut f32,
    ) {
        let Window { output: [.., width], strides: [.., stride], .. } = self.window;
        for channel in 0..channels {
            let to = sum.wrapping_add(channel * self.window.input_len());
            for tap in 0..self.window.taps_len() {
                let row = (channel * self.window.taps_len() + tap) * pitch;
                let lines = &self.lines[tap * self.rows..][..self.rows];
                for (i, line) in lines.iter().enumerate() {
                    let from = column.wrapping_add(row + i * width);
                    let first = line.from + (line.first * stride) as isize;
                    let span = Span { first: line.first, last: line.last, from: 0 };
                    // SAFETY: spans lie inside the image, rows inside the column.
                    unsafe { add_spread(span, stride, from, 1.0, to.wrapping_offset(first)) };
                }
            }
        }
    }

    /// Writes what a tap reads of a channel.
    unsafe fn depth<T: Copy + Default>(&self, tap: usize, from: *const T, to: *mut T) {
        let Window { output: [.., width], strides: [.., stride], .. } = self.window;
        #[cfg(target_arch = "x86_64")]
        if !self.vectors.is_empty() {
            let count = self.vectors.len() / self.window.taps_len();
            let vectors = &self.vectors[tap * count..][..count];
            // SAFETY: the features are present; the caller vouches for the rest.
            return unsafe {
                match stride {
                    1 => copy_vectors::<T, 1>(vectors, from, to),
                    _ => copy_vectors::<T, 2>(vectors, from, to),
                }
            };
        }
        let lines = &self.lines[tap * self.rows..][..self.rows];
        for (i, Line { first, last, from: at }) in lines.iter().copied().enumerate() {
            // SAFETY: the positions read inside the image; rows lie inside the column.
            unsafe {
                let line = std::slice::from_raw_parts_mut(to.add(i * width), width);
                line[..first].fill(T::default());
                line[last..].fill(T::default());
                for (position, to) in (first..last).zip(&mut line[first..last]) {
                    *to = *from.offset(at + (position * stride) as isize);
                }
            }
        }
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
pub(super) unsafe fn add_spread(
    span: Span,
    stride: usize,
    from: *const f32,
    factor: f32,
    to: *mut f32,
) {
    // SAFETY: the span lies inside both.
    unsafe {
        for position in span.first..span.last {
            *to.add((position - span.first) * stride) += factor * *from.add(position);
        }
    }
}

/// Some positions of a row: with a stride of 1 those that a vector has, with 2 those of two vectors.
#[cfg(target_arch = "x86_64")]
struct Vector {
    /// Where the first position would read, counted from the first element of the image.
    from: isize,
    /// The lanes of both vectors that lie inside the row of the image; the others are zeros.
    inside: [u32; 2],
    /// The first position.
    to: usize,
    /// Bytes that are stored. What is stored behind a row is the beginning of the next.
    bytes: usize,
    /// The positions, where storing more would write behind the last row.
    only: Option<u32>,
}

/// The vectors of all taps.
#[cfg(target_arch = "x86_64")]
fn vectors(elem: Elem, window: &Window, lines: &[Line], rows: usize) -> Vec<Vector> {
    let Window { output: [.., width], strides: [.., stride], .. } = *window;
    let lanes = 64 / elem.size();
    // A bit for each of the first `n` lanes of a vector that begins at `lane`.
    let below = |n: usize, lane: usize| ((1_u64 << n.saturating_sub(lane).min(lanes)) - 1) as u32;
    let mut vectors = Vec::with_capacity(lines.len() * width.div_ceil(lanes));
    for (number, &Line { first, last, from }) in lines.iter().enumerate() {
        let row = number % rows;
        // With a stride of 2, elements between those of two positions are read as well.
        let (begin, end) = (stride * first, (stride * last).saturating_sub(stride - 1));
        let inside = |lane: usize| below(end, lane) & !below(begin, lane);
        for lane in (0..width).step_by(lanes) {
            let element = stride * lane;
            let bytes = ((width - lane) * elem.size()).next_power_of_two().clamp(16, 64);
            let fits = bytes <= ((rows - row) * width - lane) * elem.size();
            vectors.push(Vector {
                from: from + element as isize,
                inside: [inside(element), inside(element + lanes)],
                to: row * width + lane,
                bytes,
                only: (!fits).then(|| below(width, lane)),
            });
        }
    }
    vectors
}

/// Writes what a tap reads of a channel with a stride of 1 or 2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn copy_vectors<T, const STRIDE: usize>(vectors: &[Vector], from: *const T, to: *mut T) {
    // SAFETY: masks keep the loads inside the image.
    let load = |mask: u32, at: *const T| unsafe {
        match size_of::<T>() {
            4 => _mm512_maskz_loadu_epi32(mask as u16, at.cast()),
            _ => _mm512_maskz_loadu_epi16(mask, at.cast()),
        }
    };
    for vector in vectors {
        let at = from.wrapping_offset(vector.from);
        let mut found = load(vector.inside[0], at);
        if STRIDE == 2 {
            let next = load(vector.inside[1], at.wrapping_add(64 / size_of::<T>()));
            found = even_lanes::<T>(found, next);
        }
        let to = to.wrapping_add(vector.to);
        // SAFETY: stores stay inside the rows of positions.
        unsafe {
            match (vector.only, vector.bytes) {
                (None, 16) => _mm_storeu_si128(to.cast(), _mm512_castsi512_si128(found)),
                (None, 32) => _mm256_storeu_si256(to.cast(), _mm512_castsi512_si256(found)),
                (None, _) => _mm512_storeu_si512(to.cast(), found),
                (Some(mask), _) if size_of::<T>() == 4 => {
                    _mm512_mask_storeu_epi32(to.cast(), mask as u16, found);
                }
                (Some(mask), _) => _mm512_mask_storeu_epi16(to.cast(), mask, found),
            }
        }
    }
}

/// Every second element of two vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn even_lanes<T>(first: __m512i, second: __m512i) -> __m512i {
    if size_of::<T>() == 4 {
        let even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        return _mm512_permutex2var_epi32(first, even, second);
    }
    // The 16-bit lanes 4 · i and 4 · i + 2 in each word.
    let count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    let low = _mm512_slli_epi32::<2>(count);
    let high = _mm512_slli_epi32::<16>(_mm512_add_epi32(low, _mm512_set1_epi32(2)));
    _mm512_permutex2var_epi16(first, _mm512_or_si512(low, high), second)
}
