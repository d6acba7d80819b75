//! Images with zeros around them, and rows of results with room behind their ends.

use super::strips::LANES;
use crate::routine::columns::{join_row, split_row};

/// Where the elements of an image lie among zeros. The elements of a row are divided into parts by their remainder, so those that the
/// positions of a row read by one tap are side by side for every stride.
pub(super) struct Frame {
    /// Sizes of the image.
    pub(super) sizes: [usize; 3],
    /// Zeros before it.
    pub(super) low: [usize; 3],
    /// Elements of the frame along the first two axes; elements of the image beyond them are left out.
    pub(super) extent: [usize; 2],
    /// Parts of a row.
    pub(super) parts: usize,
    /// Elements of a part.
    pub(super) pitch: usize,
}

impl Frame {
    /// Elements of the frame.
    pub(super) fn len(&self) -> usize {
        self.extent[0] * self.extent[1] * self.parts * self.pitch
    }

    /// Where the element of this place lies, counted with the zeros before the image. Of a place and a distance of which one has no
    /// remainder along the last axis it is the sum.
    pub(super) fn at(&self, [d, h, w]: [usize; 3]) -> usize {
        let row = d * self.extent[1] + h;
        (row * self.parts + w % self.parts) * self.pitch + w / self.parts
    }

    /// Writes the frame of an image.
    pub(super) unsafe fn fill(&self, image: *const f32, to: *mut f32) {
        let [depth, height, width] = self.sizes;
        let room = self.parts * self.pitch;
        let width_in = width.min(room.saturating_sub(self.low[2]));
        // SAFETY: rows inside of the extent lie inside the frame.
        unsafe {
            to.write_bytes(0, self.len());
            for d in 0..depth.min(self.extent[0].saturating_sub(self.low[0])) {
                for h in 0..height.min(self.extent[1].saturating_sub(self.low[1])) {
                    let row = (d + self.low[0]) * self.extent[1] + h + self.low[1];
                    let from = image.add((d * height + h) * width);
                    let from = std::slice::from_raw_parts(from, width_in);
                    let to = std::slice::from_raw_parts_mut(to.add(row * room), room);
                    match self.parts {
                        1 => copy_row(from, &mut to[self.low[2]..][..width_in]),
                        _ => divide(from, self.low[2], self.parts, self.pitch, to),
                    }
                }
            }
        }
    }
}

/// Rows of results, each in parts by the remainder of its elements, with room for whole vectors.
pub(super) struct Rows {
    pub(super) count: usize,
    /// Elements of a row.
    pub(super) width: usize,
    /// Parts of a row.
    pub(super) parts: usize,
    /// Elements of a part, a multiple of [`LANES`].
    pub(super) pitch: usize,
}

impl Rows {
    /// Elements with those behind the ends.
    pub(super) fn len(&self) -> usize {
        self.count * self.parts * self.pitch
    }

    /// Writes rows one behind the other.
    pub(super) unsafe fn join(&self, from: *const f32, to: *mut f32) {
        let room = self.parts * self.pitch;
        for row in 0..self.count {
            // SAFETY: the caller vouches for as many rows.
            let (from, to) = unsafe {
                let from = std::slice::from_raw_parts(from.add(row * room), room);
                (from, std::slice::from_raw_parts_mut(to.add(row * self.width), self.width))
            };
            match self.parts {
                1 => copy_row(&from[..self.width], to),
                _ => merge(from, self.parts, self.pitch, to),
            }
        }
    }

    /// Writes rows of one part with zeros behind their ends.
    pub(super) unsafe fn spread(&self, from: *const f32, to: *mut f32) {
        debug_assert!(self.parts == 1 && self.pitch.is_multiple_of(LANES));
        for row in 0..self.count {
            // SAFETY: the caller vouches for as many rows.
            unsafe {
                let to = to.add(row * self.pitch);
                to.copy_from_nonoverlapping(from.add(row * self.width), self.width);
                to.add(self.width).write_bytes(0, self.pitch - self.width);
            }
        }
    }
}

/// Copies a row. Short ones take less time without a call.
#[inline]
fn copy_row(mut from: &[f32], mut to: &mut [f32]) {
    fn some<'a, 'b, const N: usize>(
        from: &'a [f32],
        to: &'b mut [f32],
    ) -> (&'a [f32], &'b mut [f32]) {
        match (from.split_first_chunk::<N>(), to.len() >= N) {
            (Some((first, from)), true) => {
                let (first_to, to) = to.split_at_mut(N);
                first_to.copy_from_slice(first);
                (from, to)
            }
            _ => (from, to),
        }
    }
    if from.len() >= LANES {
        return to.copy_from_slice(from);
    }
    (from, to) = some::<8>(from, to);
    (from, to) = some::<4>(from, to);
    (from, to) = some::<2>(from, to);
    some::<1>(from, to);
}

/// Writes elements from number `first` on into the parts of a row.
fn divide(from: &[f32], first: usize, parts: usize, pitch: usize, to: &mut [f32]) {
    if parts == 2 {
        let (even, odd) = to.split_at_mut(pitch);
        let (to, next) = match first.is_multiple_of(2) {
            true => (&mut even[first / 2..], &mut odd[first / 2..]),
            false => (&mut odd[first / 2..], &mut even[first / 2 + 1..]),
        };
        return split_row(from, &mut to[..from.len().div_ceil(2)], next);
    }
    for (i, from) in from.iter().enumerate() {
        to[(first + i) % parts * pitch + (first + i) / parts] = *from;
    }
}

/// Writes the elements of the parts of a row one after the other.
fn merge(from: &[f32], parts: usize, pitch: usize, to: &mut [f32]) {
    if parts == 2 {
        let (even, odd) = from.split_at(pitch);
        return join_row(&even[..to.len().div_ceil(2)], odd, to);
    }
    for (i, to) in to.iter_mut().enumerate() {
        *to = from[i % parts * pitch + i / parts];
    }
}
