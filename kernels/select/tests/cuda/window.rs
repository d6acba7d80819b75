//! Convolution, pooling and batch normalization.

use crate::check::{Body, body_of, check, check_body, random, selected_with_kernels};
use frit_ir::interpret::{Options, eval_op};
use frit_ir::ops::{BatchNorm, BatchNormGrad, Conv, ConvGradInput, ConvGradWeight};
use frit_ir::ops::{BinaryFn, UnaryFn};
use frit_ir::ops::{MaxPool, MaxPoolGrad, SumPool, SumPoolGrad, Window};
use frit_ir::plan::Launch;
use frit_ir::{DType, Graph, Op, Tensor, TensorType, ValueId};
use frit_kernels::dtype::Elem;
use frit_kernels::routine::pooling::Pooling;
use std::collections::HashMap;

fn uneven() -> Window {
    Window { strides: vec![2, 1], dilations: vec![1, 2], low: vec![1, 0], high: vec![0, 3] }
}

/// Forward and both gradients for `x[n, c, size]`, `filters` filters of `taps`.
fn conv(
    dtype: DType,
    out: Option<DType>,
    window: &Window,
    groups: usize,
    x: &[usize],
    w: &[usize],
) {
    let positions = window.positions(&x[2..], &w[2..]).unwrap();
    let y = [&[x[0], w[0]], &positions[..]].concat();
    let (size, taps) = (x[2..].to_vec(), w[2..].to_vec());
    let (x, w, dy) = (random(dtype, x, 1), random(dtype, w, 2), random(dtype, &y, 3));
    let tolerance = if out.unwrap_or(dtype) == DType::F32 { 1e-4 } else { 2e-2 };
    let window = || window.clone();
    check(Op::Conv(Conv { window: window(), groups, out }), &[x.clone(), w.clone()], tolerance);
    let op = ConvGradInput { window: window(), groups, size, out };
    check(Op::ConvGradInput(op), &[dy.clone(), w], tolerance);
    let op = ConvGradWeight { window: window(), groups, taps, out };
    check(Op::ConvGradWeight(op), &[dy, x], tolerance);
}

#[test]
fn convolutions_by_gemms() {
    conv(DType::F32, None, &uneven(), 1, &[2, 3, 7, 9], &[4, 3, 3, 2]);
    conv(DType::BF16, None, &uneven(), 2, &[2, 4, 6, 8], &[6, 2, 2, 3]);
    conv(DType::BF16, Some(DType::F32), &Window::plain(2), 1, &[2, 5, 4, 3], &[3, 5, 1, 1]);
    conv(DType::F16, Some(DType::BF16), &Window::plain(1), 1, &[2, 3, 9], &[2, 3, 4]);
    conv(DType::F32, None, &Window::plain(3), 1, &[1, 2, 4, 3, 5], &[2, 2, 2, 3, 1]);
}

#[test]
fn convolutions_on_tensor_cores() {
    let (bf16, f16) = (DType::BF16, DType::F16);
    let same = Window { low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) };
    // More rows and columns than one tile, odd numbers of positions, steps that end within a channel.
    conv(bf16, None, &same, 1, &[3, 9, 7, 9], &[130, 9, 3, 3]);
    conv(f16, None, &same, 2, &[2, 140, 6, 6], &[20, 70, 3, 3]);
    let strided = Window { strides: vec![2, 2], ..same.clone() };
    conv(bf16, Some(DType::F32), &strided, 1, &[2, 5, 13, 12], &[7, 5, 3, 3]);
    conv(
        bf16,
        None,
        &Window { strides: vec![2, 2], ..Window::plain(2) },
        1,
        &[2, 16, 8, 8],
        &[33, 16, 1, 1],
    );
    conv(bf16, None, &uneven(), 1, &[1, 2, 9, 11], &[3, 2, 3, 2]);
    // Sums over many positions are split.
    conv(bf16, None, &same, 1, &[6, 3, 16, 16], &[4, 3, 3, 3]);
    conv(f16, Some(DType::F32), &Window::plain(2), 1, &[4, 6, 16, 16], &[10, 6, 1, 1]);
    let line = Window { strides: vec![3], low: vec![2], high: vec![1], ..Window::plain(1) };
    conv(bf16, None, &line, 1, &[2, 4, 50], &[8, 4, 7]);
    conv(bf16, None, &Window::plain(3), 1, &[2, 3, 4, 5, 6], &[4, 3, 2, 3, 2]);
}

