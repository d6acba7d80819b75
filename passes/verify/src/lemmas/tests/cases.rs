//! Operations that have no gradient: comparisons, integers, gradients themselves, and what later passes add.

use crate::gradient::tests::draw::{Case, Draw, Kind};
use frit_ir::ops::reproducible::DIGITS;
use frit_ir::ops::*;
use frit_ir::{DType, Graph, Origin, OutputKind, Region, Tensor, TensorType};

type Operands = Vec<(Tensor, Kind)>;

fn case(all: &mut Vec<Case>, op: Op, operands: Operands) {
    all.push(Case { op, operands, weights: vec![], flat: 0..0 });
}

pub(super) fn cases(seed: u64) -> Vec<Case> {
    let draw = &mut Draw::new(7000 + seed);
    let mut all = vec![];
    truths(draw, &mut all);
    integers(draw, &mut all);
    casts(draw, &mut all);
    slopes(draw, &mut all);
    rows(draw, &mut all);
    norms(draw, &mut all);
    windows(draw, &mut all);
    attentions(draw, &mut all);
    steps(draw, &mut all);
    constants(draw, &mut all);
    all
}

/// Small integers, which are often equal.
fn small(draw: &mut Draw, from: i64, to: i64, shape: &[usize]) -> (Tensor, Kind) {
    let n: usize = shape.iter().product();
    let elements = (0..n).map(|_| from + draw.size(0..=(to - from) as usize) as i64).collect();
    draw.integers(shape, elements)
}

fn of_type(dtype: DType, x: (Tensor, Kind)) -> (Tensor, Kind) {
    (x.0.cast(dtype), x.1)
}

fn truths(draw: &mut Draw, all: &mut Vec<Case>) {
    for f in CompareFn::ALL {
        for dtype in [DType::F64, DType::I64] {
            let (a, b) = draw.broadcast();
            let [a, b] = [a, b].map(|shape| of_type(dtype, small(draw, -1, 1, &shape)));
            case(all, Op::Compare(*f), vec![a, b]);
        }
    }
    for f in LogicalFn::ALL {
        let (a, b) = draw.broadcast();
        let operands = vec![draw.bools(a), draw.bools(b)];
        case(all, Op::Logical(*f), operands);
    }
    let x = draw.bools([2, 3]);
    case(all, Op::Unary(UnaryFn::Not), vec![x]);
    for f in PredicateFn::ALL {
        let x = draw.floats([2, 3]);
        case(all, Op::Predicate(*f), vec![x]);
    }
    let operands = vec![draw.bools([3, 1]), draw.bools([2]), draw.bools([3, 2])];
    case(all, Op::Select, operands);
    let operands = vec![draw.bools([2]), small(draw, -3, 3, &[2]).clone(), small(draw, 1, 1, &[1])];
    let operands = operands.into_iter().enumerate();
    let operands = operands.map(|(k, x)| if k == 0 { x } else { of_type(DType::I64, x) });
    case(all, Op::Select, operands.collect());
}

fn integers(draw: &mut Draw, all: &mut Vec<Case>) {
    use BinaryFn::{Add, Div, Fmod, Max, Min, Mod, Mul, Pow, Sub};
    for f in [Add, Sub, Mul, Max, Min, Div, Mod, Fmod, Pow] {
        let (a, b) = draw.broadcast();
        let a = of_type(DType::I64, small(draw, -7, 7, &a));
        let mut b = of_type(DType::I64, small(draw, if f == Pow { 0 } else { -3 }, 3, &b));
        if matches!(f, Div | Mod | Fmod) {
            let nonzero = b.0.to_i64s().into_iter().map(|x| if x == 0 { 2 } else { x }).collect();
            b.0 = Tensor::ints(DType::I64, b.0.shape().clone(), nonzero);
        }
        case(all, Op::Binary(f), vec![a, b]);
    }
    for f in [UnaryFn::Neg, UnaryFn::Abs, UnaryFn::Sign] {
        let x = small(draw, -3, 3, &[4]);
        case(all, Op::Unary(f), vec![x]);
    }
    for f in [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Max, ReduceFn::Min, ReduceFn::Prod] {
        let x = small(draw, -5, 5, &[3, 2, 1]);
        let axes = draw.one_of(&[vec![0], vec![0, 2], vec![0, 1, 2]]);
        case(all, Op::Reduce(Reduce { f, axes, keep_dims: draw.chance() }), vec![x]);
    }
    for (largest, last) in [(false, false), (false, true), (true, false), (true, true)] {
        let axis = draw.size(0..=1);
        let x = of_type(DType::F64, small(draw, -1, 1, &[3, 4]));
        case(all, Op::ArgReduce(ArgReduce { axis, largest, last }), vec![x]);
    }
}

