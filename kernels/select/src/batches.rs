//! Batched GEMMs with broadcast leading axes, as runs with one stride per operand.

use frit_ir::{Shape, TensorType};

/// Batches of GEMMs, all with the same length and strides.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Batches {
    /// GEMMs per batch.
    pub(super) len: usize,
    /// Matrices of the left operand, the right operand and the result between consecutive GEMMs.
    pub(super) steps: [usize; 3],
    /// First matrix of each batch in the left operand, the right operand and the result.
    pub(super) runs: Vec<[usize; 3]>,
}

/// The batches of a matmul of these operands, neither of which has just two axes: the longest batch with equal strides,
/// repeated for every index along the other axes. `None` if the leading axes do not broadcast.
pub(super) fn batches(left: &TensorType, right: &TensorType) -> Option<Batches> {
    let lead = |t: &TensorType| Shape(t.shape.0[..t.shape.rank() - 2].to_vec());
    let grid = lead(left).broadcast(&lead(right))?;
    let strides = [left, right].map(|t| lead(t).broadcast_strides(&grid));
    let [left, right] = strides;
    let (left, right) = (left?, right?);
    let mut axes: Vec<(usize, [usize; 3])> = Vec::new();
    for (i, &size) in grid.0.iter().enumerate().filter(|(_, size)| **size != 1) {
        let steps = [left[i], right[i], grid.strides()[i]];
        match axes.last_mut() {
            Some((outer, before)) if *before == steps.map(|s| s * size) => {
                *outer *= size;
                *before = steps;
            }
            _ => axes.push((size, steps)),
        }
    }
    let longest = (0..axes.len()).max_by_key(|i| (axes[*i].0, std::cmp::Reverse(*i)));
    let (len, steps) = longest.map_or((1, [0; 3]), |longest| axes.remove(longest));
    let runs: usize = axes.iter().map(|(size, _)| size).product();
    let place = |mut index: usize| {
        let mut at = [0; 3];
        for (size, steps) in axes.iter().rev() {
            (0..3).for_each(|i| at[i] += index % size * steps[i]);
            index /= size;
        }
        at
    };
    Some(Batches { len, steps, runs: (0..runs).map(place).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::DType;

    fn of(left: &[usize], right: &[usize]) -> Batches {
        let ty = |lead: &[usize]| TensorType::new(DType::F32, [lead, &[3, 3]].concat());
        batches(&ty(left), &ty(right)).expect("they broadcast")
    }

    #[test]
    fn runs_follow_equal_distances() {
        let one = |len, steps| Batches { len, steps, runs: vec![[0; 3]] };
        assert_eq!(of(&[], &[]), one(1, [0; 3]));
        assert_eq!(of(&[4, 5], &[4, 5]), one(20, [1, 1, 1]));
        assert_eq!(of(&[4, 5], &[1, 1]), one(20, [1, 0, 1]));
        assert_eq!(of(&[1, 5], &[5]), one(5, [1, 1, 1]));
        // The matrices of the heads are shared by all batches.
        let shared = of(&[2, 5], &[1, 5]);
        assert_eq!((shared.len, shared.steps), (5, [1, 1, 1]));
        assert_eq!(shared.runs, [[0, 0, 0], [5, 0, 5]]);
        let crossed = of(&[3, 1], &[1, 2]);
        assert_eq!((crossed.len, crossed.steps), (3, [1, 0, 2]));
        assert_eq!(crossed.runs, [[0, 0, 0], [0, 1, 1]]);
    }
}
