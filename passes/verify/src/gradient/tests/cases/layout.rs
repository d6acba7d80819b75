//! Operations that rearrange elements.

use super::super::draw::{Case, Draw};
use frit_ir::ops::{Concat, Expand, Op, Pad, Reshape, Slice, Split, Transpose};

pub(super) fn cases(draw: &mut Draw) -> Vec<Case> {
    let mut all = Vec::new();
    for _ in 0..3 {
        let rank = draw.size(1..=4);
        let dims = draw.shape(rank);
        let mut other = dims.clone();
        draw.shuffle(&mut other);
        other.insert(draw.size(0..=rank), 1);
        let x = draw.floats(dims.clone());
        all.push(draw.case(Op::Reshape(Reshape { shape: other.into() }), vec![x.clone()]));
        let mut perm: Vec<usize> = (0..rank).collect();
        draw.shuffle(&mut perm);
        all.push(draw.case(Op::Transpose(Transpose { perm }), vec![x.clone()]));

        let (low, high) = (draw.shape(rank), draw.shape(rank));
        let low = low.iter().map(|n| n - 1).collect();
        let pad = Pad { low, high, value: draw.one_of(&[0.0, 1.5]) };
        all.push(draw.case(Op::Pad(pad), vec![x.clone()]));

        let (a, b) = draw.broadcast();
        let (part, full) = if a.len() < b.len() { (a, b) } else { (b, a) };
        if frit_ir::Shape(part.clone()).broadcast_strides(&full.clone().into()).is_some() {
            let x = draw.floats(part);
            all.push(draw.case(Op::Expand(Expand { shape: full.into() }), vec![x]));
        }

        let axis = draw.size(0..=rank - 1);
        let sizes = draw.shape(3);
        let part = |size: &usize| {
            let mut dims = dims.clone();
            dims[axis] = *size;
            dims
        };
        let parts: Vec<_> = sizes.iter().map(part).collect();
        let parts = parts.into_iter().map(|dims| draw.floats(dims)).collect();
        all.push(draw.case(Op::Concat(Concat { axis }), parts));
        let whole = draw.floats(part(&sizes.iter().sum()));
        let read = draw.one_of(&[[true; 3], [true, false, true], [false, false, true]]);
        let split = draw.case(Op::Split(Split { axis, sizes }), vec![whole]);
        all.push(split.reading(&read, draw));
    }
    for _ in 0..6 {
        let rank = draw.size(1..=3);
        let (mut start, mut size, mut step) = (Vec::new(), Vec::new(), Vec::new());
        let dims: Vec<usize> = (0..rank).map(|_| draw.size(1..=7)).collect();
        for dim in &dims {
            let first = draw.size(0..=dim - 1);
            let stride = draw.size(1..=3);
            let down = draw.chance();
            let room = if down { first } else { dim - 1 - first };
            start.push(first);
            size.push(draw.size(1..=room / stride + 1));
            step.push(if down { -(stride as isize) } else { stride as isize });
        }
        let x = draw.floats(dims);
        all.push(draw.case(Op::Slice(Slice { start, size, step }), vec![x]));
    }
    let x = draw.floats([2, 2, 2]);
    all.push(draw.case(Op::Transpose(Transpose { perm: vec![1, 2, 0] }), vec![x]));
    let x = draw.floats([5, 3]);
    let flipped = Slice { start: vec![4, 0], size: vec![3, 2], step: vec![-2, 2] };
    all.push(draw.case(Op::Slice(flipped), vec![x.clone()]));
    let nothing = Slice { start: vec![1, 0], size: vec![0, 3], step: vec![1, 1] };
    all.push(draw.case(Op::Slice(nothing), vec![x]));
    all
}
