//! Running sums along an axis, accumulated in f32 in order and rounded when stored.

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use serde::{Deserialize, Serialize};

/// The element type of a running sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SumElem {
    /// A float.
    Float(Elem),
    /// 32-bit signed, wrapping.
    I32,
    /// 64-bit signed, wrapping.
    I64,
}

/// Running sums along the middle axis of `[outer, size, inner]`, contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CumSum {
    /// Product of the sizes before the axis.
    pub outer: usize,
    /// The axis.
    pub size: usize,
    /// Product of the sizes behind the axis.
    pub inner: usize,
    /// Whether the sum excludes the element itself.
    pub exclusive: bool,
    /// Whether sums run from the end.
    pub reverse: bool,
    /// Type of operand and result.
    pub elem: SumElem,
}

impl CumSum {
    /// Writes the sums.
    ///
    /// # Safety
    /// Both pointers must be aligned and valid for the shape, and must not overlap.
    pub unsafe fn run(&self, pool: &Pool, src: *const u8, dst: *mut u8) {
        let (src, dst) = (Shareable::new(src), Shareable::new(dst));
        pool.run(self.outer, &|row| {
            for column in 0..self.inner {
                let first = row * self.size * self.inner + column;
                // SAFETY: each chunk writes the elements of its own row.
                unsafe {
                    match self.elem {
                        SumElem::Float(elem) => self.line(
                            first,
                            0.0,
                            |i| elem.load(src.get(), i),
                            |i, x| elem.store(dst.get(), i, x),
                            |a, b| a + b,
                        ),
                        SumElem::I32 => self.line(
                            first,
                            0,
                            |i| src.get().cast::<i32>().offset(i).read(),
                            |i, x| dst.get().cast::<i32>().offset(i).write(x),
                            i32::wrapping_add,
                        ),
                        SumElem::I64 => self.line(
                            first,
                            0,
                            |i| src.get().cast::<i64>().offset(i).read(),
                            |i, x| dst.get().cast::<i64>().offset(i).write(x),
                            i64::wrapping_add,
                        ),
                    }
                }
            }
        });
    }

    fn line<T: Copy>(
        &self,
        first: usize,
        zero: T,
        load: impl Fn(isize) -> T,
        store: impl Fn(isize, T),
        add: impl Fn(T, T) -> T,
    ) {
        let mut sum = zero;
        for step in 0..self.size {
            let at = if self.reverse { self.size - 1 - step } else { step };
            let at = (first + at * self.inner) as isize;
            let next = add(sum, load(at));
            store(at, if self.exclusive { sum } else { next });
            sum = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(elem: SumElem, exclusive: bool, reverse: bool) -> Vec<f64> {
        let shape = CumSum { outer: 2, size: 3, inner: 2, exclusive, reverse, elem };
        let pool = Pool::new(2);
        let values: Vec<f32> = (0..12).map(|i| (i * i % 7) as f32).collect();
        // SAFETY: all vectors hold 12 elements of the type.
        unsafe {
            match elem {
                SumElem::Float(_) => {
                    let mut out = vec![0f32; 12];
                    shape.run(&pool, values.as_ptr().cast(), out.as_mut_ptr().cast());
                    out.into_iter().map(f64::from).collect()
                }
                SumElem::I32 => {
                    let from: Vec<i32> = values.iter().map(|x| *x as i32).collect();
                    let mut out = vec![0i32; 12];
                    shape.run(&pool, from.as_ptr().cast(), out.as_mut_ptr().cast());
                    out.into_iter().map(f64::from).collect()
                }
                SumElem::I64 => {
                    let from: Vec<i64> = values.iter().map(|x| *x as i64).collect();
                    let mut out = vec![0i64; 12];
                    shape.run(&pool, from.as_ptr().cast(), out.as_mut_ptr().cast());
                    out.into_iter().map(|x| x as f64).collect()
                }
            }
        }
    }

    #[test]
    fn sums_run_both_ways_with_and_without_the_element() {
        for elem in [SumElem::Float(Elem::F32), SumElem::I32, SumElem::I64] {
            for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)]
            {
                let got = sums(elem, exclusive, reverse);
                for (i, got) in got.iter().enumerate() {
                    let (row, at, column) = (i / 6, i / 2 % 3, i % 2);
                    let counted = |j: &usize| match (reverse, exclusive) {
                        (false, false) => *j <= at,
                        (false, true) => *j < at,
                        (true, false) => *j >= at,
                        (true, true) => *j > at,
                    };
                    let value = |j: usize| {
                        let i = row * 6 + j * 2 + column;
                        (i * i % 7) as f64
                    };
                    let want: f64 = (0..3).filter(counted).map(value).sum();
                    assert_eq!(*got, want, "{elem:?} {exclusive} {reverse} element {i}");
                }
            }
        }
    }
}
