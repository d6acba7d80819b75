//! Convolution and pooling of images that lie channels last.

use crate::check::{Body, check_body, check_launches, random, selected};
use frit_ir::interpret::{Options, eval_op};
use frit_ir::ops::{Conv, ConvGradInput, ConvGradWeight, Transpose, Window};
use frit_ir::ops::{MaxPool, MaxPoolGrad, SumPool, SumPoolGrad};
use frit_ir::plan::{Argument, Launch, OperationKind, SourceKernel, Strided};
use frit_ir::{DType, Graph, Op, Tensor, TensorType, ValueId};

/// Whether a value is an image with more than one place.
fn is_image(dims: &[usize]) -> bool {
    dims.len() > 2 && dims[2..].iter().any(|n| *n != 1)
}

/// The operands, and last the result, that are images or kernels with few channels, which stay as they are.
fn with_few_channels(op: &Op, types: &[TensorType]) -> [bool; 3] {
    let few = |groups: usize, channels: usize| groups == 1 && channels < 8;
    let channels = |i: usize| types[i].shape.0[1];
    match op {
        Op::Conv(op) if few(op.groups, channels(1)) => [true, true, false],
        Op::ConvGradInput(op) if few(op.groups, channels(1)) => [false, true, true],
        Op::ConvGradWeight(op) if few(op.groups, channels(1)) => [false, true, true],
        _ => [false; 3],
    }
}

/// The operation between transposes of all images but those that stay as they are.
fn between_transposes(op: Op, types: &[TensorType], stay: [bool; 3]) -> Graph {
    let mut body = Body::new();
    let mut inputs: Vec<ValueId> = vec![];
    for (ty, stays) in types.iter().zip(stay) {
        let dims = ty.shape.dims();
        if stays || !is_image(dims) {
            inputs.push(body.input(ty));
            continue;
        }
        let last = [&dims[..1], &dims[2..], &dims[1..2]].concat();
        let input = body.input(&TensorType::new(ty.dtype, last));
        inputs.push(body.add(Op::Transpose(Transpose::channels_first(dims.len())), &[input])[0]);
    }
    let mut result = body.add(op, &inputs)[0];
    let dims = body.0.ty(result).shape.0.to_vec();
    if !stay[2] && is_image(&dims) {
        result = body.add(Op::Transpose(Transpose::channels_last(dims.len())), &[result])[0];
    }
    body.outputs(&[result])
}

/// The operand with its channels last.
fn lying(operand: &Tensor) -> Tensor {
    if !is_image(operand.ty.shape.dims()) {
        return operand.clone();
    }
    let to_last = Op::Transpose(Transpose::channels_last(operand.ty.shape.rank()));
    eval_op(&to_last, &[operand], Options::default()).unwrap().remove(0)
}

