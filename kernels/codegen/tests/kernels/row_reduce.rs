//! Row reductions: norms, softmax, cross-entropy, their gradients, and regions around them.

use crate::functions::reference;
use crate::harness::{Body, COLS, Case, FLOATS, check, normal};
use frit_codegen::supported;
use frit_ir::ops::{
    BinaryFn, Cast, CrossEntropy, CrossEntropyGrad, FusionKind, LayerNorm, LayerNormGradInput,
    LogSoftmax, LogSoftmaxGrad, Reduce, ReduceFn, Reshape, RmsNorm, RmsNormGradInput, Softmax,
    SoftmaxGrad, SumTo, UnaryFn,
};
use frit_ir::{DType, Graph, Op, Shape, Tensor};

const ROWS: usize = 6;

fn rows(t: &Tensor, cols: usize) -> impl Iterator<Item = &[f64]> {
    t.as_floats().unwrap().chunks(cols)
}

fn row_case(
    name: &str,
    body: frit_ir::Graph,
    inputs: Vec<Tensor>,
    expected: Vec<Vec<f64>>,
) -> Case {
    let kind = FusionKind::RowReduce;
    Case { name: name.into(), body, kind, inputs, expected, tolerance: 1e-6, floor: 1.0 }
}

fn each_size(f: impl Fn(DType, usize) -> Case) {
    let cases: Vec<Case> =
        FLOATS.iter().flat_map(|&d| COLS.map(|cols| (d, cols))).map(|(d, c)| f(d, c)).collect();
    check(&cases);
}

#[test]
fn softmax_sums_to_one_everywhere() {
    each_size(|dtype, cols| {
        let mut body = Body::new();
        let x = body.input(dtype, &[ROWS, cols]);
        let y = body.one(Op::Softmax(Softmax { axis: 1 }), &[x]);
        let z = body.one(Op::LogSoftmax(LogSoftmax { axis: 1 }), &[x]);
        let x = normal(dtype, &[ROWS, cols], 1, 3.0);
        let (mut soft, mut log) = (Vec::new(), Vec::new());
        for row in rows(&x, cols) {
            let max = row.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
            soft.extend(row.iter().map(|x| (x - max).exp() / sum));
            log.extend(row.iter().map(|x| x - max - sum.ln()));
        }
        let mut case =
            row_case(&format!("softmax {cols}"), body.done(&[y, z]), vec![x], vec![soft, log]);
        case.floor = 0.5;
        case
    });
}

#[test]
fn softmax_of_infinities_and_nan() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let mut body = Body::new();
    let x = body.input(DType::F32, &[4, 19]);
    let y = body.one(Op::Softmax(Softmax { axis: 1 }), &[x]);
    let mut values = vec![0.0; 76];
    values[1..19].fill(-inf);
    values[19..38].fill(-inf);
    values[40] = nan;
    values[60] = inf;
    let mut expected = vec![0.0; 76];
    expected[0] = 1.0;
    expected[19..76].fill(nan);
    // An infinite logit: the others vanish, its own share is ∞ − ∞.
    expected[57..76].fill(0.0);
    expected[60] = nan;
    // Their quotient by the row's sum, which is NaN, is NaN as well.
    expected[57..76].fill(nan);
    let x = Tensor::floats(DType::F32, [4, 19], values);
    check(&[row_case("softmax specials", body.done(&[y]), vec![x], vec![expected])]);
}

#[test]
fn softmax_gradients() {
    each_size(|dtype, cols| {
        let mut body = Body::new();
        let (dy, y) = (body.input(dtype, &[ROWS, cols]), body.input(dtype, &[ROWS, cols]));
        let dx = body.one(Op::SoftmaxGrad(SoftmaxGrad { axis: 1 }), &[dy, y]);
        let dl = body.one(Op::LogSoftmaxGrad(LogSoftmaxGrad { axis: 1 }), &[dy, y]);
        let inputs =
            vec![normal(dtype, &[ROWS, cols], 2, 1.0), normal(dtype, &[ROWS, cols], 3, 0.3)];
        let (mut soft, mut log) = (Vec::new(), Vec::new());
        for (dy, y) in rows(&inputs[0], cols).zip(rows(&inputs[1], cols)) {
            let dot: f64 = dy.iter().zip(y).map(|(a, b)| a * b).sum();
            let sum: f64 = dy.iter().sum();
            soft.extend(dy.iter().zip(y).map(|(dy, y)| y * (dy - dot)));
            log.extend(dy.iter().zip(y).map(|(dy, y)| dy - y.exp() * sum));
        }
        let mut case = row_case(
            &format!("softmax_grad {cols}"),
            body.done(&[dx, dl]),
            inputs,
            vec![soft, log],
        );
        case.floor = (cols as f64).sqrt();
        case
    });
}

