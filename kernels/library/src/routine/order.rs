//! Top-k along an axis, and arg-reductions.
//!
//! Ties go to the lower index; NaN is larger than any number.

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;

/// The middle axis of `[outer, size, inner]`, contiguous, with `k` results per line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopK {
    /// Product of the axes before.
    pub outer: usize,
    /// The axis.
    pub size: usize,
    /// Product of the axes behind.
    pub inner: usize,
    /// Results per line.
    pub k: usize,
    /// Whether the largest come first.
    pub largest: bool,
    /// Whether of equal elements the last comes first.
    pub last: bool,
    /// Type of the elements.
    pub elem: Elem,
}

impl TopK {
    /// Writes the elements, unless `values` is null, and their indices, as i64.
    ///
    /// # Safety
    /// The pointers must be aligned and valid for the shapes, and must not overlap.
    pub unsafe fn run(&self, pool: &Pool, src: *const u8, values: *mut u8, indices: *mut i64) {
        let at = Shareable::new((src, values, indices));
        pool.run(self.outer, &|row| {
            let (src, values, indices) = at.get();
            let mut line: Vec<(f32, u32)> = Vec::with_capacity(self.size);
            for column in 0..self.inner {
                let place = |j: usize, n: usize| ((row * n + j) * self.inner + column) as isize;
                line.clear();
                for j in 0..self.size {
                    // SAFETY: the caller vouches for the operand.
                    line.push((unsafe { self.elem.load(src, place(j, self.size)) }, j as u32));
                }
                let order = |a: &(f32, u32), b: &(f32, u32)| self.order(a, b);
                if self.k > 0 && self.k < self.size {
                    line.select_nth_unstable_by(self.k - 1, order);
                }
                line[..self.k].sort_unstable_by(order);
                for (rank, (value, index)) in line[..self.k].iter().enumerate() {
                    let to = place(rank, self.k);
                    // SAFETY: each chunk writes the results of its own row.
                    unsafe {
                        if !values.is_null() {
                            self.elem.store(values, to, *value);
                        }
                        indices.offset(to).write(i64::from(*index));
                    }
                }
            }
        });
    }

    fn order(&self, (a, i): &(f32, u32), (b, j): &(f32, u32)) -> Ordering {
        let order = a.partial_cmp(b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()));
        let order = if self.largest { order.reverse() } else { order };
        order.then(if self.last { j.cmp(i) } else { i.cmp(j) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(shape: TopK, values: &[f32]) -> (Vec<f32>, Vec<i64>) {
        let n = shape.outer * shape.k * shape.inner;
        let (mut out, mut indices) = (vec![0f32; n], vec![-1i64; n]);
        let (from, to) = (values.as_ptr().cast(), out.as_mut_ptr().cast());
        // SAFETY: the vectors have the shape's sizes.
        unsafe { shape.run(&Pool::new(2), from, to, indices.as_mut_ptr()) };
        (out, indices)
    }

    #[test]
    fn ties_and_nan_have_their_order() {
        let values = [1.0, 3.0, f32::NAN, 3.0, -1.0];
        let shape =
            TopK { outer: 1, size: 5, inner: 1, k: 3, largest: true, last: false, elem: Elem::F32 };
        assert_eq!(run(shape, &values).1, [2, 1, 3]);
        assert_eq!(run(TopK { last: true, ..shape }, &values).1, [2, 3, 1]);
        let (smallest, indices) = run(TopK { largest: false, k: 2, ..shape }, &values);
        assert_eq!((smallest, indices), (vec![-1.0, 1.0], vec![4, 0]));
    }

    #[test]
    fn lines_may_be_strided() {
        let values: Vec<f32> = (0..12).map(|i| ((i * 7) % 12) as f32).collect();
        let shape =
            TopK { outer: 2, size: 3, inner: 2, k: 1, largest: true, last: false, elem: Elem::F32 };
        let (best, indices) = run(shape, &values);
        for (line, (best, index)) in best.iter().zip(&indices).enumerate() {
            let at = |j: usize| values[(line / 2 * 3 + j) * 2 + line % 2];
            assert_eq!(*best, at(0).max(at(1)).max(at(2)));
            assert_eq!(*best, at(*index as usize));
        }
    }
}
