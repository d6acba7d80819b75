//! Copies of channels of few elements per image, as in `x[N, C]`, in which all elements of a channel lie side by side.

use super::BatchNorm;
use super::element::LANES;
use crate::routine::copy::{Dim, copy_plane};
use std::ops::Range;

/// Elements that are copied at a time.
const PIECE: usize = 16;

impl BatchNorm {
    /// Whether a channel of an image has too few elements for vectors: rests of rows are computed one element at a time, and partial sums are
    /// added after each.
    pub(super) fn is_narrow(&self) -> bool {
        self.size < 4 * LANES
    }

    /// Bytes of all elements of a channel, up to whole lines of the cache.
    pub(super) fn row_bytes<T>(&self) -> usize {
        (self.batch * self.size * size_of::<T>()).next_multiple_of(64)
    }

    /// The normalization of copies of some channels.
    pub(super) fn gathered(&self, range: &Range<usize>) -> BatchNorm {
        BatchNorm { batch: 1, channels: range.len(), size: self.batch * self.size, ..*self }
    }

    /// Copies some channels, so that all elements of each lie side by side. Null stays null.
    pub(super) unsafe fn gather<T: Copy>(
        &self,
        of: *const T,
        range: &Range<usize>,
        to: *mut u8,
    ) -> *const T {
        if of.is_null() {
            return of;
        }
        let to = to.cast::<T>();
        let pitch = (self.channels * self.size) as isize;
        if self.size >= PIECE {
            let of = of.wrapping_add(range.start * self.size);
            // SAFETY: passed on.
            self.each_row(range, |image, copy| unsafe {
                self.copy_row(of.add(image), to.add(copy))
            });
            return to.cast_const();
        }
        for e in 0..self.size {
            let channels = Dim {
                size: range.len(),
                src: self.size as isize,
                dst: (self.batch * self.size) as isize,
            };
            let images = Dim { size: self.batch, src: pitch, dst: self.size as isize };
            // SAFETY: passed on.
            unsafe { copy_plane(channels, images, of.add(range.start * self.size + e), to.add(e)) };
        }
        to.cast_const()
    }

    /// Copies some channels back.
    pub(super) unsafe fn scatter<T: Copy>(&self, from: *const T, range: &Range<usize>, to: *mut T) {
        let pitch = (self.channels * self.size) as isize;
        if self.size >= PIECE {
            let to = to.wrapping_add(range.start * self.size);
            // SAFETY: passed on.
            return self.each_row(range, |image, copy| unsafe {
                self.copy_row(from.add(copy), to.add(image));
            });
        }
        for e in 0..self.size {
            let images = Dim { size: self.batch, src: self.size as isize, dst: pitch };
            let channels = Dim {
                size: range.len(),
                src: (self.batch * self.size) as isize,
                dst: self.size as isize,
            };
            // SAFETY: passed on.
            unsafe {
                copy_plane(images, channels, from.add(e), to.add(range.start * self.size + e))
            };
        }
    }

    /// Calls `each` with where the elements of a channel of an image are, from the first channel of `range` on, and where in the copies.
    fn each_row(&self, range: &Range<usize>, mut each: impl FnMut(usize, usize)) {
        for image in 0..self.batch {
            for channel in 0..range.len() {
                each(self.row(image, channel), (channel * self.batch + image) * self.size);
            }
        }
    }

    /// Copies at least [`PIECE`] elements, the last piece of which may overlap the one before: that takes less time than a call.
    #[inline(always)]
    unsafe fn copy_row<T: Copy>(&self, from: *const T, to: *mut T) {
        let last = self.size - PIECE;
        for at in (0..last).step_by(PIECE).chain([last]) {
            // SAFETY: the piece is inside the row.
            unsafe {
                let piece = from.add(at).cast::<[T; PIECE]>().read();
                to.add(at).cast::<[T; PIECE]>().write(piece);
            }
        }
    }
}