fn casts(draw: &mut Draw, all: &mut Vec<Case>) {
    let types = [DType::F64, DType::F32, DType::I64, DType::I32, DType::U8, DType::Bool];
    for from in types {
        for to in types {
            let low = if [from, to].contains(&DType::U8) { 0 } else { -3 };
            let x = match from {
                DType::Bool => draw.bools([3]),
                _ if from.is_float() => draw.between(low as f64, 3.0, [6]),
                _ => of_type(from, small(draw, low, 3, &[2, 3])),
            };
            case(all, Op::Cast(Cast { to }), vec![x]);
        }
    }
    let x = draw.floats([2, 3]);
    case(all, Op::ScaledCast(ScaledCast { to: DType::F64, factor: 0.375 }), vec![x]);
}

/// Slopes of functions of one operand, each of which has a lemma of its own.
fn slopes(draw: &mut Draw, all: &mut Vec<Case>) {
    use BinaryFn::{GeluGrad, GeluTanhGrad, ReluGrad, SigmoidGrad, SiluGrad, TanhGrad};
    for f in [GeluGrad, GeluTanhGrad, ReluGrad, SigmoidGrad, SiluGrad, TanhGrad] {
        let rank = draw.size(0..=3);
        let shape = draw.shape(rank);
        let operands = vec![draw.floats(shape.clone()), draw.floats(shape)];
        case(all, Op::Binary(f), operands);
    }
}

fn rows(draw: &mut Draw, all: &mut Vec<Case>) {
    for axis in 0..3 {
        let dims = draw.shape(3);
        let operands = vec![draw.floats(dims.clone()), draw.floats(dims)];
        case(all, Op::SoftmaxGrad(SoftmaxGrad { axis }), operands.clone());
        case(all, Op::LogSoftmaxGrad(LogSoftmaxGrad { axis }), operands);
    }
    for lead in [vec![], vec![5], vec![2, 3], vec![1, 2]] {
        for (classes, ignore_index) in [(None, -100), (Some(3), 1), (Some(1), -1)] {
            let n: usize = lead.iter().product();
            let last = classes.unwrap_or(4) - 1;
            let label = |_| if draw.chance() { ignore_index } else { draw.size(0..=last) as i64 };
            let labels = (0..n).map(label).collect();
            let operands = vec![
                draw.floats(lead.clone()),
                draw.floats([&lead[..], &[4]].concat()),
                draw.integers(lead.clone(), labels),
                draw.floats(lead.clone()),
            ];
            let op = Op::CrossEntropyGrad(CrossEntropyGrad { ignore_index, classes });
            case(all, op, operands);
        }
    }
    for shape in [vec![], vec![6], vec![3, 2], vec![1, 4]] {
        let (rows, width) = (draw.size(2..=3), draw.size(1..=3));
        let mut operands = vec![
            draw.floats([&shape[..], &[width]].concat()),
            small(draw, 0, rows as i64 - 1, &shape),
        ];
        let op = Op::EmbeddingGrad(EmbeddingGrad { rows, dtype: DType::F64 });
        case(all, op.clone(), operands.clone());
        operands.push(draw.floats([rows, width]));
        case(all, op, operands);
    }
}

