//! The order in which operands of ranks are added: neighbors first, then sums of neighbors, as in a balanced binary tree. A sum
//! over ranks therefore contains the sums over any aligned power of two of consecutive ranks, and is the same if these were made first.

use frit_ir::ops::ReduceKind;

/// A sum, mean or maximum over ranks, as far as its operands are known.
pub(super) struct Tree {
    reduce: ReduceKind,
    /// Sums of ever fewer operands that wait for equally large ones, and memory for more.
    waiting: Vec<Vec<f32>>,
    /// How many wait.
    depth: usize,
    /// Operands so far.
    n: usize,
}

impl Tree {
    /// Of `ranks` operands with at most `len` elements.
    pub(super) fn new(reduce: ReduceKind, ranks: usize, len: usize) -> Tree {
        let depth = ranks.max(1).ilog2() as usize + 1;
        Tree { reduce, waiting: vec![vec![0.0; len]; depth + 1], depth: 0, n: 0 }
    }

    /// Adds an operand of `len` elements, which `fill` writes.
    pub(super) fn push<E>(
        &mut self,
        len: usize,
        fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        fill(&mut self.waiting[self.depth][..len])?;
        self.depth += 1;
        for _ in 0..self.n.trailing_ones() {
            self.merge(len);
        }
        self.n += 1;
        Ok(())
    }

    /// Combines the last two.
    fn merge(&mut self, len: usize) {
        self.depth -= 1;
        let (first, last) = self.waiting.split_at_mut(self.depth);
        let both = first[self.depth - 1][..len].iter_mut().zip(&last[0][..len]);
        match self.reduce {
            // NaN propagates from either side.
            ReduceKind::Max => {
                both.filter(|(most, x)| **x > **most || x.is_nan()).for_each(|(most, x)| *most = *x)
            }
            _ => both.for_each(|(sum, x)| *sum += x),
        }
    }

    /// The result of all operands; the tree is then empty.
    pub(super) fn finish(&mut self, len: usize) -> &[f32] {
        while self.depth > 1 {
            self.merge(len);
        }
        let result = &mut self.waiting[0][..len];
        if self.reduce == ReduceKind::Mean {
            let n = self.n as f32;
            result.iter_mut().for_each(|sum| *sum /= n);
        }
        (self.depth, self.n) = (0, 0);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn of(reduce: ReduceKind, operands: &[f32]) -> f32 {
        let mut tree = Tree::new(reduce, operands.len(), 1);
        for x in operands {
            let filled: Result<(), Infallible> = tree.push(1, |to| {
                to[0] = *x;
                Ok(())
            });
            filled.unwrap();
        }
        tree.finish(1)[0]
    }

    #[test]
    fn sums_of_neighbors_are_added() {
        let big = 16_777_216.0;
        // One after the other, every 1 would be lost.
        assert_eq!(of(ReduceKind::Sum, &[big, 0.0, 1.0, 1.0]), big + 2.0);
        assert_eq!(of(ReduceKind::Sum, &[big, 1.0, 1.0, 1.0]), big + 2.0);
        assert_eq!(of(ReduceKind::Sum, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]), 28.0);
        assert_eq!(of(ReduceKind::Mean, &[1.0, 2.0, 6.0]), 3.0);
        assert_eq!(of(ReduceKind::Max, &[1.0, 7.0, 3.0, -1.0, 6.0]), 7.0);
        assert!(of(ReduceKind::Max, &[1.0, f32::NAN, 3.0]).is_nan());
        assert_eq!(of(ReduceKind::Sum, &[-0.0]).to_bits(), (-0f32).to_bits());
    }

    #[test]
    fn a_sum_contains_those_of_halves() {
        let values: Vec<f32> = (0..16).map(|i| (i * 7919 % 101) as f32 / 3.0 - 11.0).collect();
        let whole = of(ReduceKind::Sum, &values);
        for n in [2, 4, 8] {
            let parts: Vec<f32> = values.chunks(n).map(|part| of(ReduceKind::Sum, part)).collect();
            assert_eq!(of(ReduceKind::Sum, &parts).to_bits(), whole.to_bits());
        }
    }
}
