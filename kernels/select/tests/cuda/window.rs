//! Convolution, pooling and batch normalization.

use crate::check::{check, random};
use frit_ir::ops::{BatchNorm, BatchNormGrad, Conv, ConvGradInput, ConvGradWeight};
use frit_ir::ops::{MaxPool, MaxPoolGrad, SumPool, SumPoolGrad, Window};
use frit_ir::{DType, Op, Tensor};

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

/// Pooling of `x[n, c, size]` and the gradients; maxima occur more than once in a window, and one is NaN.
fn pool(dtype: DType, window: &Window, x: &[usize], taps: &[usize]) {
    let image = random(dtype, x, 1);
    let mut values = image.to_f64s();
    values.iter_mut().for_each(|v| *v = (*v * 8.0).round() / 8.0);
    values[3] = f64::NAN;
    let image = Tensor::floats(dtype, image.shape().clone(), values);
    let size = x[2..].to_vec();
    let positions = window.positions(&size, taps).unwrap();
    let dy = random(dtype, &[&x[..2], &positions[..]].concat(), 2);
    let (w, t) = (|| window.clone(), || taps.to_vec());
    check(Op::MaxPool(MaxPool { window: w(), taps: t() }), std::slice::from_ref(&image), 0.0);
    check(Op::SumPool(SumPool { window: w(), taps: t() }), std::slice::from_ref(&image), 2e-3);
    check(Op::MaxPoolGrad(MaxPoolGrad { window: w(), taps: t() }), &[dy.clone(), image], 2e-3);
    check(Op::SumPoolGrad(SumPoolGrad { window: w(), taps: t(), size }), &[dy], 2e-3);
}

#[test]
fn pools_and_their_gradients() {
    let dilated = Window { high: vec![0, 1], ..uneven() };
    let window = |strides: &[usize], low: &[usize], high: &[usize]| Window {
        strides: strides.into(),
        low: low.into(),
        high: high.into(),
        ..Window::plain(strides.len())
    };
    for dtype in [DType::F32, DType::F16] {
        pool(dtype, &dilated, &[2, 3, 6, 7], &[3, 2]);
        pool(dtype, &window(&[2, 1], &[1, 0], &[0, 1]), &[2, 3, 6, 7], &[3, 2]);
        pool(dtype, &window(&[2, 3], &[1, 0], &[1, 0]), &[2, 3, 6, 7], &[3, 2]);
        pool(dtype, &window(&[2], &[2], &[2]), &[3, 2, 11], &[3]);
        pool(dtype, &window(&[1, 2, 2], &[0, 1, 1], &[0, 1, 1]), &[1, 2, 4, 5, 3], &[2, 3, 2]);
    }
    pool(DType::F64, &window(&[2, 2], &[1, 1], &[1, 1]), &[1, 2, 5, 4], &[2, 3]);
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