fn norms(draw: &mut Draw, all: &mut Vec<Case>) {
    for rank in 2..=3 {
        let dims: Vec<usize> = (0..rank).map(|_| draw.size(1..=3)).collect();
        let axis = draw.size(1..=rank - 1);
        let (rows, tail) = (&dims[..axis], &dims[axis..]);
        let [dy, x] = [0, 1].map(|_| draw.floats(dims.clone()));
        let scale = draw.floats(tail);
        let [mean, rstd] = [draw.floats(rows), draw.between(0.5, 2.0, rows)];
        let all_five = vec![dy.clone(), x.clone(), scale.clone(), mean.clone(), rstd.clone()];
        case(all, Op::LayerNormGradInput(LayerNormGradInput { axis }), all_five);
        let operands = vec![dy.clone(), x.clone(), mean, rstd.clone()];
        case(all, Op::LayerNormGradAffine(LayerNormGradAffine { axis }), operands);
        let operands = vec![dy.clone(), x.clone(), scale, rstd.clone()];
        case(all, Op::RmsNormGradInput(RmsNormGradInput { axis }), operands);
        let operands = vec![dy, x, rstd];
        case(all, Op::RmsNormGradScale(RmsNormGradScale { axis }), operands);
        let dims = [&[2, dims[1]], &dims[2..]].concat();
        let operands = vec![
            draw.floats(dims.clone()),
            draw.floats(dims.clone()),
            draw.floats([dims[1]]),
            draw.floats([dims[1]]),
            draw.between(0.5, 2.0, [dims[1]]),
        ];
        case(all, Op::BatchNormGrad(BatchNormGrad { eps: 0.1 }), operands);
    }
}

fn windows(draw: &mut Draw, all: &mut Vec<Case>) {
    for rank in 1..=2 {
        let (size, taps) = (vec![5; rank], vec![2; rank]);
        let mut window = Window::plain(rank);
        window.strides[0] = draw.size(1..=2);
        window.low[rank - 1] = draw.size(0..=1);
        window.dilations[0] = draw.size(1..=2);
        let positions = window.positions(&size, &taps).expect("it fits");
        let image = |c: usize, sizes: &[usize]| [&[2, c], sizes].concat();
        let (x, dy) = (draw.floats(image(2, &size)), draw.floats(image(2, &positions)));
        let op = MaxPoolGrad { window: window.clone(), taps: taps.clone() };
        case(all, Op::MaxPoolGrad(op), vec![dy.clone(), x.clone()]);
        let op = SumPoolGrad { window: window.clone(), taps: taps.clone(), size };
        case(all, Op::SumPoolGrad(op), vec![dy.clone()]);
        let op = ConvGradWeight { window, groups: draw.size(1..=2), taps, out: None };
        case(all, Op::ConvGradWeight(op), vec![dy, x]);
    }
}

fn attentions(draw: &mut Draw, all: &mut Vec<Case>) {
    for (causal, window) in [(false, None), (true, None), (true, Some(2)), (false, Some(1))] {
        for masked in [false, true] {
            let [b, g, t, s, d, e] = [1, 2, 3, 3, 2, 1];
            let h = g * draw.size(1..=2);
            let mut operands = vec![
                draw.floats([b, h, t, e]),
                draw.floats([b, h, t, d]),
                draw.floats([b, g, s, d]),
                draw.floats([b, g, s, e]),
                draw.floats([b, h, t, e]),
                draw.between(1.0, 2.0, [b, h, t]),
            ];
            if masked {
                operands.push(draw.floats([h, 1, s]));
            }
            let keep = draw.chance().then_some(0.75);
            operands.extend(keep.map(|_| draw.bools([b, h, t, s])));
            let op = AttentionGrad { scale: 0.5, causal, window, keep, mask_grad: masked };
            case(all, Op::AttentionGrad(op), operands);
        }
        // Scores that have no weight, of which every query sees others.
        let shape = draw.one_of(&[vec![3, 4], vec![2, 3, 4], vec![2, 1, 3, 4]]);
        let n = shape.iter().product::<usize>();
        let low = draw.one_of(&[-1e9, f64::NEG_INFINITY]);
        let mask = |k| if k % 4 != 0 && draw.chance() { low } else { 0.25 * k as f64 };
        let mask = (0..n).map(mask).collect();
        let shapes = [[2, 2, 3, 2], [2, 1, 4, 2], [2, 1, 4, 3]];
        let mut operands = shapes.map(|shape| draw.floats(shape)).to_vec();
        operands.push(draw.tensor(shape, mask));
        let keep = draw.chance().then_some(0.75);
        operands.extend(keep.map(|_| draw.bools([2, 2, 3, 4])));
        let op = Attention { scale: 0.75, causal, window: window.map(|n| n + 3), keep };
        case(all, Op::Attention(op), operands);
    }
}