#[test]
fn weights_whose_gradients_are_those_of_images() {
    let plain = Window::plain(2);
    conv(DType::BF16, Some(DType::F32), &plain, 1, &[3, 6, 8, 8], &[10, 6, 1, 1]);
    conv(DType::BF16, None, &plain, 2, &[2, 8, 16, 16], &[6, 4, 1, 1]);
    conv(DType::F32, None, &plain, 1, &[2, 4, 4, 5], &[5, 4, 1, 1]);
    conv(DType::F64, None, &Window::plain(1), 3, &[4, 3, 22], &[6, 1, 1]);
    let batches = |side: usize, filters: usize| {
        let [dy, x] = [filters, 8].map(|n| TensorType::new(DType::BF16, [4, n, side, side]));
        let (taps, out) = (vec![1, 1], Some(DType::F32));
        let op = ConvGradWeight { window: Window::plain(2), groups: 1, taps, out };
        let body = body_of(Op::ConvGradWeight(op), &[&dy, &x]);
        let all = selected_with_kernels(&body).entry.launches;
        // The last candidate is not a library's.
        let own = all.iter().flat_map(|launch| match launch {
            Launch::Choice(candidates) => candidates.last().map_or(&[][..], |c| &c.launches),
            other => std::slice::from_ref(other),
        });
        own.filter(|l| matches!(l, Launch::Gemm(gemm) if gemm.batch == 4)).count()
    };
    assert_eq!(batches(8, 8), 1);
    // Rows of 98 bytes, and gradients that are many beside their images.
    assert_eq!(batches(7, 8), 0);
    assert_eq!(batches(2, 64), 0);
}

#[test]
fn convolutions_whose_sums_cudnn_writes_as_f32() {
    let (bf16, wide) = (DType::BF16, Some(DType::F32));
    conv(bf16, wide, &uneven(), 1, &[2, 8, 7, 9], &[16, 8, 3, 2]);
    let line = Window { strides: vec![3], low: vec![2], high: vec![1], ..Window::plain(1) };
    conv(DType::F16, wide, &line, 2, &[2, 16, 20], &[32, 8, 4]);
    conv(bf16, wide, &Window::plain(3), 1, &[1, 8, 3, 4, 5], &[8, 8, 2, 3, 2]);
    conv(bf16, wide, &Window::plain(2), 1, &[2, 8, 3, 5], &[16, 8, 1, 1]);
}

#[test]
fn convolutions_of_many_groups() {
    conv(DType::F32, None, &uneven(), 20, &[2, 20, 5, 6], &[40, 1, 3, 2]);
    conv(DType::BF16, None, &Window::plain(1), 17, &[1, 34, 9], &[17, 2, 3]);
}

/// Images whose maxima occur more than once in a window, with a NaN and with neighbors that are all -inf.
fn images(dtype: DType, x: &[usize]) -> Tensor {
    let image = random(dtype, x, 1);
    let mut values = image.to_f64s();
    values.iter_mut().for_each(|v| *v = (*v * 8.0).round() / 8.0);
    values[3] = f64::NAN;
    let rows: usize = x[3..].iter().product();
    values.iter_mut().skip(5).take(4 * rows).for_each(|v| *v = f64::NEG_INFINITY);
    Tensor::floats(dtype, x, values)
}

