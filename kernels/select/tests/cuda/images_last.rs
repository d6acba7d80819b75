//! Convolution and pooling of images that lie channels last.

use crate::check::{Body, check_body, random, selected};
use frit_ir::interpret::{Options, eval_op};
use frit_ir::ops::{Conv, ConvGradInput, ConvGradWeight, Transpose, Window};
use frit_ir::ops::{MaxPool, MaxPoolGrad, SumPool, SumPoolGrad};
use frit_ir::plan::{Launch, OperationKind, Strided};
use frit_ir::{DType, Graph, Op, Tensor, ValueId};

/// Whether a value is an image with more than one place.
fn is_image(dims: &[usize]) -> bool {
    dims.len() > 2 && dims[2..].iter().any(|n| *n != 1)
}

/// The operands, and last the result, that are images or kernels with few channels, which stay as they are.
fn with_few_channels(op: &Op, operands: &[Tensor]) -> [bool; 3] {
    let few = |groups: usize, channels: usize| groups == 1 && channels < 8;
    let channels = |i: usize| operands[i].ty.shape.0[1];
    match op {
        Op::Conv(op) if few(op.groups, channels(1)) => [true, true, false],
        Op::ConvGradInput(op) if few(op.groups, channels(1)) => [false, true, true],
        Op::ConvGradWeight(op) if few(op.groups, channels(1)) => [false, true, true],
        _ => [false; 3],
    }
}

/// The operation between transposes, and its operands channels last.
fn between_transposes(op: Op, operands: &[Tensor]) -> (Graph, Vec<Tensor>) {
    let mut body = Body::new();
    let stay = with_few_channels(&op, operands);
    let (mut inputs, mut lying): (Vec<ValueId>, Vec<Tensor>) = (vec![], vec![]);
    for (operand, stays) in operands.iter().zip(stay) {
        let rank = operand.ty.shape.rank();
        if stays || !is_image(operand.ty.shape.dims()) {
            inputs.push(body.input(&operand.ty));
            lying.push(operand.clone());
            continue;
        }
        let to_last = Op::Transpose(Transpose::channels_last(rank));
        let last = eval_op(&to_last, &[operand], Options::default()).unwrap().remove(0);
        let input = body.input(&last.ty);
        inputs.push(body.add(Op::Transpose(Transpose::channels_first(rank)), &[input])[0]);
        lying.push(last);
    }
    let mut result = body.add(op, &inputs)[0];
    let dims = body.0.ty(result).shape.0.to_vec();
    if !stay[2] && is_image(&dims) {
        result = body.add(Op::Transpose(Transpose::channels_last(dims.len())), &[result])[0];
    }
    (body.outputs(&[result]), lying)
}

fn check_last(op: Op, operands: &[Tensor], tolerance: f64) -> Graph {
    let (body, operands) = between_transposes(op, operands);
    check_body(&body, &operands, tolerance);
    body
}

/// Forward and both gradients for `x[n, c, size]` and `filters` filters of `taps`, as bodies.
fn conv(
    dtype: DType,
    out: Option<DType>,
    window: &Window,
    groups: usize,
    [x, w]: [&[usize]; 2],
) -> [Graph; 3] {
    let positions = window.positions(&x[2..], &w[2..]).unwrap();
    let y = [&[x[0], w[0]], &positions[..]].concat();
    let (size, taps) = (x[2..].to_vec(), w[2..].to_vec());
    let (x, w, dy) = (random(dtype, x, 1), random(dtype, w, 2), random(dtype, &y, 3));
    let tolerance = if out.unwrap_or(dtype) == DType::F32 { 1e-4 } else { 2e-2 };
    let window = || window.clone();
    let forward = Op::Conv(Conv { window: window(), groups, out });
    let of_input = Op::ConvGradInput(ConvGradInput { window: window(), groups, size, out });
    let of_weight = Op::ConvGradWeight(ConvGradWeight { window: window(), groups, taps, out });
    [
        check_last(forward, &[x.clone(), w.clone()], tolerance),
        check_last(of_input, &[dy.clone(), w], tolerance),
        check_last(of_weight, &[dy, x], tolerance),
    ]
}

