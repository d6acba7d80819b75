//! im2col and col2im: for every channel and tap one row, with the element that each position reads.

use super::Conv;
use crate::dtype::Elem;
use crate::routine::convert::to_f32;
use crate::window::{Span, Window};
use std::ops::Range;

impl Conv {
    /// Writes `column[channel·taps, positions]`, whose rows are `pitch` apart, for some channels and rows of
    /// positions of the image at `x`.
    pub(super) unsafe fn unfold(
        &self,
        x: *const u8,
        channels: Range<usize>,
        rows: Range<usize>,
        (column, pitch): (*mut u8, usize),
    ) {
        // SAFETY: passed on; elements are copied as bits.
        unsafe {
            match self.elem.size() {
                4 => unfold::<u32>(&self.window, x.cast(), channels, rows, (column.cast(), pitch)),
                _ => unfold::<u16>(&self.window, x.cast(), channels, rows, (column.cast(), pitch)),
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
    channels: Range<usize>,
    rows: Range<usize>,
    (column, pitch): (*mut T, usize),
) {
    let Window { output: [.., width], strides: [.., stride], .. } = *window;
    let mut to = column;
    for channel in channels {
        for tap in 0..window.taps_len() {
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
}