#[test]
fn layer_norm_and_its_statistics() {
    each_size(|dtype, cols| {
        let mut body = Body::new();
        let x = body.input(dtype, &[2, ROWS / 2, cols]);
        let (w, b) = (body.input(DType::F32, &[cols]), body.input(DType::F32, &[cols]));
        let results = body.all(Op::LayerNorm(LayerNorm { axis: 2, eps: 1e-5 }), &[x, w, b]);
        // A mean far from zero: one-pass variances would cancel.
        let x = normal(DType::F32, &[2, ROWS / 2, cols], 4, 1.0);
        let x = x.as_floats().unwrap().iter().map(|x| x + 30.0).collect();
        let x = Tensor::floats(dtype, [2, ROWS / 2, cols], x);
        let inputs =
            vec![x, normal(DType::F32, &[cols], 5, 1.0), normal(DType::F32, &[cols], 6, 1.0)];
        let (w, b) = (inputs[1].as_floats().unwrap(), inputs[2].as_floats().unwrap());
        let mut expected = vec![Vec::new(); 3];
        for row in rows(&inputs[0], cols) {
            let mean = row.iter().sum::<f64>() / cols as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64;
            let rstd = 1.0 / (variance + 1e-5).sqrt();
            expected[0].extend((0..cols).map(|i| (row[i] - mean) * rstd * w[i] + b[i]));
            expected[1].push(mean);
            expected[2].push(rstd);
        }
        let mut case =
            row_case(&format!("layer_norm {cols}"), body.done(&results), inputs, expected);
        case.tolerance = 1e-5;
        case
    });
}

#[test]
fn layer_norm_gradient() {
    each_size(|dtype, cols| {
        let mut body = Body::new();
        let (dy, x) = (body.input(dtype, &[ROWS, cols]), body.input(dtype, &[ROWS, cols]));
        let w = body.input(DType::F32, &[cols]);
        let (mean, rstd) = (body.input(DType::F32, &[ROWS]), body.input(DType::F32, &[ROWS]));
        let op = Op::LayerNormGradInput(LayerNormGradInput { axis: 1 });
        let dx = body.one(op, &[dy, x, w, mean, rstd]);
        let inputs = vec![
            normal(dtype, &[ROWS, cols], 7, 1.0),
            normal(dtype, &[ROWS, cols], 8, 1.0),
            normal(DType::F32, &[cols], 9, 1.0),
            normal(DType::F32, &[ROWS], 10, 0.1),
            Tensor::floats(DType::F32, [ROWS], vec![0.9, 1.0, 1.1, 1.2, 0.8, 1.0]),
        ];
        let (w, mean, rstd) = (
            inputs[2].as_floats().unwrap(),
            inputs[3].as_floats().unwrap(),
            inputs[4].as_floats().unwrap(),
        );
        let mut expected = Vec::new();
        for (r, (dy, x)) in rows(&inputs[0], cols).zip(rows(&inputs[1], cols)).enumerate() {
            let hat: Vec<f64> = x.iter().map(|x| (x - mean[r]) * rstd[r]).collect();
            let g: Vec<f64> = dy.iter().zip(w).map(|(a, b)| a * b).collect();
            let a = g.iter().sum::<f64>() / cols as f64;
            let b = g.iter().zip(&hat).map(|(g, h)| g * h).sum::<f64>() / cols as f64;
            expected.extend((0..cols).map(|i| rstd[r] * (g[i] - a - hat[i] * b)));
        }
        row_case(&format!("layer_norm_grad {cols}"), body.done(&[dx]), inputs, vec![expected])
    });
}

