//! Reductions, running sums and softmax.

use super::super::draw::{Case, Draw};
use frit_ir::ops::{CumSum, LogSoftmax, Op, Reduce, ReduceFn, Softmax, SumTo};

pub(super) fn cases(draw: &mut Draw) -> Vec<Case> {
    use ReduceFn::{Max, Mean, Min, Prod, Sum};
    let mut all = Vec::new();
    for f in [Sum, Mean, Max, Min, Prod, Sum, Mean, Max, Min, Prod] {
        let rank = draw.size(1..=3);
        let dims = draw.shape(rank);
        let axes: Vec<usize> = (0..rank).filter(|_| draw.chance()).collect();
        let keep_dims = draw.chance();
        let x = draw.floats(dims);
        all.push(draw.case(Op::Reduce(Reduce { f, axes, keep_dims }), vec![x]));
    }
    // Two that tie, a line with one zero, and one with two.
    for (f, x) in [
        (Max, [1.5, 0.25, 1.5, -1.0, 0.75, 0.25]),
        (Min, [-1.5, 0.25, 1.5, -1.0, -1.0, 0.25]),
        (Prod, [0.0, 0.75, -1.5, 0.0, -1.25, 0.0]),
    ] {
        let x = draw.tensor([2, 3], x.to_vec());
        all.push(draw.case(Op::Reduce(Reduce { f, axes: vec![1], keep_dims: false }), vec![x]));
    }
    for to in [vec![], vec![4], vec![3, 1], vec![2, 1, 4], vec![2, 3, 4]] {
        let x = draw.floats([2, 3, 4]);
        let dtype = draw.chance().then_some(draw.dtype);
        all.push(draw.case(Op::SumTo(SumTo { shape: to.into(), dtype }), vec![x]));
    }
    for (exclusive, reverse) in [(false, false), (false, true), (true, false), (true, true)] {
        let axis = draw.size(0..=1);
        let x = draw.floats([3, 4]);
        all.push(draw.case(Op::CumSum(CumSum { axis, exclusive, reverse }), vec![x]));
    }
    for axis in 0..3 {
        let x = draw.floats([2, 3, 4]);
        all.push(draw.case(Op::Softmax(Softmax { axis }), vec![x.clone()]));
        all.push(draw.case(Op::LogSoftmax(LogSoftmax { axis }), vec![x]));
    }
    all
}
