//! im2col and col2im: for every channel and tap one row, its *depth*, with the element that each position reads.

use super::Conv;
use crate::dtype::Elem;
use crate::routine::convert::to_f32;
use crate::window::{Span, Window};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

impl Conv {
    /// Writes `column[depths, positions]`, whose rows are `pitch` apart, for some depths `channel·taps + tap` and rows
    /// of positions of the image at `x`.
    pub(super) unsafe fn unfold(
        &self,
        x: *const u8,
        depths: Range<usize>,
        rows: Range<usize>,
        (column, pitch): (*mut u8, usize),
    ) {
        // SAFETY: passed on; elements are copied as bits.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.window.strides[2] == 1 && crate::simd::has_avx512() {
                match self.elem.size() {
                    4 => unfold_masked::<u32>(&self.window, x, depths, rows, (column, pitch)),
                    _ => unfold_masked::<u16>(&self.window, x, depths, rows, (column, pitch)),
                }
                return;
            }
            match self.elem.size() {
                4 => unfold::<u32>(&self.window, x.cast(), depths, rows, (column.cast(), pitch)),
                _ => unfold::<u16>(&self.window, x.cast(), depths, rows, (column.cast(), pitch)),
            }
        }
    }

    /// Adds `column[channel·taps, positions]` to the image at `sum`.
    pub(super) unsafe fn fold(&self, column: *const f32, rows: Range<usize>, sum: *mut f32) {
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

unsafe fn unfold<T: Copy + Default>(
    window: &Window,
    x: *const T,
    depths: Range<usize>,
    rows: Range<usize>,
    (column, pitch): (*mut T, usize),
) {
    let Window { output: [.., width], strides: [.., stride], .. } = *window;
    let taps = window.taps_len();
    let mut to = column;
    for depth in depths {
        let (channel, tap) = (depth / taps, depth % taps);
        let spans = window.spans(tap, rows.start);
        for (i, Span { first, last, from }) in spans.take(rows.len()).enumerate() {
            // SAFETY: spans lie inside the image, rows inside the column.
            unsafe {
                let line = std::slice::from_raw_parts_mut(to.add(i * width), width);
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
            }
        }
        to = to.wrapping_add(pitch);
    }
}

/// As [`unfold`], for positions side by side: whole vectors, in which masks put zeros for the padding.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn unfold_masked<T>(
    window: &Window,
    x: *const u8,
    depths: Range<usize>,
    rows: Range<usize>,
    (column, pitch): (*mut u8, usize),
) {
    let (width, taps) = (window.output[2], window.taps_len());
    let (size, lanes) = (size_of::<T>(), 64 / size_of::<T>());
    // A bit for each of the first `n` positions that a vector from `lane` on has.
    let below = |n: usize, lane: usize| -> u32 {
        let n = n.saturating_sub(lane).min(lanes);
        ((1_u64 << n) - 1) as u32
    };
    let mut line = column;
    for depth in depths {
        let (channel, tap) = (depth / taps, depth % taps);
        let image = x.wrapping_add(channel * window.input_len() * size);
        let mut to = line;
        for Span { first, last, from } in window.spans(tap, rows.start).take(rows.len()) {
            // Where position 0 would read.
            let from = image.wrapping_add(from * size).wrapping_sub(first * size);
            for lane in (0..width).step_by(lanes) {
                let inside = below(last, lane) & !below(first, lane);
                let (from, to) = (from.wrapping_add(lane * size), to.wrapping_add(lane * size));
                // SAFETY: masks keep the loads inside the image, and the stores inside the row of positions.
                unsafe {
                    if size == 4 {
                        let found = _mm512_maskz_loadu_epi32(inside as u16, from.cast());
                        _mm512_mask_storeu_epi32(to.cast(), below(width, lane) as u16, found);
                    } else {
                        let found = _mm512_maskz_loadu_epi16(inside, from.cast());
                        _mm512_mask_storeu_epi16(to.cast(), below(width, lane), found);
                    }
                }
            }
            to = to.wrapping_add(width * size);
        }
        line = line.wrapping_add(pitch * size);
    }
}
