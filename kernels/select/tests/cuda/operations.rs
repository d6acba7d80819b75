//! Reference implementation of the cuDNN operations in launches, by its documentation.

mod attention;
mod batch_norm;
mod pool;

use crate::memory::{load, store};
use frit_ir::plan::{Direction, Operation, OperationKind, Strided};

/// Computes the results of an operation; `tensors` are all of its tensors, the results to be overwritten.
pub(crate) fn run(operation: &Operation, tensors: &mut [Vec<u8>]) {
    match &operation.kind {
        OperationKind::Conv { .. } => conv(operation, tensors),
        OperationKind::Attention { .. } | OperationKind::AttentionGrad { .. } => {
            attention::run(operation, tensors);
        }
        OperationKind::Pool { .. } => pool::run(operation, tensors),
        OperationKind::BatchNorm { .. } | OperationKind::BatchNormGrad => {
            batch_norm::run(operation, tensors);
        }
    }
}

/// Bytes from a tensor's first element to the end of its last.
pub(crate) fn span_bytes(tensor: &Strided) -> usize {
    let ends = tensor.sizes.iter().zip(&tensor.strides).map(|(size, stride)| (size - 1) * stride);
    (ends.sum::<usize>() + 1) * tensor.dtype.size()
}

/// Positions of its elements, the last axis innermost.
pub(crate) fn places(tensor: &Strided) -> Vec<usize> {
    let place = |index: Vec<usize>| index.iter().zip(&tensor.strides).map(|(i, s)| i * s).sum();
    grid(&tensor.sizes).into_iter().map(place).collect()
}

/// Checks the requirements of cuDNN on image operations.
fn check(operation: &Operation) {
    for Strided { dtype, sizes, strides, .. } in &operation.tensors {
        assert!(matches!(sizes.len(), 4 | 5), "planes or volumes: {operation}");
        assert_eq!(sizes.len(), strides.len());
        assert!(dtype.is_float() && dtype.size() > 1, "{operation}");
        // Elements do not overlap, and there are no gaps.
        let mut axes: Vec<(usize, usize)> =
            strides.iter().copied().zip(sizes.iter().copied()).filter(|a| a.1 > 1).collect();
        axes.sort_unstable();
        let mut step = 1;
        for (stride, size) in axes {
            assert_eq!(stride, step, "{operation}");
            step *= size;
        }
    }
}

/// The place of an element.
fn place(tensor: &Strided, outer: [usize; 2], inner: &[usize]) -> usize {
    let index = outer.iter().chain(inner);
    index.zip(&tensor.strides).map(|(i, stride)| i * stride).sum()
}

/// All indices of a grid.
fn grid(sizes: &[usize]) -> Vec<Vec<usize>> {
    sizes.iter().fold(vec![vec![]], |all, &size| {
        let longer =
            |index: Vec<usize>| (0..size).map(move |i| index.iter().copied().chain([i]).collect());
        all.into_iter().flat_map(longer).collect()
    })
}

/// Every pair of image and filter elements contributes to one response element; each of the three results is a sum over
/// these triples.
fn conv(operation: &Operation, tensors: &mut [Vec<u8>]) {
    let OperationKind::Conv { direction, strides, dilations, low, high } = &operation.kind else {
        panic!("a convolution")
    };
    check(operation);
    let [x, w, y] = &operation.tensors[..] else { panic!("three tensors") };
    let groups = x.sizes[1] / w.sizes[1];
    assert_eq!((x.sizes[1], w.sizes[0] % groups), (w.sizes[1] * groups, 0), "{operation}");
    assert_eq!([x.sizes[0], w.sizes[0]], y.sizes[..2], "{operation}");
    for (axis, positions) in y.sizes[2..].iter().enumerate() {
        let padded = x.sizes[axis + 2] + low[axis] + high[axis];
        let span = (w.sizes[axis + 2] - 1) * dilations[axis] + 1;
        assert_eq!(*positions, (padded - span) / strides[axis] + 1, "{operation}");
    }
    let written = operation.results()[0];
    let operand = operation.tensors[if written == 0 { 1 } else { 0 }].dtype;
    for (i, tensor) in operation.tensors.iter().enumerate() {
        assert!(tensor.dtype == operand || i == written, "operands of one type");
    }
    let (taps, positions) = (grid(&w.sizes[2..]), grid(&y.sizes[2..]));
    let result = &operation.tensors[written];
    let mut sums = vec![0.0; result.sizes.iter().product()];
    let [images, filters, responses] = [0, 1, 2].map(|i| tensors[i].clone());
    let group_filters = w.sizes[0] / groups;
    for (n, k, c) in (0..x.sizes[0])
        .flat_map(|n| (0..w.sizes[0]).map(move |k| (n, k)))
        .flat_map(|(n, k)| (0..w.sizes[1]).map(move |c| (n, k, c)))
    {
        let channel = k / group_filters * w.sizes[1] + c;
        for (position, tap) in positions.iter().flat_map(|p| taps.iter().map(move |t| (p, t))) {
            let at: Option<Vec<usize>> = (0..tap.len())
                .map(|a| {
                    let at = position[a] * strides[a] + tap[a] * dilations[a];
                    at.checked_sub(low[a]).filter(|i| *i < x.sizes[a + 2])
                })
                .collect();
            // The border is zero.
            let Some(at) = at else { continue };
            let [px, pw, py] =
                [place(x, [n, channel], &at), place(w, [k, c], tap), place(y, [n, k], position)];
            let image = || load(&images, x.dtype, px);
            let filter = || load(&filters, w.dtype, pw);
            let response = || load(&responses, y.dtype, py);
            match direction {
                Direction::Forward => sums[py] += image() * filter(),
                Direction::GradInput => sums[px] += filter() * response(),
                Direction::GradWeight => sums[pw] += image() * response(),
            }
        }
    }
    let written = &mut tensors[written];
    for (i, sum) in sums.into_iter().enumerate() {
        store(written, result.dtype, i, sum);
    }
}
