//! Indexed reads and writes.

use super::super::draw::{Case, Draw, Kind};
use frit_ir::Tensor;
use frit_ir::ops::{
    Embedding, Gather, GatherElements, GatherNd, Op, ScatterElements, ScatterFn, ScatterNd, TopK,
};

pub(super) fn cases(draw: &mut Draw) -> Vec<Case> {
    let mut all = Vec::new();
    for _ in 0..2 {
        let (rows, width) = (draw.size(2..=5), draw.size(1..=3));
        let rank = draw.size(0..=2);
        let places = draw.shape(rank);
        let operands = vec![draw.floats([rows, width]), draw.indices(rows, places)];
        all.push(draw.case(Op::Embedding(Embedding { padding_idx: None }), operands));
        let row = draw.size(0..=rows - 1);
        let ids = (0..12).map(|i| (i % rows) as i64).collect();
        let operands = vec![draw.floats([rows, width]), draw.integers([3, 4], ids)];
        let padded = draw.case(Op::Embedding(Embedding { padding_idx: Some(row) }), operands);
        all.push(padded.flat(row * width..(row + 1) * width));

        let rank = draw.size(1..=3);
        let dims: Vec<usize> = (0..rank).map(|_| draw.size(2..=4)).collect();
        let axis = draw.size(0..=rank - 1);
        let n = draw.size(0..=2);
        let places = draw.shape(n);
        let operands = vec![draw.floats(dims.clone()), draw.indices(dims[axis], places)];
        all.push(draw.case(Op::Gather(Gather { axis }), operands));
        let operands = vec![draw.floats([3, 3]), draw.indices(3, [3])];
        all.push(draw.case(Op::Gather(Gather { axis: axis.min(1) }), operands));
        let mut places: Vec<usize> = dims.iter().map(|d| draw.size(1..=*d)).collect();
        places[axis] = draw.size(1..=5);
        let operands = vec![draw.floats(dims.clone()), draw.indices(dims[axis], places)];
        all.push(draw.case(Op::GatherElements(GatherElements { axis }), operands));

        let x = draw.floats(dims.clone());
        let op = TopK { axis, k: draw.size(1..=dims[axis]), largest: draw.chance() };
        all.push(draw.case(Op::TopK(op), vec![x]));
        let batch_dims = draw.size(0..=1);
        let depth = draw.size(1..=2);
        let data = draw.floats([2, 2, 2, 3]);
        let ids = draw.indices(2, [2, 3, depth]);
        all.push(draw.case(Op::GatherNd(GatherNd { batch_dims }), vec![data, ids]));
    }
    for f in ScatterFn::ALL {
        elements(draw, *f, &mut all);
        slices(draw, *f, &mut all);
    }
    all
}

/// Some elements are zero, of data and updates.
fn with_zeros(draw: &mut Draw, shape: &[usize]) -> (Tensor, Kind) {
    let drawn = draw.nonzero(shape).0.to_f64s();
    let zeroed = |x| if draw.size(0..=2) == 0 { 0.0 } else { x };
    let elements = drawn.into_iter().map(zeroed).collect();
    draw.tensor(shape, elements)
}

/// Data and updates whose elements differ, or have zeros among the factors of a product.
fn both(draw: &mut Draw, f: ScatterFn, data: &[usize], updates: &[usize]) -> [(Tensor, Kind); 2] {
    if f == ScatterFn::Mul {
        return [with_zeros(draw, data), with_zeros(draw, updates)];
    }
    let n: usize = data.iter().product();
    let m: usize = updates.iter().product();
    let mut first = draw.numbers(n + m, -2.0, 2.0);
    let second = first.split_off(n);
    [draw.tensor(data, first), draw.tensor(updates, second)]
}

fn elements(draw: &mut Draw, f: ScatterFn, all: &mut Vec<Case>) {
    for axis in 0..2 {
        let dims = [3, 4];
        let mut places = [2, 2];
        places[axis] = 3;
        // No place is replaced twice.
        let mut order: Vec<i64> = (0..dims[axis] as i64).collect();
        draw.shuffle(&mut order);
        let stride = if axis == 0 { places[1] } else { 1 };
        let ids = match f {
            ScatterFn::Replace => {
                let ids = (0..6).map(|i| order[i / stride % places[axis]]).collect();
                draw.integers(places, ids)
            }
            _ => draw.indices(dims[axis], places),
        };
        let [data, updates] = both(draw, f, &dims, &places);
        let op = Op::ScatterElements(ScatterElements { axis, f });
        all.push(draw.case(op, vec![data, ids, updates]));
    }
    if matches!(f, ScatterFn::Max | ScatterFn::Min) {
        let data = draw.floats([3]);
        let update = draw.tensor([1], vec![data.0.to_f64s()[1]]);
        let ids = draw.integers([1], vec![1]);
        let op = Op::ScatterElements(ScatterElements { axis: 0, f });
        all.push(draw.case(op, vec![data, ids, update]));
    }
}

fn slices(draw: &mut Draw, f: ScatterFn, all: &mut Vec<Case>) {
    for batch_dims in 0..2 {
        let dims = [2, 4, 2];
        let mut order = [0, 1, 2, 3];
        draw.shuffle(&mut order);
        let ids = match (f, batch_dims) {
            (ScatterFn::Replace, 1) => draw.integers([2, 2, 1], order.to_vec()),
            (ScatterFn::Replace, _) => draw.integers([2, 2], vec![0, order[0], 1, order[1]]),
            (_, 1) => draw.indices(4, [2, 2, 1]),
            _ => draw.indices(2, [3, 2]),
        };
        let mut updates = ids.0.shape().dims().to_vec();
        updates.pop();
        updates.push(2);
        let [data, updates] = both(draw, f, &dims, &updates);
        let op = Op::ScatterNd(ScatterNd { batch_dims, f });
        all.push(draw.case(op, vec![data, ids, updates]));
    }
}