#[test]
fn rms_norm_and_its_gradient() {
    each_size(|dtype, cols| {
        let mut body = Body::new();
        let (x, w) = (body.input(dtype, &[ROWS, cols]), body.input(DType::F32, &[cols]));
        let dy = body.input(dtype, &[ROWS, cols]);
        let y = body.all(Op::RmsNorm(RmsNorm { axis: 1, eps: 1e-6 }), &[x, w]);
        let dx = body.one(Op::RmsNormGradInput(RmsNormGradInput { axis: 1 }), &[dy, x, w, y[1]]);
        let inputs = vec![
            normal(dtype, &[ROWS, cols], 11, 1.0),
            normal(DType::F32, &[cols], 12, 1.0),
            normal(dtype, &[ROWS, cols], 13, 1.0),
        ];
        let w = inputs[1].as_floats().unwrap();
        let mut expected = vec![Vec::new(); 3];
        for (x, dy) in rows(&inputs[0], cols).zip(rows(&inputs[2], cols)) {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / cols as f64;
            let rstd = 1.0 / (mean + 1e-6).sqrt();
            expected[0].extend(x.iter().zip(w).map(|(x, w)| x * rstd * w));
            expected[1].push(rstd);
            let dot: f64 = (0..cols).map(|i| dy[i] * w[i] * x[i] * rstd).sum();
            let b = dot / cols as f64;
            expected[2].extend((0..cols).map(|i| rstd * (dy[i] * w[i] - x[i] * rstd * b)));
        }
        let mut case =
            row_case(&format!("rms_norm {cols}"), body.done(&[y[0], y[1], dx]), inputs, expected);
        // One column of a small value makes rstd large.
        case.tolerance = if cols == 1 { 1e-3 } else { 2e-6 };
        case.floor = 4.0;
        case
    });
}

#[test]
fn cross_entropy_with_ignored_and_wrong_labels() {
    for (dtype, cols) in FLOATS.into_iter().flat_map(|dtype| [(dtype, 253), (dtype, 1)]) {
        let mut body = Body::new();
        let (x, labels) = (body.input(dtype, &[ROWS, cols]), body.input(DType::I64, &[ROWS]));
        let op = Op::CrossEntropy(CrossEntropy::ignoring(-100));
        let results = body.all(op, &[x, labels]);
        let last = cols as i64 - 1;
        let label = [0, last, -100, last.min(17), last + 1, -1];
        let inputs = vec![
            normal(dtype, &[ROWS, cols], 14, 3.0),
            Tensor::ints(DType::I64, [ROWS], label.into()),
        ];
        let mut expected = vec![Vec::new(); 2];
        for (row, label) in rows(&inputs[0], cols).zip(label) {
            let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
            expected[0].push(match usize::try_from(label) {
                _ if label == -100 => 0.0,
                Ok(label) if label < cols => lse - row[label],
                _ => f64::NAN,
            });
            expected[1].push(lse);
        }
        check(&[row_case("cross_entropy", body.done(&results), inputs, expected)]);
    }
}

/// The loss of rows of padded logits and its gradient, in one kernel.
fn loss_with_gradient(
    dtype: DType,
    classes: usize,
    cols: usize,
) -> (Graph, Vec<Tensor>, Vec<Vec<f64>>) {
    let mut body = Body::new();
    let (x, labels) = (body.input(dtype, &[ROWS, cols]), body.input(DType::I64, &[ROWS]));
    let dy = body.input(DType::F32, &[ROWS]);
    let classes_of = (classes < cols).then_some(classes);
    let op = CrossEntropy { ignore_index: -100, classes: classes_of };
    let forward = body.all(Op::CrossEntropy(op), &[x, labels]);
    let op = CrossEntropyGrad { ignore_index: -100, classes: classes_of };
    let dx = body.one(Op::CrossEntropyGrad(op), &[dy, x, labels, forward[1]]);
    let last = classes as i64 - 1;
    let label = [0, last, -100, last.min(17), last / 2, last];
    let dlosses: Vec<f64> = (0..ROWS).map(|r| 0.25 * (r as f64 - 1.5)).collect();
    let inputs = vec![
        normal(dtype, &[ROWS, cols], 14, 3.0),
        Tensor::ints(DType::I64, [ROWS], label.into()),
        Tensor::floats(DType::F32, [ROWS], dlosses.clone()),
    ];
    let mut expected = vec![Vec::new(); 2];
    for ((row, label), dloss) in rows(&inputs[0], cols).zip(label).zip(dlosses) {
        let lse = row[..classes].iter().map(|x| x.exp()).sum::<f64>().ln();
        let class = usize::try_from(label).ok();
        expected[0].push(class.map_or(0.0, |class| lse - row[class]));
        expected[1].extend((0..cols).map(|c| match class {
            Some(class) if c < classes => {
                dloss * ((row[c] - lse).exp() - f64::from(u8::from(c == class)))
            }
            _ => 0.0,
        }));
    }
    (body.done(&[forward[0], dx]), inputs, expected)
}