/// Pooling of `x[n, c, size]` and the gradients.
fn pool(dtype: DType, window: &Window, x: &[usize], taps: &[usize]) {
    let image = images(dtype, x);
    let size = x[2..].to_vec();
    let positions = window.positions(&size, taps).unwrap();
    let dy = random(dtype, &[&x[..2], &positions[..]].concat(), 2);
    let (w, t) = (|| window.clone(), || taps.to_vec());
    check(Op::MaxPool(MaxPool { window: w(), taps: t() }), std::slice::from_ref(&image), 0.0);
    check(Op::SumPool(SumPool { window: w(), taps: t() }), std::slice::from_ref(&image), 2e-3);
    check(Op::MaxPoolGrad(MaxPoolGrad { window: w(), taps: t() }), &[dy.clone(), image], 2e-3);
    check(Op::SumPoolGrad(SumPoolGrad { window: w(), taps: t(), size }), &[dy], 2e-3);
}

fn padded(strides: &[usize], low: &[usize], high: &[usize]) -> Window {
    Window {
        strides: strides.into(),
        low: low.into(),
        high: high.into(),
        ..Window::plain(strides.len())
    }
}

#[test]
fn pools_and_their_gradients() {
    let dilated = Window { high: vec![0, 1], ..uneven() };
    let window = padded;
    for dtype in [DType::F32, DType::F16] {
        pool(dtype, &dilated, &[2, 3, 6, 7], &[3, 2]);
        pool(dtype, &window(&[2, 1], &[1, 0], &[0, 1]), &[2, 3, 6, 7], &[3, 2]);
        pool(dtype, &window(&[2, 3], &[1, 0], &[1, 0]), &[2, 3, 6, 7], &[3, 2]);
        pool(dtype, &window(&[2], &[2], &[2]), &[3, 2, 11], &[3]);
        pool(dtype, &window(&[1, 2, 2], &[0, 1, 1], &[0, 1, 1]), &[1, 2, 4, 5, 3], &[2, 3, 2]);
    }
    pool(DType::F64, &window(&[2, 2], &[1, 1], &[1, 1]), &[1, 2, 5, 4], &[2, 3]);
}

#[test]
fn gradients_of_neighbors_in_one_thread() {
    for dtype in [DType::F32, DType::F16] {
        pool(dtype, &padded(&[2, 2], &[1, 1], &[1, 1]), &[2, 2, 10, 16], &[3, 3]);
        pool(dtype, &padded(&[1, 1], &[1, 1], &[1, 1]), &[1, 2, 6, 24], &[3, 3]);
        pool(dtype, &padded(&[3, 4], &[0, 2], &[2, 1]), &[1, 2, 9, 16], &[3, 5]);
        // Gaps between windows, and between taps.
        pool(dtype, &padded(&[2, 4], &[0, 0], &[0, 0]), &[1, 2, 4, 16], &[1, 2]);
        for stride in [1, 2, 4] {
            let window = Window { dilations: vec![2, 3], ..padded(&[3, stride], &[1, 3], &[2, 1]) };
            pool(dtype, &window, &[2, 2, 11, 16], &[3, 3]);
        }
        // One window, and more taps than are unrolled or than bytes count.
        pool(dtype, &Window::plain(2), &[2, 2, 7, 8], &[7, 8]);
        pool(dtype, &Window::plain(2), &[1, 2, 20, 24], &[18, 19]);
        pool(dtype, &Window::plain(1), &[1, 2, 96], &[70]);
    }
}

#[test]
fn windows_whose_steps_exceed_32_bits() {
    let strides = vec![1 << 33];
    pool(DType::F32, &Window { strides, ..Window::plain(1) }, &[2, 2, 11], &[4]);
    // Two dilations are more than 32 bits hold, but not what one window spans.
    let far =
        Window { dilations: vec![1_200_000_000], high: vec![1_200_000_000], ..Window::plain(1) };
    pool(DType::F32, &far, &[1, 1, 11], &[2]);
}

