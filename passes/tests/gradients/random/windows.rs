//! Convolution and pooling.

use super::super::{single, sliding};
use super::Random;
use frit_ir::Op;
use frit_ir::ops::*;

pub(super) fn case(r: &mut Random) {
    let rank = r.int(1, 3);
    let groups = r.int(1, 3);
    let (channels, filters) = (r.int(1, 2), r.int(1, 2));
    let most = if rank == 3 { 2 } else { 3 };
    let taps: Vec<usize> = (0..rank).map(|_| r.int(1, most)).collect();
    let mut window = sliding(rank, 1, 1, 0, 0);
    let mut sizes = Vec::new();
    for (i, taps) in taps.iter().enumerate() {
        (window.strides[i], window.dilations[i]) = (r.int(1, 3), r.int(1, 2));
        (window.low[i], window.high[i]) = (r.int(0, 2), r.int(0, 2));
        let extent = window.dilations[i] * (taps - 1) + 1;
        let border = window.low[i] + window.high[i];
        sizes.push(extent.saturating_sub(border).max(1) + r.int(0, 2));
    }
    let x = [&[r.int(0, 2), groups * channels], &sizes[..]].concat();
    let w = [&[groups * filters, channels], &taps[..]].concat();
    let name = format!("{window:?} groups {groups} {x:?} {w:?}");
    let op = Op::Conv(Conv { window: window.clone(), groups, out: None });
    single(&name, op, &[&x, &w]);
    let positions = window.positions(&sizes, &taps).expect("it fits");
    let y = [&[x[0], w[0]], &positions[..]].concat();
    let op = ConvGradInput { window: window.clone(), groups, size: sizes, out: None };
    single(&name, Op::ConvGradInput(op), &[&y, &w]);
    // Every pooling window needs an element that is not of the border.
    for (i, taps) in taps.iter().enumerate() {
        window.low[i] = window.low[i].min(taps - 1);
        window.high[i] = window.high[i].min(taps - 1);
    }
    let large: Vec<usize> =
        (0..rank).map(|i| window.dilations[i] * (taps[i] - 1) + 1 + r.int(0, 2)).collect();
    let image = [&[r.int(0, 2), 2], &large[..]].concat();
    let op = MaxPool { window: window.clone(), taps: taps.clone() };
    single(&format!("{op:?} {image:?}"), Op::MaxPool(op), &[&image]);
    let op = SumPool { window, taps };
    single(&format!("{op:?} {image:?}"), Op::SumPool(op), &[&image]);
}
