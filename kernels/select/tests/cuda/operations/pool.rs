//! Pooling: averages that count padding, times the window size; maxima, with NaN as the greatest.

use super::{check, grid, place};
use crate::memory::{load, store};
use frit_ir::plan::{Operation, OperationKind, PoolFunction, Strided};

pub(super) fn run(operation: &Operation, tensors: &mut [Vec<u8>]) {
    let OperationKind::Pool { function, taps, strides, low, high } = &operation.kind else {
        panic!("pooling")
    };
    check(operation);
    let [x, y] = &operation.tensors[..2] else { panic!("images and results") };
    assert_eq!(x.sizes[..2], y.sizes[..2], "{operation}");
    assert!(operation.tensors.iter().all(|t| t.dtype == x.dtype), "{operation}");
    for tensor in &operation.tensors {
        let dense = Strided::dense(tensor.dtype, &tensor.sizes);
        assert_eq!(tensor.strides, dense.strides, "engines take dense channels: {operation}");
    }
    for (axis, positions) in y.sizes[2..].iter().enumerate() {
        let padded = x.sizes[axis + 2] + low[axis] + high[axis];
        assert_eq!(*positions, (padded - taps[axis]) / strides[axis] + 1, "{operation}");
    }
    let read = if *function == PoolFunction::SumGrad { y } else { x };
    let source = tensors[usize::from(*function == PoolFunction::SumGrad)].clone();
    let of = |at: usize| load(&source, read.dtype, at);
    let written = operation.results()[0];
    let start = if *function == PoolFunction::Max { f64::NEG_INFINITY } else { 0.0 };
    let mut results = vec![start; operation.tensors[written].sizes.iter().product()];
    let outer = grid(&x.sizes[..2]);
    let windows: Vec<_> = grid(&y.sizes[2..])
        .into_iter()
        .map(|position| {
            let inside = grid(taps).into_iter().filter_map(|tap| {
                let at = |axis: usize| position[axis] * strides[axis] + tap[axis];
                (0..tap.len())
                    .map(|a| at(a).checked_sub(low[a]).filter(|i| *i < x.sizes[a + 2]))
                    .collect::<Option<Vec<usize>>>()
            });
            (position.clone(), inside.collect::<Vec<_>>())
        })
        .collect();
    let count = taps.iter().product::<usize>() as f64;
    for channel in &outer {
        let outer = [channel[0], channel[1]];
        for (position, inside) in &windows {
            let py = place(y, outer, position);
            for px in inside.iter().map(|at| place(x, outer, at)) {
                match function {
                    PoolFunction::Max => {
                        let (most, next) = (results[py], of(px));
                        results[py] = if next > most || next.is_nan() { next } else { most };
                    }
                    PoolFunction::Sum => results[py] += of(px) / count,
                    PoolFunction::SumGrad => results[px] += of(py) / count,
                }
            }
        }
    }
    let factor = if *function == PoolFunction::Max { 1.0 } else { count };
    let dtype = x.dtype;
    for (i, result) in results.into_iter().enumerate() {
        store(&mut tensors[written], dtype, i, result * factor);
    }
}