/// The launches of cuDNN's candidate, if there is one, and of the other.
fn candidates(body: &Graph) -> (Vec<Launch>, Vec<Launch>) {
    match &selected(body).launches[..] {
        [Launch::Choice(both)] => (both[0].launches.clone(), both[1].launches.clone()),
        own => (vec![], own.to_vec()),
    }
}

#[test]
fn windows_of_one_element_are_one_gemm() {
    let plain = Window::plain(2);
    for (dtype, out) in [
        (DType::BF16, None),
        (DType::F16, Some(DType::F32)),
        (DType::F32, None),
        (DType::F64, None),
    ] {
        for body in conv(dtype, out, &plain, 1, [&[2, 8, 5, 3], &[16, 8, 1, 1]]) {
            let own = candidates(&body).1;
            assert!(matches!(own[..], [Launch::Gemm(ref gemm)] if gemm.batch == 1), "{own:?}");
        }
    }
    conv(DType::F16, Some(DType::BF16), &plain, 1, [&[2, 5, 4, 3], &[3, 5, 1, 1]]);
    conv(DType::BF16, None, &Window::plain(1), 1, [&[2, 8, 9], &[8, 8, 1]]);
    conv(DType::BF16, None, &Window::plain(3), 1, [&[1, 8, 2, 3, 4], &[8, 8, 1, 1, 1]]);
}

#[test]
fn engines_read_and_write_channels_last_without_copies() {
    let same = Window { low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) };
    let strided = Window { strides: vec![2, 2], ..same.clone() };
    for (window, out) in [(&same, None), (&strided, Some(DType::F32))] {
        for body in conv(DType::BF16, out, window, 1, [&[2, 8, 7, 9], &[16, 8, 3, 3]]) {
            let [Launch::Operation(launch)] = &candidates(&body).0[..] else { panic!("{body}") };
            assert!(matches!(launch.operation.kind, OperationKind::Conv { .. }));
            assert!(launch.operation.tensors.iter().all(|t| t.strides[1] == 1), "{launch:?}");
        }
    }
}

#[test]
fn channels_that_are_no_whole_vectors_are_padded_for_engines() {
    let same = Window { low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) };
    for (out, x, w) in
        [(None, [2, 12, 5, 6], [16, 12, 3, 3]), (Some(DType::F32), [1, 8, 6, 5], [3, 8, 3, 3])]
    {
        for body in conv(DType::BF16, out, &same, 1, [&x, &w]) {
            assert_eq!(engine_of_whole_vectors(&body), vec![3, 3], "{body}");
        }
    }
}

/// The taps of the operation that is a candidate; all its tensors must lie channels last, in whole vectors.
fn engine_of_whole_vectors(body: &Graph) -> Vec<usize> {
    let launches = selected(body).launches;
    let choice = launches.iter().find_map(|launch| match launch {
        Launch::Choice(both) => Some(both[0].launches.clone()),
        _ => None,
    });
    let operations = choice.unwrap_or_default().into_iter().filter_map(|launch| match launch {
        Launch::Operation(launch) => Some(launch.operation),
        _ => None,
    });
    let [operation] = &operations.collect::<Vec<_>>()[..] else { panic!("{body}") };
    let whole = |t: &Strided| t.strides[1] == 1 && t.strides.iter().all(|s| *s == 1 || s % 8 == 0);
    assert!(operation.tensors.iter().all(whole), "{operation:?}");
    operation.tensors[1].sizes[2..].to_vec()
}