/// What the passes after differentiation add.
fn steps(draw: &mut Draw, all: &mut Vec<Case>) {
    let f32s = |draw: &mut Draw, shape: &[usize]| {
        let (own, dtype) = (draw.dtype, DType::F32);
        draw.dtype = dtype;
        let drawn = draw.between(0.5, 2.0, shape);
        draw.dtype = own;
        drawn
    };
    let x = f32s(draw, &[]);
    case(all, Op::LossScale(LossScale { factor: 0.125 }), vec![x]);
    let operands = vec![f32s(draw, &[4]), f32s(draw, &[]), f32s(draw, &[])];
    case(all, Op::Unscale(Unscale { capacity: 6.0 }), operands);
    let operands = vec![f32s(draw, &[3 + DIGITS])];
    case(all, Op::RoundStats, operands);
    let operands = vec![draw.floats([2, 3]), draw.floats([4])];
    case(all, Op::GradStats(GradStats { exact: false }), operands);
    let operands = [0; 4].map(|_| draw.floats([3])).to_vec();
    let op = CustomGradient { call: 0, results: 2, function: "f".into() };
    case(all, Op::CustomGradient(op), operands);

    let mut body = Graph::new("body");
    let ty = TensorType::new(DType::F64, [2, 3]);
    let mut add = |op: Op, inputs: &[_]| {
        body.add1(op, inputs, Origin::none(), Region::Forward).expect("fits")
    };
    let [a, b] = ["a", "b"].map(|name| {
        let input = Input { name: name.into(), ty: ty.clone() };
        add(Op::Input(input), &[])
    });
    let negative = add(Op::Unary(UnaryFn::Neg), &[b]);
    let product = add(Op::Binary(BinaryFn::Mul), &[a, negative]);
    body.add_output("product", product, OutputKind::Result);
    body.add_output("negative", negative, OutputKind::Result);
    let operands = vec![draw.floats([2, 3]), draw.floats([2, 3])];
    case(all, Op::Fusion(Box::new(Fusion { kind: FusionKind::Pointwise, body })), operands);
}

/// Tables that are regular, nearly so, and not at all, read by an operation that is nothing but a sum.
fn constants(draw: &mut Draw, all: &mut Vec<Case>) {
    type Table = Box<dyn Fn(usize, usize) -> f64>;
    let (n, m) = (draw.size(1..=5), draw.size(2..=5));
    let at = draw.size(0..=n * m - 1);
    let shift = draw.size(0..=6) as f64 - 3.0;
    let tables: Vec<Table> = vec![
        Box::new(|_, _| 2.5),
        Box::new(|i, j| 3.0 * i as f64 - 2.0 * j as f64 + 1.0),
        Box::new(|i, _| 0.5 + i as f64),
        Box::new(move |i, j| f64::from(i as f64 - j as f64 >= shift)),
        Box::new(move |i, j| if (i as f64 - j as f64 - shift).abs() <= 1.0 { 0.0 } else { -9.0 }),
        Box::new(move |i, j| if i * m + j == at { 7.0 } else { i as f64 - j as f64 }),
        Box::new(move |i, j| if i * m + j == at { 7.0 } else { f64::from(i >= j) }),
        Box::new(|i, j| ((i * 7 + j * 5) % 11) as f64 / 3.0),
        Box::new(|_, j| ((j * 5) % 11) as f64 / 3.0),
    ];
    for table in tables {
        let elements = (0..n * m).map(|k| table(k / m, k % m)).collect();
        let x = draw.floats([n, m]);
        let table = (draw.tensor([n, m], elements).0, Kind::Constant);
        case(all, Op::Binary(BinaryFn::Add), vec![x, table]);
    }
}