#[test]
fn gradients_of_maxima_are_added_as_on_the_cpu() {
    for (width, stride) in [(16, 2), (16, 1), (15, 2), (9, 3)] {
        let window = padded(&[2, stride], &[1, 1], &[1, 1]);
        let (size, taps) = ([9, width], [5, 5]);
        let x = images(DType::F32, &[2, 3, size[0], size[1]]);
        let positions = window.positions(&size, &taps).unwrap();
        let dy = random(DType::F32, &[2, 3, positions[0], positions[1]], 2);
        let pooling = Pooling {
            elem: Elem::F32,
            images: 6,
            window: frit_kernels::window::Window {
                input: [1, size[0], size[1]],
                output: [1, positions[0], positions[1]],
                taps: [1, 5, 5],
                strides: [1, 2, stride],
                dilations: [1; 3],
                low: [0, 1, 1],
            },
        };
        let floats = |t: &Tensor| t.to_f64s().into_iter().map(|v| v as f32).collect::<Vec<_>>();
        let (of_y, of_x, mut expected) = (floats(&dy), floats(&x), floats(&x));
        // SAFETY: the vectors have these shapes.
        unsafe {
            let (dy, x) = (of_y.as_ptr().cast(), of_x.as_ptr().cast());
            pooling.max_grad(
                &frit_kernels::pool::Pool::new(1),
                dy,
                x,
                expected.as_mut_ptr().cast(),
            );
        }
        let op = MaxPoolGrad { window, taps: taps.to_vec() };
        let found = crate::check::result(&Op::MaxPoolGrad(op), &[dy, x]);
        assert_eq!(floats(&found), expected, "{width} elements, stride {stride}");
    }
}

/// Forward and gradient for `x[n, c, …]`.
fn batch_norm(dtype: DType, x: &[usize]) {
    let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
    let (image, dy) = (random(dtype, x, 1), random(dtype, x, 4));
    let vector = |seed| random(DType::F32, &x[1..2], seed);
    let op = BatchNorm { eps: 1e-5 };
    check(Op::BatchNorm(op), &[image.clone(), vector(2), vector(3)], tolerance);
    let var = vector(7).to_f64s().into_iter().map(|v| 0.25 + v.abs()).collect();
    let var = Tensor::floats(DType::F32, [x[1]], var);
    let operands = [dy, image, vector(5), vector(6), var];
    check(Op::BatchNormGrad(BatchNormGrad { eps: 1e-5 }), &operands, tolerance);
}

#[test]
fn batch_normalization() {
    for dtype in [DType::F32, DType::BF16] {
        batch_norm(dtype, &[3, 4, 5, 2]);
        batch_norm(dtype, &[3, 16, 5, 2]);
        batch_norm(dtype, &[9, 8]);
        batch_norm(dtype, &[2, 8, 7]);
        batch_norm(dtype, &[2, 8, 3, 2, 2]);
        // Channels that several blocks share, by vectors and by single elements.
        batch_norm(dtype, &[5, 2, 64, 64]);
        batch_norm(dtype, &[3, 3, 37, 41]);
    }
}

/// A body with the results of `build`, which receives its operands.
fn body(
    operands: &[Tensor],
    build: impl Fn(&mut Body, &[ValueId]) -> Vec<ValueId>,
) -> (Graph, Vec<ValueId>) {
    let mut body = Body::new();
    let inputs: Vec<ValueId> = operands.iter().map(|t| body.input(&t.ty)).collect();
    let results = build(&mut body, &inputs);
    (body.outputs(&results), results)
}

/// The results of a body are equal bits to those of its operations one by one, of which kernels compute batch
/// normalizations, and the interpreter the others.
fn same_as_alone(graph: &Graph, results: &[ValueId], operands: &[Tensor]) {
    let mut known: HashMap<ValueId, Tensor> = HashMap::new();
    let mut feeds = operands.iter();
    for (_, node) in graph.nodes() {
        let inputs: Vec<Tensor> = node.inputs.iter().map(|v| known[v].clone()).collect();
        let refs: Vec<&Tensor> = inputs.iter().collect();
        let outputs = match &node.op {
            Op::Input(_) => vec![feeds.next().expect("an operand").clone()],
            Op::BatchNorm(_) | Op::BatchNormGrad(_) => {
                let types: Vec<_> = refs.iter().map(|t| &t.ty).collect();
                crate::check::results(&body_of(node.op.clone(), &types), &inputs)
            }
            op => eval_op(op, &refs, Options::default()).unwrap(),
        };
        known.extend(node.outputs.iter().copied().zip(outputs));
    }
    let found = crate::check::results(graph, operands);
    for (i, (value, found)) in results.iter().zip(&found).enumerate() {
        assert!(known[value].to_bytes() == found.to_bytes(), "result {i} of\n{graph}");
    }
}

