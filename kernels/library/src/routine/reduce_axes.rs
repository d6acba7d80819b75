//! Reductions over arbitrary axes, for shapes that no fused kernel supports: f32 accumulation, each result element by one thread in
//! ascending order of the operand.

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable, Worker};
use crate::routine::convert::to_f32;
use serde::{Deserialize, Serialize};

/// Approximate elements of the operand per chunk of work.
const CHUNK: usize = 1 << 14;
/// Elements that are combined before their result is added to the others, which keeps the error of long sums small.
const BLOCK: usize = 128;
/// Independent partial results within a block.
const LANES: usize = 16;

/// How elements are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fold {
    /// Sum.
    Sum,
    /// Arithmetic mean.
    Mean,
    /// Product.
    Prod,
    /// Largest element; NaN if any is.
    Max,
    /// Smallest element; NaN if any is.
    Min,
}

/// A reduction of a contiguous operand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReduceAxes {
    /// How elements are combined.
    pub fold: Fold,
    /// Kept axes, outermost first: size and stride in the operand.
    kept: Vec<(usize, usize)>,
    /// Reduced axes, outermost first.
    gone: Vec<(usize, usize)>,
    from: Elem,
    to: Elem,
}

impl ReduceAxes {
    /// The reduction of an operand of this shape over the axes marked in `gone`.
    pub fn new(fold: Fold, shape: &[usize], gone: &[bool], from: Elem, to: Elem) -> ReduceAxes {
        let mut axes = [Vec::new(), Vec::new()];
        let mut stride = 1;
        for (&size, &is_gone) in shape.iter().zip(gone).rev() {
            if size != 1 {
                let list = &mut axes[usize::from(is_gone)];
                match list.last_mut() {
                    // Contiguous neighboring axes are merged.
                    Some((inner, step)) if *inner * *step == stride => *inner *= size,
                    _ => list.push((size, stride)),
                }
            }
            stride *= size;
        }
        let [kept, gone] = axes.map(|list| list.into_iter().rev().collect());
        ReduceAxes { fold, kept, gone, from, to }
    }

    /// Writes the result, contiguous in the order of the kept axes.
    ///
    /// # Safety
    /// Both pointers must be aligned and valid for the shapes, and must not overlap.
    pub unsafe fn run(&self, pool: &Pool, src: *const u8, dst: *mut u8) {
        let count: usize = self.gone.iter().map(|(size, _)| size).product();
        let results: usize = self.kept.iter().map(|(size, _)| size).product();
        if results == 0 {
            return;
        }
        // The innermost kept axis is a line of accumulators.
        let (line, stride) = self.kept.last().copied().unwrap_or((1, 1));
        let width = line.min((CHUNK / count.max(1)).max(16));
        let per_line = line.div_ceil(width);
        let lines = results / line;
        if let Some((&(run, 1), outer)) = self.gone.split_last()
            && run >= LANES
        {
            // SAFETY: passed on.
            return unsafe { self.along(pool, (run, outer), src, dst) };
        }
        let (src, dst) = (Shareable::new(src), Shareable::new(dst));
        pool.run_workers(lines * per_line, &|chunk, worker: &mut Worker| {
            let (row, first) = (chunk / per_line, chunk % per_line * width);
            let width = width.min(line - first);
            let outer = &self.kept[..self.kept.len().saturating_sub(1)];
            let start = place(outer, row) + first * stride;
            let bytes = width * size_of::<f32>();
            let [blocks, sums] = worker.tiles.split([bytes, bytes]);
            // SAFETY: the tiles hold `width` numbers; each chunk writes its own part of the result.
            unsafe {
                let block = std::slice::from_raw_parts_mut(blocks.cast::<f32>(), width);
                let sums = std::slice::from_raw_parts_mut(sums.cast::<f32>(), width);
                sums.fill(self.fold.neutral());
                for first in (0..count).step_by(BLOCK) {
                    block.fill(self.fold.neutral());
                    for i in first..count.min(first + BLOCK) {
                        let at = start + place(&self.gone, i);
                        for (j, sum) in block.iter_mut().enumerate() {
                            let x = self.from.load(src.get(), (at + j * stride) as isize);
                            *sum = self.fold.apply(*sum, x);
                        }
                    }
                    for (sum, part) in sums.iter_mut().zip(&*block) {
                        *sum = self.fold.apply(*sum, *part);
                    }
                }
                for (j, sum) in sums.iter().enumerate() {
                    let value = if self.fold == Fold::Mean { *sum / count as f32 } else { *sum };
                    self.to.store(dst.get(), (row * line + first + j) as isize, value);
                }
            }
        });
    }
}

impl ReduceAxes {
    /// As [`ReduceAxes::run`], where contiguous runs of elements, and `outer` axes, are reduced.
    unsafe fn along(
        &self,
        pool: &Pool,
        (run, outer): (usize, &[(usize, usize)]),
        src: *const u8,
        dst: *mut u8,
    ) {
        let results: usize = self.kept.iter().map(|(size, _)| size).product();
        let runs: usize = outer.iter().map(|(size, _)| size).product();
        let (src, dst) = (Shareable::new(src), Shareable::new(dst));
        let step = (CHUNK / (runs * run).max(1)).max(1);
        pool.run(results.div_ceil(step), &|chunk| {
            for result in chunk * step..results.min((chunk + 1) * step) {
                let start = place(&self.kept, result);
                let mut total = self.fold.neutral();
                for i in 0..runs {
                    let start = start + place(outer, i);
                    for first in (0..run).step_by(BLOCK) {
                        let mut values = [0.0; BLOCK];
                        let values = &mut values[..BLOCK.min(run - first)];
                        let from = self.from.at(src.get(), (start + first) as isize);
                        // SAFETY: the run is inside the operand.
                        unsafe { to_f32(from, self.from, values) };
                        total = self.fold.apply(total, self.of_block(values));
                    }
                }
                let count = (runs * run) as f32;
                let value = if self.fold == Fold::Mean { total / count } else { total };
                // SAFETY: each result is written once.
                unsafe { self.to.store(dst.get(), result as isize, value) };
            }
        });
    }

