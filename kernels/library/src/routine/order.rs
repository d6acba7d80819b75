//! Top-k along an axis, and arg-reductions.
//!
//! Ties go to the lower index; NaN is larger than any number.

use crate::pool::{Pool, Shareable};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;

/// An element type that has an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ordered {
    /// IEEE single precision.
    F32,
    /// The upper half of a single-precision number.
    BF16,
    /// IEEE half precision.
    F16,
    /// 32-bit integers.
    I32,
    /// 64-bit integers.
    I64,
    /// Truth values, a byte each.
    Bool,
}

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
    pub elem: Ordered,
}

impl TopK {
    /// Writes the elements, unless `values` is null, and their indices, as i64.
    ///
    /// # Safety
    /// The pointers must be aligned and valid for the shapes, and must not overlap.
    pub unsafe fn run(&self, pool: &Pool, src: *const u8, values: *mut u8, indices: *mut i64) {
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            match self.elem {
                Ordered::F32 => self.run_as::<f32>(pool, src.cast(), values.cast(), indices),
                Ordered::BF16 => self.run_as::<bf16>(pool, src.cast(), values.cast(), indices),
                Ordered::F16 => self.run_as::<f16>(pool, src.cast(), values.cast(), indices),
                Ordered::I32 => self.run_as::<i32>(pool, src.cast(), values.cast(), indices),
                Ordered::I64 => self.run_as::<i64>(pool, src.cast(), values.cast(), indices),
                Ordered::Bool => self.run_as::<u8>(pool, src, values, indices),
            }
        }
    }

    /// # Safety
    /// See [`TopK::run`]; the elements must be of type `T`.
    unsafe fn run_as<T: Copy + PartialOrd>(
        &self,
        pool: &Pool,
        src: *const T,
        values: *mut T,
        indices: *mut i64,
    ) {
        let at = Shareable::new((src, values, indices));
        pool.run(self.outer, &|row| {
            let (src, values, indices) = at.get();
            let mut line: Vec<(T, u32)> = Vec::with_capacity(self.size);
            for column in 0..self.inner {
                let place = |j: usize, n: usize| (row * n + j) * self.inner + column;
                line.clear();
                for j in 0..self.size {
                    // SAFETY: the caller vouches for the operand.
                    line.push((unsafe { *src.add(place(j, self.size)) }, j as u32));
                }
                let order = |a: &(T, u32), b: &(T, u32)| self.order(a, b);
                if self.k > 0 && self.k < self.size {
                    line.select_nth_unstable_by(self.k - 1, order);
                }
                line[..self.k].sort_unstable_by(order);
                for (rank, (value, index)) in line[..self.k].iter().enumerate() {
                    let to = place(rank, self.k);
                    // SAFETY: each chunk writes the results of its own row.
                    unsafe {
                        if !values.is_null() {
                            values.add(to).write(*value);
                        }
                        indices.add(to).write(i64::from(*index));
                    }
                }
            }
        });
    }

    fn order<T: PartialOrd>(&self, (a, i): &(T, u32), (b, j): &(T, u32)) -> Ordering {
        // Only NaN has no order to itself.
        let is_nan = |x: &T| x.partial_cmp(x).is_none();
        let order = a.partial_cmp(b).unwrap_or_else(|| is_nan(a).cmp(&is_nan(b)));
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
        let shape = TopK {
            outer: 1,
            size: 5,
            inner: 1,
            k: 3,
            largest: true,
            last: false,
            elem: Ordered::F32,
        };
        assert_eq!(run(shape, &values).1, [2, 1, 3]);
        assert_eq!(run(TopK { last: true, ..shape }, &values).1, [2, 3, 1]);
        let (smallest, indices) = run(TopK { largest: false, k: 2, ..shape }, &values);
        assert_eq!((smallest, indices), (vec![-1.0, 1.0], vec![4, 0]));
    }

    #[test]
    fn lines_may_be_strided() {
        let values: Vec<f32> = (0..12).map(|i| ((i * 7) % 12) as f32).collect();
        let shape = TopK {
            outer: 2,
            size: 3,
            inner: 2,
            k: 1,
            largest: true,
            last: false,
            elem: Ordered::F32,
        };
        let (best, indices) = run(shape, &values);
        for (line, (best, index)) in best.iter().zip(&indices).enumerate() {
            let at = |j: usize| values[(line / 2 * 3 + j) * 2 + line % 2];
            assert_eq!(*best, at(0).max(at(1)).max(at(2)));
            assert_eq!(*best, at(*index as usize));
        }
    }

    #[test]
    fn integers_are_compared_exactly() {
        let values = [1_i64 << 60, (1 << 60) + 1, i64::MIN, -1];
        let (mut out, mut indices) = ([0_i64; 4], [-1_i64; 4]);
        let shape = TopK {
            outer: 1,
            size: 4,
            inner: 1,
            k: 4,
            largest: true,
            last: false,
            elem: Ordered::I64,
        };
        let (from, to) = (values.as_ptr().cast(), out.as_mut_ptr().cast());
        // SAFETY: the arrays have the shape's sizes.
        unsafe { shape.run(&Pool::new(1), from, to, indices.as_mut_ptr()) };
        assert_eq!(indices, [1, 0, 3, 2]);
        assert_eq!(out, indices.map(|i| values[i as usize]));
    }
}