#[test]
fn the_loss_of_padded_logits_and_its_gradient() {
    for dtype in FLOATS {
        for (classes, cols) in [(253, 253), (253, 256), (1, 8), (2000, 2048), (4095, 8192)] {
            let (body, inputs, expected) = loss_with_gradient(dtype, classes, cols);
            check(&[row_case("loss and gradient", body, inputs, expected)]);
        }
    }
}

#[test]
fn plain_reductions_with_a_prologue_and_an_epilogue() {
    let (b, cols) = (4, 300);
    let mut cases = Vec::new();
    for f in [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Max, ReduceFn::Min, ReduceFn::Prod] {
        for keep_dims in [false, true] {
            let mut body = Body::new();
            let (x, bias) =
                (body.input(DType::F32, &[b, 3, 100]), body.input(DType::F32, &[b, 1, 1]));
            let sum = body.one(Op::Binary(BinaryFn::Add), &[x, bias]);
            let r = body.one(Op::Reduce(Reduce { f, axes: vec![1, 2], keep_dims }), &[sum]);
            let y = body.one(Op::Unary(UnaryFn::Tanh), &[r]);
            let mut outputs = vec![y];
            if keep_dims {
                outputs.push(body.one(Op::Binary(BinaryFn::Sub), &[sum, r]));
            }
            let scale = if f == ReduceFn::Prod { 0.01 } else { 1.0 };
            let offset = if f == ReduceFn::Prod { 1.0 } else { 0.0 };
            let x = normal(DType::F32, &[b, 3, 100], 15, scale);
            let bias = Tensor::floats(DType::F32, [b, 1, 1], vec![offset; b]);
            let mut expected = vec![Vec::new(); outputs.len()];
            for row in rows(&x, cols) {
                let row: Vec<f64> = row.iter().map(|x| x + offset).collect();
                let r = match f {
                    ReduceFn::Sum => row.iter().sum::<f64>(),
                    ReduceFn::Mean => row.iter().sum::<f64>() / cols as f64,
                    ReduceFn::Max => row.iter().copied().fold(f64::MIN, f64::max),
                    ReduceFn::Min => row.iter().copied().fold(f64::MAX, f64::min),
                    ReduceFn::Prod => row.iter().product(),
                };
                expected[0].push(reference(UnaryFn::Tanh, r));
                if keep_dims {
                    expected[1].extend(row.iter().map(|x| x - r));
                }
            }
            let mut case = row_case(
                &format!("{f:?} keep {keep_dims}"),
                body.done(&outputs),
                vec![x, bias],
                expected,
            );
            case.tolerance = 1e-5;
            cases.push(case);
        }
    }
    check(&cases);
}

#[test]
fn max_keeps_nan_in_every_position() {
    let cols = 200;
    let mut body = Body::new();
    let x = body.input(DType::BF16, &[cols, cols]);
    let op = Reduce { f: ReduceFn::Max, axes: vec![1], keep_dims: false };
    let y = body.one(Op::Reduce(op), &[x]);
    let mut values = vec![1.0; cols * cols];
    (0..cols).for_each(|i| values[i * cols + i] = f64::NAN);
    let x = Tensor::floats(DType::BF16, [cols, cols], values);
    check(&[row_case("max of nan", body.done(&[y]), vec![x], vec![vec![f64::NAN; cols]])]);
}

#[test]
fn integer_sums() {
    let mut body = Body::new();
    let x = body.input(DType::I64, &[3, 21]);
    let y = body.one(Op::SumTo(SumTo { shape: Shape::from([3, 1]), dtype: None }), &[x]);
    let x = Tensor::ints(DType::I64, [3, 21], (0..63).map(|i| i * i - 500).collect());
    let sums: Vec<f64> =
        x.as_ints().unwrap().chunks(21).map(|r| r.iter().sum::<i64>() as f64).collect();
    check(&[row_case("integer sum", body.done(&[y]), vec![x], vec![sums])]);
}

