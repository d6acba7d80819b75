//! Operations that only rearrange elements.

use super::super::{add, check, single};
use super::Random;
use frit_ir::ops::*;
use frit_ir::{DType, Op, Shape};

pub(super) fn case(r: &mut Random) {
    let shape = r.shape_or_empty(1, 4);
    let rank = shape.len();
    let name = format!("{shape:?}");
    let perm = r.permutation(rank);
    let turned: Vec<usize> = perm.iter().map(|&axis| shape[axis]).collect();
    single(&name, Op::Transpose(Transpose { perm }), &[&shape]);
    let (call, dtype) = (0, DType::F32);
    check(&format!("boundaries around {shape:?}"), &[&shape], |g, p| {
        let inside = add(g, Op::EnterPrecision(EnterPrecision { call, dtype }), p);
        add(g, Op::LeavePrecision(LeavePrecision { call }), &inside)[0]
    });
    single(&name, Op::Reshape(Reshape { shape: Shape(turned) }), &[&shape]);
    let small = r.smaller(&shape);
    single(&name, Op::Expand(Expand { shape: Shape(shape.clone()) }), &[&small]);
    let op = SumTo { shape: Shape(small), dtype: None };
    single(&name, Op::SumTo(op), &[&shape]);
    let low = (0..rank).map(|_| r.int(0, 2)).collect();
    let high = (0..rank).map(|_| r.int(0, 2)).collect();
    single(&name, Op::Pad(Pad { low, high, value: 0.5 }), &[&shape]);
    let axis = r.int(0, rank - 1);
    let sizes: Vec<usize> = (0..r.int(1, 3)).map(|_| r.int(0, 2)).collect();
    let part = |n: usize| [&shape[..axis], &[n], &shape[axis + 1..]].concat();
    let parts: Vec<Vec<usize>> = sizes.iter().map(|n| part(*n)).collect();
    let operands: Vec<&[usize]> = parts.iter().map(Vec::as_slice).collect();
    single(&name, Op::Concat(Concat { axis }), &operands);
    let whole = part(sizes.iter().sum());
    let taken = r.int(0, sizes.len() - 1);
    check(&name, &[&whole], |g, p| {
        add(g, Op::Split(Split { axis, sizes: sizes.clone() }), p)[taken]
    });
    let (mut start, mut size, mut step) = (vec![], vec![], vec![]);
    for &n in &shape {
        let stride = r.int(1, 2);
        let first = r.int(0, n.saturating_sub(1));
        let backward = n > 0 && r.flag();
        let room = if backward { first / stride + 1 } else { (n - first).div_ceil(stride) };
        start.push(first);
        size.push(r.int(0, room));
        step.push(if backward { -(stride as isize) } else { stride as isize });
    }
    single(&format!("slice of {shape:?}"), Op::Slice(Slice { start, size, step }), &[&shape]);
}