fn check_last(op: Op, operands: &[Tensor], tolerance: f64) -> Graph {
    let types: Vec<TensorType> = operands.iter().map(|t| t.ty.clone()).collect();
    let stay = with_few_channels(&op, &types);
    let body = between_transposes(op, &types, stay);
    let lie = |(t, stays): (&Tensor, bool)| if stays { t.clone() } else { lying(t) };
    check_body(&body, &operands.iter().zip(stay).map(lie).collect::<Vec<_>>(), tolerance);
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
    type Case = (Window, [usize; 4], [usize; 4], Option<[usize; 2]>);
    let cases: [Case; 8] = [
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

/// The first layer of ResNet-50 at batch 256, and the gradient of its weights.
pub(crate) fn first_layer() -> [Graph; 2] {
    let window =
        Window { strides: vec![2, 2], low: vec![3, 3], high: vec![3, 3], ..Window::plain(2) };
    let [x, w, dy] = [[256, 3, 224, 224], [64, 3, 7, 7], [256, 64, 112, 112]]
        .map(|dims| TensorType::new(DType::BF16, dims));
    let forward = Op::Conv(Conv { window: window.clone(), groups: 1, out: None });
    let (taps, out) = (vec![7, 7], Some(DType::F32));
    let of_weight = Op::ConvGradWeight(ConvGradWeight { window, groups: 1, taps, out });
    [(forward, [x.clone(), w]), (of_weight, [dy, x])].map(|(op, types)| {
        let stay = with_few_channels(&op, &types);
        between_transposes(op, &types, stay)
    })
}

#[test]
fn the_first_layer_of_a_large_batch_is_folded() {
    for body in first_layer() {
        let first = selected(&body).launches.swap_remove(0);
        assert!(
            matches!(first, Launch::Source(ref kernel) if kernel.file == "conv_fold"),
            "{body}"
        );
        assert_eq!(engine_of_whole_vectors(&body), [4, 4]);
    }
}

/// The gradient of the weights of a convolution of `x` by `w`.
pub(crate) fn grad_weight_body(
    dtype: DType,
    out: Option<DType>,
    window: &Window,
    [x, w]: [&[usize]; 2],
) -> Graph {
    let positions = window.positions(&x[2..], &w[2..]).unwrap();
    let op = ConvGradWeight { window: window.clone(), groups: 1, taps: w[2..].to_vec(), out };
    let dy = [&[x[0], w[0]], &positions[..]].concat();
    let types = [dy, x.to_vec()].map(|dims| TensorType::new(dtype, dims));
    between_transposes(Op::ConvGradWeight(op), &types, [false; 3])
}

/// The operands of a body, and the sources that Frit's own candidate launches.
fn operands_and_sources(body: &Graph) -> (Vec<Tensor>, Vec<SourceKernel>) {
    let inputs = body.nodes().map(|(_, n)| n).filter(|n| matches!(n.op, Op::Input(_)));
    let operands = inputs.enumerate().map(|(i, node)| {
        let ty = body.ty(node.outputs[0]);
        random(ty.dtype, ty.shape.dims(), i as u64)
    });
    let sources = candidates(body).1.into_iter().filter_map(|launch| match launch {
        Launch::Source(kernel) => Some(kernel),
        _ => None,
    });
    (operands.collect(), sources.collect())
}

#[test]
fn gradients_of_weights_read_images_as_they_lie() {
    let same = Window { low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) };
    let strided = Window { strides: vec![2, 2], ..same.clone() };
    let uneven =
        Window { strides: vec![2, 1], dilations: vec![1, 2], low: vec![1, 0], high: vec![0, 3] };
    let line = Window { low: vec![2], ..Window::plain(1) };
    let (b, f) = (DType::BF16, DType::F16);
    let wide = Some(DType::F32);
    let cases: [(_, _, &Window, &[usize], &[usize]); 8] = [
        (b, wide, &same, &[2, 24, 7, 5], &[40, 24, 3, 3]),
        (f, None, &same, &[1, 136, 5, 6], &[72, 136, 3, 3]),
        (f, wide, &strided, &[2, 8, 9, 8], &[136, 8, 3, 3]),
        (b, None, &uneven, &[3, 8, 9, 11], &[8, 8, 3, 2]),
        (
            b,
            wide,
            &Window { strides: vec![2, 2], ..Window::plain(2) },
            &[2, 64, 5, 7],
            &[16, 64, 1, 1],
        ),
        (b, Some(DType::F16), &line, &[2, 8, 45], &[16, 8, 3]),
        (f, wide, &Window::plain(3), &[1, 16, 4, 3, 5], &[8, 16, 2, 3, 1]),
        // Several parts, the last of which is shorter.
        (b, wide, &same, &[3, 8, 19, 23], &[16, 8, 3, 3]),
    ];
    for (i, (dtype, out, window, x, w)) in cases.into_iter().enumerate() {
        let body = grad_weight_body(dtype, out, window, [x, w]);
        let (operands, sources) = operands_and_sources(&body);
        let files: Vec<&str> = sources.iter().map(|kernel| &kernel.file[..]).collect();
        let parts: &[&str] = if i == 7 { &["reduce"] } else { &[] };
        assert_eq!(files, [&["conv_last_grad_weight"], parts].concat());
        let tolerance = if out == wide { 1e-4 } else { 2e-2 };
        check_body(&body, &operands, tolerance);
    }
}

#[test]
fn channels_and_filters_are_padded_to_whole_vectors() {
    let same =
        Window { strides: vec![2, 2], low: vec![3, 3], high: vec![3, 3], ..Window::plain(2) };
    for (out, x, w) in [
        (Some(DType::F32), [2, 3, 9, 11], [16, 3, 7, 7]),
        (None, [2, 3, 33, 35], [16, 3, 7, 7]),
        (Some(DType::F32), [1, 8, 6, 5], [3, 8, 3, 3]),
        (None, [2, 9, 7, 8], [12, 9, 3, 2]),
    ] {
        let body = grad_weight_body(DType::BF16, out, &same, [&x, &w]);
        let (operands, sources) = operands_and_sources(&body);
        let first = sources.iter().find(|kernel| !kernel.file.starts_with("copy"));
        assert_eq!(first.map(|kernel| &kernel.file[..]), Some("conv_last_grad_weight"));
        check_body(&body, &operands, if out.is_some() { 1e-4 } else { 2e-2 });
    }
}

#[test]
fn every_tile_of_the_gradient_of_weights() {
    let same = Window { low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) };
    let (m, c) = (136, 40);
    for (cached, dtype, x) in [(1, DType::BF16, [1, c, 9, 11]), (0, DType::F16, [2, c, 17, 19])] {
        let body = grad_weight_body(dtype, Some(DType::F32), &same, [&x, &[m, c, 3, 3]]);
        let (operands, _) = operands_and_sources(&body);
        for (rows, columns, warps) in
            [(64, 128, 4), (64, 192, 4), (128, 128, 4), (128, 192, 8), (128, 256, 8)]
        {
            let mut entry = selected(&body);
            let mut launches = candidates(&body).1;
            for launch in &mut launches {
                let Launch::Source(kernel) = launch else { panic!("{launch:?}") };
                if kernel.file != "conv_last_grad_weight" {
                    continue;
                }
                for (name, value) in &mut kernel.defines {
                    match &name[..] {
                        "TILE_M" => *value = rows.to_string(),
                        "TILE_N" => *value = columns.to_string(),
                        "CACHED" => *value = cached.to_string(),
                        _ => {}
                    }
                }
                let Some(Argument::I64(splits)) = kernel.arguments.last() else { panic!() };
                kernel.grid[0] =
                    (m.div_ceil(rows) * (9 * c).div_ceil(columns)) as u32 * *splits as u32;
                kernel.block = 32 * warps;
                kernel.shared_bytes = ((rows + columns) * 32 * 2 * 4) as u32;
            }
            entry.launches = launches;
            check_launches(&body, entry, &operands, 1e-4);
        }
    }
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