#[test]
fn a_residual_a_norm_and_a_cast_are_one_kernel() {
    // What follows every attention block: the sum is stored, normalized, and cast for the next matmul.
    let cols = 96;
    let mut body = Body::new();
    let (x, r) = (body.input(DType::F32, &[ROWS, cols]), body.input(DType::BF16, &[2, 3, cols]));
    let r = body.one(Op::Reshape(Reshape { shape: Shape::from([ROWS, cols]) }), &[r]);
    let r = body.one(Op::Cast(Cast { to: DType::F32 }), &[r]);
    let sum = body.one(Op::Binary(BinaryFn::Add), &[x, r]);
    let w = body.input(DType::F32, &[cols]);
    let y = body.all(Op::LayerNorm(LayerNorm { axis: 1, eps: 1e-5 }), &[sum, w]);
    let low = body.one(Op::Cast(Cast { to: DType::BF16 }), &[y[0]]);
    let inputs = vec![
        normal(DType::F32, &[ROWS, cols], 16, 1.0),
        normal(DType::BF16, &[2, 3, cols], 17, 1.0),
        normal(DType::F32, &[cols], 18, 1.0),
    ];
    let mut expected = vec![Vec::new(); 2];
    let w = inputs[2].as_floats().unwrap();
    for (x, r) in rows(&inputs[0], cols).zip(rows(&inputs[1], cols)) {
        let s: Vec<f64> = x.iter().zip(r).map(|(a, b)| a + b).collect();
        let mean = s.iter().sum::<f64>() / cols as f64;
        let variance = s.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64;
        expected[1].extend((0..cols).map(|i| (s[i] - mean) / (variance + 1e-5).sqrt() * w[i]));
        expected[0].extend(s);
    }
    check(&[row_case("residual norm", body.done(&[sum, low]), inputs, expected)]);
}

#[test]
fn a_masked_softmax_broadcasts_its_mask_over_heads() {
    let (b, h, t) = (2, 3, 21);
    let mut body = Body::new();
    let (x, mask) = (body.input(DType::F32, &[b, h, t, t]), body.input(DType::Bool, &[b, 1, 1, t]));
    let scale = body.constant(DType::F32, 0.125);
    let scaled = body.one(Op::Binary(BinaryFn::Mul), &[x, scale]);
    let low = body.constant(DType::F32, f64::NEG_INFINITY);
    let masked = body.one(Op::Select, &[mask, scaled, low]);
    let y = body.one(Op::Softmax(Softmax { axis: 3 }), &[masked]);
    let x = normal(DType::F32, &[b, h, t, t], 19, 8.0);
    let on = |b: usize, k: usize| !(b + k).is_multiple_of(3);
    let mask = (0..b * t).map(|i| i64::from(on(i / t, i % t))).collect();
    let mut expected = Vec::new();
    for (r, row) in rows(&x, t).enumerate() {
        let exps: Vec<f64> =
            (0..t).map(|k| if on(r / (h * t), k) { (row[k] * 0.125).exp() } else { 0.0 }).collect();
        let sum: f64 = exps.iter().sum();
        expected.extend(exps.iter().map(|e| e / sum));
    }
    let inputs = vec![x, Tensor::ints(DType::Bool, [b, 1, 1, t], mask)];
    check(&[row_case("masked softmax", body.done(&[y]), inputs, vec![expected])]);
}

#[test]
fn rows_of_one_column_and_reshaped_reductions() {
    // The statistics of a [4, 6] value seen as [2, 2, 6] and subtracted from it.
    let mut body = Body::new();
    let x = body.input(DType::F32, &[4, 6]);
    let double = body.one(Op::Binary(BinaryFn::Add), &[x, x]);
    let cube = body.one(Op::Reshape(Reshape { shape: Shape::from([2, 2, 6]) }), &[double]);
    let mean = Reduce { f: ReduceFn::Mean, axes: vec![2], keep_dims: true };
    let mean = body.one(Op::Reduce(mean), &[cube]);
    let centered = body.one(Op::Binary(BinaryFn::Sub), &[cube, mean]);
    let flat = body.one(Op::Reshape(Reshape { shape: Shape::from([4, 6]) }), &[centered]);
    let x = normal(DType::F32, &[4, 6], 20, 1.0);
    let mut expected = Vec::new();
    for row in rows(&x, 6) {
        let mean = row.iter().sum::<f64>() / 3.0;
        expected.extend(row.iter().map(|x| 2.0 * x - mean));
    }
    check(&[row_case("reshaped", body.done(&[flat]), vec![x], vec![expected])]);
}

#[test]
fn a_softmax_over_another_axis_is_refused() {
    let mut body = Body::new();
    let x = body.input(DType::F32, &[4, 5, 6]);
    let y = body.one(Op::Softmax(Softmax { axis: 1 }), &[x]);
    let reason = supported(&body.done(&[y]), FusionKind::RowReduce).unwrap_err();
    assert_eq!(reason.op, "softmax");
}