/// The regions of `passes::fuse::batch_norm`: either term of a sum may be the normalized one, and the gradient that
/// passes the ReLU may be a result.
#[test]
fn batch_normalization_with_relu() {
    let cases = [
        (DType::F32, &[3, 4, 5, 2][..]),
        (DType::F32, &[9, 8]),
        (DType::BF16, &[3, 16, 4, 4]),
        (DType::F16, &[2, 3, 7]),
        // Channels that several blocks share, by vectors and by single elements.
        (DType::BF16, &[10, 2, 64, 64]),
        (DType::F32, &[4, 3, 47, 45]),
    ];
    for (dtype, shape) in cases {
        let tolerance = if dtype.is_low_precision() { 4e-2 } else { 1e-5 };
        let image = |seed| random(dtype, shape, seed);
        let vector = |seed| random(DType::F32, &shape[1..2], seed);
        let var = vector(7).to_f64s().into_iter().map(|v| 0.25 + v.abs()).collect();
        let var = Tensor::floats(DType::F32, [shape[1]], var);
        let run = |graph: (Graph, Vec<ValueId>), operands: &[Tensor]| {
            check_body(&graph.0, operands, tolerance);
            same_as_alone(&graph.0, &graph.1, operands);
        };
        for sum in [None, Some(0), Some(1)] {
            let add = |body: &mut Body, y: ValueId, other: &[ValueId]| match (sum, other) {
                (Some(0), [other]) => body.add(Op::Binary(BinaryFn::Add), &[y, *other])[0],
                (Some(_), [other]) => body.add(Op::Binary(BinaryFn::Add), &[*other, y])[0],
                _ => y,
            };
            let n = usize::from(sum.is_some());
            let all = [image(1), vector(2), vector(3), image(4)];
            let operands = &all[..3 + n];
            let forward = body(operands, |body, v| {
                let norm = body.add(Op::BatchNorm(BatchNorm { eps: 1e-5 }), &v[..3]);
                let y = add(body, norm[0], &v[3..]);
                let y = body.add(Op::Unary(UnaryFn::Relu), &[y])[0];
                vec![norm[1], y, norm[2]]
            });
            run(forward, operands);
            let all = [image(1), vector(2), vector(3), var.clone(), image(4), image(5), image(6)];
            let operands = &all[..6 + n];
            for is_kept in [false, true] {
                let gradient = body(operands, |body, v| {
                    let dy = add(body, v[4], &v[6..]);
                    let passed = body.add(Op::Binary(BinaryFn::ReluGrad), &[dy, v[5]])[0];
                    let op = Op::BatchNormGrad(BatchNormGrad { eps: 1e-5 });
                    let results = body.add(op, &[passed, v[0], v[1], v[2], v[3]]);
                    is_kept.then_some(passed).into_iter().chain(results).collect()
                });
                run(gradient, operands);
            }
        }
    }
}

/// A sum that is a result, too, and a normalization of which not all results are.
#[test]
fn bodies_that_write_other_values_have_no_kernels() {
    let types = [[2, 3, 4].to_vec(), vec![3], vec![3]];
    let operands = types.map(|shape| random(DType::F32, &shape, 1));
    for other in [0, 2] {
        let (graph, _) = body(&operands, |body, v| {
            let norm = body.add(Op::BatchNorm(BatchNorm { eps: 1e-5 }), v);
            let y = body.add(Op::Unary(UnaryFn::Relu), &norm[..1])[0];
            let results = [y, norm[1], norm[other]];
            results[..if other == 0 { 3 } else { 2 }].to_vec()
        });
        assert!(frit_select::cuda(&graph, frit_select::Options::default()).is_none(), "{graph}");
    }
}