#[test]
fn images_with_few_channels_are_folded() {
    let window = |strides: [usize; 2], low: [usize; 2], high: [usize; 2]| Window {
        strides: strides.into(),
        low: low.into(),
        high: high.into(),
        ..Window::plain(2)
    };
    let dilated = Window { dilations: vec![2, 1], ..window([1, 2], [2, 1], [1, 2]) };
    let cases: [(Window, [usize; 4], [usize; 4], Option<[usize; 2]>); 8] = [
        // The first layer of ResNet, with even and odd sizes.
        (window([2, 2], [3, 3], [3, 3]), [2, 3, 10, 12], [16, 3, 7, 7], Some([4, 4])),
        (window([2, 2], [3, 3], [3, 3]), [1, 3, 9, 11], [8, 3, 7, 7], Some([4, 4])),
        (window([1, 1], [1, 1], [1, 1]), [2, 4, 5, 6], [8, 4, 3, 3], Some([3, 3])),
        // Patches: a GEMM.
        (window([4, 4], [0, 0], [0, 0]), [2, 3, 8, 12], [24, 3, 4, 4], Some([1, 1])),
        // Places behind the last window, axes of their own, and taps that no step has.
        (window([3, 2], [0, 1], [0, 0]), [2, 1, 11, 7], [8, 1, 2, 3], Some([1, 2])),
        (window([4, 3], [1, 4], [2, 0]), [1, 2, 9, 8], [16, 2, 5, 1], Some([2, 1])),
        (window([2, 5], [5, 0], [6, 3]), [1, 3, 4, 9], [8, 3, 3, 2], None),
        (dilated, [1, 3, 9, 8], [8, 3, 3, 2], Some([3, 2])),
    ];
    for (window, x, w, taps) in &cases {
        for out in [None, Some(DType::F32)] {
            let [forward, _, of_weight] = conv(DType::BF16, out, window, 1, [x, w]);
            for body in [(out.is_none(), forward), (true, of_weight)] {
                if let ((true, body), Some(taps)) = (body, taps) {
                    assert_eq!(engine_of_whole_vectors(&body), taps, "{body}");
                }
            }
        }
    }
    let line = Window { strides: vec![3], low: vec![2], high: vec![1], ..Window::plain(1) };
    conv(DType::F16, None, &line, 1, [&[2, 5, 14], &[8, 5, 7]]);
    let cube = Window { strides: vec![2, 1, 2], low: vec![1, 0, 1], ..Window::plain(3) };
    conv(DType::BF16, None, &cube, 1, [&[1, 2, 5, 3, 4], &[8, 2, 3, 2, 2]]);
}

#[test]
fn other_windows_are_computed_of_copies() {
    let uneven =
        Window { strides: vec![2, 1], dilations: vec![1, 2], low: vec![1, 0], high: vec![0, 3] };
    conv(DType::F32, None, &uneven, 1, [&[2, 3, 7, 9], &[4, 3, 3, 2]]);
    conv(DType::BF16, None, &uneven, 2, [&[2, 4, 6, 8], &[6, 2, 2, 3]]);
    conv(DType::BF16, None, &Window::plain(1), 17, [&[1, 34, 9], &[17, 2, 3]]);
    conv(DType::F16, None, &Window::plain(3), 1, [&[1, 2, 4, 3, 5], &[2, 2, 2, 3, 1]]);
    // Images in groups, kernels of one element, and results of one place.
    conv(DType::BF16, None, &Window::plain(2), 2, [&[2, 8, 3, 3], &[8, 4, 1, 1]]);
    conv(DType::BF16, None, &Window::plain(2), 1, [&[2, 8, 3, 3], &[16, 8, 3, 3]]);
}

#[test]
fn pools_and_their_gradients() {
    let windows = [
        (
            Window { strides: vec![2, 2], low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) },
            [3, 3],
        ),
        (Window { strides: vec![1, 3], dilations: vec![2, 1], ..Window::plain(2) }, [2, 3]),
    ];
    for (window, taps) in windows {
        for (dtype, channels) in [(DType::F32, 3), (DType::BF16, 8), (DType::F16, 12)] {
            let x = random(dtype, &[2, channels, 9, 8], 1);
            let positions = window.positions(&[9, 8], &taps).unwrap();
            let dy = random(dtype, &[2, channels, positions[0], positions[1]], 2);
            let (window, taps) = (|| window.clone(), taps.to_vec());
            let max = Op::MaxPool(MaxPool { window: window(), taps: taps.clone() });
            check_last(max, std::slice::from_ref(&x), 0.0);
            let max = Op::MaxPoolGrad(MaxPoolGrad { window: window(), taps: taps.clone() });
            let body = check_last(max, &[dy.clone(), x.clone()], 2e-2);
            // No copies.
            assert_eq!(selected(&body).launches.len(), 2);
            let sum = Op::SumPool(SumPool { window: window(), taps: taps.clone() });
            check_last(sum, &[x], 2e-2);
            let sum = Op::SumPoolGrad(SumPoolGrad { window: window(), taps, size: vec![9, 8] });
            check_last(sum, &[dy], 2e-2);
        }
    }
}