    /// Combines the elements of a block, in lanes that are combined last.
    fn of_block(&self, values: &[f32]) -> f32 {
        let mut lanes = [self.fold.neutral(); LANES];
        let (whole, rest) = values.as_chunks::<LANES>();
        for chunk in whole {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = self.fold.apply(*lane, *x);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = self.fold.apply(*lane, *x);
        }
        lanes.into_iter().fold(self.fold.neutral(), |a, b| self.fold.apply(a, b))
    }
}

/// The offset of element `index` of a grid.
fn place(axes: &[(usize, usize)], mut index: usize) -> usize {
    let mut at = 0;
    for (size, stride) in axes.iter().rev() {
        at += index % size * stride;
        index /= size;
    }
    at
}

impl Fold {
    fn neutral(self) -> f32 {
        match self {
            Fold::Sum | Fold::Mean => 0.0,
            Fold::Prod => 1.0,
            Fold::Max => f32::NEG_INFINITY,
            Fold::Min => f32::INFINITY,
        }
    }

    #[inline(always)]
    fn apply(self, a: f32, b: f32) -> f32 {
        match self {
            Fold::Sum | Fold::Mean => a + b,
            Fold::Prod => a * b,
            // A NaN propagates, as comparisons with it are false.
            Fold::Max if b > a || b.is_nan() => b,
            Fold::Min if b < a || b.is_nan() => b,
            Fold::Max | Fold::Min => a,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_of_axes_equals_the_definition() {
        let dims = [3, 1, 4, 5];
        let values: Vec<f32> = (0..60).map(|i| ((i * 37 + 11) % 23) as f32 * 0.25 - 2.0).collect();
        for set in 0..16_usize {
            let gone: Vec<bool> = (0..4).map(|axis| set >> axis & 1 == 1).collect();
            for fold in [Fold::Sum, Fold::Mean, Fold::Prod, Fold::Max, Fold::Min] {
                let mut want: Vec<(f32, usize)> = Vec::new();
                let n = (0..4).filter(|&a| !gone[a]).map(|a| dims[a]).product();
                want.resize(n, (fold.neutral(), 0));
                for (i, &x) in values.iter().enumerate() {
                    let at = [i / 20, 0, i / 5 % 4, i % 5];
                    let to = (0..4).filter(|&a| !gone[a]).fold(0, |to, a| to * dims[a] + at[a]);
                    want[to] = (fold.apply(want[to].0, x), want[to].1 + 1);
                }
                let reduce = ReduceAxes::new(fold, &dims, &gone, Elem::F32, Elem::F32);
                let mut got = vec![f32::NAN; n];
                // SAFETY: both vectors have the shapes' sizes.
                unsafe {
                    let pool = Pool::new(2);
                    reduce.run(&pool, values.as_ptr().cast(), got.as_mut_ptr().cast());
                }
                for (got, (want, count)) in got.into_iter().zip(want) {
                    let want = if fold == Fold::Mean { want / count as f32 } else { want };
                    assert_eq!(got, want, "{fold:?} over {gone:?}");
                }
            }
        }
    }

    #[test]
    fn sets_without_elements_give_what_a_fold_begins_with() {
        for dims in [[0, 4, 5], [3, 0, 20], [3, 4, 0], [0, 0, 17]] {
            for set in 0..8_usize {
                let gone: Vec<bool> = (0..3).map(|axis| set >> axis & 1 == 1).collect();
                let n: usize = (0..3).filter(|&a| !gone[a]).map(|a| dims[a]).product();
                let mut got = vec![f32::NAN; n];
                let reduce = ReduceAxes::new(Fold::Prod, &dims, &gone, Elem::F32, Elem::F32);
                // SAFETY: the operand is empty, the result has its shape's size.
                unsafe {
                    let (pool, empty) = (Pool::new(2), std::ptr::NonNull::<f32>::dangling());
                    reduce.run(&pool, empty.as_ptr().cast(), got.as_mut_ptr().cast());
                }
                assert_eq!(got, vec![1.0; n], "{dims:?} over {gone:?}");
            }
        }
    }

    #[test]
    fn nan_stays() {
        let values = [1.0, f32::NAN, 3.0];
        for fold in [Fold::Max, Fold::Min, Fold::Sum] {
            let mut got = [0.0f32];
            let reduce = ReduceAxes::new(fold, &[3], &[true], Elem::F32, Elem::F32);
            // SAFETY: both arrays have the shapes' sizes.
            unsafe { reduce.run(&Pool::new(1), values.as_ptr().cast(), got.as_mut_ptr().cast()) };
            assert!(got[0].is_nan(), "{fold:?}");
        }
    }
}
