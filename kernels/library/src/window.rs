//! Geometry of sliding windows over images with three spatial axes (fewer axes have leading sizes of 1).

use serde::{Deserialize, Serialize};

/// How a window slides over one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Sizes of the image.
    pub input: [usize; 3],
    /// Number of positions of the window.
    pub output: [usize; 3],
    /// Sizes of the window.
    pub taps: [usize; 3],
    /// Elements between two positions.
    pub strides: [usize; 3],
    /// Elements between two taps.
    pub dilations: [usize; 3],
    /// Padding before the image.
    pub low: [usize; 3],
}

/// The elements under one tap for one row of positions: positions `first..last` of the row read elements `from`, `from
/// + stride`, …; the others are in the padding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) first: usize,
    pub(crate) last: usize,
    pub(crate) from: usize,
}

impl Window {
    /// Elements of an image.
    pub fn input_len(&self) -> usize {
        self.input.iter().product()
    }

    /// Positions.
    pub fn output_len(&self) -> usize {
        self.output.iter().product()
    }

    /// Taps of the window.
    pub fn taps_len(&self) -> usize {
        self.taps.iter().product()
    }

    /// Rows of positions.
    pub(crate) fn rows(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// Whether every position reads exactly the element of the same index.
    pub(crate) fn is_identity(&self) -> bool {
        self.taps == [1; 3]
            && self.strides == [1; 3]
            && self.low == [0; 3]
            && self.input == self.output
    }

    /// What tap number `tap` reads for the positions of the rows from `row` on, without end.
    pub(crate) fn spans(&self, tap: usize, row: usize) -> impl Iterator<Item = Span> {
        let window = *self;
        let [_, height, width] = window.taps;
        let tap = [tap / (height * width), tap / width % height, tap % width];
        let (stride, low) = (window.strides[2], window.low[2]);
        let offset = tap[2] * window.dilations[2];
        let first = low.saturating_sub(offset).div_ceil(stride).min(window.output[2]);
        let end = (window.input[2] + low).saturating_sub(offset);
        let last = end.div_ceil(stride).min(window.output[2]).max(first);
        let mut place = [row / window.output[1], row % window.output[1]];
        std::iter::from_fn(move || {
            let here = place;
            place[1] += 1;
            if place[1] == window.output[1] {
                place = [place[0] + 1, 0];
            }
            let mut base = 0;
            for i in 0..2 {
                let at = here[i] * window.strides[i] + tap[i] * window.dilations[i];
                if first == last || at < window.low[i] || at - window.low[i] >= window.input[i] {
                    return Some(Span { first: 0, last: 0, from: 0 });
                }
                base = base * window.input[i] + (at - window.low[i]);
            }
            let from = base * window.input[2] + first * stride + offset - low;
            Some(Span { first, last, from })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_the_elements_of_each_tap() {
        for (input, taps, stride, dilation, low, high) in [
            ([1, 5, 7], [1, 3, 3], 1, 1, 1, 1),
            ([1, 6, 9], [1, 2, 4], 3, 2, 2, 0),
            ([3, 4, 1], [2, 1, 1], 2, 1, 0, 0),
            ([1, 1, 2], [1, 1, 5], 1, 1, 4, 4),
        ] {
            let mut window = Window {
                input,
                output: [1; 3],
                taps,
                strides: [stride; 3],
                dilations: [dilation; 3],
                low: [0; 3],
            };
            for i in 0..3 {
                let border = usize::from(taps[i] > 1);
                window.low[i] = low * border;
                let room = input[i] + (low + high) * border - dilation * (taps[i] - 1) - 1;
                window.output[i] = room / stride + 1;
            }
            for tap in 0..window.taps_len() {
                for row in 0..window.rows() {
                    let span = window.spans(tap, row).next().expect("without end");
                    for position in 0..window.output[2] {
                        let t = [tap / (taps[1] * taps[2]), tap / taps[2] % taps[1], tap % taps[2]];
                        let p = [row / window.output[1], row % window.output[1], position];
                        let at = [0, 1, 2]
                            .map(|i| (p[i] * stride + t[i] * dilation).checked_sub(window.low[i]));
                        let inside = (0..3).all(|i| at[i].is_some_and(|a| a < input[i]));
                        assert_eq!(inside, (span.first..span.last).contains(&position));
                        if inside {
                            let [d, h, w] = at.map(|a| a.expect("inside"));
                            let flat = (d * input[1] + h) * input[2] + w;
                            assert_eq!(flat, span.from + (position - span.first) * stride);
                        }
                    }
                }
            }
        }
    }
}
