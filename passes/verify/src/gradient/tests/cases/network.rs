//! Matmuls, convolutions, pools, normalizations, attention and losses.

use super::super::draw::{Case, Draw, Kind};
use frit_ir::ops::{
    Attention, BatchNorm, Conv, ConvGradInput, CrossEntropy, LayerNorm, MatMul, MaxPool, Op,
    RmsNorm, SumPool, Window,
};
use frit_ir::{DType, Tensor};

pub(super) fn cases(draw: &mut Draw) -> Vec<Case> {
    let mut all = Vec::new();
    matmuls(draw, &mut all);
    windows(draw, &mut all);
    norms(draw, &mut all);
    attentions(draw, &mut all);
    losses(draw, &mut all);
    all
}

fn matmuls(draw: &mut Draw, all: &mut Vec<Case>) {
    for (trans_a, trans_b) in [(false, false), (false, true), (true, false), (true, true)] {
        for (a_lead, b_lead) in [
            (vec![], vec![]),
            (vec![2, 3], vec![]),
            (vec![2], vec![2]),
            (vec![], vec![2]),
            (vec![2, 1], vec![3]),
            (vec![1, 3], vec![2, 1]),
        ] {
            let [m, k, n] = draw.one_of(&[[2, 3, 4], [3, 3, 3]]);
            let a = [&a_lead[..], &if trans_a { [k, m] } else { [m, k] }].concat();
            let b = [&b_lead[..], &if trans_b { [n, k] } else { [k, n] }].concat();
            let out = draw.one_of(&[None, Some(DType::F64)]);
            let operands = vec![draw.floats(a), draw.floats(b)];
            all.push(draw.case(Op::MatMul(MatMul { trans_a, trans_b, out }), operands));
        }
    }
}

/// A window over `sizes`, with its taps, whose border is smaller than it.
fn window(draw: &mut Draw, sizes: &[usize]) -> (Window, Vec<usize>) {
    let mut window = Window::plain(sizes.len());
    let mut all_taps = Vec::new();
    for (i, size) in sizes.iter().enumerate() {
        let (taps, dilation) = (draw.size(1..=3), draw.size(1..=2));
        let extent = dilation * (taps - 1) + 1;
        window.strides[i] = draw.size(1..=3);
        window.dilations[i] = dilation;
        window.low[i] = draw.size(0..=extent - 1);
        window.high[i] = draw.size(extent.saturating_sub(size + window.low[i])..=extent - 1);
        all_taps.push(taps);
    }
    (window, all_taps)
}

fn windows(draw: &mut Draw, all: &mut Vec<Case>) {
    for rank in [1, 1, 2, 2, 3] {
        let sizes: Vec<usize> = (0..rank).map(|_| draw.size(3..=5 - rank / 2)).collect();
        let (window, taps) = window(draw, &sizes);
        let groups = draw.size(1..=2);
        let (n, c, m) = (draw.size(1..=2), groups * draw.size(1..=2), groups * draw.size(1..=2));
        let image = |c: usize, sizes: &[usize]| [&[n, c], sizes].concat();
        let w = draw.floats([&[m, c / groups], &taps[..]].concat());
        let x = draw.floats(image(c, &sizes));
        let out = draw.one_of(&[None, Some(DType::F64)]);
        let op = Conv { window: window.clone(), groups, out };
        all.push(draw.case(Op::Conv(op), vec![x.clone(), w.clone()]));
        let positions = window.positions(&sizes, &taps).expect("it fits");
        let dy = draw.floats(image(m, &positions));
        let size = sizes.clone();
        let op = ConvGradInput { window: window.clone(), groups, size, out };
        all.push(draw.case(Op::ConvGradInput(op), vec![dy, w]));

        let x = draw.floats(image(1, &sizes));
        let pool = MaxPool { window: window.clone(), taps: taps.clone() };
        all.push(draw.case(Op::MaxPool(pool), vec![x.clone()]));
        all.push(draw.case(Op::SumPool(SumPool { window, taps }), vec![x]));
    }
}

/// Floats of f64, or of the element type that others are drawn in.
fn wide(draw: &mut Draw, shape: &[usize]) -> (Tensor, Kind) {
    let own = draw.dtype;
    draw.dtype = draw.one_of(&[own, DType::F64]);
    let drawn = draw.floats(shape);
    draw.dtype = own;
    drawn
}

fn norms(draw: &mut Draw, all: &mut Vec<Case>) {
    for rank in 2..=4 {
        let dims: Vec<usize> = (0..rank).map(|_| draw.size(2..=4 - rank / 4)).collect();
        let axis = draw.size(0..=rank - 1);
        // Lines of nearly equal elements are too steep for differences without it.
        let (x, eps) = (draw.floats(dims.clone()), draw.one_of(&[0.05, 0.1]));
        let tail = &dims[axis..];
        let (scale, bias) = (wide(draw, tail), draw.floats(tail));
        let op = Op::LayerNorm(LayerNorm { axis, eps });
        all.push(draw.case(op.clone(), vec![x.clone(), scale.clone()]));
        all.push(draw.case(op, vec![x.clone(), scale.clone(), bias]));
        all.push(draw.case(Op::RmsNorm(RmsNorm { axis, eps }), vec![x.clone(), scale]));
        let (x, c) = (draw.floats([&[3, dims[1]], &dims[2..]].concat()), dims[1]);
        let operands = vec![x, wide(draw, &[c]), draw.floats([c])];
        all.push(draw.case(Op::BatchNorm(BatchNorm { eps: 0.1 }), operands));
    }
}

fn attentions(draw: &mut Draw, all: &mut Vec<Case>) {
    for (causal, window) in
        [(false, None), (true, None), (false, Some(2)), (true, Some(2)), (true, Some(1))]
    {
        for masked in ["", "bool", "float", "frozen"] {
            let (b, g, t, s) = (draw.size(1..=2), draw.size(1..=2), draw.size(2..=3), 3);
            let h = g * draw.size(1..=2);
            let (d, e) = (draw.size(1..=2), draw.size(1..=2));
            let mut operands = vec![
                draw.floats([b, h, t, d]),
                draw.floats([b, g, s, d]),
                draw.floats([b, g, s, e]),
            ];
            let shapes = [vec![t, s], vec![h, 1, s], vec![b, 1, t, s], vec![1, h, t, 1]];
            let shape = draw.one_of(&shapes);
            match masked {
                "" => {}
                "bool" => operands.push(draw.bools(shape)),
                _ => operands.push(wide(draw, &shape)),
            }
            let scale = draw.one_of(&[1.0, 0.5]);
            let keep = draw.chance().then_some(0.75);
            operands.extend(keep.map(|_| draw.bools([b, h, t, s])));
            let case =
                draw.case(Op::Attention(Attention { scale, causal, window, keep }), operands);
            all.push(if masked == "frozen" { case.given(3) } else { case });
        }
    }
}

fn losses(draw: &mut Draw, all: &mut Vec<Case>) {
    for classes in [None, Some(3)] {
        for lead in [vec![], vec![5], vec![2, 3]] {
            let n: usize = lead.iter().product();
            let ignore_index = draw.one_of(&[-100, 1]);
            let label =
                |_| if draw.size(0..=3) == 0 { ignore_index } else { draw.size(0..=2) as i64 };
            let labels = (0..n).map(label).collect();
            let operands =
                vec![draw.floats([&lead[..], &[4]].concat()), draw.integers(lead, labels)];
            let op = Op::CrossEntropy(CrossEntropy { ignore_index, classes });
            all.push(draw.case(op, operands));
        }
    }
}
